"""Rows that come beside gate and up, or beside the gradient through down, and the launches it stands for."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from imbrex.codec.fp8 import Fp8
from imbrex.kernels.exchange.exchange import NvlinkExchange, Routed
from imbrex.kernels.ffn.glue import COUNTERS, Groups
from imbrex.kernels.fused.rows_out import bring_rows, rows_out
from imbrex.kernels.gemm.gemm import ALONE, Beside, Epilogue, Extras, Layout, Slopes, Tiling, launch_gemm
from imbrex.kernels.jit import load
from tests.emulated.others_first import own_rows
from tests.emulated.scenario import Case, Inputs, make_inputs

Results = list[tuple[Tensor, Tensor, Tensor]]
"""Of every rank: its rows, SwiGLU's result, gate and up; or rows of dy, the gradient of SwiGLU's result or
that result, the gradient of gate and up."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Forward:
    """Tokens of all virtual ranks, an exchange, and gate and up of every rank's experts. gradient: how the
    gradient through down ends, whose weights they are then. fp8: tokens cross as rows of that codec."""

    case: Case
    exchange: NvlinkExchange
    inputs: Inputs
    weights: list[Tensor]
    tiling: Tiling
    gradient: Epilogue | None = None
    fp8: bool = False


def begin(
    case: Case,
    inner: int,
    exchange: NvlinkExchange,
    tiling: Tiling,
    device: str = "cpu",
    gradient: Epilogue | None = None,
    *,
    fp8: bool = False,
) -> Forward:
    """The experts have `inner` columns."""
    make = torch.Generator(device).manual_seed(case.seed)
    weights = []
    for rank in range(case.ranks):
        low, high = case.slots_of(rank)
        size = (2 * inner, case.width) if gradient is None else (case.width, inner)
        weights.append(torch.randn(high - low, *size, generator=make, device=device).bfloat16())
    inputs = make_inputs(case, device)
    parts = {"case": case, "exchange": exchange, "inputs": inputs, "weights": weights}
    return Forward(**parts, tiling=tiling, gradient=gradient, fp8=fp8)


def _multiply(
    forward: Forward, rank: int, rows: Tensor, routed: Routed, beside: Beside, blocks: int | None
) -> tuple[Tensor, Tensor, Tensor]:
    weight = forward.weights[rank]
    ends = routed.counts_Le[rank, : len(weight)].cumsum(0).int()
    groups = Groups(plan=torch.cat([ends.new_zeros(COUNTERS), ends]))
    if forward.gradient is not None:
        return _differentiate(forward, rows, weight, groups, beside, blocks)
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


def _differentiate(
    forward: Forward, rows: Tensor, down: Tensor, groups: Groups, beside: Beside, blocks: int | None
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradient through down; with SwiGLU's behind it, that of the rows' weights ends the last result."""
    count, inner, epilogue, device = len(rows), down.shape[2], forward.gradient, rows.device
    assert epilogue is not None
    make = torch.Generator(device).manual_seed(forward.case.seed)
    gate_up = torch.randn(count, 2 * inner, generator=make, device=device).bfloat16()
    weights_R = torch.rand(count, generator=make, device=device)
    act, d_gate_up = rows.new_full((count, inner), float("nan")), torch.full_like(gate_up, float("nan"))
    d_weights = weights_R.new_full((-(-inner // forward.tiling.block_n), count), float("nan"))
    more: Extras = {"blocks": blocks, "beside": beside}
    if epilogue is Epilogue.SWIGLU_GRADIENT:
        more["slopes"] = Slopes(gate_up=gate_up, d_gate_up=d_gate_up, d_weights=d_weights)
        more["weights_R"] = weights_R
    launch_gemm(
        Layout.DGRAD,
        rows,
        down,
        groups.ends_e,
        act,
        groups.counter,
        tiling=forward.tiling,
        epilogue=epilogue,
        **more,
    )
    used = int(groups.ends_e[-1]) if len(groups.ends_e) else 0
    if epilogue is Epilogue.PLAIN:
        return rows[:used], act[:used], act[:used]
    return rows[:used], act[:used], torch.cat([d_gate_up.float(), d_weights.T], 1)[:used]


def apart(forward: Forward, sms: int = 2, blocks: int | None = None) -> Results:
    """Routing and pull, then the product."""
    case, inputs = forward.case, forward.inputs
    given = inputs.x_WTD, inputs.ids_WTK, inputs.weights_WTK, sms, inputs.tokens_W
    rows, routed = forward.exchange.dispatch_expert(*given, balanced=case.balanced)
    forward.exchange.check(synchronize=True)
    if forward.fp8:
        _code(forward, rows, routed)
    return [_multiply(forward, rank, rows[rank], routed, ALONE, blocks) for rank in range(case.ranks)]


def _code(forward: Forward, rows: Tensor, routed: Routed) -> None:
    """Lets rows of other ranks' tokens be as the codec leaves them."""
    codec, (count, tokens, width) = Fp8.e4m3(), forward.inputs.x_WTD.shape
    flat = forward.inputs.x_WTD.reshape(-1, width)
    x_WTD = codec.decode(codec.encode(flat, flat.dtype), width, flat.dtype).view(count, tokens, width)
    for rank, source in itertools.permutations(range(count), 2):
        own = routed.position_LWTK[rank, source, : int(routed.tokens_LW[rank, source])].long()
        token, choice = (own >= 0).nonzero(as_tuple=True)
        rows[rank, own[token, choice]] = x_WTD[source, token]


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
    if forward.gradient is None:
        staged, routed = exchange.stage(*given, balanced=case.balanced, out=out, quantise=forward.fp8)
    else:
        routed = exchange.route(*given[1:3], inputs.tokens_W, balanced=case.balanced)
        staged = exchange.stage_again(inputs.x_WTD, routed, sms, out=out, quantise=forward.fp8)
    results, staged = [], replace(staged, movers=movers)
    for rank in range(case.ranks):
        slots = len(forward.weights[rank])
        own_e2 = torch.full((slots + 1, 2), -1, dtype=torch.int32, device=out.device)
        groups = Groups(torch.zeros(COUNTERS + slots, dtype=torch.int32, device=out.device))
        looks = {"own_e2": own_e2, "plan": groups.plan}
        mine = staged if forward.gradient is not None else replace(staged, **looks)
        results.append(_multiply(forward, rank, out[rank], routed, rows_out(mine, rank), blocks))
        exchange.check(synchronize=True)
        if mine is not staged:
            assert torch.equal(own_e2[:-1], own_rows(routed, rank, slots))
            assert int(groups.bounds) == 2 * slots
        assert own_e2[-1].tolist() == [-1, -1], "behind the last expert"
        count = int(routed.totals_L4[rank, 0])
        there = staged.there_LC[rank].tolist()
        assert there == [min(max(count - 128 * i, 0), 128) for i in range(len(there))]
    return results


def rows_before(forward: Forward, sms: int, load: Callable[..., Any] = load) -> list[bool]:
    """Of every rank, whether staged rows that nothing but their own kernel brings are those of a pull."""
    case, inputs, exchange = forward.case, forward.inputs, forward.exchange
    given = inputs.x_WTD, inputs.ids_WTK, inputs.weights_WTK, sms, inputs.tokens_W
    routed = exchange.route(*given[1:3], inputs.tokens_W, balanced=case.balanced)
    rows = exchange.pull(inputs.x_WTD, routed, num_sms=sms)
    exchange.check(synchronize=True)
    staged, _ = exchange.stage(*given, balanced=case.balanced, out=torch.full_like(rows, torch.nan))
    same = []
    for rank in range(case.ranks):
        found = bring_rows(staged, sms, rank, load=load)
        exchange.check(synchronize=True)
        count = int(routed.totals_L4[rank, 0])
        same.append(torch.equal(found[:count], rows[rank, :count]))
    return same


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
