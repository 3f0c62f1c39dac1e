"""`benchmarks/tiles.py`: the kernels that it edits, what it launches, and its tables, without a GPU."""

from __future__ import annotations

import functools
import json
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("cuda.bindings.nvrtc", reason="compiling kernels needs cuda-core and NVRTC")

import torch
from benchmarks import tiles
from docs.tables import tiles as shown
from torch import Tensor

from imbrex.bench.shapes import Shape
from imbrex.kernels import jit
from imbrex.kernels.gemm.gemm import ALONE, BEHIND, Epilogue, gemm_variant, of_file

SMALL = Shape(hidden_size=256, intermediate_size=128, num_experts=8, top_k=2)


@pytest.mark.parametrize("name", tiles.WAYS)
def test_kernels_that_tell_or_do_not_are_those_shipped_but_for_that(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    way = tiles.WAYS[name]
    shipped = gemm_variant(tiles.FORWARD, Epilogue.SWIGLU, tiles.FP8_TILES[way.pairs][0], fp8=True)
    cubin = jit.compile_variant(shipped).cubin
    monkeypatch.setattr(jit, "sources_of", functools.partial(tiles.edited, jit.sources_of))
    found = jit.compile_variant(of_file(shipped, way.first.file))
    assert found.resources.spill_bytes == 0
    assert (found.cubin == cubin) == (way.tells != way.pairs), "single blocks tell, pairs do not"


def idle(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> tuple[list[dict[str, Any]], Path]:
    """A small run without a GPU: its launches, and its file."""
    launches, out = [], tmp_path / "tiles.json"

    def launch(layout: int, a: Tensor, b: Tensor, ends_e: Tensor, out: Tensor, *_: Any, **more: Any) -> None:
        assert len(a) == len(out) == ends_e[-1]
        assert len(b) == len(ends_e)
        launches.append(more)
        out.view(torch.uint8).zero_()

    def time_in_turns(calls: dict[str, Any], *, repeats: int, warmup: int) -> dict[str, list[float]]:
        return {way: [100.0 + 10 * number] * repeats for number, way in enumerate(calls)}

    small: dict[str, Any] = {"DEVICE": "cpu", "TALL_SHAPES": {"m": SMALL}, "MODELS": {"m": SMALL}}
    small |= {"MEANS": (2, 4), "FP8_ROWS": {"m": (128,)}, "launch_gemm": launch}
    for name, value in (small | {"time_in_turns": time_in_turns}).items():
        monkeypatch.setattr(tiles, name, value)
    monkeypatch.setattr(tiles, "choose", lambda *sizes, tall=False, **_: tiles.TALL if tall else tiles.SHARED)
    monkeypatch.setattr(sys, "argv", ["tiles.py", "--out", str(out)])
    tiles.main()
    return launches, out


def test_a_run_times_every_way_and_its_tables_show_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    launches, out = idle(monkeypatch, tmp_path)
    behind = [one for one in launches if one.get("beside", ALONE).file == BEHIND]
    told = [one for one in launches if one.get("progress") is not None]
    assert (len(launches), len(behind), len(told)) == (8 * 3 + 2 * 5, 1, 4)
    assert (
        behind[0]["progress"].data_ptr() == told[1]["progress"].data_ptr() != told[0]["progress"].data_ptr()
    )
    rows = json.loads(out.read_text())["rows"]
    assert len(rows) == 8 * 3 + 5
    assert capsys.readouterr().out.count("tall 120*") == 8
    monkeypatch.setattr(shown, "read", lambda name: [row | {"measured": {}} for row in rows])
    tall, telling = shown.tall(), shown.telling()
    assert tall.head[3:] == [2, 4]
    assert [line[-1] for line in tall.body] == ["**100, 0.83**"] * 4
    assert telling.body == [["m", 128, "100", "0.909", "0.833", "130", "0.929"]]
    assert (len(tall.rows), len(telling.rows)) == (24, 5)


def test_a_way_that_leaves_other_bits_is_named() -> None:
    out = torch.zeros(1)
    calls = {"first": lambda: out.fill_(1), "second": lambda: out.fill_(2)}
    with pytest.raises(AssertionError, match=r"op \{'rows': 1\}: second has other bits"):
        tiles.time_ways("op", {"rows": 1}, calls, [out], {})  # type: ignore[arg-type]
    with pytest.raises(AssertionError, match="first has other bits, or no numbers"):
        tiles.time_ways("op", {}, {"first": lambda: None}, [out], {})
