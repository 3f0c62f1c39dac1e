"""A gate after its logits in one kernel, forward and backward, and its losses: the host's side of
`choose.cu` and `losses.cu`.

    logits_TE ──choose_and_sum──▶ ids, weights, sums of chunks ──sum_losses──▶ terms, losses
    d_weights, d_losses, terms ──choose_and_losses_backward──▶ d_logits_TE

Where ranks share a batch their terms are added between the last two, and `losses_of_terms` makes the losses.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from imbrex.kernels.jit import Blank, Kernel, Variant, addressed, cached_why_not_portable, load
from imbrex.runtime.tracing import plain

KERNELS = ("choose_experts", "choose_and_sum", "choose_experts_backward", "choose_and_losses_backward")
LOSS_KERNELS = ("sum_losses", "losses_of_terms")
VALUES = (2, 4, 8, 16)
"""Experts of a lane, of which a warp has 32."""
MOST_EXPERTS, MOST_CHOICES, MOST_GROUPS = 32 * VALUES[-1], 32, 32
THREADS, WARPS = 256, 8
"""A block's. A warp has a token."""
LOSS_THREADS = 1024
MOST_LAUNCHES = 256
"""The number of prepared launches, one for a number of tokens, that are kept."""
MOST_CHUNKS = 1024
"""Chunks of a batch, about: a warp takes several tokens where there are more."""


class Choice(NamedTuple):
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

    @property
    def limit(self) -> tuple[int, int, int]:
        """The limit by groups, in numbers."""
        return self.groups, self.open_groups, int(self.best_two)


@dataclass(frozen=True, kw_only=True, slots=True)
class Batch:
    """The tokens that losses are means of. sequences: of equal length, on this rank; 0: no tokens. ranks:
    that share the batch, each of which computes the losses. losses: whether load balance, sequence balance
    and z are wanted."""

    sequences: int
    ranks: int
    losses: Sequence[bool]


def shipped_variants() -> list[Variant]:
    return [
        *(
            _variant(entry, values, sigmoid)
            for entry in KERNELS
            for values in VALUES
            for sigmoid in (False, True)
        ),
        *(_variant(entry) for entry in LOSS_KERNELS),
    ]


def why_not_fused(logits_TE: Tensor, choice: Choice) -> str | None:
    """Why the kernels do not choose from these logits, float32 [T, E], or `None`."""
    if not logits_TE.is_cuda:
        return "the gate's kernels need logits on a GPU"
    if logits_TE.dtype != torch.float32 or not plain(logits_TE):
        return "the gate's kernels take float32 logits, tensors of no kind of their own"
    return why_not_gate(logits_TE.shape[1], choice, logits_TE.get_device())


def why_not_gate(experts: int, choice: Choice, device: int) -> str | None:
    """Why the kernels do not choose from plain float32 logits of so many experts on a GPU, or `None`."""
    if experts > MOST_EXPERTS or choice.top_k > MOST_CHOICES or choice.groups > MOST_GROUPS:
        return (
            f"the gate's kernels choose {MOST_CHOICES} of {MOST_EXPERTS} experts in {MOST_GROUPS} groups "
            "at most"
        )
    return cached_why_not_portable(device)


def run_choose(
    logits_TE: Tensor, bias_E: Tensor | None, choice: Choice, kept_TK: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Ids int64 [T, K], best first, of equal ones the lowest, and weights float32 [T, K]. bias_E: float32
    [E], added to scores for the selection only. kept_TK: bool, of any strides; the ids of the others are -1.
    """
    shape, device = logits_TE.shape, logits_TE.device
    ids_TK, weights_TK = _results(shape[0], choice, device)
    if shape[0]:
        mask, strides = (0, (0, 0)) if kept_TK is None else (kept_TK.data_ptr(), kept_TK.stride())
        bias = 0 if bias_E is None else bias_E.data_ptr()
        launch = _choosing(shape, choice, strides, device)
        launch.launch(logits_TE.data_ptr(), bias, mask, ids_TK.data_ptr(), weights_TK.data_ptr())
    return ids_TK, weights_TK


@functools.lru_cache(MOST_LAUNCHES)
def _choosing(shape: torch.Size, choice: Choice, strides: tuple[int, ...], device: torch.device) -> Blank:
    """The launch that chooses from logits of this shape: of their address, the bias', the mask's, the ids'
    and the weights'. strides: the mask's."""
    kernel = _kernel("choose_experts", _values(shape[1]), choice.sigmoid, device)
    args = [..., ..., *shape, *_rule(choice), ..., *strides, ..., ...]
    return addressed(kernel, args, grid=-(-shape[0] // WARPS), block=THREADS, dependent=True)


def run_choose_and_sum(
    logits_TE: Tensor, bias_E: Tensor | None, choice: Choice, batch: Batch
) -> tuple[Tensor, Tensor, Tensor, Tensor, list[Tensor | None]]:
    """Ids and weights as `run_choose` has them; terms float32 [2E + 4] of this rank, as `losses.cu` says;
    choices of the experts by sequence, float32 [sequences, E]; and the three losses, float32 scalars, where
    they are wanted and this rank has the whole batch."""
    tokens, experts = logits_TE.shape
    device, sequences = logits_TE.device, batch.sequences
    length = tokens // max(sequences, 1)
    chunk = WARPS * max(1, -(-tokens // (WARPS * MOST_CHUNKS)))
    blocks, values, all_chunks = -(-experts // 32), _values(experts), sequences * -(-length // chunk)
    ids_TK, weights_TK = _results(tokens, choice, device)
    # Mass and counts of the chunks, their squares, parts of the blocks and how many of them have come; that
    # becomes 0 in the first launch, where there is one.
    room = torch.empty if tokens else torch.zeros
    scratch = room(all_chunks * (2 * experts + 1) + blocks + 1, dtype=torch.float32, device=device)
    at = [0, all_chunks * experts, 2 * all_chunks * experts, all_chunks * (2 * experts + 1), -1]
    at[4] = at[3] + blocks
    mass, counts, squares, parts, arrived = (_word(scratch, offset) for offset in at)
    if tokens:
        sizes = [length, all_chunks // sequences, chunk]
        args = [logits_TE, bias_E, experts, *_rule(choice), *sizes, ids_TK, weights_TK]
        _kernel("choose_and_sum", values, choice.sigmoid, device).launch(
            grid=all_chunks,
            block=THREADS,
            smem=8 * WARPS * 32 * values + 4 * WARPS,
            args=[*args, mass, counts, squares, arrived],
        )
    terms = torch.empty(2 * experts + 4, dtype=torch.float32, device=device)
    counts_SE = torch.empty(sequences, experts, dtype=torch.float32, device=device)
    losses = _losses(terms, batch.losses if batch.ranks == 1 else (False,) * 3)
    sizes = [all_chunks // max(sequences, 1), sequences, length, experts, choice.top_k]
    _kernel("sum_losses", 0, False, device).launch(
        grid=blocks,
        block=LOSS_THREADS,
        smem=12 * LOSS_THREADS,
        args=[mass, counts, squares, *sizes, parts, arrived, terms, counts_SE, *losses],
    )
    return ids_TK, weights_TK, terms, counts_SE, losses


def run_losses(terms: Tensor, choice: Choice, losses_needed: Sequence[bool]) -> list[Tensor | None]:
    """The losses that are wanted, of the terms of all ranks."""
    losses, experts = _losses(terms, losses_needed), (terms.numel() - 4) // 2
    _kernel("losses_of_terms", 0, False, terms.device).launch(
        grid=1, block=32, args=[terms, experts, choice.top_k, *losses]
    )
    return losses


def run_choose_backward(
    logits_TE: Tensor, ids_TK: Tensor, d_weights_TK: Tensor, choice: Choice, *, in_parts: bool = False
) -> Tensor:
    """d_logits_TE from the gradient of the weights. in_parts: as two bfloat16 numbers [T, 2E] whose sum it
    is, to 15 or 16 bits: the first ones of all experts, then the others."""
    shape, device = logits_TE.shape, logits_TE.device
    result = _gradient(shape, in_parts, device)
    if shape[0]:
        launch = _going_back(shape, choice, in_parts, device)
        inputs = logits_TE.data_ptr(), ids_TK.data_ptr(), d_weights_TK.data_ptr()
        launch.launch(*inputs, result.data_ptr())
    return result


@functools.lru_cache(MOST_LAUNCHES)
def _going_back(shape: tuple[int, int], choice: Choice, in_parts: bool, device: torch.device) -> Blank:
    """The launch of a backward without losses: of the addresses of logits, ids, the weights' gradient and the
    result."""
    kernel = _kernel("choose_experts_backward", _values(shape[1]), choice.sigmoid, device)
    args = _backward_args((..., ..., ...), shape, choice, (), ..., in_parts)
    return addressed(kernel, args, grid=-(-shape[0] // WARPS), block=THREADS)


def run_losses_backward(
    logits_TE: Tensor,
    ids_TK: Tensor,
    gradients: Sequence[Tensor | None],
    sums: tuple[Tensor, Tensor],
    choice: Choice,
    ranks: int,
    *,
    in_parts: bool = False,
) -> Tensor:
    """d_logits_TE. gradients: of the weights and of the three losses, `None` where there is none. sums: the
    terms of all ranks, and the choices by sequence of this one. in_parts: as for `run_choose_backward`."""
    (tokens, experts), (terms, counts_SE) = logits_TE.shape, sums
    d_weights_TK, *d_losses = gradients
    more = *d_losses, terms, counts_SE, tokens // max(counts_SE.shape[0], 1), ranks
    result = _gradient(logits_TE.shape, in_parts, logits_TE.device)
    inputs = logits_TE, ids_TK, d_weights_TK
    args = _backward_args(inputs, logits_TE.shape, choice, more, result, in_parts)
    if tokens:
        kernel = _kernel("choose_and_losses_backward", _values(experts), choice.sigmoid, logits_TE.device)
        kernel.launch(grid=-(-tokens // WARPS), block=THREADS, args=args)
    return result


def _gradient(shape: torch.Size, in_parts: bool, device: torch.device) -> Tensor:
    """Room for the gradient of logits of this shape, or for its two parts."""
    kind = torch.bfloat16 if in_parts else torch.float32
    return torch.empty(shape[0], (1 + in_parts) * shape[1], dtype=kind, device=device)


def _backward_args(
    inputs: tuple[Any, Any, Any],
    shape: Sequence[int],
    choice: Choice,
    more: Sequence[Any],
    result: Any,
    in_parts: bool,
) -> list[Any]:
    """The arguments of both backwards. inputs: logits, ids and the weights' gradient. more: what losses
    want."""
    rule = choice.top_k, int(choice.normalize), choice.scale
    return [*inputs, *shape, *rule, *more, *((None, result) if in_parts else (result, None))]


def _results(tokens: int, choice: Choice, device: torch.device) -> tuple[Tensor, Tensor]:
    # Sizes as numbers: torch takes a tuple for one first, which costs an error.
    ids_TK = torch.empty(tokens, choice.top_k, dtype=torch.int64, device=device)
    return ids_TK, torch.empty(tokens, choice.top_k, dtype=torch.float32, device=device)


def _word(scratch: Tensor, offset: int) -> ctypes.c_void_p:
    """The address of a word of `scratch`: a view of it costs the host more."""
    return ctypes.c_void_p(scratch.data_ptr() + 4 * offset)


def _losses(terms: Tensor, losses_needed: Sequence[bool]) -> list[Tensor | None]:
    return [
        torch.empty((), dtype=torch.float32, device=terms.device) if needed else None
        for needed in losses_needed
    ]


def _rule(choice: Choice) -> list[int | float]:
    return [choice.top_k, *choice.limit, int(choice.normalize), choice.scale]


def _values(experts: int) -> int:
    return next(values for values in VALUES if experts <= 32 * values)


def _variant(entry: str, values: int = 0, sigmoid: bool = False) -> Variant:
    if entry in LOSS_KERNELS:
        return Variant(source="gate/losses.cu", entry=entry)
    return Variant(
        source="gate/choose.cu", entry=entry, defines=(("VALUES", values), ("SIGMOID", int(sigmoid)))
    )


@functools.cache
def _kernel(entry: str, values: int, sigmoid: bool, device: torch.device) -> Kernel:
    return load(_variant(entry, values, sigmoid), device)
