"""How much a dense GEMM slows down while rows cross beside it, and the rows beside the GEMM."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from imbrex.cli.exchange_parts import MAIN, Running
from imbrex.cli.exchange_rows import Rows
from imbrex.observe.clock import microseconds_side_by_side

SIDE, GEMMS, TURNS = 8192, 6, 5
SMS = (4, 8, 16)
LONGER = 1.6
"""The exchanges beside are enough for this many times the GEMMs' own time, so that none runs alone."""

Call = Callable[[], Any]


def beside_gemm(rows: Rows, world: int) -> None:
    """Six GEMMs alone, and beside exchanges on 4, 8 and 16 SMs that never pause."""
    running = Running(rows, replace(MAIN, W=world))
    left, right = (torch.randn(SIDE, SIDE, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    product = torch.empty_like(left)

    def gemms() -> None:
        for _ in range(GEMMS):
            torch.mm(left, right, out=product)

    case = {**running.job.case, "side": SIDE}
    alone = _slowest([_spans(gemms, None)[0] for _ in range(TURNS)])
    _note(rows, "alone", case, alone, alone)
    for n in SMS:
        kinds: dict[str, Call] = {
            "push": partial(running.push, n, running.routed),
            "pull": partial(running.pull, n, running.routed),
            "combine": partial(running.combine_expert, n),
        }
        for name, call in kinds.items():
            one = rows.clock(call).median_us
            calls = max(2, round(LONGER * statistics.median(alone) / one))
            pairs = [_spans(gemms, partial(_repeat, call, calls)) for _ in range(TURNS)]
            gemm, other = (_slowest(list(times)) for times in zip(*pairs, strict=True))
            slower = statistics.median(other) / calls / one
            _note(rows, name, case, gemm, alone, num_sms=n, exchange_slowdown=round(slower, 3))
    running.close()


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
