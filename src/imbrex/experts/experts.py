"""The experts of this rank: feed-forward networks, one after the other or as grouped products."""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.module import (
    _global_backward_hooks,
    _global_backward_pre_hooks,
    _global_forward_hooks,
    _global_forward_pre_hooks,
)

from imbrex.contracts import Dispatched, RowForm
from imbrex.experts import products
from imbrex.kernels import why_not_hopper, why_not_portable
from imbrex.kernels.ffn.ffn import ffn, give_gradient
from imbrex.kernels.ffn.fp8 import Fp8Experts, ffn_fp8, quantise_experts, why_not_fp8
from imbrex.kernels.ffn.fp8_tokens import ffn_in_place_fp8
from imbrex.kernels.ffn.glue import Groups
from imbrex.kernels.ffn.operators import swiglu
from imbrex.kernels.ffn.tokens import ffn_in_place
from imbrex.kernels.ffn.widths import MULTIPLE, fits
from imbrex.kernels.fused.rows_out import rows_out_once
from imbrex.kernels.gemm.portable import describe_portable, why_grouped_is_faster

Activation = Literal["swiglu", "gelu"]
ACTIVATIONS = ("swiglu", "gelu")
KernelWeights = tuple[Tensor, Tensor, bool | None]
"""gate_up_proj, down_proj, and `Experts.one_launch`."""
IMPLEMENTATIONS = ("loop", "grouped", "kernels", "kernels-fp8")


@dataclass(frozen=True, kw_only=True, slots=True)
class Shard:
    """The part of every expert's width F that this rank holds: piece `rank` of `size` equal ones."""

    rank: int = 0
    size: int = 1

    def take(self, full: Tensor, dim: int) -> Tensor:
        return full.chunk(self.size, dim)[self.rank]


class Experts(nn.Module):
    """The experts of this rank's slots: feed-forward networks, expert-major rows in and out.

    expert_ids: the expert in every local slot, `-1` for a spare.
    hidden_size D, intermediate_size F. activation: `swiglu`, down(silu(gate(x)) * up(x)), or `gelu`,
        down(gelu(up(x))) with the exact error function.
    bias: add biases to both products. shard: the part of F held here; outputs are then partial sums.
    implementation: `loop` (one expert after the other: the oracle), `grouped` (grouped products), `kernels`
        (imbrex's own, for SwiGLU in bfloat16 without biases on a GPU of compute capability 8.0 or more; D and
        F that are no multiples of 8 are padded in every call), or `auto`: `kernels` on Hopper and where torch
        computes grouped products one by one, else `grouped`. `implementation_reason` says why; rows of
        another dtype, or on a CPU, go through `grouped`.
        `kernels-fp8` is `kernels` whose forward without gradients computes in e4m3 with block scales (D and F
        multiples of 128): inference. The weights are quantised when first needed, and again after a change,
        and kept beside them.
    seed: parameters are drawn per expert from it, so that neither placement nor rank count changes them.

    Parameters, as in Hugging Face checkpoints: gate_up_proj [e, 2F, D], gate rows first (`gelu`: up_proj
    [e, F, D]); down_proj [e, D, F]; gate_up_proj_bias [e, 2F], down_proj_bias [e, D].

    gradient_sums: `None`, or tensors like gate_up_proj and down_proj, float32 or bfloat16, to which `kernels`
        add the weights' gradients in the backward; the parameters then get none. ValueError where the rows
        cannot go through them.
    one_launch: whether, without gradients, `kernels` compute both products of a small batch's rows in one
        launch where they come from a small dispatch over NVLink; the same bits. `None`: where that was
        measured to be faster (`kernels.ffn.both.why_two`). Calls that are captured keep what it was. In
        `kernels-fp8` that launch quantises the rows as well.
    """

    gradient_sums: tuple[Tensor, Tensor] | None = None
    one_launch: bool | None = None

    def __init__(
        self,
        expert_ids: tuple[int, ...],
        hidden_size: int,
        intermediate_size: int,
        *,
        activation: Activation = "swiglu",
        bias: bool = False,
        shard: Shard | None = None,
        implementation: str = "auto",
        seed: int = 0,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.shard = shard or Shard()
        if activation not in ACTIVATIONS:
            raise ValueError(f"Experts: activation={activation!r}; use one of {', '.join(ACTIVATIONS)}")
        if intermediate_size % self.shard.size:
            raise ValueError(
                f"Experts: intermediate_size {intermediate_size} does not divide over "
                f"{self.shard.size} tensor ranks; choose tensor_parallel among its divisors"
            )
        self.expert_ids, self.activation = expert_ids, activation
        self.hidden_size, self.intermediate_size = hidden_size, intermediate_size
        slots, width = len(expert_ids), intermediate_size // self.shard.size
        unfit = _why_not_kernels(activation, bias)
        unfit_fp8 = why_not_fp8(hidden_size, width)
        picked = pick_implementation(implementation, unfit, unfit_fp8)
        self.implementation, self.implementation_reason = picked
        if self.implementation == "kernels" and not fits(hidden_size, width):
            self.implementation_reason += f"; every call pads D and F to multiples of {MULTIPLE}"
        self._fp8: tuple[tuple[int, ...], Fp8Experts] | None = None
        # Kernels scale inside, and find the weights' gradient on their way back.
        glued = self.implementation == "grouped" and unfit is None and fits(hidden_size, width)
        glued = glued and why_not_portable() is None
        self.applies_weights = glued or self.implementation.startswith("kernels")
        up_width = 2 * width if activation == "swiglu" else width

        def parameter(*shape: int) -> nn.Parameter:
            return nn.Parameter(torch.empty(slots, *shape, device=device, dtype=dtype))

        self.gate_up_proj = parameter(up_width, hidden_size)
        self.down_proj = parameter(hidden_size, width)
        self.gate_up_proj_bias = parameter(up_width) if bias else None
        self.down_proj_bias = parameter(hidden_size) if bias else None
        self.reset_parameters(seed)

    @torch.no_grad()
    def reset_parameters(self, seed: int) -> None:
        """Uniform in +-1/sqrt(inputs), as `torch.nn.Linear`, drawn per expert on the CPU; spares are zero."""
        if self.down_proj.is_meta:
            return
        for slot, expert in enumerate(self.expert_ids):
            drawn = torch.Generator().manual_seed((seed * 1_000_003 + expert) % 2**63)
            for name, full in self._draw(drawn).items():
                local = self.shard_of(name, full) if expert >= 0 else 0
                getattr(self, name)[slot].copy_(local)

    def _draw(self, generator: torch.Generator) -> dict[str, Tensor]:
        """One whole expert, before sharding."""
        wide = (2 if self.activation == "swiglu" else 1) * self.intermediate_size
        shapes = {
            "gate_up_proj": (wide, self.hidden_size),
            "down_proj": (self.hidden_size, self.intermediate_size),
        }
        if self.down_proj_bias is not None:
            shapes |= {"gate_up_proj_bias": (wide,), "down_proj_bias": (self.hidden_size,)}
        inputs = {"gate": self.hidden_size, "down": self.intermediate_size}
        drawn = {}
        for name, shape in shapes.items():
            bound = 1 / math.sqrt(inputs[name[:4]])
            whole = torch.empty(shape, dtype=torch.float32, device="cpu")
            drawn[name] = whole.uniform_(-bound, bound, generator=generator)
        return drawn

    def shard_of(self, name: str, full: Tensor) -> Tensor:
        """This rank's part of a whole expert's parameter `name` [..., as documented, without the slot]."""
        if name == "down_proj":
            return self.shard.take(full, 1)
        if name == "down_proj_bias":
            return full
        halves = full.chunk(2, 0) if self.activation == "swiglu" else (full,)
        return torch.cat([self.shard.take(half, 0) for half in halves])

    def forward(self, dispatched: Dispatched) -> Tensor:
        """rows_RD of the dispatch's dtype (of rows in fp8: bfloat16), times `handle.weights_R` where
        `applies_weights`. Rows past the counts are unset."""
        rows_RD, counts_e, scales_RB = dispatched.rows_RD, dispatched.counts_e, dispatched.scales_RB
        weights_R = dispatched.handle.weights_R if self.applies_weights else None
        if scales_RB is not None:
            self._check_fp8_rows()
            return ffn_fp8(rows_RD, self.quantised(), counts_e, scales_RB=scales_RB, weights_R=weights_R)
        if dispatched.index_R is not None:
            return self._in_place(rows_RD, dispatched.index_R, counts_e, weights_R)
        by_kernels = weights_R is not None and rows_RD.is_cuda and rows_RD.dtype == torch.bfloat16
        if not (by_kernels and self.implementation.startswith("kernels")):
            self._check_no_sums()
        if not by_kernels:
            out_RD = self._by_products(rows_RD, counts_e)
            return out_RD if weights_R is None else out_RD * weights_R[:, None].to(out_RD.dtype)
        beside: Any = dispatched.beside
        groups = beside if isinstance(beside, Groups) else None
        if groups is not None:
            groups.one_launch = self.one_launch
        if self.implementation == "kernels-fp8" and not torch.is_grad_enabled():
            return ffn_fp8(rows_RD, self.quantised(), counts_e, weights_R=weights_R, groups=groups)
        gate_up, down = self.gate_up_proj.to(rows_RD.dtype), self.down_proj.to(rows_RD.dtype)
        if self.implementation.startswith("kernels"):
            staged = dispatched.form is RowForm.UNDER_WAY
            beside = rows_out_once(dispatched.beside) if staged else beside
            if staged and beside is not None and self.unchanged:  # who changes the result reads it
                beside = beside._replace(leave=dispatched.leave)
            more = {"weights_R": weights_R, "gradients": self.gradient_sums, "beside": beside}
            return ffn(rows_RD, gate_up, down, counts_e, **more)
        gate_up_RG = products.grouped_mm(rows_RD, gate_up.mT, counts_e)
        act_RF = swiglu(gate_up_RG, counts_e.cumsum(0).to(torch.int32), weights_R)
        return products.grouped_mm(act_RF, down.mT, counts_e)

    def _load_from_state_dict(self, state_dict, prefix, *more):  # pyright: ignore[reportIncompatibleMethodOverride]
        super()._load_from_state_dict(state_dict, prefix, *more)
        down, errors = state_dict.get(f"{prefix}down_proj"), more[-1]
        if down is not None and len(down) != len(self.expert_ids):
            errors.append(
                f"{prefix}down_proj was saved of {len(down)} experts, and {len(self.expert_ids)} live on "
                "this rank: save with imbrex.parallel.checkpoint, whose load reads at any number of ranks"
            )

    @property
    def has_own_forward(self) -> bool:
        """Whether a subclass, or somebody who has set it, computes by a `forward` of their own."""
        return type(self).forward is not Experts.forward or "forward" in self.__dict__

    @property
    def unchanged(self) -> bool:
        """Whether no subclass, hook or other function changes, or reads, what `forward` gives, or its
        gradient."""
        back = self._backward_hooks or self._backward_pre_hooks
        back = back or _global_backward_hooks or _global_backward_pre_hooks
        hooked = back or self._forward_hooks or _global_forward_hooks
        return not (hooked or self.has_own_forward)

    @property
    def inputs_unchanged(self) -> bool:
        """Whether no hook changes, or reads, the inputs of `forward`."""
        return not (self._forward_pre_hooks or _global_forward_pre_hooks)

    @property
    def forms(self) -> tuple[RowForm, ...]:
        """The forms of rows that a call takes now. Without gradients these are rows in fp8, if the experts
        compute in fp8, and tokens with an index, through which rows are read, or copied if that is faster.
        Strategies that fuse ask for rows that are under way. In fp8 rows stand before tokens if few of them
        go through one launch, which takes rows. A `forward` of somebody's own gets rows alone, unless its
        class has `forms` of its own, and so does a hook."""
        if self.has_own_forward or not self.implementation.startswith("kernels"):
            return (RowForm.ROWS,)
        fit = fits(self.hidden_size, self.down_proj.shape[2])
        under_way = (RowForm.UNDER_WAY,) if fit and self.implementation == "kernels" else ()
        if torch.is_grad_enabled() or not self.inputs_unchanged:
            return RowForm.ROWS, *under_way
        indexed = (RowForm.INDEXED,) if fit else ()
        if self.implementation != "kernels-fp8":
            return *indexed, RowForm.ROWS, *under_way
        one_launch = self.one_launch is not False
        return RowForm.FP8, *((RowForm.ROWS, *indexed) if one_launch else (*indexed, RowForm.ROWS))

    @property
    def kernel_weights(self) -> KernelWeights | None:
        """The weights and `one_launch`, if kernels compute these experts in bfloat16 and no hook reads or
        changes what `forward` takes and returns; otherwise `None`."""
        own = self.implementation == "kernels" and self.unchanged and self.inputs_unchanged
        if not own or not fits(self.hidden_size, self.down_proj.shape[2]):
            return None
        return self.gate_up_proj, self.down_proj, self.one_launch

    def _in_place(self, x_TD: Tensor, index_R: Tensor, counts_e: Tensor, weights_R: Tensor | None) -> Tensor:
        if self.implementation == "kernels-fp8":
            return ffn_in_place_fp8(x_TD, index_R, self.quantised(), counts_e, weights_R=weights_R)
        weights = self.gate_up_proj.to(x_TD.dtype), self.down_proj.to(x_TD.dtype)
        return ffn_in_place(x_TD, index_R, *weights, counts_e, weights_R=weights_R)

    def _check_no_sums(self) -> None:
        if self.gradient_sums is not None and torch.is_grad_enabled():
            raise ValueError(
                "Experts: gradient_sums want implementation='kernels' and bfloat16 rows on a GPU; "
                f"this is {self.implementation!r}, {self.implementation_reason}"
            )

    def _check_fp8_rows(self) -> None:
        if RowForm.FP8 not in self.forms:
            raise ValueError(
                f"Experts: rows in fp8 for {self.implementation!r}, or where gradients are recorded; use "
                "implementation='kernels-fp8' under torch.no_grad(), or dispatch without RowForm.FP8"
            )

    def quantised(self) -> Fp8Experts:
        """The weights in fp8. They are cached until the weights change. Under `torch.compile`, which cannot
        see a change, they are those of the last call outside of the graph; ValueError if there was none.
        Changes through `.data` or under inference_mode are not seen: call `weights_written` after them."""
        if torch.compiler.is_compiling():
            if self._fp8 is None:
                raise ValueError("Experts: call quantised() once before compiling experts in fp8")
            return self._fp8[1]
        weights = self.gate_up_proj, self.down_proj
        # Weights made under inference_mode count no versions.
        state = tuple(n for w in weights for n in (w.data_ptr(), 0 if w.is_inference() else w._version))
        if self._fp8 is None or self._fp8[0] != state:
            self._fp8 = None  # frees the old ones first
            self._fp8 = state, quantise_experts(*weights)
        return self._fp8[1]

    @torch.no_grad()
    def weights_written(self, slots: Sequence[int]) -> None:
        """Quantise the weights of these local slots again, in place, so that captured calls use them too.
        Call it after writing weights in a way that autograd does not see."""
        if self._fp8 is None:
            return
        for slot in slots:
            here = slice(slot, slot + 1)
            fresh = quantise_experts(self.gate_up_proj[here], self.down_proj[here])
            for old, new in zip(self._fp8[1].tensors(), fresh.tensors(), strict=True):
                old[here].view(torch.uint8).copy_(new.view(torch.uint8))

    def _by_products(self, rows_RD: Tensor, counts_e: Tensor) -> Tensor:
        product = _loop_product if self.implementation == "loop" else products.grouped_product
        up_RF = product(rows_RD, self.gate_up_proj, self.gate_up_proj_bias, counts_e)
        # Tensor ranks sum their outputs, so only the first adds the bias.
        down_bias = self.down_proj_bias if self.shard.rank == 0 else None
        return product(activate(up_RF, self.activation), self.down_proj, down_bias, counts_e)

    def extra_repr(self) -> str:
        return (
            f"experts={list(self.expert_ids)}, hidden_size={self.hidden_size}, "
            f"intermediate_size={self.intermediate_size}, activation={self.activation}, "
            f"shard={self.shard.rank}/{self.shard.size}, implementation={self.implementation}"
        )


def surely_fit(experts: object) -> bool:
    """Whether the result of `experts` is certain to fit a combine in number of rows, width and dtype: they
    are imbrex's own, and no hook changes their result."""
    return isinstance(experts, Experts) and experts.unchanged


class ExternalExperts:
    """The base of classes that call `Experts` with parameters that are stored elsewhere.

    parameters(): returns these parameters, or tensors computed from them, for schedules of several chunks.
    unchanged: whether it returns the result of `Experts`, which nothing else changes or reads.
    """

    unchanged = False

    @property
    def kernel_weights(self) -> KernelWeights | None:
        """Weights that a dispatcher may use itself; see `Experts`."""
        return None


def weights_of_kernels(experts: object) -> KernelWeights | None:
    """The weights of imbrex's own experts, if a dispatcher may compute them itself; otherwise `None`."""
    return experts.kernel_weights if isinstance(experts, Experts | ExternalExperts) else None


def give_away(experts: object, rows_RD: Tensor) -> None:
    """Allow the backward of imbrex's own experts to overwrite the gradient of `rows_RD`, their result. Only
    for callers that know that nothing else uses this gradient."""
    if isinstance(experts, Experts | ExternalExperts) and experts.unchanged:
        give_gradient(rows_RD)


def activate(up_RF: Tensor, activation: str) -> Tensor:
    """[R, 2F] to [R, F] for `swiglu`, [R, F] to [R, F] for `gelu`."""
    if activation == "gelu":
        return F.gelu(up_RF)
    gate_RF, up_RF = up_RF.chunk(2, -1)
    return F.silu(gate_RF) * up_RF


def pick_implementation(name: str, unfit: str | None = None, unfit_fp8: str | None = None) -> tuple[str, str]:
    """The implementation for `name`, and the reason. `unfit`: why these experts cannot use the kernels, and
    `unfit_fp8` those in fp8.

    Warns where kernels were asked for and cannot be had. Raises ValueError for an unknown name.
    """
    if name not in (*IMPLEMENTATIONS, "auto"):
        raise ValueError(f"Experts: implementation {name!r}; use auto or one of {', '.join(IMPLEMENTATIONS)}")
    if name in ("loop", "grouped"):
        return name, "asked for"
    reason, no_wgmma = unfit or why_not_portable(), why_not_hopper()
    if reason is None and name == "auto" and no_wgmma is not None:
        reason = why_grouped_is_faster()
    if reason is not None:
        if name != "auto":
            warnings.warn(f"Experts: grouped products instead of kernels: {reason}", stacklevel=3)
        return "grouped", reason
    unfit_fp8 = unfit_fp8 or no_wgmma
    if name == "kernels-fp8" and unfit_fp8 is not None:
        warnings.warn(f"Experts: kernels in bfloat16 instead of fp8: {unfit_fp8}", stacklevel=3)
        return "kernels", unfit_fp8
    if no_wgmma is not None:
        return name if name != "auto" else "kernels", describe_portable()
    if name == "auto":
        return "kernels", "the fastest for bfloat16 on this GPU; other rows go through grouped products"
    return name, "asked for"


def _why_not_kernels(activation: str, bias: bool) -> str | None:
    if activation != "swiglu":
        return f"the expert kernels compute SwiGLU, not {activation}"
    return "the expert kernels add no biases" if bias else None


def _loop_product(rows_RK: Tensor, weight_eNK: Tensor, bias_eN: Tensor | None, counts_e: Tensor) -> Tensor:
    # host sync: the loop needs every expert's number of rows; `grouped` does not
    counts = counts_e.tolist()
    outputs, begin = [], 0
    for expert, count in enumerate(counts):
        bias = None if bias_eN is None else bias_eN[expert].to(rows_RK.dtype)
        rows = rows_RK[begin : begin + count]
        outputs.append(F.linear(rows, weight_eNK[expert].to(rows_RK.dtype), bias))
        begin += count
    outputs.append(rows_RK.new_zeros(rows_RK.shape[0] - begin, weight_eNK.shape[1]))
    return torch.cat(outputs)
