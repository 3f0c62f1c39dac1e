"""The exchange kernels of the package, compiled for the CPU by g++ and run by fibers (`machine_on_cpu.h`)."""

from __future__ import annotations

import ctypes
import faulthandler
import fcntl
import functools
import hashlib
import os
import re
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch.distributed as dist

from imbrex.kernels import jit
from imbrex.kernels.structs import Struct

HEADER = Path(__file__).with_name("cuda_on_cpu.h")
MACHINE = [
    Path(__file__).with_name(f"{name}_on_cpu.{kind}")
    for name, kind in (
        ("machine", "h"),
        ("cuda", "h"),
        ("tensor_cores", "h"),
        ("machine", "cpp"),
        ("calls", "cpp"),
    )
]
FLAGS = ("-std=c++17", "-w", "-fPIC", "-ffp-contract=off")
NAMESPACES = "".join(
    f"namespace {name} {{}}\nusing namespace {name};\n"
    for name in (
        "claims",
        "codec",
        "exchange",
        "ffn",
        "fused",
        "gate",
        "gemm",
        "mover",
        "rows",
        "route",
        "sums",
    )
)
"""An entry has C linkage, so its name is the same in all of them."""


def struct_checks(sources: dict[str, str]) -> str:
    """C++ that does not compile where a struct of these files lies otherwise than the host lays it out."""
    lines = []
    for made in Struct.__subclasses__():
        if made.source not in sources:
            continue
        lines.append(f"static_assert(sizeof({made.qualified}) == {ctypes.sizeof(made)});\n")
        for name in made.names:
            field = getattr(made, name)
            at = f"offsetof({made.qualified}, {name}) == {field.offset}"
            size = f"sizeof({made.qualified}::{name}) == {field.size}"
            lines.append(f'static_assert({at} && {size}, "{made.qualified}::{name}");\n')
    return "#include <cstddef>\n" + "".join(lines)


ENTRY = """
static void begin_KERNEL(void** args) { emu::call(KERNEL, args); }
extern "C" int emulate_KERNEL(int grid, int block, int smem, unsigned seed, double limit, int unrest,
                              int alone, void** args) {
    return emu::run(grid, block, smem, begin_KERNEL, args, seed, limit, unrest, alone);
}
extern "C" int emulate_streams_KERNEL(int streams, int calls, const int* sizes, void*** args, unsigned seed,
                                      double limit, void (*told)(int, int, int), u8* watched, i64 bytes) {
    return emu::run_streams(streams, calls, sizes, begin_KERNEL, args, seed, limit, told, watched, bytes);
}
"""
"""All launches of a stream, then those of the next; grid, block and shared memory of each in `sizes`."""
_KERNELS = re.compile(r"__global__ void (?:__launch_bounds__\([^()]*(?:\([^()]*\))?[^()]*\)\s+)?(\w+)\(")
REPLACED = ("ptx/base.cuh", "ptx/exchange.cuh", "ptx/codec.cuh")


def alone() -> bool:
    """Whether all ranks are virtual ones of this process: no other writes what a kernel waits for."""
    return not dist.is_initialized()


def available() -> bool:
    return shutil.which("g++") is not None


def entry_points(source: str) -> str:
    """C++ that launches each of the kernels in this text: those of a file are compiled together."""
    return "".join(ENTRY.replace("KERNEL", entry) for entry in _KERNELS.findall(source))


def text_of(sources: dict[str, str], variant: jit.Variant) -> str:
    """All that a library is compiled from, the emulator included."""
    return f"{_machine_text()}{ENTRY}{sorted(sources.items())}{variant.source}{variant.defines}"


@functools.cache
def _library(variant: jit.Variant) -> Any:
    sources = jit.sources_of(variant)
    return built_once(text_of(sources, variant), lambda folder: _build(variant, sources, folder))


def built_once(text: str, build: Callable[[Path], Path]) -> Any:
    """The library that `build` makes in a folder, given it; kept for whoever has the same `text`."""
    return ctypes.CDLL(str(_made_once(text, "kernel.so", build)))


def _made_once(text: str, name: str, make: Callable[[Path], Path]) -> Path:
    folder = Path(tempfile.gettempdir()) / "imbrex-emulated" / hashlib.sha256(text.encode()).hexdigest()[:32]
    made = folder / name
    if not made.exists():
        folder.mkdir(parents=True, exist_ok=True)
        with (folder / "lock").open("w") as lock, tempfile.TemporaryDirectory(dir=folder) as own:
            fcntl.flock(lock, fcntl.LOCK_EX)  # ranks want the same kernels at once
            if not made.exists():
                make(Path(own)).rename(made)
    return made


def shows_or_ends(shows: Callable[[], bool]) -> bool:
    """What it says in a process of its own, or that this was ended: with a fault kernels read anywhere."""
    child = os.fork()
    if child == 0:
        code = 2
        try:
            faulthandler.disable()
            code = int(shows())
        finally:
            os._exit(code)
    _, status = os.waitpid(child, 0)
    code = os.waitstatus_to_exitcode(status)
    assert code in (0, 1, -signal.SIGSEGV, -signal.SIGBUS)
    return code != 0


def compile_library(folder: Path, main: str, defines: Sequence[tuple[str, Any]]) -> Path:
    """The library of one file with this text, in `folder` beside what it includes."""
    (folder / "main.cpp").write_text(main)
    header, machine = _machine()
    words = ["-O1", "-shared", f"-I{folder}", f"-I{HEADER.parent}"]
    words += [f"-D{name}={value}" for name, value in defines]
    _compile([*words, "-include", str(header), str(folder / "main.cpp"), str(machine)], folder / "out.so")
    return folder / "out.so"


@functools.cache
def _machine_text() -> str:
    return "".join(file.read_text() for file in MACHINE) + str(FLAGS)


@functools.cache
def _machine() -> tuple[Path, Path]:
    """The machine's header where g++ finds it parsed, and the machine compiled: two thirds of the time that
    every kernel took."""

    def parse(folder: Path) -> Path:
        _compile(["-O1", "-x", "c++-header", str(MACHINE[0])], folder / "parsed")
        return folder / "parsed"

    def build(folder: Path) -> Path:
        words = ["-c", "-O3", "-fno-semantic-interposition", str(MACHINE[-1])]
        _compile(words, folder / "machine.o")
        return folder / "machine.o"

    version = subprocess.run(["g++", "--version"], check=True, capture_output=True, text=True).stdout
    text = _machine_text() + version
    parsed = _made_once(text, f"{MACHINE[0].name}.gch", parse)
    return parsed.with_suffix(""), _made_once(text, "machine.o", build)


def _compile(words: Sequence[str], out: Path) -> None:
    subprocess.run(["g++", *FLAGS, *words, "-o", str(out)], check=True, capture_output=True, text=True)


def _build(variant: jit.Variant, sources: dict[str, str], folder: Path) -> Path:
    for name, source in sources.items():
        body = f'#include "{HEADER}"\n' if name in REPLACED else source
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(body)
    main = (
        f'#include "{HEADER}"\n#include "{variant.source}"\n{NAMESPACES}{struct_checks(sources)}'
        + entry_points(sources[variant.source])
    )
    return compile_library(folder, main, variant.defines)


class EmulatedKernel:
    """Stands in for `jit.Kernel`. `seed` decides every interleaving, with `unrest` an adversary's; a hang
    fails after `limit` s."""

    seed = 0
    limit = 60.0
    unrest = False

    def __init__(self, variant: jit.Variant) -> None:
        self.variant = variant
        self._run = getattr(_library(variant), f"emulate_{variant.entry}")

    def launch(self, *, grid: int, block: int, args: Sequence[Any], smem: int = 0, **_: Any) -> None:
        values, pointers = jit._pack(args)
        EmulatedKernel.seed += 1
        late = self._run(
            ctypes.c_int(grid),
            ctypes.c_int(block),
            ctypes.c_int(smem),
            ctypes.c_uint(EmulatedKernel.seed),
            ctypes.c_double(EmulatedKernel.limit),
            ctypes.c_int(EmulatedKernel.unrest),
            ctypes.c_int(alone()),
            pointers,
        )
        del values
        assert late == 0, f"{self.variant} did not end within {EmulatedKernel.limit} s: see 'stuck' above"

    def prepare(self, **how: Any) -> Prepared:
        return Prepared(self, how, [])

    def blank(self, *, words: Sequence[tuple[int, int]], **how: Any) -> Prepared:
        return Prepared(self, how, words)


class Prepared:
    """Stands in for `jit.Prepared` and `jit.Blank`."""

    def __init__(self, kernel: Any, how: dict[str, Any], words: Sequence[tuple[int, int]]) -> None:
        self.kernel, self.how, self.words = kernel, how, words

    def launch(self, *addresses: int) -> None:
        args = [*self.how["args"]]
        for (number, word), address in zip(self.words, addresses, strict=True):
            struct = args[number]
            if struct is self.how["args"][number]:
                struct = args[number] = type(struct).from_buffer_copy(struct)
            (ctypes.c_uint64 * (ctypes.sizeof(struct) // 8)).from_buffer(struct)[word] = address
        self.kernel.launch(**{**self.how, "args": args})


def load(variant: jit.Variant, device: Any = None) -> EmulatedKernel:
    """Stands in for `jit.load`."""
    return EmulatedKernel(variant)
