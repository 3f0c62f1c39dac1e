"""A whole layer by `serial` and by events, a GPU for every rank: `events.py --layer` runs it. Events that do
without nobody are run by fused's kernels; a row says in `reason` what ran.

From the gate's choices to the combined output and, with a backward, all gradients: our experts, weights and
tokens in bfloat16, all ways in turns, each sample the slowest rank's from aligned ranks. Nobody is late.
"""

from __future__ import annotations

import faulthandler
import random
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from imbrex.bench.results import write_results
from imbrex.bench.shapes import MODELS, Shape
from imbrex.bench.skew import make_routing
from imbrex.contracts import Routing, Strategy
from imbrex.exchange.exchange import Exchange
from imbrex.experts.experts import Experts
from imbrex.observe.clock import device_microseconds
from imbrex.overlap.events import Events
from imbrex.overlap.serial import Serial
from imbrex.placement import contiguous
from imbrex.transport import Nvlink

SERIAL, EVENTS, PATIENT = "serial", "events", "events, patient"
TAU_S = 20e-3
"""Longer than any rank waits here for one that is only busier."""
WARM, WAIT_S = 2, 20.0
PAUSE_CYCLES = {False: 3_000_000, True: 10_000_000}
"""The host queues a call while the GPU waits: about 1.5 ms, and 5 with a backward."""
Answers = list[Tensor]
Call = Callable[[], Answers]
Clock = Callable[[Callable[[], object], bool], float]


@dataclass(frozen=True, kw_only=True, slots=True)
class Setting:
    """A case that all ways are measured in."""

    skew: str
    backward: bool

    @property
    def op(self) -> str:
        return "layer forward+backward" if self.backward else "layer forward"


SETTINGS = [
    Setting(skew=skew, backward=backward) for skew in ("uniform", "zipf:1.2") for backward in (False, True)
]


@dataclass(frozen=True, kw_only=True, slots=True)
class Asked:
    """What every rank is asked for. tokens: of a rank. seconds: after so many a rank says where it hangs, and
    ends."""

    model: str
    tokens: int
    repeats: int
    seconds: float
    question: str
    out: str
    run: dict[str, Any]


class Layers:
    """One rank's layer of a shape, whose ways share experts and exchange."""

    def __init__(self, shape: Shape, transport: Nvlink, rank: int, world: int) -> None:
        self.shape, self.rank, self.world, self.device = shape, rank, world, transport.device
        self.transport = transport
        self.placement = contiguous(shape.num_experts, world)
        self.exchange = Exchange(
            self.placement, shape.hidden_size, shape.top_k, group=transport.group, transport=transport
        )
        self.experts = Experts(
            self.placement.local(rank),
            shape.hidden_size,
            shape.intermediate_size,
            device="meta",
            dtype=torch.bfloat16,
        ).to_empty(device=self.device)
        torch.manual_seed(rank)
        for weight in self.experts.parameters():
            weight.data.normal_().mul_(weight.shape[2] ** -0.5)
        self.ways: dict[str, Strategy] = {SERIAL: Serial(), EVENTS: Events(), PATIENT: Events(TAU_S, 1)}
        self.kept: dict[str, list[Tensor]] = {name: [] for name in self.ways}

    def call(self, name: str, setting: Setting, tokens: int) -> Call:
        """y, and with a backward the gradients of tokens, weights and experts."""
        drawn = make_routing(setting.skew, self.shape, tokens, rank=self.rank)
        torch.manual_seed(1 + self.rank)
        x_TD, d_y_TD = torch.randn(2, tokens, self.shape.hidden_size, device=self.device).bfloat16().unbind()
        weights_TK = drawn.weights_TK.to(self.device).requires_grad_(setting.backward)
        routing = Routing(ids_TK=drawn.ids_TK.to(self.device), weights_TK=weights_TK)
        x_TD = x_TD.clone().requires_grad_(setting.backward)
        leaves, strategy = [x_TD, weights_TK, *self.experts.parameters()], self.ways[name]

        def call() -> Answers:
            with torch.set_grad_enabled(setting.backward):
                output = strategy.run(x_TD, routing, self.exchange, self.experts, None)
            if output.kept_TK is not None:
                self.kept[name].append(output.kept_TK)
            if not setting.backward:
                return [output.y_TD]
            return [output.y_TD.detach(), *torch.autograd.grad(output.y_TD, leaves, d_y_TD)]

        return call

    def measure(self, model: str, setting: Setting, tokens: int, repeats: int, clock: Clock) -> list[dict]:
        """A row for every way; `bits` says whether answers without a dropped choice are those of serial,
        `reason` what ran."""
        calls = {name: self.call(name, setting, tokens) for name in self.ways}
        times: dict[str, list[float]] = {name: [] for name in calls}
        order = random.Random(1)  # the same on all ranks
        for turn in range(-WARM, repeats):
            for name, call in order.sample(list(calls.items()), len(calls)):
                spent = clock(call, setting.backward)
                times[name] += [spent][: turn >= 0]
            if turn < 0:
                self._forget()
        dropped = {name: self._dropped(kept) for name, kept in self.kept.items()}
        self._forget()
        same = self._compare(calls)
        slowest = torch.tensor(list(times.values()), device=self.device)
        dist.all_reduce(slowest, op=dist.ReduceOp.MAX, group=self.transport.group)
        case = {"model": model, "M": tokens, "W": self.world, "skew": setting.skew, "tau_ms": 1e3 * TAU_S}
        return [
            {
                "op": setting.op,
                "impl": name,
                "case": case,
                "n": repeats,
                "median_us": round(statistics.median(of_way), 1),
                "min_us": round(min(of_way), 1),
                "max_us": round(max(of_way), 1),
                "dropped_share": round(dropped[name], 5),
                "bits": same[name],
                "reason": self.ways[name].reason(self.exchange, self.experts),
            }
            for name, of_way in zip(times, slowest.tolist(), strict=True)
        ]

    def _forget(self) -> None:
        for kept in self.kept.values():
            kept.clear()

    def _sum(self, values: Sequence[float]) -> list[float]:
        """Of all ranks."""
        total = torch.tensor(values, dtype=torch.float64, device=self.device)
        dist.all_reduce(total, group=self.transport.group)
        return total.tolist()

    def _dropped(self, kept: Sequence[Tensor]) -> float:
        """The share of the choices of all ranks."""
        missing, choices = self._sum(
            [sum(float((~mask_TK).sum()) for mask_TK in kept), sum(mask_TK.numel() for mask_TK in kept)]
        )
        return missing / max(choices, 1.0)

    def _compare(self, calls: dict[str, Call]) -> dict[str, bool]:
        """Whether every way has serial's bits on all ranks, where it drops nothing."""
        truth, same = calls[SERIAL](), {SERIAL: True}
        for name in (EVENTS, PATIENT):
            self.transport.check(synchronize=True)
            self._sum([0.0])  # patience begins when all are here
            found = calls[name]()
            missing = sum(float((~kept_TK).sum()) for kept_TK in self.kept[name])
            differ = missing == 0 and not all(map(torch.equal, found, truth))
            same[name] = self._sum([float(differ)]) == [0.0]
            del found
            self._forget()
        return same


def work(rank: int, world: int, asked: Asked) -> list[dict[str, Any]]:
    """The rows of all settings, in the result file as soon as a setting's are there."""
    faulthandler.dump_traceback_later(asked.seconds, exit=True)
    transport = Nvlink(dist.group.WORLD, timeout=WAIT_S, exact_rows=False)
    layers, align = Layers(MODELS[asked.model], transport, rank, world), torch.zeros(1, device="cuda")

    def clock(call: Callable[[], object], backward: bool) -> float:
        return device_microseconds(call, PAUSE_CYCLES[backward], lambda: dist.all_reduce(align))

    rows: list[dict[str, Any]] = []
    for setting in SETTINGS:
        rows += layers.measure(asked.model, setting, asked.tokens, asked.repeats, clock)
        if rank == 0:
            save(asked, rows)
            print(line_of(rows[-len(layers.ways) :]), flush=True)
    return rows


def save(asked: Asked, rows: Sequence[dict[str, Any]]) -> None:
    definitions = {
        "median_us": "the slowest rank's, from aligned ranks and an idle GPU",
        "bits": "whether outputs and gradients are serial's, where nothing is dropped",
        "dropped_share": "of all timed calls' choices",
        "reason": "what ran",
    }
    write_results(asked.out, asked.question, asked.run | {"definitions": definitions}, rows)


def line_of(rows: Sequence[dict[str, Any]]) -> str:
    """What a setting came to, and the goal."""
    serial_us, events_us, patient_us = (row["median_us"] for row in rows)
    skew, ratio = rows[0]["case"]["skew"], events_us / serial_us
    most = 1.03 if skew == "uniform" else 1.0
    met = "reached" if ratio <= most else "missed"
    bits = "serial's bits" if all(row["bits"] for row in rows) else "OTHER BITS THAN SERIAL"
    return (
        f"{rows[0]['op']:22} {skew:8} serial {serial_us:9.1f} us  events {events_us:9.1f} ({ratio:.3f}, goal "
        f"{most:g}: {met})  patient {patient_us:9.1f} ({patient_us / serial_us:.3f}, "
        f"{rows[2]['dropped_share']:.2%} dropped)  {bits}"
    )


__all__ = ["Asked", "Layers", "Setting", "line_of", "save", "work"]
