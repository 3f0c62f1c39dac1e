"""What ranks of two tiers tell each other before the first row leaves, one rank's mistake among it."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

import imbrex
from imbrex.exchange.tiered import PARTS_PER_MESSAGE
from imbrex.overlap.pipelined import Pipelined
from imbrex.placement import contiguous, from_slots
from imbrex.transport import Tiers
from imbrex.transport.collective import Collective
from tests.ranks.pool import Pool, Ranks
from tests.ranks.test_bad_input import MESSAGES, D, E, K, bad_input, good_input
from tests.ranks.test_tiered import Scaled, given_to

MANY = PARTS_PER_MESSAGE + 1
"""Chunks that one message does not hold."""


@contextmanager
def heard() -> Iterator[list[str]]:
    """What a rank says, in order: numbers to all, and messages with rows by phase."""
    said: list[str] = []
    exchange_counts, post = Collective.exchange_counts, Collective.post

    def counts(self, message):
        said.append("counts")
        return exchange_counts(self, message)

    def posted(self, phase, sends, receives):
        said.extend([phase] if any(message.rows.numel() for message in sends) else [])
        return post(self, phase, sends, receives)

    patched: Any = Collective
    patched.exchange_counts, patched.post = counts, posted
    try:
        yield said
    finally:
        patched.exchange_counts, patched.post = exchange_counts, post


def two_tiers(ranks: Ranks, placement: imbrex.Placement, top_k: int) -> tuple[imbrex.Exchange, Any]:
    """An exchange between nodes of one rank, and experts."""
    transport = Tiers(ranks.group, ranks_per_node=1)
    exchange = imbrex.Exchange(placement, D, top_k, group=ranks.group, transport=transport)
    return exchange, Scaled(exchange.geometry.local_slots.start)


def run_start(ranks: Ranks, degrees: list[int]) -> list[list[str]]:
    """What is said in each second call, up to what is added to the output."""
    exchange, experts = two_tiers(ranks, contiguous(24, 2), 4)
    x_TD, ids_TK, weights_TK, _ = given_to(ranks.rank)
    inputs = x_TD, imbrex.Routing(ids_TK=ids_TK, weights_TK=weights_TK), exchange, experts
    heads = []
    for degree in degrees:
        schedule = Pipelined("optsche", degree)
        schedule.run(*inputs, None)
        with heard() as said:

            def added(said: list[str] = said) -> Tensor:
                said.append("added")
                return torch.zeros_like(x_TD)

            schedule.run(*inputs, added)
        heads.append(said[: said.index("added")])
    return heads


def test_one_message_before_the_first_row_leaves(pool: Pool) -> None:
    """Then the labels of all chunks, then all rows, and the node is planned behind them: its own message."""
    for heads in pool.run(2, run_start, [1, 3, MANY]):
        assert heads[0] == ["counts", "plan", "dispatch", "counts"]
        assert heads[1] == ["counts", "plan", *["dispatch"] * 3, "counts"]
        # Of eleven tokens at most: six chunks have none.
        checks, rows = heads[2][:3], heads[2][3:-1]
        assert (checks, {*rows}, heads[2][-1]) == (["counts", "counts", "plan"], {"dispatch"}, "counts")


def tries(call: Callable[[], Any]) -> str:
    try:
        call()
    except ValueError as error:
        return str(error)
    return "nothing was raised"


def run_bad_chunks(ranks: Ranks, degree: int, slots: Any) -> dict[str, str]:
    """What is said of every bad input of rank 1, after a call that went well and before one that must."""
    exchange, experts = two_tiers(ranks, from_slots(slots, E), K)
    schedule, answers = Pipelined("optsche", degree), {}

    def run(x_TD: Tensor, routing: imbrex.Routing) -> Tensor:
        return schedule.run(x_TD, routing, exchange, experts, None).y_TD

    for kind in MESSAGES:
        run(*good_input())
        given = bad_input(kind) if ranks.rank == 1 else good_input()
        answers[kind] = tries(lambda given=given: run(*given))
        run(*good_input())
    # As a layer that finds its input wrong tells it, by itself, before it routes.
    x_TD, routing = good_input()
    alone = ranks.rank == 1
    bad = torch.zeros(3, D + 1)
    answers["alone"] = tries(lambda: exchange.check_in(bad) if alone else run(x_TD, routing))
    run(*good_input())
    return answers


PLAIN, REPLICAS = [[0, 1, 2], [3, 4, 5]], [[0, 1, 2, 3], [4, 5, 0, 2]]


@pytest.mark.parametrize(("degree", "slots"), [(1, REPLICAS), (3, PLAIN), (MANY, REPLICAS)])
def test_wrong_on_one_rank(pool: Pool, degree: int, slots: Any) -> None:
    ours, theirs = pool.run(2, run_bad_chunks, degree, slots)
    assert ours == theirs
    for kind, sentence in (MESSAGES | {"alone": MESSAGES["width"]}).items():
        assert re.search(sentence, ours[kind]), (kind, ours[kind])


BEFORE = [[0, 1, 2], [3, 4, -1]]
AFTER = [[1, 0, 2], [3, 4, -1]], [[0, 1, 2], [3, 4, 0]]
"""With the same slots for every expert in another order, and with a replica, where more is told."""


def run_moved_alone(ranks: Ranks, degree: int) -> list[str]:
    """Rank 1 alone takes another placement."""
    answers, ids_TK = [], torch.tensor([[0], [3], [-1]])
    routing = imbrex.Routing(ids_TK=ids_TK, weights_TK=torch.ones(3, 1))
    for slots in AFTER:
        exchange, experts = two_tiers(ranks, from_slots(BEFORE, 5), 1)
        schedule, inputs = Pipelined("optsche", degree), (torch.randn(3, D), routing, exchange, experts, None)
        schedule.run(*inputs)
        if ranks.rank == 1:
            exchange.relocate(from_slots(slots, 5))
        answers.append(tries(lambda inputs=inputs, schedule=schedule: schedule.run(*inputs)))
    return answers


@pytest.mark.parametrize("degree", [1, 3])
def test_a_placement_of_one_rank_alone_is_heard(pool: Pool, degree: int) -> None:
    for answers in pool.run(2, run_moved_alone, degree):
        for said in answers:
            assert "ranks disagree about the placement" in said
