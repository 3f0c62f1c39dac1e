"""How much a dense GEMM slows down while rows cross beside it, and the rows beside the GEMM."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from imbrex.bench.exchange.parts import MAIN, Running
from imbrex.bench.exchange.rows import Rows
from imbrex.kernels.heap import SymmetricHeap
from imbrex.observe.clock import microseconds_side_by_side
from imbrex.runtime.streams import Lane

SIDE, GEMMS, TURNS = 8192, 6, 5
SMS = (4, 8, 16)
LONGER = 1.6
"""The exchanges beside are enough for this many times the GEMMs' own time, so that none runs alone."""

Call = Callable[[], Any]


def beside_gemm(rows: Rows, world: int) -> None:
    """Six GEMMs alone, and beside exchanges on 4, 8 and 16 SMs, and on the copy engines, that never pause."""
    running = Running(rows, replace(MAIN, W=world))
    left, right = (torch.randn(SIDE, SIDE, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    product = torch.empty_like(left)

    def gemms() -> None:
        for _ in range(GEMMS):
            torch.mm(left, right, out=product)

    case = {**running.job.case, "side": SIDE}
    alone = _slowest([_spans(gemms, None)[0] for _ in range(TURNS)])
    _note(rows, "alone", case, alone, alone)
    calls: list[tuple[str, int, Call]] = [("copy engine", 0, copies(running, world))] if world > 1 else []
    for n in SMS:
        calls += [
            ("push", n, partial(running.push, n, running.routed)),
            ("pull", n, partial(running.pull, n, running.routed)),
            ("combine", n, partial(running.combine_expert, n)),
        ]
    for name, n, call in calls:
        pair_us = rows.clock(call).median_us
        times = max(2, round(LONGER * statistics.median(alone) / pair_us))
        pairs = [_spans(gemms, partial(_repeat, call, times)) for _ in range(TURNS)]
        gemm, other = (_slowest(list(both)) for both in zip(*pairs, strict=True))
        slower = statistics.median(other) / times / pair_us
        more = {"num_sms": n, "exchange_us": round(pair_us, 1), "exchange_slowdown": round(slower, 3)}
        _note(rows, name, case, gemm, alone, **more)
    running.close()


def copies(running: Running, world: int) -> Call:
    """Copy as many bytes as the rows that cross, to each peer alike, by copy engines.

    It takes no multiprocessor, but moves every token whoever wants it: the link and the GEMM see what they
    see of a dispatch, and it is none.
    """
    heap, rank = running.exchange.heap, running.rows.rank
    assert isinstance(heap, SymmetricHeap)
    nbytes = running.rows.crossing // (world - 1) // 16 * 16
    source = running.x.view(torch.uint8).view(-1)[:nbytes]
    peers = [p for p in range(world) if p != rank]
    targets = [heap.view(p, running.exchange.layout.received, nbytes) for p in peers]
    lanes = [Lane(source.device) for _ in peers]

    def call() -> None:
        begun = [
            lane.start(partial(target.copy_, source, non_blocking=True))
            for lane, target in zip(lanes, targets, strict=True)
        ]
        for copy in begun:
            copy.finish()

    return call


def _note(
    rows: Rows, name: str, case: dict[str, Any], gemm: list[float], alone: list[float], **more: Any
) -> None:
    times = sorted(time / GEMMS for time in gemm)
    median = statistics.median(times)
    row = {"op": "gemm", "impl": f"beside {name}" if more else name, "case": case}
    row |= {"median_us": round(median, 1), "min_us": round(times[0], 1), "max_us": round(times[-1], 1)}
    slowdown = median * GEMMS / statistics.median(alone)
    rows.add(row | {"n": len(times), "slowdown": round(slowdown, 3), **more})


def _repeat(call: Call, times: int) -> None:
    for _ in range(times):
        call()


def _spans(main: Call, beside: Call | None) -> tuple[float, float]:
    dist.barrier()
    return microseconds_side_by_side(main, beside)


def _slowest(times: list[float]) -> list[float]:
    slowest = torch.tensor(times, device="cuda")
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    # host sync: a measurement
    return slowest.tolist()
