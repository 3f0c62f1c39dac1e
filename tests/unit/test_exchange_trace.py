"""The model of the push, checked against the kernel: what it does to flags and rows, traced in the emulation,
is in the order of the model's programs."""

from __future__ import annotations

import pytest

from imbrex.kernels.exchange import layout as lay
from tests.emulated import kernel
from tests.emulated.out_of_step import BEGIN, END, SEEN, SET, WRITE, Event, OutOfStep
from tests.unit.test_exchange_out_of_step import CASE, count_of, routed_case, tokens_of
from tests.unit.test_exchange_protocol import Program, Step, others, push

pytestmark = pytest.mark.skipif(not kernel.available(), reason="the emulation needs g++")
RANKS, CALLS, BUFFERS, LAG, KIND = 3, 4, 2, 2, lay.KINDS.index("push")
MUST = {("wait", "write"), ("write", "set")}
"""What must be over before what: the pairs of a program's steps whose order the model's safety stands on."""


class Places:
    """Where the words and buffers of the model lie in the heaps."""

    def __init__(self, ranks: OutOfStep) -> None:
        self.stride, exchange = ranks.heap.shape[1], ranks.exchanges[0]
        self.received = exchange.layout.received
        self.buffer_bytes = exchange.shape.token_capacity * exchange.shape.row_bytes
        self.row_bytes = exchange.shape.row_bytes
        self.recv_rows = [routed.recv_row_LWT[0] for routed in ranks.routed]

    def word(self, name: str) -> int:
        """`started 1<0` and `arrived 1<0`: in the heap of rank 1, written by rank 0, by the only block."""
        kind, (at, by) = name.split()[0], map(int, name.split()[1].split("<"))
        started, arrived = lay.Control.started.offset, lay.Control.arrived.offset
        offset = started + 4 * (64 * KIND + by)
        if kind == "arrived":
            offset = arrived + 4 * lay.MAX_BLOCKS * (64 * KIND + by)
        return at * self.stride + offset

    def rows(self, name: str) -> set[int]:
        """`rows 1<0 1`: every 16 bytes that rank 0 writes of the heap of rank 1, in buffer 1."""
        (at, by), buffer = map(int, name.split()[1].split("<")), int(name.split()[2])
        # The model's first call is 1, the kernels' first buffer 0.
        begin = at * self.stride + self.received + (buffer - 1) % BUFFERS * self.buffer_bytes
        rows = [row for row in self.recv_rows[at][by].tolist() if row >= 0]
        return {begin + row * self.row_bytes + i for row in rows for i in range(0, self.row_bytes, 16)}


def moments(
    events: list[Event], places: Places, me: int, step: Step, calls: list[tuple[int, int]]
) -> list[int]:
    """When rank `me` took a step of its program: indices of events; of a wait, when it could have passed."""
    kind, name, value = step
    if kind == "set":
        at = places.word(name)
        return [i for i, e in enumerate(events) if (e.what, e.at, e.value, e.stream) == (SET, at, value, me)]
    if kind == "wait":
        at = places.word(name)
        return [
            i for i, e in enumerate(events) if (e.what, e.at, e.stream) == (SEEN, at, me) and e.value >= value
        ][:1]
    first, last = calls[value - 1]
    where = places.rows(name)
    return [i for i in range(first, last) if events[i].what == WRITE and events[i].at in where]


def why_not_path(program: Program, events: list[Event], places: Places, me: int) -> str | None:
    """Why what rank `me` did is no path of its program, or `None`."""
    begun = [i for i, e in enumerate(events) if (e.what, e.stream) == (BEGIN, me)]
    ended = [i for i, e in enumerate(events) if (e.what, e.stream) == (END, me)]
    calls = list(zip(begun, ended, strict=True))
    steps = [step for step in program if step[0] != "read" and (step[0] != "wait" or step[2] > 0)]
    when = [moments(events, places, me, step, calls) for step in steps]
    for step, at in zip(steps, when, strict=True):
        if not at and (step[0] != "write" or places.rows(step[1])):
            return f"{step} did not happen"
    for i, before in enumerate(steps):
        for j in range(i + 1, len(steps)):
            if (before[0], steps[j][0]) in MUST and when[i] and when[j] and max(when[i]) >= min(when[j]):
                return f"{before} was not over before {steps[j]}"
    return None


def traced_pushes(seed: int) -> tuple[list[Event], Places]:
    ranks = OutOfStep(CASE, routed_case())
    for rank, exchange in enumerate(ranks.exchanges):
        for call in range(CALLS):
            given = ranks.keep(tokens_of(call, rank)), ranks.routed[rank], 1, ranks.keep(count_of(rank))
            exchange.push(*given)
    return ranks.run(seed, traced=True), Places(ranks)


@pytest.mark.parametrize("seed", range(3))
def test_pushes_are_paths_of_the_model(seed: int) -> None:
    events, places = traced_pushes(seed)
    for me, program in enumerate(push(RANKS, CALLS, BUFFERS, LAG)):
        assert why_not_path(program, events, places, me) is None
        assert sum(step[0] == "set" for step in program) == 2 * CALLS * len(others(RANKS, me))


def test_another_order_is_no_path() -> None:
    """A row that is written after its flag, and a credit that nobody waited for."""
    events, places = traced_pushes(0)
    program = push(RANKS, CALLS, BUFFERS, LAG)[0]
    flag = moments(events, places, 0, ("set", "arrived 1<0", 1), [])[0]
    row = next(i for i, e in enumerate(events) if e.what == WRITE and e.at in places.rows("rows 1<0 1"))
    late = [*events[:row], *events[row + 1 : flag + 1], events[row], *events[flag + 1 :]]
    said = "('write', 'rows 1<0 1', 1) was not over before ('set', 'arrived 1<0', 1)"
    assert why_not_path(program, late, places, 0) == said
    blind = [e for e in events if (e.what, e.at) != (SEEN, places.word("started 0<2"))]
    assert why_not_path(program, blind, places, 0) == "('wait', 'started 0<2', 1) did not happen"
