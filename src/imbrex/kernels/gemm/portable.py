"""Grouped GEMM for GPUs without wgmma, from compute capability 8.0 on: the host's side of `portable.cu`.

`launch_portable` takes what `launch_gemm` takes but scales, slopes, segments and kernels beside: the same
layouts, epilogues, rounding and order of a sum. Nothing is chosen from a model: tiles of 128 rows, or of 32
where experts have few in the mean.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Unpack

import torch
from torch import Tensor

from imbrex.kernels.arguments import multiprocessors
from imbrex.kernels.gemm.gemm import ALONE, Epilogue, Extras, Layout
from imbrex.kernels.jit import ARCH, Kernel, Variant, arch_of, load

SOURCE, ENTRY = "gemm/portable.cu", "portable_gemm"


@dataclass(frozen=True, kw_only=True, slots=True)
class Shape:
    """Rows and columns of a tile and of a warp's part of it; steps of k loaded together, stages of them, and
    blocks that a multiprocessor is to hold."""

    rows: int
    columns: int
    warp_rows: int
    warp_columns: int
    depth: int
    stages: int
    blocks: int

    @property
    def threads(self) -> int:
        return 32 * (self.rows // self.warp_rows) * (self.columns // self.warp_columns)

    @property
    def smem(self) -> int:
        """Bytes of a block's dynamic shared memory."""
        return self.stages * 2 * self.depth * (self.rows + self.columns)


TALL = Shape(rows=128, columns=128, warp_rows=64, warp_columns=64, depth=32, stages=4, blocks=2)
MIDDLE = Shape(rows=64, columns=128, warp_rows=32, warp_columns=64, depth=64, stages=3, blocks=3)
FLAT = Shape(rows=32, columns=128, warp_rows=32, warp_columns=32, depth=64, stages=4, blocks=2)
SHAPES = {FLAT: 32, MIDDLE: 96, TALL: 1 << 31}
"""Rows of an expert, in the mean, up to which a shape is taken."""
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
    """Why `auto` leaves the experts to torch's grouped product, or `None` where torch has none on the current
    GPU, and so reads the counts on the host and goes expert by expert."""
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
    """A context in which products of all threads go through this kernel, on any GPU: to test and measure it.
    arch: as of `Variant`; `compute_80` takes the code of the oldest GPUs through the driver's compiler."""
    global _forced
    before, _forced = _forced, arch
    try:
        yield
    finally:
        _forced = before


def portable_variant(layout: Layout, epilogue: Epilogue, shape: Shape, arch: str = ARCH) -> Variant:
    """The kernel's source with its defines."""
    return Variant(
        source=SOURCE,
        entry=ENTRY,
        defines=(
            ("LAYOUT", int(layout)),
            ("EPILOGUE", int(epilogue)),
            *(("BLOCK_M", shape.rows), ("BLOCK_N", shape.columns)),
            *(("WARP_M", shape.warp_rows), ("WARP_N", shape.warp_columns)),
            *(("DEPTH", shape.depth), ("STAGES", shape.stages), ("BLOCKS", shape.blocks)),
        ),
        arch=arch,
    )


def shipped_variants() -> list[Variant]:
    return [
        portable_variant(layout, epilogue, shape)
        for layout, epilogues in EPILOGUES.items()
        for epilogue in epilogues
        for shape in ((TALL,) if layout is Layout.WGRAD else SHAPES)
    ]


def shape_of_tile(layout: Layout, rows: int, experts: int) -> Shape:
    """`rows`: of all experts together, at most."""
    if layout is Layout.WGRAD:
        return TALL
    return next(shape for shape, limit in SHAPES.items() if rows <= limit * experts)


@functools.cache
def _kernel(layout: Layout, epilogue: Epilogue, shape: Shape, device: int, arch: str) -> Kernel:
    return load(portable_variant(layout, epilogue, shape, arch), device)


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
    shape = shape_of_tile(layout, rows, experts)
    tiles = -(-columns // (shape.columns // 2 if wide else shape.columns))
    tiles *= experts * -(-rows // shape.rows) if layout is Layout.WGRAD else experts + rows // shape.rows
    device = a.get_device()
    kernel = _kernel(layout, epilogue, shape, device, _forced or ARCH)
    kernel.launch(
        grid=max(1, min(tiles, shape.blocks * multiprocessors(device))),
        block=shape.threads,
        smem=shape.smem,
        args=[
            *(a, b, out, option("gate_up"), ends_e, experts, rows, columns, a.shape[1]),
            *(option("weights_R"), option("index_R")),
        ],
    )
