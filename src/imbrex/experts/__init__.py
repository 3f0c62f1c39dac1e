"""The experts' feed-forward networks: a loop, grouped products, or imbrex's kernels."""

from imbrex.experts.experts import (
    Activation,
    Experts,
    ExternalExperts,
    Shard,
    give_away,
    surely_fit,
    weights_of_kernels,
)
from imbrex.experts.shared import SharedExpert

__all__ = [
    "Activation",
    "Experts",
    "ExternalExperts",
    "Shard",
    "SharedExpert",
    "give_away",
    "surely_fit",
    "weights_of_kernels",
]
