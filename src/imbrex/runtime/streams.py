"""Work beside the caller: on threads on a CPU, on another stream on a GPU. All streams of the package are
made here.

Collectives need no streams of ours: gloo has threads, and NCCL a stream. A lane is for work that follows a
collective without the caller waiting for it, such as passing on rows that have just arrived.
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
"""Two, so that work which waits for its rows does not block work whose rows have arrived."""

POLL_S = 1e-4
"""Seconds between two queries of an event."""


class Lane:
    """Runs work beside the caller. Works start in the order in which they are given; with one of `threads`
    they also run one after the other."""

    def __init__(self, device: torch.device, threads: int = THREADS) -> None:
        self.device, self._max_threads = device, threads
        self._threads: ThreadPoolExecutor | None = None
        self._stream: Any = None

    def start(self, work: Callable[[], Any]) -> StartedWork:
        """Start `work`. On a CPU it may wait for other ranks' work at the same place in their order, or
        earlier: then ranks that give works in the same order never wait in a circle. On a GPU it is queued
        at once, after what the caller has queued so far, and must not synchronise."""
        if self.device.type == "cuda":
            return self._queue(work)
        if self._threads is None:
            self._threads = ThreadPoolExecutor(self._max_threads, thread_name_prefix="imbrex-lane")
        return StartedWork(future=self._threads.submit(_run, work, torch.is_inference_mode_enabled()))

    def _queue(self, work: Callable[[], Any]) -> StartedWork:
        if self._stream is None:
            self._stream = torch.cuda.Stream(self.device)
        self._stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self._stream):
            result = work()
        return StartedWork(result=result, over=StreamEvent(self.device, self._stream))

    def close(self) -> None:
        if self._threads is not None:
            self._threads.shutdown(wait=False, cancel_futures=True)
            self._threads = None


def _run(work: Callable[[], Any], inference: bool) -> Any:
    """Run work on a lane's thread, in inference mode where its caller is: tensors made there can be written
    nowhere else."""
    with torch.inference_mode(inference):
        return work()


class StartedWork:
    """Work that a lane has started."""

    def __init__(
        self, future: Future | None = None, result: Any = None, over: StreamEvent | None = None
    ) -> None:
        self.future, self.result, self.over = future, result, over

    def finish(self) -> Any:
        """Wait for this work, and not for works that the lane got later. On a GPU only the current stream
        waits. Returns the work's result, or raises what it raised."""
        if self.future is not None:
            return self.future.result()
        if self.over is not None:
            self.over.hold()
        return self.result


class StreamEvent:
    """A CUDA event at the present point of a stream, by default the caller's. On a CPU it has always
    passed."""

    def __init__(self, device: torch.device, stream: Any = None) -> None:
        self._event: Any = None
        if device.type == "cuda":
            self._event = torch.cuda.Event()
            self._event.record(stream or torch.cuda.current_stream(device))

    @property
    def passed(self) -> bool:
        return self._event is None or self._event.query()

    def wait(self, timeout_s: float) -> None:
        """Wait until the device has reached this point, while other threads run. Raises TimeoutError after
        `timeout_s`."""
        end = time.monotonic() + timeout_s
        while not self.passed:
            if time.monotonic() > end:
                raise TimeoutError(f"a GPU has not come to a point in its work within {timeout_s:g} s")
            time.sleep(POLL_S)

    def hold(self, stream: Any = None) -> None:
        """Make work that is queued on `stream` from now on, by default the caller's, wait for this event."""
        if self._event is not None:
            self._event.wait(stream)


class Word:
    """A word of host memory, to which streams of the current device write numbers when they reach a point."""

    def __init__(self) -> None:
        self._driver = importlib.import_module("cuda.bindings.driver")
        self._memory = torch.zeros(1, dtype=torch.int64, device="cpu", pin_memory=True)
        self._at = self._memory.data_ptr()
        self._word = ctypes.c_int64.from_address(self._at)

    @staticmethod
    def current() -> tuple[int, int]:
        """The device and the handle of the caller's stream."""
        stream = torch.cuda.current_stream()
        return stream.device.index, stream.cuda_stream

    def write(self, number: int) -> None:
        """Queue a write of `number` on the caller's stream. Raises RuntimeError if the driver refuses."""
        (error,) = self._driver.cuStreamWriteValue64(self.current()[1], self._at, number, 0)
        if int(error):
            raise RuntimeError(f"a stream cannot write to host memory: {error}")

    @property
    def value(self) -> int:
        return self._word.value


class ReplayCounters:
    """Counters in host memory that captured streams of the current device increase, by one at every replay.

    A captured write writes the same number at every replay, so the counting is done in the GPU's memory. Make
    this object before any capture: memory that is allocated within one is cleared by every replay.
    """

    ROOM = 4096

    def __init__(self) -> None:
        with torch.inference_mode(False):
            self._there = torch.zeros(self.ROOM, dtype=torch.int64, device="cuda")
            self._here = torch.zeros(self.ROOM, dtype=torch.int64, device="cpu", pin_memory=True)
        self._numbers = (ctypes.c_int64 * self.ROOM).from_address(self._here.data_ptr())
        self._num_words = 0

    def take(self) -> int | None:
        """The index of an unused counter; `None` if all are used."""
        self._num_words += 1
        return self._num_words - 1 if self._num_words <= self.ROOM else None

    def count(self, index: int) -> None:
        """Queue an increase of a counter on the caller's stream."""
        there = self._there[index : index + 1]
        there.add_(1)
        self._here[index : index + 1].copy_(there, non_blocking=True)

    def __getitem__(self, index: int) -> int:
        return self._numbers[index]


class SideStream:
    """A stream for a thread of its own, whose work waits for nothing but the events that it is given."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def run(self, work: Callable[[], object], *after: StreamEvent) -> StreamEvent:
        """Queue `work` after the events `after`. Returns the event of its end."""
        if self._stream is None:
            work()
            return StreamEvent(self.device)
        with torch.cuda.stream(self._stream):
            for mark in after:
                mark.hold(self._stream)
            work()
            return StreamEvent(self.device)


class OrderedStream:
    """A stream beside the caller's, whose works run one after the other, each after what the caller had
    queued before. On a CPU the caller runs them.

    A work that can start does so before anything that the caller queues later. Otherwise products that use
    all multiprocessors could start a microsecond earlier, and a work of few blocks would wait for their end.
    The caller may free memory of either stream after waiting for the works that use it.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._stream = torch.cuda.Stream(device, priority=-1) if device.type == "cuda" else None
        self._last: QueuedWork | None = None

    def start(self, work: Callable[[], Any]) -> QueuedWork:
        """Queue `work`. `finish` of the returned object waits for it, and returns its result."""
        if self._stream is None:
            return QueuedWork(work(), StreamEvent(self.device), StreamEvent(self.device))
        caller, before = torch.cuda.current_stream(self.device), self._last
        StreamEvent(self.device, caller).hold(self._stream)
        begins = StreamEvent(self.device, self._stream)
        with torch.cuda.stream(self._stream):
            result = work()
        queued = self._last = QueuedWork(result, begins, StreamEvent(self.device, self._stream))
        if before is None or before.waited:
            begins.hold(caller)
        else:
            before.next = queued
        return queued


class QueuedWork:
    """Work in an `OrderedStream`."""

    def __init__(self, result: Any, begins: StreamEvent, over: StreamEvent) -> None:
        self.result, self.begins, self.over = result, begins, over
        self.waited = False
        self.next: QueuedWork | None = None

    def finish(self) -> Any:
        """Wait for the work and return its result; on a GPU only the caller's stream waits. Call it once."""
        self.over.hold()
        self.waited = True
        if self.next is not None:
            self.next.begins.hold()
        result, self.result = self.result, None
        return result


__all__ = ["Lane", "OrderedStream", "SideStream", "StartedWork", "StreamEvent"]
