"""Grouped GEMM for GPUs without wgmma, from compute capability 8.0 on: the host's side of `portable.cu`.

`launch_portable` takes what `launch_gemm` takes but scales, slopes, segments and kernels beside: the same
layouts, epilogues, rounding and order of a sum. Nothing is chosen from a model: tiles of 128 rows, or of 32
where experts have few in the mean.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Unpack

import torch
from torch import Tensor

from imbrex.kernels.arguments import multiprocessors
from imbrex.kernels.gemm.gemm import ALONE, Epilogue, Extras, Layout
from imbrex.kernels.jit import ARCH, Kernel, Variant, arch_of, load

SOURCE, ENTRY = "gemm/portable.cu", "portable_gemm"
THREADS, COLUMNS, DEPTH = 128, 128, 32
TALL, FLAT = 128, 32
"""Heights of a tile, in rows."""
STAGES = {TALL: 3, FLAT: 4}
"""Two tall blocks, or two flat ones, fit into the 100 KB of a multiprocessor with compute capability 8.9 or
12.0."""
BLOCKS = {TALL: 2, FLAT: 4}
"""A launch has so many a multiprocessor: as many as that holds at once where it has more room."""
FEW_ROWS = 48
"""Rows of an expert, in the mean, up to which tiles are flat."""
EPILOGUES = {
    Layout.FORWARD: (Epilogue.PLAIN, Epilogue.SWIGLU, Epilogue.SWIGLU_KEEP, Epilogue.WEIGHTED),
    Layout.DGRAD: (Epilogue.PLAIN,),
    Layout.WGRAD: (Epilogue.PLAIN, Epilogue.ADD, Epilogue.ADD_FLOAT),
}

_forced: str | None = None


def is_portable(device: int) -> bool:
    """Whether products on CUDA device `device` (-1: none) go through this kernel: wgmma is Hopper's."""
    return _forced is not None or _lacks_wgmma(device)


@functools.cache
def _lacks_wgmma(device: int) -> bool:
    return device >= 0 and torch.cuda.get_device_capability(device) != (9, 0)


def why_grouped_is_faster() -> str | None:
    """None where torch has no grouped product on the current GPU, and so reads the counts on the host and
    goes expert by expert, else one sentence: why `auto` leaves the experts to it."""
    major, minor = torch.cuda.get_device_capability()
    if major == 10:
        return (
            f"torch has a grouped product for compute capability {major}.{minor}, and imbrex's own does "
            "without that GPU's newer instructions; implementation='kernels' takes it all the same"
        )
    return None


def describe_portable() -> str:
    """The products that compute the experts on the current GPU, and whether anybody has seen them there."""
    return (
        f"products by mma.sync, compiled for {arch_of()}, never run by us on such a GPU (try imbrex doctor)"
    )


@contextmanager
def portable_products(arch: str = ARCH) -> Iterator[None]:
    """Inside, products go through this kernel on every GPU, in every thread: to test and to measure it.
    arch: as of `Variant`; `compute_80` takes the code of the oldest GPUs through the driver's compiler."""
    global _forced
    before, _forced = _forced, arch
    try:
        yield
    finally:
        _forced = before


def portable_variant(layout: Layout, epilogue: Epilogue, rows: int, arch: str = ARCH) -> Variant:
    """The kernel's source with its defines. rows: of a tile, `TALL` or `FLAT`."""
    return Variant(
        source=SOURCE,
        entry=ENTRY,
        defines=(
            ("LAYOUT", int(layout)),
            ("EPILOGUE", int(epilogue)),
            ("BLOCK_M", rows),
            ("STAGES", STAGES[rows]),
        ),
        arch=arch,
    )


def shipped_variants() -> list[Variant]:
    return [
        portable_variant(layout, epilogue, rows)
        for layout, epilogues in EPILOGUES.items()
        for epilogue in epilogues
        for rows in ((TALL,) if layout is Layout.WGRAD else (TALL, FLAT))
    ]


def smem_of(rows: int) -> int:
    """Bytes of a block's dynamic shared memory."""
    return STAGES[rows] * 2 * DEPTH * (rows + COLUMNS)


def rows_of_tile(layout: Layout, rows: int, experts: int) -> int:
    """`rows`: of all experts together, at most."""
    return FLAT if layout is not Layout.WGRAD and rows <= FEW_ROWS * experts else TALL


@functools.cache
def _kernel(layout: Layout, epilogue: Epilogue, rows: int, device: int, arch: str) -> Kernel:
    return load(portable_variant(layout, epilogue, rows, arch), device)


def launch_portable(
    layout: Layout,
    a: Tensor,
    b: Tensor,
    ends_e: Tensor,
    out: Tensor,
    epilogue: Epilogue = Epilogue.PLAIN,
    **more: Unpack[Extras],
) -> None:
    """Queue one grouped GEMM into `out`; tensors as of `launch_gemm`, contiguous, widths multiples of 8.
    more: gate_up, weights_R and index_R."""
    option = more.get
    assert epilogue in EPILOGUES[layout]
    assert option("beside", ALONE) is ALONE
    assert more.keys() <= {"gate_up", "weights_R", "index_R", "beside"}
    assert all(tensor.is_contiguous() for tensor in (a, b, out))
    experts, wide = ends_e.numel(), epilogue in (Epilogue.SWIGLU, Epilogue.SWIGLU_KEEP)
    rows, columns = out.shape[-2:]
    high = rows_of_tile(layout, rows, experts)
    tiles = -(-columns // (COLUMNS // 2 if wide else COLUMNS))
    tiles *= experts * -(-rows // high) if layout is Layout.WGRAD else experts + rows // high
    device = a.get_device()
    kernel = _kernel(layout, epilogue, high, device, _forced or ARCH)
    kernel.launch(
        grid=max(1, min(tiles, BLOCKS[high] * multiprocessors(device))),
        block=THREADS,
        smem=smem_of(high),
        args=[
            *(a, b, out, option("gate_up"), ends_e, experts, rows, columns, a.shape[1]),
            *(option("weights_R"), option("index_R")),
        ],
    )
