"""One rank's side of an exchange by events: its messages, its calls, and its patience."""

from __future__ import annotations

import math
import re
import weakref
from collections import deque
from collections.abc import Sequence
from enum import Enum
from fractions import Fraction
from typing import Any, NamedTuple, Protocol, cast

import torch
from torch import Tensor

from imbrex.contracts import Geometry, Routing, RowExchange
from imbrex.exchange.agreement import PROBLEMS, explain, find_problem
from imbrex.overlap.events.budget import Budget
from imbrex.overlap.events.ledger import Kind
from imbrex.runtime.waits import Deadline, RankLostError
from imbrex.transport.collective import Collective
from imbrex.transport.messages import Envelope, Mail

MEMORY = 200
"""Waits that a learnt tau remembers."""
FEWEST = 20
"""Waits from which on one is learnt; until then patience has no end."""
LEAD = 16
"""Calls that a peer may be behind; further behind it gets no rows, and is not waited for."""

Letter = tuple[int, Envelope, Tensor]


class Stage(Enum):
    """A part of a call that is waited for. Waits are learnt for each by itself."""

    PACKETS = "packets"
    REPLIES = "replies"


class Patience:
    """How long to wait for the last peers. tau: seconds; `p95`, so long as 95 % of the last waits took; or
    `1.5 p50`, until a call has taken 1.5 times as long as half of the last did. every: of so many calls,
    numbered alike on all ranks, one at most is given up.

    A wait that was given up counts as endless: of the last 200 no more than the rest is ever given up.
    """

    def __init__(self, tau: float | str, every: int = 1) -> None:
        self.tau, self.every = tau, every
        self.waits = {stage: deque[float](maxlen=MEMORY) for stage in Stage}
        self.given_up_in: int | None = None
        self.learnt = learnt(tau) if isinstance(tau, str) else None

    @property
    def from_begin(self) -> bool:
        """Whether waits count from when a call began; else from when no more than epsilon are missing."""
        return self.learnt is not None and self.learnt.factor is not None

    def seconds(self, call: int, stage: Stage = Stage.REPLIES) -> float:
        """How long this call's last peers are waited for."""
        before, waits = self.given_up_in, self.waits[stage]
        if before is not None and before != call and before // self.every == call // self.every:
            return math.inf
        if self.learnt is None:
            return cast("float", self.tau)
        if len(waits) < FEWEST:
            return math.inf
        ordered, share = sorted(waits), self.learnt.share
        given_up = sum(map(math.isinf, ordered))
        if given_up + 1 > (1 - share) * min(MEMORY, len(ordered) + 1):
            return math.inf
        return (self.learnt.factor or 1.0) * ordered[math.ceil(share * len(ordered)) - 1]

    def remember(self, waited_s: float, stage: Stage = Stage.REPLIES) -> None:
        self.waits[stage].append(waited_s)

    def give_up(self, call: int, stage: Stage = Stage.REPLIES) -> None:
        self.given_up_in = call
        self.waits[stage].append(math.inf)


class Learnt(NamedTuple):
    """A quantile of what was learnt, and how many times that. share: exact, as who counts by it must be."""

    share: Fraction
    factor: float | None


def learnt(tau: str) -> Learnt | None:
    """The meaning of `p95` or `1.5 p50`; `None` where a text asks for nothing that is learnt."""
    match = re.fullmatch(r"(?:(\d+(?:\.\d+)?) )?p(\d{1,2}(?:\.\d+)?)", tau, re.ASCII)
    if match is None or not float(match[2]) or not 1 <= float(match[1] or 1) < math.inf:
        return None
    return Learnt(Fraction(match[2]) / 100, float(match[1]) if match[1] else None)


class Record(Protocol):
    """A call that messages may still be for."""

    letters: list[Letter]


class Seat:
    """The memory of an exchange between its calls. Made in its first call, by all ranks together."""

    def __init__(self, exchange: RowExchange, patience: Patience, epsilon: int, budget: float = 1.0) -> None:
        transport, geometry = exchange.transport, exchange.geometry
        assert isinstance(transport, Collective)
        self.mail = Mail(transport, "schedule events")
        self.rank, self.peers = geometry.rank, [r for r in range(exchange.world_size) if r != geometry.rank]
        self.timeout_s, self.patience, self.epsilon = transport.timeout_s, patience, epsilon
        self.budget = Budget(budget, exchange.world_size)
        self.calls = 0
        self.early: dict[int, list[Letter]] = {}
        self.open: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
        self.silent: dict[int, Deadline] = {}
        self.last_call: dict[int, int] = {}
        self.refused: set[int] = set()

    def begin(self, record: Record) -> int:
        """Number a call; what came for it before is its first letters."""
        self.calls += 1
        self.open[self.calls] = record
        early = self.early.pop(self.calls, [])
        for letter in early:
            self._receive(letter)
        record.letters += early
        self._raise_problem(record.letters)
        return self.calls

    def check_in(self, geometry: Geometry, x_TD: Tensor, routing: Routing) -> None:
        """Raise ValueError on every rank where this one's input cannot be dispatched."""
        problem = find_problem(x_TD, routing, geometry, torch.device("cpu"))
        if not problem[0]:
            return
        self.calls += 1
        self.refused.add(self.calls)
        self.early.pop(self.calls, None)
        number, *details = problem
        for peer in self.peers:
            said_details = (number, *details, 0)
            self.mail.send(peer, Envelope(call=self.calls, kind=Kind.PROBLEM, details=said_details))
        raise ValueError(f"dispatch: on rank {self.rank}, {explain(problem)}")

    def far_behind(self) -> list[int]:
        """Peers of whom nothing has come since many calls: more rows would only pile up there. None where
        they are more than may be missing, or patience is spent."""
        if math.isinf(self.patience.seconds(self.calls)):
            return []
        far_ranks = [p for p in self.peers if self.calls - self.last_call.get(p, 0) > LEAD]
        may = len(far_ranks) <= self.epsilon and self.budget.covers(2 * len(far_ranks))
        return far_ranks if may else []

    def pump(self, timeout_s: float) -> bool:
        """Hand out what has come, waiting for something for at most `timeout_s`; whether anything has. Raises
        what a peer found wrong with its input of a call that this rank has begun, or whom it lost."""
        bad_letters, letters = [], self.mail.take(timeout_s)
        for letter in letters:
            peer, envelope, _ = letter
            self.silent.pop(peer, None)
            self.last_call[peer] = max(self.last_call.get(peer, 0), envelope.call)
            record = self.open.get(envelope.call)
            if envelope.call <= self.calls:
                self._receive(letter)
            if envelope.kind in (Kind.PROBLEM, Kind.LOST) and envelope.call <= self.calls:
                bad_letters.append(letter)
            elif record is not None:
                record.letters.append(letter)
            elif envelope.call > self.calls:
                self.early.setdefault(envelope.call, []).append(letter)
            # Else it is of a call that this rank has left: too late for anything.
        self._raise_problem(bad_letters)
        return bool(letters)

    def _receive(self, letter: Letter) -> None:
        """Take what a packet brings of its sender's allowance: in its own call, or later."""
        peer, envelope, _ = letter
        if envelope.kind == Kind.PACKET:
            _, gift, choices, *_ = envelope.details
            self.budget.receive(peer, gift, choices)

    def miss(self, peers: Sequence[int]) -> None:
        """Note on whom this rank gave up. One that stays silent for the time-out is lost, however patient."""
        for peer in peers:
            deadline = self.silent.setdefault(peer, Deadline(self.timeout_s))
            if deadline.left() <= 0:
                raise self.lost("any call", [peer], f"was silent for {self.timeout_s:g} s")

    def wait(self, what: str, missing: Sequence[int], deadline: Deadline, at_most_s: float) -> None:
        """Wait for something to come, at most `at_most_s`. RankLostError where the fatal `deadline` has
        passed, or one of those who are missing has died."""
        gone_ranks = sorted(self.mail.gone & set(missing))
        if gone_ranks:
            # What it said before it left may be all that was missing, or why it left.
            if self.pump(0.0):
                return
            raise self.lost(what, gone_ranks, "died or left")
        left = deadline.left()
        if left <= 0:
            raise self.lost(what, missing, f"was silent for {self.timeout_s:g} s")
        self.pump(min(at_most_s, left))

    def lost(self, what: str, ranks: Sequence[int], why: str) -> RankLostError:
        """The error that names the ranks; the other peers hear of the first, and lose the same."""
        for peer in self.peers:
            self.mail.send(peer, Envelope(call=self.calls, kind=Kind.LOST, details=(ranks[0], 0, 0, 0, 0)))
        names = " and ".join(f"rank {rank}" for rank in ranks)
        return RankLostError(f"rank {self.rank} lost its peers in {what}: {names} {why}")

    def _raise_problem(self, letters: Sequence[Letter]) -> None:
        for peer, envelope, _ in letters:
            number, *details = envelope.details
            if envelope.kind == Kind.PROBLEM and envelope.call in self.refused:
                # Another's problem, or the own one, was this call's error already.
                continue
            if envelope.kind == Kind.PROBLEM:
                self.refused.add(envelope.call)
                raise ValueError(f"dispatch: on rank {peer}, {PROBLEMS[number].format(*details)}")
            if envelope.kind == Kind.LOST and number != self.rank:
                raise RankLostError(
                    f"rank {self.rank} lost its peers: rank {peer} left, for lack of rank {number}"
                )


__all__ = ["Letter", "Patience", "Seat", "Stage", "learnt"]
