"""Recorded loads: how often every expert was chosen in every iteration. Plans are made from them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from imbrex.placement.packing import Floats, Ints

MOST_EXPERTS = 1 << 20
"""The most experts; a larger id is taken for an error, since counts of so many would not fit into memory."""
MOST_CHOICES = 1 << 53
"""The most choices of all iterations: sums of more would be rounded, or overflow."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LoadHistory:
    """Choices of every logical expert, summed over ranks, so that a plan can be for any number of ranks.

    counts_ILE: int64 [iterations, layers, experts]. layers: the model's numbers of these layers. top_k:
    choices per token; 0 if unknown. first_iteration: the number of the first one.

    Raises ValueError if the counts are negative or of another shape.
    """

    counts_ILE: Ints
    layers: tuple[int, ...]
    top_k: int = 0
    first_iteration: int = 0

    def __post_init__(self) -> None:
        counts = self.counts_ILE
        if counts.ndim != 3 or not counts.size:
            raise ValueError(
                f"statistics: counts have shape {counts.shape}; give [iterations, layers, experts]"
            )
        if len(self.layers) != counts.shape[1] or len(set(self.layers)) < len(self.layers):
            raise ValueError(f"statistics: {counts.shape[1]} layers are numbered {list(self.layers)}")
        if counts.dtype != np.int64 or (counts < 0).any():
            raise ValueError("statistics: counts must be int64 and not negative")
        if counts.sum(dtype=np.float64) > MOST_CHOICES:
            raise ValueError("statistics: counts of more than 2^53 choices in all; they are of no run")

    @property
    def num_experts(self) -> int:
        return self.counts_ILE.shape[2]

    @property
    def num_iterations(self) -> int:
        return self.counts_ILE.shape[0]

    def window(self, begin: int, end: int) -> LoadHistory:
        """The iterations `begin <= i < end`, by number. Raises ValueError if there are none."""
        first = self.first_iteration
        window_ILE = self.counts_ILE[max(begin - first, 0) : max(end - first, 0)]
        if not len(window_ILE):
            raise ValueError(
                f"statistics: no iteration from {begin} to {end}; there are {first} to "
                f"{first + self.num_iterations - 1}"
            )
        return LoadHistory(
            counts_ILE=window_ILE, layers=self.layers, top_k=self.top_k, first_iteration=max(begin, first)
        )

    def pool(self, number: int) -> LoadHistory:
        """The history with every `number` successive iterations summed into one; a remainder is dropped.
        Raises ValueError if there are too few."""
        whole = self.num_iterations // number
        if not whole:
            raise ValueError(f"statistics: {self.num_iterations} iterations, fewer than the {number} to sum")
        counts = self.counts_ILE[: whole * number]
        pooled = counts.reshape(whole, number, *counts.shape[1:]).sum(1, dtype=np.int64)
        return LoadHistory(counts_ILE=pooled, layers=self.layers, top_k=self.top_k)

    def load(self, decay: float = 1.0) -> Floats:
        """The load of every expert, float64 [L, E]: the sum over iterations, each with `decay` times the
        weight of the next one."""
        if not 0 < decay <= 1:
            raise ValueError(f"statistics: decay {decay}; use a number above 0, up to 1")
        weights_I = decay ** np.arange(self.num_iterations)[::-1]
        return np.tensordot(weights_I, self.counts_ILE, axes=1)


def check_ids(ids: NDArray[np.integer], num_experts: int) -> None:
    """Raise ValueError where an id is no expert's; -1 is a choice that was dropped."""
    if num_experts > MOST_EXPERTS:
        raise ValueError(f"trace: {num_experts} experts; more than {MOST_EXPERTS} are no layer's")
    if ids.size and (ids.min() < -1 or ids.max() >= num_experts):
        raise ValueError(f"trace: expert ids from {ids.min()} to {ids.max()}; use -1 to {num_experts - 1}")


def history_of_ids(ids_LTK: NDArray[np.integer], num_experts: int, batch: int) -> LoadHistory:
    """Build a history from a trace of tokens: every `batch` tokens are an iteration, and a remainder is
    dropped.

    ids_LTK: integers [layers, tokens, choices], `-1` for a dropped choice.
    """
    num_layers, num_tokens, top_k = ids_LTK.shape
    if not 1 <= batch <= num_tokens:
        raise ValueError(f"trace: batches of {batch} tokens from {num_tokens}; use 1 to {num_tokens}")
    check_ids(ids_LTK, num_experts)
    whole = num_tokens // batch
    ids = ids_LTK[:, : whole * batch].astype(np.int64).reshape(num_layers, whole, batch * top_k)
    row = np.arange(num_layers)[:, None, None] * whole + np.arange(whole)[:, None]
    bins = (row * (num_experts + 1) + ids + 1).ravel()
    counts = np.bincount(bins, minlength=num_layers * whole * (num_experts + 1))
    counts_LIE = counts.reshape(num_layers, whole, num_experts + 1)[:, :, 1:]
    return LoadHistory(
        counts_ILE=counts_LIE.transpose(1, 0, 2).astype(np.int64).copy(),
        layers=tuple(range(num_layers)),
        top_k=top_k,
    )
