"""A stream that stands in a wait for longer than the time-out: the group is aborted, and its user told."""

from __future__ import annotations

import threading
import time
import warnings
from collections.abc import Callable
from typing import Any

import pytest

from imbrex.runtime import deadlines, waits

TIMEOUT_S = 0.2


class Stream:
    """Does what is queued at once, until it has to wait for something."""

    stream: Stream

    def __init__(self) -> None:
        self.value, self.queue, self.busy = 0, list[Callable[[], object]](), False
        Stream.stream = self

    @staticmethod
    def current() -> str:
        return "the stream"

    def write(self, number: int) -> None:
        self.do(lambda: setattr(self, "value", number))

    def do(self, work: Callable[[], object]) -> None:
        self.queue.append(work)
        self.go_on(busy=self.busy)

    def go_on(self, *, busy: bool = False) -> None:
        self.busy = busy
        while self.queue and not self.busy:
            self.queue.pop(0)()


class Group:
    """Peers that come to no collective from number `silent_from` on, until they are given up."""

    def __init__(self, silent_from: int = 1000) -> None:
        self.calls, self.silent_from = 0, silent_from
        self.aborted = threading.Event()

    def size(self) -> int:
        return 2

    def abort(self) -> None:
        self.aborted.set()
        Stream.stream.go_on()

    def begin(self) -> Any:
        self.calls += 1
        return Work(silent=self.calls > self.silent_from)


class Work:
    def __init__(self, *, silent: bool) -> None:
        self.silent = silent

    def wait(self) -> None:
        if self.silent:
            Stream.stream.do(lambda: setattr(Stream.stream, "busy", True))


@pytest.fixture(autouse=True)
def streams(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deadlines, "Word", Stream)
    monkeypatch.setattr("torch.cuda.is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(waits, "deadlines", deadlines.Deadlines())


def call(group: Any, what: str = "dispatch") -> None:
    work = waits.start(what, group.begin, TIMEOUT_S, group)
    waits.finish(what, work, TIMEOUT_S, on_host=False, group=group)


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


def test_what_is_captured_is_not_watched(monkeypatch: pytest.MonkeyPatch) -> None:
    group = Group(silent_from=1)
    call(group)
    monkeypatch.setattr("torch.cuda.is_current_stream_capturing", lambda: True)
    call(group)
    Stream.stream.queue.clear()
    time.sleep(3 * TIMEOUT_S)
    assert not group.aborted.is_set()


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
