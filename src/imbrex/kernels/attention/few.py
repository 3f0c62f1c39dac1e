"""Attention of one token a row over a static cache, from queries, keys and values on: the host's side of
`attention/few.cu`."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from imbrex.kernels.arguments import multiprocessors
from imbrex.kernels.jit import Kernel, Variant, cached_unavailable, load
from imbrex.kernels.structs import struct
from imbrex.runtime.tracing import plain, traced

SOURCE, ENTRY = "attention/few.cu", "attend_few"
HEAD, THREADS, TILE, STAGES = 128, 96, 48, 2
SHARED = (1, 2, 4, 8)
"""Heads of queries to one of keys."""
MOST_SPLITS, BLOCKS = 8, 2
"""Parts of a row's keys at most, and blocks that a multiprocessor gets at least where there are so many."""
UNITS = 1 << 14
"""Rows times heads of keys of a call."""


def shipped_variants() -> list[Variant]:
    return [_variant(shared, normed) for shared in SHARED for normed in (False, True)]


def _variant(shared: int, normed: bool) -> Variant:
    return Variant(source=SOURCE, entry=ENTRY, defines=(("QUERIES", shared), ("NORMED", int(normed))))


@functools.cache
def _kernel(shared: int, normed: bool, device: torch.device) -> Kernel:
    return load(_variant(shared, normed), device)


@functools.cache
def _tickets(device: torch.device) -> Tensor:
    """Zeros, before and after every call: for calls of one stream."""
    return torch.zeros(UNITS, dtype=torch.int32, device=device)


def why_not_few(qkv_THC: Tensor, heads: int, cache: tuple[Tensor, Tensor]) -> str | None:
    """None if the kernel attends with these heads, else why not."""
    groups = (qkv_THC.shape[1] - heads) // 2
    tensors = (qkv_THC, *cache)
    if not all(plain(tensor) for tensor in tensors) or traced(*tensors) or torch.is_grad_enabled():
        return "somebody traces or differentiates the call, or its tensors are of a kind of their own"
    kinds = {(tensor.is_cuda, tensor.dtype, tensor.is_contiguous()) for tensor in tensors}
    if kinds != {(True, torch.bfloat16, True)}:
        return "it is for contiguous bfloat16 on a GPU"
    if qkv_THC.shape[2] != HEAD or heads % groups or heads // groups not in SHARED:
        return f"heads are not of {HEAD} values, 1, 2, 4 or 8 to one of keys"
    if not 0 < qkv_THC.shape[0] * groups <= UNITS:
        return f"it is for 1 to {UNITS // groups} rows"
    return cached_unavailable(qkv_THC.get_device())


def attend_few(
    qkv_THC: Tensor,
    norms: tuple[Tensor, Tensor] | None,
    turn_TC: Tensor,
    heads: int,
    eps: float,
    cache: tuple[Tensor, Tensor],
    place_T: Tensor,
    position_T: Tensor,
) -> Tensor:
    """The outputs of the heads, [T, H, C]; keys and values of the tokens, one a row, are in the cache.

    cache: [rows of all slots, G, C] each. place_T: int64, of the token in the cache. position_T: int64, in
    its slot, whose tokens before it stand before it in the cache.
    """
    (tokens, all_heads, width), device = qkv_THC.shape, qkv_THC.device
    groups = (all_heads - heads) // 2
    shared, units = heads // groups, tokens * groups
    splits = splits_of(units, multiprocessors(qkv_THC.get_device()))
    of_part = shared * width + -(-2 * shared // 4) * 4
    parts = torch.empty(units * splits * of_part, dtype=torch.float32, device=device)
    y_THC = torch.empty(tokens, heads, width, dtype=qkv_THC.dtype, device=device)
    few = struct(SOURCE, "Few")(
        qkv=qkv_THC,
        q_norm=norms and norms[0],
        k_norm=norms and norms[1],
        turn=turn_TC.contiguous(),
        keys=cache[0],
        values=cache[1],
        position=position_T,
        row=place_T,
        parts=parts,
        tickets=_tickets(device),
        y=y_THC,
        groups=groups,
        splits=splits,
        eps=eps,
    )
    smem = STAGES * TILE * 4 * HEAD + shared * (2 * HEAD + 64) + 4 * HEAD + 16
    kernel = _kernel(shared, norms is not None, device)
    kernel.launch(grid=units * splits, block=THREADS, smem=smem, args=[few], dependent=True)
    return y_THC


def splits_of(units: int, processors: int) -> int:
    """Parts of a row's keys."""
    return max(1, min(MOST_SPLITS, BLOCKS * processors // units))
