"""A migration from its opening to the decision about it, and the ranks' votes."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass

import torch.distributed as dist
from torch import Tensor

from imbrex.balancer.channel import Channel
from imbrex.balancer.migration import Change
from imbrex.balancer.protocol import Standing, Vote
from imbrex.balancer.renewal import checksum_of
from imbrex.runtime.words import words


@dataclass(frozen=True, kw_only=True, slots=True)
class Migrated:
    """A finished migration. arrived: rows by (layer, slot). seconds: planning and moving."""

    changes: Sequence[Change]
    arrived: Mapping[tuple[int, int], Sequence[Tensor]]
    seconds: float


class Round:
    """An open migration: planned and moved by `future`, in the background. cast: votes are under way."""

    def __init__(self, number: int, future: Future[Migrated]) -> None:
        self.number, self.future, self.standing, self.cast = number, future, Standing(), False

    @property
    def vote(self) -> Vote:
        if not self.future.done():
            return Vote.MOVING
        return Vote.READY if self.future.exception() is None else Vote.FAILED

    @property
    def checksum(self) -> int:
        """A checksum of the placements planned, once ready: ranks whose plans differ must not switch."""
        if self.vote != Vote.READY:
            return 0
        return checksum_of(self.future.result().changes)


def migrate(
    plan: Callable[[], list[Change]],
    move: Callable[[Sequence[Change]], Mapping[tuple[int, int], Sequence[Tensor]]],
) -> Migrated:
    """Plan, then move. Runs in the background."""
    begin = time.perf_counter()
    changes = plan()
    arrived = move(changes) if changes else {}
    return Migrated(changes=changes, arrived=arrived, seconds=time.perf_counter() - begin)


class Ballots:
    """An all-gather of a few numbers, begun in one step and read in the next."""

    def __init__(self, channel: Channel) -> None:
        self.channel = channel
        self._work: dist.Work | None = None
        self._gathered = words()[None]

    def cast(self, *numbers: int) -> None:
        """Say this rank's numbers to all."""
        self._gathered, self._work = self.channel.gather(words(*numbers))

    def read(self) -> list[list[int]]:
        """The words of every rank, by rank. Raises RankLostError where one said nothing in time."""
        self.channel.finish("votes", self._work)
        self._work = None
        return self._gathered.tolist()
