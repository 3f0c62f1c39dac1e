"""Seconds of one all-to-all of rows, transports in turn, by bytes."""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import imbrex
from imbrex.placement import contiguous

WIDTH = 256
"""Values of a row, float32: 1 KiB."""


def settings(transports: Sequence[str], sizes: Sequence[int], *, rounds: int) -> dict[str, Any]:
    """The work of an exchange. sizes: bytes of a rank, spread evenly over all ranks, its own included."""
    return {"transports": list(transports), "sizes": list(sizes), "rounds": rounds}


def on_rank(request: Mapping[str, Any]) -> list[dict[str, Any]]:
    """`transport`, `bytes` and `seconds` of every round of the slowest rank, after one for warming up."""
    rows: list[dict[str, Any]] = []
    for size in request["sizes"]:
        moves = {name: _Move(name, size) for name in request["transports"]}
        times: dict[str, list[float]] = {name: [] for name in moves}
        for number in range(request["rounds"] + 1):
            for name, move in moves.items():
                dist.barrier()
                begin = time.perf_counter()
                received = move.run()
                took = _slowest(time.perf_counter() - begin)
                if number == 0:
                    move.check(received)
                else:
                    times[name].append(took)
        rows += [{"transport": name, "bytes": size, "seconds": times[name]} for name in moves]
    return rows


def median(one: Mapping[str, Any]) -> float:
    return statistics.median(one["seconds"])


class _Move:
    """Rows of this rank, as many for every rank, planned and written; only `run` is timed."""

    def __init__(self, transport: str, size: int) -> None:
        world, rank = dist.get_world_size(), dist.get_rank()
        exchange = imbrex.Exchange(
            contiguous(world, world), WIDTH, 1, group=dist.group.WORLD, transport=transport
        )
        self.exchange = exchange
        share = max(1, size // (4 * WIDTH) // world)
        ids_TK = torch.arange(world).repeat_interleave(share)[:, None]
        routing = imbrex.Routing(ids_TK=ids_TK, weights_TK=torch.ones(len(ids_TK), 1))
        x_TD = torch.full((len(ids_TK), WIDTH), float(rank))
        (plan,) = exchange.dispatcher.agree([(x_TD, routing)])
        self.crossing = exchange.dispatcher.dispatch(plan, x_TD, routing.weights_TK)
        self.sources = torch.arange(world).repeat_interleave(share * (torch.arange(world) != rank))

    def run(self) -> Tensor:
        pending = self.crossing.move()
        assert pending is not None
        return pending.finish()

    def check(self, received: Tensor) -> None:
        values = received[:, : 4 * WIDTH].contiguous().view(torch.float32)
        assert torch.equal(values.amax(1), self.sources.float()), "rows moved to the wrong place"


def _slowest(seconds: float) -> float:
    took = torch.tensor([seconds], dtype=torch.float64)
    dist.all_reduce(took, dist.ReduceOp.MAX)
    return took.item()
