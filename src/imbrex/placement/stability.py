"""How well the load of one batch predicts that of the next, which every balancer relies on; from recorded
loads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from imbrex.placement.history import LoadHistory
from imbrex.placement.packing import Floats, Held, Ints

DECAYS = (0.0, 0.3, 0.5, 0.7, 0.8, 0.9, 0.95, 0.98, 1.0)


@dataclass(frozen=True, kw_only=True, slots=True)
class Stability:
    """How well loads predict later loads.

    correlation_L: the correlation over experts of a layer's loads in neighbouring iterations, in the mean
    over iterations. error_by_decay: the total-variation distance, 0 to 1, between the next iteration's shares
    and those of the decayed sum, in the mean over layers and iterations. best_decay: the decay with the
    lowest error.

    Only neighbouring iterations count that both have choices. Layers without such are left out.
    """

    correlation_L: Floats
    error_by_decay: dict[float, float]
    best_decay: float


def stability(history: LoadHistory) -> Stability:
    """How stable a history is. Raises ValueError if it has fewer than two iterations, or no two neighbouring
    ones with choices."""
    if history.num_iterations < 2:
        raise ValueError("stability: one iteration has no neighbour; give at least 2")
    had_IL = np.asarray(history.counts_ILE.any(-1))
    both_IL = had_IL[:-1] & had_IL[1:]
    able_L = both_IL.any(0)
    if not able_L.any():
        raise ValueError("stability: nothing was chosen in any two neighbouring iterations; record again")
    counts_ILE, both_IL = history.counts_ILE[:, able_L], both_IL[:, able_L]
    shares_ILE = _shares(counts_ILE)
    errors = {decay: _prediction_error(counts_ILE, shares_ILE, both_IL, decay) for decay in DECAYS}
    correlation_IL = correlations(shares_ILE[:-1], shares_ILE[1:])
    return Stability(
        correlation_L=correlation_IL.sum(0, where=both_IL) / both_IL.sum(0),
        error_by_decay=errors,
        best_decay=min(errors, key=lambda decay: errors[decay]),
    )


def between(histories: Sequence[LoadHistory]) -> Floats:
    """The correlations of the summed loads of histories with each other, in the mean over layers in which
    both have choices: float64 [H, H]. They say how much requests, or tasks, resemble each other. Raises
    ValueError if they are of different models, or have no such layer."""
    loads = [_shares(history.counts_ILE.sum(0)) for history in histories]
    if len({load.shape for load in loads}) > 1:
        raise ValueError("stability: the histories have different layers or experts; give those of one model")
    return np.array([[_resemblance(a, b) for b in loads] for a in loads])


def _resemblance(left_LE: Floats, right_LE: Floats) -> float:
    both_L = left_LE.any(-1) & right_LE.any(-1)
    if not both_L.any():
        raise ValueError("stability: two histories have choices in no layer together; record again")
    return float(correlations(left_LE[both_L], right_LE[both_L]).mean())


def correlations(left: Floats, right: Floats) -> Floats:
    """Pearson's correlation over the last axis; 0 where all experts have equal loads."""
    left, right = left - left.mean(-1, keepdims=True), right - right.mean(-1, keepdims=True)
    scale = np.sqrt((left**2).sum(-1) * (right**2).sum(-1))
    return np.where(scale > 0, (left * right).sum(-1) / np.where(scale > 0, scale, 1), 0.0)


def _shares(counts: Ints) -> Floats:
    return counts / np.maximum(counts.sum(-1, keepdims=True), 1)


def _prediction_error(counts_ILE: Ints, shares_ILE: Floats, both_IL: Held, decay: float) -> float:
    total_LE = np.zeros(counts_ILE.shape[1:])
    errors = []
    for counts_LE, next_LE in zip(counts_ILE[:-1], shares_ILE[1:], strict=True):
        total_LE = total_LE * decay + counts_LE
        predicted = total_LE / np.maximum(total_LE.sum(-1, keepdims=True), 1e-300)
        errors.append(np.abs(predicted - next_LE).sum(-1) / 2)
    return float(np.mean(errors, where=both_IL))
