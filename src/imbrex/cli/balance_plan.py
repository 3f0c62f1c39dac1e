"""`imbrex balance plan`: plans where experts should be, from recorded loads."""

from __future__ import annotations

import argparse
from collections.abc import Mapping

import numpy as np

from imbrex.bench.results import check_file
from imbrex.cli.balance_input import add_input, load_input
from imbrex.contracts import Placement
from imbrex.placement import BalancePlan, LoadHistory, Target, plan_history, read_plan, write_plan
from imbrex.placement.bounds import imbalances
from imbrex.placement.renewal import moves_between


def add_plan_arguments(parser: argparse.ArgumentParser) -> None:
    add_input(parser, "--stats")
    parser.add_argument("--ranks", type=int, required=True, help="expert-parallel ranks that will serve")
    parser.add_argument(
        "--slots", type=int, required=True, help="slots of all ranks; need not divide by the ranks"
    )
    parser.add_argument("--nodes", type=int, default=1, help="above 1, replicas stay inside a node (1)")
    parser.add_argument("--groups", type=int, default=1, help="groups of experts that stay on a node (1)")
    parser.add_argument("--split", default="balanced", help="replica split planned for: balanced or even")
    decay = "with --split even: weight of an iteration over the next's (1)"
    parser.add_argument("--decay", type=float, default=1.0, help=decay)
    parser.add_argument("--iterations", metavar="FIRST:END", help="only these iterations of the statistics")
    parser.add_argument(
        "--from", dest="old", metavar="PLAN", help="plan in use; experts that stay keep slots"
    )
    parser.add_argument("--max-moves", type=int, help="with --from: experts fetched in a layer at most")
    parser.add_argument("--updates", type=int, default=0, help="layer_updates_per_iter to write down (0)")
    parser.add_argument("--out", required=True, help="plan.yaml (TensorRT-LLM) or plan.json (SGLang)")


def plan(args: argparse.Namespace) -> int:
    check_file("out", args.out, stats=args.stats_input)
    if args.updates < 0:
        raise ValueError(f"--updates is {args.updates}: give 0 or more")
    history = load_input(args.stats_input, args)
    if args.iterations:
        history = history.window(*_parse_window(args.iterations))
    target = Target(
        num_ranks=args.ranks,
        slots=args.slots,
        num_nodes=args.nodes,
        num_groups=args.groups,
        split=args.split,
        decay=args.decay,
        max_moves=args.max_moves,
    )
    old = None
    if args.old is not None:
        old = read_plan(args.old, args.ranks, history.num_experts, layers=history.layers).placements
    placements = plan_history(history, target, old)
    write_plan(args.out, BalancePlan(placements=placements, layer_updates_per_iter=args.updates))
    print(f"{args.out}: {len(placements)} layers, {args.slots} slots on {args.ranks} ranks")
    batches = f"mean of {history.num_iterations} iterations" if history.num_iterations > 1 else "of their sum"
    print(
        f"fullest rank above the mean, {args.split} split, {batches}: "
        + describe(history, placements, args.split)
    )
    if old is not None:
        print(f"before: {describe(history, old, args.split)}; fetches: {moves_between(old, placements)}")
    return 0


def describe(history: LoadHistory, placements: Mapping[int, Placement], split: str) -> str:
    """Every layer and iteration scored with the split that will run; layers without choices count nothing."""
    answers = {}
    for at, layer in enumerate(history.layers):
        scored_I = imbalances(history.counts_ILE[:, at], placements[layer], split)
        if len(scored_I):
            answers[layer] = float(scored_I.mean())
    if not answers:
        return "not known, as nothing was chosen"
    worst = max(answers, key=lambda layer: answers[layer])
    empty = len(history.layers) - len(answers)
    return f"{np.mean(list(answers.values())):.2%}, at most {answers[worst]:.2%} (layer {worst})" + (
        f"; layers without choices: {empty}" if empty else ""
    )


def _parse_window(text: str) -> tuple[int, int]:
    try:
        begin, end = (int(part) for part in text.split(":"))
    except ValueError:
        raise ValueError(f"--iterations: {text!r}; give FIRST:END, as in 100:200") from None
    return begin, end
