"""Time dispatch and combine among the GPUs of one host, beside NCCL doing the same job to the same layout.

What the fields of a row mean is printed first and stands in the result file (`rows.DEFINITIONS`).
Rows of the own rank stay in place in compact layouts, ours and the rivals'.
"""

from __future__ import annotations

import argparse
import shlex
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from imbrex.bench.exchange.beside import beside_gemm
from imbrex.bench.exchange.clock import Clock, run_ranks
from imbrex.bench.exchange.deep_ep import deep_ep_calls
from imbrex.bench.exchange.parts import heap_bytes, main_case, push_ceiling, skewed, small, sweep
from imbrex.bench.exchange.rows import DEFINITIONS, Rows
from imbrex.bench.results import check_file, check_results, describe_run, write_results
from imbrex.kernels import why_not_hopper
from imbrex.kernels.heap import SymmetricHeap
from imbrex.observe.clock import device_microseconds

QUESTION = "How fast do dispatch and combine cross NVLink, and on how many SMs?"
Part = Callable[[Rows, int], None]
SIDE = 8192
COPY_BYTES = 256 << 20
"""Sizes for measuring the machine's limits, which all ranks do at once."""
PARTS: dict[str, Part] = {
    "main": main_case,
    "small": partial(small, tokens=128),
    "one-rank": partial(skewed, routing="one-rank"),
    "zipf": partial(skewed, routing="zipf:1.2"),
    "sweep": sweep,
    "heap": heap_bytes,
    "deep-ep": deep_ep_calls,
    "beside": beside_gemm,
}
QUICK = ("main", "heap")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--ranks", type=int, metavar="W", help="GPUs (all)")
    add("--parts", default="all", metavar="PART,...", help=f"{', '.join(PARTS)}, or all (all)")
    add("--quick", action="store_true", help=f"only {' and '.join(QUICK)}")
    add("--trace", action="append", default=[], metavar="FILE[:ARRAY[:LAYER]]", help="a recorded routing too")
    add("-n", "--repeats", type=int, default=20, metavar="N", help="timed calls of each (20)")
    add("--seconds", type=float, default=600.0, metavar="S", help="begin no part later than this (600)")
    add("--json", metavar="FILE", help="put the rows into this result file")


def run(args: argparse.Namespace) -> int:
    """Exit code 0; 2 where this machine cannot run it. Raises ValueError for an unknown part."""
    names = list(QUICK) if args.quick else list(PARTS) if args.parts == "all" else args.parts.split(",")
    if unknown := [name for name in names if name not in PARTS]:
        raise ValueError(f"--parts: {unknown[0]!r} is not known; use all or some of {', '.join(PARTS)}")
    check_file("json", args.json)
    if args.json:
        check_results(args.json, QUESTION)
    reason = why_not_hopper()
    if reason is None and args.ranks is not None and not 1 <= args.ranks <= torch.cuda.device_count():
        reason = f"--ranks {args.ranks}: torch sees {torch.cuda.device_count()} GPUs"
    if reason is not None:
        print(f"imbrex bench exchange: {reason}", file=sys.stderr)
        return 2
    world = args.ranks or torch.cuda.device_count()
    words = ["imbrex", "bench", "exchange", f"--ranks={world}", f"--parts={','.join(names)}"]
    words += [f"--trace={trace.rpartition('/')[2]}" for trace in args.trace]  # a file, not a machine's folder
    options = {"repeats": args.repeats, "seconds": args.seconds, "path": args.json}
    traces = {f"trace:{trace}": partial(skewed, routing=f"trace:{trace}") for trace in args.trace}
    parts = {names[0]: PARTS[names[0]], **traces, **{name: PARTS[name] for name in names[1:]}}
    print(f"{run_ranks(work, world, parts, shlex.join(words), options)} rows")
    return 0


def work(rank: int, world: int, parts: dict[str, Part], command: str, options: dict[str, Any]) -> int:
    """All rows of one rank; rank 0 writes the file after every part."""
    begun, path = time.monotonic(), options["path"]
    rows = Rows(rank, Clock(n=options["repeats"]))
    limits: dict[str, float] = {}
    for name, meaning in DEFINITIONS.items() if rank == 0 else ():
        print(f"{name}: {meaning}")

    def measure_ceilings(rows: Rows, world: int) -> None:
        limits["dense_tflops"] = round(dense_ceiling(), 1)
        limits["copy_engine_gbps"] = round(copy_engine_ceiling(rows.clock), 1)
        if world > 1:
            limits["push_gbps"] = rows.push_gbps = round(push_ceiling(rows, world), 1)

    for name, part in {"ceilings": measure_ceilings, **parts}.items():
        attempt(name, partial(part, rows, world), rows, options["seconds"] - (time.monotonic() - begun))
        if rank == 0:
            print(f"-- {name} done after {time.monotonic() - begun:.0f} s", flush=True)
            if path is not None and rows.entries:
                run = describe_run(command, limits) | {"definitions": DEFINITIONS}
                write_results(path, QUESTION, run, rows.entries)
    return len(rows.entries)


def attempt(name: str, part: Callable[[], None], rows: Rows, seconds_left: float) -> None:
    """Run a part; where it cannot be run, the file says so in its place. Ranks decide together; a fault of
    one rank alone ends in the exchange's time-out on the others."""
    left = torch.tensor([seconds_left], device="cuda")
    dist.broadcast(left, 0)
    if float(left) <= 0:
        rows.add({"op": name, "impl": "imbrex", "skipped": "no time left"})
        return
    try:
        part()
    except (RuntimeError, ValueError, AssertionError) as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        rows.add({"op": name, "impl": "imbrex", "skipped": reason[:300]})
        torch.cuda.empty_cache()


def dense_ceiling() -> float:
    """TFLOP/s of a bf16 product of 8192^3, the slowest rank's."""
    left, right = (torch.randn(SIDE, SIDE, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    times = [device_microseconds(lambda: torch.mm(left, right)) for _ in range(13)][3:]
    slowest = torch.tensor(statistics.median(times), device="cuda")
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    # host sync: a measurement
    return 2 * SIDE**3 / float(slowest) / 1e6


def copy_engine_ceiling(clock: Clock) -> float:
    """GB/s of one direction: every rank copies 256 MiB into the next rank's memory at once."""
    group, rank, world = dist.group.WORLD, dist.get_rank(), dist.get_world_size()
    assert group is not None
    heap = SymmetricHeap(group, COPY_BYTES, torch.device("cuda", torch.cuda.current_device()))
    source = torch.randint(255, (COPY_BYTES,), dtype=torch.uint8, device="cuda")
    target = heap.view((rank + 1) % world, 0, COPY_BYTES)
    took = clock(lambda: target.copy_(source)).median_us
    heap.close()
    return COPY_BYTES / took / 1e3
