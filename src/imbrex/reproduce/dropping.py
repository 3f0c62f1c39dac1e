"""Trainings whose choices are dropped as patience drops them while one rank is late, by no clock.

The demo's language model with one layer of experts, in one process. The batch is that of 4 ranks, which have
a part of it each and two of the 8 experts. In a step in which patience is spent on a rank, its choices at the
others are dropped and theirs at it, as where it comes late to a step with a backward; see `patience` for the
same with ranks, delays and clocks.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import imbrex
from imbrex.demo.corpus import Corpus, load_corpus
from imbrex.demo.training import Shape, Trainer, make_model
from imbrex.launch.factors import Factors
from imbrex.observe import Observer
from imbrex.reproduce.patience import Course
from imbrex.reproduce.stragglers import LATE, LateSteps
from imbrex.reproduce.training import Size, held_out

RANKS = 4


@dataclass(kw_only=True, slots=True)
class Spent:
    """A rule that says of one step after the other whether patience is spent in it: on a rank that is late,
    in one step of `every` at most; 0: never."""

    late: LateSteps
    every: int
    last: int = -1

    def __call__(self, step: int) -> bool:
        if not self.late(step) or not self.every or (self.last >= 0 and self._window(step) == self.last):
            return False
        self.last = self._window(step)
        return True

    def _window(self, step: int) -> int:
        """Calls are numbered from 1."""
        return (step + 1) // self.every


def kept_without(rank: int, ids_TK: Tensor, num_experts: int) -> Tensor:
    """The choices that count where all others do without this rank, and it without them: bool [T, K]."""
    host_TK = ids_TK * RANKS // num_experts
    home_T1 = (torch.arange(len(ids_TK)) * RANKS // len(ids_TK))[:, None]
    return (host_TK == home_T1) | ((host_TK != rank) & (home_T1 != rank))


class Training:
    """One way's model of one seed."""

    def __init__(self, course: Course, seed: int, every: int, corpus: Corpus) -> None:
        self.course, self.corpus = course, corpus
        self.spent = Spent(late=LateSteps(course.share, seed), every=every)
        recipe, factors = course.recipe(seed, "serial"), Factors(data=1, expert=1, tensor=1)
        self.size = Size(shape=Shape(**course.shape), recipe=recipe, held_out=course.held_out)
        alike = {"timeout_s": self.size.timeout_s, "observer": Observer()}
        model = make_model(self.size.shape, recipe, factors, transport="auto", codec="identity", **alike)
        self.trainer = Trainer(model, corpus, recipe, factors, rank=0, **alike)
        for module in model.modules():
            if isinstance(module, imbrex.MoELayer):
                module.register_forward_pre_hook(self._drop, with_kwargs=True)
        self.dropping = False
        self.dropped = self.choices = 0

    def _drop(self, layer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not self.dropping:
            return None
        (x_BSD,), gate, config = args, layer.gate, layer.config
        with torch.no_grad():
            ids_TK = gate(x_BSD.flatten(0, 1), num_sequences=len(x_BSD)).ids_TK
        kept_TK = kept_without(LATE, ids_TK, config.num_experts)
        self.dropped += int((~kept_TK).sum())
        return args, kwargs | {"kept_TK": kept_TK}

    def run(self) -> dict[str, Any]:
        """`held_out_nats` a byte after all steps, `dropped` of all `choices`, `seconds`."""
        course, begin = self.course, time.perf_counter()
        for step in range(course.steps):
            self.dropping = self.spent(step)
            self.trainer.step(step)
            self.choices += course.batch * course.length * self.size.shape.top_k
        self.dropping = False
        seconds = time.perf_counter() - begin
        nats = held_out(self.trainer, self.corpus, self.size)
        shares = {"dropped": self.dropped, "choices": self.choices}
        return {"held_out_nats": nats, "steps": course.steps, "seconds": round(seconds, 1)} | shares


def on_rank(request: Mapping[str, Any]) -> list[dict[str, Any]]:
    """A record of every way of a seed."""
    course = Course(**request["course"])
    corpus = load_corpus(length=course.length)
    return [
        {"way": name, "seed": request["seed"]} | Training(course, request["seed"], every, corpus).run()
        for name, every in request["ways"].items()
    ]


__all__ = ["RANKS", "Spent", "kept_without", "on_rank"]
