"""The experts' feed-forward networks: a loop, grouped products, or imbrex's kernels."""

from imbrex.experts.experts import Activation, Experts, Shard, SharedExpert, surely_fit

__all__ = ["Activation", "Experts", "Shard", "SharedExpert", "surely_fit"]
