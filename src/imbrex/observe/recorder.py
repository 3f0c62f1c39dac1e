"""The observer that listens: spans, counters, and the phase board."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch

from imbrex.observe.board import PhaseBoard
from imbrex.observe.observer import Observer

PHASES = ("route", "plan", "dispatch", "experts", "combine")
"""The phases of a layer, in the order a token meets them."""

MOST_PENDING = 100_000
"""Spans of one step at most; of more, the oldest are forgotten."""
Where = tuple[tuple[str, int], ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Span:
    """One finished span. begin_ns: since the epoch; self_ns: duration less that of the spans inside."""

    name: str
    where: Where
    step: int
    begin_ns: int
    duration_ns: int
    self_ns: int


class Recorder(Observer):
    """Remembers spans and counters of one rank, and writes its phase to a board.

    On CUDA a span is timed by two events on the current stream and resolved in `end_step`, so that recording
    does not synchronise; elsewhere by the process's clock. Only the last `keep_spans` spans are kept.
    """

    enabled = True

    def __init__(
        self,
        *,
        rank: int = 0,
        device: torch.device | str = "cpu",
        board: PhaseBoard | None = None,
        keep_spans: int = 100_000,
        co_activation: bool = False,
    ) -> None:
        self.rank, self.co_activation = rank, co_activation
        self.spans: deque[Span] = deque(maxlen=keep_spans)
        self._board = board
        self._clock = _EventClock() if torch.device(device).type == "cuda" else _HostClock()
        self._counters: dict[tuple[str, Where], Any] = {}
        # Of a step that nobody ends, too.
        self._pending: deque[_OpenSpan] = deque(maxlen=max(keep_spans, MOST_PENDING))
        self._inside: _OpenSpan | None = None
        self._phase = ("start", -1)
        self._step = -1

    def span(self, name: str, **where: int) -> AbstractContextManager[Any]:
        return _OpenSpan(self, name, tuple(where.items()), where.get("layer", -1))

    def count(self, name: str, value: Any, **where: int) -> None:
        key = (name, tuple(where.items()))
        if isinstance(value, torch.Tensor):
            value = value.detach()
        elif isinstance(value, Sequence):
            value = torch.tensor(value, dtype=torch.int64, device="cpu")
        before = self._counters.get(key)
        if before is None:
            self._counters[key] = value.clone() if isinstance(value, torch.Tensor) else value
        else:
            shapes = [list(v.shape) for v in (before, value) if isinstance(v, torch.Tensor)]
            if len(shapes) == 2 and shapes[0] != shapes[1] and [1] not in shapes:  # [1]: of a rank alone
                raise ValueError(
                    f"Recorder: {name} at {where} had shape {shapes[0]} and has {shapes[1]}; give layers "
                    "numbers of their own: MoELayer(layer=...)"
                )
            self._counters[key] = before + value

    def phase(self, name: str, **where: int) -> None:
        self._enter_phase(name, where.get("layer", -1))

    def begin_step(self, step: int) -> None:
        """Spans and phases from here on belong to `step`."""
        self._step = step
        if self._board is not None:
            self._board.step = step
        self.phase("rest")

    def end_step(self, *, keep: bool = True) -> dict[str, float]:
        """Close the step: milliseconds by span name, each without the spans inside it.

        keep: also keep its spans for the trace. On CUDA this waits for the device.
        """
        resolve = self._clock.resolve()
        inside_ns: dict[int, int] = {}
        times = [(span, resolve(span.begin), resolve(span.end)) for span in self._pending]
        for span, begin_ns, end_ns in times:
            if span.parent is not None:
                inside_ns[id(span.parent)] = inside_ns.get(id(span.parent), 0) + end_ns - begin_ns
        total_ms: dict[str, float] = {}
        for span, begin_ns, end_ns in times:
            own_ns = end_ns - begin_ns - inside_ns.get(id(span), 0)
            total_ms[span.name] = total_ms.get(span.name, 0.0) + own_ns / 1e6
            if not keep:
                continue
            self.spans.append(
                Span(
                    name=span.name,
                    where=span.where,
                    step=span.step,
                    begin_ns=begin_ns,
                    duration_ns=end_ns - begin_ns,
                    self_ns=own_ns,
                )
            )
        self._pending.clear()
        return total_ms

    def take_counters(self) -> dict[tuple[str, Where], Any]:
        """Counters since the last call, numbers and nested lists; counting starts again from nothing."""
        counters, self._counters = self._counters, {}
        # host sync: counters of a device are read here and nowhere else
        return {key: v.tolist() if isinstance(v, torch.Tensor) else v for key, v in counters.items()}

    def _enter_phase(self, name: str, layer: int) -> tuple[str, int]:
        before, self._phase = self._phase, (name, layer)
        if self._board is not None:
            self._board.write(name, layer)
        return before


class _OpenSpan:
    """A span from its `with` to `end_step`."""

    __slots__ = ("before", "begin", "end", "layer", "name", "parent", "recorder", "step", "where")

    def __init__(self, recorder: Recorder, name: str, where: Where, layer: int) -> None:
        self.recorder, self.name, self.where, self.layer = recorder, name, where, layer

    def __enter__(self) -> _OpenSpan:
        recorder = self.recorder
        self.step = recorder._step
        self.parent, recorder._inside = recorder._inside, self
        self.before = recorder._enter_phase(self.name, self.layer)
        self.begin = recorder._clock.now()
        return self

    def __exit__(self, error: object, *_: object) -> None:
        recorder = self.recorder
        self.end = recorder._clock.now()
        recorder._inside = self.parent
        recorder._pending.append(self)
        if error is None:
            # On an error the board keeps the phase that failed.
            recorder._enter_phase(*self.before)


class _HostClock:
    def __init__(self) -> None:
        self._epoch_ns = time.time_ns() - time.perf_counter_ns()

    def now(self) -> Any:
        return time.perf_counter_ns()

    def resolve(self) -> Any:
        return lambda moment: moment + self._epoch_ns


class _EventClock:
    """CUDA events, placed on the wall clock by one event whose moment is known: good to some microseconds."""

    def __init__(self) -> None:
        self._anchor = self.now()
        # host sync: once, to tie the device's clock to the wall clock
        self._anchor.synchronize()
        self._anchor_ns = time.time_ns()

    def now(self) -> Any:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def resolve(self) -> Any:
        # host sync: once a step, only while recording
        torch.cuda.synchronize()
        return lambda event: self._anchor_ns + int(self._anchor.elapsed_time(event) * 1e6)


def fold(total_ms: Mapping[str, float], step_ms: float) -> dict[str, float]:
    """Milliseconds by phase, forward and backward together, and `rest`, so that they sum to `step_ms`."""
    folded = {name: total_ms.get(name, 0.0) + total_ms.get(f"{name}_backward", 0.0) for name in PHASES}
    folded["rest"] = step_ms - sum(folded.values())
    return folded
