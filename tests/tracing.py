"""Says which lines coverage counts: tracing takes longer than what it traces where most of that is torch's
compiler or a search, and the ranks of a test run the same lines. Of a test with many parameters those are
counted that bring lines which nobody has run before, until one brings none.

Coverage may count twice in a process: where one that counts has started or forked it, and where pytest-cov or
multiprocessing start their own. Only the newest does until that is stopped; so all are stopped.
"""

from __future__ import annotations

import os
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

IN_PROCESSES = ("COVERAGE_PROCESS_START", "COVERAGE_PROCESS_CONFIG")
"""What makes coverage start in every Python process that is started."""
BARREN = 1
"""Parameters of a test, one after the other, that bring no new line before the others count none."""
_off = False
_barren: Counter[str] = Counter()
_elsewhere: dict[int, int] = {}


def wanted() -> bool:
    """Whether the test that runs counts its lines; ranks that it asks do as it does."""
    return not _off


def stop() -> list[Any]:
    """Count nothing in this process; what counted, the newest first."""
    newest, counting = sys.modules.get("coverage"), []
    while newest is not None and (one := newest.Coverage.current()) is not None:
        one.stop()
        counting.append(one)
    return counting


def start(one: Any) -> None:
    """Count on. Coverage wraps `os._exit` once more at every start: after some hundred tests a process that
    is forked could not end for so many calls inside each other."""
    leave = os._exit
    one.start()
    os._exit = leave


def lines() -> int:
    """How many lines this process has run of those that it counts."""
    coverage = sys.modules.get("coverage")
    one = None if coverage is None else coverage.Coverage.current()
    collector = None if one is None else one._collector
    return 0 if collector is None else sum(map(len, collector.data.values()))


def hear(process: int, count: int) -> None:
    """A process has run so many lines; none while it counts none."""
    if count:
        _elsewhere[process] = count


def may_bring_lines(test: str) -> bool:
    """Whether the next parameters of a test may run a line that no test has run."""
    return _barren[test] < BARREN


@contextmanager
def looking_for_lines(test: str) -> Iterator[None]:
    """Inside, a test that counts runs with other parameters; of processes that nobody hears of come none."""
    before = lines(), *_elsewhere.items()
    yield
    _barren[test] = _barren[test] + 1 if before == (lines(), *_elsewhere.items()) else 0


@contextmanager
def processes_do_not_count() -> Iterator[None]:
    """Python processes that start inside count nothing, nor do theirs."""
    before = {name: os.environ.pop(name) for name in IN_PROCESSES if name in os.environ}
    try:
        yield
    finally:
        os.environ.update(before)


@contextmanager
def stopped() -> Iterator[None]:
    """Nothing is counted inside, in this process or in those that start."""
    global _off
    counting, _off = stop(), True
    try:
        with processes_do_not_count():
            yield
    finally:
        _off = False
        for one in reversed(counting):
            start(one)


class Switch:
    """Stops and starts what counts this process's lines, as a rank is asked to."""

    def __init__(self) -> None:
        self._counting, self._on = stop()[:1], False
        for one in self._counting:
            one._auto_load = False  # else it reads its file when it starts, and forgets

    def turn(self, on: bool) -> None:
        if on and not self._on:
            for one in self._counting:
                start(one)
        elif self._on and not on:
            stop()
        self._on = on
