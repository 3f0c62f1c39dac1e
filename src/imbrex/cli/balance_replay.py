"""`imbrex balance replay` and `stability`: how policies would have balanced recorded loads; no GPU is
needed."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import numpy as np

from imbrex.balancer.report import Story, write_story
from imbrex.bench.results import check_file
from imbrex.cli.balance_input import add_input, load_input, load_sources
from imbrex.placement.history import LoadHistory
from imbrex.placement.online import Pace
from imbrex.placement.replay import POLICIES, Replay, join
from imbrex.placement.replay import replay as score
from imbrex.placement.stability import between
from imbrex.placement.stability import stability as measure

ENGINES = ("deepseek", "tensorrt_llm")
"""Policies of engines, which want as many slots on every rank."""


def add_replay_arguments(parser: argparse.ArgumentParser) -> None:
    add_input(parser, "--trace", several=True)
    parser.add_argument("--ranks", default="4", metavar="W,W", help="rank counts, comma-separated (4)")
    parser.add_argument("--slots", metavar="S,S", help="slots of all ranks (experts, and 2 more a rank)")
    names = "; ".join(f"{name}: {about}" for name, about in POLICIES.items())
    parser.add_argument("--policy", default="none,deepseek,balanced", metavar="A,B", help=names)
    parser.add_argument(
        "--train",
        type=float,
        default=0.5,
        help="share of the first trace to plan from (0.5); 1 scores the other traces only",
    )
    parser.add_argument("--updates", type=int, default=1, help="layers an iteration, of online (1)")
    parser.add_argument("--json", metavar="FILE", help="write imbalance and loads of every iteration")
    parser.add_argument("--html", metavar="FILE", help="write a report: the last policy against the first")


def replay(args: argparse.Namespace) -> int:
    for trace in args.trace_input:
        check_file("json", args.json, trace=trace)
        check_file("html", args.html, trace=trace, json=args.json)
    pace = Pace(layer_updates_per_iter=args.updates)
    rows, stories = [], []
    print(f"{'ranks':>5} {'slots':>6} {'policy':<13} {'mean':>8} {'p90':>8} {'worst':>8} {'fetches':>8}")
    for num_ranks in _numbers("--ranks", args.ranks):
        loaded = [load_sources(name, args, num_ranks) for name in args.trace_input]
        sources = min(number for _, number in loaded)
        train, test = _divide([history for history, _ in loaded], args.train, sources)
        whole = test.pool(sources)
        slots = (
            _numbers("--slots", args.slots) if args.slots is not None else [train.num_experts + 2 * num_ranks]
        )
        for num_slots in slots:
            for policy in args.policy.split(","):
                if policy in ENGINES and num_slots % num_ranks:
                    refused = f"{num_slots} slots do not divide over {num_ranks} ranks, as it needs"
                    print(f"{num_ranks:>5} {num_slots:>6} {policy:<13} {refused}")
                    continue
                scores = score(train, test, policy, num_ranks, num_slots, pace=pace, sources=sources)
                _print(num_ranks, num_slots, scores)
                rows.append(_row(num_ranks, num_slots, scores))
                stories.append(_story(whole, num_ranks, num_slots, scores))
    if not rows:
        raise ValueError("replay: no policy can be scored; give other --slots, or --policy balanced")
    if args.json:
        with open(args.json, "w", encoding="utf-8") as file:
            json.dump(rows, file)
    if args.html:
        write_story(Path(args.html), "Replay", stories[-1], before=stories[0])
    return 0


def add_stability_arguments(parser: argparse.ArgumentParser) -> None:
    add_input(parser, "--trace", several=True)


def stability(args: argparse.Namespace) -> int:
    histories = [load_input(name, args) for name in args.trace_input]
    for name, history in zip(args.trace_input, histories, strict=True):
        figures = measure(history)
        correlation = figures.correlation_L
        print(
            f"{name}: correlation of neighbouring iterations {correlation.mean():.3f} "
            f"({correlation.min():.3f} to {correlation.max():.3f} by layer); decay that predicts best "
            f"{figures.best_decay:g}"
        )
        errors = ", ".join(f"{decay:g}: {error:.4f}" for decay, error in figures.error_by_decay.items())
        print(f"  share of tokens predicted wrongly, by decay: {errors}")
    if len(histories) > 1:
        print("correlation between traces:")
        for name, row in zip(args.trace_input, between(histories), strict=True):
            print(f"  {name}: " + " ".join(f"{value:.3f}" for value in row))
    return 0


def _divide(histories: list[LoadHistory], share: float, sources: int) -> tuple[LoadHistory, LoadHistory]:
    """The first part of the first history to plan from, all that follows to score. sources: so many
    iterations of a history are one."""
    if not 0 <= share <= 1:
        raise ValueError(f"--train: {share:g} is no share; use a number from 0 to 1")
    wholes = [history.num_iterations // sources for history in histories]
    cut = round(wholes[0] * share) * sources
    if not 1 <= cut // sources < sum(wholes):
        several = len(wholes) > 1
        mend = "use a share between 0 and 1, or a smaller --batch of a trace"
        if wholes[0] < 2:
            mend = "use --train 1 to plan from all of the first --trace and score the next"
            mend += "" if several else ", and give a second --trace"
        raise ValueError(
            f"--train: {share:g} of {wholes[0]} iterations leaves none to plan from or none to score; {mend}"
        )
    histories = [h.window(0, n * sources) for h, n in zip(histories, wholes, strict=True)]
    everything = join(histories)
    return everything.window(0, cut), everything.window(cut, everything.num_iterations)


def _numbers(flag: str, text: str) -> list[int]:
    try:
        numbers = [int(part) for part in text.split(",")]
    except ValueError:
        numbers = []
    if not numbers or min(numbers) < 1:
        raise ValueError(f"{flag}: {text!r}; give whole numbers from 1 up, as in 4,8")
    return numbers


def _print(num_ranks: int, num_slots: int, outcome: Replay) -> None:
    mean_I = outcome.imbalance_I
    print(
        f"{num_ranks:>5} {num_slots:>6} {outcome.policy:<13} {mean_I.mean():>8.4f} "
        f"{np.quantile(mean_I, 0.9):>8.4f} {outcome.imbalance_IL.max():>8.4f} {outcome.fetched_I.sum():>8}"
    )


def _story(test: LoadHistory, num_ranks: int, num_slots: int, outcome: Replay) -> Story:
    return Story(
        layers=test.layers,
        loads_ILW=outcome.loads_ILW,
        counts_ILE=test.counts_ILE.astype(np.float64),
        switched=[(i, 0) for i in np.flatnonzero(outcome.fetched_I).tolist()],
        facts={
            "policy": f"{outcome.policy}: {POLICIES[outcome.policy]}",
            "ranks, slots": f"{num_ranks}, {num_slots}",
            "mean imbalance": f"{outcome.imbalance_I.mean():.4f}",
            "experts fetched": str(outcome.fetched_I.sum()),
        },
    )


def _row(num_ranks: int, num_slots: int, outcome: Replay) -> dict:
    return {
        "ranks": num_ranks,
        "slots": num_slots,
        "policy": outcome.policy,
        "imbalance": outcome.imbalance_IL.round(5).tolist(),
        "loads": outcome.loads_ILW.round(2).tolist(),
        "fetched": outcome.fetched_I.tolist(),
    }
