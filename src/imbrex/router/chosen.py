"""A gate's choice and its losses by kernels: to autograd and compilers one node forward, and one backward.

While a compiler traces, the node is an operator, and so is its backward; else it is an autograd function. The
node sums the losses' terms over the ranks of the batch, so that every rank has the same losses.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.library import Library, register_autograd, register_fake

from imbrex.kernels.gate import choose as kernels
from imbrex.kernels.gate.choose import Batch, Choice
from imbrex.router.global_batch import GlobalBatch, sum_over_groups
from imbrex.router.losses import NAMES
from imbrex.runtime.tracing import differentiated, once_differentiable, traced

Ranks = tuple[Sequence[str], Sequence[int]]
"""Names and sizes of the groups over which the batch is spread."""

_library = Library("imbrex_gate_v1", "DEF")
_RULE = "int top_k, int[] rule, float scale"
_library.define(
    f"choose(Tensor logits_TE, Tensor? bias_E, SymInt sequences, {_RULE}, bool[3] wanted, str[] groups,"
    " int[] sizes) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)"
)
_library.define(
    "choose_backward(Tensor logits_TE, Tensor ids_TK, Tensor? d_weights_TK, Tensor? d_balance,"
    f" Tensor? d_sequence, Tensor? d_z, Tensor terms, Tensor counts_SE, {_RULE}, int ranks) -> Tensor"
)


def choose_by_kernels(
    logits_TE: Tensor,
    bias_E: Tensor | None,
    choice: Choice,
    names: tuple[str, ...],
    num_sequences: int,
    batch: GlobalBatch,
    kept_TK: Tensor | None = None,
) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Ids int64 [T, K], best first, of equal ones the lowest, weights float32 [T, K], and the losses of
    `names`, as `auxiliary_losses` defines them; differentiable in the logits once. bias_E: float32 [E], added
    to scores for the selection only. kept_TK: bool; the ids of the others are -1. Collective over `batch`
    where there are names."""
    if kept_TK is not None and not names and not (traced(logits_TE) or differentiated(logits_TE)):
        return *kernels.run_choose(logits_TE.contiguous(), bias_E, choice, kept_TK), {}
    if traced(logits_TE):
        flags = [name in names for name in NAMES]
        how = *_flat(choice), flags, batch.names, batch.sizes
        ids_TK, weights_TK, *_, a, b, c = torch.ops.imbrex_gate_v1.choose(
            logits_TE, bias_E, num_sequences, *how
        )
        losses = [loss for loss, want in zip((a, b, c), flags, strict=True) if want]
    else:
        of = batch_of(names, num_sequences if logits_TE.shape[0] else 0, batch.num_ranks)
        how = choice, of, (batch.names, batch.sizes)
        if differentiated(logits_TE):
            ids_TK, weights_TK, *losses = _Choose.apply(logits_TE, bias_E, how)
        else:
            ids_TK, weights_TK, _, losses = run_choice(logits_TE.contiguous(), bias_E, *how)
    return only(kept_TK, ids_TK), weights_TK, by_name(names, losses)


@functools.lru_cache(64)
def batch_of(names: tuple[str, ...], sequences: int, ranks: int) -> Batch:
    """The batch of a call that wants the losses of these names."""
    return Batch(sequences=sequences, ranks=ranks, losses=tuple(name in names for name in NAMES))


def by_name(names: tuple[str, ...], losses: Sequence[Tensor]) -> dict[str, Tensor]:
    """Losses in the order of `NAMES`, by those that are in `names`."""
    return dict(zip((n for n in NAMES if n in names), losses, strict=True))


def only(kept_TK: Tensor | None, ids_TK: Tensor) -> Tensor:
    """The ids, with -1 for choices that are not kept. `None` keeps all."""
    return ids_TK if kept_TK is None else torch.where(kept_TK, ids_TK, -1)


Chosen = tuple[Tensor, Tensor, tuple[Tensor, Tensor] | None, list[Tensor]]


def run_choice(logits_TE: Tensor, bias_E: Tensor | None, choice: Choice, of: Batch, ranks: Ranks) -> Chosen:
    """Ids, weights, the tensors that the losses' backward needs, and the losses that were asked for."""
    if not any(of.losses):
        return *kernels.run_choose(logits_TE, bias_E, choice), None, []
    ids_TK, weights_TK, terms, counts_SE, losses = kernels.run_choose_and_sum(logits_TE, bias_E, choice, of)
    if of.ranks > 1:
        terms = sum_over_groups(terms, *ranks)
        losses = kernels.run_losses(terms, choice, of.losses)
    return ids_TK, weights_TK, (terms, counts_SE), [loss for loss in losses if loss is not None]


class _Choose(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits_TE: Tensor, bias_E: Tensor | None, how: Any) -> Any:
        logits_TE = logits_TE.contiguous()
        ids_TK, weights_TK, sums, losses = run_choice(logits_TE, bias_E, *how)
        ctx.how = how
        ctx.save_for_backward(logits_TE, ids_TK, *(sums or ()))
        ctx.mark_non_differentiable(ids_TK)
        ctx.set_materialize_grads(False)
        return ids_TK, weights_TK, *losses

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Any) -> tuple[Tensor | None, None, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return choice_gradient(ctx.saved_tensors, gradients[1:], *ctx.how[:2]), None, None


def choice_gradient(
    saved: Sequence[Tensor],
    gradients: Sequence[Tensor | None],
    choice: Choice,
    of: Batch,
    *,
    in_parts: bool = False,
) -> Tensor | None:
    """d_logits_TE, or two bfloat16 parts of it; `None` where there is none. saved: logits, ids, and what the
    losses want. gradients: of the weights and of those losses that are wanted."""
    logits_TE, ids_TK, *sums = saved
    if sums:
        d_weights_TK, *d_losses = gradients
        left = iter(d_losses)
        gradients = d_weights_TK, *(next(left) if want else None for want in of.losses)
    return _gradient(logits_TE, ids_TK, gradients, tuple(sums), choice, of.ranks, in_parts=in_parts)


def _gradient(
    logits_TE: Tensor,
    ids_TK: Tensor,
    gradients: Sequence[Tensor | None],
    sums: tuple[Tensor, ...],
    choice: Choice,
    ranks: int,
    *,
    in_parts: bool = False,
) -> Tensor | None:
    """d_logits_TE from those of the weights and of the three losses, or of the weights alone; `None` where
    there are none."""
    d_weights_TK, *d_losses = gradients
    d_weights_TK = None if d_weights_TK is None else d_weights_TK.contiguous()
    if not d_losses or all(d is None for d in d_losses):
        if d_weights_TK is None:
            return None
        return kernels.run_choose_backward(logits_TE, ids_TK, d_weights_TK, choice, in_parts=in_parts)
    terms, counts_SE = sums
    inputs = logits_TE, ids_TK, (d_weights_TK, *d_losses), (terms, counts_SE)
    return kernels.run_losses_backward(*inputs, choice, ranks, in_parts=in_parts)


def _flat(choice: Choice) -> tuple[int, list[int], float]:
    return choice.top_k, [int(choice.sigmoid), *choice.limit, int(choice.normalize)], choice.scale


def _rule(top_k: int, rule: Sequence[int], scale: float) -> Choice:
    sigmoid, groups, open_groups, best_two, normalize = rule
    return Choice(
        top_k=top_k,
        sigmoid=bool(sigmoid),
        groups=groups,
        open_groups=open_groups,
        best_two=bool(best_two),
        normalize=bool(normalize),
        scale=scale,
    )


def _choose(logits_TE, bias_E, sequences, *how):
    """The operator: ids, weights, terms, counts_SE and the three losses, empty where they are not wanted."""
    *rule, flags, groups, sizes = how
    logits_TE, sequences = logits_TE.contiguous(), sequences if logits_TE.shape[0] else 0
    of = Batch(sequences=sequences, ranks=math.prod(sizes), losses=flags)
    ids_TK, weights_TK, sums, losses = run_choice(logits_TE, bias_E, _rule(*rule), of, (groups, sizes))
    if sums is None:
        sums = logits_TE.new_empty(0), logits_TE.new_empty(0, 0)
    left = iter(losses)
    return ids_TK, weights_TK, *sums, *(next(left) if want else logits_TE.new_empty(0) for want in flags)


def _fake_choose(logits_TE, bias_E, sequences, *how):
    top_k, _, _, flags, _, _ = how
    tokens, experts = logits_TE.shape
    summed = any(flags)
    return (
        logits_TE.new_empty(tokens, top_k, dtype=torch.int64),
        logits_TE.new_empty(tokens, top_k),
        logits_TE.new_empty(2 * experts + 4 if summed else 0),
        logits_TE.new_empty(sequences if summed else 0, experts if summed else 0),
        *(logits_TE.new_empty(() if want else (0,)) for want in flags),
    )


def _choose_backward(logits_TE, ids_TK, *how):
    *gradients, terms, counts_SE, top_k, rule, scale, ranks = how
    choice, sums = _rule(top_k, rule, scale), (terms, counts_SE)
    d_logits_TE = _gradient(logits_TE.contiguous(), ids_TK, gradients, sums, choice, ranks)
    return torch.zeros_like(logits_TE) if d_logits_TE is None else d_logits_TE


def _set_up(ctx, inputs, output):
    logits_TE, _, _, *ctx.rule, ctx.flags, _, sizes = inputs
    ctx.ranks = math.prod(sizes)
    ids_TK, _, *sums = output[:4]
    # Else autograd makes zeros for what nobody differentiates.
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(logits_TE, ids_TK, *sums)


def _differentiate(ctx, _ids, d_weights_TK, _terms, _counts, *d_losses):
    logits_TE, ids_TK, *sums = ctx.saved_tensors
    d_losses = [d if want else None for d, want in zip(d_losses, ctx.flags, strict=True)]
    d_logits_TE = torch.ops.imbrex_gate_v1.choose_backward(
        logits_TE, ids_TK, d_weights_TK, *d_losses, *sums, *ctx.rule, ctx.ranks
    )
    return d_logits_TE, *[None] * 8


_library.impl("choose", _choose, "CompositeExplicitAutograd")
_library.impl("choose_backward", _choose_backward, "CompositeExplicitAutograd")
register_fake("imbrex_gate_v1::choose", _fake_choose, lib=_library)
register_fake(
    "imbrex_gate_v1::choose_backward", lambda logits_TE, *_: torch.empty_like(logits_TE), lib=_library
)
register_autograd("imbrex_gate_v1::choose", _differentiate, setup_context=_set_up, lib=_library)
