"""The feed-forward network of the local experts through imbrex's own kernels, forward and backward.

    y_RD = ffn(rows_RD, gate_up_eGD, down_eDF, counts_e)          # G = 2F: gate rows first, then up
    y_RD = ffn(..., weights_R=weights_R)                          # rows already times their routing weight

Rows are expert-major; rows past the counts are neither read nor written. Nothing synchronises with the host
and all shapes are static, so a step can be captured in a CUDA graph. The operators are opaque to
`torch.compile`, and their backward is one operator too. Forward: two GEMMs, SwiGLU in the first one's
epilogue and the weight in the second's. Backward: four GEMMs, SwiGLU's gradient in the first one's epilogue
or, for wide rows, a kernel of its own; gate and up (bf16) are kept, or computed again (`recompute`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.library import Library, register_autograd, register_fake

from imbrex.kernels.ffn import both
from imbrex.kernels.ffn.glue import COUNTERS, Groups, glue_variants, plan_groups
from imbrex.kernels.ffn.inputs import check_inputs
from imbrex.kernels.ffn.products import following_variants, queue_product, tiling_of
from imbrex.kernels.ffn.slopes import parts_of_weights, run_slopes
from imbrex.kernels.ffn.widths import MULTIPLE, fits, pad_widths
from imbrex.kernels.gemm.gemm import (
    ALONE,
    Beside,
    Epilogue,
    Extras,
    Layout,
    Slopes,
    Tiling,
    begins_behind,
    gemm_variant,
)
from imbrex.kernels.gemm.tiling import gemm_choices
from imbrex.kernels.jit import Variant
from imbrex.runtime.deferred import Deferral, recording
from imbrex.runtime.gradients import saves_elsewhere
from imbrex.runtime.tracing import differentiated, once_differentiable, traced

# Plain dispatcher registrations: `custom_op` adds host time to every call.
# v4: torch keeps compiled graphs on disk by what they call, with the sizes that results had that day. When a
# result's size changes, or an argument, so must the name.
_library = Library("imbrex_experts_v4", "DEF")
_library.define(
    "ffn(Tensor rows_RD, Tensor gate_up_eGD, Tensor down_eDF, Tensor counts_e, Tensor? weights_R, bool keep)"
    " -> (Tensor, Tensor, Tensor)"
)
_library.define(
    "ffn_backward(Tensor d_y_RD, Tensor rows_RD, Tensor gate_up_eGD, Tensor down_eDF, Tensor plan,"
    " Tensor? weights_R, Tensor gate_up_RG, bool[3] needs)"
    " -> (Tensor, Tensor, Tensor, Tensor)"
)


def ffn(
    rows_RD: Tensor,
    gate_up_eGD: Tensor,
    down_eDF: Tensor,
    counts_e: Tensor,
    *,
    weights_R: Tensor | None = None,
    recompute: bool = False,
    gradients: tuple[Tensor, Tensor] | None = None,
    beside: Beside | Groups | None = None,
) -> Tensor:
    """down(silu(gate) * up) of every row by its expert, times `weights_R` (float32) where given; [R, D] bf16.

    rows_RD, gate_up_eGD [e, 2F, D] and down_eDF [e, D, F]: bf16. counts_e: int64, rows of every expert.
    recompute: keep gate and up for the backward, or compute them again (a third more work in the backward,
    4 R F bytes less). Differentiable in rows, weights and `weights_R`; like the result, the gradients of rows
    past the counts are not written: nothing that sums over all rows should see them.

    gradients: tensors like the two weights, contiguous, float32 or bfloat16: the backward adds the weights'
    gradients to them, in the products' epilogues, and the weights get none. Not under `torch.compile`.

    beside: the kernel of the first product, which brings the rows as well (`kernels.fused.rows_out`). Its
    `leave` takes the last product; nothing may read the result before that is called, nor its gradient before
    this backward (`bring_gradient`). Not under `torch.compile`. Or what `plan_groups` makes of `counts_e`.

    Under a `Deferral` the backward leaves the weights' gradients to it. Widths that are no multiples of 8 are
    padded, which copies the weights in every call; such weights' gradients cannot be added to `gradients`.

    Raises ValueError for tensors of other shapes or dtypes, or on several devices.
    """
    beside, groups = (None, beside) if isinstance(beside, Groups) else (beside, None)
    weights = gate_up_eGD, down_eDF
    check_inputs("ffn", rows_RD, weights, counts_e, weights_R, bf16=(rows_RD, *weights))
    if beside is not None and not (fits(*down_eDF.shape[1:]) and rows_RD.is_contiguous()):
        raise ValueError("ffn: rows that come beside a product need D and F that are multiples of 8")
    if not fits(*down_eDF.shape[1:]):
        if gradients is not None:
            raise ValueError(
                f"ffn: gradients can be added where D and F are multiples of {MULTIPLE}; give none"
            )
        padded = pad_widths(rows_RD, gate_up_eGD, down_eDF)
        y_RD = ffn(*padded, counts_e, weights_R=weights_R, recompute=recompute)
        return y_RD[:, : rows_RD.shape[1]].contiguous()
    training = differentiated(rows_RD, gate_up_eGD, down_eDF, weights_R)
    keep = training and not recompute
    inputs = rows_RD, gate_up_eGD, down_eDF, counts_e, weights_R, keep
    if gradients is not None:
        _check_gradients(gradients, gate_up_eGD, down_eDF)
        if traced(*inputs[:-1]):
            raise ValueError("ffn: under torch.compile gradients cannot be added to tensors; give none")
    elif beside is None and traced(*inputs[:-1]):
        return torch.ops.imbrex_experts_v4.ffn(*inputs)[0]
    if not training:
        return run_ffn(*inputs, beside, groups)[0]
    backward = gradients, recording(gate_up_eGD) and recording(down_eDF)
    return Ffn.apply(
        *inputs[:-1], (keep, beside, groups, backward)
    )  # torch looks at every argument by itself


def _check_gradients(gradients: tuple[Tensor, Tensor], *weights: Tensor) -> None:
    for gradient, weight in zip(gradients, weights, strict=True):
        fits = gradient.shape == weight.shape and gradient.dtype in (torch.float32, torch.bfloat16)
        if not fits or not gradient.is_contiguous() or gradient.device != weight.device:
            raise ValueError(
                f"ffn: a gradient to add to is {gradient.dtype} {[*gradient.shape]} on {gradient.device}; "
                f"it must be contiguous, float32 or bfloat16, {[*weight.shape]} on {weight.device}"
            )


def run_ffn(
    rows_RD: Tensor,
    gate_up_eGD: Tensor,
    down_eDF: Tensor,
    counts_e: Tensor,
    weights_R: Tensor | None,
    keep: bool,
    beside: Beside | None = None,
    groups: Groups | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """y_RD; gate_up_RG where kept (else empty); the plan of the groups, for the backward."""
    if groups is None:
        plan, mean_rows = (None, 0) if beside is None else (beside.plan, beside.mean_rows)
        groups = plan_groups(counts_e) if plan is None else Groups(plan, mean_rows=mean_rows)
    rows_RD = rows_RD.contiguous()
    gate_up_eGD, down_eDF = gate_up_eGD.contiguous(), down_eDF.contiguous()
    weights_R = None if weights_R is None else weights_R.contiguous()
    gate_up_RG = rows_RD.new_empty(rows_RD.shape[0] if keep else 0, gate_up_eGD.shape[1])
    more = groups, weights_R, gate_up_RG if keep else None
    y_RD = run_experts(rows_RD, gate_up_eGD, down_eDF, *more, beside=beside)
    return y_RD, gate_up_RG, groups.plan


def run_experts(
    rows_RD: Tensor,
    gate_up_eGD: Tensor,
    down_eDF: Tensor,
    groups: Groups,
    weights_R: Tensor | None = None,
    gate_up_RG: Tensor | None = None,
    index_R: Tensor | None = None,
    beside: Beside | None = None,
) -> Tensor:
    """y_RD, and gate and up into `gate_up_RG` where given. With `index_R` (int64) row r is
    rows_RD[index_R[r]], read there by the first product. beside: the kernel of that product."""
    rows = rows_RD.shape[0] if index_R is None else index_R.shape[0]
    act_RF, y_RD = rows_RD.new_empty(rows, down_eDF.shape[2]), rows_RD.new_empty(rows, rows_RD.shape[1])
    elsewhere = index_R is not None or beside is not None
    if not elsewhere:
        run_in_order(rows_RD, (gate_up_eGD, down_eDF), groups, act_RF, y_RD, weights_R, gate_up_RG)
        return y_RD
    what = rows_RD, (gate_up_eGD, down_eDF), groups, (act_RF, y_RD), weights_R, gate_up_RG
    last = run_first(*what, beside or ALONE, index_R)
    if beside is None or beside.leave is None:
        last()
    else:
        beside.leave(last)
    return y_RD


def run_first(
    rows_RD: Tensor,
    weights: tuple[Tensor, Tensor],
    groups: Groups,
    into: tuple[Tensor, Tensor],
    weights_R: Tensor | None,
    gate_up_RG: Tensor | None,
    beside: Beside,
    index_R: Tensor | None = None,
) -> LeftProduct:
    """Queue the first product of rows that come beside it, or through an index: the last, which is left.
    into: act_RF and out_RD. The other arguments are those of `run_products` and of `run_experts`."""
    (gate_up_eGD, down_eDF), (act_RF, out_RD), tiles = weights, into, 0
    if len(act_RF) and len(down_eDF):
        up = Epilogue.SWIGLU if gate_up_RG is None else Epilogue.SWIGLU_KEEP
        more: Extras = {"gate_up": gate_up_RG, "index_R": index_R, "beside": beside}
        more["progress"] = groups.progress
        tiles = queue_product(Layout.FORWARD, rows_RD, gate_up_eGD, groups, act_RF, up, **more)
    what = {"act_RF": act_RF, "down_eDF": down_eDF, "groups": groups, "out_RD": out_RD, "tiles": tiles}
    return LeftProduct(**what, weights_R=weights_R, own_e2=beside.own_e2)


def run_in_order(
    rows_RD: Tensor,
    weights: tuple[Tensor, Tensor],
    groups: Groups,
    act_RF: Tensor,
    out_RD: Tensor,
    weights_R: Tensor | None,
    gate_up_RG: Tensor | None = None,
) -> None:
    """Queue both products of rows in the order of experts, in one launch where that is faster. Arguments are
    those of `run_products`."""
    how = {"sizes": weights[1].shape[1:], "keep": gate_up_RG is not None, "elsewhere": False}
    if len(rows_RD) and both.why_not_both(groups, **how) is None:
        both.run_both(rows_RD, *weights, groups, act_RF, out_RD, weights_R)
    else:
        run_products(rows_RD, weights, groups, act_RF, out_RD, weights_R, gate_up_RG)


def run_products(
    rows_RD: Tensor,
    weights: tuple[Tensor, Tensor],
    groups: Groups,
    act_RF: Tensor,
    out_RD: Tensor,
    weights_R: Tensor | None,
    gate_up_RG: Tensor | None = None,
) -> None:
    """Queue both products, one behind the other, into `act_RF` and `out_RD`, and gate and up into
    `gate_up_RG` where given. weights: gate_up_eGD and down_eDF."""
    gate_up_eGD, down_eDF = weights
    if not len(rows_RD) or not len(down_eDF):
        return
    up = Epilogue.SWIGLU if gate_up_RG is None else Epilogue.SWIGLU_KEEP
    early, operands = groups.expected > 0 and gate_up_RG is None, (rows_RD, gate_up_eGD, groups, act_RF, up)
    more: Extras = {"gate_up": gate_up_RG, "progress": groups.progress}
    tiles = queue_product(Layout.FORWARD, *operands, follows=early, **more)
    what = {"act_RF": act_RF, "down_eDF": down_eDF, "groups": groups, "out_RD": out_RD}
    LeftProduct(**what, weights_R=weights_R, tiles=tiles)()


@dataclass(frozen=True, kw_only=True, slots=True)
class LeftProduct:
    """The experts' last product, which writes `out_RD` when it is called, or which another kernel computes:
    rows of act_RF times down_eDF [e, D, F] in `groups`, times `weights_R` where given. own_e2: int32, the
    first own row of every expert, and the one behind the last, where somebody has found them. tiles: those of
    columns of the product that makes the rows, where it tells of them."""

    act_RF: Tensor
    down_eDF: Tensor
    groups: Groups
    out_RD: Tensor
    weights_R: Tensor | None
    own_e2: Tensor | None = None
    tiles: int = 0

    @property
    def epilogue(self) -> Epilogue:
        return Epilogue.PLAIN if self.weights_R is None else Epilogue.WEIGHTED

    def tiling(self) -> Tiling:
        rows, experts = len(self.act_RF), self.groups.ends_e.numel()
        return tiling_of(Layout.FORWARD, self.epilogue, rows, experts, self.act_RF, self.out_RD)

    @property
    def is_empty(self) -> bool:
        """Whether there are no rows, or no experts."""
        return not (len(self.act_RF) and len(self.down_eDF))

    def __call__(self) -> None:
        if self.is_empty:
            return
        operands = self.act_RF, self.down_eDF, self.groups, self.out_RD, self.epilogue
        more: Extras = {"weights_R": self.weights_R}
        if self.tiles:
            more |= {"beside": begins_behind(self.tiles), "progress": self.groups.progress}
        queue_product(Layout.FORWARD, *operands, follows=True, **more)


def _fake_ffn(rows_RD, gate_up_eGD, down_eDF, counts_e, weights_R, keep):
    gate_up_RG = rows_RD.new_empty(rows_RD.shape[0] if keep else 0, gate_up_eGD.shape[1])
    plan = counts_e.new_empty(COUNTERS + counts_e.shape[0], dtype=torch.int32)
    return rows_RD.new_empty(rows_RD.shape), gate_up_RG, plan


class Saved(NamedTuple):
    """Tensors that the backward of `ffn` needs: `gate_up_RG` without rows is computed again."""

    rows_RD: Tensor
    gate_up_eGD: Tensor
    down_eDF: Tensor
    plan: Tensor
    weights_R: Tensor | None
    gate_up_RG: Tensor


def run_ffn_backward(
    d_y_RD: Tensor,
    rows_RD: Tensor,
    gate_up_eGD: Tensor,
    down_eDF: Tensor,
    plan: Tensor,
    weights_R: Tensor | None,
    gate_up_RG: Tensor,
    needs: Sequence[bool],
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """d_rows_RD, d_gate_up_eGD, d_down_eDF, d_weights_R; empty where not needed. needs: of rows, gate_up and
    down."""
    return ffn_gradients(d_y_RD, Saved(rows_RD, gate_up_eGD, down_eDF, plan, weights_R, gate_up_RG), needs)


class Over(NamedTuple):
    """Memory that a backward may write over. gate_up: gate and up, the largest of what it holds, by their
    gradient. d_y: the gradient of the result, by that of the rows, unless what is left reads it."""

    gate_up: bool = False
    d_y: bool = False


def ffn_gradients(
    d_y_RD: Tensor,
    saved: Saved,
    needs: Sequence[bool],
    *,
    gradients: tuple[Tensor, Tensor] | None = None,
    deferral: Deferral | None = None,
    beside: Beside = ALONE,
    over: Over = Over(),  # noqa: B008 (immutable)
    mean_rows: int = 0,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The gradients that `run_ffn_backward` gives. The weights' gradients are not
    among the results where they are added to `gradients`, or left to `deferral`. beside: the kernel of the
    product of `d_y_RD`, which brings its rows as well. mean_rows: as in `Groups`."""
    rows_RD, gate_up_eGD, down_eDF, plan, weights_R, gate_up_RG = saved
    need_rows, need_gate_up, need_down = needs
    rows, groups = rows_RD.shape[0], Groups(plan=plan, mean_rows=mean_rows)
    d_y_RD, rows_RD, weights = d_y_RD.contiguous(), rows_RD.contiguous(), (gate_up_eGD, down_eDF)
    gate_up_eGD, down_eDF = gate_up_eGD.contiguous(), down_eDF.contiguous()
    consume, over_d_y = over.gate_up, over.d_y and need_rows and deferral is None
    d_rows_RD = d_y_RD if over_d_y else rows_RD.new_empty(rows_RD.shape if need_rows else 0)
    if rows == 0 or not down_eDF.shape[0]:
        d_gate_up_eGD = gate_up_eGD.new_zeros(gate_up_eGD.shape if need_gate_up else 0)
        d_down_eDF = down_eDF.new_zeros(down_eDF.shape if need_down else 0)
        return d_rows_RD, d_gate_up_eGD, d_down_eDF, rows_RD.new_empty(rows, dtype=torch.float32)
    if gate_up_RG.shape[0] == 0:
        gate_up_RG, consume = rows_RD.new_empty(rows, gate_up_eGD.shape[1]), True
        queue_product(Layout.FORWARD, rows_RD, gate_up_eGD, groups, gate_up_RG)
    weights_R = None if weights_R is None else weights_R.contiguous()
    slopes = Slopes(
        gate_up=gate_up_RG, d_gate_up=gate_up_RG if consume else torch.empty_like(gate_up_RG), keep=need_down
    )
    act_RF, d_weights_R = _swiglu_gradient(d_y_RD, down_eDF, groups, slopes, weights_R, beside)
    d_gate_up_RG = slopes.d_gate_up
    add_to = (None, None) if gradients is None else gradients
    if deferral is not None:  # takes those of both weights
        parts = (d_gate_up_RG, rows_RD), (d_y_RD, act_RF)
        for weight, part, adds in zip(weights, parts, add_to, strict=True):
            out = weight.new_empty(weight.shape) if deferral.early and adds is None else None
            what = {"d_out": part[0], "rows": part[1], "groups": groups, "weight": weight}
            left = LeftGradient(**what, add_to=adds, out=out)
            deferral.add(weight, left)
        need_gate_up = need_down = False
    d_down_eDF = _weight_gradient(d_y_RD, act_RF, groups, down_eDF, need_down, add_to[1])
    del act_RF  # each piece goes before the next is made: the peak is the backward's
    d_gate_up_eGD = _weight_gradient(d_gate_up_RG, rows_RD, groups, gate_up_eGD, need_gate_up, add_to[0])
    if need_rows:
        queue_product(Layout.DGRAD, d_gate_up_RG, gate_up_eGD, groups, d_rows_RD)
    if d_weights_R is None:
        d_weights_R = rows_RD.new_empty(0, dtype=torch.float32)
    return d_rows_RD, d_gate_up_eGD, d_down_eDF, d_weights_R


def ffn_backward(
    d_y_RD: Tensor, saved: Saved, needs: tuple[bool, bool, bool], *, as_operators: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """`run_ffn_backward`, but that the gradient of gate and up is written over them unless as an operator."""
    if as_operators:
        return torch.ops.imbrex_experts_v4.ffn_backward(d_y_RD, *saved, needs)
    return ffn_gradients(d_y_RD, saved, needs, over=Over(gate_up=True))


def _weight_gradient(
    d_out: Tensor,
    rows: Tensor,
    groups: Groups,
    weight: Tensor,
    needed: bool,
    add_to: Tensor | None,
    out: Tensor | None = None,
) -> Tensor:
    """[e, N, K]: new, or `out`; empty where it is not needed or was added to `add_to`."""
    if not needed:
        return weight.new_empty(0)
    if add_to is None:
        d_weight = weight.new_empty(weight.shape) if out is None else out
        queue_product(Layout.WGRAD, d_out, rows, groups, d_weight)
        return d_weight
    epilogue = Epilogue.ADD_FLOAT if add_to.dtype == torch.float32 else Epilogue.ADD
    queue_product(Layout.WGRAD, d_out, rows, groups, add_to, epilogue)
    return weight.new_empty(0)


@dataclass(frozen=True, kw_only=True, slots=True)
class LeftGradient:
    """A weight's gradient that a backward has left to a `Deferral`, whose `Gradient` it is.

    d_out [R, N], rows [R, K]: bf16, of the product of `rows` with `weight` [e, N, K], in `groups`. add_to:
    where it is added, or `None`. out: memory for it that nobody else has had since the backward began.
    """

    d_out: Tensor
    rows: Tensor
    groups: Groups
    weight: Tensor
    add_to: Tensor | None
    out: Tensor | None = None

    def __call__(self, total: Tensor | None) -> Tensor | None:
        target = total if self.add_to is None else self.add_to
        operands = self.d_out, self.rows, self.groups, self.weight
        d_weight = _weight_gradient(*operands, True, target, self.out)
        if self.add_to is not None:
            return None
        return d_weight if total is None else total


def _swiglu_gradient(
    d_y_RD: Tensor,
    down_eDF: Tensor,
    groups: Groups,
    slopes: Slopes,
    weights_R: Tensor | None,
    beside: Beside,
) -> tuple[Tensor, Tensor | None]:
    """act [R, F] times the weights (unset without `keep`), d_weights [R]; the rest is in `slopes`."""
    act_RF, parts_PR, d_weights_R = d_y_RD.new_empty(d_y_RD.shape[0], down_eDF.shape[2]), None, None
    if weights_R is not None:
        parts_PR = weights_R.new_empty(parts_of_weights(d_y_RD.shape[0], down_eDF), weights_R.shape[0])
        d_weights_R = torch.empty_like(weights_R)
    slopes = replace(slopes, d_weights=parts_PR)
    run_slopes(d_y_RD, down_eDF, groups, slopes, weights_R, act_RF, d_weights_R, beside)
    return act_RF, d_weights_R


class Slots(NamedTuple):
    """Tensors that `run_gradients` writes, `None` where a gradient is not needed. parts_PR: float32, as many
    as `parts_of_weights` says. d_rows_RD may lie where the gradient of the result does."""

    act_RF: Tensor
    parts_PR: Tensor
    d_weights_R: Tensor
    d_rows_RD: Tensor | None
    d_gate_up_eGD: Tensor | None
    d_down_eDF: Tensor | None


def run_gradients(
    d_y_RD: Tensor, saved: Saved, to: Slots, mean_rows: int = 0, *, beside: Beside = ALONE, keep: bool = False
) -> None:
    """Queue what `ffn_gradients` does with rows and weights of rows, into memory of the caller's. The
    gradient of gate and up is written over them. beside: the kernel of the product of `d_y_RD`. keep: act is
    wanted, also where the gradient of down is not."""
    groups, gate_up_RG = Groups(saved.plan, mean_rows=mean_rows), saved.gate_up_RG
    keep = keep or to.d_down_eDF is not None
    slopes = Slopes(gate_up=gate_up_RG, d_gate_up=gate_up_RG, keep=keep, d_weights=to.parts_PR)
    operands = d_y_RD, saved.down_eDF, groups, slopes
    run_slopes(*operands, saved.weights_R, to.act_RF, to.d_weights_R, beside)
    if to.d_down_eDF is not None:
        queue_product(Layout.WGRAD, d_y_RD, to.act_RF, groups, to.d_down_eDF)
    if to.d_gate_up_eGD is not None:
        queue_product(Layout.WGRAD, gate_up_RG, saved.rows_RD, groups, to.d_gate_up_eGD)
    if to.d_rows_RD is not None:
        queue_product(Layout.DGRAD, gate_up_RG, saved.gate_up_eGD, groups, to.d_rows_RD)


def _fake_ffn_backward(d_y_RD, rows_RD, gate_up_eGD, down_eDF, plan, weights_R, gate_up_RG, needs):
    need_rows, need_gate_up, need_down = needs
    return (
        rows_RD.new_empty(rows_RD.shape if need_rows else 0),
        gate_up_eGD.new_empty(gate_up_eGD.shape if need_gate_up else 0),
        down_eDF.new_empty(down_eDF.shape if need_down else 0),
        rows_RD.new_empty(0 if weights_R is None else rows_RD.shape[0], dtype=torch.float32),
    )


def _setup(ctx, inputs, output):
    rows_RD, gate_up_eGD, down_eDF, _counts, weights_R, _keep = inputs
    _y, gate_up_RG, plan = output
    ctx.save_for_backward(rows_RD, gate_up_eGD, down_eDF, plan, weights_R, gate_up_RG)
    ctx.mark_non_differentiable(gate_up_RG, plan)
    ctx.set_materialize_grads(False)


def _backward(ctx, d_y_RD, *_):
    if d_y_RD is None:
        return (None,) * 6
    rows, gate_up, down, _, weights, _ = ctx.needs_input_grad
    d_rows, d_gate_up, d_down, d_weights = torch.ops.imbrex_experts_v4.ffn_backward(
        d_y_RD, *ctx.saved_tensors, (rows, gate_up, down)
    )
    return (
        d_rows if rows else None,
        d_gate_up if gate_up else None,
        d_down if down else None,
        None,
        d_weights if weights else None,
        None,
    )


class Ffn(torch.autograd.Function):
    """`ffn` where nobody traces. gradients: the caller's tensors, to which the backward adds the weights', or
    `None`; they are no saved tensors: other micro-batches may have added to them in between.
    """

    @staticmethod
    def forward(ctx, rows_RD, gate_up_eGD, down_eDF, counts_e, weights_R, how):
        keep, beside, groups, backward = how
        inputs = rows_RD, gate_up_eGD, down_eDF, counts_e, weights_R
        y_RD, gate_up_RG, plan = run_ffn(*inputs, keep, beside, groups)
        ctx.save_for_backward(rows_RD, gate_up_eGD, down_eDF, plan, weights_R, gate_up_RG)
        ctx.gradients, ctx.deferral = backward
        leaves = beside is not None and beside.leave is not None
        # Whoever is asked for saved tensors may run the forward again, behind which no gradient is under way.
        ctx.brings = leaves and can_bring_gradient(down_eDF) and not saves_elsewhere()
        ctx.mean_rows = max(0 if part is None else part.mean_rows for part in (beside, groups))
        ctx.beside = ALONE
        ctx.consumed = ctx.over = False
        return y_RD

    @staticmethod
    @once_differentiable
    def backward(ctx, *grad_outputs):  # pyright: ignore[reportIncompatibleMethodOverride]
        (d_y_RD,) = grad_outputs
        rows, gate_up, down, _, weights, _ = ctx.needs_input_grad
        saved, add_to = Saved(*ctx.saved_tensors), ctx.gradients
        if ctx.consumed:  # by a backward that retained the graph: computed again, the same bits
            saved = saved._replace(gate_up_RG=saved.gate_up_RG[:0])
        # Zeros of no rows, or no experts, are not worth leaving.
        deferral = ctx.deferral if saved.rows_RD.shape[0] and saved.down_eDF.shape[0] else None
        ours, needs = add_to is None and deferral is None, (rows, gate_up, down)
        if ours and ctx.beside is ALONE and traced(d_y_RD):
            results = torch.ops.imbrex_experts_v4.ffn_backward(d_y_RD, *saved, needs)
        else:
            ctx.consumed = True
            more = {"gradients": add_to, "deferral": deferral, "beside": ctx.beside}
            more |= {"over": Over(gate_up=True, d_y=ctx.over), "mean_rows": ctx.mean_rows}
            results = ffn_gradients(d_y_RD, saved, needs, **more)
        present = rows, gate_up and ours, down and ours, weights
        d_rows, d_gate_up, d_down, d_weights = (
            result if is_given else None for result, is_given in zip(results, present, strict=True)
        )
        return d_rows, d_gate_up, d_down, None, d_weights, None


def can_bring_gradient(down_eDF: Tensor) -> bool:
    """Whether there is a kernel that brings rows of a gradient beside their product with this weight."""
    return down_eDF.shape[2] % 64 == 0


def brings_gradient(node: Any) -> bool:
    """Whether rows of a gradient can come beside the first product of a backward: its first node is that of
    `ffn`, there is a kernel, and nobody else reads them before, as nobody reads what is left."""
    return node is not None and node.name() == f"{Ffn.__name__}Backward" and node.brings


def give_gradient(y_RD: Tensor) -> None:
    """Let the backward of the `ffn` that made `y_RD` write the rows' gradient over that of `y_RD`, for which
    the caller answers: it is made for this backward, and nobody else reads it. Else without effect."""
    node: Any = y_RD.grad_fn
    if node is not None and node.name() == f"{Ffn.__name__}Backward":
        node.over = True


def bring_gradient(node: Any, beside: Beside) -> None:
    """Let `beside` be the kernel of that product. Where `brings_gradient`, before the backward, once."""
    node.beside = beside


_library.impl("ffn", run_ffn, "CUDA")
_library.impl("ffn_backward", run_ffn_backward, "CUDA")
register_fake("imbrex_experts_v4::ffn", _fake_ffn, lib=_library)
register_fake("imbrex_experts_v4::ffn_backward", _fake_ffn_backward, lib=_library)
register_autograd("imbrex_experts_v4::ffn", _backward, setup_context=_setup, lib=_library)


def shipped_variants() -> list[Variant]:
    """Every kernel that `ffn` and its backward can launch."""
    gemms = [gemm_variant(c.layout, c.epilogue, c.tiling, c.wide) for c in gemm_choices()]
    return [*glue_variants(), *gemms, *following_variants()]
