"""Weights move all the time, and nothing that the layers compute changes."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from dataclasses import replace

import pytest

import imbrex
from imbrex.cli import main
from imbrex.placement import read_history
from tests.ranks.balancer_jobs import (
    EAGER,
    Rotating,
    complain,
    infer,
    infer_by_peer_copies,
    infer_exactly,
    infer_two_steps_a_migration,
    infer_unlucky,
    keep_in_fp8,
    settle_often,
    train,
    train_in_two_groups,
)
from tests.ranks.pool import Pool, RankError

Still = Callable[[int], list[dict]]
CONFIG = imbrex.MoEConfig(hidden_size=12, intermediate_size=8, num_experts=16, top_k=3)


def largest_difference(ours: list[dict], theirs: list[dict]) -> float:
    return max(
        float((a - b).abs().max()) if a.numel() else 0.0
        for one, two in zip(ours, theirs, strict=True)
        for a, b in zip(one["outputs"], two["outputs"], strict=True)
    )


@pytest.fixture(scope="module")
def still(pool: Pool) -> Still:
    """From a number of iterations to what four ranks compute in them where nothing moves; computed once."""
    longest: list[dict] = []

    def of(iterations: int) -> list[dict]:
        if not longest or len(longest[0]["outputs"]) < iterations:
            longest[:] = pool.run(4, infer, CONFIG, iterations, None, {})
        return [{"outputs": found["outputs"][:iterations]} for found in longest]

    return of


@pytest.mark.parametrize(
    ("world", "options"),
    [
        (2, {}),
        (2, {"transport": "allreduce"}),
        (4, {"transport": "allgather"}),
        (4, {"tensor_parallel": 2}),
        (8, {}),
    ],
)
def test_inference_is_the_same_while_weights_move(pool: Pool, world: int, options: dict) -> None:
    moving = pool.run(world, infer, CONFIG, 6, EAGER, {**options, "until": {"switches": 5}})
    still = pool.run(world, infer, CONFIG, len(moving[0]["outputs"]), None, options)
    assert moving[0]["switched"] >= 5
    assert largest_difference(moving, still) <= 1e-5
    for found in moving:
        assert found["placements"] == moving[0]["placements"]
        assert found["tally"]["switches"] == found["switched"] == moving[0]["switched"]
    assert sum(found["tally"]["bytes_moved"] for found in moving) > 0


def test_experts_move_by_a_policy_of_somebodys_own(pool: Pool, still: Still) -> None:
    """The ranks' experts move on by one rank every time; outputs stay."""
    pace = replace(EAGER, max_moves=CONFIG.num_experts * 2)
    moving = pool.run(4, infer, CONFIG, 4, pace, {"policy": Rotating, "until": {"switches": 4}})
    assert moving[0]["switched"] >= 4
    assert largest_difference(moving, still(len(moving[0]["outputs"]))) <= 1e-5
    first = [placement.slots for placement in moving[0]["placements"]]
    turns = [[slots[5 * turn :] + slots[: 5 * turn] for turn in range(4)] for slots in first]
    assert all((0, 1, 2, 3, 4) in {other[:5] for other in of_layer} for of_layer in turns)


def test_every_layer_has_its_turn_whatever_a_migration_takes(pool: Pool) -> None:
    found = pool.run(2, infer_two_steps_a_migration, CONFIG, 24, 4)
    assert found == [{3, 4, 5, 6}] * 2


def test_weights_kept_in_fp8_move_too(pool: Pool) -> None:
    config = imbrex.MoEConfig(hidden_size=128, intermediate_size=128, num_experts=8, top_k=2)
    for switched, same in pool.run(2, keep_in_fp8, config, 10):
        assert switched >= 2
        assert same


def test_the_journal_tells_what_happened(pool: Pool, tmp_path) -> None:
    journal = tmp_path / "journal.jsonl"
    found = pool.run(4, infer, CONFIG, 16, EAGER, {"journal": str(journal)})
    lines = [json.loads(line) for line in journal.read_text().splitlines()]
    choices = CONFIG.top_k * sum(6 + rank % 3 for rank in range(4))
    assert [line["step"] for line in lines] == list(range(16))
    assert sum(len(line["switched"]) for line in lines) == found[0]["switched"]
    for line in lines:
        assert line["layers"] == [3, 4]
        for name in ("loads", "expert_load"):
            assert [sum(row) for row in line[name]] == [choices, choices]
        sources = [sum(row) for row in line["crossings"]]
        assert sources == [2 * CONFIG.top_k * (6 + rank % 3) for rank in range(4)]
    assert "imbrex_balancer_stopped 0" in found[0]["metrics"]
    assert 'imbrex_balancedness{layer="3"}' in found[0]["metrics"]
    assert main(["balance", "report", "--journal", str(journal), "--out", str(tmp_path / "r.html")]) == 0
    text = (tmp_path / "r.html").read_text()
    assert text.count("<h2>") == 6
    assert f"<td>new placements</td><td>{found[0]['switched']}</td>" in text
    run = tmp_path / "run"
    run.mkdir()
    (run / "metrics.jsonl").write_text('{"loss": 2.0}\n')
    shutil.copy(journal, run / "balance.jsonl")
    assert main(["balance", "report", "--journal", str(run), "--out", str(tmp_path / "again.html")]) == 0
    assert (tmp_path / "again.html").read_text().count("<h2>") == 6
    assert main(["balance", "record", "--run", str(journal), "--out", str(tmp_path / "stats")]) == 0
    history = read_history(tmp_path / "stats")
    assert history.layers == (3, 4)
    assert history.counts_ILE.tolist() == [line["expert_load"] for line in lines]


@pytest.mark.parametrize(("world", "adam"), [(4, False), (4, True)])
def test_training_is_the_same_while_experts_and_optimizer_state_move(
    pool: Pool, world: int, adam: bool
) -> None:
    moving = pool.run(world, train, CONFIG, 5, EAGER, adam)
    still = pool.run(world, train, CONFIG, 5, None, adam)
    assert moving[0]["switched"] >= 6
    assert largest_difference(moving, still) <= 1e-5


def test_groups_with_other_tokens_move_together(pool: Pool) -> None:
    # All ranks of the pool: torch numbers groups by how many a rank has made.
    moving = pool.run(8, train_in_two_groups, CONFIG, 4, EAGER)
    still = pool.run(8, train_in_two_groups, CONFIG, 4, None)
    assert moving[0]["switched"] >= 4
    assert all(found["placements"] == moving[0]["placements"] for found in moving)
    assert largest_difference(moving, still) <= 1e-5


@pytest.mark.parametrize("training", [False, True])
def test_weights_written_into_a_peers_memory(pool: Pool, still: Still, training: bool) -> None:
    moving = pool.run(4, infer_by_peer_copies, CONFIG, 6, training)
    assert moving[0]["switched"] >= 5
    assert sum(found["moved"] for found in moving) > 0
    assert largest_difference(moving, still(len(moving[0]["outputs"]))) <= 1e-5


@pytest.mark.untraced
def test_hundreds_of_switches_change_no_bit(pool: Pool) -> None:
    """Eight layers on two ranks, all of them moved in nearly every step; tests above have more ranks."""
    pace = replace(EAGER, layer_updates_per_iter=8, window=1, proposals=40, max_moves=4)
    found = pool.run(2, infer_exactly, CONFIG, 200, pace, 8, "allreduce")
    assert {one["switched"] for one in found} == {found[0]["switched"]}
    assert found[0]["switched"] >= 200
    assert [one["wrong"] for one in found] == [0] * 2
    assert [one["stale"] for one in found] == [0] * 2, "experts did not hear which weights were written"


def test_a_slow_rank_is_waited_for(pool: Pool, still: Still) -> None:
    slow = pool.run(4, infer_unlucky, CONFIG, 8, 256, {"slow_s": 0.04}, {"switches": 2})
    assert largest_difference(slow, still(len(slow[0]["outputs"]))) <= 1e-5
    assert sum(map(len, slow[0]["switched"])) >= 2
    assert all(found["switched"] == slow[0]["switched"] for found in slow)
    assert slow[0]["tally"]["drops"] <= 1


def test_late_migrations_are_dropped_and_reported(pool: Pool, still: Still) -> None:
    late = pool.run(4, infer_unlucky, CONFIG, 8, 1, {"slow_steps": 4}, {"stopped": 1})
    assert largest_difference(late, still(len(late[0]["outputs"]))) <= 1e-5
    for found in late:
        assert found["placements"][0] == found["placements"][-1]
        assert "failed or were late" in found["stopped"]
        assert [text for text in found["said"] if "has stopped" in text]
        assert [text for text in found["said"] if re.search(r"ranks \[.*1.*\] have been moving", text)]
        assert (found["tally"]["stopped"], found["tally"]["drops"], found["tally"]["late"]) == (1, 3, 0)
        assert found["late"] == {0, 1}


def test_a_migration_cut_off_leaves_the_placement_whole(pool: Pool, still: Still) -> None:
    cut = pool.run(4, infer_unlucky, CONFIG, 8, 256, {"failing": (1, 2)}, {"drops": 2, "switches": 3})
    assert largest_difference(cut, still(len(cut[0]["outputs"]))) <= 1e-5
    for found in cut:
        assert found["placements"] == cut[0]["placements"]
        assert found["tally"]["drops"] >= 2
        assert not found["stopped"]
        assert found["switched"] == cut[0]["switched"]
    changes = [n for n, layers in enumerate(cut[0]["switched"]) if layers]
    assert changes
    assert max(changes) > min(changes)


def test_settling_is_no_failure(pool: Pool) -> None:
    """Migrations that nobody wanted to use: the balancer goes on."""
    assert pool.run(2, settle_often, CONFIG, 4) == [(4, 0, "")] * 2


def test_a_rank_that_dies_moving_is_noticed_by_all() -> None:
    pool = Pool(3, timeout_s=120, grace_s=20)
    with pytest.raises(RankError) as caught:
        pool.run(2, infer_unlucky, CONFIG, 300, 256, {"deadly": (1,)}, {})
    text = str(caught.value)
    assert "rank 1 of 2:\ndied" in text
    assert re.search(r"RankLostError: rank 0 lost its peers", text)
    assert "ranks without an answer: []" in text
    pool.close()


@pytest.mark.parametrize(
    ("case", "says"),
    [
        ("bytes", "allow at least one expert a layer"),
        ("pace", "ranks disagree about the pace: rank 1"),
        ("no optimizer", "its optimizer's state must follow"),
        ("half in training", "its optimizer's state must follow"),
        ("adafactor", "it cannot follow an expert"),
        ("state", "an expert is 2304 bytes, with its optimizer's state where it has one"),
        ("another optimizer", "SGD does not have gate_up_proj of the experts"),
        ("backward", "modified by an inplace operation"),
        ("twice", "layer 0 is balanced already"),
        ("closed", "it is closed; make a new one"),
        ("plan", "renew gave another placement on rank 1 than on rank 0"),
        ("unequal plans", "0 switches: the last 3 migrations failed or were late"),
        ("experts", "not one contiguous row for each of the 2 slots"),
    ],
)
def test_what_cannot_be_balanced_says_so_on_every_rank(pool: Pool, case: str, says: str) -> None:
    for text in pool.run(2, complain, case):
        assert says in text, text
