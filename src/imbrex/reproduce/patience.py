"""Training while one rank is late now and then: loss, wall time and what is dropped, by patience.

The demo's language model with one layer of experts on 4 gloo ranks. Every way of every seed is a training of
its own; those of a run take turns step by step, so that a busy minute of the machine is everybody's, and all
that are broken off have made as many steps. Bytes, parameters and late steps depend on the seed alone.
"""

from __future__ import annotations

import json
import statistics
import time
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch.distributed as dist

import imbrex
from imbrex import overlap
from imbrex.demo.corpus import Corpus, load_corpus
from imbrex.demo.training import Recipe, Shape, Trainer, make_model
from imbrex.launch.factors import Factors
from imbrex.observe import Observer
from imbrex.overlap import Events
from imbrex.reproduce.stage import Network, RanOn, on_ranks
from imbrex.reproduce.stragglers import LATE, WARM, Clock, LateSteps, Way, largest
from imbrex.reproduce.training import Size, held_out


@dataclass(frozen=True, kw_only=True, slots=True)
class Plain(Recipe):
    """A recipe whose model has no losses of its own, so that schedules with and without patience learn the
    same."""

    @property
    def losses(self) -> None:
        return None


@dataclass(frozen=True, kw_only=True, slots=True)
class Course:
    """The settings of all trainings. share, factor: rank 3 is late by `factor` median steps in that share of
    them. every: steps between two points of a curve."""

    steps: int = 1000
    seeds: int = 3
    batch: int = 8
    length: int = 64
    learning_rate: float = 3e-3
    share: float = 0.1
    factor: float = 5.0
    every: int = 50
    held_out: int = 64
    shape: Mapping[str, int] = field(
        default_factory=lambda: {"hidden_size": 64, "num_layers": 1, "num_heads": 4, "expert_width": 96}
    )

    def recipe(self, seed: int, schedule: str) -> Plain:
        return Plain(
            steps=self.steps,
            batch=self.batch,
            length=self.length,
            seed=seed,
            learning_rate=self.learning_rate,
            schedule=schedule,
        )


def settings(
    ways: Mapping[str, Way], course: Course, *, limit_s: float, seeds: Sequence[int] = (0,)
) -> dict[str, Any]:
    """The request of a run of some seeds."""
    what = {"ways": {name: asdict(way) for name, way in ways.items()}, "course": asdict(course)}
    return what | {"limit_s": limit_s, "seeds": list(seeds)}


def in_parts(
    name: str, job: str, requests: Sequence[Mapping[str, Any]], network: Network, folder: str | None
) -> tuple[list[dict[str, Any]], RanOn]:
    """The records of all requests of a job, one after the other. folder: keeps what each came to, as it
    comes; what it has, of the same request, is not made again."""
    runs, ran_on = [], RanOn(network=network)
    for number, request in enumerate(requests):
        print_of = zlib.crc32(json.dumps(request).encode())
        part = None if folder is None else Path(folder, f"{name}-{print_of:08x}-{number}.json")
        if part is not None and part.exists():
            more, why_not = json.loads(part.read_text())
            ran_on = RanOn(network=network, why_not=why_not)
        else:
            more, ran_on = on_ranks(job, request, network, timeout_s=1800.0)
            if part is not None:
                part.write_text(json.dumps([more, ran_on.why_not]))
        runs += more
    return runs, ran_on


def on_rank(request: Mapping[str, Any]) -> list[dict[str, Any]]:
    """A record of every training; see `_Training.gather`."""
    course, clock = Course(**request["course"]), Clock(request["limit_s"])
    corpus = load_corpus(length=course.length)
    plain = _Training("", Way(schedule="serial"), 0, course, corpus, median_s=0.0)
    for step in range(4 * WARM):
        plain.step(step, is_late=False)
    median_s = largest(statistics.median(plain.seconds[WARM:]))
    trainings = [
        _Training(name, Way(**way), seed, course, corpus, median_s)
        for seed in request["seeds"]
        for name, way in request["ways"].items()
    ]
    is_late = {seed: LateSteps(course.share, seed) for seed in request["seeds"]}
    for step in range(course.steps):
        late = {seed: of_seed(step) for seed, of_seed in is_late.items()}
        turn = step % len(trainings)
        for training in trainings[turn:] + trainings[:turn]:
            training.step(step, is_late=late[training.seed])
        if (step + 1) % course.every == 0 and clock.is_over():
            break
    return [training.gather(corpus) for training in trainings]


class _Training:
    """One way's model of one seed, and its record."""

    def __init__(
        self, name: str, way: Way, seed: int, course: Course, corpus: Corpus, median_s: float
    ) -> None:
        self.name, self.way, self.seed, self.course = name, way, seed, course
        tau = way.tau if isinstance(way.tau, str) else round(way.tau * median_s, 6)
        schedule = Events(tau, way.epsilon, way.every).name if way.schedule == "events" else way.schedule
        factors = Factors(data=1, expert=dist.get_world_size(), tensor=1)
        recipe, observer = course.recipe(seed, schedule), Observer()
        self.size = Size(shape=Shape(**course.shape), recipe=recipe, held_out=course.held_out)
        alike = {"timeout_s": self.size.timeout_s, "observer": observer}
        model = make_model(self.size.shape, recipe, factors, transport="alltoall", codec="identity", **alike)
        self.trainer = Trainer(model, corpus, recipe, factors, rank=dist.get_rank(), **alike)
        self.layers = [module for module in model.modules() if isinstance(module, imbrex.MoELayer)]
        self.late_s = course.factor * median_s
        self.seconds: list[float] = []
        self.nats: list[float] = []
        self.dropped = self.choices = 0

    def step(self, step: int, *, is_late: bool) -> None:
        """One step; the ranks begin together, the late one but for what it sleeps."""
        dist.barrier()
        began = time.perf_counter()
        if is_late and self.way.late == "before" and dist.get_rank() == LATE:
            time.sleep(self.late_s)
        nats = self.trainer.step(step)
        self.seconds.append(time.perf_counter() - began)
        self.nats.append(float(nats))
        for layer in self.layers:
            routing = layer.routing
            assert routing is not None
            self.choices += routing.ids_TK.numel()
            self.dropped += 0 if routing.kept_TK is None else int((~routing.kept_TK).sum())

    def _points(self, steps: int) -> list[int]:
        """The steps behind which the curve has a point; the last one among them."""
        return sorted({*range(self.course.every, steps, self.course.every), steps})

    def gather(self, corpus: Corpus) -> dict[str, Any]:
        """`held_out_nats` a byte, where nothing is dropped; `curve` of (step, wall seconds, training nats a
        byte since the point before); `seconds` of all steps; `dropped` of all `choices`."""
        for layer in self.layers:
            layer.strategy = overlap.make("serial")
        nats = held_out(self.trainer, corpus, self.size)
        everyone: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, (self.seconds, self.nats, self.dropped, self.choices))
        walls = [max(of_ranks) for of_ranks in zip(*(e[0] for e in everyone), strict=True)]
        sums = [sum(of_ranks) for of_ranks in zip(*(e[1] for e in everyone), strict=True)]
        each_bytes, ends = self.course.batch * self.course.length, self._points(len(walls))
        curve = [
            (end, round(sum(walls[:end]), 2), round(statistics.fmean(sums[begin:end]) / each_bytes, 5))
            for begin, end in pairwise([0, *ends])
        ]
        return {
            "way": self.name,
            "seed": self.seed,
            "steps": len(walls),
            "held_out_nats": nats,
            "curve": curve,
            "seconds": sum(walls),
            "median_s": statistics.median(walls),
            "dropped": sum(e[2] for e in everyone),
            "choices": sum(e[3] for e in everyone),
        }


__all__ = ["Course", "in_parts", "on_rank", "settings"]
