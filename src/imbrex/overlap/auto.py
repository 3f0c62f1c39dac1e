"""The strategy `auto`: the fastest order of chunks, or `fused`, as measured for this layer.

At the first call for an exchange, ranks look for a stored decision; see `tuner`. If there is none, they
measure: the time of every task (`profiler.measure`), from which the fastest order of chunks is chosen
(`schedule.choice.choose`); then whole runs of the layer with that order, serially, and fused, if the exchange
and the experts can do it. Later calls run what was decided.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from imbrex.contracts import Experts, Listener, Output, Roles, Routing, RowExchange, Strategy
from imbrex.observe import Observer
from imbrex.overlap.decision import FUSED, SERIAL, Decision, Gains, roles_as_json, roles_of_json
from imbrex.overlap.fused import Fused, run_in_graph, why_not_exchange, why_not_experts
from imbrex.overlap.pipelined import find, parameters_of
from imbrex.overlap.profiler import compare, measure
from imbrex.overlap.serial import Serial
from imbrex.overlap.tuner import Tuner, fastest, layer_of, tuner_of
from imbrex.runtime.gradients import saving_here
from imbrex.runtime.words import words
from imbrex.schedule.choice import choose
from imbrex.schedule.profile import Profile

MIN_DEVICE_GAIN = 1.02
"""How many times as fast as the fastest other strategy `fused` must be by the device's clock, forward and
backward together."""
MIN_HOST_GAIN = 0.98
"""How many times as fast it must be by the host's clock. That clock is noisy where the host queues work more
slowly than its GPU does it."""
ROLES = (
    Roles(stage=32, sums=8),
    Roles(stage=64, sums=24),
    Roles(stage=96, sums=32),
    Roles(dy=0),
    Roles(first=24),
)
"""Roles that are timed besides the default ones. `stage` matters most in the forward, `first` only there, and
`sums` and `dy` only in the backward. So one run tries a value for each direction."""


class Auto:
    """Runs the strategy that is fastest for this layer, forward and backward together: an order of chunks, or
    `fused`, if the exchange and the experts can do it and it is 2 % faster.

    The first call of a layer looks for a kept result, or measures and stores one in imbrex's cache folder.
    Layers of a model with equal settings are measured once.

    profile: a file with the times of the tasks, for any number of tokens. If it is missing, the group's first
        rank writes it, otherwise all ranks read it. On several machines all must see the same file. With a
        profile nothing is stored in the cache folder.
    degrees: the numbers of chunks to choose from. scheduler: the only scheduler to use; by default all.
    keep: whether to use the cache folder. renew: measure anew, and replace the stored result.
    """

    def __init__(
        self,
        profile: Path | str | None = None,
        degrees: Sequence[int] = (1, 2, 4, 8),
        *,
        scheduler: str | None = None,
        name: str = "auto",
        keep: bool = True,
        renew: bool = False,
    ) -> None:
        if not degrees or min(degrees) < 1:
            raise ValueError(
                f"schedule: auto with degrees {tuple(degrees)}; give numbers of chunks from 1 on"
            )
        self.path, self.degrees = None if profile is None else Path(profile), tuple(degrees)
        if scheduler is not None:
            find(scheduler)
        self.scheduler, self.name = scheduler, name
        self.keep, self.renew = keep and profile is None, renew
        # A compiled graph cannot communicate or look up a decision, so calls outside of it decide.
        self.fuses_in_graphs = False
        self.decisions: weakref.WeakKeyDictionary[RowExchange, Decision] = weakref.WeakKeyDictionary()
        self._origins: weakref.WeakKeyDictionary[RowExchange, str] = weakref.WeakKeyDictionary()
        self._why_not_fused: weakref.WeakKeyDictionary[RowExchange, str] = weakref.WeakKeyDictionary()
        self._chosen: weakref.WeakKeyDictionary[RowExchange, Strategy] = weakref.WeakKeyDictionary()

    def reason(self, exchange: RowExchange, experts: Experts) -> str:
        decision = self.decisions.get(exchange)
        if decision is None:
            return "looks for a kept result, or measures, at its first call"
        choice, gains, origin = decision.choice, decision.gains, self._origins[exchange]
        times = f"{1e3 * choice.forward:.3g} ms forward and {1e3 * choice.backward:.3g} backward"
        if gains is None:
            return f"{decision.name}, predicted {times}; no fused: {self._why_not_fused[exchange]}; {origin}"
        measured = f"{gains.device:.2f} times as fast on the device, {gains.host:.2f} as called"
        if is_worthwhile(gains):
            steps = Fused(exchange.dispatcher.roles).describe(exchange, experts)
            return f"fused, {measured}, as {gains.baseline}, forward and backward together; {steps}; {origin}"
        required = f"must be {MIN_DEVICE_GAIN} and {MIN_HOST_GAIN}"
        name = SERIAL if gains.baseline == SERIAL else f"{decision.name}, predicted {times}"
        return f"{name}; fused is {measured}, and {required}; {origin}"

    def run(
        self,
        x_TD: Tensor,
        routing: Routing,
        exchange: RowExchange,
        experts: Experts,
        addend: Callable[[], Tensor] | None,
    ) -> Output:
        if torch.compiler.is_compiling():
            run = run_in_graph if self.fuses_in_graphs else Serial().run
            return run(x_TD, routing, exchange, experts, addend)
        if exchange not in self._chosen:
            exchange.dispatcher.check_in(x_TD, routing)
            self._decide(x_TD, routing, exchange, experts)
        return self._chosen[exchange].run(x_TD, routing, exchange, experts, addend)

    def _decide(self, x_TD: Tensor, routing: Routing, exchange: RowExchange, experts: Experts) -> None:
        """Find or make the decision for an exchange. Collective."""
        why_not = f"scheduler={self.scheduler!r} was given" if self.scheduler else why_not_exchange(exchange)
        why_not = why_not or why_not_experts(experts)
        settings = {"fuses": why_not is None, "uses_files": self.keep}
        tuner = tuner_of(exchange, experts, x_TD, renews=self.renew, **settings)
        self._why_not_fused[exchange] = why_not or "another rank's experts cannot bring their rows"
        with copies_for_timing(x_TD, routing) as inputs, _unheard(exchange):
            layer = exchange, experts, *inputs
            roles = self._roles(tuner, layer) if tuner.subject["fuses"] else None
            stored = tuner.with_settings(self._settings()).load("schedule", Decision.of_json)
            decision, origin = stored.value, stored.origin
            if decision is None:
                decision = self._measure(layer, roles)
                place = tuner.with_settings(self._settings()).store("schedule", decision.as_json())
                origin = f"{origin}; {place}" if origin else place
        self.decisions[exchange], self._origins[exchange] = decision, origin
        fused = decision.gains is not None and is_worthwhile(decision.gains)
        self._chosen[exchange] = Fused(roles) if fused else decision.without_fused()
        exchange.dispatcher.roles = roles or Roles()
        self.fuses_in_graphs = all(isinstance(each, Fused) for each in self._chosen.values())

    def _settings(self) -> dict[str, object]:
        """The settings on which the order of chunks depends, besides the layer."""
        profile = None if self.path is None else str(self.path)
        return {"degrees": [*self.degrees], "scheduler": self.scheduler, "profile": profile}

    def _roles(self, tuner: Tuner, layer: Layer) -> Roles:
        """The fastest roles of the fused kernels, stored or measured. Collective."""
        stored = tuner.load("fused", roles_of_json)
        if stored.value is not None:
            return stored.value
        strategies = {roles: Fused(roles) for roles in (Roles(), *ROLES)}
        seconds = compare(*layer, parameters_of(layer[1]), strategies, queued=True)
        forward, backward = (fastest(seconds, direction, Roles()) for direction in (0, 1))
        roles = Roles(stage=forward.stage, first=forward.first, sums=backward.sums, dy=backward.dy)
        tuner.store("fused", roles_as_json(roles, seconds))
        return roles

    def _measure(self, layer: Layer, roles: Roles | None) -> Decision:
        """Measure the layer. roles: those of the fused kernels; `None` if the layer cannot be fused."""
        profile = self._profile(layer)
        decision = Decision.of(choose(profile, self.degrees, self.scheduler), profile)
        if roles is None:
            return decision
        strategies = {SERIAL: Serial(), decision.name: decision.pipelined(), FUSED: Fused(roles)}
        host, device = (
            compare(*layer, parameters_of(layer[1]), strategies, queued=queued) for queued in (False, True)
        )
        return replace(decision, gains=Gains.of(device, host, FUSED))

    def _profile(self, layer: Layer) -> Profile:
        """The times of the layer's tasks, from the file `profile` if there is one, otherwise measured."""
        exchange, experts, x_TD, _ = layer
        if self.path is not None:
            files_W = exchange.transport.exchange_counts(words(self.path.exists(), self.path.parent.is_dir()))
            if bool(files_W[:, 0].min()):
                return Profile.load(self.path, layer_of(exchange, experts, x_TD))
            if not bool(files_W[0, 1]):
                raise ValueError(f"schedule: profile {self.path} is in no folder; make it, or give another")
        settings = {"degrees": self.degrees, "scheduler": self.scheduler}
        profile = measure(*layer, parameters_of(experts), **settings)
        if self.path is not None and exchange.geometry.rank == 0:
            profile.save(self.path, layer_of(exchange, experts, x_TD))
        return profile


Layer = tuple[RowExchange, Experts, Tensor, Routing]
"""A layer to measure, and its inputs: tokens and routing."""


def is_worthwhile(gains: Gains) -> bool:
    """Whether `fused` is enough faster than the other strategies to be chosen."""
    return gains.device >= MIN_DEVICE_GAIN and gains.host >= MIN_HOST_GAIN


@contextmanager
def copies_for_timing(x_TD: Tensor, routing: Routing) -> Iterator[tuple[Tensor, Routing]]:
    """Copies of the inputs with which a layer is timed. They are made outside of inference mode, whose
    tensors have no backward; inside the context gradients are off. The caller's hooks for saved tensors hear
    of nothing: activation checkpointing counts what its call saves, and computes the call again untimed."""
    with torch.inference_mode(False), torch.no_grad(), saving_here():
        x_TD, weights_TK, ids_TK = (t.clone() for t in (x_TD, routing.weights_TK, routing.ids_TK))
        yield x_TD, Routing(ids_TK=ids_TK, weights_TK=weights_TK)


class _Measurements(Observer):
    """Tells another observer of measurements, and nothing of what they count: the caller's tokens would stand
    in its counters as often as they were timed."""

    measuring = True

    def __init__(self, observer: Listener) -> None:
        self.observer = observer

    def span(self, name: str, **where: int) -> AbstractContextManager[Any]:
        return self.observer.span(name, **where) if name == "measure" else super().span(name, **where)


@contextmanager
def _unheard(exchange: RowExchange) -> Iterator[None]:
    """Keep what is timed from the observer of an exchange."""
    before = [(dispatcher, dispatcher.observer) for dispatcher in exchange.dispatcher.family]
    for dispatcher, observer in before:
        dispatcher.observer = _Measurements(observer)
    try:
        yield
    finally:
        for dispatcher, observer in before:
            dispatcher.observer = observer
