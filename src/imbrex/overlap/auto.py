"""The strategy that ends first, by what was kept of such a layer, or by a profile taken at its first call."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from imbrex.contracts import Experts, Output, Roles, Routing, RowExchange, Strategy
from imbrex.overlap.decision import FUSED, SERIAL, Decision, Gains, roles_as_json, roles_of_json
from imbrex.overlap.fused import Fused, run_in_graph, why_not_exchange, why_not_experts
from imbrex.overlap.pipelined import find, parameters_of
from imbrex.overlap.profiler import compare, measure
from imbrex.overlap.serial import Serial
from imbrex.overlap.tuner import Tuner, faster, layer_of, tuner_of
from imbrex.runtime.words import words
from imbrex.schedule.choice import choose
from imbrex.schedule.profile import Profile

FUSED_GAIN = 1.02
"""Times as fast as the fastest without it that `fused` must be on the device, forward and backward."""
FUSED_CALLED = 0.98
"""Times as fast that `fused` must be as it is called: what is within the noise of a host that queues more
slowly than its GPU works."""
ROLES = (
    Roles(stage=32, sums=8),
    Roles(stage=64, sums=24),
    Roles(stage=96, sums=32),
    Roles(dy=0),
    Roles(first=24),
)
"""Divisions that are timed beside the default. `stage` counts most in the forward, `sums` and `dy` in
the backward alone, `first` in the forward alone, so that a run tries one of each side."""


class Auto:
    """Picks what ends first in whole runs of the layer: an order of chunks; or `fused`, where the exchange
    and the experts can and it is 2 % faster. Where nothing is kept of such a layer, its first call measures,
    and keeps the result in imbrex's cache folder. Layers of a model that are alike are measured once.

    profile: a file of the tasks' times, for any number of tokens; written by the group's first rank if it is
        not there, read by all if it is. On several machines it must lie where all see it. Nothing else is
        kept then.
    degrees: numbers of chunks to choose from. scheduler: the only one to use.
    keep: use and keep results in the cache folder. renew: measure anew, and replace what is kept.
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
        # Of one call outside at least: a graph that is being compiled cannot ask other ranks, nor tables.
        self.fuses_in_graphs = False
        self.decisions: weakref.WeakKeyDictionary[RowExchange, Decision] = weakref.WeakKeyDictionary()
        self._origins: weakref.WeakKeyDictionary[RowExchange, str] = weakref.WeakKeyDictionary()
        self._not_tried: weakref.WeakKeyDictionary[RowExchange, str] = weakref.WeakKeyDictionary()
        self._running: weakref.WeakKeyDictionary[RowExchange, Strategy] = weakref.WeakKeyDictionary()

    def reason(self, exchange: RowExchange) -> str:
        decision = self.decisions.get(exchange)
        if decision is None:
            return "looks for a kept result, or measures, at its first call"
        choice, gains, origin = decision.choice, decision.gains, self._origins[exchange]
        times = f"{1e3 * choice.forward:.3g} ms forward and {1e3 * choice.backward:.3g} backward"
        if gains is None:
            return f"{decision.name}, predicted {times}; no fused: {self._not_tried[exchange]}; {origin}"
        measured = f"{gains.device:.2f} times as fast on the device, {gains.called:.2f} as called"
        if is_faster(gains):
            return f"fused, {measured}, as {gains.over}, forward and backward together; {origin}"
        needed = f"must be {FUSED_GAIN} and {FUSED_CALLED}"
        picked = SERIAL if gains.over == SERIAL else f"{decision.name}, predicted {times}"
        return f"{picked}; fused is {measured}, and {needed}; {origin}"

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
        if exchange not in self._running:
            exchange.dispatcher.check_in(x_TD, routing)
            self._decide(x_TD, routing, exchange, experts)
        return self._running[exchange].run(x_TD, routing, exchange, experts, addend)

    def _decide(self, x_TD: Tensor, routing: Routing, exchange: RowExchange, experts: Experts) -> None:
        why_not = f"scheduler={self.scheduler!r} was given" if self.scheduler else why_not_exchange(exchange)
        why_not = why_not or why_not_experts(experts)
        settings = {"fuses": why_not is None, "keeps": self.keep}
        tuner = tuner_of(exchange, experts, x_TD, renews=self.renew, **settings)
        self._not_tried[exchange] = why_not or "another rank's experts cannot bring their rows"
        with plain_copies(x_TD, routing) as inputs:
            layer = exchange, experts, *inputs
            roles = self._roles(tuner, layer) if tuner.subject["fuses"] else None
            recalled = tuner.under(self._settings()).recall("schedule", Decision.of_json)
            decision, origin = recalled.value, recalled.origin
            if decision is None:
                decision = self._measure(layer, roles)
                at = tuner.under(self._settings()).keep("schedule", decision.as_json())
                origin = f"{origin}; {at}" if origin else at
        self.decisions[exchange], self._origins[exchange] = decision, origin
        fused = decision.gains is not None and is_faster(decision.gains)
        self._running[exchange] = Fused(roles) if fused else decision.apart()
        exchange.dispatcher.roles = roles or Roles()
        self.fuses_in_graphs = all(isinstance(each, Fused) for each in self._running.values())

    def _settings(self) -> dict[str, object]:
        """Names what the order of chunks depends on besides the layer."""
        profile = None if self.path is None else str(self.path)
        return {"degrees": [*self.degrees], "scheduler": self.scheduler, "profile": profile}

    def _roles(self, tuner: Tuner, layer: Layer) -> Roles:
        recalled = tuner.recall("fused", roles_of_json)
        if recalled.value is not None:
            return recalled.value
        strategies = {roles: Fused(roles) for roles in (Roles(), *ROLES)}
        seconds = compare(*layer, parameters_of(layer[1]), strategies, queued=True)
        forward, backward = (faster(seconds, side, Roles()) for side in (0, 1))
        roles = Roles(stage=forward.stage, first=forward.first, sums=backward.sums, dy=backward.dy)
        tuner.keep("fused", roles_as_json(roles, seconds))
        return roles

    def _measure(self, layer: Layer, roles: Roles | None) -> Decision:
        profile = self._profile(layer)
        decision = Decision.of(choose(profile, self.degrees, self.scheduler), profile)
        if roles is None:
            return decision
        ways = {SERIAL: Serial(), decision.name: decision.order(), FUSED: Fused(roles)}
        called, device = (
            compare(*layer, parameters_of(layer[1]), ways, queued=queued) for queued in (False, True)
        )
        return replace(decision, gains=Gains.of(device, called, FUSED))

    def _profile(self, layer: Layer) -> Profile:
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
"""The layer to measure, and the inputs to do it with."""


def is_faster(gains: Gains) -> bool:
    """Whether `fused` gains enough to be taken."""
    return gains.device >= FUSED_GAIN and gains.called >= FUSED_CALLED


@contextmanager
def plain_copies(x_TD: Tensor, routing: Routing) -> Iterator[tuple[Tensor, Routing]]:
    """Copies to time a layer with: a backward is timed too, which tensors made for inference do not have."""
    with torch.inference_mode(False), torch.no_grad():
        x_TD, weights_TK, ids_TK = (t.clone() for t in (x_TD, routing.weights_TK, routing.ids_TK))
        yield x_TD, Routing(ids_TK=ids_TK, weights_TK=weights_TK)
