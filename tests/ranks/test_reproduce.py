"""Reproductions on real ranks, as small as they come."""

from __future__ import annotations

import pickle
import sys
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from torch.multiprocessing.spawn import start_processes

from imbrex.demo.corpus import load_corpus
from imbrex.demo.training import Recipe, Shape
from imbrex.reproduce import aristos_training, layers, patience, stage, stragglers, teams
from imbrex.reproduce.teams import train_all
from imbrex.reproduce.training import Size
from tests.ranks.forked import Forked
from tests.ranks.pool import warm

PAIR = stage.Network(nodes=2, ranks_per_node=1)


def _on_loopback(answer: Path, *given: Any) -> int:
    stage._on_netlab = lambda *_: "no namespaces"
    answer.write_bytes(pickle.dumps(stage.on_ranks(*given)))
    return 0


def on_ranks(folder: Path, *given: Any) -> Any:
    """`stage.on_ranks` without a network of its own; its ranks have torch loaded."""
    ran = Forked(_on_loopback, folder / "answer", *given, folder=folder, branches=True)
    assert ran.wait() == 0, ran.stderr
    return pickle.loads((folder / "answer").read_bytes())


def test_layers_without_a_network_of_their_own(tmp_path: Path) -> None:
    ways = {"serial": layers.Way(), "int8": layers.Way(codec="int8", schedule="optsche-2")}
    work = layers.Work(layers=2, tokens=32, width=64, inner=32, experts=2, sequence=16)
    told, ran_on = on_ranks(tmp_path, "layers", layers.settings(ways, work, rounds=2), PAIR)
    timed = layers.read(told)
    assert "measuring layers: 2 ranks, 300 s at most" in (tmp_path / "stderr").read_text()
    assert str(ran_on) == "loopback (no namespaces)"
    assert list(timed) == ["serial", "int8"]
    serial = timed["serial"]
    assert 0 < serial.moving < serial.step
    assert 0 < serial.experts < serial.step
    assert serial.shortest <= serial.longest


def test_ways_send_what_they_say(tmp_path: Path) -> None:
    """Two ranks: AllGather sends all 32 tokens, all-to-all those that want the other rank's half."""
    network = stage.Network(nodes=1, ranks_per_node=2)
    rows, _ = on_ranks(tmp_path, "wide_ep", {"rounds": 1}, network)
    sent = {row["impl"]: row["rows_sent"] for row in rows}
    assert sent["allgather"] == 32
    assert 16 <= sent["alltoall"] < 32


def test_steps_with_a_backward_and_without_take_turns(tmp_path: Path) -> None:
    events = stragglers.Way(schedule="events", tau=50.0, epsilon=1, every=19, skew="zipf:1.2", backward=False)
    ways = {"serial": stragglers.Way(schedule="serial"), "forward": events}
    load = stragglers.Load(tokens=16, width=16, inner=16)
    measured, _ = on_ranks(tmp_path, "stragglers", stragglers.settings(ways, load, steps=4), PAIR)
    assert {name: len(of_way["seconds"]) for name, of_way in measured.items()} == {"serial": 4, "forward": 4}
    # Those of calls that warm up too.
    assert measured["serial"]["choices"] == (4 + 20) * 2 * 16 * 2
    assert measured["serial"]["late"] == measured["forward"]["late"]
    assert measured["forward"]["dropped"] == 0


def test_trainings_take_turns_and_stop_together(tmp_path: Path) -> None:
    """Patience without an end learns what serial does; when the time is up all have made as many steps."""
    ways = {
        "serial": stragglers.Way(schedule="serial"),
        "endless": stragglers.Way(schedule="events", epsilon=1),
    }
    shape = {"hidden_size": 16, "num_layers": 1, "num_heads": 2, "expert_width": 8}
    course = patience.Course(steps=6, seeds=2, batch=4, length=16, every=2, held_out=1, shape=shape)
    given = patience.settings(ways, course, limit_s=0.0, seeds=(0, 1))
    runs, _ = on_ranks(tmp_path, "patience", given, PAIR)
    assert [(run["way"], run["seed"], run["steps"]) for run in runs] == [
        ("serial", 0, 2),
        ("endless", 0, 2),
        ("serial", 1, 2),
        ("endless", 1, 2),
    ]
    for serial, endless in (runs[:2], runs[2:]):
        assert serial["held_out_nats"] == endless["held_out_nats"]
        assert [point[2] for point in serial["curve"]] == [point[2] for point in endless["curve"]]
        assert endless["dropped"] == 0
    assert runs[0]["held_out_nats"] != runs[2]["held_out_nats"]


def test_a_training_of_few_steps_has_a_curve(tmp_path: Path) -> None:
    shape = {"hidden_size": 16, "num_layers": 1, "num_heads": 2, "expert_width": 8}
    course = patience.Course(steps=3, batch=4, length=16, every=2, held_out=1, shape=shape)
    ways = {"serial": stragglers.Way(schedule="serial")}
    (run,), _ = on_ranks(tmp_path, "patience", patience.settings(ways, course, limit_s=60.0), PAIR)
    assert [step for step, *_ in run["curve"]] == [2, 3]
    assert all(nats > 0 for *_, nats in run["curve"])


def test_one_process_learns_what_ranks_learn_and_drops_what_it_is_told(tmp_path: Path) -> None:
    """Nothing is dropped: the loss of four ranks, to the last bit."""
    shape = {"hidden_size": 16, "num_layers": 1, "num_heads": 2, "expert_width": 8}
    course = patience.Course(steps=10, batch=4, length=16, every=10, held_out=1, shape=shape)
    four = stage.Network(nodes=1, ranks_per_node=4)
    ways = {"serial": stragglers.Way(schedule="serial")}
    (ranks,), _ = on_ranks(tmp_path, "patience", patience.settings(ways, course, limit_s=60.0), four)
    alone = stage.Network(nodes=1, ranks_per_node=1)
    asked = {"course": asdict(course), "ways": {"nothing": 0, "all": 1}, "seed": 0}
    (whole, less), _ = on_ranks(tmp_path, "dropping", asked, alone)
    assert whole["held_out_nats"] == ranks["held_out_nats"]
    assert (whole["dropped"], whole["choices"]) == (0, ranks["choices"])
    assert 0 < less["dropped"] < ranks["choices"] / 10
    assert less["held_out_nats"] != whole["held_out_nats"]


def test_a_seed_that_is_kept_is_not_trained_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []

    def on_ranks(job: str, request: Any, network: Any, **_: Any) -> Any:
        asked.append(request)
        (seed,) = request["seeds"]
        return [{"seed": seed, "way": way} for way in request["ways"]], stage.RanOn(network=network)

    monkeypatch.setattr(patience, "on_ranks", on_ranks)
    course = patience.Course(seeds=2)
    runs, _ = aristos_training.train_all(course, 1.0, str(tmp_path))
    assert [run["seed"] for run in runs] == [0] * 5 + [1] * 2
    next(tmp_path.glob("*-0.json")).unlink()
    assert aristos_training.train_all(course, 1.0, str(tmp_path))[0] == runs
    assert [request["seeds"] for request in asked] == [[0], [1], [0]]
    aristos_training.train_all(patience.Course(seeds=1, factor=4.0), 1.0, str(tmp_path))
    assert asked[-1]["course"]["factor"] == 4.0


def test_ranks_that_fail_are_told() -> None:
    with pytest.raises(RuntimeError, match=r"the ranks ended with codes \[3, 3\]"):
        stage._on_loopback([sys.executable, "-c", "raise SystemExit(3)"], PAIR, 20)


def test_ranks_keep_freed_memory() -> None:
    asks = "import os; raise SystemExit(os.environ['MALLOC_TRIM_THRESHOLD_'] != str(4 << 30))"
    stage._on_loopback([sys.executable, "-c", asks], PAIR, 20)


def test_a_training_is_told_once_and_resumed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    warm()
    monkeypatch.setattr(teams, "spawn", partial(start_processes, start_method="forkserver"))
    text = tmp_path / "text"
    text.write_text("to be or not to be, that is the question: " * 200)
    shape = Shape(hidden_size=16, num_layers=1, num_heads=2, num_experts=4, expert_width=8)
    size = Size(shape=shape, recipe=Recipe(steps=4, batch=4, length=16), held_out=1, every=2)
    kept = str(tmp_path / "kept")
    tasks = [("none", 0), ("int8", 0), ("dense", 0)]
    corpus = load_corpus([str(text)], length=16)
    found = train_all(tasks, corpus, size=size, teams=1, folder=kept)
    assert [one["variant"] for one in found] == ["none", "int8", "dense"]
    assert [step for step, _ in found[0]["curve"]] == [2, 4]
    none, int8, dense = (one["held_out_nats"] for one in found)
    assert none != int8
    assert abs(none - int8) < 0.01 < abs(none - dense) + 0.1
    assert found[2]["parameters"] < found[0]["parameters"]
    again = train_all(tasks, corpus, size=replace(size, timeout_s=1.0), teams=1, folder=kept)
    assert again == found
