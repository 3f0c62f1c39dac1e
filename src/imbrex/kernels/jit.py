"""CUDA C++ from the package to a launched kernel: NVRTC, a cache on disk, one launch function.

    variant = Variant(source="gemm/gemm.cu", entry="grouped_gemm", defines=(("BLOCK_N", 256),))
    compile_variant(variant).resources.registers         # works without a GPU or a driver
    load(variant).launch(grid=132, block=384, args=[x_RD, tensor_map, 7], smem=200_000)

Specialisation is by `#define`. The cache key is the SHA-256 of the source, every header it includes,
the defines, the architecture and the NVRTC version, so a changed header never meets an old binary, and all
entries of a source are compiled at once. A cache file is written beside its final name and renamed, so eight
processes that start at once may compile the same source eight times but never read half a file. One file
holds the resource reports and the cubin; a damaged file is compiled again.

Kernel arguments: a tensor passes its address, a `ByValue` (a tensor map) its bytes, an `int` a 32-bit int
(range checked), a `float` a 32-bit float, and any ctypes value itself (`ctypes.c_int64(n)`).
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import importlib
import json
import os
import re
import tempfile
import threading
from array import array
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from imbrex.kernels.arguments import ByValue as ByValue
from imbrex.kernels.arguments import attributes, configuration
from imbrex.kernels.arguments import pack as _pack
from imbrex.kernels.structs import sources_from
from imbrex.runtime.tracing import asked_once

ARCH = "sm_90a"
LEAST_CAPABILITY = (8, 0)
DEPENDENT_CAPABILITY = 90
"""The first compute capability on which a kernel may begin before the previous one has ended."""
PORTABLE = frozenset(
    {"ffn/glue.cu", "gate/choose.cu", "gate/losses.cu", "gemm/portable.cu", "rows/choices.cu"}
)
"""Sources that run on every GPU from that compute capability on: all that a rank alone needs, in bfloat16.
The others are for Hopper."""
_SUSPICIOUS = re.compile(r"warning|Potential Performance Loss", re.IGNORECASE)
# NVRTC answers from a cache of its own without the report of ptxas: not wanted, ours keeps the report
_FIXED_OPTIONS = ("--std=c++17", "-default-device", "--ptxas-options=-v", "-no-cache")


class KernelError(RuntimeError):
    """A kernel could not be compiled, loaded or launched; the message is one sentence for the user."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Variant:
    """One specialisation of one kernel: `entry` is an `extern "C" __global__` name in file `source`. arch: as
    NVRTC takes it; `compute_80` stands for PTX, which the driver compiles for the GPU that is there."""

    source: str
    entry: str
    defines: tuple[tuple[str, int | str], ...] = ()
    arch: str = ARCH

    def __str__(self) -> str:
        inside = ",".join(f"{name}={value}" for name, value in self.defines)
        return f"{self.source}:{self.entry}[{inside}]"


@dataclass(frozen=True, kw_only=True, slots=True)
class Resources:
    """The report of ptxas: registers a thread, bytes of spills and of stack a thread, static shared bytes."""

    registers: int
    spill_bytes: int
    stack_bytes: int
    static_smem: int
    warnings: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Compiled:
    """A compiled variant: its machine code, and what a thread and a block of it take."""

    cubin: bytes
    resources: Resources


@functools.cache
def cuda_binding(name: str) -> Any:
    """Module `cuda.bindings.<name>`, imported late so that a machine without it can still import imbrex."""
    try:
        return importlib.import_module(f"cuda.bindings.{name}")
    except ImportError as error:
        raise KernelError(f"imbrex kernels need the package cuda-core: {error}") from error


def why_not_hopper(device: int | None = None) -> str | None:
    """Why the kernels for Hopper cannot run on CUDA device `device` (default: the current one), or `None`."""
    if (reason := _why_not_cuda()) is not None:
        return reason
    major, minor = torch.cuda.get_device_capability(device)
    if (major, minor) != (9, 0):
        return f"imbrex kernels need compute capability 9.0 (H100, H200) and this GPU has {major}.{minor}"
    return None


def why_not_portable(device: int | None = None) -> str | None:
    """Why the kernels of `PORTABLE`, and so bfloat16 experts, cannot run on CUDA device `device` (default:
    the current one), or `None`."""
    if (reason := _why_not_cuda()) is not None:
        return reason
    capability = torch.cuda.get_device_capability(device)
    if capability < LEAST_CAPABILITY:
        least, here = (".".join(map(str, version)) for version in (LEAST_CAPABILITY, capability))
        return f"imbrex's expert kernels need compute capability {least} or more and this GPU has {here}"
    return None


def _why_not_cuda() -> str | None:
    if not torch.cuda.is_available():
        return "imbrex kernels need an NVIDIA GPU and torch sees none"
    try:
        cuda_binding("driver")
        cuda_binding("nvrtc")
    except KernelError as error:
        return str(error)
    return None


def arch_of(device: int | None = None) -> str:
    """The compiler's name of a GPU (default: the current one); without one, that of those kernels are for."""
    if not torch.cuda.is_available():
        return ARCH
    major, minor = torch.cuda.get_device_capability(device)
    return ARCH if (major, minor) == (9, 0) else f"sm_{major}{minor}"


cached_why_not_hopper = asked_once(why_not_hopper)
"""Asks `why_not_hopper` of a device once a process: for what every call asks."""
cached_why_not_portable = asked_once(why_not_portable)
"""Asks `why_not_portable` of a device once a process."""


def capability_of(arch: str) -> int:
    """The number in a compiler's name of GPUs: 90 of `sm_90a`, 80 of `compute_80`."""
    return int("".join(c for c in arch if c.isdigit()))


def sources_of(variant: Variant) -> dict[str, str]:
    """The source file and every file it includes, by name, contents as text."""
    return sources_from(variant.source)


def cache_key(variant: Variant, sources: dict[str, str], compiler: tuple[int, int]) -> str:
    """The name of a compiled source: a digest of its definition, files, compiler and options."""
    program = asdict(replace(variant, entry=""))
    parts = [program, sorted(sources.items()), list(compiler), _FIXED_OPTIONS]
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


def cache_directory() -> Path:
    """`$IMBREX_CACHE_DIR/kernels`, else `$XDG_CACHE_HOME/imbrex/kernels`, else `~/.cache/imbrex/kernels`."""
    own = os.environ.get("IMBREX_CACHE_DIR")
    if own:
        return Path(own) / "kernels"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "imbrex" / "kernels"


@functools.cache
def compile_variant(variant: Variant) -> Compiled:
    """Compile to a cubin, or read it from the cache; needs NVRTC but neither GPU nor driver.

    Raises KernelError with the compiler's first error.
    """
    try:
        nvrtc = cuda_binding("nvrtc")
    except ImportError as error:
        raise KernelError(
            f"imbrex kernels need the package cuda-core, which does not import ({error})"
        ) from error
    sources = sources_of(variant)
    compiler = cuda_ok(nvrtc.nvrtcVersion(), "reading the NVRTC version")
    path = cache_directory() / f"{cache_key(variant, sources, compiler)}.bin"
    entries = _unwritten.get(path) or _read_cache(path)
    if entries is None:
        entries = _compile(variant, sources)
        _write_cache(path, entries)
    if variant.entry not in entries:
        raise KernelError(f'{variant.source} has no kernel {variant.entry!r}: is it extern "C" __global__?')
    return entries[variant.entry]


def _compile(variant: Variant, sources: dict[str, str]) -> dict[str, Compiled]:
    """All entries of the variant's source."""
    nvrtc = cuda_binding("nvrtc")
    headers = [(text, name) for name, text in sources.items() if name != variant.source]
    program = cuda_ok(
        nvrtc.nvrtcCreateProgram(
            sources[variant.source].encode(),
            variant.source.encode(),
            len(headers),
            [text.encode() for text, _ in headers],
            [name.encode() for _, name in headers],
        ),
        f"creating {variant}",
    )
    options = [f"-arch={variant.arch}", *_FIXED_OPTIONS]
    options += [f"-D{name}={value}" for name, value in variant.defines]
    result = nvrtc.nvrtcCompileProgram(program, len(options), [option.encode() for option in options])[0]
    log = _nvrtc_bytes(nvrtc.nvrtcGetProgramLogSize, nvrtc.nvrtcGetProgramLog, program).decode(
        errors="replace"
    )
    if result != nvrtc.nvrtcResult.NVRTC_SUCCESS:
        first = next((line for line in log.splitlines() if "error" in line), log.strip() or str(result))
        raise KernelError(f"NVRTC could not compile {variant}: {first.strip()}")
    if variant.arch.startswith("compute_"):
        code = _nvrtc_bytes(nvrtc.nvrtcGetPTXSize, nvrtc.nvrtcGetPTX, program)
        none = Resources(registers=0, spill_bytes=0, stack_bytes=0, static_smem=0)
        reports = dict.fromkeys(re.findall(r"\.entry (\w+)", code.decode()), none)
    else:
        code = _nvrtc_bytes(nvrtc.nvrtcGetCUBINSize, nvrtc.nvrtcGetCUBIN, program)
        reports = read_resources(log)
    nvrtc.nvrtcDestroyProgram(program)
    return {entry: Compiled(cubin=code, resources=report) for entry, report in reports.items()}


def read_resources(log: str) -> dict[str, Resources]:
    """Resources of every entry from the text of `ptxas -v`."""
    warnings = tuple(line.strip() for line in log.splitlines() if _SUSPICIOUS.search(line))
    _, *sections = re.split(r"Compiling entry function '(\w+)'", log)
    return {
        entry: _read_section(section, warnings)
        for entry, section in zip(sections[::2], sections[1::2], strict=True)
    }


def _read_section(section: str, warnings: tuple[str, ...]) -> Resources:

    def number(pattern: str) -> int:
        return sum(int(number) for number in re.findall(pattern, section))

    return Resources(
        registers=number(r"Used (\d+) registers"),
        spill_bytes=number(r"(\d+) bytes spill (?:stores|loads)"),
        stack_bytes=number(r"(\d+) bytes stack frame"),
        static_smem=number(r"(\d+) bytes smem"),
        warnings=warnings,
    )


def _nvrtc_bytes(size_of: Any, fetch: Any, program: Any) -> bytes:
    size = cuda_ok(size_of(program), "reading a size")
    buffer = bytearray(size)
    cuda_ok(fetch(program, buffer), "reading")
    return bytes(buffer)


_unwritten: dict[Path, dict[str, Compiled]] = {}
"""Sources compiled by this process that it could not write, by the files that it would be in."""


def _read_cache(path: Path) -> dict[str, Compiled] | None:
    try:
        head, _, cubin = path.read_bytes().partition(b"\n")
        digest, reports = json.loads(head)
        if hashlib.sha256(cubin).hexdigest() != digest:
            return None
        entries = {}
        for entry, report in reports.items():
            resources = Resources(**report | {"warnings": tuple(report["warnings"])})
            entries[entry] = Compiled(cubin=cubin, resources=resources)
        return entries
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def _write_cache(path: Path, entries: dict[str, Compiled]) -> None:
    reports = {entry: asdict(compiled.resources) for entry, compiled in entries.items()}
    cubin = next((compiled.cubin for compiled in entries.values()), b"")
    head = [hashlib.sha256(cubin).hexdigest(), reports]
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:
            file.write(json.dumps(head).encode() + b"\n" + cubin)
        os.replace(file.name, path)
    except OSError:
        _unwritten[path] = entries  # a read-only home costs a compilation a process, never a failure


def cuda_ok(result: tuple[Any, ...], doing: str) -> Any:
    """Unpack what a CUDA binding returns: (code,), (code, value) or (code, value, value...)."""
    code, *values = result
    if int(code) != 0:
        raise KernelError(f"CUDA said {code.name} while {doing}")
    return values[0] if len(values) == 1 else tuple(values)


class Queues(dict[int, Callable[[int, int], Any]]):
    """The driver's calls of launches of one shape, by raw stream, since another thread may launch on another.
    A call takes the address of the arguments' addresses, and 0."""

    __slots__ = ("_make",)

    def __init__(self, make: Callable[[int], Callable[[int, int], Any]]) -> None:
        self._make = make

    def __missing__(self, stream: int) -> Callable[[int, int], Any]:
        queue = self[stream] = self._make(stream)
        return queue


class Kernel:
    """A loaded kernel of one device; get it from `load`, before anything spins. library: that of another
    kernel of the same source, to share its global variables."""

    def __init__(self, variant: Variant, device: int, library: Any = None) -> None:
        driver = cuda_binding("driver")
        self.variant = variant
        self.device = device
        self._queues: dict[tuple[Any, ...], Queues] = {}
        compiled = compile_variant(variant)
        self.resources = compiled.resources
        self._library = library or cuda_ok(
            driver.cuLibraryLoadData(compiled.cubin, [], [], 0, [], [], 0), f"loading {variant}"
        )
        kernel = cuda_ok(
            driver.cuLibraryGetKernel(self._library, variant.entry.encode()), f"finding {variant}"
        )
        # forces the lazy load now: a load while another kernel spins may deadlock
        self._function = cuda_ok(driver.cuKernelGetFunction(kernel), f"loading {variant}")
        limit = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        room = driver.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN
        shared = cuda_ok(driver.cuDeviceGetAttribute(room, device), "asking for shared memory")
        shared -= compiled.resources.static_smem
        cuda_ok(
            driver.cuFuncSetAttribute(self._function, limit, shared), f"allowing shared memory for {variant}"
        )

    def launch(
        self,
        *,
        grid: int | tuple[int, int, int],
        block: int,
        args: Sequence[Any],
        smem: int = 0,
        cluster: int = 1,
        stream: torch.cuda.Stream | int | None = None,
        cooperative: bool = False,
        dependent: bool = False,
    ) -> None:
        """Launch on `stream` (a torch stream or a raw handle; default: torch's current one of this device).

        `grid` counts blocks, also with a cluster. Asynchronous, like any torch operation. dependent: it may
        begin before the kernel that was launched last on the stream ends, and says itself what it waits for.
        """
        values, pointers = _pack(args)
        if stream is None:
            handle = torch._C._cuda_getCurrentRawStream(self.device)
        else:
            handle = stream if isinstance(stream, int) else stream.cuda_stream
        queues = self.queue_for(grid, block, smem, cluster, cooperative, dependent)
        self.start(queues, handle, ctypes.addressof(pointers))
        del values

    def queue_for(self, *how: Any) -> Queues:
        """The driver's calls of launches with such a grid, block, bytes of shared memory, cluster, and
        whether cooperative and dependent. Made once: their other arguments cost the host more than the call.
        """
        queues = self._queues.get(how)
        if queues is None:
            queues = self._queues[how] = Queues(partial(self._make_queue, how))
        return queues

    def _make_queue(self, how: tuple[Any, ...], stream: int) -> Callable[[int, int], Any]:
        grid, block, smem, cluster, cooperative, dependent = how
        driver, sizes = cuda_binding("driver"), (grid, 1, 1) if isinstance(grid, int) else grid
        # Code for older GPUs does not wait for the kernel before it (`ptx::wait_for_launches`).
        dependent = dependent and capability_of(self.variant.arch) >= DEPENDENT_CAPABILITY
        extras = attributes(driver, cluster, cooperative, dependent)
        if not extras:  # the plain call costs the host half as much
            return partial(driver.cuLaunchKernel, self._function, *sizes, block, 1, 1, smem, stream)
        config = configuration(driver, sizes, block, smem, stream, extras)
        return partial(driver.cuLaunchKernelEx, config, self._function)

    def start(self, queues: Queues, stream: int, args: int) -> None:
        """A launch by what `queue_for` gives, on a raw stream; args: the address of the arguments'
        addresses."""
        code = queues[stream](args, 0)[0]
        if int(code) != 0:
            self._start_again(code, queues, stream, args)
        _latest[self.device, stream] = self.variant

    def _start_again(self, code: Any, queues: Queues, stream: int, args: int) -> None:
        """Queue it once more if the driver said `code` because this thread is new to CUDA; else
        KernelError."""
        if code == cuda_binding("driver").CUresult.CUDA_ERROR_INVALID_CONTEXT:
            enter_context(self.device)
            code = queues[stream](args, 0)[0]
        if int(code) != 0:
            how = next(how for how, known in self._queues.items() if known is queues)
            shape = f"grid {how[0]}, block {how[1]}, {how[2]} bytes of shared memory"
            raise KernelError(f"CUDA said {code.name} while launching {self.variant} ({shape})")

    def clusters(self, cluster: int, block: int, smem: int) -> int:
        """How many clusters of `cluster` blocks an idle device holds at once."""
        driver = cuda_binding("driver")
        config = configuration(driver, (cluster, 1, 1), block, smem, 0, attributes(driver, cluster, False))
        return cuda_ok(driver.cuOccupancyMaxActiveClusters(self._function, config), "counting clusters")

    def resident(self, block: int, smem: int) -> int:
        """How many blocks a multiprocessor of an idle device holds at once."""
        driver = cuda_binding("driver")
        count = driver.cuOccupancyMaxActiveBlocksPerMultiprocessor(self._function, block, smem)
        return cuda_ok(count, "counting blocks")

    def beside(self, entry: str) -> Kernel:
        """Another kernel of the same source, which shares global variables with this one."""
        return Kernel(replace(self.variant, entry=entry), self.device, self._library)

    def prepare(self, *, args: Sequence[Any], **how: Any) -> Prepared:
        """A launch to be made later, and again, on the stream that is then current; `how`: what `launch`
        takes but a stream and `cooperative`."""
        return Prepared(self, args, how)

    def blank(self, *, args: Sequence[Any], words: Sequence[tuple[int, int]], **how: Any) -> Blank:
        """A prepared launch with `words` to be filled in every time."""
        return Blank(self, args, words, how)

    def queues_of(self, how: dict[str, Any]) -> Queues:
        """`queue_for` what `prepare` takes."""
        shape = how["grid"], how["block"], how.get("smem", 0), how.get("cluster", 1), False
        return self.queue_for(*shape, how.get("dependent", False))


class Prepared:
    """A launch whose arguments are packed: a third of the host's time of `Kernel.launch`, where calls repeat.

    Holds addresses, no tensors: the caller knows that they are still the right ones.
    """

    __slots__ = ("_kernel", "_memory", "_pointers", "_queues")

    def __init__(self, kernel: Kernel, args: Sequence[Any], how: dict[str, Any]) -> None:
        values, pointers = _pack(args)
        self._memory = values, pointers, [arg for arg in args if not isinstance(arg, torch.Tensor)]
        self._kernel, self._pointers = kernel, ctypes.addressof(pointers)
        self._queues = kernel.queues_of(how)

    def launch(self) -> None:
        kernel = self._kernel
        kernel.start(self._queues, torch._C._cuda_getCurrentRawStream(kernel.device), self._pointers)


def launch_all(launches: Sequence[Prepared]) -> None:
    """Make prepared launches of one device on its current stream, which is looked up once."""
    if launches:
        stream = torch._C._cuda_getCurrentRawStream(launches[0]._kernel.device)
        for launch in launches[:-1]:
            code = launch._queues[stream](launch._pointers, 0)[0]
            if int(code) != 0:
                launch._kernel._start_again(code, launch._queues, stream, launch._pointers)
        last = launches[-1]  # the only one that `latest_launch` may be asked for
        last._kernel.start(last._queues, stream, last._pointers)


class Blank:
    """A launch of which some words are filled in at every call, in a copy of the structs that they stand in;
    each thread has its own. Other arguments stay where they are, and may change there.

    words: the number of an argument, a struct, and of its words of eight bytes. As `Prepared` it holds no
    tensors.
    """

    __slots__ = ("_copies", "_kernel", "_memory", "_places", "_pointers", "_queues", "_structs", "_words")

    def __init__(
        self, kernel: Kernel, args: Sequence[Any], words: Sequence[tuple[int, int]], how: dict[str, Any]
    ) -> None:
        values, pointers = _pack(args)
        self._words, first = array("Q"), {}
        for number in {number for number, _ in words}:
            first[number] = len(self._words)
            self._words.frombytes(bytes(args[number]))
        self._places = [first[number] + word for number, word in words]
        self._pointers = len(self._words)
        self._words.extend(pointers)
        self._structs = [(self._pointers + number, 8 * at) for number, at in first.items()]
        self._memory = values, [arg for arg in args if not isinstance(arg, torch.Tensor)]
        self._kernel, self._queues = kernel, kernel.queues_of(how)
        self._copies: dict[int, tuple[array[int], int]] = {}

    def launch(self, *addresses: int) -> None:
        words, pointers = self._copies.get(threading.get_ident()) or self._copy()
        for number, place in enumerate(self._places):  # 2000 instructions less than a strict `zip`
            words[place] = addresses[number]
        kernel = self._kernel
        kernel.start(self._queues, torch._C._cuda_getCurrentRawStream(kernel.device), pointers)

    def _copy(self) -> tuple[array[int], int]:
        """This thread's words, and the address of their arguments' addresses; the driver reads both before a
        launch returns."""
        words = self._words[:]
        at = words.buffer_info()[0]
        for place, offset in self._structs:
            words[place] = at + offset
        copy = self._copies[threading.get_ident()] = words, at + 8 * self._pointers
        return copy


def addressed(kernel: Kernel, args: Sequence[Any], **how: Any) -> Blank:
    """A prepared launch whose arguments `...` are addresses that every call gives, in their order."""
    whole = [ctypes.c_uint64() if arg is ... else arg for arg in args]
    words = [(number, 0) for number, arg in enumerate(args) if arg is ...]
    return kernel.blank(args=whole, words=words, **how)


_latest: dict[tuple[int, int], Variant] = {}


def latest_launch(device: int) -> Variant | None:
    """The kernel of ours that was launched last on the current stream of CUDA device `device`; `None`: none,
    or no device."""
    return None if device < 0 else _latest.get((device, torch._C._cuda_getCurrentRawStream(device)))


@functools.cache
def _primary_context(device: int) -> Any:
    driver = cuda_binding("driver")
    return cuda_ok(driver.cuDevicePrimaryCtxRetain(device), f"entering the context of device {device}")


def enter_context(device: int) -> None:
    """Make torch's context of `device` current: a thread of autograd's new to CUDA has none."""
    torch.cuda.init()
    cuda_ok(cuda_binding("driver").cuCtxSetCurrent(_primary_context(device)), "entering a device's context")


@functools.cache
def _load(variant: Variant, device: int) -> Kernel:
    with torch.cuda.device(device):
        enter_context(device)
        return Kernel(variant, device)


def load(variant: Variant, device: torch.device | int | None = None) -> Kernel:
    """The kernel on `device` (default: the current one), compiled and loaded once a process.

    Raises KernelError with one sentence where the GPU is not supported or the compiler refuses.
    """
    index = device.index if isinstance(device, torch.device) else device
    if index is None:
        index = torch.cuda.current_device() if torch.cuda.is_available() else 0
    portable = variant.source in PORTABLE
    reason = why_not_portable(index) if portable else why_not_hopper(index)
    if reason is not None:
        raise KernelError(reason)
    if portable and variant.arch == ARCH:
        variant = replace(variant, arch=arch_of(index))
    return _load(variant, index)
