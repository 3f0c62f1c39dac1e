"""The scheduler and the number of chunks that a profile says end first."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from imbrex.contracts import Experts, Routing
from imbrex.crossings import Crossings
from imbrex.exchange import Exchange
from imbrex.overlap.exact import MOST_CHUNKS
from imbrex.overlap.pipelined import Pipelined, parameters_of
from imbrex.overlap.profile import Profile, measure
from imbrex.overlap.schedulers import SCHEDULERS
from imbrex.overlap.serial import Serial


@dataclass(frozen=True, kw_only=True, slots=True)
class Choice:
    """Predicted seconds of the forward, planning included, and of the backward."""

    scheduler: str
    degree: int
    forward: float
    backward: float

    @property
    def seconds(self) -> float:
        return self.forward + self.backward


def predict(profile: Profile, scheduler: str, degree: int) -> Choice:
    """What a scheduler with so many equal chunks takes."""
    sizes = [profile.tokens / degree] * degree
    spans = []
    for backward in (False, True):
        order = SCHEDULERS[scheduler](profile.times(sizes, backward=backward))
        spans.append(profile.makespan(order, backward=backward))
    return Choice(scheduler=scheduler, degree=degree, forward=spans[0], backward=spans[1])


def choose(
    profile: Profile, degrees: Sequence[int] = (1, 2, 3, 4, 6, 8), scheduler: str | None = None
) -> Choice:
    """The fastest of `degrees`, each with `scheduler` or else with `exact` up to 4 chunks and `optsche`
    beyond; of equals, the fewest chunks."""
    found = [predict(profile, scheduler or ("exact" if r <= MOST_CHUNKS else "optsche"), r) for r in degrees]
    return min(found, key=lambda choice: (choice.seconds, choice.degree))


class Auto:
    """Measures the tasks at an exchange's first call, or reads them from `profile`, and from then on runs
    what is predicted to end first.

    profile: a file; written by the group's first rank if it is not there, read by all if it is. On several
        machines it must lie where all see it. The same numbers on every rank decide, so every rank runs the
        same.
    degrees: numbers of chunks to choose from. scheduler: the only one to use.
    """

    def __init__(
        self,
        profile: Path | str | None = None,
        degrees: Sequence[int] = (1, 2, 4, 8),
        *,
        scheduler: str | None = None,
        name: str = "auto",
    ) -> None:
        if not degrees or min(degrees) < 1:
            raise ValueError(
                f"schedule: auto with degrees {tuple(degrees)}; give numbers of chunks from 1 on"
            )
        self.path, self.degrees = None if profile is None else Path(profile), tuple(degrees)
        self.scheduler, self.name = scheduler, name
        self.choices: weakref.WeakKeyDictionary[Exchange, Choice] = weakref.WeakKeyDictionary()
        self._running: weakref.WeakKeyDictionary[Exchange, Pipelined] = weakref.WeakKeyDictionary()

    def run(
        self,
        x_TD: Tensor,
        routing: Routing,
        exchange: Exchange,
        experts: Experts,
        addend: Callable[[], Tensor] | None,
    ) -> Tensor:
        if torch.compiler.is_compiling() or not isinstance(exchange._crossings, Crossings):
            return Serial().run(x_TD, routing, exchange, experts, addend)
        if exchange not in self._running:
            exchange._crossings.handshake(x_TD, routing)
            self._decide(x_TD, routing, exchange, experts)
        return self._running[exchange].run(x_TD, routing, exchange, experts, addend)

    def _decide(self, x_TD: Tensor, routing: Routing, exchange: Exchange, experts: Experts) -> None:
        profile = self._profile(x_TD, routing, exchange, experts)
        choice = choose(profile, self.degrees, self.scheduler)
        sizes = [profile.tokens / choice.degree] * choice.degree
        times = profile.times(sizes), profile.times(sizes, backward=True)
        self.choices[exchange] = choice
        self._running[exchange] = Pipelined(choice.scheduler, choice.degree, times=times)

    def _profile(self, x_TD: Tensor, routing: Routing, exchange: Exchange, experts: Experts) -> Profile:
        gather = exchange.transport.exchange_counts
        there = self.path is not None and self.path.exists()
        if self.path is not None and bool(gather(torch.tensor([int(there)])).min()):
            return Profile.load(self.path)
        plain = Routing(ids_TK=routing.ids_TK, weights_TK=routing.weights_TK.detach())
        measured = measure(
            exchange, experts, x_TD.detach(), plain, parameters_of(experts), degrees=self.degrees
        )
        if self.path is not None and exchange.geometry.rank == 0:
            measured.save(self.path)
        return measured
