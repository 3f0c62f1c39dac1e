"""The strategy that a profile of the layer, taken at its first call, says ends first."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, MutableMapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from imbrex.contracts import Experts, Output, Routing, RowExchange, Strategy
from imbrex.overlap.fused import Fused, why_not_exchange, why_not_experts
from imbrex.overlap.pipelined import Pipelined, find, parameters_of
from imbrex.overlap.profiler import compare, measure
from imbrex.overlap.serial import Serial
from imbrex.runtime.words import words
from imbrex.schedule.choice import Choice, choose
from imbrex.schedule.profile import Profile

FUSED_GAIN = 1.02
"""Times as fast as the best order of chunks that `fused` must be, forward and backward together."""
_compared: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[Any, float]] = weakref.WeakKeyDictionary()
_measured: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[Any, Profile]] = weakref.WeakKeyDictionary()


class Auto:
    """Measures the tasks at an exchange's first call, or reads them from `profile`, and from then on runs
    what is predicted to end first; or `fused`, where the exchange and the experts can and whole runs of both
    say that it is 2 % faster. Layers of a model that are alike are measured once.

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
        if scheduler is not None:
            find(scheduler)
        self.scheduler, self.name = scheduler, name
        self.choices: weakref.WeakKeyDictionary[RowExchange, Choice] = weakref.WeakKeyDictionary()
        self.gains: weakref.WeakKeyDictionary[RowExchange, float] = weakref.WeakKeyDictionary()
        self._running: weakref.WeakKeyDictionary[RowExchange, Strategy] = weakref.WeakKeyDictionary()

    def reason(self, exchange: RowExchange) -> str:
        choice = self.choices.get(exchange)
        if choice is None:
            return "measures at its first call"
        times = f"{1e3 * choice.forward:.3g} ms forward and {1e3 * choice.backward:.3g} backward"
        order, gain = f"{choice.scheduler}-{choice.degree}", self.gains.get(exchange)
        if gain is None:
            return f"{order}, predicted {times}"
        if gain >= FUSED_GAIN:
            return f"fused, measured {gain:.2f} times as fast as {order}, forward and backward together"
        return f"{order}, predicted {times}; fused is {gain:.2f} times as fast, and must be {FUSED_GAIN}"

    def run(
        self,
        x_TD: Tensor,
        routing: Routing,
        exchange: RowExchange,
        experts: Experts,
        addend: Callable[[], Tensor] | None,
    ) -> Output:
        if torch.compiler.is_compiling():
            return Serial().run(x_TD, routing, exchange, experts, addend)
        if exchange not in self._running:
            exchange.dispatcher.check_in(x_TD, routing)
            self._decide(x_TD, routing, exchange, experts)
        return self._running[exchange].run(x_TD, routing, exchange, experts, addend)

    def _decide(self, x_TD: Tensor, routing: Routing, exchange: RowExchange, experts: Experts) -> None:
        profile = self._profile(x_TD, routing, exchange, experts)
        choice = choose(profile, self.degrees, self.scheduler)
        self.choices[exchange] = choice
        order = Pipelined(choice.scheduler, choice.degree, times=profile.even_times(choice.degree))
        self._running[exchange] = self._or_fused(order, x_TD, routing, exchange, experts)

    def _or_fused(
        self, order: Pipelined, x_TD: Tensor, routing: Routing, exchange: RowExchange, experts: Experts
    ) -> Strategy:
        """The order of chunks, or `fused` where that is so much faster."""
        if self.scheduler is not None or why_not_exchange(exchange) is not None:
            return order
        known, key = self._known(exchange, _compared), self._key(x_TD, exchange, experts)
        answers_W = exchange.transport.exchange_counts(words(why_not_experts(experts) is None, key in known))
        # on the host: counts of all ranks are
        can, knows = answers_W.min(0).values.tolist()
        fused = Fused()
        if not can:
            return order
        if not knows:
            both = {"order": order, "fused": fused}
            with plain_copies(x_TD, routing) as inputs:
                seconds = compare(exchange, experts, *inputs, parameters_of(experts), both)
            known[key] = sum(seconds["order"]) / sum(seconds["fused"])
        self.gains[exchange] = known[key]
        return fused if known[key] >= FUSED_GAIN else order

    def _profile(self, x_TD: Tensor, routing: Routing, exchange: RowExchange, experts: Experts) -> Profile:
        gather = exchange.transport.exchange_counts
        if self.path is not None:
            files_W = gather(words(self.path.exists(), self.path.parent.is_dir()))
            if bool(files_W[:, 0].min()):
                return Profile.load(self.path, self._layer(x_TD, exchange, experts))
            if not bool(files_W[0, 1]):
                raise ValueError(f"schedule: profile {self.path} is in no folder; make it, or give another")
        known, key = self._known(exchange, _measured), self._key(x_TD, exchange, experts)
        # A rank that has it waits for one that has not.
        if not bool(gather(words(key in known)).min()):
            settings = {"degrees": self.degrees, "scheduler": self.scheduler}
            with plain_copies(x_TD, routing) as inputs:
                known[key] = measure(exchange, experts, *inputs, parameters_of(experts), **settings)
        if self.path is not None and exchange.geometry.rank == 0:
            known[key].save(self.path, self._layer(x_TD, exchange, experts))
        return known[key]

    def _known(self, exchange: RowExchange, kept: MutableMapping[Any, dict[Any, Any]]) -> dict[Any, Any]:
        """The part of `kept` that is of layers before, on the same ranks."""
        group = getattr(exchange.transport, "group", None)
        return {} if group is None else kept.setdefault(group, {})

    def _layer(self, x_TD: Tensor, exchange: RowExchange, experts: Experts) -> dict[str, Any]:
        """Describes what a kept profile is of; it serves any number of tokens."""
        wire = exchange.wire
        codecs = wire.dispatch, wire.combine, wire.dispatch_backward, wire.combine_backward
        return {
            "ranks": exchange.world_size,
            "transport": exchange.transport.name,
            "codecs": " ".join(codec.name for codec in codecs),
            "top_k": exchange.geometry.top_k,
            "width": x_TD.shape[1],
            "experts": type(experts).__name__,
            # Ranks may hold unequally many experts.
            "parameters": [list(p.shape[1:]) for p in parameters_of(experts)],
            "dtype": str(x_TD.dtype),
            "device": x_TD.device.type,
        }

    def _key(self, x_TD: Tensor, exchange: RowExchange, experts: Experts) -> Any:
        """Layers with the same are taken to be alike."""
        shapes = tuple((p.shape, p.dtype) for p in parameters_of(experts))
        wire = exchange.wire
        codecs = wire.dispatch, wire.combine, wire.dispatch_backward, wire.combine_backward
        choice = self.degrees, self.scheduler
        named = type(experts), exchange.transport.name, exchange.geometry.top_k
        return choice, named, tuple(codec.name for codec in codecs), shapes, x_TD.shape, x_TD.dtype


@contextmanager
def plain_copies(x_TD: Tensor, routing: Routing) -> Iterator[tuple[Tensor, Routing]]:
    """Copies to time a layer with: a backward is timed too, which tensors made for inference do not have."""
    with torch.inference_mode(False), torch.no_grad():
        x_TD, weights_TK, ids_TK = (t.clone() for t in (x_TD, routing.weights_TK, routing.ids_TK))
        yield x_TD, Routing(ids_TK=ids_TK, weights_TK=weights_TK)
