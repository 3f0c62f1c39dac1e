"""What ranks do in the layer's tests: build a layer, run it forward and backward, send everything home."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

import imbrex
from imbrex.placement import from_slots
from tests.ranks.pool import Ranks

SEED = 1234


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """tokens: of every rank in turn, repeated as needed."""

    config: imbrex.MoEConfig
    tensor_parallel: int = 1
    tokens: tuple[int, ...] = (5, 0, 3, 8)
    dtype: torch.dtype = torch.float32
    slots: list[list[int]] | None = None
    losses: imbrex.AuxLosses | None = None
    options: dict[str, Any] = field(default_factory=dict)


def tokens_of(case: Case, rank: int, *, replicated: bool = False) -> Tensor:
    """Tokens of a rank [T, D], the same wherever they are made."""
    rank = 0 if replicated else rank
    drawn = torch.Generator().manual_seed(SEED + rank)
    shape = case.tokens[rank % len(case.tokens)], case.config.hidden_size
    return torch.randn(shape, generator=drawn, dtype=torch.float32, device="cpu").to(case.dtype)


def make_layer(case: Case, group, device: str = "cpu") -> imbrex.MoELayer:
    torch.manual_seed(SEED)
    placement = None if case.slots is None else from_slots(case.slots, case.config.num_experts)
    layer = imbrex.MoELayer(
        case.config,
        group,
        tensor_parallel=case.tensor_parallel,
        placement=placement,
        losses=case.losses,
        dtype=case.dtype,
        device="cpu",
        **case.options,
    )
    return layer.to(device)


def run_layer(ranks: Ranks, case: Case, kept_TK: list[Tensor] | None = None) -> dict[str, Any]:
    """Outputs, routing and all gradients of one rank. The loss is sum(y * coefficients) + auxiliary."""
    layer = make_layer(case, ranks.group if ranks.world_size > 1 else None, ranks.device)
    replicated = layer.exchange.transport.replicated
    x_TD = tokens_of(case, ranks.rank, replicated=replicated).to(ranks.device).requires_grad_()
    y_TD = layer(x_TD, kept_TK=None if kept_TK is None else kept_TK[ranks.rank])
    loss = (y_TD.float() * coefficients(y_TD)).sum() + layer.aux_loss()
    loss.backward()
    assert layer.routing is not None
    assert x_TD.grad is not None
    kept = layer.routing.kept_TK
    grads = {name: torch.zeros_like(p) if p.grad is None else p.grad for name, p in layer.named_parameters()}
    return {
        "y": y_TD.detach().cpu(),
        "x_grad": x_TD.grad.cpu(),
        "ids": layer.routing.ids_TK.cpu(),
        "weights": layer.routing.weights_TK.detach().cpu(),
        "kept": None if kept is None else kept.cpu(),
        "losses": {name: loss.detach().cpu() for name, loss in layer.routing.losses.items()},
        "experts": layer.experts.expert_ids,
        "grads": {name: grad.cpu() for name, grad in grads.items()},
        "shard": (layer.experts.shard.rank, layer.experts.shard.size),
    }


def coefficients(y_TD: Tensor) -> Tensor:
    """Some fixed numbers of the shape of y, so that every output matters differently."""
    flat = torch.arange(y_TD.numel(), dtype=torch.float32, device=y_TD.device).view_as(y_TD)
    return torch.cos(flat * 0.7) + 0.1
