"""Which exchange is fastest between nodes? Transports for two tiers side by side.

    imbrex netlab run --nodes 2 --ranks-per-node 4 --inter 1gbit -- benchmarks/collectives.py

Tokens go out to their ranks and come back, without experts; the median over rounds of the slowest rank, all
transports in turn within a round. `dispatch` and `combine` are whole calls, planning and copies to the
experts' rows included, `exchange` is both, and `backward` is that of both, the weights' gradients included;
`move` and `move_back` are the rows alone, planned and written before. With
`sequential` the two halves of the way out are timed alone too, for the bound of Pipe-A2A (ScheMoE, Eq. 18).
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor

import imbrex
from imbrex.bench.results import describe_run, write_results
from imbrex.contracts import Crossing, Transport
from imbrex.cost import COSTS, Load, Network
from imbrex.launch.local import meet
from imbrex.launch.netlab import started_by
from imbrex.placement import contiguous
from imbrex.runtime.waits import leave
from imbrex.transport import AllToAll, Auto, Sequential
from imbrex.transport.collective import Collective
from imbrex.transport.nodes import Nodes

QUESTION = "Which exchange is fastest between nodes?"
NAMES = {"alltoall": ("copy-per-rank", "direct"), "hierarchical": ("hierarchical-dedup",)}
"""In the result file; a copy for each rank by one all-to-all has two."""
CHOICES = "copy-per-choice"
OPS = ("dispatch", "combine", "backward", "move", "move_back")
HALVES = ("move_inside", "move_across")


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """An exchange and what goes through it."""

    exchange: imbrex.Exchange
    x_TD: Tensor
    routing: imbrex.Routing


def main() -> None:
    args = parse()
    device = meet(args.store)
    group = dist.group.WORLD
    assert group is not None
    rows = []
    for top_k in map(int, args.top_k.split(",")):
        rows += measure(argparse.Namespace(**{**vars(args), "top_k": top_k}), group, device)
    if group.rank() == 0 and args.out:
        words = [word for word in sys.argv[1:] if word not in ("--out", args.out, "--store", args.store)]
        command = " ".join((started_by(), "benchmarks/collectives.py", *words))
        write_results(args.out, QUESTION, describe_run(command, gpus=group.size()), rows)
    leave()


def measure(args: argparse.Namespace, group: dist.ProcessGroup, device: torch.device) -> list[dict]:
    jobs = {name: make_job(args, name, group, device) for name in args.transports.split(",")}
    seconds: dict[str, list[tuple[float, ...]]] = {name: [] for name in jobs}
    for number in range(args.rounds + args.warm_up):
        for name, job in jobs.items():
            took = [*calls(job, check=number == 0), *moves(job)]
            told = torch.tensor([int(1e9 * s) for s in took])
            slowest = job.exchange.transport.exchange_counts(told).max(0).values
            if number >= args.warm_up:
                seconds[name].append(tuple(1e-9 * s for s in slowest.tolist()))
    crossing = {name: bytes_of(args, job) for name, job in jobs.items()}
    predicted = predict(args, group)
    return report(args, seconds, crossing, predicted) if group.rank() == 0 else []


def predict(args: argparse.Namespace, group: dist.ProcessGroup) -> dict[str, float]:
    """Seconds one way by transport, from a measurement of the network; fastest first."""
    auto = Auto(tokens=args.tokens)
    nodes = auto.nodes(group)
    if nodes is None:
        return {}
    network: Network = auto.network(Collective(group), group, nodes)
    row_bytes = args.width * getattr(torch, args.dtype).itemsize
    load = Load(tokens=args.tokens, row_bytes=row_bytes, top_k=args.top_k)
    if group.rank() == 0:
        sys.stdout.write(f"top-{args.top_k}; {auto.pick(group, nodes, load, None)}\n{network}\n")
    else:
        auto.pick(group, nodes, load, None)
    return {name: cost(network, load) for name, cost in COSTS.items()}


def make_job(args: argparse.Namespace, name: str, group: dist.ProcessGroup, device: torch.device) -> Job:
    x_TD = torch.randn(args.tokens, args.width, generator=torch.Generator().manual_seed(group.rank()))
    ids_TK = choices(args, group.rank())
    top_k, transport = args.top_k, name
    if name == CHOICES:
        x_TD = x_TD.repeat_interleave(args.top_k, 0)
        ids_TK, top_k, transport = ids_TK.reshape(-1, 1), 1, "alltoall"
    placement = contiguous(args.experts, group.size())
    exchange = imbrex.Exchange(placement, args.width, top_k, group=group, transport=transport)
    weights_TK = torch.full(ids_TK.shape, 1 / top_k, device=device)
    routing = imbrex.Routing(ids_TK=ids_TK.to(device), weights_TK=weights_TK)
    return Job(exchange=exchange, x_TD=x_TD.to(device, getattr(torch, args.dtype)), routing=routing)


def choices(args: argparse.Namespace, rank: int) -> Tensor:
    """Of a rank's tokens, the same wherever they are drawn."""
    drawn = torch.Generator().manual_seed(rank)
    return torch.rand(args.tokens, args.experts, generator=drawn).argsort(1)[:, : args.top_k].contiguous()


def calls(job: Job, *, check: bool) -> list[float]:
    """Seconds of a dispatch, of a combine, and of the backward of both."""
    exchange, x_TD = job.exchange, job.x_TD.detach().requires_grad_()
    weights_TK = job.routing.weights_TK.detach().requires_grad_()
    begin = together(exchange)
    there = exchange.dispatch(x_TD, imbrex.Routing(ids_TK=job.routing.ids_TK, weights_TK=weights_TK))
    middle = now(x_TD)
    y_TD = exchange.combine(there.rows_RD, there.handle)
    found = [middle - begin, now(x_TD) - middle]
    d_y_TD = torch.ones_like(y_TD)
    begin = together(exchange)
    y_TD.backward(d_y_TD)
    found.append(now(x_TD) - begin)
    if check:
        # The experts leave rows as they are and the weights add up to 1.
        assert x_TD.grad is not None
        near = 1e-4 if x_TD.dtype == torch.float32 else 0.1
        assert torch.allclose(y_TD, x_TD, atol=near), job
        assert torch.allclose(x_TD.grad, d_y_TD, atol=near), job
    return found


@torch.no_grad()
def moves(job: Job) -> list[float]:
    """Seconds of the rows' way out and of their way back alone; with `sequential` also of its halves."""
    exchange, x_TD, routing = job.exchange, job.x_TD, job.routing
    dispatcher = exchange.dispatcher
    (plan,) = dispatcher.agree([(x_TD, routing)])
    out = dispatcher.dispatch(plan, x_TD, routing.weights_TK)
    begin = together(exchange)
    received = finish(out)
    times = [now(x_TD) - begin]
    arrived = out.read(received)
    back = dispatcher.combine(arrived.rows_RD, arrived.weights_R, arrived.state, len(x_TD))
    begin = together(exchange)
    finish(back)
    times.append(now(x_TD) - begin)
    if isinstance(exchange.transport, Sequential):
        rows = received.new_zeros(len(plan.traffic.sent_tokens_N), received.shape[1])
        times += halves(job, rows, plan.traffic.splits_2W)
    return times


def finish(crossing: Crossing[Any]) -> Tensor:
    """The bytes that it moves."""
    pending = crossing.move()
    assert pending is not None
    return pending.finish()


def halves(job: Job, rows: Tensor, splits_2W: Tensor) -> list[float]:
    """Seconds of what stays inside the node and of what leaves it, each alone."""
    transport = job.exchange.transport
    assert isinstance(transport, Sequential)
    found, node = [], transport.rank // transport.nodes.size
    send, receive = splits_2W.tolist()
    for inside in (True, False):
        chosen = [rank // transport.nodes.size == node for rank in range(len(send))]
        some = [
            [n * (near == inside) for n, near in zip(side, chosen, strict=True)] for side in (send, receive)
        ]
        parts = zip(rows.split(send), chosen, strict=True)
        picked = torch.cat([rows[:0], *(part for part, near in parts if near == inside)])
        begin = together(job.exchange)
        AllToAll.scatter_rows(transport, "dispatch", picked, *some).finish()
        found.append(now(job.x_TD) - begin)
    return found


def together(exchange: imbrex.Exchange) -> float:
    exchange.transport.exchange_counts(torch.zeros(1, dtype=torch.int64))
    return time.perf_counter()


def now(x: Tensor) -> float:
    if x.is_cuda:
        torch.cuda.synchronize()
    return time.perf_counter()


@dataclass(frozen=True, kw_only=True, slots=True)
class Sent:
    """Mean bytes of rows one way: that a node sends inside and to other nodes, relayed rows included; and
    that a rank is to get, once each, with those that stay."""

    inside: float
    across: float
    wanted: float


def bytes_of(args: argparse.Namespace, job: Job) -> Sent:
    transport = cast("Transport", job.exchange.transport)
    (plan,) = job.exchange.dispatcher.agree([(job.x_TD, job.routing)])
    rows_W = transport.rows_sent(plan.traffic, back=False)
    world = len(rows_W)
    nodes = Nodes.of(world, int(os.environ["LOCAL_WORLD_SIZE"]))
    told_2 = transport.exchange_counts(nodes.by_tier(rows_W, dist.get_rank())).double().sum(0)
    width = args.width * getattr(torch, args.dtype).itemsize
    inside, across = (told_2 * width / nodes.num_nodes).tolist()
    targets = [choices(args, rank) // (args.experts // world) for rank in range(world)]
    wanted = sum(int(torch.zeros(args.tokens, world).scatter_(1, t, 1.0).sum()) for t in targets)
    return Sent(inside=inside, across=across, wanted=wanted * width / world)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=QUESTION)
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--experts", type=int, default=64)
    parser.add_argument("--top-k", default="8", help="one or several, as in 8,2")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--transports", default=f"{CHOICES},alltoall,hierarchical")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--warm-up", type=int, default=2)
    parser.add_argument("--network", default="netlab", help="its name in the result file")
    parser.add_argument("--rates", default="1gbit between nodes", help="said in the result file")
    parser.add_argument("--store", default=None, help="a file where ranks meet, instead of MASTER_ADDR")
    parser.add_argument("--out", default=None, help="a results file")
    return parser.parse_args()


def report(
    args: argparse.Namespace,
    seconds: dict[str, list[tuple[float, ...]]],
    crossing: dict[str, Sent],
    predicted: dict[str, float],
) -> list[dict]:
    world, size = dist.get_world_size(), int(os.environ["LOCAL_WORLD_SIZE"])
    case = {"nodes": world // size, "ranks_per_node": size, "T": args.tokens, "D": args.width}
    case |= {"E": args.experts, "K": args.top_k, "network": args.network, "rates": args.rates}
    case |= {"dtype": args.dtype, "bytes": args.tokens * args.width * getattr(torch, args.dtype).itemsize}
    rows = []
    for name, rounds in seconds.items():
        sent = crossing[name]
        ops = OPS + HALVES[: len(rounds[0]) - len(OPS)]
        medians = dict(zip(ops, map(statistics.median, zip(*rounds, strict=True)), strict=True))
        said = ", ".join(f"{op} {1e3 * s:7.1f}" for op, s in medians.items())
        rates = {
            f"{op}_{what}_gbps": 1e-9 * amount / medians[op]
            for op in ("move", "move_back")
            for what, amount in (("link", sent.across), ("algorithm", sent.wanted))
        }
        said += f", predicted {1e3 * predicted[name]:.1f} ms" if name in predicted else " ms"
        said += f"; a node sends {1e-6 * sent.inside:.1f} MB inside, {1e-6 * sent.across:.1f} out"
        sys.stdout.write(f"{name:15} {said}; {', '.join(f'{k} {v:.3f}' for k, v in rates.items())}\n")
        for op in (*ops, "exchange"):
            times = [1e6 * (sum(r[:2]) if op == "exchange" else r[ops.index(op)]) for r in rounds]
            measured = {"median_us": statistics.median(times), "min_us": min(times), "max_us": max(times)}
            more = {}
            if op in ("move", "move_back"):
                more = {what: rates[f"{op}_{what}"] for what in ("link_gbps", "algorithm_gbps")}
                more |= {"inside_bytes": sent.inside, "across_bytes": sent.across}
                more |= {"predicted_us": 1e6 * predicted[name]} if name in predicted else {}
            for impl in NAMES.get(name, (name,)):
                rows.append({"op": op, "impl": impl, "case": case, **measured, "n": len(times), **more})
    return rows


if __name__ == "__main__":
    main()
