"""Compilation and cache of kernels, without a GPU."""

from __future__ import annotations

import ctypes
import multiprocessing
from pathlib import Path

import pytest
import torch

pytest.importorskip("cuda.bindings.nvrtc", reason="compiling kernels needs cuda-core and NVRTC")

from imbrex.kernels import jit, structs
from imbrex.kernels.arguments import attributes

SMALL = 'extern "C" __global__ void small(float* y) { y[threadIdx.x] = FACTOR; }\n'
SPILLING = """#include "size.cuh"
extern "C" __global__ void spilling(float* y, const float* x, int n) {
    float kept[SIZE];
    for (int i = 0; i < SIZE; ++i) kept[i] = x[i * n];
    for (int i = 0; i < SIZE; ++i) y[i] = kept[(i * n) & (SIZE - 1)];
}
"""


@pytest.fixture
def sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(structs, "SOURCES", tmp_path)
    monkeypatch.setenv("IMBREX_CACHE_DIR", str(tmp_path / "cache"))
    jit.compile_variant.cache_clear()
    (tmp_path / "small.cu").write_text(SMALL)
    (tmp_path / "spilling.cu").write_text(SPILLING)
    (tmp_path / "size.cuh").write_text("#define SIZE 64\n")
    return tmp_path


def small(factor: int = 3) -> jit.Variant:
    return jit.Variant(source="small.cu", entry="small", defines=(("FACTOR", factor),))


def test_a_clean_kernel_reports_no_local_memory(sources: Path) -> None:
    resources = jit.compile_variant(small()).resources
    assert (resources.spill_bytes, resources.stack_bytes) == (0, 0)
    assert 1 <= resources.registers <= 32


def test_local_memory_is_reported(sources: Path) -> None:
    resources = jit.compile_variant(jit.Variant(source="spilling.cu", entry="spilling")).resources
    assert resources.stack_bytes == 64 * 4


@pytest.mark.parametrize("arch", [jit.ARCH, "compute_80"])
def test_all_entries_of_a_source_are_compiled_at_once(
    arch: str, sources: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (sources / "both.cu").write_text(
        SMALL + SPILLING.replace("SIZE", "FACTOR").replace('#include "size.cuh"', "")
    )
    one, other, none = (
        jit.Variant(source="both.cu", entry=entry, defines=(("FACTOR", 64),), arch=arch)
        for entry in ("small", "spilling", "missing")
    )
    first = jit.compile_variant(one)
    monkeypatch.setattr(jit, "_compile", lambda *_: pytest.fail("compiled although it was cached"))
    second = jit.compile_variant(other)
    assert second.cubin == first.cubin
    assert first.resources.stack_bytes == 0
    assert second.resources.stack_bytes == (64 * 4 if arch == jit.ARCH else 0)
    with pytest.raises(jit.KernelError, match=r"both\.cu has no kernel 'missing'"):
        jit.compile_variant(none)


def test_second_process_reads_the_cache_and_a_damaged_file_is_rebuilt(
    sources: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = jit.compile_variant(small())
    (file,) = (sources / "cache" / "kernels").iterdir()
    jit.compile_variant.cache_clear()
    with monkeypatch.context() as patch:
        patch.setattr(jit, "_compile", lambda *_: pytest.fail("compiled although it was cached"))
        assert jit.compile_variant(small()) == first
    file.write_bytes(file.read_bytes()[:-8])
    jit.compile_variant.cache_clear()
    assert jit.compile_variant(small()) == first


def test_key_changes_with_header_define_arch_and_compiler(sources: Path) -> None:
    variant = jit.Variant(source="spilling.cu", entry="spilling")
    keys = [jit.cache_key(variant, jit.sources_of(variant), (13, 0))]
    keys.append(jit.cache_key(variant, jit.sources_of(variant), (13, 1)))
    (sources / "size.cuh").write_text("#define SIZE 32\n")
    keys.append(jit.cache_key(variant, jit.sources_of(variant), (13, 0)))
    other = jit.Variant(source="spilling.cu", entry="spilling", arch="sm_90")
    keys.append(jit.cache_key(other, jit.sources_of(other), (13, 0)))
    keys += [jit.cache_key(small(n), jit.sources_of(small(n)), (13, 0)) for n in (1, 2)]
    assert len(set(keys)) == 6


def test_a_compile_error_is_one_sentence_with_the_compilers_words(sources: Path) -> None:
    (sources / "small.cu").write_text(SMALL.replace("FACTOR", "undeclared_name"))
    with pytest.raises(jit.KernelError, match=r"could not compile small.cu:small.*undeclared_name") as caught:
        jit.compile_variant(small())
    assert "\n" not in str(caught.value)


def test_read_only_cache_still_compiles(sources: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Once a process, whatever number of its entries are wanted."""
    (sources / "file").write_text("")
    monkeypatch.setenv("IMBREX_CACHE_DIR", str(sources / "file"))
    (sources / "both.cu").write_text(SMALL + SMALL.replace("small", "other"))
    one, other = (
        jit.Variant(source="both.cu", entry=entry, defines=(("FACTOR", 3),)) for entry in ("small", "other")
    )
    cubin = jit.compile_variant(one).cubin
    assert cubin[:4] == b"\x7fELF"
    monkeypatch.setattr(jit, "_compile", lambda *_: pytest.fail("compiled again"))
    assert jit.compile_variant(other).cubin == cubin


def _compile_in_child(directory: str, queue: multiprocessing.Queue[int]) -> None:
    structs.SOURCES = Path(directory)
    queue.put(len(jit.compile_variant(small(7)).cubin))


def test_eight_processes_at_once_leave_one_whole_file(sources: Path) -> None:
    context = multiprocessing.get_context("fork")
    queue: multiprocessing.Queue[int] = context.Queue()
    children = [context.Process(target=_compile_in_child, args=(str(sources), queue)) for _ in range(8)]
    for child in children:
        child.start()
    sizes = {queue.get(timeout=60) for _ in children}
    for child in children:
        child.join(timeout=60)
    assert len(sizes) == 1
    assert [file.suffix for file in (sources / "cache" / "kernels").iterdir()] == [".bin"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="states what happens without a GPU")
def test_loading_without_a_gpu_says_why(sources: Path) -> None:
    with pytest.raises(jit.KernelError, match="need an NVIDIA GPU"):
        jit.load(small())


def test_arguments_are_packed_by_kind() -> None:
    tensor, descriptor, wide = torch.zeros(2), jit.ByValue(bytes(range(128))), ctypes.c_int64(2**40)
    slots, addresses = jit._pack([tensor, -7, 1.5, None, descriptor, wide])
    assert slots[0] == tensor.data_ptr()
    assert slots[3] == 0
    assert ctypes.c_int32.from_address(addresses[1]).value == -7
    assert ctypes.c_float.from_address(addresses[2]).value == 1.5
    assert ctypes.string_at(addresses[4], 128) == bytes(range(128))
    assert ctypes.c_int64.from_address(addresses[5]).value == 2**40
    with pytest.raises(AssertionError, match="int32"):
        jit._pack([2**31])


@pytest.mark.parametrize(("cluster", "dependent"), [(1, False), (1, True), (2, True)])
def test_attributes_of_a_launch(cluster: int, dependent: bool) -> None:
    """None for a plain launch, which takes the host half the time; a block's neighbours, and no wait for the
    kernel before."""
    found = attributes(jit.cuda_binding("driver"), cluster, False, dependent)
    assert [attribute.value.clusterDim.x for attribute in found[: cluster - 1]] == [2] * (cluster - 1)
    assert [attribute.value.programmaticStreamSerializationAllowed for attribute in found[cluster - 1 :]] == [
        1
    ] * dependent
