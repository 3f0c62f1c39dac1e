"""Every transport keeps the contract, and the conformity suite finds the ones that do not."""

from __future__ import annotations

from threading import Thread
from typing import Any

import pytest
import torch

from imbrex.contracts import Traffic
from imbrex.testing import ConformityError, check_transport
from imbrex.transport import TRANSPORTS, TWO_TIERS, AllToAll
from imbrex.transport.collective import Collective, Done, Message
from tests.ranks.pool import Pool, Ranks

OURS = [name for name in TRANSPORTS if name not in (*TWO_TIERS, "nvlink")]


class Messages(AllToAll):
    """All rows cross as messages, however few."""

    few_bytes = 0


class Swapped(AllToAll):
    """Rows arrive in the opposite order."""

    name = "swapped"

    def begin_move(self, encoded_TB, traffic):
        return Done(super().begin_move(encoded_TB, traffic).finish().flip(0))


class Lossy(AllToAll):
    """The last byte of what comes back is lost, on the last rank only."""

    name = "lossy"

    def begin_move_back(self, encoded_MB, traffic, add=None):
        rows = super().begin_move_back(encoded_MB, traffic).finish()
        if self.rank == self.world_size - 1:
            rows[:, -1] = 0
        return Done(rows)


class Clobbers(AllToAll):
    """Writes into what it is given."""

    name = "clobbers"

    def begin_move(self, encoded_TB, traffic):
        pending = super().begin_move(encoded_TB, traffic)
        encoded_TB.zero_()
        return pending


def run_check(ranks: Ranks, transport) -> str:
    made = transport if isinstance(transport, str) else transport(ranks.group)
    try:
        check_transport(made, ranks.group)
    except ConformityError as error:
        return str(error)
    return ""


class Noted(AllToAll):
    """Remembers what it starts."""

    def __init__(self, *args) -> None:
        super().__init__(*args)
        self.begun: list[str] = []

    def _start(self, phase, op, m):
        self.begun.append(op.__name__)
        return super()._start(phase, op, m)


def run_rows(ranks: Ranks) -> tuple[list[int], list[str]]:
    transport, rank, world = Noted(ranks.group), ranks.rank, ranks.world_size
    rows = torch.tensor([[rank, to] for to in range(world) for _ in range(to + 1)], dtype=torch.uint8)
    send, receive = list(range(1, world + 1)), [rank + 1] * world
    came = transport.scatter_rows("dispatch", rows, send, receive).finish()
    assert came[:, 1].eq(rank).all()
    return came[:, 0].tolist(), transport.begun


def test_places_are_told_before_rows_leave(pool: Pool) -> None:
    """gloo's own all-to-all sends first, and the two directions of a link take turns."""
    for rank, (sources, begun) in enumerate(pool.run(4, run_rows)):
        assert sources == [source for source in range(4) for _ in range(rank + 1)]
        assert begun == ["irecv"] * 3 + ["isend"] * 3


class Sent:
    """A message that is over."""

    def wait(self, *_: Any) -> bool:
        return True


class Busy(Collective):
    """Begins nothing."""

    def start(self, phase: str, begin: Any) -> Any:
        return Sent()


class Meddling:
    """A tag; while it is compared, another thread begins a message, as a lane does."""

    def __init__(self, transport: Collective) -> None:
        self.transport = transport

    def __eq__(self, other: object) -> bool:
        lane = Thread(target=begin_one, args=(self.transport, 0))
        lane.start()
        lane.join(0.1)
        return self is other

    __hash__ = object.__hash__


def begin_one(transport: Collective, tag: Any) -> Any:
    message = Message(rows=torch.zeros(1, 1), peer=1, tag=tag)
    return transport.post("dispatch", [message], [])[0][0]


def test_a_lane_begins_messages_while_others_end() -> None:
    transport = Busy(None)
    first, tag = begin_one(transport, 0), Meddling(transport)
    begin_one(transport, Meddling(transport))
    transport.finish("dispatch", begin_one(transport, tag))
    transport.finish("dispatch", first)


def one_sided(ranks: Ranks, transport: AllToAll, most: int) -> Traffic:
    """The traffic of rows of a byte: so many from rank 3 to rank 0, one for every other pair."""
    wanted_TW = torch.zeros(most, ranks.world_size, dtype=torch.bool)
    wanted_TW[:1] = True
    wanted_TW[:, 0] |= ranks.rank == 3
    return transport.plan([wanted_TW], None)[0]


FEW = AllToAll.few_bytes


def run_asked(ranks: Ranks) -> list[bool]:
    transport = Noted(ranks.group)
    return [transport.is_few(one_sided(ranks, transport, most), 1) for most in (FEW + 1, FEW)]


def run_few(ranks: Ranks) -> list[list[str]]:
    """What a move and one back begin as messages."""
    begun = []
    for most in (FEW + 1, FEW):
        transport = Noted(ranks.group)
        traffic = one_sided(ranks, transport, most)
        rows = torch.full((most, 1), ranks.rank, dtype=torch.uint8)
        back = transport.begin_move_back(transport.begin_move(rows, traffic).finish(), traffic).finish()
        assert back.eq(ranks.rank).all()
        assert len(back) == int(traffic.splits_2W[0].sum())
        begun.append(transport.begun)
    return begun


def test_few_bytes_go_by_gloos_own_call_on_all_ranks_or_on_none(pool: Pool) -> None:
    """Ranks 1 and 2 see single bytes alone, and know of rank 3's all the same."""
    assert pool.run(4, run_asked) == [[False, True]] * 4
    for many, few in pool.run(4, run_few):
        assert many == (["irecv"] * 3 + ["isend"] * 3) * 2
        assert few == []


@pytest.mark.parametrize("world", [1, 2, 4, 8])
@pytest.mark.parametrize("transport", [*OURS, Messages])
def test_contract(pool: Pool, transport: str | type[AllToAll], world: int) -> None:
    assert pool.run(world, run_check, transport) == [""] * world


@pytest.mark.parametrize(
    ("transport", "says"),
    [
        (Swapped, "rank 0: swapped: everything, rows of 1 bytes out: row"),
        (Lossy, "rank 3: lossy: everything, rows of 1 bytes back: row"),
        (Clobbers, "the move changed what it was given"),
    ],
)
def test_a_transport_that_breaks_the_contract_is_found_on_every_rank(
    pool: Pool, transport, says: str
) -> None:
    found = pool.run(4, run_check, transport)
    assert len(set(found)) == 1
    assert says in found[0]
