"""How even are the ranks, planned offline, split per batch, and kept balanced online? No GPU.

    python benchmarks/placement.py --trace ../shared/data/deepseek_v2_lite_routing.npz

Imbalance is the load of the fullest rank over the mean, minus 1. Writes benchmarks/results/placement.json.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from imbrex.bench.results import describe_run, write_results
from imbrex.contracts import Placement
from imbrex.placement import LoadHistory, Target, history_of_ids, imbalance, plan_history, plan_layers
from imbrex.placement.bounds import imbalances, least_fullest
from imbrex.placement.engines import deepseek
from imbrex.placement.online import Pace
from imbrex.placement.planner import to_held, to_placement
from imbrex.placement.refine import count_moves
from imbrex.placement.replay import join, replay

TASKS = ("intent", "law", "summary")
NUM_EXPERTS, RANKS, SLOTS = 64, 4, 68
AT_SCALE = (
    (4, 68),
    (8, 68),
    (8, 72),
    (16, 80),
    (16, 96),
    (32, 96),
    (32, 128),
    (64, 128),
    (64, 192),
    (72, 144),
)
FURTHEST = ((32, 96), (64, 128), (72, 144))
"""Ranks and slots that are furthest above the lowest possible."""
README_LOADS = [
    [90, 132, 40, 61, 104, 165, 39, 4, 73, 56, 183, 86],
    [20, 107, 104, 64, 19, 197, 187, 157, 172, 86, 16, 27],
]
FLASHLB_LOADS = [600, 560, 120, 120, 20, 10, 10, 10]


def published_examples() -> list[dict[str, Any]]:
    rows = []
    for name, loads in (("deepseek_readme", README_LOADS), ("flashlb", [FLASHLB_LOADS])):
        for layer, load in enumerate(loads):
            slots = deepseek(np.array(load, dtype=float), 16, 1, 1, 8)
            share = (np.array(load) / np.bincount(slots))[slots].reshape(8, 2).sum(1)
            case = {"example": name, "layer": layer, "W": 8, "S": 16}
            theirs = share.max() / share.mean() - 1
            ours = imbalance(load, plan_layers([load], 8, 16)[0])
            rows += [
                {"op": "plan", "impl": "deepseek", "case": case, "imbalance": round(float(theirs), 5)},
                {"op": "plan", "impl": "imbrex", "case": case, "imbalance": round(ours, 5)},
            ]
    return rows


def planning_time() -> list[dict[str, Any]]:
    """Seconds for a whole model from 16 iterations, for the balanced split, and how even ranks come out."""
    rows = []
    for law in ("gamma", "zipf"):
        draw = np.random.default_rng(0)
        zipf = np.stack([draw.permutation(1 / (np.arange(256) + 1.0)) for _ in range(58)])
        load = draw.gamma(0.6, size=(58, 256)) * 200 if law == "gamma" else zipf * 8000
        counts = draw.poisson(load, size=(16, 58, 256)).astype(np.int64)
        history = LoadHistory(counts_ILE=counts, layers=tuple(range(58)))
        for ranks in (8, 32, 36, 64, 72):
            seconds, plan = [], {}
            for _ in range(5):
                begin = time.process_time()
                plan = plan_history(history, Target(num_ranks=ranks, slots=288))
                seconds.append(time.process_time() - begin)
            scored = [imbalances(counts[:, at], plan[at], "balanced").mean() for at in plan]
            found = np.mean(scored)
            case = {"L": 58, "E": 256, "S": 288, "W": ranks, "I": 16, "loads": law}
            rows.append(
                {
                    "op": "plan_time",
                    "impl": "imbrex",
                    "case": case,
                    "median_us": round(statistics.median(seconds) * 1e6),
                    "max_us": round(max(seconds) * 1e6),
                    "n": len(seconds),
                    "imbalance": round(float(found), 6),
                }
            )
    return rows


def halves(ids: dict[str, np.ndarray]) -> list[dict[str, Any]]:
    """Plan from the first half of a task, score the second half batch by batch."""
    rows = []
    for task, ids_LTK in ids.items():
        half = ids_LTK.shape[1] // 2
        train = history_of_ids(ids_LTK[:, :half], NUM_EXPERTS, 64)
        for batch in (128, 512, 2048):
            test = history_of_ids(ids_LTK[:, half:], NUM_EXPERTS, batch)
            for policy, slots in (("none", 64), ("deepseek", 64), ("deepseek", 68), ("balanced", 68)):
                scored = replay(train, test, policy, RANKS, slots)
                rows.append(
                    {
                        "op": "second_half",
                        "impl": policy,
                        "case": {"task": task, "batch": batch, "W": RANKS, "S": slots},
                        "imbalance": round(float(scored.imbalance_IL.mean()), 5),
                    }
                )
    return rows


def at_scale(ids: dict[str, np.ndarray]) -> list[dict[str, Any]]:
    """Plan from the first half of a task, score batches of 512 and 2048 tokens of the second with the
    balanced split: on DeepSeek's placement, on the one for even shares, and on the one for this split.
    `in_sample` is planned from the batches that it is scored on, so what it lacks is the search's. `bound` is
    what the fullest rank has at least, wherever experts live. Layers' means; worst_over_bound is of one
    layer."""
    rows = []
    for ranks, slots in AT_SCALE:
        for task, ids_LTK in ids.items():
            half = ids_LTK.shape[1] // 2
            train = history_of_ids(ids_LTK[:, :half], NUM_EXPERTS, 64)
            plans = {
                "even_plan": plan_history(train, Target(num_ranks=ranks, slots=slots, split="even")),
                "balanced": plan_history(train, Target(num_ranks=ranks, slots=slots)),
            }
            if slots % ranks == 0:
                loads = enumerate(train.load())
                plans["deepseek"] = {at: deepseek_placement(load_E, ranks, slots) for at, load_E in loads}
            for batch in (512, 2048):
                test = history_of_ids(ids_LTK[:, half:], NUM_EXPERTS, batch)
                counts_ILE = test.counts_ILE
                case = {"task": task, "batch": batch, "W": ranks, "S": slots}
                bound_L = bounds_of(counts_ILE, ranks, slots)
                rows.append(scale_row("bound", case, bound_L - 1, bound_L))
                known = {"in_sample": plan_history(test, Target(num_ranks=ranks, slots=slots))}
                for name, plan in (plans | known).items():
                    scored = [imbalances(counts_ILE[:, at], plan[at], "balanced").mean() for at in plan]
                    rows.append(scale_row(name, case, np.array(scored), bound_L))
    return rows


def without_drift(ids: dict[str, np.ndarray]) -> list[dict[str, Any]]:
    """What a record of finite length leaves: planned from every other batch of 512 tokens of a whole task,
    and from every fourth, scored on the batches between. So recorded and scored batches are of one law. What
    noise leaves falls with the record's length, so that twice the first less the second is what a record
    without end would leave."""
    rows = []
    for ranks, slots in FURTHEST:
        for task, ids_LTK in ids.items():
            whole = ids_LTK.shape[1] // 512 * 512
            batches_LBTK = ids_LTK[:, :whole].reshape(len(ids_LTK), -1, 512, ids_LTK.shape[2])
            between = _of_batches(batches_LBTK[:, 1::2], 512).counts_ILE
            case = {"task": task, "batch": 512, "W": ranks, "S": slots}
            bound_L = bounds_of(between, ranks, slots)
            for name, step in (("every_other", 2), ("every_fourth", 4)):
                train = _of_batches(batches_LBTK[:, ::step], 64)
                plan = plan_history(train, Target(num_ranks=ranks, slots=slots))
                scored = [imbalances(between[:, at], plan[at], "balanced").mean() for at in plan]
                rows.append(scale_row(name, case, np.array(scored), bound_L) | {"op": "without_drift"})
    return rows


def _of_batches(batches_LBTK: np.ndarray, batch: int) -> LoadHistory:
    tokens_LTK = batches_LBTK.reshape(len(batches_LBTK), -1, batches_LBTK.shape[3])
    return history_of_ids(tokens_LTK, NUM_EXPERTS, batch)


def bounds_of(counts_ILE: np.ndarray, ranks: int, slots: int) -> np.ndarray:
    """What the fullest rank has at least over the mean, [L], the mean over batches."""
    return np.array(
        [
            np.mean([least_fullest(c.astype(float), ranks, slots) * ranks / c.sum() for c in of])
            for of in counts_ILE.transpose(1, 0, 2)
        ]
    )


def scale_row(
    impl: str, case: dict[str, Any], imbalance_L: np.ndarray, bound_L: np.ndarray
) -> dict[str, Any]:
    over_L = (1 + imbalance_L) / bound_L
    return {
        "op": "at_scale",
        "impl": impl,
        "case": case,
        "imbalance": round(float(imbalance_L.mean()), 5),
        "over_bound": round(float(over_L.mean()), 4),
        "worst_over_bound": round(float(over_L.max()), 4),
    }


def deepseek_placement(load_E: np.ndarray, ranks: int, slots: int) -> Placement:
    """Replicas that DeepSeek's algorithm puts twice on a rank are one."""
    held = np.zeros((ranks, NUM_EXPERTS), dtype=bool)
    np.put_along_axis(held, deepseek(load_E, slots, 1, 1, ranks).reshape(ranks, -1), True, axis=1)
    return to_placement(held)


def renewal_curve(ids: dict[str, np.ndarray]) -> list[dict[str, Any]]:
    """From a plan for intent to one for law: share of the gain by the share of DeepSeek's fetches."""
    loads = [history_of_ids(ids[task], NUM_EXPERTS, 64).load() for task in ("intent", "law")]
    rows = []
    for ranks, slots in ((4, 64), (4, 68), (8, 64), (8, 72)):
        target = Target(num_ranks=ranks, slots=slots, split="even")
        old, free = (plan_history(_once(load), target) for load in loads)
        theirs = [deepseek_moves(before, after, ranks, slots) for before, after in zip(*loads, strict=True)]
        stale, best = (_mean_imbalance(loads[1], plan) for plan in (old, free))
        for percent in range(0, 101, 5):
            reached, moved = [], 0
            for layer, load_E in enumerate(loads[1]):
                few = Target(
                    num_ranks=ranks, slots=slots, split="even", max_moves=theirs[layer] * percent // 100
                )
                new = plan_history(_once(load_E[None]), few, {0: old[layer]})[0]
                reached.append(imbalance(load_E, new))
                moved += count_moves(to_held(old[layer]), to_held(new))
            rows.append(
                {
                    "op": "renewal",
                    "impl": "imbrex",
                    "case": {
                        "from": "intent",
                        "to": "law",
                        "W": ranks,
                        "S": slots,
                        "budget_percent": percent,
                    },
                    "gain": round(float((stale - np.mean(reached)) / (stale - best)), 4),
                    "fetches": moved,
                    "deepseek_fetches": sum(theirs),
                }
            )
    return rows


def deepseek_moves(before: np.ndarray, after: np.ndarray, ranks: int, slots: int) -> int:
    held = np.zeros((2, ranks, NUM_EXPERTS), dtype=bool)
    for table, load_E in zip(held, (before, after), strict=True):
        np.put_along_axis(table, deepseek(load_E, slots, 1, 1, ranks).reshape(ranks, -1), True, axis=1)
    return count_moves(*held)


def _once(load_LE: np.ndarray) -> LoadHistory:
    counts = np.rint(load_LE).astype(np.int64)[None]
    return LoadHistory(counts_ILE=counts, layers=tuple(range(counts.shape[1])))


def _mean_imbalance(load_LE: np.ndarray, plan) -> float:
    return float(np.mean([imbalance(load_E, plan[layer]) for layer, load_E in enumerate(load_LE)]))


def of_ranks(ids_LTK: np.ndarray, batch: int) -> LoadHistory:
    """An iteration for every rank's share of a batch, whole batches only."""
    whole = ids_LTK.shape[1] // batch * batch
    return history_of_ids(ids_LTK[:, :whole], NUM_EXPERTS, batch // RANKS)


def drift(ids: dict[str, np.ndarray]) -> list[dict[str, Any]]:
    """Intent, law, summary one after the other; the offline plan knows the first 2048 tokens."""
    rows = []
    pace = Pace(layer_updates_per_iter=4, max_moves=32, threshold=0.005, proposals=600)
    for batch in (256, 512):
        sources = {task: of_ranks(ids[task], batch) for task in TASKS}
        histories = {task: history.pool(RANKS) for task, history in sources.items()}
        everything = join(list(sources.values()))
        train = sources["intent"].window(0, 2048 * RANKS // batch)
        lines = {
            policy: replay(train, everything, policy, RANKS, SLOTS, pace=pace, sources=RANKS)
            for policy in ("none", "balanced", "online")
        }
        series = {name: found.imbalance_IL.mean(1) for name, found in lines.items()}
        series["hindsight"] = np.concatenate(
            [replay(h, h, "balanced", RANKS, SLOTS).imbalance_IL.mean(1) for h in histories.values()]
        )
        begin = 0
        for task, history in histories.items():
            settled = slice(begin + 7, begin + history.num_iterations)
            for name, values in series.items():
                rows.append(
                    {
                        "op": "drift",
                        "impl": "stale" if name == "balanced" else name,
                        "case": {"task": task, "batch": batch, "W": RANKS, "S": SLOTS, "cycle": 7},
                        "imbalance_after_a_cycle": round(float(values[settled].mean()), 5),
                        "series": [round(float(v), 4) for v in values[begin : settled.stop]],
                    }
                )
            begin += history.num_iterations
        rows[-1]["fetches"] = int(lines["online"].fetched_I.sum())
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument(
        "--trace", type=Path, required=True, help="npz with {task}_ids [layers, tokens, choices]"
    )
    parser.add_argument("--only", help="examples, time, halves, scale, steady, renewal, drift: some of them")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results/placement.json")
    args = parser.parse_args()
    trace = np.load(args.trace, allow_pickle=False)
    ids = {task: trace[f"{task}_ids"].astype(np.int64) for task in TASKS}
    parts: dict[str, Callable[[], list[dict[str, Any]]]] = {
        "examples": published_examples,
        "time": planning_time,
        "halves": lambda: halves(ids),
        "scale": lambda: at_scale(ids),
        "steady": lambda: without_drift(ids),
        "renewal": lambda: renewal_curve(ids),
        "drift": lambda: drift(ids),
    }
    names = args.only.split(",") if args.only else list(parts)
    rows = [row for name in names for row in parts[name]()]
    command = f"python benchmarks/placement.py --trace {args.trace.name}"
    command += f" --only {args.only}" if args.only else ""
    write_results(args.out, "How even are the ranks?", describe_run(command), rows)
    for row in rows:
        print({key: value for key, value in row.items() if key != "series"})


if __name__ == "__main__":
    main()
