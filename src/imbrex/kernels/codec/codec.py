"""The codecs' kernels on the host's side: when they apply, and how they are launched.

    encoded_NB = encode("fp8", rows_ND)      # None: not here, use tensor operations

They write and read the same bytes as the tensor operations of `imbrex.codec`, to the bit (NaN apart).
"""

from __future__ import annotations

import ctypes
import functools
import re
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from imbrex.kernels import jit
from imbrex.kernels.jit import Variant

FORMATS = {"int8": 0, "int8-128": 1, "fp8": 2, "fp8-e5m2": 3, "int4": 4, "nvfp4": 5, "bf16": 6, "fp16": 7}
WIDTH_MULTIPLE = 64
"""Values; rows, their blocks and their encoded bytes then start at whole words."""
HELD = {"encode_rows": 32, "decode_rows": 16, "row scaled": 16}
"""Values of a row that a thread holds at a time: measured, benchmarks/codecs.py."""
WIDE_BYTES = {"int8": 6144, "nvfp4": 8192}
"""Rows from this size on, that have a scale of their own, take all warps of a thread block: they are read
twice, and what all warps hold has to stay in the L1 until then. Measured, docs/LOG.md."""
ROW_SCALED = tuple(WIDE_BYTES)
SIXTEEN = ("bf16", "fp16")
MOST_ITEMS = 2**31 - 2**12
_ZFP = re.compile(r"zfp([12])d-(\d+)")
_DTYPES = (torch.bfloat16, torch.float32)
_THREADS = 128
_ZFP_SOURCE = {"1": "codec/zfp_line.cu", "2": "codec/zfp_square.cu"}
_ZFP_SHARED = {"1": 4096 + 8 * 34 * (_THREADS // 32), "2": 1024 + 4 * 8 * _THREADS}
"""Bytes of a thread block, by dimensions: a table of codes, and blocks or planes."""


def variant_of(name: str, entry: str, dtype: torch.dtype) -> Variant:
    """The kernel `encode_rows` or `decode_rows` of a codec, for rows of bfloat16 or float32."""
    rows = ("ROWS_F32", int(dtype == torch.float32))
    if zfp := _ZFP.fullmatch(name):
        return Variant(source=_ZFP_SOURCE[zfp[1]], entry=entry, defines=(rows,))
    # Of nibbles a thread stores 16 bytes of rows at once, whatever their dtype; it may load more.
    nibbles = 4 if entry == "decode_rows" and dtype == torch.float32 else 8
    values = _held(name, encodes=entry == "encode_rows")
    defines = (("FORMAT", FORMATS[name]), ("HELD", values), ("NIBBLES", nibbles), rows)
    return Variant(source="codec/rows.cu", entry=entry, defines=defines)


def _held(name: str, *, encodes: bool) -> int:
    by_rows = encodes and name in ROW_SCALED
    return HELD["row scaled" if by_rows else "encode_rows" if encodes else "decode_rows"]


def shipped_variants() -> list[Variant]:
    names = [*FORMATS, "zfp1d-8", "zfp2d-8"]
    entries = ("encode_rows", "decode_rows")
    pairs = [
        (name, dtype) for name in names for dtype in _DTYPES if (name, dtype) != ("bf16", torch.bfloat16)
    ]
    return [variant_of(name, entry, dtype) for name, dtype in pairs for entry in entries]


def encode(name: str, rows_ND: Tensor, nbytes: int) -> Tensor | None:
    """uint8 [N, nbytes] of rows on a GPU, or `None` where no kernel applies."""
    if not _apply(name, rows_ND, rows_ND.dtype, rows_ND.shape[1]):
        return None
    return launch_encode(name, rows_ND, nbytes, jit.load)


def decode(name: str, encoded_NB: Tensor, width: int, dtype: torch.dtype) -> Tensor | None:
    """Rows [N, width] of `dtype` from bytes on a GPU, or `None` where no kernel applies."""
    if not _apply(name, encoded_NB, dtype, width):
        return None
    return launch_decode(name, encoded_NB, width, dtype, jit.load)


def _apply(name: str, rows: Tensor, dtype: torch.dtype, width: int) -> bool:
    return (
        rows.is_cuda
        and _known(name)
        and (name, dtype) != ("bf16", torch.bfloat16)  # the bytes that are there
        and dtype in _DTYPES
        and width % WIDTH_MULTIPLE == 0
        and rows.numel() > 0
        and rows.shape[0] * (width // 16) < MOST_ITEMS
        and not torch.compiler.is_compiling()
        and _works(rows.device.index)
    )


@functools.cache
def _known(name: str) -> bool:
    return name in FORMATS or _ZFP.fullmatch(name) is not None


@functools.cache
def _works(device: int) -> bool:
    return jit.why_not_hopper(device) is None


@functools.cache
def _kernel(name: str, entry: str, dtype: torch.dtype, device: torch.device, load: Callable[..., Any]) -> Any:
    return load(variant_of(name, entry, dtype), device)


def launch_encode(name: str, rows_ND: Tensor, nbytes: int, load: Callable[..., Any]) -> Tensor:
    """`encode` by the kernel that `load` gives: `jit.load`, or what stands in for it."""
    rows_ND = _aligned(rows_ND.detach(), 16)
    width = rows_ND.shape[1]
    encoded_NB = torch.empty(rows_ND.shape[0], nbytes, dtype=torch.uint8, device=rows_ND.device)
    kernel = _kernel(name, "encode_rows", rows_ND.dtype, rows_ND.device, load)
    _launch(kernel, name, rows_ND, encoded_NB, width, encodes=True)
    return encoded_NB


def launch_decode(
    name: str, encoded_NB: Tensor, width: int, dtype: torch.dtype, load: Callable[..., Any]
) -> Tensor:
    """`decode` by the kernel that `load` gives."""
    encoded_NB = _aligned(encoded_NB, 8 if name in SIXTEEN else 4)
    rows_ND = torch.empty(encoded_NB.shape[0], width, dtype=dtype, device=encoded_NB.device)
    kernel = _kernel(name, "decode_rows", dtype, encoded_NB.device, load)
    _launch(kernel, name, encoded_NB, rows_ND, width, encodes=False)
    return rows_ND


def _aligned(rows: Tensor, unit: int) -> Tensor:
    """The rows, copied where one does not start at a multiple of `unit` bytes or has gaps inside."""
    starts = rows.data_ptr() % unit == 0 and rows.stride(0) * rows.itemsize % unit == 0
    return rows if rows.stride(1) == 1 and starts else rows.clone(memory_format=torch.contiguous_format)


def _pitch(rows: Tensor) -> ctypes.c_int64:
    return ctypes.c_int64(rows.stride(0) * rows.itemsize)


def _launch(kernel: Any, name: str, source: Tensor, target: Tensor, width: int, *, encodes: bool) -> None:
    num_rows = source.shape[0]
    if zfp := _ZFP.fullmatch(name):
        smem, last = _ZFP_SHARED[zfp[1]], int(zfp[2])
        # In 1-D a warp takes eight spans of 32 blocks, in 2-D a thread one block, or two at an odd rate.
        items = -(-width // 128) if zfp[1] == "1" else width // (16 * (1 + last % 2))
        grid = -(-num_rows * items // (_THREADS // 32 * 8 if zfp[1] == "1" else _THREADS))
    else:
        by_rows = encodes and name in ROW_SCALED
        wide = by_rows and width * source.itemsize >= WIDE_BYTES[name]
        pieces = -(-width // (32 * _held(name, encodes=encodes)))
        warps = num_rows if by_rows else num_rows * pieces
        grid = num_rows if wide else -(-warps // (_THREADS // 32))
        smem, last = 128, int(wide)
    args = [source, _pitch(source), target, _pitch(target), num_rows, width, last]
    kernel.launch(grid=grid, block=_THREADS, args=args, smem=smem)
