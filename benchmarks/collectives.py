"""Which exchange is fastest between nodes? Transports for two tiers side by side.

    imbrex netlab run --nodes 2 --ranks-per-node 4 --inter 1gbit -- benchmarks/collectives.py

Tokens go out to their ranks and come back, without experts; the median over rounds of the slowest rank, all
transports in turn within a round.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time

import torch
import torch.distributed as dist

import imbrex
from imbrex.cli.results import describe_run, write_results
from imbrex.crossings import Crossings
from imbrex.placement import contiguous

QUESTION = "Which exchange is fastest between nodes?"
NAMES = {"alltoall": "copy-per-rank", "hierarchical": "hierarchical-dedup"}


def main() -> None:
    args = parse()
    dist.init_process_group("gloo")
    group = dist.group.WORLD
    assert group is not None
    placement = contiguous(args.experts, group.size())
    exchanges = {
        name: imbrex.Exchange(placement, args.width, args.top_k, group=group, transport=name)
        for name in args.transports.split(",")
    }
    drawn = torch.Generator().manual_seed(group.rank())
    x_TD = torch.randn(args.tokens, args.width, generator=drawn)
    ids_TK = torch.rand(args.tokens, args.experts, generator=drawn).argsort(1)[:, : args.top_k].contiguous()
    weights_TK = torch.full(ids_TK.shape, 1 / args.top_k)
    routing = imbrex.Routing(ids_TK=ids_TK, weights_TK=weights_TK)
    seconds: dict[str, list[tuple[float, ...]]] = {name: [] for name in exchanges}
    outputs = {}
    with torch.no_grad():
        for number in range(args.rounds + 1):
            for name, exchange in exchanges.items():
                begin = _together(exchange)
                there = exchange.dispatch(x_TD, routing)
                middle = time.perf_counter()
                outputs[name] = exchange.combine(there.rows_RD, there.handle)
                took = middle - begin, time.perf_counter() - middle, move_only(exchange, x_TD, routing)
                slowest = exchange.transport.exchange_counts(torch.tensor([int(1e9 * s) for s in took]))
                if number:
                    seconds[name].append(tuple(1e-9 * s for s in slowest.max(0).values.tolist()))
    for name, y_TD in outputs.items():
        assert torch.allclose(y_TD, x_TD, atol=1e-4), name
    if group.rank() == 0:
        report(args, seconds, group.size())


def move_only(exchange: imbrex.Exchange, x_TD: torch.Tensor, routing: imbrex.Routing) -> float:
    """Seconds of the rows' way out alone, planned and written before."""
    crossings = exchange._crossings
    assert isinstance(crossings, Crossings)
    made = crossings.make_plans([(x_TD, routing)])[0]
    encoded = crossings.write_dispatch(made, x_TD, routing.weights_TK)
    begin = _together(exchange)
    crossings.begin_out(encoded, made.traffic).finish()
    return time.perf_counter() - begin


def _together(exchange: imbrex.Exchange) -> float:
    exchange.transport.exchange_counts(torch.zeros(1, dtype=torch.int64))
    return time.perf_counter()


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=QUESTION)
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--experts", type=int, default=64)
    parser.add_argument("--top-k", type=int, default=8)
    parser.add_argument("--transports", default="alltoall,2dh,pipe,hierarchical")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--network", default="netlab 1gbit")
    parser.add_argument("--out", default=None, help="a results file")
    return parser.parse_args()


def report(args: argparse.Namespace, seconds: dict[str, list[tuple[float, ...]]], world: int) -> None:
    case = {"W": world, "T": args.tokens, "D": args.width, "E": args.experts, "K": args.top_k}
    case |= {"bytes": args.tokens * args.width * 4, "network": args.network}
    rows = []
    for name, rounds in seconds.items():
        out, back, move = (1e3 * statistics.median(part) for part in zip(*rounds, strict=True))
        sys.stdout.write(f"{name:13} out {out:7.1f} ms, back {back:7.1f} ms; the move out {move:7.1f} ms\n")
        for op, part in (("dispatch", 0), ("combine", 1), ("move", 2), ("exchange", None)):
            times = [1e6 * (sum(r[:2]) if part is None else r[part]) for r in rounds]
            measured = {"median_us": statistics.median(times), "min_us": min(times), "max_us": max(times)}
            rows.append({"op": op, "impl": NAMES.get(name, name), "case": case, **measured, "n": len(times)})
    if args.out:
        words = [word for word in sys.argv[1:] if word not in ("--out", args.out)]
        command = "imbrex netlab run ... -- benchmarks/collectives.py " + " ".join(words)
        write_results(args.out, QUESTION, describe_run(command), rows)


if __name__ == "__main__":
    main()
