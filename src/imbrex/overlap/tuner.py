"""Tuning results of one layer, stored and loaded so that all of its ranks have the same ones.

Ranks may run on several machines with different folders, and a file may appear or vanish between two reads.
So only the group's first rank reads and writes files, and sends what it finds to the others. Measurements are
made on all ranks, and the slowest rank's time counts. Within a process, layers with equal settings share
results, also if no folder can be written.
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


class _Alone:
    """The stand-in for the group of layers that have none."""


_alone = _Alone()
_remembered: weakref.WeakKeyDictionary[dist.ProcessGroup | _Alone, dict[str, str]] = (
    weakref.WeakKeyDictionary()
)
"""Results as JSON by file name, for every group of which this process is the first rank."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredResult(Generic[Value]):
    """A stored result. value: `None` if there is none. origin: a phrase that says where it was found, or why
    there is none."""

    value: Value | None
    origin: str


class Tuner:
    """Loads and stores the results of one layer. Every method is collective.

    subject: all that the results depend on; see `tunings`. uses_files: whether to use files too; otherwise
        results live as long as the process group. renews: whether to ignore the files' results. What this
        process has measured itself is used in any case.
    """

    def __init__(self, exchange: RowExchange, subject: Mapping[str, Any], *, uses_files: bool, renews: bool):
        self.gather, self.subject = exchange.transport.exchange_counts, dict(subject)
        self.is_first, self.uses_files, self.renews = exchange.geometry.rank == 0, uses_files, renews
        group = _alone if exchange.group is None else exchange.group
        self._memory = _remembered.setdefault(group, {})
        self.tunings = Tunings()

    def with_settings(self, settings: Mapping[str, Any]) -> Tuner:
        """A tuner for results that also depend on these settings."""
        other = copy.copy(self)
        other.subject = self.subject | dict(settings)
        return other

    def load(self, decision: str, parse: Callable[[dict[str, Any]], Value]) -> StoredResult[Value]:
        """The first rank's result for a decision, such as "schedule". parse: makes it from JSON; raises
        ValueError, TypeError or KeyError if the JSON holds no such result."""
        text = self._text(decision, parse) if self.is_first else None
        answer = json.loads(broadcast_text(self.gather, text, is_first=self.is_first))
        value = None if answer["value"] is None else parse(answer["value"])
        return StoredResult(value=value, origin=answer["origin"])

    def store(self, decision: str, value: Mapping[str, Any]) -> str:
        """Store a result that every rank has. Returns a phrase that says where it is stored."""
        problem = None
        if self.is_first:
            path = self.tunings.path_of(decision, self.subject)
            problem = self.tunings.write(decision, self.subject, value) if self.uses_files else None
            origin = f"kept in {path}" if self.uses_files and problem is None else "measured in this process"
            self._memory[path.name] = json.dumps({"value": value, "origin": origin, "measured": True})
            phrase = f"{origin}; {problem}" if problem else origin
        else:
            phrase = None
        return broadcast_text(self.gather, phrase, is_first=self.is_first)

    def _text(self, decision: str, parse: Callable[[dict[str, Any]], Any]) -> str:
        """The result and its origin as JSON, from memory or from a file."""
        path, reads = self.tunings.path_of(decision, self.subject), self.uses_files and not self.renews
        text = self._memory.get(path.name)
        if text is not None and (reads or json.loads(text)["measured"]):
            return text
        if not reads:
            return json.dumps({"value": None, "origin": ""})
        reading = self.tunings.read(decision, self.subject, parse)
        origin = f"kept on {reading.date} in {path}" if reading.value else (reading.problem or "")
        text = json.dumps({"value": reading.value, "origin": origin, "measured": False})
        if reading.value:
            self._memory[path.name] = text
        return text


def tuner_of(
    exchange: RowExchange, experts: Experts, x_TD: Tensor, *, fuses: bool, uses_files: bool, renews: bool
) -> Tuner:
    """The tuner of a layer for batches of about as many tokens as `x_TD` has. Collective.

    fuses: whether this rank's experts can be fused. uses_files, renews: as in `Tuner`.
    """
    gathered_W3 = exchange.transport.exchange_counts(words(len(x_TD), fuses, launched_on()))
    tokens_W, fuses_W, node_W = gathered_W3.T.tolist()
    subject = layer_of(exchange, experts, x_TD) | machine(x_TD.device)
    placement, tensor = exchange.geometry.placement, exchange.geometry.tensor_parallel
    subject |= {"slots": placement.num_slots, "tensor_parallel": tensor, "nodes": node_W}
    subject |= {"implementation": experts.implementation if isinstance(experts, Ours) else ""}
    subject |= {"tokens": bucket(max(tokens_W)), "fuses": bool(min(fuses_W))}
    return Tuner(exchange, subject, uses_files=uses_files, renews=renews)


def layer_of(exchange: RowExchange, experts: Experts, x_TD: Tensor) -> dict[str, Any]:
    """The settings on which a layer's times depend, besides the number of tokens, as JSON values."""
    wire, geometry = exchange.wire, exchange.geometry
    codecs = wire.dispatch, wire.combine, wire.dispatch_backward, wire.combine_backward
    return {
        "ranks": exchange.world_size,
        "transport": exchange.transport.name,
        "codecs": " ".join(codec.name for codec in codecs),
        "top_k": geometry.top_k,
        "width": x_TD.shape[1],
        "experts": type(experts).__name__,
        # Without the first size: ranks may have different numbers of experts.
        "parameters": [[*p.shape[1:]] for p in parameters_of(experts)],
        "dtype": str(x_TD.dtype),
        "device": x_TD.device.type,
    }


def bucket(tokens: int) -> int:
    """The size class in which `tokens` tokens are tuned: the next power of two. tokens: of the rank with the
    most."""
    return 1 << max(tokens - 1, 0).bit_length()


def broadcast_text(gather: Callable[[Tensor], Tensor], text: str | None, *, is_first: bool) -> str:
    """Return the first rank's text on all ranks. Collective. text: ignored on other ranks."""
    content = (text or "").encode() if is_first else b""
    length = int(gather(words(len(content)))[0, 0])
    padded = bytearray(content.ljust(-(-length // 8) * 8, b"\0"))
    if not padded:
        return ""
    text_W = gather(torch.frombuffer(padded, dtype=torch.int64))
    return text_W[0].numpy().tobytes()[:length].decode()


def fastest(seconds: Mapping[Any, Sequence[float]], direction: int, default: Any) -> Any:
    """The key with the shortest time, or the default unless the gain is more than 1 %. direction: the index
    into the seconds, 0 for the forward and 1 for the backward."""
    best = min(seconds, key=lambda key: seconds[key][direction])
    return best if seconds[best][direction] < 0.99 * seconds[default][direction] else default


__all__ = ["StoredResult", "Tuner", "broadcast_text", "bucket", "fastest", "layer_of", "tuner_of"]
