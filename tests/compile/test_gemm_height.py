"""Which height of tiles a grouped GEMM takes: its own header, compiled for the CPU."""

from __future__ import annotations

import ctypes
import subprocess
from collections.abc import Callable
from itertools import accumulate
from pathlib import Path

import pytest

import imbrex.kernels
from tests.compile.test_gemm_scheduler import COMPILER

pytestmark = pytest.mark.skipif(COMPILER is None, reason="runs the kernel's header through a C++ compiler")
SOURCE = """
#include "gemm/height.cuh"
using namespace gemm;
extern "C" int height(const int* ends, int experts, int columns, int blocks) {
    return tile_height(count_row_tiles(ends, experts, 0, 1), columns, blocks);
}
"""
Height = Callable[..., int]


@pytest.fixture(scope="module")
def height(tmp_path_factory: pytest.TempPathFactory) -> Height:
    folder = tmp_path_factory.mktemp("height")
    (folder / "height.cpp").write_text(SOURCE)
    flags = ["-std=c++17", "-O1", "-shared", "-fPIC", f"-I{Path(imbrex.kernels.__file__).parent}"]
    subprocess.run([str(COMPILER), *flags, "-o", "height.so", "height.cpp"], cwd=folder, check=True)
    library = ctypes.CDLL(str(folder / "height.so"))

    def run(counts: list[int], columns: int, blocks: int = 132) -> int:
        ends = (ctypes.c_int * len(counts))(*accumulate(counts))
        return library.height(ends, len(counts), -(-columns // 256), blocks)

    return run


def test_two_experts_that_differ_by_a_few_rows(height: Height) -> None:
    """Mixtral down of 1024 rows: a second wave, but of few tiles, 289 us (296 in tiles of 64)."""
    assert height([520, 504], 4096) == 128
    assert height([512, 512], 4096) == 128


def test_too_few_tiles_for_all_blocks(height: Height) -> None:
    """Phi-3.5 down of 512 rows: 64 tiles of 128 rows 77 us, 128 of 64 rows 63. Mixtral of 256: 142, 104."""
    assert height([128] * 4, 4096) == 64
    assert height([129, 127, 128, 128], 4096) == 128  # 9 x 16 tiles of 64 would be two waves
    assert height([128] * 2, 4096) == 64


def test_many_waves_and_single_blocks_of_rows(height: Height) -> None:
    assert height([1024] * 16, 2816) == 128
    assert height([64, 0, 1, 63], 4096) == 128  # the same tiles either way
    assert height([0, 0], 4096) == 128
    assert height([], 4096) == 128
