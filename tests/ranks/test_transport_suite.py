"""Every transport keeps the contract, and the conformity suite finds the ones that do not."""

from __future__ import annotations

import pytest

from imbrex.testing import ConformityError, check_transport
from imbrex.transport import AllToAll
from imbrex.transport.collective import Done
from tests.ranks.pool import Pool, Ranks

OURS = ["alltoall", "allgather", "allreduce"]


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


@pytest.mark.parametrize("world", [1, 2, 4, 8])
@pytest.mark.parametrize("transport", OURS)
def test_contract(pool: Pool, transport: str, world: int) -> None:
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
