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
from imbrex.observe.clock import PAUSE_CYCLES

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
    alone = _slowest([spans(gemms, None)[0] for _ in range(TURNS)])
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
            pairs = [spans(gemms, partial(_repeat, call, calls)) for _ in range(TURNS)]
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


def _slowest(times: list[float]) -> list[float]:
    slowest = torch.tensor(times, device="cuda")
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    # host sync: a measurement
    return slowest.tolist()


def spans(main: Call, beside: Call | None) -> tuple[float, float]:
    """Microseconds of `main` on this stream and of `beside` on another, started together."""
    stream = torch.cuda.Stream()
    a, b, c, d = (torch.cuda.Event(enable_timing=True) for _ in range(4))
    dist.barrier()
    torch.cuda.synchronize()
    torch.cuda._sleep(4 * PAUSE_CYCLES)
    stream.wait_stream(torch.cuda.current_stream())
    if beside is not None:
        with torch.cuda.stream(stream):
            c.record()
            beside()
            d.record()
    a.record()
    main()
    b.record()
    # host sync: a measurement reads its clocks
    torch.cuda.synchronize()
    return a.elapsed_time(b) * 1e3, c.elapsed_time(d) * 1e3 if beside is not None else 0.0
