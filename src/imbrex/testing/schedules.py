"""Does a schedule keep its contract?"""

from __future__ import annotations

import random
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from imbrex import overlap
from imbrex.contracts import Routing, Strategy
from imbrex.exchange.exchange import Exchange
from imbrex.experts.experts import Experts
from imbrex.overlap.pipelined import Pipelined, find
from imbrex.placement import contiguous
from imbrex.schedule.schedulers import Scheduler
from imbrex.schedule.tasks import Order, check, tasks
from imbrex.testing.conformity import FLOATS, ConformityError, on, require
from imbrex.testing.experts import close

TOKENS = (7, 0, 4, 13)


def check_schedule(
    schedule: str | Strategy | Scheduler,
    group: dist.ProcessGroup | None = None,
    *,
    degrees: tuple[int, ...] = (1, 2, 3),
    tolerance: float = 1e-5,
    seed: int = 0,
) -> None:
    """Check a scheduler, by name or the function, or a strategy of your own; on every rank of `group`.

    A scheduler's orders for random times have every task once, can run, and are the same when asked twice.
    Then it, or the strategy, gives the outputs and gradients of `serial`, within `tolerance` of the largest
    magnitude, for ragged ranks, more chunks than tokens, no tokens, and with something to add.

    Raises ConformityError on every rank where the numbers differ on one; ValueError for an unknown name.
    """
    strategies: list[Strategy] = []
    if isinstance(schedule, str) and schedule not in overlap.SCHEDULERS:
        strategies.append(overlap.make(schedule))
    elif isinstance(schedule, str) or (callable(schedule) and not hasattr(schedule, "run")):
        scheduler: Any = find(schedule)  # pyright: ignore[reportArgumentType]
        for degree in degrees:
            _check_orders(scheduler, degree, seed)
            strategies.append(Pipelined(scheduler, degree))
    else:
        strategies.append(overlap.make(schedule))
    for strategy in strategies:
        for tokens in (TOKENS, (1, 2), (0,)):
            problem = ""
            try:
                with on(f"{strategy.name}, {tokens} tokens by rank"):
                    _check_numbers(strategy, group, tokens, tolerance, seed)
            except ConformityError as error:
                problem = str(error)
            _tell(group, problem)


def _tell(group: dist.ProcessGroup | None, problem: str) -> None:
    problems: list[Any] = [problem]
    if group is not None:
        problems = [None] * dist.get_world_size(group)
        dist.all_gather_object(problems, problem, group=group)
    for rank, text in enumerate(problems):
        require(not text, f"rank {rank}: {text}")


def _check_orders(scheduler: Scheduler, degree: int, seed: int) -> None:
    drawn = random.Random(seed)
    for _ in range(5):
        times = {task: drawn.random() for task in tasks(degree)}
        with on(f"{degree} chunks"):
            order = scheduler(times)
            require(isinstance(order, Order), f"{order!r} comes out instead of an Order")
            check(order, degree)
        again = scheduler(dict(reversed(times.items())))
        require(again == order, f"{degree} chunks: another order for the same times")


def _check_numbers(
    strategy: Strategy, group: dist.ProcessGroup | None, tokens: tuple[int, ...], tolerance: float, seed: int
) -> None:
    world, rank = (1, 0) if group is None else (dist.get_world_size(group), dist.get_rank(group))
    num_experts, width = 2 * world + 1, 6
    placement = contiguous(num_experts, world)
    results = []
    for schedule in (overlap.Serial(), strategy):
        exchange = Exchange(placement, width, 2, group=group, transport="alltoall")
        experts = Experts(placement.local(rank), width, 4, seed=seed)
        results.append(_numbers(schedule, exchange, experts, tokens[rank % len(tokens)], seed + rank))
        exchange.close()
    for name, theirs in results[0].items():
        where = f"{strategy.name}, {tokens[rank % len(tokens)]} tokens: {name} differ from those of serial"
        ours = results[1][name]
        require(ours.shape == theirs.shape, f"{where} in shape")
        close(ours, theirs, tolerance, where)


def _numbers(
    strategy: Strategy, exchange: Exchange, experts: Experts, tokens: int, seed: int
) -> dict[str, Tensor]:
    drawn = torch.Generator().manual_seed(seed)
    num_experts = exchange.geometry.placement.num_experts
    x_TD = torch.randn(tokens, 6, generator=drawn, **FLOATS).requires_grad_()
    shared = torch.randn(6, generator=drawn, **FLOATS).requires_grad_()
    ids_TK = torch.rand(tokens, num_experts, generator=drawn, **FLOATS).argsort(1)[:, :2].contiguous()
    weights_TK = torch.rand(tokens, 2, generator=drawn, **FLOATS).requires_grad_()
    for parameter in experts.parameters():  # hears of its gradient once, whatever the number of chunks
        parameter.register_hook(lambda gradient: 2 * gradient)
    routing = Routing(ids_TK=ids_TK, weights_TK=weights_TK)
    y_TD = strategy.run(x_TD, routing, exchange, experts, lambda: x_TD * shared).y_TD
    (y_TD * torch.cos(torch.arange(y_TD.numel(), device=y_TD.device).view_as(y_TD))).sum().backward()
    results = {
        "outputs": y_TD.detach(),
        "gradients of tokens": x_TD.grad,
        "gradients of weights": weights_TK.grad,
    }
    results["gradients of what is added"] = shared.grad
    results |= {f"gradients of {name}": p.grad for name, p in experts.named_parameters()}
    return {name: torch.zeros((), **FLOATS) if grad is None else grad for name, grad in results.items()}
