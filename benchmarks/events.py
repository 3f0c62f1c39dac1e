"""What patience costs and saves over NVLink's kernels, on virtual ranks of one GPU, each with its own stream.

    PYTHONPATH=src:. python benchmarks/events.py

Two ranks of 4096 tokens of 7168 values, 8 of 256 experts, nothing computed between. All bytes stay in one
GPU's memory, so the ratio to `serial`'s kernels is one of kernels and launches, not of the wire.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from tests.emulated.events import make_kernels, tables_of
from tests.emulated.out_of_step import RankHeap
from tests.emulated.scenario import Case, make_exchange, make_inputs

from imbrex.kernels import jit
from imbrex.kernels.events.events import Patience
from imbrex.kernels.exchange.exchange import NvlinkExchange
from imbrex.kernels.heap import VirtualHeap
from imbrex.placement import contiguous

CASE = Case(placement=contiguous(256, 2), tokens=(4096, 4096), choices=8, width=7168, drop=0.0)
SMS, CALLS, TAU_S, LATE_CYCLES = 56, 20, 2e-3, 40_000_000


def median_ms(streams: list[Any], call: Callable[[int], None], before: Callable[[int], None]) -> float:
    """Of rank 0's calls. before: what a rank's stream does first."""
    for stream in streams:  # one host serves all ranks: memory is there before anything spins
        with torch.cuda.stream(stream):
            blocks = [torch.empty(1 << 30, dtype=torch.uint8, device="cuda") for _ in range(3)]
            blocks += [torch.empty(60 << 20, dtype=torch.uint8, device="cuda") for _ in range(8)]
            torch.cuda._sleep(1)
        torch.cuda.synchronize()
        del blocks
    times = []
    for _ in range(CALLS + 3):
        torch.cuda.synchronize()
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        for rank, stream in enumerate(streams):
            with torch.cuda.stream(stream):
                before(rank)
                if rank == 0:
                    begin.record()
                call(rank)
                if rank == 0:
                    end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end))
    return statistics.median(times[3:])


def sleep(rank: int) -> None:
    """Both begin when the host has put down all launches; rank 1 may be late besides."""
    torch.cuda._sleep(2_000_000)


def sleep_late(rank: int) -> None:
    torch.cuda._sleep(2_000_000 + LATE_CYCLES * rank)


class Bench:
    """One batch of every rank, and the ways that move it."""

    def __init__(self) -> None:
        inputs = make_inputs(CASE, "cuda")
        self.each = [(inputs.x_WTD[r], inputs.ids_WTK[r], inputs.weights_WTK[r]) for r in range(CASE.ranks)]
        slot_of_E, offsets = tables_of(CASE.placement)
        self.tables = slot_of_E.cuda(), offsets.cuda()
        self.values_R = torch.zeros(CASE.ranks * max(CASE.tokens) * CASE.choices, device="cuda")

    def events(self, tau_s: float, epsilon: int, *, backward: bool = False) -> Callable[[int], None]:
        kernels = make_kernels(CASE, "cuda", [jit.load] * CASE.ranks, timeout=10.0, blocks=SMS)
        patience = [Patience(tau_s, epsilon, 1, torch.device("cuda")) for _ in self.each]

        def call(rank: int) -> None:
            mine = kernels[rank]
            begun = mine.send(*self.each[rank], self.tables, patience[rank])
            rows_RD = mine.take(begun)
            mine.reply(begun, rows_RD, weighted=True)
            y_TD = mine.sum(begun, rows_RD, weighted=True)
            if backward:
                back = mine.send_back(begun, y_TD)
                d_rows_RD = mine.take_back(back)
                mine.reply(back, d_rows_RD, values_R=self.values_R)
                mine.sum_back(back, d_rows_RD, self.values_R)
            mine.check()

        return call

    def serial(self, *, backward: bool = False) -> Callable[[int], None]:
        shape, heaps = make_exchange(CASE, "cuda").shape, list[VirtualHeap]()

        def heap_of(rank: int, nbytes: int) -> RankHeap:
            if not heaps:
                heaps.append(VirtualHeap(CASE.ranks, nbytes, "cuda"))
            return RankHeap(heaps[0], rank)

        exchanges = [NvlinkExchange(partial(heap_of, r), CASE.placement, shape) for r in range(CASE.ranks)]

        def call(rank: int) -> None:
            mine = exchanges[rank]
            rows_1RD, routed = mine.dispatch_expert(*self.each[rank], SMS)
            y_TD = mine.combine(rows_1RD, routed, num_sms=SMS)
            if backward:
                d_rows_1RD = mine.pull(y_TD, routed, num_sms=SMS)
                numbers = self.values_R, torch.empty_like(self.each[rank][2])
                mine.combine(d_rows_1RD, routed, num_sms=SMS, weighted=False, values=numbers)

        return call


def main() -> None:
    bench, streams = Bench(), [torch.cuda.Stream() for _ in CASE.tokens]
    for name, way, before in (
        ("events", partial(bench.events, 0.0, 0), sleep),
        ("patient, no wait", partial(bench.events, TAU_S, 1), sleep),
        ("events, 1 late", partial(bench.events, 0.0, 0), sleep_late),
        ("patient, 1 late", partial(bench.events, TAU_S, 1), sleep_late),
        ("events, both ways", partial(bench.events, 0.0, 0, backward=True), sleep),
        ("serial's kernels", bench.serial, sleep),
        ("serial's, both ways", partial(bench.serial, backward=True), sleep),
    ):
        print(f"{name:20} {median_ms(streams, way(), before):8.3f} ms", flush=True)


if __name__ == "__main__":
    main()
