"""The simulator beside everything that was measured and not fitted to, from the committed files."""

from __future__ import annotations

import json

import pytest
from benchmarks import simulate as bench
from benchmarks.simulate_cores import (
    LATER_SWEEP,
    LONG_SWEEP,
    SWEPT,
    of_another_day,
    of_cores,
    slowed,
    slowness,
)

from imbrex.simulate.profile import Profile

COMMITTED = json.loads((bench.RESULTS / "simulate.json").read_text())["rows"]


@pytest.fixture(scope="module")
def predicted() -> list[dict]:
    return bench.validated()


def test_the_committed_predictions_are_those_of_the_shipped_profiles(predicted: list[dict]) -> None:
    assert len(predicted) == len(COMMITTED)
    for now, then in zip(predicted, COMMITTED, strict=True):
        assert now["case"] == then["case"]
        assert now["predicted_us"] == pytest.approx(then["predicted_us"], rel=1e-3)


def on_gpus(rows: list[dict]) -> list[dict]:
    """Those whose rounds repeat to a few percent; on two cores those of one row may spread over a third of
    their median."""
    return [row for row in rows if "GPU" in row["case"]["part"]]


def test_everything_that_was_measured_is_there(predicted: list[dict]) -> None:
    assert len(predicted) > 260
    assert len(predicted) - len(on_gpus(predicted)) > 80


def test_on_gpus_no_prediction_is_more_than_a_fifth_off(predicted: list[dict]) -> None:
    *lines, (_, number, median, _, _) = bench.digest(on_gpus(predicted))
    assert number > 170
    assert median <= 0.05
    assert len(lines) == 10
    assert all(worst <= 0.20 for _, _, _, worst, _ in lines)
    assert {line[0]: line[2] for line in lines}["whole layer, NVLink, 2 and 4 GPUs"] <= 0.05


def test_all_predictions_keep_to_the_aims(predicted: list[dict]) -> None:
    *_, (_, _, median, worst, _) = bench.digest(predicted)
    assert median <= 0.08
    assert worst <= 0.20
    assert bench.clear_losses(predicted) == []
    lost = [one for some in bench.losses(predicted).values() for one in some]
    assert len(lost) == 128
    assert max(lost) <= 0.05


def test_the_lowest_prediction_alone_loses_more(predicted: list[dict]) -> None:
    """`imbrex plan` takes the simplest of near ways; docs/plan.md names the figures."""
    lost = [one for some in bench.losses(predicted, 1.0).values() for one in some]
    assert (sum(one <= 0.05 for one in lost), len(lost)) == (125, 128)
    assert max(lost) == pytest.approx(0.125, abs=1e-3)


def test_a_case_measured_again_is_chosen_for_once(predicted: list[dict]) -> None:
    """Where it was measured in the most rounds: what fewer rounds said is in docs/plan.md."""
    shorter = [{**row, "again": False} for row in predicted if "again" in row]
    assert {row["case"]["of_run"] for row in shorter} == {16, LATER_SWEEP}
    assert bench.choices([row for row in predicted if "again" in row]) == []
    rounds = {row["run"]: row["n"] for row in (*of_cores()[1], *of_another_day(LONG_SWEEP))}
    assert rounds == {16: 16, LONG_SWEEP: 40}
    lost = [one for some in bench.losses(shorter).values() for one in some]
    assert (sum(one <= 0.05 for one in lost), len(lost)) == (54, 60)
    assert bench.clear_losses(shorter) == []


def test_the_best_way_of_one_day_loses_on_another() -> None:
    """Sweeps of the same configurations: what a choice by measurement loses; docs/plan.md names it."""
    lost = bench.by_another_day()
    assert (sum(one <= 0.05 for one in lost), len(lost)) == (235, 240)
    assert max(lost) == pytest.approx(0.158, abs=1e-3)


@pytest.mark.parametrize(
    ("runs", "number", "near"), [([1], 6, 0.025), ([6, 7], 10, 0.04)], ids=["H100", "H200"]
)
def test_the_gain_of_fused_layers_on_four_gpus(
    predicted: list[dict], runs: list[int], number: int, near: float
) -> None:
    """Nothing measured on four was fitted to."""
    fused_layers = [row for row in predicted if row["case"]["part"].startswith("serial and fused")]
    ways = {(str(row["case"]), row["impl"]): row for row in fused_layers if row["case"]["of_run"] in runs}
    cases = {case for case, impl in ways if impl == "imbrex-fused"}
    assert len(cases) == number
    for case in cases:
        serial, fused = (ways[case, f"imbrex-{name}"] for name in ("serial", "fused"))
        measured = serial["median_us"] / fused["median_us"]
        assert serial["predicted_us"] / fused["predicted_us"] == pytest.approx(measured, abs=near)


def test_a_choice_is_of_a_forward_or_of_a_step() -> None:
    """Of `b` the forward is 1 ms longer and the backward 2 ms shorter: its step is the shorter one."""
    rows = [
        {
            "impl": impl,
            "case": {"part": "by hand", "what": what},
            **dict.fromkeys(("median_us", "min_us", "max_us", "predicted_us"), us),
        }
        for impl, what, us in (
            ("a", "layer-forward", 10),
            ("b", "layer-forward", 11),
            ("a", "layer-backward", 20),
            ("b", "layer-backward", 18),
            ("c", "layer-backward", 1),
        )
    ]
    forwards, steps = bench.choices(rows)
    assert [(row["impl"], row["median_us"]) for row in forwards] == [("a", 10), ("b", 11)]
    assert [(row["impl"], row["predicted_us"]) for row in steps] == [("a", 30), ("b", 29)]


def test_on_gpus_choices_lose_nothing(predicted: list[dict]) -> None:
    lost = [one for some in bench.losses(on_gpus(predicted)).values() for one in some]
    assert len(lost) > 30
    assert all(one <= 0.05 for one in lost)
    assert sorted(lost)[len(lost) // 2] == 0.0


def test_a_choice_that_loses_for_sure_is_told(predicted: list[dict]) -> None:
    assert bench.clear_losses(on_gpus(predicted)) == []
    worse = [dict(row) for row in on_gpus(predicted)]
    best = min((row for row in worse if row["impl"] == "optsche-2"), key=lambda row: row["median_us"])
    others = [row for row in worse if row["case"] == best["case"] and row is not best]
    others[0] |= {"predicted_us": 0.0, "median_us": 2 * best["max_us"]}
    assert len(bench.clear_losses(worse)) == 1


def test_nothing_is_validated_on_that_was_fitted_to() -> None:
    by_name = {part.name: part for part in bench.parts()}
    rows = [(part.file, row) for part in by_name.values() for row in part.rows]
    for file, row in rows:
        assert file in ("layer", "fused", "schedule", "collectives", "tiers")
        assert not (file == "fused" and (bench.is_piece_fitted(row) or bench.is_fused_fitted(row)))
        assert not (file == "layer" and bench.is_bytes_fitted(row))
        assert not (file == "tiers" and bench.is_tiers_fitted(row))
        assert (file, row["run"]) != ("schedule", 12)
        assert not (file == "schedule" and any(row is other for other in of_cores()[0]))
        assert not (file == "schedule" and bench.is_pair_fitted(row))
        top = row["case"].get("K") == 8
        if file == "collectives" and top and row["run"] == 3:
            assert row["impl"] not in ("copy-per-rank", "hierarchical-dedup")
        if file == "collectives" and top and (row["run"], row["op"]) == (7, "move"):
            assert row["impl"] != "copy-per-rank"


def test_on_two_cores_no_configuration_is_on_both_sides() -> None:
    fitted, held = ({str(row["case"]) for row in rows} for rows in of_cores())
    assert len(fitted) == SWEPT
    # The first sweep was measured twice: once more, all schedules of its second configuration.
    assert len(fitted & held) <= 1
    assert len(held) >= SWEPT


@pytest.mark.parametrize(("sweep", "times"), [(LATER_SWEEP, 1.12), (LONG_SWEEP, 1.20)])
def test_another_day_is_told_by_its_speed_alone(sweep: int, times: float) -> None:
    """Nothing of that sweep is fitted to, and its processors' speed is the only figure taken from it."""
    later = of_another_day(sweep)
    assert len(later) == 160
    assert not {row["run"] for row in later} & {row["run"] for some in of_cores() for row in some}
    assert slowness(sweep) == pytest.approx(times, abs=0.01)
    profile = Profile.load("two-cores")
    slow = slowed(profile, 2.0)
    changed = {name for name in profile.entries if profile.entries[name] != slow.entries[name]}
    assert not [name for name in changed if name.startswith(("pair", "node", "network", "bytes_slows"))]
    assert slow.entries["plan_s"].value == 2 * profile.entries["plan_s"].value
    assert slow.entries["product_flops_s"].value == profile.entries["product_flops_s"].value / 2
