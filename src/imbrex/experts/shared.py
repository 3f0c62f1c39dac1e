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


class LastProduct(nn.Linear):
    """Torch's linear layer, which can say whether it only multiplies."""

    def only_multiplies(self, act_TF: Tensor) -> bool:
        """Whether it multiplies in the dtype of what goes in, and no hook or other function changes, or
        reads, what goes in or comes out."""
        if self.bias is not None or not plain(self.weight) or "forward" in vars(self):
            return False
        kind = act_TF.device.type
        dtype = torch.get_autocast_dtype(kind) if autocast_on(act_TF) else self.weight.dtype
        before = self._forward_pre_hooks or _global_forward_pre_hooks
        behind = self._forward_hooks or _global_forward_hooks
        back = self._backward_hooks or self._backward_pre_hooks
        back = back or _global_backward_hooks or _global_backward_pre_hooks
        return dtype == act_TF.dtype and not (before or behind or back)


class SharedExpert(nn.Module):
    """The expert that every token visits, computed on the token's rank: SwiGLU, times sigmoid(x @ gate) if
    gated, as in Qwen2-MoE. Parameters have Hugging Face's names: gate_proj, up_proj, down_proj."""

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

    def forward(self, x_TD: Tensor) -> Tensor:
        gate_TF, up_TF = self.gate_proj(x_TD), self.up_proj(x_TD)
        down: nn.Module = self.down_proj
        large = not torch.compiler.is_compiling() and up_TF.nbytes >= LARGE and up_TF.dim() == 2
        learns = large and gate_TF.dtype == up_TF.dtype and differentiated(gate_TF, up_TF)
        if learns and type(down) is LastProduct and down.only_multiplies(up_TF):
            # Autocast's product would take the weight in this dtype, too.
            return _Down.apply(gate_TF, up_TF, down.weight.to(up_TF.dtype))
        return down(F.silu(gate_TF) * up_TF)


class _Down(torch.autograd.Function):
    """down of silu(gate) * up, with the bits of torch's operators. The backward computes silu(gate) and the
    product with up again, which these keep."""

    @staticmethod
    def forward(gate_TF: Tensor, up_TF: Tensor, weight_DF: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return F.linear(F.silu(gate_TF) * up_TF, weight_DF)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Tensor) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Tensor, Tensor, Tensor | None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        (d_y_TD,), (gate_TF, up_TF, weight_DF) = gradients, ctx.saved_tensors
        silu_TF, d_weight_DF = F.silu(gate_TF), None
        if ctx.needs_input_grad[2]:
            d_weight_DF = d_y_TD.t() @ (silu_TF * up_TF)
        d_act_TF = d_y_TD @ weight_DF
        d_silu_TF, d_up_TF = d_act_TF * up_TF, d_act_TF * silu_TF
        if not torch.is_grad_enabled():
            return torch.ops.aten.silu_backward(d_silu_TF, gate_TF), d_up_TF, d_weight_DF
        sigmoid_TF = gate_TF.sigmoid()  # torch differentiates no `silu_backward`
        slope_TF = sigmoid_TF * (1 + gate_TF * (1 - sigmoid_TF))
        return d_silu_TF * slope_TF, d_up_TF, d_weight_DF


__all__ = ["LARGE", "SharedExpert"]
