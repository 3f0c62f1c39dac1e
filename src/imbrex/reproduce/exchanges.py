"""Seconds of one all-to-all of rows, transports in turn, by bytes."""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from imbrex.contracts import Traffic
from imbrex.transport import make

ROW_BYTES = 1024


def settings(transports: Sequence[str], sizes: Sequence[int], *, rounds: int) -> dict[str, Any]:
    """sizes: bytes of a rank, spread evenly over all ranks, its own part included."""
    return {"transports": list(transports), "sizes": list(sizes), "rounds": rounds}


def on_rank(asked: Mapping[str, Any]) -> list[dict[str, Any]]:
    """`transport`, `bytes` and `seconds` of every round of the slowest rank, after one for warming up."""
    group = dist.group.WORLD
    made = {
        name: make(name, group, num_ranks=dist.get_world_size(), top_k=1)[0] for name in asked["transports"]
    }
    found: list[dict[str, Any]] = []
    for size in asked["sizes"]:
        rows, traffic = _even(size)
        times: dict[str, list[float]] = {name: [] for name in made}
        for number in range(asked["rounds"] + 1):
            for name, transport in made.items():
                dist.barrier()
                begin = time.perf_counter()
                received = transport.begin_move(rows, traffic).finish()
                took = _slowest(time.perf_counter() - begin)
                if number == 0:
                    _check(received, rows, traffic, name)
                else:
                    times[name].append(took)
        found += [{"transport": name, "bytes": size, "seconds": times[name]} for name in made]
    return found


def median(one: Mapping[str, Any]) -> float:
    return statistics.median(one["seconds"])


def _even(size: int) -> tuple[Tensor, Traffic]:
    """Rows of this rank, the same number for every rank; those of the own rank stay."""
    world, rank = dist.get_world_size(), dist.get_rank()
    share = max(1, size // ROW_BYTES // world)
    rows = torch.full((share * world, ROW_BYTES), rank, dtype=torch.uint8)
    rows[:, 0] = torch.arange(share * world).div(share, rounding_mode="floor").to(torch.uint8)
    others = [share * (other != rank) for other in range(world)]
    sent = [torch.arange(share) + other * share for other in range(world) if other != rank]
    return rows, Traffic(sent_tokens_N=torch.cat(sent), splits_2W=torch.tensor([others, others]))


def _check(received: Tensor, rows: Tensor, traffic: Traffic, name: str) -> None:
    rank = dist.get_rank()
    sources = torch.arange(dist.get_world_size()).repeat_interleave(traffic.splits_2W[1])
    right = bool((received[:, 0] == rank).all()) and torch.equal(received[:, 1].long(), sources)
    assert right, f"{name} moved rows to the wrong place"


def _slowest(seconds: float) -> float:
    took = torch.tensor([seconds], dtype=torch.float64)
    dist.all_reduce(took, dist.ReduceOp.MAX)
    return took.item()
