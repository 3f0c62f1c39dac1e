"""The simulator beside everything that was measured and not fitted to, from the committed files."""

from __future__ import annotations

import json

import pytest
from benchmarks import simulate as bench

COMMITTED = json.loads((bench.RESULTS / "simulate.json").read_text())["rows"]


@pytest.fixture(scope="module")
def predicted() -> list[dict]:
    return bench.validated()


def test_the_committed_predictions_are_those_of_the_shipped_profiles(predicted: list[dict]) -> None:
    assert len(predicted) == len(COMMITTED)
    for now, then in zip(predicted, COMMITTED, strict=True):
        assert now["case"] == then["case"]
        assert now["predicted_us"] == pytest.approx(then["predicted_us"], rel=1e-3)


def test_the_median_is_within_8_percent(predicted: list[dict]) -> None:
    (_, number, median, worst, _) = bench.digest(predicted)[-1]
    assert number > 260
    assert median <= 0.05
    # On two cores the rounds of one row spread over a third of their median: docs/plan.md.
    assert worst <= 0.27


def test_on_gpus_no_prediction_is_more_than_a_fifth_off(predicted: list[dict]) -> None:
    lines = [line for line in bench.digest(predicted) if "GPUs" in line[0]]
    assert len(lines) == 6
    assert all(worst <= 0.20 for _, _, _, worst, _ in lines)
    assert {line[0]: line[2] for line in lines}["whole layer, NVLink, 2 and 4 GPUs"] <= 0.05


def test_choices_lose_little(predicted: list[dict]) -> None:
    lost = [one for some in bench.losses(predicted).values() for one in some]
    assert len(lost) > 40
    assert sum(one <= 0.05 for one in lost) >= 0.93 * len(lost)
    assert sorted(lost)[len(lost) // 2] == 0.0


def test_no_choice_loses_more_than_5_percent_for_sure(predicted: list[dict]) -> None:
    assert bench.clear_losses(predicted) == []
    worse = [dict(row) for row in predicted]
    best = min((row for row in worse if row["impl"] == "optsche-2"), key=lambda row: row["median_us"])
    others = [row for row in worse if row["case"] == best["case"] and row is not best]
    others[0] |= {"predicted_us": 0.0, "median_us": 2 * best["max_us"]}
    assert len(bench.clear_losses(worse)) == 1


def test_nothing_is_validated_on_that_was_fitted_to() -> None:
    by_name = {part.name: part for part in bench.parts()}
    rows = [(part.file, row) for part in by_name.values() for row in part.rows]
    for file, row in rows:
        assert file in ("layer", "fused", "schedule", "collectives")
        assert not (file == "fused" and (bench.is_piece_fitted(row) or bench.is_fused_fitted(row)))
        assert not (file == "layer" and bench.is_bytes_fitted(row))
        assert (file, row["run"]) not in {("schedule", 5), ("schedule", 12)}
        assert not (file == "schedule" and bench.is_pair_fitted(row))
        top = row["case"].get("K") == 8
        if file == "collectives" and top and row["run"] == 3:
            assert row["impl"] not in ("copy-per-rank", "hierarchical-dedup")
        if file == "collectives" and top and (row["run"], row["op"]) == (7, "move"):
            assert row["impl"] != "copy-per-rank"
