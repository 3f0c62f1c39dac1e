"""The parts of `imbrex bench exchange`. Every part is collective and leaves nothing behind."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from imbrex.bench.exchange.job import Job, check, draw, open_exchange, shape_of
from imbrex.bench.exchange.rivals import AllToAll, GatherScatter
from imbrex.bench.exchange.rows import Rows
from imbrex.codec.fp8 import Fp8
from imbrex.kernels.exchange import layout as lay
from imbrex.kernels.exchange.exchange import NvlinkExchange, Routed
from imbrex.kernels.exchange.launches import default_sms
from imbrex.kernels.exchange.lease import Lease

COMPACT_SMS, EXPERT_SMS = 8, 24
MAIN = Job(T=4096, D=7168, K=8, E=256, W=4)
SWEEP = (1, 2, 4, 8, 16, 24, 32)
GRAPH_CALLS = 10


class Running:
    """An exchange of one job, checked, with its inputs and routing."""

    def __init__(self, rows: Rows, job: Job, **options: Any) -> None:
        self.rows, self.job = rows, job
        self.exchange: NvlinkExchange = open_exchange(job, **options)
        self.routed: Routed = check(job, self.exchange, rows.rank)
        self.x, self.ids, self.weights = draw(job, rows.rank)
        self.out: Tensor = self.exchange.pull(self.x, self.routed, EXPERT_SMS)
        rows.begin(job, self.routed, self.exchange.last_sms)

    def route(self, n: int) -> Routed:
        return self.exchange.route(self.ids, self.weights, num_sms=n)

    def push(self, n: int, routed: Routed | None = None, *, quantise: bool = False) -> Lease:
        """A compact call: rows alone with `routed`, else the whole call."""
        if routed is not None:
            return self.exchange.push(self.x, routed, n, quantise=quantise)
        return self.exchange.dispatch(self.x, self.ids, self.weights, n, quantise=quantise)[0]

    def pull(self, n: int, routed: Routed | None = None) -> Tensor:
        """An expert-major call: rows alone with `routed`, else the whole call."""
        if routed is not None:
            return self.exchange.pull(self.x, routed, n, self.out)
        return self.exchange.dispatch_expert(self.x, self.ids, self.weights, n, out=self.out)[0]

    def combine_compact(self, n: int) -> Tensor:
        return self.exchange.combine_compact(self.x, self.routed, num_sms=n)

    def combine_expert(self, n: int, wire: str = "bf16") -> Tensor:
        return self.exchange.combine(self.out, self.routed, num_sms=n, num_tokens=self.job.T, wire=wire)

    def full_calls(self) -> None:
        """Whole calls as a user makes them, on the numbers of SMs that they take by themselves: 8 and 24, or
        16 and 32 for short rows."""
        few, many = (default_sms(2 * self.job.D, compact=compact) for compact in (True, False))
        time = self.rows.time
        time("dispatch", "imbrex", "compact", partial(self.push, few), num_sms=few)
        time("dispatch", "imbrex", "expert", partial(self.pull, many), num_sms=many)
        time("combine", "imbrex", "compact", partial(self.combine_compact, few), num_sms=few)
        time("combine", "imbrex", "expert", partial(self.combine_expert, many), num_sms=many)

    def kernels(self, sms: Iterable[int]) -> None:
        """Every kernel alone, over SMs."""
        time, routed = self.rows.time, self.routed
        for n in sms:
            more = {"num_sms": n, "full_call": False}
            time("dispatch", "imbrex", "compact", partial(self.push, n, routed), **more)
            time("dispatch", "imbrex", "expert", partial(self.pull, n, routed), **more)
            time("combine", "imbrex", "compact", partial(self.combine_compact, n), **more)
            time("combine", "imbrex", "expert", partial(self.combine_expert, n), **more)
            quantised = partial(self.push, n, routed, quantise=True)
            time("dispatch", "imbrex", "compact", quantised, dtype="fp8", **more)
            time("combine", "imbrex", "expert", partial(self.combine_expert, n, "fp8"), dtype="fp8", **more)

    def close(self) -> None:
        self.exchange.check(synchronize=True)
        del self.out
        self.exchange.close()
        torch.cuda.empty_cache()


def rivals(rows: Rows, job: Job) -> None:
    """NCCL doing the same job to the same layouts, in the same run."""
    x, ids, weights = draw(job, rows.rank)
    for rival in (AllToAll(job, rows.rank), GatherScatter(job, rows.rank)):
        for layout in ("compact", "expert"):
            expert = layout == "expert"
            moved = rival.dispatch(x, ids, weights, expert)
            moved_rows = moved.rows_RD if moved.rows_RD is not None else moved.pool_PD
            combine = partial(rival.combine, moved_rows, None if expert else x, moved)
            if expert:
                want = x.float() * weights.sum(-1, keepdim=True)
                torch.testing.assert_close(combine().float(), want, rtol=0.03, atol=0.05)
            dispatch = partial(rival.dispatch, x, ids, weights, expert)
            rows.time("dispatch", rival.name, layout, dispatch)
            rows.time("combine", rival.name, layout, combine)
            del moved, moved_rows, combine
    torch.cuda.empty_cache()


def coded_rivals(rows: Rows, job: Job) -> None:
    """NCCL carrying rows that were quantised before, which ours are not."""
    x, ids, weights = draw(job, rows.rank)
    coded = Fp8.e4m3().encode(x, x.dtype)
    for rival in (AllToAll(job, rows.rank), GatherScatter(job, rows.rank)):
        dispatch = partial(rival.dispatch, coded, ids, weights, False)
        rows.time("dispatch", rival.name, "compact", dispatch, dtype="fp8", quantised="before")


def push_ceiling(rows: Rows, world: int) -> float:
    """GB/s where every token goes to every rank: the push without anything to decide."""
    job = Job(T=8192, D=7168, K=world, E=world, W=world, slack=2.0)
    exchange = open_exchange(job, expert=False)
    x, _, weights = draw(job, rows.rank)
    ids = torch.arange(world, device="cuda").expand(job.T, world).contiguous()
    routed = exchange.route(ids, weights)
    nbytes = (world - 1) * job.T * 2 * job.D
    best = min(rows.clock(partial(exchange.push, x, routed, n)).median_us for n in (8, 16, 32))
    exchange.check(synchronize=True)
    exchange.close()
    return nbytes / best / 1e3


def main_case(rows: Rows, world: int) -> None:
    """The shape of the targets: full calls, kernels over SMs, and the rivals."""
    job = replace(MAIN, W=world)
    running = Running(rows, job)
    for n in (COMPACT_SMS, EXPERT_SMS):
        rows.time("route", "imbrex", "both", partial(running.route, n), num_sms=n)
    running.full_calls()
    push_fp8 = partial(running.push, COMPACT_SMS, quantise=True)
    rows.time("dispatch", "imbrex", "compact", push_fp8, dtype="fp8", num_sms=COMPACT_SMS)
    running.kernels((4, 8, 16, 24))
    running.close()
    rivals(rows, job)
    coded_rivals(rows, job)


def sweep(rows: Rows, world: int) -> None:
    """Hybrid-EP's configuration: two experts a rank, width 8192, over SMs."""
    running = Running(rows, Job(T=4096, D=8192, K=min(8, 2 * world), E=2 * world, W=world))
    running.kernels(SWEEP)
    running.close()


def skewed(rows: Rows, world: int, routing: str) -> None:
    """All tokens to one rank, a popularity law, or a recorded trace; beside the rivals."""
    shape = replace(MAIN, D=2048, K=6, E=64) if routing.startswith("trace") else MAIN
    job = replace(shape, W=world, routing=routing)
    running = Running(rows, job)
    running.full_calls()
    running.close()
    rivals(rows, job)


def small(rows: Rows, world: int, tokens: int) -> None:
    """Decoding: calls in a CUDA graph, each row one of ten; beside the rivals, which no graph takes."""
    job = replace(MAIN, T=tokens, W=world, slack=4.0)
    running = Running(rows, job)
    exchange, x, ids, weights = running.exchange, running.x, running.ids, running.weights
    for n in (24, lay.SMALL_SMS):
        calls: dict[str, Callable[[], Any]] = {
            "dispatch": partial(exchange.dispatch_small, x, ids, weights, n),
            "combine": partial(running.combine_expert, n),
        }
        for op, call in calls.items():
            rows.time(op, "imbrex", "expert", graph_of(call), calls=GRAPH_CALLS, num_sms=n, graph=True)
    running.close()
    rivals(rows, job)


def graph_of(call: Callable[[], Any]) -> Callable[[], None]:
    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(GRAPH_CALLS):
            call()
    return graph.replay


def heap_bytes(rows: Rows, world: int) -> None:
    """Bytes of the heap of a rank, worst case, beside what Comet's Table 3 asks for, 2 M N."""
    job = replace(MAIN, W=world)
    for layout in ("compact", "expert"):
        sized = lay.layout(shape_of(job), compact=layout == "compact", expert=layout == "expert")
        case = {**job.case, "layout": layout}
        rows.add({"op": "heap", "impl": "imbrex", "case": case, "nbytes": sized.nbytes})
    rows.add({"op": "heap", "impl": "comet", "case": job.case, "nbytes": 2 * job.W * job.T * job.D})
