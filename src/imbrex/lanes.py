"""Work beside the caller: threads on a CPU, a stream on a GPU. The only home of streams.

Collectives need none of their own: gloo has threads and NCCL a stream. A lane is for what must follow a
collective without the caller waiting for it, such as passing rows on that have just arrived.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch

THREADS = 2
"""So that work which waits for its rows does not hold up work whose rows are there."""


class Lane:
    """Takes work and does it beside the caller, begun in the order given."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._threads: ThreadPoolExecutor | None = None
        self._stream: Any = None

    def start(self, work: Callable[[], Any]) -> Begun:
        """Begin `work`. On a CPU it may wait for what it likes, but only for what other ranks begin without
        waiting for this one. On a GPU it is queued at once, behind what the caller has queued so far, and
        must not synchronise."""
        if self.device.type == "cuda":
            return self._queue(work)
        if self._threads is None:
            self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="imbrex-lane")
        return Begun(future=self._threads.submit(work))

    def _queue(self, work: Callable[[], Any]) -> Begun:
        if self._stream is None:
            self._stream = torch.cuda.Stream(self.device)
        self._stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self._stream):
            work()
        return Begun(stream=self._stream)

    def close(self) -> None:
        if self._threads is not None:
            self._threads.shutdown(wait=False, cancel_futures=True)
            self._threads = None


class Begun:
    """Work under way."""

    def __init__(self, future: Future | None = None, stream: Any = None) -> None:
        self.future, self.stream = future, stream

    def finish(self) -> None:
        """Wait for it, on a GPU with the current stream only; raises what it raised."""
        if self.future is not None:
            self.future.result()
        else:
            torch.cuda.current_stream(self.stream.device).wait_stream(self.stream)


__all__ = ["Begun", "Lane"]
