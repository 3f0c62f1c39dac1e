"""The benchmark of the host's time: what its result file says, on a machine without a GPU."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from benchmarks import host_time

from imbrex.bench.results import check_results


def test_rows_of_calls_make_a_result_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Each call is waited for, before and behind; a step's backward runs where its name says."""
    waits, threads, out = [], {}, tmp_path / "host_time.json"

    def step(name: str) -> None:
        threads[name] = torch.autograd.is_multithreading_enabled()
        torch.ones(2).add(1)

    calls = {name: lambda name=name: step(name) for name in ("step", host_time.ONE_THREAD)}
    try:
        rows = host_time.measure(calls, {"T": 16}, 25, lambda: waits.append(1))
    finally:
        torch.autograd.set_multithreading_enabled(True)
    assert threads == {"step": True, host_time.ONE_THREAD: False}
    assert len(waits) == 2 * 2 * 25
    host_time.save(out, rows, "qwen3-30b-a3b", [16], 25)
    check_results(out, host_time.QUESTION)
    content = json.loads(out.read_text())
    (run,) = content["runs"]
    assert run["command"].endswith("host_time.py --model qwen3-30b-a3b --gpu 16 --repeats 25")
    assert {"hardware", "versions", "commit", "date"} <= set(run)
    for row, name in zip(content["rows"], calls, strict=True):
        assert (row["op"], row["case"], row["n"], row["run"]) == (name, {"T": 16}, 25, 0)
        assert row["min_us"] <= row["tenth_us"] <= row["median_us"] <= row["ninth_us"] <= row["max_us"]
        assert row["median_us"] <= row["whole_median_us"]
        assert (row["operators"], row["records"], row["device_allocations"]) == (2, 0, 0)
        assert row["functions"] >= 3
