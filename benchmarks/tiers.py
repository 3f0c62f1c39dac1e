"""What hides behind the network? Two tiers in chunks and in one piece, beside the network alone.

    imbrex netlab run --nodes 2 --ranks-per-node 2 --inter 1gbit -- benchmarks/tiers.py

Forward is dispatch, experts and combine; step is that and its backward, weights' gradients included.
`network` is an all-to-all of the rows that must cross, each to a node once, out and back, in one piece, with
nothing else: twice for the forward, four times for a step. `network-c` is the same rows in the messages of c
chunks, all out and then all back, as `tiered` sends them. Medians over rounds of the slowest rank, all in
turn within a round.

`--timeline FILE` writes when the kernels of one step each run on the first rank's GPU, by stream. `--wide`
has NCCL open more sockets, for the network alone as for all others. `--seconds` ends the rounds where they
would take longer.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import imbrex
from imbrex.bench.results import describe_run, write_results
from imbrex.experts.experts import Experts
from imbrex.launch.local import meet
from imbrex.launch.netlab import started_by
from imbrex.overlap.pipelined import Pipelined, split_evenly
from imbrex.placement import contiguous
from imbrex.runtime.waits import leave
from imbrex.transport import TRANSPORTS, TWO_TIERS, sockets
from imbrex.transport.tiers import ACROSS, Tiers

QUESTION = "How much of two tiers hides behind the network?"
OPS = ("forward", "step")


def main() -> None:
    args = parse()
    why_not_wide = sockets.widen() if args.wide else None
    if why_not_wide is not None:
        sys.stdout.write(f"sockets as they are: {why_not_wide}\n")
    device = meet(args.store)
    group = dist.group.WORLD
    assert group is not None
    works = {**networks(args, group, device), **layers(args, group, device)}
    seconds: dict[str, list[list[float]]] = {name: [] for name in works}
    began, longest = time.perf_counter(), 0.0
    for number in range(args.rounds + args.warm_up):
        if number > args.warm_up and longest > args.seconds:
            break
        for name, work in works.items():
            took = [together(work[op], group, device) for op in OPS]
            all_took = torch.tensor([*took, time.perf_counter() - began], device=device)
            dist.all_reduce(all_took, dist.ReduceOp.MAX)
            *took, longest = all_took.tolist()
            if number >= args.warm_up:
                seconds[name].append(took)
    if args.timeline:
        lines = [line for name, work in works.items() for line in timeline(name, work["step"], device)]
        Path(args.timeline).write_text("\n".join(lines)) if group.rank() == 0 else None
    if group.rank() == 0:
        rows = report(args, group.size(), crossing_rows(args, group.rank(), group.size()), seconds)
        if args.out:
            files = "--out", args.out, "--store", args.store, "--timeline", args.timeline
            words = [word for word in sys.argv[1:] if word not in files]
            command = " ".join((started_by(), "benchmarks/tiers.py", *words))
            write_results(args.out, QUESTION, describe_run(command, gpus=group.size()), rows)
    leave()


def together(work: Callable[[], Any], group: dist.ProcessGroup, device: torch.device) -> float:
    """Seconds of a work that all ranks begin at once."""
    dist.barrier(group)
    wait_for(device)
    begin = time.perf_counter()
    work()
    wait_for(device)
    return time.perf_counter() - begin


def wait_for(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def choices(args: argparse.Namespace, rank: int) -> Tensor:
    """Of a rank's tokens, the same wherever they are drawn."""
    drawn = torch.Generator().manual_seed(rank)
    return torch.rand(args.tokens, args.experts, generator=drawn).topk(args.top_k).indices


def crossing_rows(args: argparse.Namespace, rank: int, world: int) -> list[int]:
    """This rank's tokens that every other node wants; none for its own."""
    node_TK = choices(args, rank) // (args.experts // world) // args.ranks_per_node
    nodes = world // args.ranks_per_node
    return [int((node_TK == n).any(1).sum()) * (n != rank // args.ranks_per_node) for n in range(nodes)]


def networks(
    args: argparse.Namespace, group: dist.ProcessGroup, device: torch.device
) -> dict[str, dict[str, Callable[[], Any]]]:
    """Rows between counterparts with nothing else, by name: by one all-to-all over all ranks each way, and as
    messages of several chunks."""
    rank, world, size = group.rank(), group.size(), args.ranks_per_node
    nodes, place = range(world // size), rank % size
    send = crossing_rows(args, rank, world)
    receive = [crossing_rows(args, n * size + place, world)[rank // size] for n in nodes]
    width, dtype = args.width, getattr(torch, args.dtype)
    here, there = (torch.zeros(sum(sizes), width, dtype=dtype, device=device) for sizes in (send, receive))
    by_rank = [[sizes[r // size] * (r % size == place) for r in range(world)] for sizes in (send, receive)]
    rail = Tiers(group, ranks_per_node=size).rail

    def whole() -> None:
        dist.all_to_all_single(there, here, by_rank[1], by_rank[0], group)
        dist.all_to_all_single(here, there, by_rank[0], by_rank[1], group)

    def in_pieces(chunks: int) -> None:
        flights = []
        for phase, rows, out, back in (("dispatch", here, send, receive), ("combine", there, receive, send)):
            for i in range(chunks):
                go, come = ([split_evenly(n, chunks, 0, 1)[i] for n in sizes] for sizes in (out, back))
                flights.append(rail.begin(ACROSS, phase, rows, come).send(rows[: sum(go)], go))
        for flight in flights:
            flight.finish()

    works: dict[str, Callable[[], Any]] = {"network": whole}
    works |= {f"network-{c}": partial(in_pieces, c) for c in numbers(args.degrees)}
    return {name: {"forward": work, "step": partial(twice, work)} for name, work in works.items()}


def twice(work: Callable[[], Any]) -> None:
    work()
    work()


def numbers(text: str) -> list[int]:
    return [int(word) for word in text.split(",")]


def layers(
    args: argparse.Namespace, group: dist.ProcessGroup, device: torch.device
) -> dict[str, dict[str, Callable[[], Any]]]:
    """The same experts behind every transport and number of chunks, by name."""
    placement, dtype = contiguous(args.experts, group.size()), getattr(torch, args.dtype)
    kind: dict[str, Any] = {"device": "meta", "dtype": dtype, "implementation": args.implementation}
    experts = Experts(placement.local(group.rank()), args.width, args.inner, **kind).to_empty(device=device)
    torch.manual_seed(group.rank())
    for parameter in experts.parameters():
        torch.nn.init.uniform_(parameter, -0.02, 0.02)
    x_TD = torch.randn(args.tokens, args.width, device=device).to(dtype)
    ids_TK = choices(args, group.rank()).to(device)
    weights_TK = torch.full(ids_TK.shape, 1 / args.top_k, device=device)
    inputs = x_TD, imbrex.Routing(ids_TK=ids_TK, weights_TK=weights_TK), experts
    works = {}
    for name in args.transports.split(","):
        more = {"ranks_per_node": args.ranks_per_node} if name in TWO_TIERS else {}
        more |= {"not_nvlink": None} if name == "tiered" and dtype == torch.bfloat16 else {}
        made = TRANSPORTS[name](group, **more)
        exchange = imbrex.Exchange(
            placement, args.width, args.top_k, group=group, transport=made, dtype=dtype
        )
        for degree in numbers(args.degrees):
            works[f"{name}-{degree}"] = calls(exchange, Pipelined("optsche", degree), *inputs)
    check(works)
    return works


def check(works: dict[str, dict[str, Callable[[], Any]]]) -> None:
    """All the same numbers; those of `tiered` in any number of chunks nearly to the bit."""
    first = next(iter(works.values()))["forward"]()
    scale = first.abs().float().max()
    for name, work in works.items():
        error = (work["forward"]().float() - first.float()).abs().max() / scale
        assert float(error) < 0.02, f"{name} is {float(error)} away"


NOTABLE_MS, GAP_MS = 0.02, 0.05
"""Kernels this close to each other are one line of a timeline; lines shorter than the first are left out."""


def timeline(name: str, work: Callable[[], Any], device: torch.device) -> list[str]:
    """Lines of begin, end and stream, in ms since the call, of what a GPU did; NCCL's kernels one by one."""
    if device.type != "cuda":
        return []
    with torch.profiler.profile(activities=list(torch.profiler.supported_activities())) as profile:
        dist.barrier()
        wait_for(device)
        with torch.profiler.record_function("the call"):
            work()
        torch.cuda.synchronize(device)
    results: Any = profile.profiler and profile.profiler.kineto_results
    events = list(results.events())
    start = next(event.start_ns() for event in events if event.name() == "the call")
    spans: list[list[Any]] = []
    for event in sorted(events, key=lambda event: event.start_ns()):
        if "CUDA" not in str(event.device_type()) or event.name().startswith(("the call", "nccl:")):
            continue
        begin, end = (1e-6 * (ns - start) for ns in (event.start_ns(), event.end_ns()))
        stream, network = event.device_resource_id(), "nccl" in event.name()
        last = next((span for span in reversed(spans) if span[0] == stream), None)
        if last is not None and not (network or last[1]) and begin - last[3] < GAP_MS:
            last[3], last[4] = end, max(last[4], (end - begin, event.name()))
        else:
            spans.append([stream, network, begin, end, (end - begin, event.name())])
    return [name] + [
        f"  {begin:8.2f} to {end:8.2f}  stream {stream:3}  {longest[1][:60]} {longest[0]:.2f}"
        for stream, _, begin, end, longest in spans
        if end - begin > NOTABLE_MS
    ]


def calls(
    exchange: imbrex.Exchange, schedule: Pipelined, x_TD: Tensor, routing: imbrex.Routing, experts: Experts
) -> dict[str, Callable[[], Any]]:
    def forward() -> Tensor:
        with torch.no_grad():
            return schedule.run(x_TD, routing, exchange, experts, None).y_TD

    def step() -> None:
        given = x_TD.detach().requires_grad_()
        experts.zero_grad(set_to_none=True)
        schedule.run(given, routing, exchange, experts, None).y_TD.backward(torch.ones_like(given))

    return {"forward": forward, "step": step}


def report(
    args: argparse.Namespace, world: int, rows_N: list[int], seconds: dict[str, list[list[float]]]
) -> list[dict]:
    size, row_bytes = args.ranks_per_node, args.width * getattr(torch, args.dtype).itemsize
    case = {"nodes": world // size, "ranks_per_node": size, "T": args.tokens, "D": args.width}
    case |= {"F": args.inner, "E": args.experts, "K": args.top_k, "dtype": args.dtype, "rates": args.rates}
    crossing = sum(rows_N) * row_bytes
    sys.stdout.write(f"{case}\n{1e-6 * crossing:.1f} MB a rank cross each way\n")
    alone = [statistics.median(of) for of in zip(*seconds["network"], strict=True)]
    rows = []
    for name, rounds in seconds.items():
        for op, ways, base, times in zip(OPS, (2, 4), alone, zip(*rounds, strict=True), strict=True):
            median = statistics.median(times)
            rate = 1e-9 * ways * crossing / median
            ratio = median / base
            sys.stdout.write(
                f"{name:16} {op:8} {1e3 * median:8.2f} ms ({1e3 * min(times):.2f} to {1e3 * max(times):.2f})"
                f", {rate:6.3f} GB/s, {ratio:.3f} of the network alone\n"
            )
            micro = {key: 1e6 * of(times) for key, of in (("min_us", min), ("max_us", max))}
            more = {"median_us": 1e6 * median, "gbps": rate, "of_network": ratio, "n": len(times)}
            rows.append({"op": op, "impl": name, "case": case | {"bytes": crossing}, **micro, **more})
    return rows


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=QUESTION)
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--inner", type=int, default=64)
    parser.add_argument("--experts", type=int, default=64)
    parser.add_argument("--top-k", type=int, default=8)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--ranks-per-node", type=int, default=2)
    parser.add_argument("--transports", default="tiered,hierarchical,alltoall")
    parser.add_argument("--degrees", default="1,2,4,8")
    parser.add_argument("--implementation", default="auto", help="of the experts")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--warm-up", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=math.inf, help="after so many no round begins")
    parser.add_argument("--wide", action="store_true", help="more of NCCL's sockets, unless they are set")
    parser.add_argument("--rates", default="1gbit between nodes", help="said in the result file")
    parser.add_argument("--store", default=None, help="a file where ranks meet, instead of MASTER_ADDR")
    parser.add_argument("--timeline", default=None, help="a file for when kernels ran")
    parser.add_argument("--out", default=None, help="a results file")
    return parser.parse_args()


if __name__ == "__main__":
    main()
