"""Expert capacity: which choices are kept when an expert takes at most C of the global batch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from imbrex.router.global_batch import GlobalBatch

DIGIT_BITS = 8


@dataclass(frozen=True, kw_only=True, slots=True)
class Capacity:
    """The most choices that an expert takes: C = ceil(factor * top_k * tokens / num_experts), tokens of the
    global batch. Choices above it are dropped.

    Formula (1) of ScheMoE (EuroSys 2024); rounded up, so that `factor` 1 holds a perfectly balanced batch.
    drop_by: `position` keeps first choices of all tokens before second ones, and among those the earlier rank
        and the earlier token (GShard); `probability` keeps the largest weights, equal ones by position.
    pad: the plan fills every expert up to C rows with zeros.
    """

    factor: float = 1.0
    drop_by: Literal["position", "probability"] = "position"
    pad: bool = False

    def __post_init__(self):
        if not 0 < self.factor < float("inf"):
            raise ValueError(f"Capacity: factor={self.factor}; choose a finite number above 0")
        if self.drop_by not in ("position", "probability"):
            raise ValueError(f"Capacity: drop_by={self.drop_by!r}; choose 'position' or 'probability'")

    def limit(self, tokens: Tensor, top_k: int, num_experts: int) -> Tensor:
        """C for an int64 scalar number of tokens, as int64 scalar on its device."""
        exact = tokens.double() * (self.factor * top_k / num_experts)
        # 1e-6: a product that is a whole number but for rounding is not rounded up.
        return (exact - 1e-6).ceil().clamp(min=0).long()


def keep(
    ids_TK: Tensor, weights_TK: Tensor, num_experts: int, capacity: Capacity, batch: GlobalBatch
) -> Tensor:
    """Bool [T, K]: the choices that `capacity` keeps. Collective over `batch`; no host synchronisation."""
    tokens, top_k = ids_TK.shape
    limit = capacity.limit(batch.count(tokens, ids_TK.device), top_k, num_experts)
    everyone_TK = torch.ones_like(ids_TK, dtype=torch.bool)
    if capacity.drop_by == "position":
        return queue(ids_TK, everyone_TK, num_experts, batch) < limit
    # Of NaN the sign, too, is chance: without it NaN is the largest key, so that it is kept and seen.
    keys_TK = weights_TK.detach().abs().contiguous().view(torch.int32).long()
    threshold_E, above_E = thresholds(ids_TK, keys_TK, limit, num_experts, batch)
    edge_TK = threshold_E[ids_TK]
    ties_TK = keys_TK == edge_TK
    place_TK = queue(ids_TK, ties_TK, num_experts, batch) + above_E[ids_TK]
    return (keys_TK > edge_TK) | (ties_TK & (place_TK < limit))


def queue(ids_TK: Tensor, waiting_TK: Tensor, num_experts: int, batch: GlobalBatch) -> Tensor:
    """Place of every waiting choice in its expert's queue over all ranks: int64 [T, K], from 0.

    Choice 0 of all tokens comes before choice 1, within it the earlier rank, then the earlier token. The
    places of choices that do not wait mean nothing.
    """
    tokens, top_k = ids_TK.shape
    device = ids_TK.device
    lanes = top_k * num_experts
    lane_KT = ids_TK.T + num_experts * torch.arange(top_k, device=device).unsqueeze(1)
    lane_N = torch.where(waiting_TK.T, lane_KT, lanes).flatten()
    order_N = lane_N.argsort(stable=True)
    counts_L = torch.zeros(lanes + 1, dtype=torch.int64, device=device)
    counts_L = counts_L.scatter_add(0, lane_N, torch.ones_like(lane_N))
    starts_L = counts_L.cumsum(0) - counts_L
    local_N = torch.arange(top_k * tokens, device=device) - starts_L[lane_N[order_N]]

    earlier_KE, total_KE = (x.view(top_k, num_experts) for x in batch.before(counts_L[:lanes]))
    first_KE = total_KE.cumsum(0) - total_KE + earlier_KE
    place_N = torch.zeros_like(local_N).scatter(0, order_N, local_N)
    return (place_N + first_KE.flatten()[lane_N.clamp(max=lanes - 1)]).view(top_k, tokens).T


def thresholds(
    ids_TK: Tensor, keys_TK: Tensor, limit: Tensor, num_experts: int, batch: GlobalBatch
) -> tuple[Tensor, Tensor]:
    """The `limit`-th largest key of every expert over all ranks (0 if it has fewer), and how many are larger.

    keys_TK: int64 below 2**31 (the bits of a non-negative float32 are ordered as the float is).
    Found digit by digit from the top: a histogram of the next digit among the keys that agree so far, summed
    over ranks, tells the digit of the threshold. Four sums of [E, 256], whatever the numbers of tokens.
    """
    bins = 1 << DIGIT_BITS
    ids_N, keys_N = ids_TK.flatten(), keys_TK.flatten()
    threshold_E = torch.zeros(num_experts, dtype=torch.int64, device=ids_N.device)
    above_E = torch.zeros_like(threshold_E)
    for shift in range(32 - DIGIT_BITS, -1, -DIGIT_BITS):
        agrees_N = keys_N >> (shift + DIGIT_BITS) == threshold_E[ids_N] >> (shift + DIGIT_BITS)
        digit_N = (keys_N >> shift) & (bins - 1)
        histogram_B = torch.zeros(num_experts * bins, dtype=torch.int64, device=ids_N.device)
        histogram_B = histogram_B.scatter_add(0, ids_N * bins + digit_N, agrees_N.long())
        histogram_EB = batch.sum(histogram_B).view(num_experts, bins)
        at_least_EB = histogram_EB.flip(1).cumsum(1).flip(1) + above_E.unsqueeze(1)
        # The largest digit that `limit` keys reach; digit 0 if there are not as many.
        digit_E = ((at_least_EB >= limit).sum(1) - 1).clamp(min=0)
        above_E = (at_least_EB - histogram_EB).gather(1, digit_E.unsqueeze(1)).squeeze(1)
        threshold_E = threshold_E + (digit_E << shift)
    return threshold_E, above_E
