"""Serving: a language model whose attention is data-parallel and whose experts are spread over ranks, in
lockstep.

Read `engine` first: the loop. `decoding` has the two steps that it repeats, `model` what they compute.
docs/serving.md has the data flow and what always holds.
"""
