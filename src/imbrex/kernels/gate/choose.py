"""A gate after its logits in one kernel, forward and backward: the host's side of `choose.cu`."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from imbrex.kernels.jit import Kernel, Variant, cached_unavailable, load
from imbrex.runtime.tracing import differentiated, once_differentiable, traced

KERNELS = ("choose_experts", "choose_experts_backward")
VALUES = (2, 4, 8, 16)
"""Experts of a lane, of which a warp has 32."""
MOST_EXPERTS, MOST_CHOICES, MOST_GROUPS = 32 * VALUES[-1], 32, 32
THREADS = 256
"""A block's. A warp has a token."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Choice:
    """The rule by which a token chooses `top_k` experts.

    sigmoid: scores are sigmoids, else a softmax. groups: equal groups of consecutive experts, of which
    `open_groups` are chosen from, by their best score or by the sum of their two best (`best_two`); 0: no
    limit. normalize: weights are divided by their sum. scale: a factor on the weights.
    """

    top_k: int
    sigmoid: bool
    groups: int
    open_groups: int
    best_two: bool
    normalize: bool
    scale: float


def shipped_variants() -> list[Variant]:
    return [
        _variant(entry, values, sigmoid)
        for entry in KERNELS
        for values in VALUES
        for sigmoid in (False, True)
    ]


def why_not_fused(logits_TE: Tensor, choice: Choice) -> str | None:
    """None if the kernels choose from these logits, float32 [T, E], else one sentence that says why not."""
    if not logits_TE.is_cuda:
        return "the gate's kernels need logits on a GPU"
    if logits_TE.dtype != torch.float32 or traced(logits_TE):
        return "the gate's kernels take float32 logits that nobody traces"
    if logits_TE.shape[1] > MOST_EXPERTS or choice.top_k > MOST_CHOICES or choice.groups > MOST_GROUPS:
        return (
            f"the gate's kernels choose {MOST_CHOICES} of {MOST_EXPERTS} experts in {MOST_GROUPS} groups "
            "at most"
        )
    return cached_unavailable(logits_TE.get_device())


def choose_experts(logits_TE: Tensor, bias_E: Tensor | None, choice: Choice) -> tuple[Tensor, Tensor]:
    """Ids int64 [T, K], best first, of equal ones the lowest, and weights float32 [T, K], differentiable in
    the logits once. bias_E: float32 [E], added to scores for the selection only."""
    if differentiated(logits_TE):
        return _Choose.apply(logits_TE, bias_E, choice)
    return run_choose(logits_TE.contiguous(), bias_E, choice)


class _Choose(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits_TE: Tensor, bias_E: Tensor | None, choice: Choice) -> tuple[Tensor, Tensor]:
        logits_TE = logits_TE.contiguous()
        ids_TK, weights_TK = run_choose(logits_TE, bias_E, choice)
        ctx.choice = choice
        ctx.save_for_backward(logits_TE, ids_TK)
        ctx.mark_non_differentiable(ids_TK)
        ctx.set_materialize_grads(False)
        return ids_TK, weights_TK

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Any) -> tuple[Tensor | None, None, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        _, d_weights_TK = gradients
        if d_weights_TK is None:
            return None, None, None
        logits_TE, ids_TK = ctx.saved_tensors
        return run_choose_backward(logits_TE, ids_TK, d_weights_TK.contiguous(), ctx.choice), None, None


def run_choose(logits_TE: Tensor, bias_E: Tensor | None, choice: Choice) -> tuple[Tensor, Tensor]:
    tokens, experts = logits_TE.shape
    device = logits_TE.device
    ids_TK = torch.empty(tokens, choice.top_k, dtype=torch.int64, device=device)
    weights_TK = torch.empty(tokens, choice.top_k, dtype=torch.float32, device=device)
    rule = [choice.groups, choice.open_groups, int(choice.best_two), int(choice.normalize), choice.scale]
    args = [logits_TE, bias_E, tokens, experts, choice.top_k, *rule, ids_TK, weights_TK]
    _launch("choose_experts", logits_TE, choice, args)
    return ids_TK, weights_TK


def run_choose_backward(logits_TE: Tensor, ids_TK: Tensor, d_weights_TK: Tensor, choice: Choice) -> Tensor:
    tokens, experts = logits_TE.shape
    d_logits_TE = torch.empty_like(logits_TE)
    rule = [choice.top_k, int(choice.normalize), choice.scale]
    args = [logits_TE, ids_TK, d_weights_TK, tokens, experts, *rule, d_logits_TE]
    _launch("choose_experts_backward", logits_TE, choice, args)
    return d_logits_TE


def _launch(entry: str, logits_TE: Tensor, choice: Choice, args: list[Any]) -> None:
    tokens, experts = logits_TE.shape
    if tokens:
        kernel = _kernel(entry, experts, choice.sigmoid, logits_TE.device)
        dependent = entry == "choose_experts"
        kernel.launch(grid=-(-tokens // (THREADS // 32)), block=THREADS, args=args, dependent=dependent)


def _variant(entry: str, values: int, sigmoid: bool) -> Variant:
    return Variant(
        source="gate/choose.cu", entry=entry, defines=(("VALUES", values), ("SIGMOID", int(sigmoid)))
    )


@functools.cache
def _kernel(entry: str, experts: int, sigmoid: bool, device: torch.device) -> Kernel:
    values = next(values for values in VALUES if experts <= 32 * values)
    return load(_variant(entry, values, sigmoid), device)
