"""Which tile a grouped GEMM gets, against what was measured on an H200 (docs/LOG.md)."""

from __future__ import annotations

import itertools

import pytest

from imbrex.kernels.ffn.fp8 import shipped_variants
from imbrex.kernels.ffn.products import following_variants
from imbrex.kernels.gemm.gemm import BEHIND, Epilogue, Layout, Tiling, gemm_variant, of_file
from imbrex.kernels.gemm.tiling import (
    LOW,
    PAIRED,
    PAIRED_STAGED,
    SHARED,
    SMALL,
    STAGED,
    TALL,
    Reading,
    choose_tiling,
    gemm_choices,
)

# experts of one of four ranks, D, F; of two ranks: Qwen3
MIXTRAL, DEEPSEEK, QWEN2, PHI = (2, 4096, 14336), (64, 7168, 2048), (16, 2048, 1408), (4, 4096, 6400)
QWEN3 = (64, 2048, 768)


def up(rows: int, model: tuple[int, int, int], fp8: bool = False) -> Tiling:
    experts, width, inner = model
    shape, depth = (rows, inner), width
    return choose_tiling(Layout.FORWARD, Epilogue.SWIGLU, rows, experts, shape, sms=132, depth=depth, fp8=fp8)


def down(rows: int, model: tuple[int, int, int], fp8: bool = False) -> Tiling:
    experts, width, inner = model
    return choose_tiling(
        Layout.FORWARD, Epilogue.PLAIN, rows, experts, (rows, width), sms=132, depth=inner, fp8=fp8
    )


def test_what_one_of_two_experts_has_more_the_other_has_less() -> None:
    """512 rows each, 64 tiles of 128 x 256 an expert: 159 us, 169 with 128 x 128, torch 166."""
    assert down(1024, MIXTRAL) == SHARED
    assert down(256, MIXTRAL) == SMALL  # equal counts: 68 us, 102 with 64 x 256, torch 75


def test_small_tiles_only_where_a_few_rows_more_do_not_double_them() -> None:
    """Phi-3.5 down of 256 rows, four experts: equal 59 us, 75 with 256 columns; random 81, 66, torch 76."""
    assert down(256, PHI) == SHARED
    assert down(64, PHI) == SMALL  # 58, 74


@pytest.mark.parametrize("rows", [64, 2048, 4096])
def test_few_rows_read_the_weights_once(rows: int) -> None:
    """Any tile reads them at the copy rate; 64 rows an expert, drawn at random, are often more: 918 us in
    tiles that may be 128 high, 1098 in small ones; both products in fp8 735 in tiles of 128, 863 in low."""
    assert (up(rows, DEEPSEEK), down(rows, DEEPSEEK)) == (SHARED, SHARED)
    wanted = (SHARED, STAGED) if rows == 4096 else (LOW, LOW)
    assert (up(rows, DEEPSEEK, True), down(rows, DEEPSEEK, True)) == wanted


def test_a_few_rows_of_many_experts_are_read_by_all_multiprocessors() -> None:
    """Qwen3, one row for each of 8 of 64 experts: 23.6 us and 14.6, 28.8 and 16.3 with 256 columns."""
    assert (up(16, QWEN3), down(16, QWEN3)) == (SMALL, SMALL)


def test_pairs_where_they_are_faster() -> None:
    """DeepSeek-V3 of 256 rows an expert, random: 1774 -> 1628 us; Qwen2 down: 147 -> 157."""
    assert (up(16384, DEEPSEEK), down(16384, DEEPSEEK)) == (PAIRED, PAIRED)
    assert (up(16384, QWEN2), down(16384, QWEN2)) == (SHARED, SHARED)
    assert (up(16384, DEEPSEEK, True), down(16384, DEEPSEEK, True)) == (PAIRED, PAIRED_STAGED)
    assert (up(16384, QWEN2, True), down(16384, QWEN2, True)) == (SHARED, STAGED)
    assert (up(2048, PHI), up(2048, PHI, True)) == (PAIRED, SHARED)  # 12800 columns, bf16: 345 -> 341
    gradient = Layout.DGRAD, Epilogue.PLAIN, 16384, 64, (16384, 7168)
    assert choose_tiling(*gradient, sms=132, depth=4096) == PAIRED
    assert choose_tiling(Layout.WGRAD, Epilogue.PLAIN, 16384, 64, (4096, 7168), sms=132).cluster == 1


def test_tall_tiles_for_a_little_more_than_128_rows() -> None:
    """DeepSeek-V3's gate and up of 160 rows an expert: 1638 -> 1099 us, down 729 -> 604; of 256 1916, 1986.
    Mixtral's down of 160 keeps less than a wave of blocks busy: 204 us, 211. Where there is room for twice
    the rows, their mean decides. Of 32 of Qwen3's experts with 128 rows few tiles are left for a third wave:
    gate and up 77 us, 84 (tiles.json)."""
    for rows, room, model, wanted in (
        (64 * 160, 1, DEEPSEEK, (TALL, TALL)),
        (64 * 160, 2, DEEPSEEK, (TALL, TALL)),
        (64 * 128, 1, DEEPSEEK, (TALL, TALL)),
        (64 * 96, 1, DEEPSEEK, (SHARED, SHARED)),
        (64 * 192, 1, DEEPSEEK, (TALL, TALL)),
        (4 * 192, 1, PHI, (PAIRED, SHARED)),
        (64 * 256, 1, DEEPSEEK, (PAIRED, PAIRED)),
        (64 * 160, 1, QWEN3, (TALL, TALL)),
        (32 * 128, 1, (32, *QWEN3[1:]), (SHARED, SHARED)),
        (2 * 160, 1, MIXTRAL, (TALL, SHARED)),
    ):
        experts, width, inner = model
        found = []
        for epilogue, columns, depth in ((Epilogue.SWIGLU, inner, width), (Epilogue.PLAIN, width, inner)):
            reading: Reading = {"tall": True, "mean": rows, "depth": depth}
            given = Layout.FORWARD, epilogue, room * rows, experts, (rows, columns)
            found.append(choose_tiling(*given, sms=132, **reading))
        assert tuple(found) == wanted, (rows, model)


def few(tokens: int, choices: int, model: tuple[int, int, int]) -> tuple[Tiling, Tiling]:
    """Tiles of both products for so many tokens of each of two ranks."""
    experts, width, inner = model
    rows, expected = 2 * tokens * choices, tokens * choices
    up = Layout.FORWARD, Epilogue.SWIGLU, rows, experts, (rows, inner)
    down = Layout.FORWARD, Epilogue.WEIGHTED, rows, experts, (rows, width)
    return choose_tiling(*up, sms=132, expected=expected), choose_tiling(*down, sms=132, expected=expected)


def test_few_rows_take_the_tiles_that_fill_their_last_wave() -> None:
    """Two H200, a layer of 1 token a rank: Qwen3 67.0 us, 69.5 with narrow tiles in both products, 69.4 with
    wide ones; DeepSeek-V3 283, with wide tiles 296; of 4 tokens 779, and 793 with narrow ones."""
    assert few(1, 8, QWEN3) == few(4, 8, QWEN3) == (SMALL, LOW)
    deepseek = 128, *DEEPSEEK[1:]
    assert few(1, 8, deepseek) == (SMALL, SMALL)
    assert few(4, 8, deepseek) == (LOW, LOW)
    assert few(512, 8, QWEN3)[0] == SHARED, "64 rows an expert: products are no longer reading alone"


def chosen(layout: Layout, epilogue: Epilogue, fp8: bool = False) -> set[Tiling]:
    """From 1 to 65536 rows, 1 to 128 experts, narrow and wide."""
    found = set()
    for rows, experts, wide, depth in itertools.product(
        (1, 64, 500, 1024, 4096, 16384, 65536), (1, 2, 4, 16, 64, 128), (768, 2048, 7168, 14336), (768, 7168)
    ):
        out = (wide, depth) if layout is Layout.WGRAD else (rows, wide)
        reading: Reading = {"depth": depth, "fp8": fp8}
        found.add(choose_tiling(layout, epilogue, rows, experts, out, sms=132, **reading))
        reading |= {"tall": True, "mean": 160 * experts}
        found.add(choose_tiling(layout, epilogue, rows, experts, out, sms=132, **reading))
    return found


@pytest.mark.parametrize(("layout", "epilogue"), {(c.layout, c.epilogue) for c in gemm_choices()}, ids=str)
def test_every_choice_is_shipped_and_nothing_else(layout: Layout, epilogue: Epilogue) -> None:
    shipped = {c.tiling for c in gemm_choices() if (c.layout, c.epilogue) == (layout, epilogue)}
    assert chosen(layout, epilogue) == shipped


@pytest.mark.parametrize("epilogue", [Epilogue.SWIGLU, Epilogue.PLAIN, Epilogue.WEIGHTED])
def test_every_choice_in_fp8_is_shipped_and_nothing_else(epilogue: Epilogue) -> None:
    tilings = chosen(Layout.FORWARD, epilogue, True)
    wanted = {gemm_variant(Layout.FORWARD, epilogue, tiling, fp8=True) for tiling in tilings}
    if epilogue is not Epilogue.SWIGLU:  # single blocks of down begin beside it
        wanted |= {of_file(variant, BEHIND) for variant in wanted if ("CLUSTER", 1) in variant.defines}
    shipped = {v for v in shipped_variants() if {("EPILOGUE", epilogue.value), ("GATHER", 0)} <= {*v.defines}}
    assert wanted == shipped


@pytest.mark.parametrize("model", [MIXTRAL, DEEPSEEK, QWEN2, PHI, QWEN3])
def test_down_in_the_last_wave_is_a_kernel_that_is_shipped(model: tuple[int, int, int]) -> None:
    """Behind small dispatches of a training too, which expect fewer rows than there is room for."""
    shipped = set(following_variants())
    for rows, few in itertools.product((8, 300, 2048, 32768), (0, 1, 16)):
        shape = rows, model[1]
        reading: Reading = {"depth": model[2], "expected": few and rows // few}
        for epilogue in (Epilogue.PLAIN, Epilogue.WEIGHTED):
            tiling = choose_tiling(Layout.FORWARD, epilogue, rows, model[0], shape, sms=132, **reading)
            assert of_file(gemm_variant(Layout.FORWARD, epilogue, tiling), BEHIND) in shipped, tiling
