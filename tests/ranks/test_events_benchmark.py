"""The benchmark of a whole layer by events, on emulated kernels: its rows, and whose bits they have."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from benchmarks import events, events_layer
from docs.tables import events as tables
from docs.tables import results
from torch import Tensor

from imbrex.bench.results import describe_run
from imbrex.bench.shapes import Shape
from imbrex.contracts import Output
from imbrex.overlap.serial import Serial
from tests.emulated import kernel
from tests.ranks.emulated_nvlink import EmulatedNvlink
from tests.ranks.pool import Pool, Ranks

pytestmark = pytest.mark.skipif(not kernel.available(), reason="the emulation needs g++")
SHAPE = Shape(hidden_size=64, intermediate_size=24, num_experts=8, top_k=3)
REPEATS = 2


class Wrong(Serial):
    """Other numbers than serial's, on rank 1."""

    def run(self, x_TD: Tensor, routing: Any, exchange: Any, experts: Any, addend: Any) -> Output:
        output = super().run(x_TD, routing, exchange, experts, addend)
        return replace(output, y_TD=output.y_TD * (1 + exchange.geometry.rank))


def measure(ranks: Ranks, settings: list[events_layer.Setting], wrong: bool) -> list[dict[str, Any]]:
    """These settings, by a clock of the host, without an end to patience."""
    events_layer.TAU_S = 1e3
    transport = EmulatedNvlink(ranks.group, timeout=20.0)
    layers = events_layer.Layers(SHAPE, transport, ranks.rank, ranks.world_size)
    if wrong:
        layers.ways[events_layer.EVENTS] = Wrong()

    def clock(call: Callable[[], object], backward: bool) -> float:
        begin = time.perf_counter()
        call()
        return 1e6 * (time.perf_counter() - begin)

    return [row for setting in settings for row in layers.measure("small", setting, 9, REPEATS, clock)]


def test_rows_of_a_layer_make_a_result_file_and_a_table(
    pool: Pool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows, others = pool.run(2, measure, events_layer.SETTINGS, False)
    assert [(r["op"], r["case"]["skew"], r["impl"]) for r in rows] == [
        (setting.op, setting.skew, name)
        for setting in events_layer.SETTINGS
        for name in (events_layer.SERIAL, events_layer.EVENTS, events_layer.PATIENT)
    ]
    for row, other in zip(rows, others, strict=True):
        assert row == other, "a sample is the slowest rank's on all ranks"
        assert 0 < row["min_us"] <= row["median_us"] <= row["max_us"]
        assert (row["dropped_share"], row["bits"], row["n"]) == (0.0, True, REPEATS)
        what = {"serial": "the default", "events": "asked for; nobody may be missing, so as fused: runs seri"}
        assert row["reason"].startswith(what.get(row["impl"], "asked for; up to 1 peers may be missing"))
    out = tmp_path / "events.json"
    out.write_bytes((results.RESULTS / "events.json").read_bytes())
    before = json.loads(out.read_text())["rows"]
    asked = events_layer.Asked(
        model="small",
        tokens=9,
        repeats=REPEATS,
        seconds=1.0,
        question=events.QUESTION,
        out=str(out),
        run=describe_run("events.py --layer"),
    )
    for some in (rows[:3], rows):  # a run that goes on replaces what it has written
        events_layer.save(asked, some)
        written = json.loads(out.read_text())["rows"]
        assert len(written) == len(before) + len(some)
    kernels = str(tables.one_gpu())
    monkeypatch.setattr(results, "RESULTS", tmp_path)
    monkeypatch.setattr(tables, "RESULTS", tmp_path)
    results.read.cache_clear()
    try:
        body = tables.layers().body  # type: ignore[union-attr]
        assert [line[0] for line in body] == [
            f"{op}, {skew}" for skew in ("uniform", "zipf:1.2") for op in ("forward", "forward+backward")
        ]
        assert str(tables.one_gpu()) == kernels
    finally:
        results.read.cache_clear()


def test_other_bits_than_serials_are_said(pool: Pool) -> None:
    for rows in pool.run(2, measure, events_layer.SETTINGS[:1], True):
        assert [row["bits"] for row in rows] == [True, False, True]


def test_a_setting_is_a_line_with_the_goal() -> None:
    case = {"skew": "uniform"}
    rows = [
        {"op": "layer forward", "case": case, "median_us": us, "dropped_share": 0.0, "bits": True}
        for us in (100.0, 104.0, 102.0)
    ]
    assert "goal 1.03: missed" in events_layer.line_of(rows)
    assert "serial's bits" in events_layer.line_of(rows)
    rows[1] |= {"median_us": 99.0, "bits": False}
    case["skew"] = "zipf:1.2"
    assert "goal 1: reached" in events_layer.line_of(rows)
    assert "OTHER BITS" in events_layer.line_of(rows)


def test_a_layer_is_for_two_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["events.py", "--layer", "--tokens", "64"])
    with pytest.raises(SystemExit, match="--layer needs two GPUs or more"):
        events.main()
