"""Time dispatch and combine among the GPUs of one host, beside NCCL doing the same job to the same layout.

A row is a full call (`full_call` true: from ids and tokens to finished rows, routing included) or a kernel
alone. `wire_gbps` counts the bytes of deduplicated rows that a rank receives from others, over the median;
`logical_gbps` also those that it keeps. Rows of the own rank stay in place in compact layouts, ours and the
rivals'.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from imbrex.cli.exchange_clock import Clock, run_ranks
from imbrex.cli.exchange_job import Job, check, draw, open_exchange
from imbrex.cli.exchange_rivals import AllToAll, GatherScatter
from imbrex.cli.results import describe_run, write_results
from imbrex.kernels import unavailable

QUESTION = "How fast do dispatch and combine cross NVLink, and on how many SMs?"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--ranks", type=int, metavar="W", help="GPUs (all)")
    parser.add_argument("--quick", action="store_true", help="one case instead of three")
    parser.add_argument("--json", metavar="FILE", help="put the rows into this result file")


def run(args: argparse.Namespace) -> int:
    """Exit code 0; 2 where this machine cannot run it."""
    reason = unavailable()
    if reason is None and args.ranks is not None and not 1 <= args.ranks <= torch.cuda.device_count():
        reason = f"--ranks {args.ranks}: torch sees {torch.cuda.device_count()} GPUs"
    if reason is not None:
        print(f"imbrex bench exchange: {reason}", file=sys.stderr)
        return 2
    world = args.ranks or torch.cuda.device_count()
    command = f"imbrex bench exchange --ranks {world}" + " --quick" * args.quick
    print(f"{run_ranks(work, world, args.quick, command, args.json)} rows")
    return 0


class Rows:
    """Rows of one job, timed on all ranks."""

    def __init__(self, job: Job, rank: int, clock: Clock) -> None:
        self.job, self.rank, self.clock = job, rank, clock
        self.rows: list[dict[str, Any]] = []
        self.received = self.kept = 0

    def time(self, op: str, impl: str, layout: str, call: Callable[[], Any], **more: Any) -> None:
        timing = self.clock(call)
        dtype = more.pop("dtype", "bf16")
        share = 1.0 if dtype == "bf16" else (1 + 4 / 128) / 2  # of the bytes of bf16
        row = {
            "op": op,
            "impl": impl,
            "case": {**self.job.case, "layout": layout, "dtype": dtype},
            "median_us": round(timing.median_us, 1),
            "min_us": round(timing.min_us, 1),
            "max_us": round(timing.max_us, 1),
            "n": timing.n,
            "host_syncs": 0,
            "full_call": True,
            **more,
        }
        if op != "route":
            row["wire_gbps"] = round(self.received * share / timing.median_us / 1e3, 1)
            row["logical_gbps"] = round((self.received + self.kept) * share / timing.median_us / 1e3, 1)
        self.rows.append(row)
        if self.rank == 0:
            print(
                f"{op} {impl} {layout} {more}: {row['median_us']} us, wire {row['wire_gbps']} GB/s",
                flush=True,
            )


def ours(rows: Rows, sweep: tuple[int, ...]) -> None:
    job, rank = rows.job, rows.rank
    exchange = open_exchange(job)
    check(job, exchange, rank)
    x, ids, weights = draw(job, rank)
    routed = exchange.route(ids, weights)
    out = exchange.pull(x, routed, 24)
    exchange.check(synchronize=True)
    rows.received = int(routed.totals_L4[0, 1]) * 2 * job.D
    rows.kept = int((routed.send_row_LTW[0, :, rank] >= 0).sum()) * 2 * job.D
    calls: dict[tuple[str, str], Callable[[int], Any]] = {
        ("dispatch", "compact"): lambda n: exchange.push(x, routed, n),
        ("dispatch", "expert"): lambda n: exchange.pull(x, routed, n, out),
        ("combine", "compact"): lambda n: exchange.combine_compact(x, routed, num_sms=n),
        ("combine", "expert"): lambda n: exchange.combine(out, routed, num_sms=n, num_tokens=job.T),
    }
    rows.time("route", "imbrex", "both", lambda: exchange.route(ids, weights), num_sms=exchange.route_blocks)
    for (op, layout), call in calls.items():
        for n in sweep:
            whole = op == "combine"
            rows.time(op, "imbrex", layout, partial(call, n), num_sms=n, full_call=whole)
    for n in sweep:
        quantised = partial(exchange.push, x, routed, n, quantise=True)
        rows.time("dispatch", "imbrex", "compact", quantised, num_sms=n, full_call=False, dtype="fp8")
    full: dict[str, Callable[[], Any]] = {
        "compact": lambda: exchange.push(x, exchange.route(ids, weights), 8),
        "expert": lambda: exchange.pull(x, exchange.route(ids, weights), 24, out),
    }
    for layout, whole in full.items():
        rows.time("dispatch", "imbrex", layout, whole, num_sms=8 if layout == "compact" else 24)
    exchange.check(synchronize=True)
    exchange.close()


def teams(rows: Rows, sweep: tuple[int, ...]) -> None:
    """Combine with four warps to a piece of a row instead of one."""
    job, rank = rows.job, rows.rank
    exchange = open_exchange(job, compact=False, combine_team=4)
    check(job, exchange, rank)
    x, ids, weights = draw(job, rank)
    routed = exchange.route(ids, weights)
    out = exchange.pull(x, routed, 24)
    for n in sweep:
        compact = partial(exchange.combine_compact, x, routed, num_sms=n)
        expert = partial(exchange.combine, out, routed, num_sms=n, num_tokens=job.T)
        rows.time("combine", "imbrex-team4", "compact", compact, num_sms=n)
        rows.time("combine", "imbrex-team4", "expert", expert, num_sms=n)
    exchange.check(synchronize=True)
    exchange.close()


def rivals(rows: Rows) -> None:
    job, rank = rows.job, rows.rank
    x, ids, weights = draw(job, rank)
    for rival in (AllToAll(job, rank), GatherScatter(job, rank)):
        for layout in ("compact", "expert"):
            expert = layout == "expert"
            moved = rival.dispatch(x, ids, weights, expert)
            given = moved.rows_RD if moved.rows_RD is not None else moved.pool_PD
            dispatch = partial(rival.dispatch, x, ids, weights, expert)
            combine = partial(rival.combine, given, None if expert else x, moved)
            rows.time("dispatch", rival.name, layout, dispatch, host_syncs=rival.host_syncs)
            rows.time("combine", rival.name, layout, combine)
            del moved, given, combine


def ceilings(rank: int, world: int, clock: Clock) -> dict[str, float]:
    """Every token to every rank: the push without anything to decide."""
    job = Job(T=8192, D=7168, K=world, E=world, W=world, slack=2.0)
    exchange = open_exchange(job, expert=False)
    x, _, weights = draw(job, rank)
    ids = torch.arange(world, device="cuda").expand(job.T, world).contiguous()
    routed = exchange.route(ids, weights)
    nbytes = (world - 1) * job.T * 2 * job.D
    best = min(clock(lambda n=n: exchange.push(x, routed, n)).median_us for n in (8, 16, 32))
    exchange.check(synchronize=True)
    exchange.close()
    return {"push_gbps": round(nbytes / best / 1e3, 1)}


def jobs_of(world: int, quick: bool) -> list[Job]:
    jobs = [Job(T=4096, D=7168, K=8, E=256, W=world)]
    if not quick:
        if world >= 4:  # the article's: two experts a rank
            jobs.append(Job(T=4096, D=8192, K=8, E=2 * world, W=world))
        jobs.append(Job(T=4096, D=7168, K=8, E=256, W=world, routing="zipf"))
    return jobs


def work(rank: int, world: int, quick: bool, command: str, path: str | None) -> int:
    """All rows of one rank; rank 0 writes the file after every case."""
    clock = Clock(n=20)
    run = describe_run(command, ceilings(rank, world, clock))
    found: list[dict[str, Any]] = []
    for job in jobs_of(world, quick):
        rows = Rows(job, rank, clock)
        ours(rows, (1, 2, 4, 8, 16, 24, 32) if job.E < 256 else (8, 16, 24, 32))
        if job.routing == "uniform":
            teams(rows, (8, 16, 24))
        rivals(rows)
        found += rows.rows
        torch.cuda.empty_cache()
        if rank == 0 and path is not None:
            write_results(path, QUESTION, run, found)
    return len(found)
