"""What does the online balancer cost an iteration, with nothing to do and while weights move? Gloo ranks.

    python benchmarks/placement_online.py --ranks 2

Models with and without a balancer run in turns in the same processes. Adds to `results/placement.json`.
"""

from __future__ import annotations

import argparse
import multiprocessing as mp
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from imbrex import MoEConfig, MoELayer
from imbrex.balancer import OnlineBalancer, Pace
from imbrex.bench.results import describe_run, write_results
from imbrex.placement import plan_layers
from imbrex.runtime.waits import leave

LAYERS, TOKENS, ROUNDS = 8, 256, 120
CONFIG = MoEConfig(hidden_size=256, intermediate_size=256, num_experts=16, top_k=4)
PACES = {
    "off": None,
    "nothing_to_do": Pace(layer_updates_per_iter=2, threshold=100.0),
    "moving": Pace(layer_updates_per_iter=2, threshold=0.0, window=2, max_moves=2, proposals=200, sure=0),
}


def serve(rank: int, ranks: int, store: str, pipe: Any) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=ranks)
    placement = plan_layers([[1.0] * CONFIG.num_experts], ranks, CONFIG.num_experts + ranks)[0]
    models = {}
    for name, pace in PACES.items():
        balancer = None if pace is None else OnlineBalancer(pace)
        made = [
            MoELayer(
                CONFIG, dist.group.WORLD, placement=placement, split="balanced", balancer=balancer, layer=n
            )
            for n in range(LAYERS)
        ]
        models[name] = [layer.eval() for layer in made], balancer
    times: dict[str, list[float]] = {name: [] for name in PACES}
    for iteration in range(ROUNDS + 5):
        x_TD = torch.randn(
            TOKENS, CONFIG.hidden_size, generator=torch.Generator().manual_seed(iteration * 64 + rank)
        )
        x_TD += torch.randn(CONFIG.hidden_size, generator=torch.Generator().manual_seed(iteration // 4))
        for name, (layers, balancer) in models.items():
            dist.barrier()
            begin = time.perf_counter()
            with torch.no_grad():
                for layer in layers:
                    layer(x_TD)
            if balancer is not None:
                balancer.step()
            times[name].append(time.perf_counter() - begin)
    tallies = {name: dict(b.tally.values) for name, (_, b) in models.items() if b is not None}
    pipe.send((times, tallies))
    dist.barrier()
    leave()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results/placement.json")
    args = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    context, pipes, processes = mp.get_context("spawn"), [], []
    with tempfile.TemporaryDirectory() as folder:
        for rank in range(args.ranks):
            ours, theirs = context.Pipe()
            process = context.Process(target=serve, args=(rank, args.ranks, f"{folder}/store", theirs))
            process.start()
            pipes.append(ours)
            processes.append(process)
        answers = [pipe.recv() for pipe in pipes]
        for process in processes:
            process.join()
    case = {"W": args.ranks, "L": LAYERS, "T": TOKENS, "D": 256, "F": 256, "E": 16, "K": 4, "device": "cpu"}
    slowest = {
        name: [max(of_rank) for of_rank in zip(*(times[name][5:] for times, _ in answers), strict=True)]
        for name in PACES
    }
    rows = []
    for name in PACES:
        us = [seconds * 1e6 for seconds in slowest[name]]
        row = {"op": "online_iteration", "impl": name, "case": case, "n": len(us)}
        row |= {"median_us": round(statistics.median(us)), "min_us": round(min(us)), "max_us": round(max(us))}
        # Variants ran one after the other in every round: what disturbs the machine meets all of them.
        pairs = zip(slowest[name], slowest["off"], strict=True)
        row["over_off"] = round(statistics.median(on / off for on, off in pairs) - 1, 4)
        tally = answers[0][1].get(name, {})
        row |= {
            key: round(tally[key], 4) for key in ("switches", "bytes_moved", "seconds_hidden") if key in tally
        }
        rows.append(row)
        print(row)
    command = f"python benchmarks/placement_online.py --ranks {args.ranks}"
    write_results(args.out, "How even are the ranks?", describe_run(command), rows)


if __name__ == "__main__":
    main()
