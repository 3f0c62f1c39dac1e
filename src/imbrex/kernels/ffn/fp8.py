"""The experts' feed-forward network in fp8, forward only: half the bytes, twice the rate of the tensor cores.

    weights = quantise_experts(gate_up_eGD, down_eDF)               # once: e4m3 and float32 scales
    y_RD = ffn_fp8(rows_RD, weights, counts_e)                      # bf16 in, bf16 out

The format is DeepSeek-V3's (technical report, section 3.3): e4m3, one scale for 1 x 128 of the rows and for
128 x 128 of a weight, sums in float32 taken out of the tensor cores every 128 values. Rows are quantised by
one kernel, which also puts them into expert order where they are not yet; the activation leaves the first
product's epilogue as fp8, and the second product of single blocks begins in its last wave (gemm/parts.cuh).
Rows past the counts are neither read nor written, nothing synchronises with the host. Relative error of the
output on white noise: 6e-2, against 3e-3 for bf16.
"""

from __future__ import annotations

import functools
import itertools
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.library import Library, register_fake

from imbrex.kernels.arguments import multiprocessors
from imbrex.kernels.ffn import both
from imbrex.kernels.ffn.glue import COUNTERS, Groups, plan_groups
from imbrex.kernels.ffn.inputs import check_inputs
from imbrex.kernels.gemm.gemm import (
    BEHIND,
    Epilogue,
    Extras,
    Layout,
    Scales,
    Tiling,
    begins_behind,
    gemm_variant,
    launch_gemm,
    of_file,
)
from imbrex.kernels.gemm.tiling import FP8_DOWN_TILINGS, FP8_UP_TILINGS, Reading, choose_tiling
from imbrex.kernels.jit import Kernel, Variant, load
from imbrex.runtime.tracing import traced

BLOCK = 128
"""Values that share a scale; D and F must be multiples of it."""
LARGEST = 448.0
"""The largest value of e4m3."""
SOURCE = "ffn/quantise.cu"
_WARP_VALUES = 1024
"""Values of a row that a warp quantises."""
_library = Library("imbrex_experts_fp8", "DEF")
_library.define(
    "ffn(Tensor rows_RD, Tensor? scales_RB, Tensor gate_up_eGD, Tensor gate_up_scales, Tensor down_eDF,"
    " Tensor down_scales, Tensor counts_e, Tensor? weights_R) -> Tensor"
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Fp8Experts:
    """gate_up_eGD [e, 2F, D] and down_eDF [e, D, F] in float8_e4m3fn, each with float32 scales
    [e, rows/128, columns/128]; a weight is about its value times its block's scale."""

    gate_up_eGD: Tensor
    gate_up_scales: Tensor
    down_eDF: Tensor
    down_scales: Tensor

    def tensors(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        return self.gate_up_eGD, self.gate_up_scales, self.down_eDF, self.down_scales


def why_not_fp8(width: int, inner: int) -> str | None:
    """Why experts of D = `width` and F = `inner` cannot be computed in fp8, or `None`."""
    if width % BLOCK or inner % BLOCK:
        return f"the fp8 experts need D and F to be multiples of {BLOCK}, not {width} and {inner}"
    return None


@torch.no_grad()
def quantise_experts(gate_up_eGD: Tensor, down_eDF: Tensor) -> Fp8Experts:
    """Weights in any floating dtype, on any device, to fp8. Raises ValueError for widths that do not fit."""
    if (reason := why_not_fp8(down_eDF.shape[1], down_eDF.shape[2])) is not None:
        raise ValueError(f"quantise_experts: {reason}")
    gate_up, gate_up_scales = quantise_weight(gate_up_eGD)
    down, down_scales = quantise_weight(down_eDF)
    return Fp8Experts(
        gate_up_eGD=gate_up, gate_up_scales=gate_up_scales, down_eDF=down, down_scales=down_scales
    )


def quantise_weight(weight_eNK: Tensor) -> tuple[Tensor, Tensor]:
    """Values [e, N, K] and scales [e, N/128, K/128]; expert by expert, so that little memory is needed."""
    experts, rows, columns = weight_eNK.shape
    values = torch.empty_like(weight_eNK, dtype=torch.float8_e4m3fn, memory_format=torch.contiguous_format)
    scales = weight_eNK.new_empty(experts, rows // BLOCK, columns // BLOCK, dtype=torch.float32)
    for weight, value, scale in zip(weight_eNK, values, scales, strict=True):
        blocks = weight.float().view(rows // BLOCK, BLOCK, columns // BLOCK, BLOCK)
        torch.div(blocks.abs().amax((1, 3)), LARGEST, out=scale)
        tiny = torch.finfo(torch.float32).tiny
        value.copy_((blocks / scale.clamp_min(tiny)[:, None, :, None]).view(rows, columns))
    return values, scales


def ffn_fp8(
    rows_RD: Tensor,
    experts: Fp8Experts,
    counts_e: Tensor,
    *,
    scales_RB: Tensor | None = None,
    weights_R: Tensor | None = None,
    groups: Groups | None = None,
) -> Tensor:
    """down(silu(gate) * up) of every row by its expert, times `weights_R` (float32) where given; bf16.

    Rows expert-major, counts_e int64 on the device, as for `ffn`. No gradients. groups: of `counts_e`, where
    a dispatch has made them: then one launch may do all (`ffn.both`), with the same bits.
    rows_RD: bf16; or, with `scales_RB`, float8_e4m3fn, whose rows may lie apart.
    scales_RB: float32 [R, D/128]; a value stands for itself times the scale of its 128, as in rows of the
        codec `fp8`, and in DeepEP's and DeepGEMM's.
    Raises ValueError where rows, scales, weights and counts do not fit each other.
    """
    if (problem := _why_not_rows(rows_RD, scales_RB)) is not None:
        raise ValueError(f"ffn_fp8: {problem}")
    check_inputs("ffn_fp8", rows_RD, (experts.gate_up_eGD, experts.down_eDF), counts_e, weights_R)
    if groups is not None and why_not_one_launch(rows_RD, experts, groups, scales_RB) is None:
        return run_in_one(rows_RD.contiguous(), experts, groups, weights_R)
    return torch.ops.imbrex_experts_fp8.ffn(rows_RD, scales_RB, *experts.tensors(), counts_e, weights_R)


def why_not_one_launch(
    rows_RD: Tensor, experts: Fp8Experts, groups: Groups, scales_RB: Tensor | None = None
) -> str | None:
    """Why one launch does not quantise these rows and compute both products, or `None`."""
    if scales_RB is not None:
        return "rows are quantised already"
    if not len(rows_RD) or traced(rows_RD):
        return "there are no rows, or torch traces the call"
    sizes = experts.down_eDF.shape[1], experts.down_eDF.shape[2]
    return both.why_not_both(groups, sizes=sizes, keep=False, elsewhere=False, fp8=True)


def run_in_one(rows_RD: Tensor, experts: Fp8Experts, groups: Groups, weights_R: Tensor | None) -> Tensor:
    """The experts on contiguous bf16 rows in one launch, where `why_not_one_launch` says nothing."""
    act_RF = rows_RD.new_empty(len(rows_RD), experts.down_eDF.shape[2], dtype=torch.float32)
    y_RD = torch.empty_like(rows_RD)
    weights_R = None if weights_R is None else weights_R.contiguous()
    weights, scales = (experts.gate_up_eGD, experts.down_eDF), (experts.gate_up_scales, experts.down_scales)
    both.run_both(rows_RD, *weights, groups, act_RF, y_RD, weights_R, scales)
    return y_RD


def _why_not_rows(rows_RD: Tensor, scales_RB: Tensor | None) -> str | None:
    if scales_RB is None:
        if rows_RD.dtype == torch.bfloat16:
            return None
        return f"rows are {rows_RD.dtype}; give bfloat16, or float8_e4m3fn with scales_RB="
    if rows_RD.dtype != torch.float8_e4m3fn:
        return f"rows with scales are {rows_RD.dtype}; give float8_e4m3fn (`.view` of bytes)"
    shape = rows_RD.shape[0], rows_RD.shape[1] // BLOCK
    if scales_RB.dtype == torch.float32 and tuple(scales_RB.shape) == shape:
        return None
    description = f"{scales_RB.dtype} {list(scales_RB.shape)}"
    return f"scales are {description}; give float32 {list(shape)}, one for every {BLOCK} values of a row"


def run_ffn_fp8(
    rows_RD: Tensor,
    scales_RB: Tensor | None,
    gate_up_eGD: Tensor,
    gate_up_scales: Tensor,
    down_eDF: Tensor,
    down_scales: Tensor,
    counts_e: Tensor,
    weights_R: Tensor | None,
) -> Tensor:
    """The operator behind `ffn_fp8`: [R, D] bf16 from rows in bf16, or in e4m3 with their scales."""
    experts = Fp8Experts(
        gate_up_eGD=gate_up_eGD, gate_up_scales=gate_up_scales, down_eDF=down_eDF, down_scales=down_scales
    )
    if scales_RB is None:
        groups, values, scales = quantise_rows(rows_RD.contiguous(), counts_e)
    else:
        groups, values, scales = plan_groups(counts_e), _aligned(rows_RD), scales_RB
        near = scales.stride(1) == 1 and len(scales) * scales.stride(0) < 1 << 31  # an int32 on the device
        scales = scales if near else scales.contiguous()
    return run_fp8_rows(values, scales, experts, groups, weights_R)


def _aligned(rows_RD: Tensor) -> Tensor:
    """Rows at addresses from which the copy engine takes them: multiples of 16 bytes."""
    fits = rows_RD.stride(1) == 1 and not (rows_RD.stride(0) | rows_RD.data_ptr()) % 16
    return rows_RD if fits else rows_RD.contiguous()


def run_fp8_rows(
    rows_RD: Tensor,
    scales_RB: Tensor,
    experts: Fp8Experts,
    groups: Groups,
    weights_R: Tensor | None = None,
    index_R: Tensor | None = None,
) -> Tensor:
    """Run the experts on rows that are e4m3 already, with their scales [R, D/128]; rows may lie any multiple
    of 16 bytes apart, those of scales any distance whose last is within 2^31 values. With `index_R` (int64)
    row r is rows_RD[index_R[r]], read there by the first product: the bits of a permuted copy."""
    rows = rows_RD.shape[0] if index_R is None else index_R.shape[0]
    inner = experts.down_eDF.shape[2]
    act_RF = rows_RD.new_empty(rows, inner)
    act_scales = scales_RB.new_empty(rows, inner // BLOCK)
    y_RD = torch.empty(rows, rows_RD.shape[1], dtype=torch.bfloat16, device=rows_RD.device)
    if rows and experts.down_eDF.shape[0]:
        up: Extras = {"index_R": index_R}
        up["scales"] = Scales(rows=scales_RB, weights=experts.gate_up_scales, out=act_scales)
        down: Extras = {"weights_R": weights_R}
        down["scales"] = Scales(rows=act_scales, weights=experts.down_scales)
        epilogue = Epilogue.PLAIN if weights_R is None else Epilogue.WEIGHTED
        first = _tiling_of(rows_RD, groups, act_RF, Epilogue.SWIGLU)
        second = _tiling_of(act_RF, groups, y_RD, epilogue)
        if first.cluster == second.cluster == 1:  # pairs neither tell of tiles nor follow
            up["progress"] = down["progress"] = groups.progress
            down["beside"] = begins_behind(inner // BLOCK)  # every tiling's tiles have as many columns
        _gemm(rows_RD, experts.gate_up_eGD, groups, act_RF, Epilogue.SWIGLU, first, up)
        _gemm(act_RF, experts.down_eDF, groups, y_RD, epilogue, second, down)
    return y_RD


def quantise_rows(
    x_TD: Tensor, counts_e: Tensor, index_R: Tensor | None = None, choices: int = 1, *, every: bool = False
) -> tuple[Groups, Tensor, Tensor]:
    """The plan, as `plan_groups` makes it, and e4m3 [R, D] and scales [R, D/128] of bf16 rows, or of
    `x_TD[index_R[r] // choices]`. counts_e: int64, rows of every expert. every: all rows, not as many as the
    experts have (tokens, which the first product then gathers)."""
    rows, width = x_TD.shape[0] if index_R is None else index_R.numel(), x_TD.shape[1]
    values = x_TD.new_empty(rows, width, dtype=torch.float8_e4m3fn)
    scales = x_TD.new_empty(rows, width // BLOCK, dtype=torch.float32)
    experts = counts_e.numel()
    groups = Groups(plan=torch.empty(COUNTERS + experts, dtype=torch.int32, device=x_TD.device))
    counts_e, plan = counts_e.contiguous(), groups.plan
    rows_in = x_TD, index_R, choices, counts_e, experts, width // 8
    warps = rows * -(-width // _WARP_VALUES)
    _quantiser(x_TD.device).launch(
        grid=max(1, -(-warps // 8)),
        block=256,
        args=[*rows_in, values, scales, groups.ends_e, plan, COUNTERS, rows if every else -1],
    )
    return groups, values, scales


@functools.cache
def _quantiser(device: torch.device) -> Kernel:
    return load(Variant(source=SOURCE, entry="quantise_rows"), device)


def _gemm(
    a: Tensor,
    b: Tensor,
    groups: Groups,
    out: Tensor,
    epilogue: Epilogue,
    tiling: Tiling,
    more: Extras,
) -> None:
    counter = groups.other_counter if "beside" in more else groups.counter
    operands = a, b, groups.ends_e, out, counter
    launch_gemm(Layout.FORWARD, *operands, tiling=tiling, epilogue=epilogue, **more)


def _tiling_of(a: Tensor, groups: Groups, out: Tensor, epilogue: Epilogue) -> Tiling:
    rows, experts, shape = len(out), groups.ends_e.numel(), (out.shape[0], out.shape[1])
    reading: Reading = {"depth": a.shape[1], "fp8": True}
    sms = multiprocessors(a.get_device())
    return choose_tiling(Layout.FORWARD, epilogue, rows, experts, shape, sms=sms, **reading)


def _fake_ffn(rows_RD, scales_RB, gate_up_eGD, gate_up_scales, down_eDF, down_scales, counts_e, weights_R):
    return rows_RD.new_empty(rows_RD.shape, dtype=torch.bfloat16)


_library.impl("ffn", run_ffn_fp8, "CUDA")
register_fake("imbrex_experts_fp8::ffn", _fake_ffn, lib=_library)


def shipped_variants() -> list[Variant]:
    """Every kernel that the experts in fp8 can launch."""
    variant = functools.partial(gemm_variant, Layout.FORWARD, fp8=True)
    ups = [variant(Epilogue.SWIGLU, t, gather=gather) for t in FP8_UP_TILINGS for gather in (False, True)]
    cuts = itertools.product((Epilogue.PLAIN, Epilogue.WEIGHTED), FP8_DOWN_TILINGS)
    downs = [variant(*cut) for cut in cuts]
    behind = [of_file(down, BEHIND) for down in downs if ("CLUSTER", 1) in down.defines]
    return [Variant(source=SOURCE, entry="quantise_rows"), *ups, *downs, *behind]
