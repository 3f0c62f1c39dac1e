"""The strategy that a profile of the layer, taken at its first call, says ends first."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor

from imbrex.contracts import Experts, Routing
from imbrex.crossings import Crossings
from imbrex.exchange import Exchange
from imbrex.overlap.choice import Choice, choose
from imbrex.overlap.pipelined import Pipelined, parameters_of
from imbrex.overlap.profile import Profile
from imbrex.overlap.profiler import measure
from imbrex.overlap.serial import Serial


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
        self.choices[exchange] = choice
        self._running[exchange] = Pipelined(
            choice.scheduler, choice.degree, times=profile.even_times(choice.degree)
        )

    def _profile(self, x_TD: Tensor, routing: Routing, exchange: Exchange, experts: Experts) -> Profile:
        gather = exchange.transport.exchange_counts
        there = self.path is not None and self.path.exists()
        if self.path is not None and bool(gather(torch.tensor([int(there)])).min()):
            return Profile.load(self.path)
        plain = Routing(ids_TK=routing.ids_TK, weights_TK=routing.weights_TK.detach())
        measured = measure(
            exchange,
            experts,
            x_TD.detach(),
            plain,
            parameters_of(experts),
            degrees=self.degrees,
            scheduler=self.scheduler,
        )
        if self.path is not None and exchange.geometry.rank == 0:
            measured.save(self.path)
        return measured
