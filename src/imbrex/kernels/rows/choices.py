"""Expert-major order of the choices of a rank alone: the host's side of `rows/choices.cu`."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
from torch import Tensor

from imbrex.kernels import records
from imbrex.kernels.ffn.glue import hit_words
from imbrex.kernels.jit import Kernel, Variant, load, why_not_portable
from imbrex.runtime.tracing import asked_once

SOURCE = "rows/choices.cu"
KERNELS = ("count_choices", "place_choices", "order_few")
_THREADS, _WARPS = 512, 16
ROUNDS, FEW_CHOICES = (1, 2, 4), 16384
"""Rounds of 512 choices a block. Of blocks that share the choices one up to so many, else the most, since
every block reads what all counted; a block alone has the fewest that hold them."""
MOST_FEW = _THREADS * ROUNDS[-1]
"""Choices of a small batch: one block orders them all."""
_PIECE = 128
COPIERS = 64
"""Blocks of a small batch at most: a product's blocks want the other multiprocessors."""
MOST_EXPERTS = 2048
"""Experts that a block's shared memory counts."""


def rounds_of(choices: int) -> int:
    """Rounds of a block that has all choices, `MOST_FEW` at most."""
    return next(rounds for rounds in ROUNDS if choices <= _THREADS * rounds)


def shipped_variants() -> list[Variant]:
    return [_variant(entry, rounds) for entry in KERNELS for rounds in ROUNDS]


def _variant(entry: str, rounds: int) -> Variant:
    return Variant(source=SOURCE, entry=entry, defines=(("ROUNDS", rounds),))


@functools.cache
def _kernel(entry: str, rounds: int, device: torch.device) -> Kernel:
    return load(_variant(entry, rounds), device)


@asked_once
def most_ordered(device: int | None = None) -> int:
    """The most experts whose choices these kernels order on CUDA device `device` (default: the current one);
    0 where they do not run. A compiler can compare it with a number that only the run knows."""
    if why_not_portable(device) is not None:
        return 0
    here = torch.cuda.current_device() if device is None else device
    room = torch.cuda.get_device_properties(here).shared_memory_per_block_optin
    return (room // 4 - MOST_FEW - 1) // (_WARPS + 2)


def why_not_ordered(experts: int, device: int | None = None) -> str | None:
    """Why these kernels do not order choices of so many experts on CUDA device `device` (default: the current
    one), or `None`."""
    limit = most_ordered(device)
    if experts <= limit:
        return None
    full = f"this GPU's multiprocessors hold counts of at most {limit} experts, not {experts}"
    return why_not_portable(device) or full


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
    rounds = ROUNDS[-1] if choices > FEW_CHOICES else 1
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
        smem=shared + 4 * (2 * experts + 1),
        args=[ids_TK, weights_TK, number, choices, ids_TK.shape[1], experts, *results],
    )
    return order


@dataclass(frozen=True, kw_only=True, slots=True)
class FewRows:
    """A small batch of a rank alone, ready for its experts. rows_RD: there is room for T * K. plan: int32
    [counters + e], zeros and then where rows end; the last end is negative until the others are there. hits:
    int32, which experts have rows (ffn/hits.cuh). The others are as of `Order`."""

    rows_RD: Tensor
    position_TK: Tensor
    choice_R: Tensor
    weights_R: Tensor
    counts_e: Tensor
    plan: Tensor
    hits: Tensor


def order_few(
    x_TD: Tensor,
    ids_TK: Tensor,
    weights_TK: Tensor,
    experts: int,
    counters: int,
    into: FewRows | None = None,
) -> FewRows:
    """Order and rows of at most `MOST_FEW` choices, in one launch that the next may begin beside. x_TD: bf16,
    rows of a multiple of 16 bytes; the others as of `order_choices`. into: memory of what is returned."""
    ids_TK, weights_TK, device = ids_TK.contiguous(), weights_TK.contiguous(), ids_TK.device
    choices, width, top_k = ids_TK.numel(), x_TD.shape[1], ids_TK.shape[1]
    assert choices <= MOST_FEW
    few = into or FewRows(
        rows_RD=x_TD.new_empty(choices, width),
        position_TK=torch.empty_like(ids_TK),
        choice_R=torch.empty(choices, dtype=torch.int64, device=device),
        weights_R=torch.empty(choices, dtype=torch.float32, device=device),
        counts_e=torch.empty(experts, dtype=torch.int64, device=device),
        plan=torch.empty(counters + experts, dtype=torch.int32, device=device),
        hits=torch.empty(hit_words(experts), dtype=torch.int32, device=device),
    )
    rounds, units = rounds_of(choices), width * x_TD.element_size() // 16
    results = few.rows_RD, few.position_TK, few.choice_R, few.weights_R, few.counts_e
    news = few.plan, counters, few.hits
    args = [x_TD.contiguous(), ids_TK, weights_TK, choices, top_k, experts, units, *results, *news]
    grid, shared = (
        min(COPIERS, -(-choices * -(-units // _PIECE) // _WARPS)),
        (_WARPS + 2) * experts + 1 + choices,
    )
    how = {"grid": grid, "block": _THREADS, "smem": 4 * shared, "dependent": True}
    records.launch(_kernel("order_few", rounds, device), args, how)
    return few
