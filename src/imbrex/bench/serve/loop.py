"""A closed loop of users: each has one request at a time and asks the next as soon as it is answered.

x of a Pareto curve is what a user sees, the mean over users of tokens a second behind first tokens; y is what
a GPU gives, tokens a second of all users over the ranks. Both are of a window in which every user is served,
and which holds as many prompts as answers:

    begin   users stand at different places of an answer, the tokens before counted to their first prompt
    window  from the first answer that ends when all first prompts are in the cache, to the end of that
            user's last one
    end     at once: what is left of the others' answers is dropped

Where half an answer of every user does not fit into the window of all ranks, there is no rate.
"""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from imbrex.bench.serve.device import DeviceTime
from imbrex.serve.engine import Engine, HostTime
from imbrex.serve.request import Answer, Request


@dataclass(frozen=True, kw_only=True, slots=True)
class Load:
    """A load of requests. users: over all ranks. input, output: tokens of every request. rounds: answers of
    the user that the window is of, the one before it counted."""

    users: int
    input: int
    output: int
    rounds: int = 3

    def users_of(self, rank: int, ranks: int) -> int:
        return self.users // ranks + (rank < self.users % ranks)


class Users:
    """The users of a rank. window: when it began and when it ended, as far as they have; the whole of time
    where a rank has no user."""

    def __init__(
        self, engine: Engine, load: Load, *, rank: int, ranks: int, text: Tensor | None = None
    ) -> None:
        self.engine, self.load, self.count = engine, load, load.users_of(rank, ranks)
        # Alike on all ranks, so that their windows are.
        self.places = load.users_of(0, ranks)
        self.random, self.text = random.Random(rank), text
        self.answers: list[list[Answer]] = [[] for _ in range(self.count)]
        self.of_answer: dict[int, int] = {}
        self.window = [] if self.count else [0.0, math.inf]
        self._last: tuple[int, int] | None = None
        engine.answered = self.answered

    @property
    def over(self) -> bool:
        return len(self.window) == 2

    def begin(self) -> None:
        for user in range(self.count):
            self._ask(user, max(1, self.load.output * (user + 1) // self.places))

    def answered(self, answer: Answer) -> None:
        user = self.of_answer.pop(id(answer), None)
        if user is None or self.over:
            return
        place = user, len(self.answers[user])
        if self._last is None and all(of_user[0].arrivals for of_user in self.answers):
            self._last = user, place[1] + self.load.rounds - 1
            self.window.append(answer.arrivals[-1][0])
        elif place == self._last:
            self.window.append(answer.arrivals[-1][0])
            return
        self._ask(user, self.load.output)

    def _ask(self, user: int, max_tokens: int) -> None:
        # Tokens that a user has of its first answer already are part of its prompt.
        size = self.load.input + self.load.output - max_tokens
        vocabulary = self.engine.model.config.vocabulary
        if self.text is None:
            prompt = [self.random.randrange(vocabulary) for _ in range(size)]
        else:
            begin = self.random.randrange(len(self.text) - size)
            prompt = self.text[begin : begin + size].tolist()
        answer = self.engine.submit(Request(prompt=prompt, max_tokens=max_tokens))
        if answer.refused is not None:
            raise ValueError(f"serve: a request of the load is refused: {answer.refused}")
        self.of_answer[id(answer)] = user
        self.answers[user].append(answer)

    def counted(self, begin: float, end: float) -> dict[str, Any]:
        """Tokens that came in the window, answers that ended in it, the rate that every user saw, and the
        gaps between deliveries a token."""
        tokens, ended, rates, gaps = 0, 0, list[float](), list[float]()
        for of_user in self.answers:
            seen, seconds = 0, 0.0
            for answer in of_user:
                tokens += sum(count for at, count in answer.arrivals if begin < at <= end)
                ended += answer.done and begin < answer.arrivals[-1][0] <= end
                for (before, _), (at, count) in pairwise(answer.arrivals):
                    if begin <= before and at <= end:
                        seen, seconds = seen + count, seconds + at - before
                        gaps.append((at - before) / count)
            rates += [seen / seconds] if seconds else []
        return {"tokens": tokens, "ended": ended, "rates": rates, "gaps": gaps}


def serve(
    engine: Engine,
    load: Load,
    group: dist.ProcessGroup | None,
    *,
    text: Tensor | None = None,
    begun: Callable[[int], object] = lambda step: None,
) -> dict[str, Any]:
    """One point of the curve, the same on every rank but for times of its host and device. group: of the
    hosts. text: what prompts are cut from, where not random. begun: called with the number of every step
    before it.

    Seconds are of clocks that processes of one host share."""
    rank, ranks = (0, 1) if group is None else (group.rank(), group.size())
    users = Users(engine, load, rank=rank, ranks=ranks, text=text)
    engine.host = HostTime()
    device = DeviceTime(engine) if engine.device.type == "cuda" else None
    users.begin()
    began = engine.clock()
    begun(0)
    while engine.step():
        begun(engine.host.steps)
        if users.over:
            engine.drop()
    took = engine.clock() - began
    windows = _gathered(users.window, group)
    begin, end = max(w[0] for w in windows), min(w[1] for w in windows)
    counted = _gathered(users.counted(begin, end), group)
    rates, gaps = ([x for of in counted for x in of[name]] for name in ("rates", "gaps"))
    host, tokens = engine.host, sum(of["tokens"] for of in counted)
    tells = end > begin and 2 * tokens >= load.users * load.output
    return {
        "tokens_per_s_gpu": tokens / (end - begin) / ranks if tells else None,
        "tokens_per_s_user": statistics.fmean(rates) if rates else None,
        "gap_ms": _quantiles([1e3 * gap for gap in gaps]),
        "requests": sum(of["ended"] for of in counted),
        "tokens_per_row_step": round(host.row_tokens / max(host.row_steps, 1), 3),
        "steps": host.steps,
        "step_ms": 1e3 * took / host.steps,
        "host_us": {name: round(1e6 * s / host.steps, 1) for name, s in host.seconds.items()},
        "launches": round(host.launches / host.steps, 2),
    } | ({} if device is None else device.figures())


def _gathered(own: Any, group: dist.ProcessGroup | None) -> list[Any]:
    if group is None:
        return [own]
    gathered: list[Any] = [None] * group.size()
    dist.all_gather_object(gathered, own, group=group)
    return gathered


def _quantiles(values: Sequence[float]) -> dict[str, float]:
    if not values:
        return {}
    at = torch.tensor(values, dtype=torch.float64).quantile(torch.tensor([0.5, 0.99], dtype=torch.float64))
    return {"p50": float(at[0]), "p99": float(at[1])}
