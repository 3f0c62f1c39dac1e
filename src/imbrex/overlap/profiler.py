"""Times the tasks of a layer one after the other, some beside each other, and then the layer whole."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor

from imbrex.contracts import Experts, Routing, RowExchange, Strategy
from imbrex.observe.clock import device_microseconds
from imbrex.overlap.chunks import Backward, Forward
from imbrex.overlap.engine import execute_timed
from imbrex.overlap.pipelined import Pipelined
from imbrex.runtime.words import words
from imbrex.schedule.choice import candidates, predict
from imbrex.schedule.contention import Contention, fit
from imbrex.schedule.profile import Profile
from imbrex.schedule.tasks import Kind

PAUSE_CYCLES = 20_000_000
"""A pause of about ten milliseconds: more than a slow host takes to queue a forward, or a backward."""
TASK_REPEATS = 3
"""Repeats of single tasks: whole runs correct what they miss."""

Name = TypeVar("Name")
Seconds = dict[tuple[bool, str], float]
"""Seconds of one run on this rank, by (backward, name)."""


def measure(
    exchange: RowExchange,
    experts: Experts,
    x_TD: Tensor,
    routing: Routing,
    parameters: Sequence[Tensor],
    *,
    degrees: Sequence[int] = (1, 2, 4, 8),
    scheduler: str | None = None,
    repeats: int = 5,
) -> Profile:
    """Time every task at the size it has with each number of chunks, alone, ranks in step; then some of them
    beside each other; then the layer whole with each number of chunks, in the orders that would be chosen.
    Call it on all ranks. Seconds are the median of `repeats` after one for warming up, each of the slowest
    rank; of single tasks, of 3. Gradients are computed and dropped. scheduler: the only one to choose."""
    tokens = int(exchange.transport.exchange_counts(words(x_TD.shape[0])).max())
    layer = _Layer(exchange=exchange, experts=experts, x_TD=x_TD, routing=routing, parameters=parameters)
    samples: dict[bool, dict[str, list[tuple[float, float]]]] = {False: {}, True: {}}
    for degree in degrees:
        runs = [layer.time_tasks(degree) for _ in range(TASK_REPEATS + 1)]
        for (backward, name), seconds in layer.slowest(runs[1:]).items():
            point = (degree, seconds) if name == "plan" else (tokens / degree, seconds / degree)
            samples[backward].setdefault(name, []).append(point)
    contention = _contention(layer)
    profile = Profile(tokens=tokens, forward=samples[False], backward=samples[True], contention=contention)
    return replace(profile, whole=_corrections(layer, profile, degrees, scheduler, repeats))


def compare(
    exchange: RowExchange,
    experts: Experts,
    x_TD: Tensor,
    routing: Routing,
    parameters: Sequence[Tensor],
    strategies: Mapping[Name, Strategy],
    repeats: int = 5,
    *,
    queued: bool = False,
) -> dict[Name, tuple[float, float]]:
    """Seconds (forward, backward) of a layer with every strategy, in turn: medians of the slowest rank, the
    same on all. Call it on all ranks. Gradients are computed and dropped. queued: by a GPU's clock, which
    waits until the host has queued the work; else from the call until the device is done."""
    layer = _Layer(exchange=exchange, experts=experts, x_TD=x_TD, routing=routing, parameters=parameters)
    return replace(layer, queued=queued).time_whole(strategies, repeats)


def _contention(layer: _Layer) -> Contention:
    once = layer.slowest([layer.time_beside() for _ in range(2)])
    often = max(1, min(32, round(once[False, "move"] / max(once[False, "compute"], 1e-6))))
    seconds = layer.slowest([layer.time_beside(often) for _ in range(TASK_REPEATS)])
    return fit(*(seconds[False, name] for name in ("compute", "move", "beside", "together")))


def _corrections(
    layer: _Layer, profile: Profile, degrees: Sequence[int], scheduler: str | None, repeats: int
) -> dict[tuple[str, int], tuple[float, float]]:
    """Corrections of what tasks alone do not show, from whole runs of every candidate in turn.

    The least of several noisy times is too small, and the more so the more there are. So the fastest is run
    again by itself, and what that says counts; if another is the fastest then, that one is, and so on.
    """
    predictions = [predict(profile, name, r) for r in degrees for name in candidates(r, scheduler)]
    guesses = {(g.scheduler, g.degree): g for g in predictions}
    strategies = {key: Pipelined(*key, times=profile.even_times(key[1])) for key in guesses}
    seconds, again = layer.time_whole(strategies, repeats), set[tuple[str, int]]()
    while (best := min(seconds, key=lambda key: sum(seconds[key]))) not in again:
        seconds |= layer.time_whole({best: strategies[best]}, repeats)
        again.add(best)
    return {
        key: (_ratio(seconds[key][0], guess.forward), _ratio(seconds[key][1], guess.backward))
        for key, guess in guesses.items()
    }


def _ratio(measured: float, predicted: float) -> float:
    return measured / predicted if predicted > 0 else 1.0


@dataclass(frozen=True, kw_only=True, slots=True)
class _Layer:
    """The layer to measure."""

    exchange: RowExchange
    experts: Experts
    x_TD: Tensor
    routing: Routing
    parameters: Sequence[Tensor]
    queued: bool = False

    def clock(self) -> _Clock:
        exchange = self.exchange
        span = partial(exchange.observer.span, "measure", layer=exchange.layer)
        return _Clock(exchange.transport.exchange_counts, self.x_TD.device, span)

    def begin(self, degree: int) -> Forward:
        tokens = self.x_TD.shape[0]
        even = [tokens // degree + (c < tokens % degree) for c in range(degree)]
        # As a strategy does before it plans.
        self.exchange.dispatcher.check_in(self.x_TD, self.routing, before=degree)
        inputs = self.exchange, self.experts, self.x_TD, self.routing, None, even
        return _InTurn(*inputs, keep=True, defer=True)

    @torch.no_grad()
    def time_tasks(self, degree: int) -> Seconds:
        """Seconds by kind of task, summed over the chunks, one task after the other."""
        clock = self.clock()
        forward: Any = clock.timed("plan", lambda: self.begin(degree))
        execute_timed(degree, forward, clock)
        clock.backward = True
        work = Backward(forward, torch.ones_like(self.x_TD), self.parameters, [True] * len(self.parameters))
        execute_timed(degree, work, clock, weights=True)
        return clock.seconds

    def time_whole(
        self, strategies: Mapping[Name, Strategy], repeats: int
    ) -> dict[Name, tuple[float, float]]:
        """Seconds (forward, backward) of every strategy, all in turn."""
        runs: list[Seconds] = []
        for _ in range(repeats + 1):
            runs.append({})
            for key, strategy in strategies.items():
                once = self._time_once(strategy)
                runs[-1] |= {(back, str(key)): seconds for (back, _), seconds in once.items()}
        slowest = self.slowest(runs[1:])
        return {key: (slowest[False, str(key)], slowest[True, str(key)]) for key in strategies}

    @torch.enable_grad()
    def _time_once(self, strategy: Strategy) -> Seconds:
        clock = self.clock()
        clock.queued = self.queued and self.x_TD.device.type == "cuda"
        x_TD, weights_TK = (t.detach().requires_grad_() for t in (self.x_TD, self.routing.weights_TK))
        routing = Routing(ids_TK=self.routing.ids_TK, weights_TK=weights_TK)
        run = partial(strategy.run, x_TD, routing, self.exchange, self.experts, None)
        y_TD = clock.timed("whole", lambda: run().y_TD)
        clock.backward = True
        # Not `backward`, which would leave gradients with the caller's parameters.
        leaves = [x_TD, weights_TK, *self.parameters]
        clock.timed(
            "whole", lambda: torch.autograd.grad(y_TD, leaves, torch.ones_like(y_TD), allow_unused=True)
        )
        return clock.seconds

    @torch.no_grad()
    def time_beside(self, repeats: int = 1) -> Seconds:
        """The experts of one of two chunks, as often as given, and all rows twice; alone and beside each
        other."""
        work, clock = self.begin(2), self.clock()
        moves = []
        for number, chunk in enumerate(work.chunks):
            work.encode_out(number)
            assert chunk.crossing is not None
            moves.append(chunk.crossing.move)
        pending: Any = work.move_out(0)
        work.decode_out(0, pending.finish())

        def begin() -> list[Any]:
            return [move() for move in (*moves, *moves)]

        def compute() -> None:
            for _ in range(repeats):
                work.experts(0)

        def both() -> None:
            before = time.perf_counter()
            pending = begin()
            compute()
            clock.settle()
            clock.seconds[False, "beside"] = time.perf_counter() - before
            for move in pending:
                move.finish()

        clock.timed("compute", compute)
        clock.timed("move", lambda: [move.finish() for move in begin()])
        clock.timed("together", both)
        return clock.seconds

    def slowest(self, runs: Sequence[Seconds]) -> Seconds:
        """The median over runs of each run's slowest rank: the same on every rank. Not the slowest rank's
        median, which is less: another rank is slow in every run."""
        keys = sorted(runs[0])
        nanoseconds = torch.stack([words(*(int(1e9 * run[key]) for key in keys)) for run in runs])
        slowest_N = self.exchange.transport.exchange_counts(nanoseconds.flatten()).max(0).values
        by_key = slowest_N.view(len(runs), len(keys)).T.tolist()
        return {key: 1e-9 * statistics.median(of) for key, of in zip(keys, by_key, strict=True)}


class _InTurn(Forward):
    """Chunks whose rows leave with their move and never with the plan, since both are timed."""

    in_turn = True


class _Clock:
    """Seconds by kind, summed over chunks; all ranks start a task together. span: makes the span of one."""

    def __init__(
        self,
        gather: Callable[[Tensor], Tensor],
        device: torch.device,
        span: Callable[[], AbstractContextManager[Any]],
    ) -> None:
        self.gather, self.device, self.span = gather, device, span
        self.backward, self.queued = False, False
        self.seconds: Seconds = {}

    def __call__(self, kind: Kind, step: Callable[[], Any]) -> Any:
        return self.timed(kind.name, step)

    def timed(self, name: str, step: Callable[[], Any]) -> Any:
        result: list[Any] = []
        with self.span():
            self._wait()
            if self.queued:
                seconds = 1e-6 * device_microseconds(lambda: result.append(step()), PAUSE_CYCLES)
            else:
                begin = time.perf_counter()
                result.append(step())
                self.settle()
                seconds = time.perf_counter() - begin
        key = self.backward, name
        self.seconds[key] = self.seconds.get(key, 0.0) + seconds
        return result[0]

    def settle(self) -> None:
        if self.device.type == "cuda":
            # host sync: a profile measures what the device does
            torch.cuda.synchronize(self.device)

    def _wait(self) -> None:
        self.settle()
        self.gather(words(0))


__all__ = ["compare", "measure"]
