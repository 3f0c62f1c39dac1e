"""The tile order of the grouped GEMM: its own header, compiled for the CPU, against plain Python."""

from __future__ import annotations

import ctypes
import random
import shutil
import subprocess
from collections.abc import Callable
from itertools import accumulate
from pathlib import Path

import pytest

import imbrex.kernels

COMPILER = shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")
pytestmark = pytest.mark.skipif(COMPILER is None, reason="runs the kernel's header through a C++ compiler")

BLOCK_M, BLOCK_N, GROUP_M = 128, 256, 3
HARNESS = """
#include "gemm/scheduler.cuh"
using namespace gemm;
template <bool kFixedRows>
int walk(const int* ends, const int* segments, int count, int rows, int columns, int block, int grid,
         int height, int* out) {
    Schedule<%d, %d, %d, kFixedRows> order{ends, segments, count, rows, columns};
    order.height = height;
    Tile tile;
    int found = 0;
    for (int number = block; order.seek(number, tile); number += grid, ++found) {
        int* row = out + 5 * found;
        row[0] = tile.expert, row[1] = tile.row, row[2] = tile.rows;
        row[3] = tile.column, row[4] = tile.columns;
    }
    return found;
}
extern "C" int walk_tall(const int* ends, int count, int columns, int* out) {
    Schedule<192, %d, %d, false, true> order{ends, nullptr, count, 0, columns};
    Tile tile;
    int found = 0;
    for (; order.seek(found, tile); ++found) {
        int* row = out + 5 * found;
        row[0] = tile.expert, row[1] = tile.row, row[2] = tile.rows, row[3] = tile.column, row[4] = 0;
    }
    return found;
}
extern "C" int walk_ragged(const int* e, const int* s, int c, int r, int n, int b, int g, int h, int* out) {
    return walk<false>(e, s, c, r, n, b, g, h, out);
}
extern "C" int walk_fixed(const int* e, const int* s, int c, int r, int n, int b, int g, int h, int* out) {
    return walk<true>(e, s, c, r, n, b, g, h, out);
}
"""
Segment = tuple[int, int, int, int, int]
Walk = Callable[..., list[tuple[int, ...]]]


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    folder = tmp_path_factory.mktemp("scheduler")
    (folder / "walk.cpp").write_text(HARNESS % (BLOCK_M, BLOCK_N, GROUP_M, BLOCK_N, GROUP_M))
    headers = Path(imbrex.kernels.__file__).parent
    command = [
        str(COMPILER),
        "-std=c++17",
        "-O1",
        "-shared",
        "-fPIC",
        f"-I{headers}",
        "-o",
        "walk.so",
        "walk.cpp",
    ]
    subprocess.run(command, cwd=folder, check=True, timeout=60)
    return ctypes.CDLL(str(folder / "walk.so"))


@pytest.fixture(scope="module")
def walk(library: ctypes.CDLL) -> Walk:
    def run(
        ends: list[int],
        segments: list[Segment] | None,
        rows: int,
        columns: int,
        grid: int,
        fixed: bool = False,
        height: int = BLOCK_M,
    ):
        out = (ctypes.c_int * 50000)()
        flat = [value for segment in segments or [] for value in segment]
        table = (ctypes.c_int * len(flat))(*flat) if segments is not None else None
        count = len(ends) if segments is None else len(segments)
        tiles: list[tuple[int, tuple[int, ...]]] = []
        for block in range(grid):
            function = library.walk_fixed if fixed else library.walk_ragged
            given = (ctypes.c_int * len(ends))(*ends), table, count, rows, columns, block, grid, height, out
            found = function(*given)
            tiles += [(block + i * grid, tuple(out[5 * i : 5 * i + 5])) for i in range(found)]
        assert [number for number, _ in sorted(tiles)] == list(range(len(tiles)))
        return [tile for _, tile in sorted(tiles)]

    return run


def expected(segments: list[Segment], height: int = BLOCK_M) -> list[tuple[int, ...]]:
    """Tiles of fewer than BLOCK_M rows have no more than their own."""
    tiles: list[tuple[int, ...]] = []
    most = height if height < BLOCK_M else 1 << 30
    for expert, row_begin, row_end, column_begin, column_end in segments:
        rows = list(range(row_begin, row_end, height))
        for group in range(0, len(rows), GROUP_M):
            for column in range(column_begin, column_end, BLOCK_N):
                tiles += [
                    (expert, row, min(row_end - row, most), column, column_end - column)
                    for row in rows[group : group + GROUP_M]
                ]
    return tiles


def by_expert(ends: list[int], columns: int) -> list[Segment]:
    return [(e, begin, end, 0, columns) for e, (begin, end) in enumerate(zip([0, *ends], ends, strict=False))]


def test_the_worked_example(walk: Walk) -> None:
    tiles = walk([130, 130, 300], None, 0, 512, 1)
    assert len(tiles) == 8
    assert tiles[5] == (2, 258, 42, 0, 512)


@pytest.mark.parametrize("seed", range(20))
def test_every_tile_once_in_the_stated_order(walk: Walk, seed: int) -> None:
    random.seed(seed)
    counts = [
        random.choice([0, 0, 1, 127, 128, 129, random.randrange(2000)])
        for _ in range(random.randrange(1, 12))
    ]
    ends, columns, grid = (
        list(accumulate(counts)),
        random.choice([8, 256, 264, 1408]),
        random.choice([1, 7, 132]),
    )
    assert walk(ends, None, 0, columns, grid) == expected(by_expert(ends, columns))
    assert walk(ends, None, 0, columns, grid, height=64) == expected(by_expert(ends, columns), 64)


@pytest.mark.parametrize("blocks", range(16))
def test_tall_tiles_are_as_few_as_can_be_and_alike(library: ctypes.CDLL, blocks: int) -> None:
    """Of 64-row blocks of an expert; 449 rows are tiles of 192, 192 and 65."""
    for rows in sorted({max(0, 64 * blocks - 63), 64 * blocks}):
        out, ends = (ctypes.c_int * 5000)(), [7, 7 + rows]
        found = library.walk_tall((ctypes.c_int * 2)(*ends), 2, 512, out)
        tiles = [tuple(out[5 * i : 5 * i + 4]) for i in range(found)]
        mine = sorted((row, most) for expert, row, most, column in tiles if (expert, column) == (1, 256))
        assert len(mine) == -(-rows // 192)
        heights = [min(most, 192) for _, most in mine]
        assert [row for row, _ in mine] == list(accumulate(heights, initial=7))[: len(mine)]
        assert sum(heights) == rows
        parts = [-(-height // 64) for height in heights]
        assert max(parts, default=0) - min(parts, default=0) <= 1
        assert parts == sorted(parts, reverse=True)


@pytest.mark.parametrize("seed", range(5))
def test_column_slices_over_all_experts(walk: Walk, seed: int) -> None:
    random.seed(seed)
    ends = list(accumulate(random.randrange(600) for _ in range(6)))
    segments = [
        (e, begin, end, first, first + 512)
        for first in (0, 512)
        for e, begin, end, _, _ in by_expert(ends, 0)
    ]
    assert walk(ends, segments, 0, 1024, 5) == expected(segments)


def test_weight_gradients_have_tiles_for_empty_experts(walk: Walk) -> None:
    tiles = walk([0, 70, 70], None, 300, 256, 4, fixed=True)
    assert tiles == expected([(e, 0, 300, 0, 256) for e in range(3)])
