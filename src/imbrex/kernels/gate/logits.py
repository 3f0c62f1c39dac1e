"""Logits of few tokens, and the end of their weight's gradient: the host's side of `gate/logits.cu`."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from imbrex.kernels.jit import Blank, Kernel, Variant, addressed, cached_why_not_hopper, load
from imbrex.runtime.tracing import plain, traced

VARIANT, HALVES = (Variant(source="gate/logits.cu", entry=entry) for entry in ("logits_of_few", "add_halves"))
MOST_PRODUCTS = 20 << 20
"""Products of two numbers up to which it is faster than tensor cores (benchmarks/gate.py): 80 tokens of
Qwen3's 128 experts and 2048 values."""
THREADS, EXPERTS, TOKENS, UNIT = 256, 2, 8, 8
"""Sizes of a block, and the values of a unit."""
MOST_LAUNCHES = 256
"""The number of prepared launches, one for sizes, that are kept."""


def shipped_variants() -> list[Variant]:
    return [VARIANT, HALVES]


@functools.cache
def _kernel(variant: Variant, device: torch.device) -> Kernel:
    return load(variant, device)


def why_not_few(x_TD: Tensor, weight_ED: Tensor) -> str | None:
    """Why the kernel does not compute these logits, whose operands are bfloat16 on a GPU, or `None`."""
    if not 0 < x_TD.numel() * weight_ED.shape[0] <= MOST_PRODUCTS:
        return f"it is for some tokens, and up to {MOST_PRODUCTS >> 20} Mi products of two numbers"
    if not (plain(x_TD) and plain(weight_ED)) or traced(x_TD, weight_ED):
        return "somebody traces the call, or its tensors are of a kind of their own"
    if x_TD.shape[1] % UNIT or not weight_ED.is_contiguous():
        return f"weights are not contiguous rows of a multiple of {UNIT} values"
    return cached_why_not_hopper(x_TD.get_device())


def logits_of_few(x_TD: Tensor, weight_ED: Tensor) -> Tensor:
    """float32 [T, E] of bf16 operands that `why_not_few` has nothing against."""
    (tokens, width), (experts, _), x_TD = x_TD.shape, weight_ED.shape, x_TD.contiguous()
    logits_TE = torch.empty((tokens, experts), dtype=torch.float32, device=x_TD.device)
    launch = _multiplying(tokens, experts, width // UNIT, x_TD.device)
    launch.launch(x_TD.data_ptr(), weight_ED.data_ptr(), logits_TE.data_ptr())
    return logits_TE


@functools.lru_cache(MOST_LAUNCHES)
def _multiplying(tokens: int, experts: int, units: int, device: torch.device) -> Blank:
    """The launch that computes logits of these sizes: of the addresses of tokens, weights and logits."""
    return addressed(
        _kernel(VARIANT, device),
        args=[..., ..., tokens, experts, units, ...],
        grid=-(-experts // EXPERTS) * -(-tokens // TOKENS),
        block=THREADS,
        smem=4 * THREADS // 32 * EXPERTS * TOKENS,
        dependent=True,
    )


def why_not_halves(halves: Tensor) -> str | None:
    """Why the kernel does not add the halves of float32 numbers on a GPU, or `None`."""
    if halves.numel() % 8:
        return "a half is no multiple of 4 values"
    return cached_why_not_hopper(halves.get_device())


def add_halves(halves_2N: Tensor, out: Tensor) -> Tensor:
    """The sum of both halves of `halves_2N`, float32, rounded once into `out`, bfloat16; contiguous."""
    _adding(out.numel() // 4, out.device).launch(halves_2N.data_ptr(), out.data_ptr())
    return out


@functools.lru_cache(MOST_LAUNCHES)
def _adding(units: int, device: torch.device) -> Blank:
    """The launch that adds halves of so many units: of their address and the sum's."""
    args = [..., units, ...]
    return addressed(_kernel(HALVES, device), args, grid=-(-units // THREADS), block=THREADS)
