"""What ranks compare before rows move: every word of the header, by name."""

from __future__ import annotations

from itertools import permutations
from typing import Any

import pytest
import torch

from imbrex.contracts import Routing
from imbrex.exchange.agreement import (
    CHECKSUM,
    EQUAL,
    EQUAL_IF_REPLICATED,
    HEADER,
    PROBLEM,
    TOKENS,
    check_headers,
    find_bad_value,
    write_header,
)
from imbrex.exchange.exchange import Exchange
from imbrex.placement import contiguous, from_slots

IDS_TK = torch.tensor([[0, 1], [1, 0], [0, 1]])
CALL = 3, 5, 7, 11
WORDS_OF_A_CALL = ["exchange", "layer", "number of calls", "placement"]


def header(call: tuple[int, int, int, int] = CALL) -> torch.Tensor:
    return write_header((0, 0, 0, 0), torch.ones(3, 8), IDS_TK, call, replicated=True)


def test_headers_that_are_alike_pass() -> None:
    assert header().shape == (HEADER,)
    check_headers(torch.stack([header(), header(), header()]), replicated=True)


@pytest.mark.parametrize("place", [*EQUAL, *EQUAL_IF_REPLICATED])
def test_every_word_is_compared_by_its_name(place: int) -> None:
    headers = torch.stack([header(), header(), header()])
    headers[2, place] += 1
    name = (EQUAL | EQUAL_IF_REPLICATED)[place]
    with pytest.raises(ValueError, match="ranks disagree about") as refused:
        check_headers(headers, replicated=True)
    assert f"ranks disagree about {name}: " in str(refused.value)
    assert "on rank 2; every rank must make the same calls" in str(refused.value)


@pytest.mark.parametrize("place", EQUAL_IF_REPLICATED)
def test_tokens_may_differ_where_they_are_not_the_same_on_every_rank(place: int) -> None:
    headers = torch.stack([header(), header()])
    headers[1, place] += 1
    check_headers(headers, replicated=False)


@pytest.mark.parametrize("name", WORDS_OF_A_CALL)
def test_the_call_is_among_the_words(name: str) -> None:
    place = WORDS_OF_A_CALL.index(name)
    other: Any = tuple(number + (i == place) for i, number in enumerate(CALL))
    with pytest.raises(ValueError, match=f"ranks disagree about the {name}"):
        check_headers(torch.stack([header(), header(other)]), replicated=False)


def test_tokens_are_among_the_words() -> None:
    """How many there are, and whose experts are whose, also of tokens whose ids have one sum."""
    assert header()[TOKENS] == 3
    sums = set()
    for order in permutations([[0, 3], [3, 0], [1, 2], [2, 1]]):
        ids_TK = torch.tensor(order)
        sums.add(int(write_header((0, 0, 0, 0), torch.ones(4, 8), ids_TK, CALL, replicated=True)[CHECKSUM]))
    assert len(sums) == 24


def test_ids_at_the_edge() -> None:
    weights_TK = torch.ones(1, 2)
    assert find_bad_value(torch.tensor([[-1, 5]]), weights_TK, 6) == (0, 0, 0, 0)
    assert find_bad_value(torch.tensor([[0, 6]]), weights_TK, 6) == (7, 0, 1, 6)
    assert find_bad_value(torch.tensor([[-2, 0]]), weights_TK, 6) == (7, 0, 0, -2)


def test_a_problem_goes_before_what_differs() -> None:
    headers = torch.stack([header(), header()])
    headers[1, 0] += 1
    headers[1, PROBLEM : PROBLEM + 3] = torch.tensor([3, 4, 2])
    with pytest.raises(ValueError, match="on rank 1, the routing has 4 choices a token; this exchange was"):
        check_headers(headers, replicated=False)


def test_every_call_has_its_number_and_placement(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of an exchange with one rank: 1, 2, 3, the last two with experts elsewhere."""
    exchange = Exchange(contiguous(2, 1), 8, 2, transport="alltoall")
    seen: list[list[int]] = []

    def look(headers_WH: torch.Tensor, replicated: bool) -> None:
        seen.append(headers_WH[0, 3:5].tolist())

    monkeypatch.setattr("imbrex.exchange.bytes.check_headers", look)
    for call in range(3):
        exchange.dispatch(torch.ones(3, 8), Routing(ids_TK=IDS_TK, weights_TK=torch.ones(3, 2)))
        if call == 0:
            exchange.relocate(from_slots([[1, 0]], 2))
    calls, places = zip(*seen, strict=True)
    assert calls == (1, 2, 3)
    assert places[0] != places[1] == places[2]
