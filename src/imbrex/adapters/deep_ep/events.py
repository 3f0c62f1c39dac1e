"""Events as programs written for DeepEP hold them: points of a stream, or nothing on a CPU.

imbrex runs every call on the caller's stream, so an event says "all of this call" and waiting is cheap.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


class EventHandle:
    """The point that the current stream has reached. On a machine whose GPU is not in use there is no stream,
    calls are over when they return, and waiting does nothing."""

    def __init__(self) -> None:
        self._event = torch.cuda.current_stream().record_event() if torch.cuda.is_initialized() else None

    def current_stream_wait(self) -> None:
        """Lets the current stream wait: what is put on it from now on runs after this point."""
        if self._event is not None:
            self._event.wait()


class EventOverlap:
    """An event to wait for, and tensors that must live until then.

    with buffer.capture():
        ...                     # runs beside what the event stands for; the wait is at the end
    with event(release_handle=True):
        ...                     # and lets go of what the event holds, once it has been waited for
    """

    def __init__(
        self, event: EventHandle | None = None, extra_tensors: tuple[Any, ...] | None = None
    ) -> None:
        self.event = event
        self.extra_tensors = extra_tensors
        self.hook_after_wait: Callable[[], Any] | None = None
        self._release = False

    def current_stream_wait(self, release_handle: bool = False) -> None:
        """Let the current stream wait for the event, then call the hook, once; without an event, there is
        nothing to wait for."""
        if self.event is not None:
            self.event.current_stream_wait()
        hook, self.hook_after_wait = self.hook_after_wait, None
        if hook is not None:
            hook()
        if release_handle:
            self.event, self.extra_tensors = None, None

    def register_hook_after_wait(self, hook_after_wait: Callable[[], Any]) -> None:
        """Call a function behind the next wait. Raises ValueError where another one is to be called there."""
        if self.hook_after_wait is not None:
            raise ValueError(
                "deep_ep.EventOverlap: a hook is registered already; it is called by the next wait"
            )
        self.hook_after_wait = hook_after_wait

    def __call__(self, release_handle: bool = False) -> EventOverlap:
        """Say for `with` whether the wait at its end lets go of the event."""
        self._release = release_handle
        return self

    def __enter__(self) -> EventOverlap:
        return self

    def __exit__(self, *raised: object) -> None:
        release, self._release = self._release, False
        self.current_stream_wait(release)


def begin(previous_event: EventOverlap | EventHandle | None) -> None:
    """Order a call after `previous_event`."""
    if previous_event is not None:
        previous_event.current_stream_wait()


def end(asynchronous: bool) -> EventOverlap:
    """The event of a call that has been put on the stream."""
    return EventOverlap(EventHandle()) if asynchronous else EventOverlap()
