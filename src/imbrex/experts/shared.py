"""The expert that every token visits."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.module import (
    _global_backward_hooks,
    _global_backward_pre_hooks,
    _global_forward_hooks,
    _global_forward_pre_hooks,
)

from imbrex.runtime.tracing import autocast_on, differentiated, plain

LARGE = 32 << 20
"""Bytes of a shared expert's activations from which on a backward computes them again instead of keeping
them. Of fewer the two products take less time than the host takes for a node in Python."""


class Candid(nn.Module):
    """A module that can say whether somebody else has a part in its calls."""

    def untouched(self) -> bool:
        """Whether a call is the class's `forward` alone: no hook and no other function changes, or reads,
        what goes in or comes out."""
        before = self._forward_pre_hooks or _global_forward_pre_hooks
        behind = self._forward_hooks or _global_forward_hooks
        back = self._backward_hooks or self._backward_pre_hooks
        back = back or _global_backward_hooks or _global_backward_pre_hooks
        return not (before or behind or back or "forward" in vars(self))


class LastProduct(Candid, nn.Linear):
    """Torch's linear layer, which can say whether it only multiplies."""

    def only_multiplies(self, act_TF: Tensor) -> bool:
        """Whether it multiplies in the dtype of what goes in, and does nothing else."""
        if self.bias is not None or not plain(self.weight):
            return False
        kind = act_TF.device.type
        dtype = torch.get_autocast_dtype(kind) if autocast_on(act_TF) else self.weight.dtype
        return dtype == act_TF.dtype and self.untouched()


class SharedExpert(Candid):
    """The expert that every token visits, computed on the token's rank: SwiGLU. Parameters have Hugging
    Face's names: gate_proj, up_proj, down_proj."""

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(hidden_size, intermediate_size, bias=False, device=device, dtype=dtype)
        self.up_proj = nn.Linear(hidden_size, intermediate_size, bias=False, device=device, dtype=dtype)
        self.down_proj = LastProduct(intermediate_size, hidden_size, bias=False, device=device, dtype=dtype)

    def forward(self, x_TD: Tensor, score: nn.Module | None = None) -> Tensor:
        """The expert's result [T, D]; with `score` the result that `gated` describes."""
        gate_TF, up_TF = self.gate_proj(x_TD), self.up_proj(x_TD)
        score_T1 = None if score is None else score(x_TD)
        down: nn.Module = self.down_proj
        large = not torch.compiler.is_compiling() and up_TF.nbytes >= LARGE and up_TF.dim() == 2
        learns = large and gate_TF.dtype == up_TF.dtype and differentiated(gate_TF, up_TF)
        if learns and type(down) is LastProduct and down.only_multiplies(up_TF):
            weight_DF = down.weight.to(up_TF.dtype)  # autocast's product would take it in this dtype, too
            if score_T1 is None or (score_T1.dtype == up_TF.dtype and score_T1.shape == (len(up_TF), 1)):
                return _Down.apply(gate_TF, up_TF, weight_DF, score_T1)
            y_TD = _Down.apply(gate_TF, up_TF, weight_DF, None)
        else:
            y_TD = down(F.silu(gate_TF) * up_TF)
        return y_TD if score_T1 is None else F.sigmoid(score_T1) * y_TD


def gated(expert: nn.Module, score: nn.Module, x_TD: Tensor) -> Tensor:
    """expert(x) * sigmoid(score(x)), as in Qwen2-MoE. Where a large shared expert learns, the result alone
    has the bits of torch's operators: the gradient of `score`, and what it adds to that of `x`, come without
    expert(x) from what the expert keeps anyway."""
    if type(expert) is SharedExpert and not torch.compiler.is_compiling() and expert.untouched():
        return expert(x_TD, score)
    y_TD = expert(x_TD)
    return F.sigmoid(score(x_TD)) * y_TD


class _Down(torch.autograd.Function):
    """down of silu(gate) * up, times sigmoid(score) if there is one, with the bits of torch's operators. The
    backward computes silu(gate) and the product with up again, which these keep.

    They keep the result of down, too, for the gradient of the score: sigmoid(-score) times the sum over D of
    result * d_result. That is the sum over F of act * d_act, with act = silu(gate) * up, and of up * d_up,
    which are here. It has other bits, as near to the truth: 0.8 to 1.15 of torch's error in bfloat16.
    """

    @staticmethod
    def forward(gate_TF: Tensor, up_TF: Tensor, weight_DF: Tensor, score_T1: Tensor | None) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        y_TD = F.linear(F.silu(gate_TF) * up_TF, weight_DF)
        return y_TD if score_T1 is None else F.sigmoid(score_T1) * y_TD

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Tensor) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        (d_y_TD,), (gate_TF, up_TF, weight_DF, score_T1) = gradients, ctx.saved_tensors
        if score_T1 is not None:
            d_y_TD = d_y_TD * F.sigmoid(score_T1)
        silu_TF, d_weight_DF, d_score_T1 = F.silu(gate_TF), None, None
        if ctx.needs_input_grad[2]:
            d_weight_DF = d_y_TD.t() @ (silu_TF * up_TF)
        d_act_TF = d_y_TD @ weight_DF
        d_silu_TF, d_up_TF = d_act_TF * up_TF, d_act_TF * silu_TF
        if score_T1 is not None and ctx.needs_input_grad[3]:
            d_score_T1 = (d_up_TF * up_TF).sum(1, keepdim=True) * F.sigmoid(-score_T1)
        if torch.is_grad_enabled():  # torch differentiates no `silu_backward`
            sigmoid_TF = gate_TF.sigmoid()
            d_gate_TF = d_silu_TF * (sigmoid_TF * (1 + gate_TF * (1 - sigmoid_TF)))
        else:
            d_gate_TF = torch.ops.aten.silu_backward(d_silu_TF, gate_TF)
        return d_gate_TF, d_up_TF, d_weight_DF, d_score_T1


__all__ = ["LARGE", "SharedExpert"]
