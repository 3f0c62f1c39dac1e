"""Steps of a layer on ranks of which one is late now and then: seconds, phases, and what was dropped."""

from __future__ import annotations

import math
import random
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import imbrex
from imbrex.bench.shapes import Shape
from imbrex.bench.skew import make_routing
from imbrex.observe import Recorder, fold
from imbrex.overlap import Events
from imbrex.reproduce.frame import Options
from imbrex.reproduce.stage import Network, RanOn, on_ranks

LATE = 3
"""The rank that is late."""
NETWORK = Network(nodes=1, ranks_per_node=4, inter="none")
STEPS = {False: 100, True: 1000}
LIMIT_S = {False: 60.0, True: 150.0}
"""Seconds after which no further steps are begun: fewer are then reported."""
WARM = 3
SURE = 20.0
"""Logit of a choice that is given: a random gate's are below 1."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Way:
    """A schedule under delays. schedule: `serial` or `events`. tau: in median steps, or a quantile as p95.
    every: calls of which one is given up at most. budget: share of choices that may be dropped. late: where
    rank 3 is late, `never`, `before` its step or in its `experts`. skew: of the choices, as `imbrex bench
    layer --skew` takes it, or `even`. backward: whether a step has one."""

    schedule: str
    tau: float | str = float("inf")
    epsilon: int = 0
    every: int = 1
    budget: float = 1.0
    late: str = "never"
    skew: str = "uniform"
    backward: bool = True


@dataclass(frozen=True, kw_only=True, slots=True)
class Load:
    """A layer and its stragglers. share: of the steps, in which rank 3 is late by `factor` median steps."""

    tokens: int = 256
    width: int = 128
    inner: int = 256
    experts: int = 8
    top_k: int = 2
    share: float = 0.1
    factor: float = 5.0


def settings(ways: Mapping[str, Way], load: Load, *, steps: int, limit_s: float = math.inf) -> dict[str, Any]:
    what = {"ways": {name: asdict(way) for name, way in ways.items()}, "load": asdict(load)}
    return what | {"steps": steps, "limit_s": limit_s}


class LateSteps:
    """Steps in which rank 3 is late: of every `1 / share` in a row one, drawn."""

    def __init__(self, share: float, seed: int = 0) -> None:
        self.among, self.drawn = round(1 / share), random.Random(seed)
        self.late = 0

    def __call__(self, step: int) -> bool:
        """Whether it is late in this step; to be asked of one after the other."""
        if step % self.among == 0:
            self.late = step + self.drawn.randrange(self.among)
        return step == self.late


class Clock:
    """A limit of seconds that all ranks see passed at the same step."""

    def __init__(self, limit_s: float) -> None:
        self.end = time.monotonic() + limit_s

    def is_over(self) -> bool:
        """Collective: whether rank 0's time is up."""
        over = torch.tensor(time.monotonic() > self.end)
        dist.broadcast(over, 0)
        return bool(over)


def on_rank(request: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Measurements by way: `seconds` [steps][ranks], `late` steps, `dropped` of all `choices`, milliseconds
    by phase."""
    load, clock = Load(**request["load"]), Clock(request["limit_s"])
    torch.manual_seed(dist.get_rank())
    x_TD = torch.randn(load.tokens, load.width)
    ways = {name: Way(**way) for name, way in request["ways"].items()}
    medians_s = {backward: _median(load, x_TD, backward) for backward in (True, False)}
    runners = {name: _Runner(way, load, x_TD, medians_s[way.backward]) for name, way in ways.items()}
    is_late = LateSteps(load.share)
    # Waits are learnt, and caches warm, before anything counts.
    for number in range(-2 * round(1 / load.share), request["steps"]):
        late, turn = is_late(number), number % len(runners)
        names = list(runners)
        for name in names[turn:] + names[:turn]:
            runners[name].step(number < 0, is_late=late)
        if number > 0 and number % 10 == 0 and clock.is_over():
            break
    return {name: runner.gather() for name, runner in runners.items()}


def _median(load: Load, x_TD: Tensor, backward: bool) -> float:
    """Seconds of a step of `serial`, of the slowest rank."""
    plain = _Runner(Way(schedule="serial", backward=backward), load, x_TD, median_s=0.0)
    for number in range(-WARM, 3 * WARM):
        plain.step(number < 0)
    return largest(statistics.median(plain.seconds))


class _Runner:
    """One way's layer and its record."""

    def __init__(self, way: Way, load: Load, x_TD: Tensor, median_s: float) -> None:
        config = imbrex.MoEConfig(
            hidden_size=load.width, intermediate_size=load.inner, num_experts=load.experts, top_k=load.top_k
        )
        tau = way.tau if isinstance(way.tau, str) else way.tau * median_s
        patience = tau, way.epsilon, way.every, way.budget
        schedule = Events(*patience) if way.schedule == "events" else way.schedule
        self.way, self.x_TD, self.late_s = way, x_TD, load.factor * median_s
        self.recorder = Recorder(rank=dist.get_rank())
        self.layer = imbrex.MoELayer(
            config, dist.group.WORLD, transport="alltoall", schedule=schedule, observer=self.recorder
        )
        self.layer.gate.project = _projection(way.skew, load)
        self.sleeping = False
        self.layer.experts.register_forward_pre_hook(lambda *_: self._sleep("experts"))
        self.seconds: list[float] = []
        self.late_steps: list[bool] = []
        self.dropped = self.choices = 0
        self.phases: dict[str, float] = {}

    def _sleep(self, where: str) -> None:
        if self.sleeping and self.way.late == where:
            self.sleeping = False
            time.sleep(self.late_s)

    def step(self, warming: bool, *, is_late: bool = False) -> None:
        """A forward, and a backward where the way has one; the ranks begin together."""
        dist.barrier()
        self.recorder.begin_step(len(self.seconds))
        begin = time.perf_counter()
        self.sleeping = is_late and dist.get_rank() == LATE
        self._sleep("before")
        with torch.set_grad_enabled(self.way.backward):
            y_TD = self.layer(self.x_TD.detach().requires_grad_(self.way.backward))
        if self.way.backward:
            y_TD.square().mean().backward()
        took_s = time.perf_counter() - begin
        self.layer.zero_grad()
        total_ms = self.recorder.end_step(keep=False)
        # A budget is of all calls, so those that warm up count here.
        routing = self.layer.routing
        assert routing is not None
        self.choices += routing.ids_TK.numel()
        self.dropped += 0 if routing.kept_TK is None else int((~routing.kept_TK).sum())
        if warming:
            return
        self.seconds.append(took_s)
        self.late_steps.append(is_late)
        for name, ms in fold(total_ms, 1e3 * took_s).items():
            self.phases[name] = self.phases.get(name, 0.0) + ms

    def gather(self) -> dict[str, Any]:
        everyone: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, (self.seconds, self.dropped, self.choices, self.phases))
        return {
            "seconds": [list(of_step) for of_step in zip(*(e[0] for e in everyone), strict=True)],
            "late": self.late_steps,
            "dropped": sum(e[1] for e in everyone),
            "choices": sum(e[2] for e in everyone),
            "phases": everyone[0][3],
        }


def largest(value: float) -> float:
    tensor = torch.tensor(value, dtype=torch.float64)
    dist.all_reduce(tensor, op=dist.ReduceOp.MAX)
    return float(tensor)


def _projection(skew: str, load: Load) -> Callable[..., Tensor]:
    """Logits that choose by `skew`, the same in every step; the gate's own decide the weights."""
    shape = Shape(
        hidden_size=load.width, intermediate_size=load.inner, num_experts=load.experts, top_k=load.top_k
    )
    draw = even_choices if skew == "even" else partial(make_routing, skew)
    ids_TK = draw(shape, load.tokens, rank=dist.get_rank()).ids_TK
    sure_TE = torch.zeros(load.tokens, load.experts).scatter_(1, ids_TK, SURE)

    def project(x_TD: Tensor, weight_ED: Tensor, num_sequences: int) -> Tensor:
        return x_TD.float() @ weight_ED.float().T + sure_TE

    return project


def even_choices(shape: Shape, tokens: int, *, rank: int) -> imbrex.Routing:
    """Choices of which every expert has as many: each token's are neighbours, in turns."""
    order_T = torch.randperm(tokens, generator=torch.Generator().manual_seed(rank))
    ids_TK = (order_T[:, None] * shape.top_k + torch.arange(shape.top_k)) % shape.num_experts
    return imbrex.Routing(ids_TK=ids_TK, weights_TK=torch.full(ids_TK.shape, 1 / shape.top_k))


def punctual(measured: Mapping[str, Any]) -> list[float]:
    """Seconds of every step of the slowest rank that was not late itself."""
    return [max(of_ranks[:LATE]) for of_ranks in measured["seconds"]]


def quantile(values: Sequence[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def shares(measured: Mapping[str, Any]) -> dict[str, float]:
    """Shares of rank 0's time by phase."""
    total = sum(measured["phases"].values())
    return {name: ms / total for name, ms in measured["phases"].items()}


def communicating(of_phases: Mapping[str, float]) -> float:
    return sum(of_phases.get(name, 0.0) for name in ("plan", "dispatch", "combine"))


def measure(
    options: Options, ways: Mapping[str, Way], load: Load | None = None, steps: int = 0
) -> tuple[dict[str, Any], RanOn, int]:
    """The record of every way, where it ran, and how many steps each had. steps: so many, however long they
    take; 0: as many as fit in `LIMIT_S`."""
    steps = options.rounds or steps
    limit_s = math.inf if steps else LIMIT_S[options.full]
    request = settings(ways, load or Load(), steps=steps or STEPS[options.full], limit_s=limit_s)
    measured, ran_on = on_ranks("stragglers", request, NETWORK, timeout_s=3600.0)
    return measured, ran_on, min(len(way["seconds"]) for way in measured.values())


def row(
    name: str, measured: Mapping[str, Any], ran_on: RanOn, steps: int, load: Load | None = None
) -> dict[str, Any]:
    """A way's row of the result file."""
    times = punctual(measured)
    return {
        "op": "straggler",
        "impl": name,
        "case": ran_on.case | asdict(load or Load()),
        "median_us": 1e6 * quantile(times, 0.5),
        "p95_us": 1e6 * quantile(times, 0.95),
        "p99_us": 1e6 * quantile(times, 0.99),
        "min_us": 1e6 * min(times),
        "max_us": 1e6 * max(times),
        "dropped_share": measured["dropped"] / measured["choices"],
        "communicating": communicating(shares(measured)),
        "n": steps,
    }


__all__ = [
    "LATE",
    "NETWORK",
    "WARM",
    "Clock",
    "LateSteps",
    "Load",
    "Way",
    "communicating",
    "largest",
    "measure",
    "on_rank",
    "punctual",
    "quantile",
    "row",
    "shares",
]
