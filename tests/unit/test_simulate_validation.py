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
    assert number > 240
    assert median <= 0.08
    # The aim is 0.20, which layers of few tokens and backwards over sockets miss: docs/plan.md.
    assert worst <= 0.30


def test_whole_layers_over_nvlink(predicted: list[dict]) -> None:
    errors = {line[0]: line[2:4] for line in bench.digest(predicted)}
    assert errors["whole layer, NVLink, 2 and 4 GPUs"][0] <= 0.05


def test_choices_lose_little(predicted: list[dict]) -> None:
    lost = [one for some in bench.losses(predicted).values() for one in some]
    assert len(lost) > 40
    assert sum(one <= 0.05 for one in lost) >= 0.88 * len(lost)
    assert sorted(lost)[len(lost) // 2] == 0.0


def test_nothing_is_validated_on_that_was_fitted_to() -> None:
    by_name = {part.name: part for part in bench.parts()}
    rows = [(part.file, row) for part in by_name.values() for row in part.rows]
    for file, row in rows:
        assert file in ("layer", "schedule", "collectives")
        assert (file, row["run"]) not in {("schedule", 5), ("schedule", 12)}
        assert not (file == "schedule" and bench.is_pair_fitted(row))
        top = row["case"].get("K") == 8
        if file == "collectives" and top and row["run"] == 3:
            assert row["impl"] not in ("copy-per-rank", "hierarchical-dedup")
        if file == "collectives" and top and (row["run"], row["op"]) == (7, "move"):
            assert row["impl"] != "copy-per-rank"
