"""The package's expert kernels, compiled for the CPU by g++ and run by fibers (`tensor_cores_on_cpu.h`)."""

from __future__ import annotations

import ctypes
import functools
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from imbrex.kernels import jit
from imbrex.kernels.ffn import fp8, glue
from imbrex.kernels.gemm import gemm, portable
from tests.emulated.kernel import (
    NAMESPACES,
    Prepared,
    alone,
    built_once,
    compile_library,
    entry_points,
    struct_checks,
    text_of,
)

HEADER = "tensor_cores_on_cpu.h"
SHARED = {
    "extern __shared__ u8 memory[];": "u8* memory = emu::self().block->shared;",
    "__shared__ Slot slots[kSlots];": "Slot* slots = reinterpret_cast<Slot*>(memory + kStatic);",
    "__shared__ u64 barriers[2 * C::kStages + 2 * kSlots + 2];": (
        "u64* barriers = reinterpret_cast<u64*>(memory + kStatic + sizeof(Slot) * kSlots);"
    ),
    "__shared__ u64 barriers[2 * C::kStages + (kAsksLate<C> ? 3 : 2) * kSlots + 2];": (
        "u64* barriers = reinterpret_cast<u64*>(memory + kStatic + sizeof(Slot) * kSlots);"
    ),
    "__shared__ Done done;": "Done& done = *reinterpret_cast<Done*>(memory + kStatic + 1600);",
    "__shared__ u32 due[2];": "u32* due = reinterpret_cast<u32*>(memory + kStatic + 512);",
    "__shared__ Room room;": "Room& room = *reinterpret_cast<Room*>(memory + kStatic + 512);",
    "__shared__ __align__(16) u32 from[C::kTurns * C::kBlockM];": (
        "u32* from = reinterpret_cast<u32*>(memory + kStatic + 512);"
    ),
}
"""A fiber's block has one piece of shared memory; what the kernel declares as static lies behind the rest."""
NARROW = gemm.Tiling(block_n=128, stages=6)
"""A cut of the caller's, which the library never takes by itself."""
STATIC_BYTES = 2048
REPLACED = ("ptx/base.cuh", "ptx/exchange.cuh", "ptx/mma.cuh", "ptx/wgmma.cuh")
Edits = tuple[tuple[str, str], ...]


@functools.cache
def _library(variant: jit.Variant, dynamic: int, edits: Edits) -> Any:
    sources = dict(jit.sources_of(variant))
    for old, new in [*(pair for pair in SHARED.items() if pair[0] in sources[variant.source]), *edits]:
        places = [name for name, source in sources.items() if old in source]
        if len(places) != 1:  # no AssertionError: that is what faults are caught by
            raise LookupError(f"the kernel says {old!r} in {places}, not in one place")
        sources[places[0]] = sources[places[0]].replace(old, new)
    for name in REPLACED:
        sources[name] = f'#include "{HEADER}"\n'
    text = text_of(sources, variant)
    return built_once(f"{text}{dynamic}", lambda folder: _build(variant, sources, dynamic, folder))


def _build(variant: jit.Variant, sources: dict[str, str], dynamic: int, folder: Path) -> Path:
    for name, source in sources.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(source)
    main = (
        f'#include "{HEADER}"\n#include "{variant.source}"\n{NAMESPACES}{struct_checks(sources)}'
        + entry_points(sources[variant.source])
    )
    return compile_library(folder, main, (("kStatic", dynamic), *variant.defines))


def pack_map(
    address: int,
    dtype: torch.dtype,
    sizes: tuple[int, ...],
    strides_bytes: tuple[int, ...],
    box: tuple[int, ...],
    swizzle: int = 128,
) -> jit.ByValue:
    """Stands in for `tensor_map`."""
    assert dtype in (torch.bfloat16, torch.float8_e4m3fn, torch.float32)
    assert swizzle == 128
    assert address % 16 == 0
    assert all(stride % 16 == 0 for stride in strides_bytes)
    rank, fill = len(sizes), 4 - len(sizes)
    numbers = [*sizes, *[1] * fill, *strides_bytes, *[0] * fill]
    return jit.ByValue(struct.pack("<3q7q4i", address, rank, dtype.itemsize, *numbers, *box, *[1] * fill))


class EmulatedKernel:
    """Stands in for `jit.Kernel`; every launch has its own interleaving and may touch `tensors` only. `most`:
    blocks of a launch, of a kernel that takes any number; `limit`: seconds; with `unrest` the interleaving is
    an adversary's."""

    unrest = False

    def __init__(
        self,
        variant: jit.Variant,
        smem: int,
        tensors: Sequence[Tensor] | None,
        edits: Edits,
        most: int | None = None,
        limit: float = 60.0,
    ) -> None:
        self._most, self._limit = most, limit
        self._library, self._tensors, self.seed = _library(variant, smem, edits), tensors, 0
        self._emulate = getattr(self._library, f"emulate_{variant.entry}")

    def launch(
        self, *, grid: int, block: int, args: Sequence[Any], smem: int = 0, cluster: int = 1, **_: Any
    ) -> None:
        assert grid % cluster == 0
        grid = grid if self._most is None else min(grid, self._most)
        self._library.forget()
        ranges = [(0, 2**62)]
        if self._tensors is not None:
            ranges = [(tensor.data_ptr(), tensor.numel() * tensor.element_size()) for tensor in self._tensors]
        for begin, size in ranges:
            self._library.name(ctypes.c_void_p(begin), ctypes.c_int64(size))
        slots, addresses = jit._pack(args)
        self.seed += 1
        late = self._emulate(
            *(grid, block, smem + STATIC_BYTES, ctypes.c_uint(self.seed)),
            *(ctypes.c_double(self._limit), ctypes.c_int(self.unrest), ctypes.c_int(alone()), addresses),
        )
        del slots
        assert late == 0, f"the kernel did not end within {self._limit} s"

    def prepare(self, **how: Any) -> functools.partial[None]:
        launch = functools.partial(self.launch, **how)
        launch.launch = launch  # type: ignore[attr-defined]
        return launch

    def blank(self, *, words: Sequence[tuple[int, int]], **how: Any) -> Prepared:
        return Prepared(self, how, words)


def emulate(
    monkeypatch: Any,
    tensors: Sequence[Tensor] | None = None,
    *,
    blocks: int,
    edits: Edits = (),
    seed: int = 0,
) -> None:
    """Let `launch_gemm` and the glue run on the CPU, with `blocks` blocks, on `tensors` or any memory."""

    def gemm_kernel(
        layout: Any,
        epilogue: Any,
        tiling: Any,
        wide: bool,
        fp8: bool,
        gather: bool,
        device: int,
        file: tuple[Any, ...] = (gemm.SOURCE, gemm.ENTRY),
    ) -> tuple[EmulatedKernel, int, int]:
        variant = gemm.gemm_variant(layout, epilogue, tiling, wide, fp8, gather)
        variant = gemm.of_file(variant, file)
        kernel = EmulatedKernel(variant, tiling.smem, tensors, edits)
        kernel.seed = seed
        return kernel, tiling.smem, blocks

    def glue_kernel(entry: str, device: torch.device) -> EmulatedKernel:
        return EmulatedKernel(jit.Variant(source=glue.SOURCE, entry=entry), 0, tensors, ())

    def quantiser(device: torch.device) -> EmulatedKernel:
        variant = jit.Variant(source=fp8.SOURCE, entry="quantise_rows")
        return EmulatedKernel(variant, 0, tensors, (), most=blocks)

    def portable_kernel(layout: Any, epilogue: Any, shape: Any, device: int, arch: str) -> EmulatedKernel:
        variant = portable.portable_variant(layout, epilogue, shape)
        kernel = EmulatedKernel(variant, shape.smem, tensors, edits, most=blocks)
        kernel.seed = seed
        return kernel

    monkeypatch.setattr(portable, "_kernel", portable_kernel)
    monkeypatch.setattr(fp8, "_quantiser", quantiser)
    monkeypatch.setattr(gemm, "_launches", {})
    monkeypatch.setattr(gemm, "_gemm_kernel", gemm_kernel)
    monkeypatch.setattr(gemm, "tensor_map", pack_map)
    monkeypatch.setattr(glue, "_kernel", glue_kernel)
    monkeypatch.setattr(glue, "_blocks", lambda device: blocks)
