"""Patience that is learnt, and messages that wait for nobody."""

from __future__ import annotations

import math
import random
import time
import weakref
from typing import Any

import pytest
import torch

from imbrex.kernels.events.events import ENDLESS
from imbrex.kernels.events.events import Patience as DevicePatience
from imbrex.overlap import Events
from imbrex.overlap.events.budget import Budget
from imbrex.overlap.events.ledger import Kind
from imbrex.overlap.events.seat import FEWEST, LEAD, Patience, Seat, Stage
from imbrex.runtime.waits import Deadline, RankLostError
from imbrex.transport.messages import Envelope


def test_a_learnt_tau_gives_up_no_more_than_its_share() -> None:
    patience = Patience("p90")
    assert patience.seconds(0) == math.inf
    for _ in range(20):
        patience.remember(0.01)
    assert patience.seconds(20) == 0.01
    given_up, drawn = 0, random.Random(0)
    for step in range(400):
        late_s = 0.5 + drawn.random() if step % 4 == 0 else 0.02
        if patience.seconds(step) < late_s:
            given_up += 1
            patience.give_up(step)
        else:
            patience.remember(late_s)
        waits = patience.waits[Stage.REPLIES]
        assert sum(map(math.isinf, waits)) <= 0.1 * len(waits)
    # A quarter of the waits is long; a tenth of all, the longest, may be given up.
    assert 10 <= given_up <= 44


def given_up_at_most(tau: str, waits: int) -> int:
    """How many of so many waits may have been given up while there is still patience for one."""
    patience, given_up = Patience(tau), 0
    patience.waits[Stage.REPLIES].extend([0.01] * waits)
    while patience.seconds(0) < math.inf:
        patience.waits[Stage.REPLIES][given_up] = math.inf
        given_up += 1
    return given_up


@pytest.mark.parametrize("percent", [7, 33, 60, 80, 90, 95])
def test_shares_are_exact_as_those_of_a_device_are(percent: int) -> None:
    """A fifth of 25 is 5, though 1 - 0.8 is less than 0.2."""
    for waits in range(FEWEST, 200):
        assert given_up_at_most(f"p{percent}", waits) == (100 - percent) * (waits + 1) // 100


def test_patience_by_the_whole_call_is_learnt_of_usual_ones() -> None:
    """Late calls do not move the median, and each stage has its own."""
    patience = Patience("1.5 p50")
    assert patience.from_begin
    for step in range(100):
        patience.remember(5.0 if step % 10 == 0 else 0.02)
        patience.remember(0.01, Stage.PACKETS)
    assert patience.seconds(101) == pytest.approx(0.03)
    assert patience.seconds(101, Stage.PACKETS) == pytest.approx(0.015)
    assert not Patience("p95").from_begin


@pytest.mark.parametrize("tau", ["p0", "0.5 p50", "p", "p٥", "1.5", "1.5p50", "fast", "9" * 400 + " p50"])
def test_what_asks_for_nothing_that_is_learnt_is_refused(tau: str) -> None:
    with pytest.raises(ValueError, match=r"give seconds, a quantile of the last waits as p95"):
        Events(tau, 1)


def test_a_fixed_tau_forgets_nothing_that_matters() -> None:
    patience = Patience(0.5)
    patience.give_up(1)
    assert (patience.seconds(1), patience.seconds(2)) == (0.5, 0.5)


def test_one_call_of_so_many_is_given_up_by_all_ranks_alike() -> None:
    """Ranks that gave up in different calls have patience again in the same one."""
    ranks = [Patience(0.5, every=19) for _ in range(2)]
    ranks[0].give_up(40)
    ranks[1].give_up(55)
    # A call may be given up twice: its packets, then its replies.
    assert ranks[1].seconds(55) == 0.5
    assert [patience.seconds(56) for patience in ranks] == [math.inf] * 2
    assert [patience.seconds(57) for patience in ranks] == [0.5] * 2


PATIENT = Events(0.05, 1), Events("p95", 2, 19), Events("1.5 p50", 1, budget=0.0099), Events()


@pytest.mark.parametrize("schedule", PATIENT)
def test_a_name_says_everything(schedule: Events) -> None:
    again = Events.of(schedule.name)
    assert again is not None
    assert again.__reduce__() == schedule.__reduce__()


def test_a_name_with_other_spaces_is_read() -> None:
    read = Events.of("events(epsilon=1,tau=p95, every = 3)")
    assert read is not None
    assert read.name == "events(tau=p95, epsilon=1, every=3)"


@pytest.mark.parametrize(
    "inside",
    ["", "epsilon=1", "tau=1", "tau=1, epsilon", "tau=1, tau=2, epsilon=1", "tau=1, eps=1, epsilon=1"],
)
def test_a_name_that_says_something_else_says_how_to_write_it(inside: str) -> None:
    with pytest.raises(ValueError, match=r"cannot be read; write events\(tau=0.05, epsilon=1\)"):
        Events.of(f"events({inside})")


def test_seconds_beyond_all_numbers_are_for_ever() -> None:
    assert Events(10**400, 1).tau == math.inf


class LastWords:
    """Mail of a peer that has sent a reply and left."""

    gone = frozenset({1})

    def __init__(self) -> None:
        self.letters: list[Any] = [(1, Envelope(call=1, kind=Kind.REPLY), None)]

    def take(self, timeout_s: float) -> list[Any]:
        letters, self.letters = self.letters, []
        return letters

    def send(self, peer: int, envelope: Envelope) -> None:
        pass


def quiet_seat() -> Any:
    seat: Any = Seat.__new__(Seat)
    seat.mail, seat.rank, seat.peers, seat.timeout_s = LastWords(), 0, [1], 9.0
    seat.calls, seat.early, seat.open, seat.silent, seat.last_call = 0, {}, {}, {}, {}
    seat.budget = Budget(1.0, 2)
    return seat


class Heard:
    """A call that letters are for."""

    def __init__(self) -> None:
        self.letters: list[Any] = []


def test_what_comes_before_its_call_is_kept_for_it() -> None:
    """Also of the call after the next; and what comes for one that is over is nobody's."""
    seat, sent = quiet_seat(), [2, 1, 3, 1]
    seat.open = weakref.WeakValueDictionary()
    seat.mail.letters = [
        (1, Envelope(call=call, kind=Kind.PACKET), number) for number, call in enumerate(sent)
    ]
    heard: list[list[int]] = []
    for call in (1, 2, 3):
        record = Heard()
        assert seat.begin(record) == call
        seat.pump(0.0)
        heard.append([body for _, _, body in record.letters])
        del record
    seat.mail.letters = [(1, Envelope(call=2, kind=Kind.REPLY), 4)]
    seat.pump(0.0)
    assert (heard, seat.early) == ([[1, 3], [0], [2]], {})


def test_who_is_far_behind_gets_no_rows() -> None:
    """As long as patience is for all of them, and has an end."""
    seat = quiet_seat()
    seat.peers, seat.epsilon, seat.patience = [1, 2, 3], 1, Patience(0.5)
    seat.calls, seat.last_call = 2 * LEAD, {1: 2 * LEAD, 2: LEAD, 3: LEAD - 1}
    assert seat.far_behind() == [3]
    seat.last_call[2] = 0
    assert seat.far_behind() == []
    seat.epsilon = 2
    assert seat.far_behind() == [2, 3]
    seat.budget = Budget(0.01, 4)
    seat.budget.earn(400)
    assert seat.far_behind() == []
    seat.budget, seat.patience = Budget(), Patience(math.inf)
    assert seat.far_behind() == []


def test_what_comes_with_a_packet_is_received_once_its_call_has_begun() -> None:
    """Also of one that comes too late."""
    seat = quiet_seat()
    seat.open, seat.budget, left = weakref.WeakValueDictionary(), Budget(0.01, 2), []
    seat.mail.letters = [
        (1, Envelope(call=call, kind=kind, details=(0, 10**call, 8, 0, 0)), None)
        for call, kind in ((1, Kind.PACKET), (2, Kind.PACKET), (2, Kind.REPLY), (3, Kind.PROBLEM))
    ]
    for _ in range(2):
        seat.begin(Heard())
        seat.pump(0.0)
        left.append(seat.budget.left)
    seat.mail.letters = [(1, Envelope(call=1, kind=Kind.PACKET, details=(0, 5, 9, 0, 0)), None)]
    seat.pump(0.0)
    assert [*left, seat.budget.left, seat.budget.loads] == [10, 110, 115, [0, 9]]


def test_numbers_that_a_device_has_no_room_for() -> None:
    """As patient as they say: for ever, or from the shortest wait on."""
    patience = DevicePatience(1e300, 1, 1 << 32, torch.device("cpu"), share=1e-9)
    assert (patience.tau_ns, patience.every, patience.share) == (ENDLESS, (1 << 32) - 1, 1)


def test_what_a_peer_said_before_it_left_is_heard() -> None:
    seat = quiet_seat()
    until = Deadline(9.0)
    seat.wait("combine", [1], until, 1.0)
    assert [envelope.kind for _, envelope, _ in seat.early[1]] == [Kind.REPLY]
    with pytest.raises(RankLostError, match="rank 0 lost its peers in combine: rank 1 died or left"):
        seat.wait("combine", [1], until, 1.0)


def test_a_peer_that_is_missed_while_it_compiles_is_not_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    seat, compiling = quiet_seat(), [1]
    seat.timeout_s = 0.01
    monkeypatch.setattr("imbrex.runtime.waits.who_compiles", lambda: compiling)
    for _ in range(2):
        seat.miss([1])
        time.sleep(0.02)
    compiling.clear()
    with pytest.raises(RankLostError, match="lost its peers in any call: rank 1 was silent"):
        seat.miss([1])
