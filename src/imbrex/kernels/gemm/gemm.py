"""Grouped GEMM on the host's side: shapes, descriptors and launch of `gemm/gemm.cu`.

Rows are expert-major; `ends_e` (int32, on the device) holds the end of each expert's rows, as `torch`'s
`grouped_mm` takes it. Rows past the last end are neither read nor written.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from enum import IntEnum
from typing import Any, NamedTuple, TypedDict, Unpack

import torch

from imbrex.kernels import records
from imbrex.kernels.arguments import declare_enums, multiprocessors
from imbrex.kernels.gemm.tensor_map import tensor_map
from imbrex.kernels.jit import ByValue, Kernel, KernelError, Prepared, Variant, load
from imbrex.kernels.structs import Struct, struct


class Layout(IntEnum):
    """The dimension that is contracted: see `gemm/gemm.cu`, which has it as `Layout::kForward` and so on."""

    FORWARD = 0
    DGRAD = 1
    WGRAD = 2


class Epilogue(IntEnum):
    """The end of a tile; as in gemm/gemm.cu."""

    PLAIN = 0
    SWIGLU = 1
    SWIGLU_KEEP = 2
    WEIGHTED = 3
    SWIGLU_GRADIENT = 4
    ADD = 5
    ADD_FLOAT = 6


declare_enums("gemm/kinds.cuh", "gemm", Layout, Epilogue)


class Tiling(NamedTuple):
    """How a tile is cut, loaded and stored: the defines of `gemm/gemm.cu` under their names there.

    A tuple, since it is hashed at every launch.
    """

    groups: int = 2
    blocks_m: int = 1
    pingpong: bool = False
    block_n: int = 256
    stages: int = 4
    panels: int = 2
    group_m: int = 8
    cluster: int = 1
    box: int = 128

    @property
    def block_m(self) -> int:
        return 64 * (self.blocks_m if self.pingpong or self.is_tall else self.groups)

    @property
    def is_tall(self) -> bool:
        """Whether two groups share three blocks of 64 rows (gemm/tall.cuh)."""
        return not self.pingpong and self.blocks_m == 3

    @property
    def box_m(self) -> int:
        """Rows of A in bf16 that an instruction loads at most (kBoxM of gemm/shape.cuh)."""
        return min(self.box, 64 if self.two_heights or self.is_tall else self.block_m)

    @property
    def two_heights(self) -> bool:
        """Whether tiles in bf16 are 64 rows high where that is faster (gemm/height.cuh)."""
        return (self.pingpong, self.block_m, self.block_n) == (False, 128, 256)

    @property
    def threads(self) -> int:
        """Threads of a block: the groups that multiply, and one that loads."""
        return 128 * (self.groups + 1)

    @property
    def halved(self) -> bool:
        """Whether in bf16 a half of a tile is stored while the other is multiplied (gemm/halves.cuh)."""
        return not self.pingpong and self.block_n == 256

    @property
    def smem(self) -> int:
        """Bytes of dynamic shared memory, with the slack for 1024-byte alignment."""
        staging = 0 if self.is_tall else self.groups * self.panels * 8192
        return 1024 + self.stages * 128 * (self.block_m + self.block_n) + staging


@dataclass(frozen=True, kw_only=True, slots=True)
class Scales:
    """float32 scales of fp8 operands, one for every 128 values along k: rows [R, K/128], its rows any stride
    apart; weights [e, N/128, K/128]; `out` [R, F/128], written with SwiGLU's result."""

    rows: torch.Tensor
    weights: torch.Tensor
    out: torch.Tensor | None = None

    def key(self) -> tuple[int, ...]:
        """The fields of the kernel's argument."""
        out, stride = (0, 0) if self.out is None else (self.out.data_ptr(), self.out.stride(0))
        return self.rows.data_ptr(), self.weights.data_ptr(), out, self.rows.stride(0), stride

    def argument(self) -> Struct:
        a, b, d, stride_a, stride_d = self.key()
        return _SCALES(a=a, b=b, d=d, stride_a=stride_a, stride_d=stride_d)


@dataclass(frozen=True, kw_only=True, slots=True)
class Slopes:
    """Tensors of SWIGLU_GRADIENT: the kept gate_up [R, 2F] bf16, its gradient (written), whether the
    activation is wanted, and with row weights the parts of their gradient, float32 [ceil(F / block_n), R]."""

    gate_up: torch.Tensor
    d_gate_up: torch.Tensor
    keep: bool = True
    d_weights: torch.Tensor | None = None

    def key(self) -> tuple[int, ...]:
        """The fields of the kernel's argument, and the address of the result."""
        parts = 0 if self.d_weights is None else self.d_weights.data_ptr()
        fields = self.gate_up.data_ptr(), parts, self.gate_up.shape[0], int(self.keep)
        return *fields, self.d_gate_up.data_ptr()

    def argument(self) -> Struct:
        gate_up, d_weight, rows, keep, _ = self.key()
        return _SLOPES(gate_up=gate_up, d_weight=d_weight, rows=rows, keep=keep)


_SCALES, _SLOPES = struct("gemm/shape.cuh", "Scales"), struct("gemm/shape.cuh", "Slopes")
_NO_SCALES = _SCALES(a=None, b=None, d=None, stride_a=0, stride_d=0)
_NO_SLOPES = _SLOPES(gate_up=None, d_weight=None, rows=0, keep=0)


class Beside(NamedTuple):
    """A kernel that does more than its product: the arguments of gemm/gemm.cu's, and `args`.

    file: the source, its entry, and its defines beyond those of a product. args: from the blocks of a launch.
    key: numbers that they are made from.
    """

    file: tuple[Any, ...]
    args: Callable[[int], tuple[Any, ...]]
    key: tuple[int, ...]
    leave: Callable[[Any], None] | None = None
    """Takes the product that follows (`imbrex.kernels.ffn.ffn.LeftProduct`), and computes it."""
    plan: torch.Tensor | None = None
    """The plan of the rows' groups (`imbrex.kernels.ffn.glue.Groups`), where who brings them has made it."""
    own_e2: torch.Tensor | None = None
    """Where the kernel writes the first own row of every expert, and the one behind the last."""
    mean_rows: int = 0
    """Rows in the mean, where there is room for more; 0: not known."""


GATHER_WARPS = 4
"""Warps that ask for rows of an index, one instruction a row."""


SOURCE, ENTRY = "gemm/gemm.cu", "grouped_gemm"
ALONE = Beside(file=(SOURCE, ENTRY), args=lambda blocks: (), key=())
FOLLOWS = Beside(file=("gemm/follow.cu", "product_that_follows"), args=lambda blocks: (), key=(-1,))
"""A product whose rows the launch right before makes, with a counter of its own."""
BEHIND = "gemm/behind.cu", "product_behind"


def begins_behind(tiles: int) -> Beside:
    """A product that begins in the last wave of the one that makes its rows and has `tiles` tiles of columns
    (gemm/parts.cuh), with a counter of its own."""
    return Beside(file=BEHIND, args=lambda blocks: (tiles,), key=(-2, tiles))


def gemm_variant(
    layout: Layout,
    epilogue: Epilogue,
    tiling: Tiling,
    wide: bool = True,
    fp8: bool = False,
    gather: bool = False,
) -> Variant:
    """The kernel's source with its defines. wide: see gemm/gemm.cu; fp8 and gather are for forward."""
    return Variant(
        source=SOURCE,
        entry=ENTRY,
        defines=(
            ("LAYOUT", int(layout)),
            ("EPILOGUE", int(epilogue)),
            ("GROUPS", tiling.groups),
            ("BLOCKS_M", tiling.blocks_m),
            ("PINGPONG", int(tiling.pingpong)),
            ("BLOCK_N", tiling.block_n),
            ("STAGES", tiling.stages),
            ("PANELS", tiling.panels),
            ("GROUP_M", tiling.group_m),
            ("CLUSTER", tiling.cluster),
            ("BOX", tiling.box),
            ("WIDE", int(wide and layout is not Layout.FORWARD)),
            ("FP8", int(fp8)),
            ("WAVE", 128 if tiling.groups == 2 else 64),
            ("GATHER", GATHER_WARPS if gather else 0),
        ),
    )


def of_file(variant: Variant, file: tuple[Any, ...]) -> Variant:
    """A product's variant in another kernel, cut alike: `Beside.file`."""
    source, entry, *defines = file
    return replace(variant, source=source, entry=entry, defines=(*variant.defines, *defines))


def ragged_map(rows_RC: torch.Tensor, box_columns: int, height: int) -> ByValue:
    """Descriptor whose box of `height` rows can end at any row: see "Ragged ends" in gemm/run.cuh."""
    rows, columns = rows_RC.shape
    stride = rows_RC.stride(0) * rows_RC.element_size()
    return tensor_map(
        rows_RC.data_ptr() - height * stride,
        rows_RC.dtype,
        (columns, height, rows + 1),
        (stride, stride),
        (box_columns, height, 1),
    )


def row_map(rows_TC: torch.Tensor) -> ByValue:
    """Descriptor whose box is 128 bytes of one row."""
    rows, columns = rows_TC.shape
    stride = rows_TC.stride(0) * rows_TC.element_size()
    line = 128 // rows_TC.element_size()
    return tensor_map(rows_TC.data_ptr(), rows_TC.dtype, (columns, rows), (stride,), (line, 1))


def stacked_map(weight_eNK: torch.Tensor, box_columns: int, box_rows: int, split: int = 1) -> ByValue:
    """Descriptor of one matrix per expert, its rows cut into `split` equal parts (2: gate and up)."""
    experts, rows, columns = weight_eNK.shape
    size = weight_eNK.element_size()
    part = rows // split
    return tensor_map(
        weight_eNK.data_ptr(),
        weight_eNK.dtype,
        (columns, part, experts * split),
        (columns * size, part * columns * size),
        (box_columns, box_rows, 1),
    )


def gate_and_up_map(gate_up_eGD: torch.Tensor) -> ByValue:
    """Descriptor of gate rows, then up rows, per expert, whose box is 64 of both: (k, row, half, expert)."""
    experts, rows, columns = gate_up_eGD.shape
    size = gate_up_eGD.element_size()
    return tensor_map(
        gate_up_eGD.data_ptr(),
        gate_up_eGD.dtype,
        (columns, rows // 2, 2, experts),
        (columns * size, rows // 2 * columns * size, rows * columns * size),
        (128 // size, 64, 2, 1),
    )


def ragged_panels_map(rows_RC: torch.Tensor, panels: int) -> ByValue:
    """Ragged descriptor (64 rows) whose box is `panels` panels of 64 columns: (column, y, z, panel)."""
    rows, columns = rows_RC.shape
    stride = rows_RC.stride(0) * rows_RC.element_size()
    return tensor_map(
        rows_RC.data_ptr() - 64 * stride,
        rows_RC.dtype,
        (64, 64, rows + 1, columns // 64),
        (stride, stride, 128),
        (64, 64, 1, panels),
    )


def stacked_panels_map(weight_eKN: torch.Tensor, panels: int) -> ByValue:
    """Descriptor of one matrix per expert whose box is 64 rows of `panels` panels of 64 columns."""
    experts, rows, columns = weight_eKN.shape
    return tensor_map(
        weight_eKN.data_ptr(),
        weight_eKN.dtype,
        (64, rows, columns // 64, experts),
        (2 * columns, 128, 2 * rows * columns),
        (64, 64, panels, 1),
    )


def halves_map(gate_up_RG: torch.Tensor) -> ByValue:
    """Ragged descriptor (64 rows) of rows that hold gate, then up: (column, half, y, z)."""
    rows, columns = gate_up_RG.shape
    stride = gate_up_RG.stride(0) * 2
    return tensor_map(
        gate_up_RG.data_ptr() - 64 * stride,
        gate_up_RG.dtype,
        (columns // 2, 2, 64, rows + 1),
        (columns, stride, stride),
        (64, 1, 64, 1),
    )


@functools.cache
def products_status(device: int) -> torch.Tensor:
    """One word of the host that kernels of `device` write to."""
    return torch.zeros(1, dtype=torch.int32, device="cpu", pin_memory=device >= 0)


@functools.cache
def _status_word(device: int) -> ctypes.c_int32:
    return ctypes.c_int32.from_address(products_status(device).data_ptr())


def check_products(device: int) -> None:
    """Raises KernelError where a grouped GEMM that ended on `device` had given up waiting; launches ask."""
    if _status_word(device).value:
        raise KernelError(
            f"a grouped GEMM on device {device} waited ten seconds for its own copies and gave up: its "
            "result is wrong; restart the process, and report this with the shapes"
        )


@functools.cache
def _gemm_kernel(
    layout: Layout,
    epilogue: Epilogue,
    tiling: Tiling,
    wide: bool,
    fp8: bool,
    gather: bool,
    device: int,
    file: tuple[Any, ...] = (SOURCE, ENTRY),
) -> tuple[Kernel, int, int]:
    """The kernel, its bytes of shared memory, the blocks of a launch."""
    kernel = load(of_file(gemm_variant(layout, epilogue, tiling, wide, fp8, gather), file), device)
    if tiling.cluster == 1:
        return kernel, tiling.smem, multiprocessors(device)
    return kernel, tiling.smem, tiling.cluster * kernel.clusters(tiling.cluster, tiling.threads, tiling.smem)


def _operand_maps(
    layout: Layout,
    a: torch.Tensor,
    b: torch.Tensor,
    tiling: Tiling,
    epilogue: Epilogue,
    wide: bool,
    gather: bool,
) -> tuple[ByValue, ByValue]:
    width = tiling.block_n // tiling.cluster  # what one instruction loads of B
    columns = width // 64
    if layout is Layout.WGRAD and wide:
        return ragged_panels_map(a, tiling.block_m // 64), ragged_panels_map(b, columns)
    if layout is Layout.WGRAD:
        return ragged_map(a, 64, 64), ragged_map(b, 64, 64)
    line = 128 // a.element_size()
    height = tiling.box_m if a.element_size() == 2 else tiling.block_m
    map_a = row_map(a) if gather else ragged_map(a, line, height)
    if layout is Layout.DGRAD:
        return map_a, stacked_panels_map(b, columns) if wide else stacked_map(b, 64, 64)
    split = 2 if epilogue in (Epilogue.SWIGLU, Epilogue.SWIGLU_KEEP) else 1
    if split == 2 and tiling.halved and not gather and a.element_size() == 2:
        return map_a, gate_and_up_map(b)
    return map_a, stacked_map(b, line, min(width, tiling.block_n // split), split)


def _result_maps(layout: Layout, out: torch.Tensor, halves: torch.Tensor | None) -> tuple[ByValue, ByValue]:
    line = 128 // out.element_size()
    map_out = stacked_map(out, line, 64) if layout is Layout.WGRAD else ragged_map(out, line, 64)
    return map_out, map_out if halves is None else halves_map(halves)


def _fitted(
    layout: Layout, tiling: Tiling, a: torch.Tensor, b: torch.Tensor, blocks: int | None
) -> tuple[Tiling, bool]:
    """The tiling, without its cluster where that does not fit, and `wide` of gemm/gemm.cu."""
    wide = b.shape[-1] % 64 == 0 and (layout is not Layout.WGRAD or a.shape[-1] % 64 == 0)
    halves = layout is Layout.FORWARD or (layout is Layout.DGRAD and wide)
    if tiling.is_tall:
        return tiling if halves else Tiling(), wide
    if halves and (blocks is None or blocks % tiling.cluster == 0):
        return tiling, wide
    return tiling._replace(cluster=1), wide


def _at(tensor: torch.Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()


class Extras(TypedDict, total=False):
    """Options of a grouped GEMM beyond its operands.

    scales: then a and b are float8_e4m3fn (FORWARD; K, N and F multiples of 128, a's rows any multiple of 16
    bytes apart); `out` is bf16, and fp8 again with SWIGLU. slopes (DGRAD): a b is the gradient of SwiGLU's
    result and `out` gets that result. ADD, ADD_FLOAT (WGRAD) add to `out`, bf16 or float32. index_R (int64,
    FORWARD): row r is a[index_R[r]], a [T, K]: the bits of a permuted copy. blocks: of the launch. beside: a
    kernel that does more (FORWARD, or DGRAD where N is a multiple of 64; no index). progress: int32
    zeros, where SWIGLU and SWIGLU_KEEP tell of their tiles, and `begins_behind` waits.
    """

    gate_up: torch.Tensor | None
    weights_R: torch.Tensor | None
    scales: Scales | None
    slopes: Slopes | None
    segments: torch.Tensor | None
    index_R: torch.Tensor | None
    blocks: int | None
    beside: Beside
    progress: torch.Tensor | None


def launch_gemm(
    layout: Layout,
    a: torch.Tensor,
    b: torch.Tensor,
    ends_e: torch.Tensor,
    out: torch.Tensor,
    counter: torch.Tensor,
    *,
    tiling: Tiling,
    epilogue: Epilogue = Epilogue.PLAIN,
    **more: Unpack[Extras],
) -> None:
    """Queue one grouped GEMM into `out`; all contiguous bf16, but `ends_e` int32 and `weights_R` float32.

    `counter` is two int32 zeros, not shared by launches that may overlap; the kernel leaves zeros.

    FORWARD  a [R, K], b [e, N, K], out [R, N] (SwiGLU: b [e, 2F, K], out [R, F], gate_up [R, 2F] if kept)
    DGRAD    a [R, K], b [e, K, N], out [R, N]
    WGRAD    a [R, M], b [R, N],    out [e, M, N]
    """
    device, option = a.get_device(), more.get
    scales, slopes, segments = option("scales"), option("slopes"), option("segments")
    key = (
        layout, epilogue, tiling, option("blocks"),
        a.data_ptr(), a.shape, a.stride(0), b.data_ptr(), b.shape, out.data_ptr(), out.shape,
        ends_e.data_ptr(), ends_e.shape, counter.data_ptr(), device,
        _at(option("gate_up")), _at(option("weights_R")), _at(option("index_R")), _at(option("progress")),
        None if scales is None else scales.key(), None if slopes is None else slopes.key(),
        None if segments is None else (segments.data_ptr(), segments.shape[0]),
        option("beside", ALONE).key,
    )  # fmt: skip
    launch = _launches.get(key)
    if launch is None:
        launch = _prepare(layout, (a, b, ends_e, out, counter), tiling, epilogue, more)
        if len(_launches) >= _MOST_LAUNCHES:
            _launches.clear()
        _launches[key] = launch
    launch.launch()
    if records.running:
        records.note(launch)
    check_products(device)


def _prepare(
    layout: Layout, operands: Sequence[torch.Tensor], tiling: Tiling, epilogue: Epilogue, more: Extras
) -> Prepared:
    """The launch: its kernel, and how many blocks of what size."""
    a, b, beside = operands[0], operands[1], more.get("beside", ALONE)
    tiling, wide = _fitted(layout, tiling, a, b, more.get("blocks"))
    fp8, gather = more.get("scales") is not None, more.get("index_R") is not None
    kernel, smem, sms = _gemm_kernel(layout, epilogue, tiling, wide, fp8, gather, a.get_device(), beside.file)
    blocks = more.get("blocks") or sms
    return kernel.prepare(
        grid=blocks,
        block=tiling.threads,
        smem=smem,
        cluster=tiling.cluster,
        dependent=True,
        args=[*_arguments(layout, operands, tiling, epilogue, wide, more), *beside.args(blocks)],
    )


def _arguments(
    layout: Layout,
    operands: Sequence[torch.Tensor],
    tiling: Tiling,
    epilogue: Epilogue,
    wide: bool,
    more: Extras,
) -> list[Any]:
    """The parameters of the kernel in gemm/gemm.cu, in its order."""
    (a, b, ends_e, out, counter), option = operands, more.get
    scales, slopes, segments, index_R = map(option, ("scales", "slopes", "segments", "index_R"))
    halves = option("gate_up") if slopes is None else slopes.d_gate_up
    return [
        *_operand_maps(layout, a, b, tiling, epilogue, wide, index_R is not None),
        *_result_maps(layout, out, halves),
        ends_e,
        segments,
        ends_e.numel() if segments is None else segments.shape[0],
        out.shape[-2],
        out.shape[-1],
        a.shape[-1],
        option("weights_R"),
        counter,
        products_status(a.get_device()),
        _NO_SCALES if scales is None else scales.argument(),
        _NO_SLOPES if slopes is None else slopes.argument(),
        index_R,
        option("progress"),
    ]


_launches: dict[tuple[Any, ...], Any] = {}
"""Prepared launches by all that they depend on: with a caching allocator a step repeats the last one's."""
_MOST_LAUNCHES = 4096
