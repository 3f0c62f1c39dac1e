"""The package's grouped GEMM, compiled for the CPU by g++ and run by fibers (`tensor_cores_on_cpu.h`)."""

from __future__ import annotations

import ctypes
import functools
import hashlib
import struct
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from imbrex.kernels import experts_gemm, jit

HEADERS = [Path(__file__).with_name(name) for name in ("cuda_on_cpu.h", "tensor_cores_on_cpu.h")]
SHARED = {
    "extern __shared__ u8 memory[];": "u8* memory = emu::self().block->shared;",
    "__shared__ Slot slots[kSlots];": "Slot* slots = reinterpret_cast<Slot*>(memory + kStatic);",
    "__shared__ u64 barriers[2 * STAGES + 2 * kSlots + 2];": (
        "u64* barriers = reinterpret_cast<u64*>(memory + kStatic + sizeof(Slot) * kSlots);"
    ),
}
"""A fiber's block has one piece of shared memory; what the kernel declares as static lies behind the rest."""
STATIC_BYTES = 1024
Edit = tuple[str, str]


@functools.cache
def _library(variant: jit.Variant, dynamic: int, edits: tuple[Edit, ...]) -> Any:
    sources = dict(jit.sources_of(variant))
    for old, new in [*SHARED.items(), *edits]:
        places = [name for name, source in sources.items() if old in source]
        assert len(places) == 1, f"the kernel says {old!r} in {places}, not in one place"
        sources[places[0]] = sources[places[0]].replace(old, new)
    sources["ptx.cuh"] = f'#include "{HEADERS[1]}"\n'
    text = str([header.read_text() for header in HEADERS]) + str(sorted(sources.items())) + str(variant)
    digest = hashlib.sha256(f"{text}{dynamic}".encode()).hexdigest()[:32]
    folder = Path(tempfile.gettempdir()) / "imbrex-emulated" / digest
    built = folder / "kernel.so"
    if not built.exists():
        folder.mkdir(parents=True, exist_ok=True)
        for name, source in sources.items():
            (folder / name).write_text(source)
        (folder / "main.cpp").write_text(
            f'#include "{HEADERS[1]}"\n#include "{variant.source}"\n'
            'extern "C" void forget() { forget_tensors(); }\n'
            'extern "C" void name(u8* begin, i64 bytes) { name_tensor(begin, bytes); }\n'
            'extern "C" int emulate(int grid, int block, int smem, unsigned seed, double limit, void** a) '
            "{\n"
            "    emu::products.clear();\n    emu::rows_of_warp.clear();\n"
            "    return emu::run(grid, block, smem, seed, limit,"
            f" [=] {{ emu::call_all({variant.entry}, a); }});\n}}\n"
        )
        flags = ["-std=c++17", "-O2", "-w", "-shared", "-fPIC", "-ffp-contract=off", f"-DkStatic={dynamic}"]
        flags += [f"-D{name}={value}" for name, value in variant.defines]
        with tempfile.NamedTemporaryFile(dir=folder, delete=False) as out:
            command = ["g++", *flags, "-o", out.name, str(folder / "main.cpp")]
            subprocess.run(command, check=True, capture_output=True, text=True)
        Path(out.name).rename(built)
    return ctypes.CDLL(str(built))


def pack_map(
    address: int,
    dtype: torch.dtype,
    sizes: tuple[int, ...],
    strides_bytes: tuple[int, ...],
    box: tuple[int, ...],
    swizzle: int = 128,
) -> jit.ByValue:
    """Stands in for `tensor_map`."""
    assert (dtype, swizzle) == (torch.bfloat16, 128)
    assert address % 16 == 0
    assert all(stride % 16 == 0 for stride in strides_bytes)
    rank, fill = len(sizes), 4 - len(sizes)
    numbers = [*sizes, *[1] * fill, *strides_bytes, *[0] * fill]
    return jit.ByValue(struct.pack("<qq7q4i", address, rank, *numbers, *box, *[1] * fill))


class EmulatedGemm:
    """Stands in for `jit.Kernel`; every launch has its own interleaving. It may touch `tensors` only."""

    def __init__(
        self, variant: jit.Variant, smem: int, tensors: Sequence[Tensor], edits: tuple[Edit, ...]
    ) -> None:
        self._library, self._smem, self._tensors, self.seed = _library(variant, smem, edits), smem, tensors, 0

    def launch(self, *, grid: int, block: int, args: Sequence[Any], smem: int) -> None:
        self._library.forget()
        for tensor in self._tensors:
            begin = ctypes.c_void_p(tensor.data_ptr())
            self._library.name(begin, ctypes.c_int64(tensor.numel() * tensor.element_size()))
        slots, addresses = jit._pack(args)
        self.seed += 1
        late = self._library.emulate(
            grid, block, smem + STATIC_BYTES, ctypes.c_uint(self.seed), ctypes.c_double(60.0), addresses
        )
        del slots
        assert late == 0, "the kernel did not end within 60 s"


def emulate(
    monkeypatch: Any, tensors: Sequence[Tensor], *, blocks: int, edits: tuple[Edit, ...] = ()
) -> None:
    """Let `launch_gemm` run on the CPU, with `blocks` blocks, on `tensors`."""

    def kernel(
        layout: Any, epilogue: Any, tiling: Any, wide: bool, device: int
    ) -> tuple[EmulatedGemm, int, int]:
        variant = experts_gemm.gemm_variant(layout, epilogue, tiling, wide)
        return EmulatedGemm(variant, tiling.smem, tensors, edits), tiling.smem, blocks

    monkeypatch.setattr(experts_gemm, "_gemm_kernel", kernel)
    monkeypatch.setattr(experts_gemm, "tensor_map", pack_map)
