"""The order of a grouped GEMM whose blocks work in pairs: its own header, compiled for the CPU."""

from __future__ import annotations

import ctypes
import random
import subprocess
from collections.abc import Callable
from itertools import accumulate
from pathlib import Path

import pytest

import imbrex.kernels
from tests.compile.test_gemm_scheduler import BLOCK_M, COMPILER, Segment, by_expert, expected

pytestmark = pytest.mark.skipif(COMPILER is None, reason="runs the kernel's header through a C++ compiler")
GROUP_M = 4
HARNESS = """
#include "gemm/pairs.cuh"
using namespace gemm;
extern "C" int walk(const int* ends, const int* segments, int count, int columns, int height,
                    int* out) {
    PairSchedule<128, 256, %d> order{{ends, segments, count, 0, columns}};
    order.height = height;
    Tile tile[2];
    bool together;
    int number = 0;
    for (; order.seek(number, tile, together); ++number)
        for (int i = 0; i < 2; ++i) {
            int* row = out + 6 * (2 * number + i);
            row[0] = tile[i].expert, row[1] = tile[i].row, row[2] = tile[i].rows;
            row[3] = tile[i].column, row[4] = tile[i].columns, row[5] = together;
        }
    return number;
}
"""
Found = tuple[int, int, int, int, int]
Pair = tuple[Found, Found, bool]
Walk = Callable[..., list[Pair]]


@pytest.fixture(scope="module")
def walk(tmp_path_factory: pytest.TempPathFactory) -> Walk:
    folder = tmp_path_factory.mktemp("pairs")
    (folder / "walk.cpp").write_text(HARNESS % GROUP_M)
    flags = ["-std=c++17", "-O1", "-shared", "-fPIC", f"-I{Path(imbrex.kernels.__file__).parent}"]
    command = [str(COMPILER), *flags, "-o", "walk.so", "walk.cpp"]
    subprocess.run(command, cwd=folder, check=True, timeout=60)
    library = ctypes.CDLL(str(folder / "walk.so"))

    def run(
        ends: list[int], columns: int, segments: list[Segment] | None = None, height: int = BLOCK_M
    ) -> list[Pair]:
        out = (ctypes.c_int * 100000)()
        flat = [value for segment in segments or [] for value in segment]
        table = (ctypes.c_int * len(flat))(*flat) if segments is not None else None
        count = len(ends) if segments is None else len(segments)
        number = library.walk((ctypes.c_int * len(ends))(*ends), table, count, columns, height, out)
        tiles = [tuple(out[6 * i : 6 * i + 6]) for i in range(2 * number)]
        return [(a[:5], b[:5], bool(a[5])) for a, b in zip(tiles[::2], tiles[1::2], strict=True)]

    return run


def test_the_worked_example(walk: Walk) -> None:
    pairs = walk([330], 768)
    where = [tuple((row // BLOCK_M, column // 256) for _, row, _, column, _ in pair[:2]) for pair in pairs]
    assert where == [
        ((0, 0), (1, 0)),
        ((0, 1), (1, 1)),
        ((2, 0), (2, 1)),
        ((0, 2), (1, 2)),
        ((2, 2), (3, 2)),
    ]
    assert [together for _, _, together in pairs] == [True, True, False, True, False]
    assert [second[2] > 0 for _, second, _ in pairs] == [True, True, True, True, False]


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize(
    ("sliced", "height"), [(False, 128), (True, 128), (False, 64)], ids=["experts", "segments", "low"]
)
def test_every_tile_once_and_pairs_share_their_columns(
    walk: Walk, seed: int, sliced: bool, height: int
) -> None:
    random.seed(seed)
    some = [0, 0, 1, 64, 65, 127, 128, 129, 192, 193, 256, 384, 1024]
    counts = [random.choice([*some, random.randrange(2000)]) for _ in range(random.randrange(1, 12))]
    ends, columns = list(accumulate(counts)), random.choice([8, 256, 264, 1408])
    wanted = by_expert(ends, columns)
    if sliced:
        wanted = [(e, a, b, c, c + 768) for c in (768, 0) for e, a, b, _, _ in wanted]
    pairs = walk(ends, columns, wanted if sliced else None, height)
    live = [tile for *both, _ in pairs for tile in both if tile[2] > 0]
    assert sorted(live) == sorted(expected(wanted, height))
    for first, second, together in pairs:
        assert first[2] > 0
        assert first[0] == second[0]
        if together:
            assert (second[1] - first[1], second[3]) == (height, first[3])
            assert second[2] > 0
        elif second[2] > 0:
            assert (second[1], second[3] - first[3]) == (first[1], 256)
    halves = sum(second[2] == 0 for _, second, _ in pairs)
    assert halves <= sum(begin < end for _, begin, end, _, _ in wanted)


def test_short_row_tiles_have_no_full_partner(walk: Walk) -> None:
    """An expert of 2 full row tiles and 10 rows, two columns: the short tile's partner is as short."""
    pairs = walk([266], 512)
    assert [(first[2] > 64) == (second[2] > 64) for first, second, _ in pairs] == [True] * 3
