"""Conversion of a routing between a map over all experts and a few ids per token, which is what crosses the
wire."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class Choices:
    """The choices of tokens. ids_TK: int64, experts of a token in ascending order, then -1. weights_TK:
    float32, or None; those of -1 are not read."""

    ids_TK: Tensor
    weights_TK: Tensor | None


def indices_to_map(
    topk_idx: Tensor, topk_weights: Tensor | None, num_of_tokens: int, num_of_experts: int
) -> tuple[Tensor, Tensor | None]:
    """ids [T, K] and weights to a map bool [T, E] and probabilities float32 [T, E]; -1 drops a choice."""
    ids_TK = torch.where(topk_idx < 0, num_of_experts, topk_idx.long())
    shape = num_of_tokens, num_of_experts + 1
    map_TE = torch.zeros(shape, dtype=torch.bool, device=topk_idx.device).scatter_(1, ids_TK, True)
    if topk_weights is None:
        return map_TE[:, :-1].clone(), None
    probs_TE = torch.zeros(shape, dtype=torch.float32, device=topk_idx.device).scatter_(
        1, ids_TK, topk_weights.float()
    )
    return map_TE[:, :-1].clone(), probs_TE[:, :-1].clone()


def ids_outside(ids_TK: Tensor, num_experts: int) -> bool:
    """Whether an id is neither an expert's nor -1. On a GPU a look at values would be a host synchronisation,
    and there nobody looks."""
    return ids_TK.device.type == "cpu" and bool(((ids_TK < -1) | (ids_TK >= num_experts)).any())


def align(counts_e: Tensor, alignment: int) -> Tensor:
    """Counts, each rounded up to a multiple."""
    return counts_e if alignment == 1 else (counts_e + alignment - 1) // alignment * alignment


def pack_choices(map_TE: Tensor, probs_TE: Tensor | None, max_choices: int) -> Choices:
    """The experts of every token and their probabilities. max_choices: the most experts that a token
    has on any rank.
    A probability where the map says no is left behind."""
    order_TK = torch.argsort((~map_TE).to(torch.uint8), dim=1, stable=True)[:, :max_choices]
    chosen_TK = map_TE.gather(1, order_TK)
    ids_TK = torch.where(chosen_TK, order_TK, -1)
    return Choices(ids_TK=ids_TK, weights_TK=None if probs_TE is None else probs_TE.gather(1, order_TK))


def spread_choices(choices: Choices, num_experts: int) -> Tensor:
    """The weights where their experts stand, 0 elsewhere: float32 [T, E]."""
    ids_TK, weights_TK = choices.ids_TK, choices.weights_TK
    assert weights_TK is not None
    spread = torch.zeros(ids_TK.shape[0], num_experts + 1, dtype=torch.float32, device=ids_TK.device)
    spread.scatter_(1, torch.where(ids_TK < 0, num_experts, ids_TK), weights_TK)
    return spread[:, :-1].clone()
