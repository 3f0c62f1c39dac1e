"""Seconds of MoE layers, one variant beside the other, on the ranks of a stage."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import imbrex
from imbrex.demo.model import Attention, BytesLMConfig
from imbrex.observe import Recorder

MOVING = ("plan", "dispatch", "combine")


@dataclass(frozen=True, kw_only=True, slots=True)
class Way:
    """One way to run the same layers."""

    transport: str = "alltoall"
    codec: str = "identity"
    schedule: str = "serial"


@dataclass(frozen=True, kw_only=True, slots=True)
class Work:
    """The model that is timed.

    layers: of attention (where `sequence` > 0 says how long a sequence is) and experts. tokens: T of a
    rank. experts: E of all ranks."""

    layers: int = 1
    tokens: int = 1024
    width: int = 256
    inner: int = 256
    experts: int = 4
    top_k: int = 1
    sequence: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Timed:
    """Median seconds over rounds, of the slowest rank. moving: of the steps that wait for other ranks, and
    experts: of the experts; of `serial` only."""

    forward: float
    backward: float
    shortest: float
    longest: float
    moving: float = 0.0
    experts: float = 0.0

    @property
    def step(self) -> float:
        return self.forward + self.backward


def settings(ways: Mapping[str, Way], work: Work, *, rounds: int) -> dict[str, Any]:
    return {
        "ways": {name: asdict(way) for name, way in ways.items()},
        "work": asdict(work),
        "rounds": rounds,
    }


def read(measured: Mapping[str, Any]) -> dict[str, Timed]:
    """The times that `on_rank` returned, by way."""
    return {name: Timed(**of) for name, of in measured.items()}


def on_rank(request: Mapping[str, Any]) -> dict[str, Any]:
    """Time every way in turn within a round, after two rounds for warming up."""
    work = Work(**request["work"])
    stacks = {name: _Stack(work, Way(**way)) for name, way in request["ways"].items()}
    torch.manual_seed(1 + dist.get_rank())
    x_TD = torch.randn(work.tokens, work.width)
    rounds_by_name: dict[str, list[tuple[float, ...]]] = {name: [] for name in stacks}
    for number in range(request["rounds"] + 2):
        for name, stack in stacks.items():
            took = stack.step(x_TD, number)
            if number >= 2:
                rounds_by_name[name].append(took)
    return {name: _digest(rounds) for name, rounds in rounds_by_name.items()}


def _digest(rounds: list[tuple[float, ...]]) -> dict[str, float]:
    names = ("forward", "backward", "moving", "experts")
    medians = map(statistics.median, zip(*rounds, strict=True))
    whole = [pair[0] + pair[1] for pair in rounds]
    return dict(zip(names, medians, strict=True)) | {"shortest": min(whole), "longest": max(whole)}


class _Stack:
    """The layers of one way; the same parameters in every way."""

    def __init__(self, work: Work, way: Way) -> None:
        torch.manual_seed(0)
        group = dist.group.WORLD
        config = imbrex.MoEConfig(
            hidden_size=work.width,
            intermediate_size=work.inner,
            num_experts=work.experts,
            top_k=work.top_k,
        )
        self.recorder = Recorder(rank=dist.get_rank())
        self.layers = nn.ModuleList(
            imbrex.MoELayer(
                config,
                group,
                transport=way.transport,
                codec=way.codec,
                schedule=way.schedule,
                observer=self.recorder,
                layer=index,
            )
            for index in range(work.layers)
        )
        self.sequence = work.sequence
        heads = BytesLMConfig(hidden_size=work.width, num_layers=work.layers, num_heads=work.width // 64)
        count = work.layers if work.sequence else 0
        self.attention = nn.ModuleList(Attention(heads) for _ in range(count))
        half = work.width // heads.num_heads // 2
        self.turn_SC = torch.cat([torch.ones(work.sequence, half), torch.zeros(work.sequence, half)], 1)

    def step(self, x_TD: Tensor, number: int) -> tuple[float, ...]:
        """Seconds of a forward and a backward, and of the moving and the experts in both, each of the
        slowest rank."""
        self.recorder.begin_step(number)
        x = x_TD.clone().requires_grad_()
        outputs: list[Tensor] = []
        forward = _timed(lambda: outputs.append(self.run(x)))
        backward = _timed(lambda: outputs[0].backward(torch.ones_like(outputs[0])))
        spans = self.recorder.end_step(keep=False)
        self.recorder.take_counters()
        for parameter in self.layers.parameters():
            parameter.grad = None
        of_kind: dict[str, float] = dict.fromkeys((*MOVING, "experts"), 0.0)
        for name, ms in spans.items():
            kind = name.removesuffix("_backward")
            of_kind[kind] = of_kind.get(kind, 0.0) + ms / 1e3
        return _slowest(forward, backward, sum(of_kind[name] for name in MOVING), of_kind["experts"])

    def run(self, x_TD: Tensor) -> Tensor:
        for index, layer in enumerate(self.layers):
            if self.sequence:
                x_BSD = x_TD.view(-1, self.sequence, x_TD.shape[1])
                x_TD = x_TD + self.attention[index](x_BSD, self.turn_SC).reshape(x_TD.shape)
            x_TD = x_TD + layer(x_TD)
        return x_TD


def _timed(step: Callable[[], object]) -> float:
    dist.barrier()
    begin = time.perf_counter()
    step()
    return time.perf_counter() - begin


def _slowest(*seconds: float) -> tuple[float, ...]:
    of_rank = torch.tensor(seconds, dtype=torch.float64)
    dist.all_reduce(of_rank, dist.ReduceOp.MAX)
    return tuple(of_rank.tolist())
