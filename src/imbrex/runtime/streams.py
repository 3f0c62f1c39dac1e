"""Work beside the caller: threads on a CPU, a stream on a GPU. The only home of streams.

Collectives need none of their own: gloo has threads and NCCL a stream. A lane is for what must follow a
collective without the caller waiting for it, such as passing rows on that have just arrived.
"""

from __future__ import annotations

import ctypes
import importlib
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch

THREADS = 2
"""Two, so that work which waits for its rows does not hold up work whose rows are there."""

POLL_S = 1e-4
"""Seconds between two looks at a mark."""


class Lane:
    """Takes work and does it beside the caller, begun in the order given; with one of `threads`, also done in
    that order."""

    def __init__(self, device: torch.device, threads: int = THREADS) -> None:
        self.device, self._max_threads = device, threads
        self._threads: ThreadPoolExecutor | None = None
        self._stream: Any = None

    def start(self, work: Callable[[], Any]) -> Begun:
        """Begin `work`. On a CPU it may wait for what other ranks do, in their work of the same place in
        their order at the latest: ranks that give works in one order never wait in a circle. On a GPU it is
        queued at once, behind what the caller has queued so far, and must not synchronise."""
        if self.device.type == "cuda":
            return self._queue(work)
        if self._threads is None:
            self._threads = ThreadPoolExecutor(self._max_threads, thread_name_prefix="imbrex-lane")
        return Begun(future=self._threads.submit(work))

    def _queue(self, work: Callable[[], Any]) -> Begun:
        if self._stream is None:
            self._stream = torch.cuda.Stream(self.device)
        self._stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self._stream):
            result = work()
        return Begun(result=result, over=Mark(self.device, self._stream))

    def close(self) -> None:
        if self._threads is not None:
            self._threads.shutdown(wait=False, cancel_futures=True)
            self._threads = None


class Begun:
    """Work under way."""

    def __init__(self, future: Future | None = None, result: Any = None, over: Mark | None = None) -> None:
        self.future, self.result, self.over = future, result, over

    def finish(self) -> Any:
        """Wait for it, on a GPU with the current stream only, and for nothing that the lane took later.
        Returns its result; raises what it raised."""
        if self.future is not None:
            return self.future.result()
        if self.over is not None:
            self.over.hold()
        return self.result


class Mark:
    """A point in what is queued on a stream, the caller's where none is given. On a CPU, the past."""

    def __init__(self, device: torch.device, stream: Any = None) -> None:
        self._event: Any = None
        if device.type == "cuda":
            self._event = torch.cuda.Event()
            self._event.record(stream or torch.cuda.current_stream(device))

    @property
    def passed(self) -> bool:
        return self._event is None or self._event.query()

    def wait(self, timeout_s: float) -> None:
        """Return when the device has come here; other threads run meanwhile. TimeoutError after that long."""
        end = time.monotonic() + timeout_s
        while not self.passed:
            if time.monotonic() > end:
                raise TimeoutError(f"a GPU has not come to a point in its work within {timeout_s:g} s")
            time.sleep(POLL_S)

    def hold(self, stream: Any = None) -> None:
        """Make what is queued from now on, on `stream` or on the caller's, wait for it."""
        if self._event is not None:
            self._event.wait(stream)


class Word:
    """A word of host memory that streams of the current device write numbers to, as they come to it."""

    def __init__(self) -> None:
        self._driver = importlib.import_module("cuda.bindings.driver")
        self._memory = torch.zeros(1, dtype=torch.int64, device="cpu", pin_memory=True)
        self._at = self._memory.data_ptr()
        self._word = ctypes.c_int64.from_address(self._at)

    @staticmethod
    def current() -> tuple[int, int]:
        """Device and handle of the caller's stream."""
        stream = torch.cuda.current_stream()
        return stream.device.index, stream.cuda_stream

    def write(self, number: int) -> None:
        """Queue it on the caller's stream. Raises RuntimeError where the driver does not."""
        (error,) = self._driver.cuStreamWriteValue64(self.current()[1], self._at, number, 0)
        if int(error):
            raise RuntimeError(f"a stream cannot write to host memory: {error}")

    @property
    def value(self) -> int:
        return self._word.value


class Tallies:
    """Numbers in host memory that captured streams of the current device count up, one more at every replay.

    What is written at a capture is the same at each replay, so a GPU's memory does the counting. Made before
    any capture: memory that is made within one is cleared by every replay.
    """

    ROOM = 4096

    def __init__(self) -> None:
        with torch.inference_mode(False):
            self._there = torch.zeros(self.ROOM, dtype=torch.int64, device="cuda")
            self._here = torch.zeros(self.ROOM, dtype=torch.int64, device="cpu", pin_memory=True)
        self._numbers = (ctypes.c_int64 * self.ROOM).from_address(self._here.data_ptr())
        self._num_words = 0

    def take(self) -> int | None:
        """The index of a number that nobody counts yet; `None`: all are taken."""
        self._num_words += 1
        return self._num_words - 1 if self._num_words <= self.ROOM else None

    def count(self, index: int) -> None:
        """Queue it on the caller's stream."""
        there = self._there[index : index + 1]
        there.add_(1)
        self._here[index : index + 1].copy_(there, non_blocking=True)

    def __getitem__(self, index: int) -> int:
        return self._numbers[index]


class Aside:
    """A stream for a thread of its own: its work waits for nothing but the marks that it is given."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def run(self, work: Callable[[], object], *after: Mark) -> Mark:
        """Queue `work` behind `after`; the mark of its end."""
        if self._stream is None:
            work()
            return Mark(self.device)
        with torch.cuda.stream(self._stream):
            for mark in after:
                mark.hold(self._stream)
            work()
            return Mark(self.device)


class Line:
    """Works on a stream beside the caller's, one after the other, each behind what the caller has queued so
    far. On a CPU the caller works.

    A work that can begin does so before anything that the caller queues from then on: else products that take
    all multiprocessors could begin a microsecond earlier, and a work of a few would wait for their end.
    Memory of either stream may be freed by the caller as soon as he has waited for the works that use it.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._stream = torch.cuda.Stream(device, priority=-1) if device.type == "cuda" else None
        self._last: Queued | None = None

    def start(self, work: Callable[[], Any]) -> Queued:
        """Queue `work`; `finish` of what comes back waits for it and returns its result."""
        if self._stream is None:
            return Queued(work(), Mark(self.device), Mark(self.device))
        caller, before = torch.cuda.current_stream(self.device), self._last
        Mark(self.device, caller).hold(self._stream)
        begins = Mark(self.device, self._stream)
        with torch.cuda.stream(self._stream):
            result = work()
        queued = self._last = Queued(result, begins, Mark(self.device, self._stream))
        if before is None or before.waited:
            begins.hold(caller)
        else:
            before.next = queued
        return queued


class Queued:
    """A work in a line."""

    def __init__(self, result: Any, begins: Mark, over: Mark) -> None:
        self.result, self.begins, self.over = result, begins, over
        self.waited = False
        self.next: Queued | None = None

    def finish(self) -> Any:
        """Wait for it, on a GPU with the caller's stream only; once."""
        self.over.hold()
        self.waited = True
        if self.next is not None:
            self.next.begins.hold()
        result, self.result = self.result, None
        return result


__all__ = ["Aside", "Begun", "Lane", "Line", "Mark"]
