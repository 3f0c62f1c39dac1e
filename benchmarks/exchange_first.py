"""The first experiment: what the link, the copy engine and a GEMM beside them allow. Prints a table.

PYTHONPATH=src python3 benchmarks/exchange_first.py [RANKS] [alone]
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from imbrex.bench.exchange.clock import Clock, run_ranks
from imbrex.bench.exchange.job import Job, check, draw, open_exchange


def spans(
    main: Callable[[], Any], beside: Callable[[], Any] | None, stream: torch.cuda.Stream
) -> tuple[float, float]:
    """Microseconds of `main` on this stream and of `beside` on the other, both started together."""
    a, b, c, d = (torch.cuda.Event(enable_timing=True) for _ in range(4))
    torch.cuda.synchronize()
    torch.cuda._sleep(2_000_000)
    stream.wait_stream(torch.cuda.current_stream())
    if beside:
        with torch.cuda.stream(stream):
            c.record()
            beside()
            d.record()
    a.record()
    main()
    b.record()
    torch.cuda.synchronize()
    return a.elapsed_time(b) * 1e3, c.elapsed_time(d) * 1e3 if beside else 0.0


def beside_gemm(rank: int, job: Job, exchange: Any, routed: Any, x: Tensor) -> list[str]:
    left, right = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    out = torch.empty_like(left)
    stream = torch.cuda.Stream()
    heaps = [p for p in range(job.W) if p != rank]
    part = x.view(torch.uint8).view(-1)[: 53 << 20]
    targets = peer_views(exchange, heaps, part.numel())
    lanes = [torch.cuda.Stream() for _ in heaps]

    def gemms() -> None:
        for _ in range(6):
            torch.mm(left, right, out=out)

    def engine() -> None:
        for lane, target in zip(lanes, targets, strict=True):
            lane.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(lane):
                for _ in range(18):
                    target.copy_(part, non_blocking=True)
            torch.cuda.current_stream().wait_stream(lane)

    def sm(n: int) -> Callable[[], Any]:
        return lambda: [exchange.push(x, routed, n) for _ in range(18)]

    lines = []
    for name, load in [
        ("nothing", None),
        ("copy engine", engine),
        *((f"push, {n} SMs", sm(n)) for n in (4, 8, 16)),
    ]:
        spans(gemms, load, stream)
        gemm, other = spans(gemms, load, stream)
        alone = spans(lambda: None, load, stream)[1] if load else 0.0
        lines.append(
            f"6 GEMMs beside {name}: {gemm:.0f} us; 18 exchanges beside them {other:.0f} us, alone "
            f"{alone:.0f} us"
        )
    return lines


def peer_views(exchange: Any, peers: list[int], nbytes: int) -> list[Tensor]:
    handle = exchange.heap._handle
    return [
        handle.get_buffer(p, (nbytes,), torch.uint8, storage_offset=exchange.layout.received) for p in peers
    ]


def small_calls(job: Job, rank: int, exchange: Any, sms: int) -> str:
    """Microseconds of each kernel, ten calls in a CUDA graph."""
    x, ids, weights = draw(job, rank)
    routed = exchange.route(ids, weights)
    rows = exchange.pull(x, routed, sms)
    calls: dict[str, Callable[[], Any]] = {
        "route": lambda: exchange.route(ids, weights),
        "push": lambda: exchange.push(x, routed, sms),
        "pull": lambda: exchange.pull(x, routed, sms),
        "dispatch in one": lambda: exchange.dispatch_small(x, ids, weights, sms),
        "combine": lambda: exchange.combine(rows, routed, num_sms=sms, num_tokens=job.T),
    }
    took = []
    for name, call in calls.items():
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        with torch.cuda.graph(graph):
            for _ in range(10):
                call()
        took.append(f"{name} {Clock(n=10)(graph.replay).median_us / 10:.1f}")
    return ", ".join(took) + " us"


def small(rank: int, world: int) -> list[str]:
    lines = []
    for tokens in (1, 16, 128):
        job = Job(T=tokens, D=7168, K=8, E=256, W=world, slack=4.0)
        exchange = open_exchange(job)
        check(job, exchange, rank)
        lines += [f"T={tokens}, {sms} SMs: {small_calls(job, rank, exchange, sms)}" for sms in (8, 24, 64)]
        exchange.check(synchronize=True)
    return lines


def sums(
    job: Job, exchange: Any, routed: Any, rows: Tensor, x: Tensor, note: Callable[..., None], nbytes: int
) -> None:
    """Combine from both layouts."""
    for n in (4, 8, 16):
        note(f"combine compact {n} SMs", lambda n=n: exchange.combine_compact(x, routed, num_sms=n), nbytes)
    for n in (8, 16, 24, 32):
        expert = partial(exchange.combine, rows, routed, num_sms=n, num_tokens=job.T)
        note(f"combine {n} SMs", expert, nbytes)


def coded(
    job: Job, exchange: Any, routed: Any, rows: Tensor, x: Tensor, note: Callable[..., None], nbytes: int
) -> None:
    """fp8 both ways."""
    for n in (4, 8, 16):
        note(f"push fp8 {n} SMs", lambda n=n: exchange.push(x, routed, n, quantise=True), nbytes)
    note(
        "combine 24 SMs, fp8 on the wire",
        lambda: exchange.combine(rows, routed, num_sms=24, num_tokens=job.T, wire="fp8"),
        nbytes,
    )


def work(rank: int, world: int, beside: bool) -> list[str]:
    job = Job(T=4096, D=7168, K=8, E=256, W=world)
    exchange = open_exchange(job)
    check(job, exchange, rank)
    lines = ["rows and sums are right"]
    clock = Clock(n=10)
    x, ids, weights = draw(job, rank)
    routed = exchange.route(ids, weights)
    rows = exchange.pull(x, routed, 24)
    received = int(routed.totals_L4[0, 1])
    wire = received * 2 * job.D

    def note(name: str, call: Callable[[], Any], nbytes: int = 0) -> None:
        timing = clock(call)
        rate = f", wire {nbytes / timing.median_us / 1e3:.0f} GB/s" if nbytes else ""
        lines.append(f"{name}: {timing.median_us:.0f} us ({timing.min_us:.0f}..{timing.max_us:.0f}){rate}")
        if rank == 0:
            print(lines[-1], flush=True)

    for n in (8, 16, 24):
        note(f"route {n} SMs", lambda n=n: exchange.route(ids, weights, num_sms=n))
    for n in (2, 4, 8, 16):
        note(f"push {n} SMs", lambda n=n: exchange.push(x, routed, n), wire)
    note("route + push 8 SMs", lambda: exchange.push(x, exchange.route(ids, weights), 8), wire)
    for n in (8, 16, 24, 32):
        note(f"pull {n} SMs", lambda n=n: exchange.pull(x, routed, n, rows), wire)
    note(
        "route + pull 24 SMs",
        lambda: exchange.pull(x, exchange.route(ids, weights, num_sms=24), 24, rows),
        wire,
    )
    sums(job, exchange, routed, rows, x, note, wire)
    coded(job, exchange, routed, rows, x, note, wire * 33 // 64)
    if beside:
        lines += beside_gemm(rank, job, exchange, routed, x)
    exchange.check(synchronize=True)
    lines += small(rank, world)
    return lines


if __name__ == "__main__":
    ranks = int(sys.argv[1]) if len(sys.argv) > 1 else 4
    print("\n".join(run_ranks(work, ranks, "alone" not in sys.argv)))
