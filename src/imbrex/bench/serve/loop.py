"""A closed loop of users: each has one request at a time and asks the next as soon as it is answered.

x of a Pareto curve is what a user sees, the mean over requests of tokens a second behind the first token; y
is what a GPU gives, tokens a second of all users over the ranks. Both are of a window in which every user is
served: it begins when the last user's first request has been answered, whose length is staggered so that
requests do not end together, and ends when the first user is done. Where half an answer of every user does
not fit into it, as with two rounds and long prompts, it holds mostly the prompts of others: no rate.
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from imbrex.serve.engine import Engine, HostTime
from imbrex.serve.request import Answer, Request


@dataclass(frozen=True, kw_only=True, slots=True)
class Load:
    """A load of requests. users: over all ranks. input, output: tokens of every request. rounds: requests
    of a user, the first not counted."""

    users: int
    input: int
    output: int
    rounds: int = 3

    def users_of(self, rank: int, ranks: int) -> int:
        return self.users // ranks + (rank < self.users % ranks)


class Users:
    """The users of a rank."""

    def __init__(
        self, engine: Engine, load: Load, *, rank: int, ranks: int, text: Tensor | None = None
    ) -> None:
        self.engine, self.load, self.count = engine, load, load.users_of(rank, ranks)
        self.random, self.text = random.Random(rank), text
        self.answers: list[list[Answer]] = [[] for _ in range(self.count)]
        self.of_answer: dict[int, int] = {}
        engine.answered = self.answered

    def begin(self) -> None:
        for user in range(self.count):
            self._ask(user, max(1, self.load.output * (user + 1) // self.count))

    def answered(self, answer: Answer) -> None:
        user = self.of_answer.pop(id(answer), None)
        if user is not None and len(self.answers[user]) < self.load.rounds:
            self._ask(user, self.load.output)

    def _ask(self, user: int, max_tokens: int) -> None:
        size, vocabulary = self.load.input, self.engine.model.config.vocabulary
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

    def window(self) -> tuple[float, float]:
        """When the last user's first request was answered, and when the first user's last was."""
        if not self.count:
            return 0.0, float("inf")
        return (
            max(of_user[0].arrivals[-1][0] for of_user in self.answers),
            min(of_user[-1].arrivals[-1][0] for of_user in self.answers),
        )

    def counted(self, begin: float, end: float) -> dict[str, Any]:
        """Tokens that came in the window, the rate that every request had, and the gaps between deliveries a
        token."""
        later = [answer for of_user in self.answers for answer in of_user[1:]]
        arrivals = [a for of_user in self.answers for answer in of_user for a in answer.arrivals]
        gaps = [
            (at - before) / count
            for answer in later
            for (before, _), (at, count) in zip(answer.arrivals, answer.arrivals[1:], strict=False)
        ]
        return {
            "tokens": sum(count for at, count in arrivals if begin < at <= end),
            "rates": [answer.tokens_per_s for answer in later if len(answer.arrivals) > 1],
            "gaps": gaps,
        }


def serve(
    engine: Engine,
    load: Load,
    group: dist.ProcessGroup | None,
    *,
    text: Tensor | None = None,
    begun: Callable[[int], object] = lambda step: None,
) -> dict[str, Any]:
    """One point of the curve, the same on every rank. group: of the hosts. text: what prompts are cut from,
    where not random. begun: called with the number of every step before it.

    Seconds are of clocks that processes of one host share."""
    rank, ranks = (0, 1) if group is None else (group.rank(), group.size())
    users = Users(engine, load, rank=rank, ranks=ranks, text=text)
    engine.host = HostTime()
    users.begin()
    began = engine.clock()
    begun(0)
    while engine.step():
        begun(engine.host.steps)
    took = engine.clock() - began
    windows = _gathered(users.window(), group)
    begin, end = max(w[0] for w in windows), min(w[1] for w in windows)
    counted = _gathered(users.counted(begin, end), group)
    rates, gaps = ([x for of in counted for x in of[name]] for name in ("rates", "gaps"))
    host, tokens = engine.host, sum(of["tokens"] for of in counted)
    tells = end > begin and 2 * tokens >= load.users * load.output
    return {
        "tokens_per_s_gpu": tokens / (end - begin) / ranks if tells else None,
        "tokens_per_s_user": statistics.fmean(rates) if rates else None,
        "gap_ms": _quantiles([1e3 * gap for gap in gaps]),
        "requests": sum(len(of["rates"]) for of in counted),
        "tokens_per_row_step": round(host.row_tokens / max(host.row_steps, 1), 3),
        "steps": host.steps,
        "step_ms": 1e3 * took / host.steps,
        "host_us": {name: round(1e6 * s / host.steps, 1) for name, s in host.seconds.items()},
        "launches": round(host.launches / host.steps, 2),
    }


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
