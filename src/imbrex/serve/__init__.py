"""Serving of a language model on several ranks in lockstep. Attention is data-parallel, and experts are
spread over the ranks.

Read `engine` first, the loop; then `decoding`, the two steps that it repeats, and `model`, what they compute.
docs/serving.md describes the data flow and the invariants.
"""
