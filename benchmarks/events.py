"""What do calls that may do without a late peer cost beside `serial`'s kernels, and what do they save?

    PYTHONPATH=src:. python benchmarks/events.py
    PYTHONPATH=src:. python benchmarks/events.py --layer    # a whole layer, on two GPUs or more

Two virtual ranks of one GPU, each with a stream of its own, DeepSeek-V3's rows, nothing computed between. All
bytes stay in one GPU's memory and both ranks share its multiprocessors, so a ratio to `serial`'s kernels is
one of kernels and launches, not of the wire.

The clock of a sample begins with an event that both streams wait for, behind a pause in which the host puts
down the launches of both. A sample whose pause was too short is taken again.
"""

from __future__ import annotations

import argparse
import faulthandler
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from benchmarks import events_layer
from tests.emulated.events import make_kernels, tables_of
from tests.emulated.out_of_step import RankHeap
from tests.emulated.scenario import Case, make_exchange

from imbrex.bench.ceilings import measure_ceilings
from imbrex.bench.exchange.clock import run_ranks
from imbrex.bench.results import check_results, describe_run, write_results
from imbrex.bench.shapes import MODELS
from imbrex.bench.skew import make_routing
from imbrex.kernels import jit
from imbrex.kernels.events.events import EventsCall, Patience
from imbrex.kernels.exchange import variants
from imbrex.kernels.exchange.exchange import NvlinkExchange
from imbrex.kernels.heap import VirtualHeap
from imbrex.placement import contiguous

QUESTION = (__doc__ or "").splitlines()[0]
COMMAND = "PYTHONPATH=src:. python benchmarks/events.py"
RESULTS = Path(__file__).parent / "results" / "events.json"
MODEL, TOKENS, RANKS = "deepseek-v3", 4096, 2
SHAPE = MODELS[MODEL]
CASE = Case(
    placement=contiguous(SHAPE.num_experts, RANKS),
    tokens=(TOKENS,) * RANKS,
    choices=SHAPE.top_k,
    width=SHAPE.hidden_size,
)
SMS, WARM, TAU_S, LATE_MS = 56, 3, 2e-3, 20.0
PAUSE_MS, FIRST_PAUSE_MS = 4.0, 500.0
"""Of a sample, and of the first one, in which memory is asked for."""
CYCLES = 20_000_000
Call = Callable[[int], Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class Setting:
    """One of the cases that all ways are measured in, in turns."""

    skew: str
    backward: bool
    late_ms: float

    @property
    def op(self) -> str:
        return "forward+backward" if self.backward else "forward"


SETTINGS = [
    Setting(skew=skew, backward=backward, late_ms=late_ms)
    for skew, late_ms in (("uniform", 0.0), ("zipf:1.2", 0.0), ("uniform", LATE_MS))
    for backward in (False, True)
]


class Clock:
    """Milliseconds from the event that lets all ranks begin to the end of each of them."""

    def __init__(self) -> None:
        self.streams, self.gate = [torch.cuda.Stream() for _ in range(RANKS)], torch.cuda.Stream()
        torch.cuda._sleep(1)
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        torch.cuda._sleep(CYCLES)
        end.record()
        torch.cuda.synchronize()
        self.cycles_per_ms = CYCLES / begin.elapsed_time(end)

    def __call__(self, call: Call, pause_ms: float, late_ms: float) -> list[float]:
        times = None
        while times is None:
            times = self._sample(call, pause_ms, late_ms)
            pause_ms *= 2
        return times

    def _sample(self, call: Call, pause_ms: float, late_ms: float) -> list[float] | None:
        """`None` where the pause was over before all launches were put down."""
        torch.cuda.synchronize()
        begin, *ends = (torch.cuda.Event(enable_timing=True) for _ in range(1 + RANKS))
        with torch.cuda.stream(self.gate):
            torch.cuda._sleep(int(pause_ms * self.cycles_per_ms))
            begin.record()
        for rank, stream in enumerate(self.streams):
            with torch.cuda.stream(stream):
                stream.wait_event(begin)
                if late_ms and rank == RANKS - 1:
                    torch.cuda._sleep(int(late_ms * self.cycles_per_ms))
                call(rank)
                ends[rank].record()
        in_time = not begin.query()
        torch.cuda.synchronize()
        return [begin.elapsed_time(end) for end in ends] if in_time else None


class Bench:
    """A batch of every rank, and the ways that move it."""

    def __init__(self, skew: str) -> None:
        make = torch.Generator().manual_seed(0)
        routings = [make_routing(skew, SHAPE, TOKENS, rank=rank) for rank in range(RANKS)]
        x_WTD = torch.randn(RANKS, TOKENS, SHAPE.hidden_size, generator=make).bfloat16().cuda()
        self.each = [
            (x_WTD[rank], routing.ids_TK.cuda(), routing.weights_TK.cuda())
            for rank, routing in enumerate(routings)
        ]
        slot_of_E, offsets = tables_of(CASE.placement)
        self.tables = slot_of_E.cuda(), offsets.cuda()
        self.values_R = torch.zeros(RANKS * TOKENS * SHAPE.top_k, device="cuda")
        self.last: list[EventsCall | None] = [None] * RANKS

    def events(self, tau_s: float, epsilon: int, *, backward: bool) -> Call:
        kernels = make_kernels(CASE, "cuda", [jit.load] * RANKS, timeout=10.0, blocks=SMS)
        patience = [Patience(tau_s, epsilon, 1, torch.device("cuda")) for _ in self.each]

        def call(rank: int) -> None:
            mine = kernels[rank]
            begun = self.last[rank] = mine.send(*self.each[rank], self.tables, patience[rank])
            rows_RD = mine.take(begun)
            y_TD = mine.sum(begun, rows_RD, weighted=True)
            if backward:
                back = mine.send_back(begun, y_TD)
                d_rows_RD = mine.take_back(back)
                mine.sum_back(back, d_rows_RD, self.values_R)
            mine.check()

        return call

    def serial(self, *, backward: bool) -> Call:
        for variant in (variants.EXPERT, variants.ROUTE, variants.PULL, variants.REDUCE[False]):
            jit.load(variant)  # before anything waits for a launch behind it
        shape, heaps = make_exchange(CASE, "cuda").shape, list[VirtualHeap]()

        def heap_of(rank: int, nbytes: int) -> RankHeap:
            if not heaps:
                heaps.append(VirtualHeap(RANKS, nbytes, "cuda"))
            return RankHeap(heaps[0], rank)

        exchanges = [NvlinkExchange(partial(heap_of, r), CASE.placement, shape) for r in range(RANKS)]

        def call(rank: int) -> None:
            mine = exchanges[rank]
            self.last[rank] = None
            rows_1RD, routed = mine.dispatch_expert(*self.each[rank], SMS)
            y_TD = mine.combine(rows_1RD, routed, num_sms=SMS)
            if backward:
                d_rows_1RD = mine.pull(y_TD, routed, num_sms=SMS)
                numbers = self.values_R, torch.empty_like(self.each[rank][2])
                mine.combine(d_rows_1RD, routed, num_sms=SMS, weighted=False, values=numbers)

        return call

    def dropped_share(self) -> float:
        """Of the first rank's choices in its last call."""
        call = self.last[0]
        return 0.0 if call is None else float((~call.kept_TK).float().mean())


def measure(clock: Clock, setting: Setting, repeats: int) -> list[dict[str, Any]]:
    """A row for each way."""
    bench, backward = Bench(setting.skew), setting.backward
    ways = {
        "serial's kernels": bench.serial(backward=backward),
        "events": bench.events(0.0, 0, backward=backward),
        "events, patient": bench.events(TAU_S, 1, backward=backward),
    }
    samples: dict[str, list[float]] = {name: [] for name in ways}
    dropped = dict.fromkeys(ways, 0.0)
    for turn in range(-WARM, repeats):
        for name, call in ways.items():
            times = clock(call, PAUSE_MS if turn > -WARM else FIRST_PAUSE_MS, setting.late_ms)
            # Whoever is late ends late in every way.
            samples[name] += [times[0] if setting.late_ms else max(times)][: turn >= 0]
            dropped[name] = bench.dropped_share()
    case = {
        "model": MODEL,
        "M": TOKENS,
        "skew": setting.skew,
        "late_ms": setting.late_ms,
        "tau_ms": 1e3 * TAU_S,
    }
    return [
        {
            "op": setting.op,
            "impl": name,
            "case": case,
            "n": repeats,
            "median_us": round(1e3 * statistics.median(times), 1),
            "min_us": round(1e3 * min(times), 1),
            "max_us": round(1e3 * max(times), 1),
            "dropped_share": round(dropped[name], 4),
        }
        for name, times in samples.items()
    ]


def measure_layers(args: argparse.Namespace) -> None:
    """A whole layer, a GPU for every rank."""
    world = torch.cuda.device_count()
    if world < 2:
        raise SystemExit("benchmarks/events.py --layer needs two GPUs or more")
    faulthandler.dump_traceback_later(args.seconds + 5.0, exit=True)  # ranks end by themselves before
    check_results(args.out, QUESTION)
    asked = events_layer.Asked(
        model=args.model,
        tokens=args.tokens,
        repeats=args.repeats or 20,
        seconds=args.seconds,
        question=QUESTION,
        out=str(args.out),
        run=describe_run(command_of(args), measure_ceilings()),
    )
    run_ranks(events_layer.work, world, asked)


def command_of(args: argparse.Namespace) -> str:
    """The words that repeat a run of `--layer`."""
    usual = {"model": MODEL, "tokens": TOKENS, "repeats": None}
    given = [
        f"--{name} {getattr(args, name)}" for name, value in usual.items() if getattr(args, name) != value
    ]
    return " ".join([COMMAND, "--layer", *given])


def main() -> None:
    parser = argparse.ArgumentParser(description=QUESTION)
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--repeats", type=int, help="of every way (40; 20 of a layer)")
    parser.add_argument("--layer", action="store_true", help="a whole layer, a GPU for every rank")
    parser.add_argument("--model", choices=sorted(MODELS), default=MODEL, help=f"of --layer ({MODEL})")
    parser.add_argument("--tokens", type=int, default=TOKENS, help=f"of a rank, of --layer ({TOKENS})")
    parser.add_argument(
        "--seconds", type=float, default=120.0, help="after which --layer says where it hangs, and ends (120)"
    )
    args = parser.parse_args()
    if args.layer:
        measure_layers(args)
    else:
        measure_kernels(args)


def measure_kernels(args: argparse.Namespace) -> None:
    """The kernels alone, on virtual ranks of one GPU."""
    run = describe_run(COMMAND, measure_ceilings())
    run["definitions"] = {
        "ranks": f"{RANKS} virtual ranks of one GPU, {SMS} multiprocessors each",
        "median_us": "until the slowest rank is done; with one late, until the other is",
        "dropped_share": "of that rank's choices in the last call",
    }
    clock, rows = Clock(), []
    for setting in SETTINGS:
        for row in measure(clock, setting, args.repeats or 40):
            rows.append(row)
            case = row["case"]
            print(f"{row['op']:17} {case['skew']:9} {case['late_ms']:4} ms late  {row['impl']:18}"
                  f"{row['median_us']:10.1f} us ({row['min_us']:.1f} to {row['max_us']:.1f}) "
                  f"{row['dropped_share']:.1%} dropped", flush=True)  # fmt: skip
        torch.cuda.empty_cache()
    write_results(args.out, QUESTION, run, rows)


if __name__ == "__main__":
    main()
