"""Where do chunks lose to serial on NVLink, and where do they win?

    python benchmarks/schedule_nvlink.py --out benchmarks/results/schedule.json

Published layers on all GPUs of this machine, M tokens over all ranks, every schedule in turn. The GPU's time
from aligned ranks, each sample the slowest rank's; the host queues a call while the GPU waits, so that what
the host takes does not count: `host_us` says that, and where it is longer a layer by itself takes as long.
"""

from __future__ import annotations

import argparse
import statistics
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from imbrex import overlap
from imbrex.bench.exchange.clock import run_ranks
from imbrex.bench.layer.race import Call, Entry, Inputs, Race, difference, host_microseconds, time_in_turns
from imbrex.bench.results import describe_run, write_results
from imbrex.contracts import Routing
from imbrex.exchange.exchange import Exchange

QUESTION = "Does it pay to move one chunk of tokens while another is computed?"
RESULTS = Path(__file__).parent / "results" / "schedule.json"
OPS = ("layer-forward", "layer")
PAUSE_CYCLES = {"layer-forward": 12_000_000, "layer": 36_000_000}
"""About 6 and 18 ms of an H200, in which the host queues a call."""


def main() -> None:
    parser = argparse.ArgumentParser(description=QUESTION)
    parser.add_argument("--models", default="qwen2-moe,deepseek-v3")
    parser.add_argument("--tokens", default="16384,65536", help="over all ranks")
    parser.add_argument("--codec", default="identity")
    parser.add_argument("--schedules", default="serial,optsche-1,optsche-2,optsche-4")
    parser.add_argument("--sms", type=int, default=None, help="multiprocessors of a move (Nvlink.beside_sms)")
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--out", type=Path, default=RESULTS)
    args = parser.parse_args()
    given = [f"--{name}={value}" for name, value in vars(args).items() if value != parser.get_default(name)]
    words = [word for word in given if not word.startswith("--out")]
    run = describe_run(" ".join(["python benchmarks/schedule_nvlink.py", *words]))
    run_ranks(measure, torch.cuda.device_count(), args, run)


def measure(rank: int, world: int, args: argparse.Namespace, run: dict[str, Any]) -> None:
    """Rows of a results file, there as soon as a model's are."""
    rows: list[dict[str, Any]] = []
    for model in args.models.split(","):
        race = Race(model, rank, world)
        exchange = _exchange(race, args)
        for tokens in map(int, args.tokens.split(",")):
            inputs = race.inputs(Entry(model=model, M=tokens))
            for op in OPS:
                calls = {
                    name: _call(overlap.make(name), race, exchange, inputs, training=op == "layer")
                    for name in args.schedules.split(",")
                }
                found = _rows(race, exchange, args, tokens, op, calls)
                rows += found
                if rank == 0:
                    _tell(found)
            torch.cuda.empty_cache()
        if rank == 0:
            write_results(args.out, QUESTION, run, rows)
        race.close()
        del race, exchange
        torch.cuda.empty_cache()


def _exchange(race: Race, args: argparse.Namespace) -> Exchange:
    exchange = race.exchange
    if args.codec != "identity":
        size = race.placement, race.shape.hidden_size, race.shape.top_k
        exchange = Exchange(*size, group=dist.group.WORLD, transport="nvlink", codec=args.codec)
    if args.sms is not None:
        transport: Any = exchange.transport
        transport.sms_beside = type(transport.sms)(**dict.fromkeys(transport.sms.__slots__, args.sms))
    return exchange


def _call(strategy: Any, race: Race, exchange: Exchange, inputs: Inputs, *, training: bool) -> Call:
    x_TD = inputs.x_TD.clone().requires_grad_(training)
    weights_TK = inputs.routing.weights_TK.clone().requires_grad_(training)
    routing = Routing(ids_TK=inputs.routing.ids_TK, weights_TK=weights_TK)
    leaves = [x_TD, weights_TK, *race.experts.parameters()]

    def call() -> list[Tensor]:
        with torch.set_grad_enabled(training):
            y_TD = strategy.run(x_TD, routing, exchange, race.experts, None).y_TD
        found = list(torch.autograd.grad(y_TD, leaves, inputs.d_y_TD)) if training else []
        return [y_TD.detach(), *found[:2]]

    return call


def _rows(
    race: Race, exchange: Exchange, args: argparse.Namespace, tokens: int, op: str, calls: dict[str, Call]
) -> list[dict[str, Any]]:
    truth = calls["serial"]()
    error = {name: difference(call(), truth) for name, call in calls.items()}
    taken = time_in_turns(calls, PAUSE_CYCLES[op], repeats=args.repeats)
    shape, serial = race.shape, statistics.median(taken["serial"])
    case = {"model": race.model, "M": tokens, "T": tokens // race.world, "W": race.world, "K": shape.top_k}
    case |= {"D": shape.hidden_size, "F": shape.intermediate_size, "E": shape.num_experts}
    case |= {"codec": args.codec, "transport": "nvlink", "dtype": "bfloat16", "network": "nvlink"}
    transport: Any = exchange.transport
    case |= {"beside_sms": transport.sms_beside.dispatch}
    found = []
    for name, times in taken.items():
        row = {"op": op, "impl": name, "case": case, "n": len(times), "error": error[name]}
        row |= {"median_us": statistics.median(times), "min_us": min(times), "max_us": max(times)}
        row |= {"over_serial": round(statistics.median(times) / serial, 3)}
        found.append(row | {"host_us": round(host_microseconds(calls[name], PAUSE_CYCLES[op]))})
    return found


def _tell(rows: list[dict[str, Any]]) -> None:
    for row in rows:
        case = row["case"]
        print(
            f"{case['model']:12} M={case['M']:<6} {case['codec']:8} {row['op']:14} {row['impl']:14}"
            f"{row['median_us']:9.0f} us ({row['min_us']:.0f} to {row['max_us']:.0f}), "
            f"{row['over_serial']:.3f} of serial, host {row['host_us']:.0f} us, error {row['error']:.1e}",
            flush=True,
        )


if __name__ == "__main__":
    main()
