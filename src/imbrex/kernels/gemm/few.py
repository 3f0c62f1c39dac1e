"""The product of few tokens with a long weight, normed first where wanted: the host's side of
`gemm/few.cu`."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from imbrex.kernels.arguments import multiprocessors
from imbrex.kernels.jit import Kernel, Variant, cached_unavailable, load
from imbrex.kernels.structs import struct
from imbrex.runtime.tracing import plain, traced

SOURCE, ENTRY = "gemm/few.cu", "product_of_few"
FEW_TOKENS, FEW_NORMED = 32, 16
"""Up to so many tokens the kernel was timed to be faster than torch's product, and than a norm and that."""
WARPS, EIGHT = 8, 8
"""Warps of a block, tokens and columns of an instruction."""
MOST_COLUMNS = 8
"""Eights of columns of a block: what registers hold."""
CHUNKS = (256, 128, 64)
"""Values of k that a warp asks for at once."""
ROOM = 232448 - 2048
"""Bytes of shared memory of a block for weights."""


def shipped_variants() -> list[Variant]:
    """The kernels of Qwen3-30B-A3B's attention on a GPU of 132 multiprocessors, and of longer weights."""
    shapes = ((5120, 2048, True), (2048, 4096, False), (7168, 16384, False), (1536, 7168, True))
    several = [variant_of(tokens, *shape, 132)[0] for shape in shapes for tokens in (8, 16)]
    return [*several, variant_of(FEW_TOKENS, 2048, 4096, False, 132)[0]]


@functools.cache
def variant_of(
    tokens: int, columns: int, depth: int, normed: bool, processors: int
) -> tuple[Variant, int, int]:
    """The kernel, its blocks and their bytes of shared memory. Raises ValueError where there is none."""
    of_tokens = next(size for size in (1, 2, 4) if tokens <= EIGHT * size)
    eights = min(-(-columns // (EIGHT * processors)), MOST_COLUMNS)
    for chunk in CHUNKS[of_tokens // 4 + (normed and of_tokens == 4) :]:
        if depth % (WARPS * chunk):
            continue
        chunks, stage = depth // WARPS // chunk, WARPS * EIGHT * eights * 2 * chunk
        stages = min(chunks, ROOM // stage)
        if stages >= min(chunks, 2) and stages * chunk * 2 >= EIGHT * of_tokens * 4:
            defines = {"EIGHTS": of_tokens, "COLUMNS": eights, "CHUNK": chunk, "STAGES": stages}
            defines["NORMED"] = int(normed)
            variant = Variant(source=SOURCE, entry=ENTRY, defines=tuple(defines.items()))
            behind = WARPS * (EIGHT * of_tokens * 4 + stages * 8)
            return variant, -(-columns // (EIGHT * eights)), stages * stage + behind
    raise ValueError(f"a weight of {columns} rows of {depth} values; rows are of a multiple of 512")


@functools.cache
def _fits(columns: int, depth: int, processors: int) -> bool:
    """Whether shared memory holds a weight whole before its rows are there, on three multiprocessors of four:
    torch's product reads others as fast."""
    eights = -(-columns // (EIGHT * processors))
    blocks = -(-columns // (EIGHT * eights))
    return 2 * EIGHT * eights * depth <= ROOM and 4 * blocks >= 3 * processors


def _kernel(variant: Variant, device: torch.device) -> Kernel:
    return load(variant, device)


def why_not_few(x_TK: Tensor, weight_NK: Tensor, *, normed: bool = False) -> str | None:
    """None if the kernel computes the product of these, else why not."""
    limit = FEW_NORMED if normed else FEW_TOKENS
    if not (plain(x_TK) and plain(weight_NK)) or traced(x_TK, weight_NK) or torch.is_grad_enabled():
        return "somebody traces or differentiates the call, or its tensors are of a kind of their own"
    if not x_TK.is_cuda or x_TK.dtype != torch.bfloat16 or weight_NK.dtype != torch.bfloat16:
        return "it is for bfloat16 on a GPU"
    if not 0 < x_TK.shape[0] <= limit:
        return f"it is for 1 to {limit} tokens"
    if x_TK.shape[1] % (WARPS * CHUNKS[-1]) or not weight_NK.is_contiguous():
        return "weights are not contiguous rows of a multiple of 512 values"
    if not _fits(*weight_NK.shape, multiprocessors(weight_NK.get_device())):
        return "the weight leaves multiprocessors idle, or is more than their shared memory holds"
    return cached_unavailable(x_TK.get_device())


def product_of_few(x_TK: Tensor, weight_NK: Tensor) -> Tensor:
    """bf16 [T, N] of operands that `why_not_few` has nothing against."""
    y_TN, _ = _launch(x_TK, None, None, 0.0, weight_NK)
    return y_TN


def normed_product_of_few(
    x_TK: Tensor, added_TK: Tensor | None, norm_K: Tensor, eps: float, weight_NK: Tensor
) -> tuple[Tensor, Tensor]:
    """The product of the rows' sums, normed (RMSNorm), and the sums."""
    return _launch(x_TK, added_TK, norm_K, eps, weight_NK)


def _launch(
    x_TK: Tensor, added_TK: Tensor | None, norm_K: Tensor | None, eps: float, weight_NK: Tensor
) -> tuple[Tensor, Tensor]:
    (tokens, depth), columns, device = x_TK.shape, weight_NK.shape[0], x_TK.device
    y_TN = torch.empty(tokens, columns, dtype=x_TK.dtype, device=device)
    x_TK = x_TK.contiguous()
    sum_TK = x_TK if added_TK is None else torch.empty_like(x_TK)
    processors = multiprocessors(x_TK.get_device())
    variant, blocks, smem = variant_of(tokens, columns, depth, norm_K is not None, processors)
    few = struct(SOURCE, "Few")(
        x=x_TK,
        added=None if added_TK is None else added_TK.contiguous(),
        norm_weight=norm_K,
        weight=weight_NK,
        sum=sum_TK,
        y=y_TN,
        tokens=tokens,
        columns=columns,
        depth=depth,
        eps=eps,
    )
    _kernel(variant, device).launch(grid=blocks, block=32 * WARPS, smem=smem, args=[few], dependent=True)
    return y_TN, sum_TK
