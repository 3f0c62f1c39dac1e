"""The exchange kernels of the package, compiled for the CPU by g++ and run by fibers (`machine_on_cpu.h`)."""

from __future__ import annotations

import ctypes
import faulthandler
import fcntl
import functools
import hashlib
import os
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
HEADERS = (HEADER, Path(__file__).with_name("machine_on_cpu.h"))
FLAGS = ("-std=c++17", "-O1", "-w", "-fPIC", "-ffp-contract=off")
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
extern "C" int emulate(int grid, int block, int smem, unsigned seed, double limit, int unrest, int alone,
                       void** args) {
    return emu::run(grid, block, smem, seed, limit, [=] { emu::call(KERNEL, args); }, unrest, alone);
}
static emu::Trace traced;
extern "C" int emulate_streams(int streams, int calls, const int* sizes, void*** args, unsigned seed,
                               double limit, void (*told)(int, int, int), u8* watched, i64 bytes) {
    std::vector<emu::Stream> all(streams);
    for (int i = 0; i < streams * calls; ++i, sizes += 3)
        all[i / calls].launches.push_back(
            {sizes[0], sizes[1], sizes[2], [=] { emu::call(KERNEL, args[i]); }});
    emu::Trace* trace = bytes ? &traced : nullptr;
    traced = {watched, static_cast<size_t>(bytes), std::vector<u8>(watched, watched + bytes), {}};
    return emu::run_streams(all, seed, true, true, limit, told, trace);
}
extern "C" emu::Event* events(i64* count) {
    *count = static_cast<i64>(traced.events.size());
    return traced.events.data();
}
"""
"""All launches of a stream, then those of the next; grid, block and shared memory of each in `sizes`."""
REPLACED = ("ptx/base.cuh", "ptx/exchange.cuh", "ptx/codec.cuh")


def alone() -> bool:
    """Whether all ranks are virtual ones of this process: no other writes what a kernel waits for."""
    return not dist.is_initialized()


def available() -> bool:
    return shutil.which("g++") is not None


@functools.cache
def _library(variant: jit.Variant) -> Any:
    sources = jit.sources_of(variant)
    defines = [f"-D{name}={value}" for name, value in variant.defines]
    text = (
        "".join(header.read_text() for header in HEADERS)
        + str(sorted(sources.items()))
        + variant.entry
        + ENTRY
        + str(defines)
    )
    return built_once(text, lambda folder: _build(variant, sources, folder))


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
    words = ["-shared", f"-I{folder}", f"-I{HEADER.parent}"]
    words += [f"-D{name}={value}" for name, value in defines]
    _compile([*words, "-include", str(header), str(folder / "main.cpp"), str(machine)], folder / "out.so")
    return folder / "out.so"


@functools.cache
def _machine() -> tuple[Path, Path]:
    """The machine's header where g++ finds it parsed, and the machine compiled: two thirds of the time that
    every kernel took."""

    def parse(folder: Path) -> Path:
        _compile(["-x", "c++-header", str(HEADERS[1])], folder / "parsed")
        return folder / "parsed"

    def build(folder: Path) -> Path:
        _compile(["-c", "-O3", "-DEMULATED_MACHINE", "-x", "c++", str(HEADER)], folder / "machine.o")
        return folder / "machine.o"

    version = subprocess.run(["g++", "--version"], check=True, capture_output=True, text=True).stdout
    text = "".join(header.read_text() for header in HEADERS) + str(FLAGS) + version
    parsed = _made_once(text, f"{HEADERS[1].name}.gch", parse)
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
        + ENTRY.replace("KERNEL", variant.entry)
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
        self._run = _library(variant).emulate

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

    def __init__(self, kernel: EmulatedKernel, how: dict[str, Any], words: Sequence[tuple[int, int]]) -> None:
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
