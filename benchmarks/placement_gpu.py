"""What does balance cost and bring on GPUs? One process a GPU, NVLink kernels and peer copies.

    python benchmarks/placement_gpu.py --ranks 4 --trace deepseek_v2_lite_routing.npz

Three questions: how long the balanced split takes, what the online balancer costs an iteration with nothing
to do and while two experts an iteration move, and whether layers get as much faster on recorded routing as
the balance says. Writes benchmarks/results/placement_gpu.json.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

import imbrex.balancer.online as online
from imbrex import MoEConfig, MoELayer
from imbrex.balancer import OnlineBalancer, Pace
from imbrex.balancer.migration import Change
from imbrex.bench.exchange.clock import run_ranks
from imbrex.bench.layer.phases import DrawnHere
from imbrex.bench.results import describe_run, write_results
from imbrex.contracts import Placement, Routing
from imbrex.kernels.routing.split import SplitKernel
from imbrex.placement import Target, contiguous, from_slots, history_of_ids, plan_history, plan_layers
from imbrex.placement.flow import spread_choices

V3 = MoEConfig(hidden_size=7168, intermediate_size=2048, num_experts=256, top_k=8)
SKEWED = {
    "DeepSeek-V2-Lite": MoEConfig(hidden_size=2048, intermediate_size=1408, num_experts=64, top_k=6),
    "DeepSeek-V3's width": MoEConfig(hidden_size=7168, intermediate_size=2048, num_experts=64, top_k=6),
}
LAYERS, TURNS, LEAD, ITERATIONS = 8, 3, 6, 24
MOST_MOVES = 12
"""Experts of one migration, which takes three or four iterations; as many slots are replicas."""
ASKED = 2.25
"""Experts asked for an iteration: what is under way at the end of a block is not counted."""
QUESTION = "What does balance cost and bring on GPUs?"


def microseconds(call: Callable[[], Any], repeats: int = 20) -> list[float]:
    """GPU time of each of so many calls, behind a pause that hides the host."""
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(repeats + 1)]
    call()
    torch.cuda._sleep(30_000_000)
    marks[0].record()
    for mark in marks[1:]:
        call()
        mark.record()
    torch.cuda.synchronize()
    return [a.elapsed_time(b) * 1e3 for a, b in pairwise(marks)]


def summary(times: list[float]) -> dict[str, float]:
    return {
        "median_us": round(statistics.median(times), 1),
        "min_us": round(min(times), 1),
        "max_us": round(max(times), 1),
        "n": len(times),
    }


def split_times() -> list[dict[str, Any]]:
    """The split of one batch: kernel alone, by way of the GPU from counts on the host, and on the host."""
    rows = []
    for ranks, experts, slots in ((4, 64, 68), (4, 256, 264), (4, 256, 288), (8, 256, 288), (16, 256, 288)):
        draw = np.random.default_rng(0)
        popularity = draw.gamma(0.6, size=experts)
        placement = plan_layers([popularity * 1000], ranks, slots)[0]
        shares = popularity * draw.gamma(5, size=experts)
        counts = draw.multinomial(4096 * 8, shares / shares.sum(), size=ranks)
        host = torch.from_numpy(counts)
        device, kernel = host.cuda(), SplitKernel(placement, torch.device("cuda"))
        assert np.array_equal(kernel(device).cpu().numpy(), spread_choices(counts, placement))
        around, alone = [], []
        for _ in range(20):
            begin = time.perf_counter()
            kernel(host.cuda()).cpu()
            around.append((time.perf_counter() - begin) * 1e6)
            begin = time.perf_counter()
            spread_choices(counts, placement)
            alone.append((time.perf_counter() - begin) * 1e6)
        case = {"W": ranks, "E": experts, "S": slots, "tokens_a_rank": 4096, "K": 8}
        for impl, times in (
            ("kernel", microseconds(lambda k=kernel, d=device: k(d))),
            ("host, by way of the kernel", around),
            ("host", alone),
        ):
            rows.append({"op": "split", "impl": impl, "case": case, **summary(times)})
    return rows


def make_layer(
    config: MoEConfig,
    placement: Placement,
    rank: int,
    split: str,
    balancer: OnlineBalancer | None,
    layer: int,
) -> MoELayer:
    kind: dict[str, Any] = {"device": torch.device("cuda", rank), "dtype": torch.bfloat16}
    torch.manual_seed(layer)
    experts = DrawnHere(
        placement.local(rank), config.hidden_size, config.intermediate_size, seed=layer, **kind
    )
    return MoELayer(
        config,
        dist.group.WORLD,
        transport="nvlink",
        experts=experts,
        placement=placement,
        split=split,
        balancer=balancer,
        layer=layer,
        **kind,
    ).eval()


class TwoExperts:
    """Plans that fetch two experts for every iteration since the last: ranks in turn, each from the next one,
    into their last slots. Plans are made in another thread than iterations are counted in."""

    def __init__(self, balancer: OnlineBalancer) -> None:
        self.turn, self.iterations, self.planned = 0, 0.0, 0.0
        opened = balancer._open

        def open_round(training: bool, waits: bool) -> None:
            self.iterations = balancer.tally.values["iterations"]
            opened(training, waits)

        balancer._open = open_round

    def __call__(self, asked, others) -> list[Change]:
        one = asked[0]
        old, ranks = one.placement, one.placement.num_ranks
        held, spares = [list(old.local(rank)) for rank in range(ranks)], MOST_MOVES // ranks
        moves = int(min(round(ASKED * (self.iterations - self.planned)), spares * ranks))
        self.planned = self.iterations
        for move in range(moves):
            mine, slot = held[(self.turn + move) % ranks], -1 - move // ranks
            theirs = held[(self.turn + move + 1) % ranks][:-spares]
            mine[slot] = next(e for e in np.roll(theirs, -self.turn).tolist() if e not in mine)
        self.turn += 1
        new = from_slots(held, old.num_experts)
        return [Change(layer=one.layer, old=old, new=new, tensors=one.tensors)]


def iterate(layers: list[MoELayer], x_TD: Tensor, balancer, count: int) -> tuple[list[float], int]:
    """Microseconds of so many iterations in a row after a lead-in, and the experts that this rank fetched and
    that took effect in them."""
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(LEAD + count + 1)]
    fetched = 0
    dist.barrier()
    for number, mark in enumerate(marks):
        mark.record()
        # As in a server: the host is at most two iterations ahead.
        marks[max(number - 1, 0)].synchronize()
        if balancer is not None and number in (LEAD, LEAD + count):
            fetched = int(balancer.tally.values["fetched_experts"]) - fetched
        with torch.no_grad():
            for layer in layers:
                layer(x_TD)
        if balancer is not None:
            balancer.step()
    torch.cuda.synchronize()
    return [a.elapsed_time(b) * 1e3 for a, b in pairwise(marks[LEAD:])], fetched


def iteration_times(
    rank: int, ranks: int, tokens: int, layers: list[MoELayer], balancer
) -> list[dict[str, Any]]:
    """Iterations of all layers in turns: balancer off, on with nothing to do, on and moving two experts."""
    x_TD = torch.randn(tokens, V3.hidden_size, device="cuda", dtype=torch.bfloat16)
    found: dict[str, list[float]] = {name: [] for name in ("off", "nothing_to_do", "two_experts")}
    done = dict.fromkeys(found, 0)
    plan, two = online.plan, TwoExperts(balancer)
    for turn in range(TURNS + 1):
        for name, times in found.items():
            for seat in balancer.seats:
                seat.count(on=name != "off")
            online.plan = two if name == "two_experts" else plan
            two.planned = balancer.tally.values["iterations"]
            running = balancer if name != "off" else None
            taken, fetched = iterate(layers, x_TD, running, ITERATIONS if turn else 1)
            balancer.settle()
            if turn:
                times += taken
                done[name] += fetched
    online.plan = plan
    del balancer._open
    slots = sum(len(layers[0].placement.local(r)) for r in range(ranks))
    case = {
        "L": len(layers),
        "T": tokens,
        "D": 7168,
        "F": 2048,
        "E": 256,
        "K": 8,
        "W": ranks,
        "S": slots,
    }
    return [
        {"op": "iteration", "impl": name, "case": case, "fetched": done[name], "times": times}
        for name, times in found.items()
    ]


class Recorded(nn.Module):
    """A router that says what was recorded."""

    def __init__(self, gate: nn.Module, ids_TK: Tensor) -> None:
        super().__init__()
        self.losses, self.is_collective, self.ids_TK = gate.losses, False, ids_TK

    def forward(self, *_: Any, **__: Any) -> Routing:
        weights = torch.full(self.ids_TK.shape, 1 / self.ids_TK.shape[1], device="cuda")
        return Routing(ids_TK=self.ids_TK, weights_TK=weights, losses={})


def skewed_times(rank: int, ranks: int, trace: Path, tokens: int) -> list[dict[str, Any]]:
    """A layer on recorded routing, experts in order against a plan from the first half with the split."""
    recorded, rows = np.load(trace), []
    for model, config in SKEWED.items():
        before = make_layer(config, contiguous(64, ranks), rank, "even", None, 100)
        x_TD = torch.randn(tokens, config.hidden_size, device="cuda", dtype=torch.bfloat16)
        for task in ("law", "summary"):
            ids_LTK = recorded[f"{task}_ids"].astype(np.int64)
            for number in range(0, len(ids_LTK), max(1, len(ids_LTK) // 4)):
                ids, half = ids_LTK[number], ids_LTK.shape[1] // 2
                history = history_of_ids(ids[None, :half], 64, 64)
                plan = plan_history(history, Target(num_ranks=ranks, slots=68))[0]
                after = make_layer(config, plan, rank, "balanced", None, 101)
                chosen = np.resize(np.arange(half, len(ids)), tokens * ranks)[rank::ranks]
                routed = torch.from_numpy(ids[chosen]).cuda()
                case = {"model": model, "task": task, "layer": number, "T": tokens, "W": ranks}
                rows.append(compare(case, before, after, x_TD, routed))
                after.close()
                del after
        before.close()
    return rows


def compare(case: dict, before: MoELayer, after: MoELayer, x_TD: Tensor, ids_TK: Tensor) -> dict[str, Any]:
    row: dict[str, Any] = {"op": "skewed", "case": case}
    for name, layer in (("in_order", before), ("planned", after)):
        setattr(layer, "gate", Recorded(layer.gate, ids_TK))  # noqa: B010 (not the type declared)
        with torch.no_grad():
            dispatched = layer.exchange.dispatch(x_TD, layer.gate())
            rows = int(dispatched.counts_e.sum())
            row[f"{name}_rows"] = rows
            row[f"{name}_experts"] = microseconds(lambda run=layer.experts, given=dispatched: run(given), 8)
            dist.barrier()
            row[f"{name}_times"] = microseconds(lambda run=layer: run(x_TD), 20)
    return row


def serve(rank: int, ranks: int, num_layers: int, trace: Path | None) -> list[dict[str, Any]]:
    rows = split_times() if rank == 0 else []
    dist.barrier()
    if ranks > 1:
        if trace is not None:
            rows += skewed_times(rank, ranks, trace, 4096)
        balancer = OnlineBalancer(Pace(threshold=1e9, max_moves=MOST_MOVES))
        placement = with_replicas(ranks)
        layers = [make_layer(V3, placement, rank, "balanced", balancer, n) for n in range(num_layers)]
        for tokens in (4096, 128):
            rows += iteration_times(rank, ranks, tokens, layers, balancer)
        assert balancer.mover is not None
        for row in rows:
            if row["op"] == "iteration":
                row["moved_by"] = balancer.mover.name
        balancer.close()
    told: list[Any] = [None] * ranks
    dist.all_gather_object(told, rows)
    return over_ranks(told)


def with_replicas(ranks: int) -> Placement:
    """Experts in order, and behind them the first ones of the next rank: no slot is empty, so that layers
    have as much to do before a migration as after."""
    home, spares = contiguous(V3.num_experts, ranks), MOST_MOVES // ranks
    return from_slots(
        [[*home.local(r), *home.local((r + 1) % ranks)[:spares]] for r in range(ranks)], V3.num_experts
    )


def over_ranks(rows_W: list[list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """Times are the slowest rank's, call by call."""
    rows = [row for row in rows_W[0] if row["op"] == "split"]
    by_rank = [[row for row in of_rank if row["op"] != "split"] for of_rank in rows_W]
    for same in zip(*by_rank, strict=True):
        row = dict(same[0])
        if row["op"] == "iteration":
            times = [max(call) for call in zip(*(one["times"] for one in same), strict=True)]
            del row["times"]
            fetched = sum(one["fetched"] for one in same) / (TURNS * ITERATIONS)
            # The mean has the iterations in which a migration ends, which a median may leave out.
            row |= summary(times) | {"mean_us": round(statistics.fmean(times), 1)}
            row |= {"fetched_an_iteration": round(fetched, 2)}
            del row["fetched"]
            rows.append(row)
            continue
        rows += skewed_rows(same)
    return rows


def skewed_rows(same) -> list[dict[str, Any]]:
    """Two rows: in order, and planned with what the balance predicts: the experts of the fullest rank take as
    long as rows say, all else stays."""
    case, found, imbalance, layer_us, experts_us = same[0]["case"], [], {}, {}, {}
    for name in ("in_order", "planned"):
        rows_W = [one[f"{name}_rows"] for one in same]
        times = [max(call) for call in zip(*(one[f"{name}_times"] for one in same), strict=True)]
        imbalance[name] = max(rows_W) * len(rows_W) / sum(rows_W)
        layer_us[name] = statistics.median(times)
        experts_us[name] = max(statistics.median(one[f"{name}_experts"]) for one in same)
        found.append(
            {"op": "skewed", "impl": name, "case": case, "imbalance": round(imbalance[name] - 1, 4)}
            | summary(times)
            | {"experts_us": round(experts_us[name], 1)}
        )
    mean_us = experts_us["in_order"] / imbalance["in_order"]
    predicted = layer_us["in_order"] - mean_us * (imbalance["in_order"] - imbalance["planned"])
    found[1] |= {
        "predicted_us": round(predicted, 1),
        "measured_over_predicted": round(layer_us["planned"] / predicted, 4),
    }
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--ranks", type=int, default=torch.cuda.device_count())
    parser.add_argument("--layers", type=int, default=LAYERS)
    parser.add_argument("--trace", type=Path, help="npz with {task}_ids [layers, tokens, choices]")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results/placement_gpu.json")
    args = parser.parse_args()
    rows = run_ranks(serve, args.ranks, args.layers, args.trace)
    trace = f" --trace {args.trace.name}" if args.trace else ""
    command = f"python benchmarks/placement_gpu.py --ranks {args.ranks}{trace}"
    write_results(args.out, QUESTION, describe_run(command), rows)
    for row in rows:
        print(row)


if __name__ == "__main__":
    main()
