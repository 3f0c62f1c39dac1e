"""dx home beside both gradients of the weights: one launch in place of a combine and two grouped products.

Bits and protocol are those of `NvlinkExchange.combine` and of `launch_gemm`: ranks may differ in which of the
two ways they take. `fused/home.cu` says how blocks share the work.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from imbrex.kernels.arguments import multiprocessors
from imbrex.kernels.exchange import layout as lay
from imbrex.kernels.exchange.exchange import NvlinkExchange
from imbrex.kernels.exchange.launches import Sums
from imbrex.kernels.ffn.ffn import LeftGradient
from imbrex.kernels.gemm.gemm import (
    ENTRY,
    Epilogue,
    Layout,
    Tiling,
    check_products,
    gemm_variant,
    products_status,
    ragged_panels_map,
    stacked_map,
)
from imbrex.kernels.gemm.tiling import choose_tiling, gemm_choices
from imbrex.kernels.jit import ByValue, Variant, latest_launch
from imbrex.kernels.routing.routed import Routed
from imbrex.kernels.structs import struct
from imbrex.runtime.deferred import Gradient, added

HOME = struct("fused/home.cu", "Home")
MOST_LOCAL = HOME.ends.size // 8
"""Virtual ranks of a launch."""
FIRST_BLOCKS = 16
"""Blocks that begin with sums: the best of 8 to 32 beside narrow experts on one GPU
(docs/fused-kernels.md)."""
OF_ROWS = {("LAYOUT", int(Layout.DGRAD)), ("EPILOGUE", int(Epilogue.PLAIN))}
"""Defines of the product that makes the gradient of rows, the last of the experts' backward."""
Pair = tuple[LeftGradient, LeftGradient]


def home_variant(epilogue: Epilogue, tiling: Tiling, local_ranks: int = 1, *, fp8: bool = False) -> Variant:
    """The kernel for so many ranks a launch. fp8: how sums cross."""
    defines = gemm_variant(Layout.WGRAD, epilogue, tiling).defines
    return Variant(
        source="fused/home.cu",
        entry="home_beside_gradients",
        defines=(*defines, ("LOCAL_RANKS", local_ranks), ("WIRE_FP8", int(fp8))),
    )


def shipped_variants() -> list[Variant]:
    """One for every way that the gradients of weights are cut and stored."""
    choices = [choice for choice in gemm_choices() if choice.layout is Layout.WGRAD and choice.wide]
    return [home_variant(c.epilogue, c.tiling, fp8=fp8) for c in choices for fp8 in (False, True)]


def why_not_home(gradients: Sequence[Any]) -> str | None:
    """Why what a backward has left cannot be computed beside a combine, or `None`."""
    if len(gradients) != 2 or not all(isinstance(gradient, LeftGradient) for gradient in gradients):
        return "the experts have not left the gradients of two weights that imbrex's own kernels compute"
    first, second = gradients
    if first.groups is not second.groups:
        return "the two weights' gradients are not of the same rows"
    if any(operand.shape[1] % 64 for gradient in gradients for operand in (gradient.rows, gradient.d_out)):
        return "the weights' widths are no multiples of 64"
    if _epilogue(first) is not _epilogue(second):
        return "one weight's gradient is added to what is there, and the other is not, or in another dtype"
    if _tiling(first) != _tiling(second):
        return "the kernel cuts the two weights' gradients into different tiles"
    return None


def home_beside_gradients(
    exchange: NvlinkExchange,
    d_rows: Tensor,
    routed: Routed,
    sums: Sums,
    out: Tensor,
    gradients: Sequence[Pair],
    *,
    first_blocks: int = FIRST_BLOCKS,
    blocks: int | None = None,
) -> list[tuple[Tensor, Tensor]]:
    """Queue `exchange.combine(d_rows, routed, weighted=False, out=out, **sums)` and both gradients of
    each local rank; returns where these are: new tensors, or what they are added to.

    d_rows [L, row_capacity, D] bf16, out [T, D] ([L, max_tokens, D] with virtual ranks).
    sums: `values` and `wire`.
    first_blocks: of each rank, that begin with sums. blocks: of each rank; `None`: the device's
    multiprocessors. Neither changes a bit.

    Raises ValueError where `why_not_home` says why, and where L pairs were not given.
    """
    reason = next(filter(None, map(why_not_home, gradients)), None)
    if reason is not None or len(gradients) != exchange.local_ranks or len(gradients) > MOST_LOCAL:
        raise ValueError(f"home: {reason or f'{len(gradients)} pairs of gradients, one for each rank'}")
    first, device = gradients[0][0], d_rows.get_device()
    tiling = _tiling(first)
    blocks = blocks or min(multiprocessors(device), lay.MAX_BLOCKS)
    results = [(_result(pair[0]), _result(pair[1])) for pair in gradients]
    maps = b"".join(_maps(*both, tiling) for both in zip(gradients, results, strict=True))
    exchange.combine_beside(
        home_variant(_epilogue(first), tiling, exchange.local_ranks, fp8=sums.get("wire") == "fp8"),
        (blocks, tiling.threads, tiling.smem, 1),
        [_home_args(gradients, device, min(first_blocks, blocks)), ByValue(maps)],
        d_rows,
        routed,
        out=out,
        **sums,
    )
    check_products(device)
    return results


def _begins_early(gradients: Sequence[Pair], device: int) -> bool:
    """Whether the last launch makes `d_rows`, of what was made before it, as these products are, and has none
    of their memory: that was taken before it, and what was freed since it may still read."""
    latest = latest_launch(device)
    if latest is None or latest.entry != ENTRY or not set(latest.defines) >= OF_ROWS:
        return False
    return all(gradient.out is not None or gradient.add_to is not None for gradient in chain(*gradients))


def _home_args(gradients: Sequence[Pair], device: int, first_blocks: int) -> ctypes.Structure:
    """`fused::Home`: both products of all local ranks."""
    shapes = [gradient.weight.shape for gradient in gradients[0]]
    plans, early = [pair[0].groups for pair in gradients], _begins_early(gradients, device)
    return HOME(
        ends=_addresses([pair[0].groups.ends_e for pair in gradients]),
        counter=_addresses([plan.other_counter if early else plan.counter for plan in plans]),
        status=products_status(device),
        experts=gradients[0][0].groups.ends_e.numel(),
        rows=(ctypes.c_int32 * 2)(*(shape[1] for shape in shapes)),
        columns=(ctypes.c_int32 * 2)(*(shape[2] for shape in shapes)),
        first_blocks=first_blocks,
        early=early,
    )


def computed(gradient: LeftGradient, result: Tensor) -> Gradient:
    """Stands for `gradient` where `home_beside_gradients` has made `result` of it."""
    return lambda total: None if gradient.add_to is not None else added(total, result)


def _epilogue(gradient: LeftGradient) -> Epilogue:
    if gradient.add_to is None:
        return Epilogue.PLAIN
    return Epilogue.ADD_FLOAT if gradient.add_to.dtype == torch.float32 else Epilogue.ADD


def _tiling(gradient: LeftGradient) -> Tiling:
    weight, rows = gradient.weight, gradient.rows
    return choose_tiling(
        Layout.WGRAD,
        _epilogue(gradient),
        rows.shape[0],
        weight.shape[0],
        (weight.shape[1], weight.shape[2]),
        sms=multiprocessors(rows.get_device()),
        depth=gradient.d_out.shape[1],
    )


def _result(gradient: LeftGradient) -> Tensor:
    if gradient.add_to is not None:
        return gradient.add_to
    return gradient.weight.new_empty(gradient.weight.shape) if gradient.out is None else gradient.out


def _maps(pair: Pair, results: Sequence[Tensor], tiling: Tiling) -> bytes:
    """`fused::Maps` of a rank: A of both products, B of both, both results."""
    maps = [ragged_panels_map(gradient.d_out, tiling.block_m // 64) for gradient in pair]
    maps += [ragged_panels_map(gradient.rows, tiling.block_n // 64) for gradient in pair]
    maps += [stacked_map(result, 128 // result.element_size(), 64) for result in results]
    return b"".join(bytes(part.raw) for part in maps)


def _addresses(tensors: Sequence[Tensor]) -> Any:
    return (ctypes.c_void_p * MOST_LOCAL)(*(tensor.data_ptr() for tensor in tensors))
