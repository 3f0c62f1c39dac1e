"""Choices of an iteration: read when they are known, from the host or from sums that a device keeps."""

from __future__ import annotations

import json
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from imbrex.balancer.counts import BLOCK, Book, Iteration, difference
from imbrex.balancer.journal import Entry, Journal
from imbrex.balancer.migration import Change
from imbrex.balancer.renewal import DueLayer, plan
from imbrex.contracts import Placement
from imbrex.placement import from_slots
from imbrex.placement.online import Pace, weigh

PLACEMENT = from_slots([[0, 1, -1], [0, 2, 3]], 4)
SWAPPED = from_slots([[0, 3, -1], [0, 2, 1]], 4)


def test_an_iteration_by_hand() -> None:
    rows_WS = np.array([[3, 1, 0, 2, 0, 4], [0, 5, 0, 1, 1, 0]])
    found = Iteration(PLACEMENT, lambda: rows_WS)
    assert found.counts_WE.tolist() == [[5, 1, 0, 4], [1, 5, 1, 0]]
    assert found.counts_E.tolist() == [6, 6, 1, 4]
    assert found.crossings_WW.tolist() == [[4, 6], [5, 2]]
    assert found.loads_W.tolist() == [9, 8]
    assert found.known


def test_tensor_ranks_count_for_their_expert_rank_and_one_row_for_the_first() -> None:
    rows_WS = np.array([[1, 0, 0, 0, 0, 0], [0, 2, 0, 0, 0, 0], [0, 0, 0, 3, 0, 0], [0, 0, 0, 0, 4, 0]])
    assert Iteration(PLACEMENT, lambda: rows_WS).crossings_WW.tolist() == [[3, 0], [0, 7]]
    single = Iteration(PLACEMENT, lambda: rows_WS.sum(0, keepdims=True))
    assert single.crossings_WW.tolist() == [[3, 7], [0, 0]]


def test_pages_of_a_book_differ_by_what_came_between() -> None:
    book = Book(torch.device("cpu"), 1.0)
    one, at_one = book.open(2, 3)
    assert book.open(1, 3)[1] == (0, 6), "a block is for many layers"
    two, at_two = book.open(2, BLOCK // 2)
    one += 1
    before = book.turn()
    one[1, 2] += 5
    one[0, 0] = -(2**31)
    two[0, 7] += 2
    one[0, 0] -= 1
    after = book.turn()
    one += 100
    assert one.data_ptr() != two.data_ptr()
    assert difference(before, None, at_one, (2, 3)).tolist() == [[1, 1, 1], [1, 1, 1]]
    found = difference(after, before, at_one, (2, 3))
    assert found[1].tolist() == [0, 0, 5]
    assert found[0, 0] == 2**31 - 2, "2^31 - 2 choices later the sum has run over"
    assert difference(after, before, at_two, (2, BLOCK // 2))[0, 7] == 2


def test_a_journal_waits_for_counts_and_keeps_the_order(tmp_path) -> None:
    journal, known = Journal(tmp_path / "metrics.jsonl"), [False, True]
    for step in range(2):
        rows_WS = np.full((2, 6), step + 1)
        one = Iteration(PLACEMENT, lambda rows=rows_WS: rows, lambda step=step: known[step])
        journal._open.append(Entry(line={"step": step, "layers": [0]}, iterations=[one]))
    journal.write(wait=False)
    assert journal.path.read_text() == ""
    known[0] = True
    journal.write(wait=False)
    lines = [json.loads(line) for line in journal.path.read_text().splitlines()]
    assert [line["step"] for line in lines] == [0, 1]
    assert [line["loads"] for line in lines] == [[[6, 6]], [[12, 12]]]
    assert lines[1]["balancedness"] == [1.0]


def test_a_journal_that_cannot_be_written_says_so_before_anything_runs(tmp_path) -> None:
    with pytest.raises(FileNotFoundError, match="nowhere"):
        Journal(tmp_path / "nowhere" / "journal.jsonl")


def test_parts_of_an_iteration() -> None:
    """At least four choices an expert: 40 of 2 ranks and 4 experts are two parts, 31 are one."""
    rich, poor = np.full((2, 4), 5), np.array([[3, 3, 3, 3], [4, 4, 5, 5]])
    assert weigh([rich], 0.5).tolist() == [[5] * 4, [5] * 4]
    assert weigh([poor, np.zeros((2, 4), dtype=np.int64), rich], 0.5).tolist() == [
        [3.5, 3.5, 4, 4],
        [5] * 4,
        [5] * 4,
    ]
    assert weigh([], 0.5).shape == (0, 0)


def test_a_plan_waits_for_nothing_where_there_is_nothing() -> None:
    empty = Iteration(PLACEMENT, lambda: np.zeros((2, 6), dtype=np.int64))
    due = DueLayer(layer=0, recent=[empty], placement=PLACEMENT, tensors={}, pace=Pace())
    never: Any = None
    assert plan([due], None, never) == []
    known = Iteration(PLACEMENT, lambda: np.ones((2, 6), dtype=np.int64))
    idle: Any = SimpleNamespace(meet=lambda _, mine: torch.stack([mine, torch.zeros_like(mine)]))
    assert plan([replace(due, recent=[known])], idle, never) == [], "the other data group has no counts yet"


def renewed(new: Placement | None, max_moves: int = 8) -> list[Change]:
    """The plan of a layer by a policy that always gives `new`."""
    choices = Iteration(PLACEMENT, lambda: np.array([[3, 1, 0, 2, 0, 4], [0, 5, 0, 1, 1, 0]]))
    pace = Pace(max_moves=max_moves)
    due = DueLayer(layer=5, recent=[choices], placement=PLACEMENT, tensors={}, pace=pace)
    return plan([due], None, lambda recent_HE, placement, pace, whole_HE: new)


def test_a_policy_of_somebodys_own() -> None:
    assert renewed(None) == []
    seen = []
    known = Iteration(PLACEMENT, lambda: np.full((2, 6), 8))
    due = DueLayer(layer=5, recent=[known], placement=PLACEMENT, tensors={}, pace=Pace())
    plan([due], None, lambda parts, *_, whole_HE: seen.extend([len(parts), len(whole_HE)]))
    assert seen == [2, 1], "parts of iterations, and whole ones"
    (change,) = renewed(SWAPPED)
    assert (change.layer, change.old, change.new) == (5, PLACEMENT, SWAPPED)


@pytest.mark.parametrize(
    ("new", "max_moves", "sentence"),
    [
        (from_slots([[0], [1]], 2), 8, "2 experts in slots"),
        (from_slots([[0, 1], [0, 2, 3, -1]], 4), 8, "4 experts in slots"),
        (SWAPPED, 1, "fetches 2 experts; fetch at most 1"),
    ],
)
def test_a_placement_that_cannot_follow_is_refused(new: Placement, max_moves: int, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        renewed(new, max_moves)
