"""Results of tuning for one layer, the same on all of its ranks: the first rank's, spread.

Ranks may lie on several machines, whose folders differ, and a file may come or go between two reads. So the
first rank alone reads, and what it holds is sent to the others, its text and where it comes from; what is
measured is measured on all, and each number counts with its slowest rank. No rank decides by what it alone
sees. Layers of a process that are alike share results also where no folder can be written.
"""

from __future__ import annotations

import copy
import json
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from imbrex.contracts import Experts, RowExchange
from imbrex.experts.experts import Experts as Ours
from imbrex.overlap.pipelined import parameters_of
from imbrex.overlap.tunings import Tunings, machine
from imbrex.runtime.words import words
from imbrex.transport.nodes import launched_on

Value = TypeVar("Value")
_remembered: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[str, str]] = weakref.WeakKeyDictionary()
"""Texts by the names of their files, of every group whose first rank this is."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Recalled(Generic[Value]):
    """A result, or `None` and why there is none, and in words where it comes from."""

    value: Value | None
    origin: str


class Tuner:
    """The results of one layer on its ranks. Every method is called by all of them, in the same order.

    keeps: in files too; else only as long as the group lives. renews: what files hold does not count.
    """

    def __init__(self, exchange: RowExchange, subject: Mapping[str, Any], *, keeps: bool, renews: bool):
        self.gather, self.subject = exchange.transport.exchange_counts, dict(subject)
        self.leads, self.keeps, self.renews = exchange.geometry.rank == 0, keeps, renews
        self._memory = {} if exchange.group is None else _remembered.setdefault(exchange.group, {})
        self.tunings = Tunings()

    def under(self, settings: Mapping[str, Any]) -> Tuner:
        """The tuner of what depends on these settings, too."""
        other = copy.copy(self)
        other.subject = self.subject | dict(settings)
        return other

    def recall(self, decision: str, parse: Callable[[dict[str, Any]], Value]) -> Recalled[Value]:
        """The first rank's result of a decision."""
        text = self._text(decision, parse) if self.leads else None
        answer = json.loads(spread(self.gather, text, leads=self.leads))
        value = None if answer["value"] is None else parse(answer["value"])
        return Recalled(value=value, origin=answer["origin"])

    def keep(self, decision: str, value: Mapping[str, Any]) -> str:
        """Remember a result that every rank has, and keep it in a file; where it is now, in words."""
        complaint = None
        if self.leads:
            path = self.tunings.path_of(decision, self.subject)
            complaint = self.tunings.write(decision, self.subject, value) if self.keeps else None
            origin = f"kept in {path}" if self.keeps and complaint is None else "measured in this process"
            text = json.dumps({"value": value, "origin": origin})
            self._memory[path.name] = text
            sentence = f"{origin}; {complaint}" if complaint else origin
        else:
            sentence = None
        return spread(self.gather, sentence, leads=self.leads)

    def _text(self, decision: str, parse: Callable[[dict[str, Any]], Any]) -> str:
        path = self.tunings.path_of(decision, self.subject)
        if path.name in self._memory:
            return self._memory[path.name]
        if not self.keeps or self.renews:
            return json.dumps({"value": None, "origin": ""})
        reading = self.tunings.read(decision, self.subject, parse)
        origin = f"kept on {reading.date} in {path}" if reading.value else (reading.complaint or "")
        text = json.dumps({"value": reading.value, "origin": origin})
        if reading.value:
            self._memory[path.name] = text
        return text


def tuner_of(
    exchange: RowExchange, experts: Experts, x_TD: Tensor, *, fuses: bool, keeps: bool, renews: bool
) -> Tuner:
    """The tuner of a layer for so many tokens. fuses: whether this rank's experts can be fused."""
    gathered_W3 = exchange.transport.exchange_counts(words(len(x_TD), fuses, launched_on()))
    tokens_W, fuses_W, node_W = gathered_W3.T.tolist()
    subject = layer_of(exchange, experts, x_TD) | machine(x_TD.device)
    placement, tensor = exchange.geometry.placement, exchange.geometry.tensor_parallel
    subject |= {"slots": placement.num_slots, "tensor_parallel": tensor, "nodes": node_W}
    subject |= {"implementation": experts.implementation if isinstance(experts, Ours) else ""}
    subject |= {"tokens": bucket(max(tokens_W)), "fuses": bool(min(fuses_W))}
    return Tuner(exchange, subject, keeps=keeps, renews=renews)


def layer_of(exchange: RowExchange, experts: Experts, x_TD: Tensor) -> dict[str, Any]:
    """Describes a layer, whatever its number of tokens, in values that JSON has."""
    wire, geometry = exchange.wire, exchange.geometry
    codecs = wire.dispatch, wire.combine, wire.dispatch_backward, wire.combine_backward
    return {
        "ranks": exchange.world_size,
        "transport": exchange.transport.name,
        "codecs": " ".join(codec.name for codec in codecs),
        "top_k": geometry.top_k,
        "width": x_TD.shape[1],
        "experts": type(experts).__name__,
        # Ranks may hold unequally many experts.
        "parameters": [[*p.shape[1:]] for p in parameters_of(experts)],
        "dtype": str(x_TD.dtype),
        "device": x_TD.device.type,
    }


def bucket(tokens: int) -> int:
    """The power of two that so many tokens of a rank, those of the rank that has most, are tuned as."""
    return 1 << max(tokens - 1, 0).bit_length()


def spread(gather: Callable[[Tensor], Tensor], text: str | None, *, leads: bool) -> str:
    """The text of the rank that leads, the group's first, on all ranks. Collective."""
    content = (text or "").encode() if leads else b""
    length = int(gather(words(len(content)))[0, 0])
    padded = bytearray(content.ljust(-(-length // 8) * 8, b"\0"))
    if not padded:
        return ""
    text_W = gather(torch.frombuffer(padded, dtype=torch.int64))
    return text_W[0].numpy().tobytes()[:length].decode()


def faster(seconds: Mapping[Any, Sequence[float]], side: int, default: Any) -> Any:
    """The key whose seconds on that side are least, or the default where that gains under a hundredth."""
    best = min(seconds, key=lambda key: seconds[key][side])
    return best if seconds[best][side] < 0.99 * seconds[default][side] else default


__all__ = ["Recalled", "Tuner", "bucket", "faster", "layer_of", "spread", "tuner_of"]
