"""Rows that come beside gate and up, emulated or on a GPU, and the two launches that this stands for."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from imbrex.kernels.exchange.exchange import NvlinkExchange, Routed
from imbrex.kernels.ffn.glue import COUNTERS, Groups
from imbrex.kernels.fused.rows_out import rows_out
from imbrex.kernels.gemm.gemm import ALONE, Beside, Epilogue, Layout, Tiling, launch_gemm
from tests.emulated.scenario import Case, Inputs, make_inputs

Results = list[tuple[Tensor, Tensor, Tensor]]
"""Of every rank: its rows, SwiGLU's result, gate and up."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Forward:
    """Tokens of all virtual ranks, an exchange, and gate and up of every rank's experts."""

    case: Case
    exchange: NvlinkExchange
    inputs: Inputs
    weights: list[Tensor]
    tiling: Tiling


def begin(case: Case, inner: int, exchange: NvlinkExchange, tiling: Tiling, device: str = "cpu") -> Forward:
    """The experts have `inner` columns."""
    make = torch.Generator(device).manual_seed(case.seed)
    weights = []
    for rank in range(case.ranks):
        low, high = case.slots_of(rank)
        size = high - low, 2 * inner, case.width
        weights.append(torch.randn(size, generator=make, device=device).bfloat16())
    inputs = make_inputs(case, device)
    return Forward(case=case, exchange=exchange, inputs=inputs, weights=weights, tiling=tiling)


def _multiply(
    forward: Forward, rank: int, rows: Tensor, routed: Routed, beside: Beside, blocks: int | None
) -> tuple[Tensor, Tensor, Tensor]:
    weight = forward.weights[rank]
    ends = routed.counts_Le[rank, : len(weight)].cumsum(0).int()
    groups = Groups(plan=torch.cat([ends.new_zeros(COUNTERS), ends]))
    inner = weight.shape[1] // 2
    gate_up = torch.full((len(rows), 2 * inner), float("nan"), dtype=torch.bfloat16, device=rows.device)
    act = gate_up[:, :inner].clone()
    launch_gemm(
        Layout.FORWARD,
        rows,
        weight,
        groups.ends_e,
        act,
        groups.counter,
        tiling=forward.tiling,
        epilogue=Epilogue.SWIGLU_KEEP,
        gate_up=gate_up,
        blocks=blocks,
        beside=beside,
    )
    used = int(ends[-1]) if len(ends) else 0
    return rows[:used], act[:used], gate_up[:used]


def apart(forward: Forward, sms: int = 2, blocks: int | None = None) -> Results:
    """Routing and pull, then the product."""
    case, inputs = forward.case, forward.inputs
    given = inputs.x_WTD, inputs.ids_WTK, inputs.weights_WTK, sms, inputs.tokens_W
    rows, routed = forward.exchange.dispatch_expert(*given, balanced=case.balanced)
    forward.exchange.check(synchronize=True)
    return [_multiply(forward, rank, rows[rank], routed, ALONE, blocks) for rank in range(case.ranks)]


def beside(forward: Forward, sms: int = 2, blocks: int | None = None, movers: int | None = None) -> Results:
    """Routing and staging, then rows beside the product, rank after rank; the memory is NaN before."""
    case, inputs, exchange = forward.case, forward.inputs, forward.exchange
    given = inputs.x_WTD, inputs.ids_WTK, inputs.weights_WTK, sms, inputs.tokens_W
    out = torch.full(
        (case.ranks, exchange.shape.row_capacity, case.width),
        float("nan"),
        dtype=torch.bfloat16,
        device=inputs.x_WTD.device,
    )
    staged, routed = exchange.stage(*given, balanced=case.balanced, out=out)
    results, staged = [], replace(staged, movers=movers)
    for rank in range(case.ranks):
        results.append(_multiply(forward, rank, out[rank], routed, rows_out(staged, rank), blocks))
        exchange.check(synchronize=True)
        count = int(routed.totals_L4[rank, 0])
        there = staged.there_LC[rank].tolist()
        assert there == [min(max(count - 128 * i, 0), 128) for i in range(len(there))]
    return results


def beside_silent(forward: Forward, rank: int, peer: int, sms: int = 2) -> tuple[Tensor, Tensor]:
    """Rows and result of one rank whose peer said where its tokens go, and then staged none."""
    inputs, exchange = forward.inputs, forward.exchange
    given = inputs.x_WTD, inputs.ids_WTK, inputs.weights_WTK, sms, inputs.tokens_W
    staged, routed = exchange.stage(*given)
    exchange.check(synchronize=True)
    at = exchange.layout.staged_flags + 4 * exchange.layout.flags * peer
    exchange.heap.local[rank, at : at + 4 * exchange.layout.flags] = 0
    rows, result, _ = _multiply(forward, rank, staged.rows[rank], routed, rows_out(staged, rank), None)
    return rows, result


def differences(found: Results, wanted: Results) -> list[str]:
    """Names of what has other bits, or is no number."""
    names = "rows", "result", "gate and up"
    return [
        f"{name} of rank {rank}"
        for rank, (mine, theirs) in enumerate(zip(found, wanted, strict=True))
        for name, one, other in zip(names, mine, theirs, strict=True)
        if not torch.equal(one, other) or bool(one.isnan().any())
    ]
