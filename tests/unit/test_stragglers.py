"""The straggler study's arithmetic, and its text from made-up records."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from imbrex.reproduce import (
    aristos_figure_1,
    aristos_figure_2,
    aristos_loss,
    aristos_training,
    dropping,
    patience,
    stragglers,
)
from imbrex.reproduce.frame import Options
from imbrex.reproduce.stage import RanOn


def record(late_s: float, dropped: int) -> dict[str, Any]:
    """100 steps of 10 ms, every tenth `late_s` longer for those that wait for rank 3."""
    late = [step % 10 == 0 for step in range(100)]
    seconds = [[0.01, 0.009, 0.01 + late_s * is_late, 0.06] for is_late in late]
    phases = {"plan": 1.0, "dispatch": 2.0, "experts": 5.0, "combine": 2.0}
    return {"seconds": seconds, "late": late, "dropped": dropped, "choices": 1000, "phases": phases}


def test_the_late_rank_itself_is_not_counted() -> None:
    times = stragglers.punctual(record(0.05, 0))
    assert sum(time == pytest.approx(0.06) for time in times) == 10
    assert stragglers.quantile(times, 0.5) == pytest.approx(0.01)
    assert stragglers.quantile(times, 0.95) == pytest.approx(0.06)
    assert stragglers.communicating(stragglers.shares(record(0.0, 0))) == pytest.approx(0.5)


@pytest.mark.parametrize("figure", [aristos_figure_1, aristos_figure_2])
def test_the_text_says_what_was_measured(figure: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def measure(asked: Options, ways: Any, load: Any = None, steps: int = 0) -> Any:
        records = {
            name: record(
                0.0 if way.late == "never" else 0.05 if way.epsilon == 0 else 0.002, way.epsilon * 25
            )
            for name, way in ways.items()
        }
        return records, RanOn(network=stragglers.NETWORK, why_not="as asked"), 100

    monkeypatch.setattr(figure, "measure", measure)
    finding = figure.find(Options())
    text = finding.text()
    if figure is aristos_figure_2:
        assert "| serial, rank 3 late" in text
        assert "6.00x" in text
        assert "1.20 times, and 2.50% of the choices are dropped" in text
        assert "dropped, forward: missed, 1.20 times and 2.50%" in text
        assert "dropped, longer forward: missed, 1.20 times and 2.50%" in text
        tokens = {row["impl"].split(":")[0]: row["case"]["tokens"] for row in finding.rows}
        assert (tokens["longer forward"], tokens["forward"]) == (2048, 256)
        assert "with nobody late: reached, 1.000 times" in text
        assert "Zipf 1.2: missed, 1.000 times" in text
    else:
        assert "Communicating takes 50% of a step with nobody late" in text
    assert {row["impl"]: row["dropped_share"] for row in finding.rows}["tau 0.25 steps, rank 3 late"] == 0.025
    assert finding.chart.startswith("<svg")


def test_one_of_every_ten_steps_is_late() -> None:
    is_late = stragglers.LateSteps(0.1, seed=3)
    late = [is_late(step) for step in range(-20, 100)]
    assert [sum(late[i : i + 10]) for i in range(0, 120, 10)] == [1] * 12
    assert len({late[i : i + 10].index(True) for i in range(0, 120, 10)}) > 3


def trained(way: str, seed: int, nats: float, dropped: int) -> dict[str, Any]:
    return {
        "way": way,
        "seed": seed,
        "steps": 1000,
        "held_out_nats": nats,
        "curve": [(50, 1.5, 3.0)],
        "seconds": 30.0,
        "median_s": 0.02,
        "dropped": dropped,
        "choices": 1000,
    }


@pytest.mark.parametrize(("apart", "word"), [(0.008, "reached"), (0.012, "missed")])
def test_the_loss_is_compared_seed_by_seed(apart: float, word: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def drops(way: str) -> bool:
        return way not in ("serial", "endless patience")

    def on_ranks(job: str, settings: Any, network: Any, **options: Any) -> Any:
        runs = [
            trained(way, seed, 2.0 + seed + apart * seed * drops(way), 9 * drops(way))
            for seed in settings["seeds"]
            for way in settings["ways"]
        ]
        return runs, RanOn(network=network, why_not="as asked")

    monkeypatch.setattr(patience, "on_ranks", on_ranks)
    finding = aristos_training.find(Options(full=True))
    text = finding.text()
    assert f"after 1000 steps: {word}, 0.90% and {apart:+.4f} nats in the mean over seeds" in text
    assert f"+0.0000, {apart:+.4f}, {2 * apart:+.4f}" in text
    assert "nats learning after 30 s" in text
    assert text.count("| 30.0    | 3.0000") == len(aristos_training.WAYS)
    assert len(finding.rows) == 3 * 2 + 3
    assert "not decided" in aristos_training.find(Options()).text()


@pytest.mark.parametrize(
    ("mean", "spread", "words"),
    [(0.0, 0.01, "reached too"), (0.0, 0.03, "reached not"), (0.02, 0.001, "missed not")],
)
def test_a_mean_loss_is_said_with_its_error(
    mean: float, spread: float, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ten seeds, of which each parts by as much either way from the mean."""

    def on_ranks(job: str, settings: Any, network: Any, **options: Any) -> Any:
        seed = settings["seed"]
        drops = {way: every > 0 for way, every in settings["ways"].items()}
        nats = {way: 2.0 + seed + (mean + spread * (-1) ** seed) * drops[way] for way in drops}
        runs = [trained(way, seed, nats[way], 9 * drops[way]) for way in drops]
        return runs, RanOn(network=network, why_not="as asked")

    monkeypatch.setattr(patience, "on_ranks", on_ranks)
    finding = aristos_loss.find(Options(full=True))
    text = finding.text()
    met, sure = words.split()
    assert f"under 1 % dropped: {met}, {mean:+.4f} nats in the mean over seeds" in text
    assert f"standard error of {spread / 3:.4f} {sure}, 0.90% dropped" in text
    assert f"A single seed parts by up to {mean + spread:.4f}" in text
    assert ("5 of 10" in text) == (mean < spread)
    assert len(finding.rows) == 10 * len(aristos_loss.WAYS)
    assert "not decided" in aristos_loss.find(Options()).text()


def test_patience_is_spent_in_one_of_so_many_late_steps() -> None:
    late = stragglers.LateSteps(0.1, seed=5)
    of_late = {step for step in range(400) if late(step)}
    spent = {}
    for every in (0, 1, 19, 38):
        asked = dropping.Spent(late=stragglers.LateSteps(0.1, seed=5), every=every)
        spent[every] = [step for step in range(400) if asked(step)]
        assert of_late.issuperset(spent[every])
    assert (len(spent[0]), len(spent[1])) == (0, 40)
    for every in (19, 38):
        windows = [(step + 1) // every for step in spent[every]]
        assert windows == sorted(set(windows))
        assert len(windows) >= 400 // every - 1


def test_who_is_done_without_keeps_its_own_choices() -> None:
    """Four tokens of a rank each, every one of which wants an expert of every rank."""
    ids_TK = torch.tensor([[0, 2, 5, 7]] * 4)
    kept_TK = dropping.kept_without(3, ids_TK, 8)
    assert kept_TK.int().tolist() == [[1, 1, 1, 0]] * 3 + [[0, 0, 0, 1]]


def test_even_choices_are_exactly_even() -> None:
    shape = stragglers.Shape(hidden_size=8, intermediate_size=8, num_experts=8, top_k=2)
    drawn = [stragglers.even_choices(shape, 64, rank=rank).ids_TK for rank in range(2)]
    for ids_TK in drawn:
        assert torch.bincount(ids_TK.flatten(), minlength=8).tolist() == [16] * 8
        assert (ids_TK[:, 0] != ids_TK[:, 1]).all()
    assert not torch.equal(*drawn)
