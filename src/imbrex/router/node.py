"""A gate by kernels as one autograd node, from tokens to ids, weights and losses.

Logits, choice and losses have the same bits as in separate nodes. The backward makes no float32 tensor of the
logits' gradient: the kernel writes it as the two bfloat16 numbers that both products take (`router.logits`).
Two products and the two kernels around them replace fifteen operators.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from imbrex.kernels.gate.choose import Choice, why_not_gate
from imbrex.router.chosen import batch_of, by_name, choice_gradient, run_choice
from imbrex.router.global_batch import GlobalBatch
from imbrex.router.logits import logits_backward, multiplied_as_they_are, run_logits
from imbrex.runtime.tracing import Node, differentiated, once_differentiable, traced


def is_one_node(x_TD: Tensor, weight_ED: Tensor, choice: Choice) -> bool:
    """Whether `gate_by_kernels` takes these tensors: bfloat16 on a GPU, with gradients possible."""
    if not differentiated(x_TD, weight_ED) or not multiplied_as_they_are(x_TD, weight_ED):
        return False
    if traced(x_TD, weight_ED):
        return False
    return why_not_gate(weight_ED.shape[0], choice, x_TD.get_device()) is None


def gate_by_kernels(
    x_TD: Tensor,
    weight_ED: Tensor,
    bias_E: Tensor | None,
    choice: Choice,
    names: tuple[str, ...],
    num_sequences: int,
    batch: GlobalBatch,
) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Ids, weights and losses as `choose_by_kernels` has them of the tokens' logits, where `is_one_node`;
    differentiable in tokens and weight once."""
    of = batch_of(names, num_sequences if x_TD.shape[0] else 0, batch.num_ranks)
    how = bias_E, choice, of, (batch.names, batch.sizes)
    ids_TK, weights_TK, *losses = _Gate.apply(x_TD, weight_ED, how)
    return ids_TK, weights_TK, by_name(names, losses) if losses else {}


class _Gate(Node):
    @staticmethod
    def forward(ctx: Any, x_TD: Tensor, weight_ED: Tensor, how: Any) -> Any:
        logits_TE, (bias_E, ctx.choice, ctx.of, ranks) = run_logits(x_TD, weight_ED), how
        ids_TK, weights_TK, sums, losses = run_choice(logits_TE, bias_E, ctx.choice, ctx.of, ranks)
        ctx.save_for_backward(x_TD, weight_ED, logits_TE, ids_TK, *(sums or ()))
        ctx.mark_non_differentiable(ids_TK)
        ctx.set_materialize_grads(False)
        return ids_TK, weights_TK, *losses

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Any) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        x_TD, weight_ED, *saved = ctx.saved_tensors
        parts = choice_gradient(saved, gradients[1:], ctx.choice, ctx.of, in_parts=True)
        if parts is None:
            parts = x_TD.new_zeros(len(x_TD), 2 * len(weight_ED))
        return *logits_backward(parts, x_TD, weight_ED, ctx.needs_input_grad[:2]), None
