"""Measures a layer: its tasks one by one, computing and moving at the same time, and whole runs."""

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
from imbrex.runtime.gradients import hooks_aside
from imbrex.runtime.words import words
from imbrex.schedule.choice import candidates, predict
from imbrex.schedule.contention import Contention, fit
from imbrex.schedule.profile import Profile
from imbrex.schedule.tasks import Kind

PAUSE_CYCLES = 20_000_000
"""The device waits about ten milliseconds, longer than a slow host takes to queue a forward or a backward."""
TASK_REPEATS = 3
"""The number of measurements of single tasks. Few are enough, since whole runs correct the predictions."""

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
    """Measure a layer, forward and backward. Collective. Gradients are computed and dropped.

    1. Every kind of task alone, with all ranks in step, for each number of chunks in `degrees`.
    2. The experts' products while rows move, because the two slow each other down.
    3. The whole layer, in every order that could be chosen. `Profile.whole` holds by how much these runs are
       slower than predicted.

    Each time is the median of `repeats` runs (3 for single tasks) after one for warming up, of the slowest
    rank in each run. parameters: the experts' trained parameters. scheduler: the only one that may be chosen;
    by default all.
    """
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
    """Seconds (forward, backward) of a layer with every strategy, measured in turns. Collective. Gradients
    are computed and dropped.

    Each time is the median of `repeats` runs, of the slowest rank in each run; the same on all ranks.
    queued: measure by the GPU's clock, with all work queued before it starts; otherwise by the host's, from
    the call until the device is done.
    """
    layer = _Layer(exchange=exchange, experts=experts, x_TD=x_TD, routing=routing, parameters=parameters)
    return replace(layer, queued=queued).time_whole(strategies, repeats)


def _contention(layer: _Layer) -> Contention:
    """Measure by how much computing and moving slow each other down, with the experts repeated until they
    take about as long as the moves."""
    once = layer.slowest([layer.time_contention() for _ in range(2)])
    repeats = max(1, min(32, round(once[False, "move"] / max(once[False, "compute"], 1e-6))))
    seconds = layer.slowest([layer.time_contention(repeats) for _ in range(TASK_REPEATS)])
    return fit(*(seconds[False, name] for name in ("compute", "move", "beside", "together")))


def _corrections(
    layer: _Layer, profile: Profile, degrees: Sequence[int], scheduler: str | None, repeats: int
) -> dict[tuple[str, int], tuple[float, float]]:
    """Ratios of measured to predicted time, (forward, backward), of every candidate (scheduler, chunks).

    All candidates run in turns. The minimum of several noisy times is biased: it is too small, and more so
    for more candidates. So the fastest candidate is measured again by itself, and that time counts. If
    another candidate is then the fastest, it is measured again too, and so on.
    """
    predictions = [predict(profile, name, r) for r in degrees for name in candidates(r, scheduler)]
    guesses = {(g.scheduler, g.degree): g for g in predictions}
    strategies = {key: Pipelined(*key, times=profile.even_times(key[1])) for key in guesses}
    seconds, repeated = layer.time_whole(strategies, repeats), set[tuple[str, int]]()
    while (best := min(seconds, key=lambda key: sum(seconds[key]))) not in repeated:
        seconds |= layer.time_whole({best: strategies[best]}, repeats)
        repeated.add(best)
    return {
        key: (_ratio(seconds[key][0], guess.forward), _ratio(seconds[key][1], guess.backward))
        for key, guess in guesses.items()
    }


def _ratio(measured: float, predicted: float) -> float:
    return measured / predicted if predicted > 0 else 1.0


@dataclass(frozen=True, kw_only=True, slots=True)
class _Layer:
    """A layer to measure, and its inputs. queued: as in `compare`."""

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

    def plan(self, degree: int) -> Forward:
        """Plan a forward in `degree` equal chunks."""
        tokens = self.x_TD.shape[0]
        even = [tokens // degree + (c < tokens % degree) for c in range(degree)]
        # A strategy does this before it plans, too.
        self.exchange.dispatcher.check_in(self.x_TD, self.routing, before=degree)
        inputs = self.exchange, self.experts, self.x_TD, self.routing, None, even
        return _ForwardInTurn(*inputs, keep=True, defer=True)

    @torch.no_grad()
    def time_tasks(self, degree: int) -> Seconds:
        """Seconds of every kind of task, summed over the chunks, with one task at a time."""
        clock = self.clock()
        forward: Any = clock.time("plan", lambda: self.plan(degree))
        execute_timed(degree, forward, clock)
        clock.backward = True
        work = Backward(forward, torch.ones_like(self.x_TD), self.parameters, [True] * len(self.parameters))
        execute_timed(degree, work, clock, weights=True)
        return clock.seconds

    def time_whole(
        self, strategies: Mapping[Name, Strategy], repeats: int
    ) -> dict[Name, tuple[float, float]]:
        """Seconds (forward, backward) of every strategy; the strategies run in turns."""
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
        y_TD = clock.time("whole", lambda: run().y_TD)
        clock.backward = True
        # Not `y_TD.backward`, which would add gradients to the caller's parameters.
        leaves = [x_TD, weights_TK, *self.parameters]
        with hooks_aside(self.parameters):
            clock.time(
                "whole", lambda: torch.autograd.grad(y_TD, leaves, torch.ones_like(y_TD), allow_unused=True)
            )
        return clock.seconds

    @torch.no_grad()
    def time_contention(self, repeats: int = 1) -> Seconds:
        """Seconds of the experts of one of two chunks, run `repeats` times (`compute`), of moving all rows
        twice (`move`), and of both at the same time (`together`), in which the experts take `beside`."""
        work, clock = self.plan(2), self.clock()
        moves = []
        for number, chunk in enumerate(work.chunks):
            work.encode_out(number)
            assert chunk.crossing is not None
            moves.append(chunk.crossing.move)
        pending: Any = work.move_out(0)
        work.decode_out(0, pending.finish())

        def start_moves() -> list[Any]:
            return [move() for move in (*moves, *moves)]

        def compute() -> None:
            for _ in range(repeats):
                work.experts(0)

        def both() -> None:
            before = time.perf_counter()
            pending = start_moves()
            compute()
            clock.await_device()
            clock.seconds[False, "beside"] = time.perf_counter() - before
            for move in pending:
                move.finish()

        clock.time("compute", compute)
        clock.time("move", lambda: [move.finish() for move in start_moves()])
        clock.time("together", both)
        return clock.seconds

    def slowest(self, runs: Sequence[Seconds]) -> Seconds:
        """The median over runs of each run's slowest rank; the same on every rank. The slowest rank's median
        would be less, because not the same rank is slowest in every run. Collective."""
        keys = sorted(runs[0])
        nanoseconds = torch.stack([words(*(int(1e9 * run[key]) for key in keys)) for run in runs])
        slowest_N = self.exchange.transport.exchange_counts(nanoseconds.flatten()).max(0).values
        by_key = slowest_N.view(len(runs), len(keys)).T.tolist()
        return {key: 1e-9 * statistics.median(of) for key, of in zip(keys, by_key, strict=True)}


class _ForwardInTurn(Forward):
    """A forward whose rows are sent by the moves, never together with the plan, because both are timed."""

    in_turn = True


class _Clock:
    """Sums up seconds by name; all ranks start what is timed together.

    gather: gathers a message of all ranks, on which they wait for each other. span: makes the span in which
    the observer records a measurement. backward: whether the next measurements are of the backward. queued:
    as in `compare`.
    """

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
        return self.time(kind.name, step)

    def time(self, name: str, step: Callable[[], Any]) -> Any:
        """Run a step, add its seconds to those of `name`, and return its result."""
        result: list[Any] = []
        with self.span():
            self._align_ranks()
            if self.queued:
                seconds = 1e-6 * device_microseconds(lambda: result.append(step()), PAUSE_CYCLES)
            else:
                begin = time.perf_counter()
                result.append(step())
                self.await_device()
                seconds = time.perf_counter() - begin
        key = self.backward, name
        self.seconds[key] = self.seconds.get(key, 0.0) + seconds
        return result[0]

    def await_device(self) -> None:
        if self.device.type == "cuda":
            # host sync: a measurement ends when the device is done
            torch.cuda.synchronize(self.device)

    def _align_ranks(self) -> None:
        self.await_device()
        self.gather(words(0))


__all__ = ["compare", "measure"]
