"""Expert-major order of the choices of a rank alone: the host's side of `rows/choices.cu`."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
from torch import Tensor

from imbrex.kernels.jit import Kernel, Variant, load

SOURCE = "rows/choices.cu"
KERNELS = ("count_choices", "place_choices")
_THREADS, _WARPS = 512, 16
ROUNDS, FEW_CHOICES = (1, 4), 16384
"""Rounds of 512 choices a block: one up to so many choices, else more, since every block reads what all
counted."""
MOST_EXPERTS = 2048
"""Experts that a block's shared memory counts."""


def shipped_variants() -> list[Variant]:
    return [_variant(entry, rounds) for entry in KERNELS for rounds in ROUNDS]


def _variant(entry: str, rounds: int) -> Variant:
    return Variant(source=SOURCE, entry=entry, defines=(("ROUNDS", rounds),))


@functools.cache
def _kernel(entry: str, rounds: int, device: torch.device) -> Kernel:
    return load(_variant(entry, rounds), device)


@dataclass(frozen=True, kw_only=True, slots=True)
class Order:
    """The choices by expert. position_TK: int64; a choice's row, -1 where it is dropped. choice_R, token_R:
    int64, [T * K]; whose a row is, unset past the last one, as is weights_R (float32). counts_e: int64;
    ends_e: int32."""

    position_TK: Tensor
    choice_R: Tensor
    token_R: Tensor
    weights_R: Tensor
    counts_e: Tensor
    ends_e: Tensor


def order_choices(ids_TK: Tensor, weights_TK: Tensor, experts: int) -> Order:
    """Rows by expert, then by choice. ids_TK: int64, -1 drops a choice; weights_TK: float32; experts: at most
    `MOST_EXPERTS`. Nothing is asked of the device."""
    ids_TK, weights_TK, device = ids_TK.contiguous(), weights_TK.contiguous(), ids_TK.device
    choices = ids_TK.numel()
    order = Order(
        position_TK=torch.empty_like(ids_TK),
        choice_R=torch.empty(choices, dtype=torch.int64, device=device),
        token_R=torch.empty(choices, dtype=torch.int64, device=device),
        weights_R=torch.empty(choices, dtype=torch.float32, device=device),
        counts_e=torch.empty(experts, dtype=torch.int64, device=device),
        ends_e=torch.empty(experts, dtype=torch.int32, device=device),
    )
    rounds = ROUNDS[choices > FEW_CHOICES]
    blocks, shared, number = max(1, -(-choices // (_THREADS * rounds))), 4 * _WARPS * experts, None
    if blocks > 1:
        number = torch.empty(blocks, experts, dtype=torch.int32, device=device)
        _kernel("count_choices", rounds, device).launch(
            grid=blocks, block=_THREADS, smem=shared, args=[ids_TK, choices, experts, number]
        )
    results = order.position_TK, order.choice_R, order.token_R, order.weights_R, order.counts_e, order.ends_e
    _kernel("place_choices", rounds, device).launch(
        grid=blocks,
        block=_THREADS,
        smem=shared + 4 * experts,
        args=[ids_TK, weights_TK, number, choices, ids_TK.shape[1], experts, *results],
    )
    return order
