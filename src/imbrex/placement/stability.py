"""Does the load of one batch tell that of the next? The premise of every balancer, tested on statistics."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from imbrex.placement.history import LoadHistory
from imbrex.placement.packing import Floats, Ints

DECAYS = (0.0, 0.3, 0.5, 0.7, 0.8, 0.9, 0.95, 0.98, 1.0)


@dataclass(frozen=True, kw_only=True, slots=True)
class Stability:
    """How well loads predict later loads.

    correlation_L: of a layer's loads in neighbouring iterations, over experts, mean over iterations.
    error_by_decay: mean over layers and iterations of the total-variation distance, 0 to 1, between the next
    iteration's shares and the decayed sum's. best_decay: the decay with the least."""

    correlation_L: Floats
    error_by_decay: dict[float, float]
    best_decay: float


def stability(history: LoadHistory) -> Stability:
    """Raises ValueError with fewer than two iterations, and without choices."""
    if history.num_iterations < 2:
        raise ValueError("stability: one iteration has no neighbour; give at least 2")
    if not history.counts_ILE.any():
        raise ValueError("stability: nothing was chosen in any iteration; record again")
    shares_ILE = _shares(history.counts_ILE)
    errors = {decay: _prediction_error(history.counts_ILE, shares_ILE, decay) for decay in DECAYS}
    return Stability(
        correlation_L=correlations(shares_ILE[:-1], shares_ILE[1:]).mean(0),
        error_by_decay=errors,
        best_decay=min(errors, key=lambda decay: errors[decay]),
    )


def between(histories: Sequence[LoadHistory]) -> Floats:
    """Correlation of the whole loads of histories with each other, mean over layers, float64 [H, H]: how
    much requests, or tasks, resemble each other. Raises ValueError where they are of different models."""
    loads = [_shares(history.counts_ILE.sum(0)) for history in histories]
    if len({load.shape for load in loads}) > 1:
        raise ValueError("stability: the histories have different layers or experts; give those of one model")
    return np.array([[correlations(a, b).mean() for b in loads] for a in loads])


def correlations(left: Floats, right: Floats) -> Floats:
    """Pearson's, over the last axis; 0 where all experts are equal."""
    left, right = left - left.mean(-1, keepdims=True), right - right.mean(-1, keepdims=True)
    scale = np.sqrt((left**2).sum(-1) * (right**2).sum(-1))
    return np.where(scale > 0, (left * right).sum(-1) / np.where(scale > 0, scale, 1), 0.0)


def _shares(counts: Ints) -> Floats:
    return counts / np.maximum(counts.sum(-1, keepdims=True), 1)


def _prediction_error(counts_ILE: Ints, shares_ILE: Floats, decay: float) -> float:
    total_LE = np.zeros(counts_ILE.shape[1:])
    errors = []
    for counts_LE, next_LE in zip(counts_ILE[:-1], shares_ILE[1:], strict=True):
        total_LE = total_LE * decay + counts_LE
        predicted = total_LE / np.maximum(total_LE.sum(-1, keepdims=True), 1e-300)
        errors.append(np.abs(predicted - next_LE).sum(-1).mean() / 2)
    return float(np.mean(errors))
