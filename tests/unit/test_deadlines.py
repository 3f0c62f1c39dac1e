"""A stream that stands in a wait for longer than the time-out: the group is aborted, and its user told."""

from __future__ import annotations

import threading
import time
import warnings
from collections.abc import Callable
from typing import Any

import pytest
from torch._C._distributed_c10d import HashStore

from imbrex.runtime import deadlines, waits

TIMEOUT_S = 0.2


class Stream:
    """Does what is queued at once, until it has to wait for something."""

    stream: Stream
    captured: list[Callable[[], object]] | None = None

    def __init__(self) -> None:
        self.value, self.queue, self.busy = 0, list[Callable[[], object]](), False
        Stream.stream = self

    @staticmethod
    def current() -> tuple[int, int]:
        return 0, 0

    def write(self, number: int) -> None:
        self.do(lambda: setattr(self, "value", number))

    def do(self, work: Callable[[], object]) -> None:
        if Stream.captured is not None:
            Stream.captured.append(work)
            return
        self.queue.append(work)
        self.go_on(busy=self.busy)

    def go_on(self, *, busy: bool = False) -> None:
        self.busy = busy
        while self.queue and not self.busy:
            self.queue.pop(0)()


class Counts:
    """Stands in for `ReplayCounters`."""

    def __init__(self) -> None:
        self.numbers = list[int]()

    def take(self) -> int:
        self.numbers.append(0)
        return len(self.numbers) - 1

    def count(self, index: int) -> None:
        Stream.stream.do(lambda: self.numbers.__setitem__(index, self.numbers[index] + 1))

    def __getitem__(self, index: int) -> int:
        return self.numbers[index]


class Group:
    """Peers that come to no collective from number `silent_from` on, until they are given up."""

    def __init__(self, silent_from: int = 1000) -> None:
        self.calls, self.silent_from, self.store = 0, silent_from, HashStore()
        self.aborted = threading.Event()

    def size(self) -> int:
        return 2

    def get_group_store(self) -> HashStore:
        return self.store

    def abort(self) -> None:
        self.aborted.set()
        Stream.stream.go_on()

    def begin(self) -> Any:
        self.calls += 1
        return Work(self)

    @property
    def silent(self) -> bool:
        return self.calls > self.silent_from


class Work:
    """group: whose peers a replay asks again."""

    def __init__(self, group: Group) -> None:
        self.group, self.silent = group, group.silent

    def wait(self) -> None:
        if self.silent or Stream.captured is not None:
            Stream.stream.do(lambda: setattr(Stream.stream, "busy", self.group.silent))


@pytest.fixture(autouse=True)
def streams(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deadlines, "Word", Stream)
    monkeypatch.setattr(deadlines, "ReplayCounters", Counts)
    monkeypatch.setattr(Stream, "captured", None)
    monkeypatch.setattr("torch.cuda.is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(waits, "deadlines", deadlines.Deadlines())


def call(group: Any, what: str = "dispatch", timeout_s: float = TIMEOUT_S) -> None:
    work = waits.start(what, group.begin, timeout_s, group)
    waits.finish(what, work, timeout_s, on_host=False, group=group)


def test_a_wait_that_does_not_end_is_aborted_and_named() -> None:
    group, other = Group(silent_from=2), Group()
    waits.enter(3)
    for _ in range(3):
        call(group)  # returns: only the stream waits
    call(other)
    began = time.monotonic()
    assert group.aborted.wait(20 * TIMEOUT_S)
    assert time.monotonic() - began > TIMEOUT_S / 2
    said = "rank 0 lost its peers in dispatch of layer 3: a rank was silent for 0.2 s"
    for ask in (lambda: waits.refuse_lost(group), lambda: call(group, "combine")):  # pyright: ignore
        with pytest.raises(waits.RankLostError, match=said):
            ask()
    assert group.calls == 3
    waits.refuse_lost(other)  # pyright: ignore
    call(other)
    assert not other.aborted.is_set()


def test_nobody_waits_for_a_rank_whose_program_has_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Live and in replays, though the time-out is far."""
    monkeypatch.setattr(deadlines, "ASK_S", TIMEOUT_S / 4)
    live, replayed = Group(silent_from=0), Group()
    call(replayed, timeout_s=60.0)
    replay = capture(replayed, monkeypatch, timeout_s=60.0)
    replayed.silent_from = 0
    why = "the program of rank 1 has ended with ValueError: no such batch"
    for group, wait in ((live, lambda: call(live, timeout_s=60.0)), (replayed, replay)):
        wait()
        assert not group.aborted.wait(2 * TIMEOUT_S)
        group.store.set("imbrex/failed", why)
        assert group.aborted.wait(20 * TIMEOUT_S)
        with pytest.raises(waits.RankLostError, match=f"^rank 0 lost its peers in [a-z]+ .*: {why}$"):
            waits.refuse_lost(group)  # pyright: ignore


def test_a_rank_that_compiles_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Live and in replays, until it does not any more."""
    compiling = [1]
    monkeypatch.setattr(deadlines, "who_compiles", lambda: compiling)
    live, replayed = Group(silent_from=0), Group()
    call(replayed)
    replay = capture(replayed, monkeypatch)
    replayed.silent_from = 0
    for group, wait in ((live, lambda: call(live)), (replayed, replay)):
        compiling[:] = [1]
        wait()
        assert not group.aborted.wait(3 * TIMEOUT_S)
        waits.refuse_lost(group)  # pyright: ignore
        compiling.clear()
        assert group.aborted.wait(20 * TIMEOUT_S)


def test_a_stream_that_is_busy_before_the_wait_loses_nobody() -> None:
    group = Group()
    call(group)
    Stream.stream.do(lambda: setattr(Stream.stream, "busy", True))  # a long product
    call(group)
    time.sleep(3 * TIMEOUT_S)
    assert not group.aborted.is_set()
    Stream.stream.go_on()
    time.sleep(2 * TIMEOUT_S)
    assert not group.aborted.is_set()
    waits.refuse_lost(group)  # pyright: ignore


def capture(
    group: Group, monkeypatch: pytest.MonkeyPatch, timeout_s: float = TIMEOUT_S
) -> Callable[[], None]:
    """A replay of one call."""
    captured: list[Callable[[], object]] = []
    monkeypatch.setattr(Stream, "captured", captured)
    monkeypatch.setattr("torch.cuda.is_current_stream_capturing", lambda: True)
    call(group, "combine", timeout_s)
    monkeypatch.setattr(Stream, "captured", None)
    monkeypatch.setattr("torch.cuda.is_current_stream_capturing", lambda: False)

    def replay() -> None:
        for work in captured:
            Stream.stream.do(work)

    return replay


def test_a_replay_that_does_not_end_is_aborted_and_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that ends is not, however often, nor while it waits for less than the time-out."""
    group = Group()
    call(group)
    replay = capture(group, monkeypatch)
    end = time.monotonic() + 3 * TIMEOUT_S
    while time.monotonic() < end:
        replay()
        time.sleep(TIMEOUT_S / 50)
    group.silent_from = 0
    replay()
    time.sleep(TIMEOUT_S / 2)
    assert not group.aborted.is_set()
    waits.refuse_lost(group)  # pyright: ignore
    assert group.aborted.wait(20 * TIMEOUT_S)
    with pytest.raises(waits.RankLostError, match=r"in combine.*: a rank was silent for 0.2 s"):
        waits.refuse_lost(group)  # pyright: ignore


def test_replays_that_always_stand_in_another_wait_lose_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whenever one looks: a replay is in its wait, but not in the same."""
    group = Group()
    call(group)
    replay = capture(group, monkeypatch)
    group.silent_from = 0
    replay()
    for _ in range(6):
        time.sleep(TIMEOUT_S / 2)
        Stream.stream.go_on()
        replay()
    assert not group.aborted.is_set()
    Stream.stream.go_on()


def test_a_capture_before_any_call_says_that_nobody_bounds_it(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.warns(UserWarning, match="a captured wait over NCCL .* make one such call before"):
        capture(Group(), monkeypatch)


def test_where_streams_cannot_tell_it_is_said_once_and_calls_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: Stream, number: int) -> None:
        raise RuntimeError("a stream cannot write to host memory: no")

    monkeypatch.setattr(Stream, "write", refuse)
    group = Group()
    with pytest.warns(UserWarning, match="not bounded by timeout= here: a stream cannot write"):
        call(group)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        call(group)
    assert group.calls == 2
