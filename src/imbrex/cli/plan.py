"""`imbrex plan --model deepseek-v3 --gpus 64 --nodes 8 --tokens 16384`: which layout, and why not others."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from imbrex.bench.shapes import MODELS, parse_shape
from imbrex.cli.balance_input import add_input, load_input
from imbrex.cli.balance_plan import describe
from imbrex.placement import BalancePlan, LoadHistory, Target, plan_history, write_plan
from imbrex.simulate.device import Shape
from imbrex.simulate.fabric import Fabric, islands
from imbrex.simulate.loads import Spread, Stragglers
from imbrex.simulate.plans import choices_of_codec, choose
from imbrex.simulate.profile import Profile, shipped_profiles
from imbrex.simulate.request import MODES, Request, World
from imbrex.simulate.run import Layout
from imbrex.simulate.story import as_json, lines, write_story

LAYERS = {"mixtral": 32, "qwen2-moe": 24, "phi3.5-moe": 32, "deepseek-v3": 58, "qwen3-30b-a3b": 48}
"""Layers with experts, from the models' published configurations."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--model", default="deepseek-v3", help=f"{', '.join(MODELS)}, or D,F,E,K (deepseek-v3)")
    add("--gpus", type=int, required=True, metavar="N", help="ranks of all nodes")
    add("--nodes", type=int, default=1, metavar="N", help="nodes of as many ranks each (1)")
    add("--tokens", type=int, default=4096, metavar="T", help="tokens of a rank in a step (4096)")
    add("--mode", choices=MODES, default="forward", help="train, forward, or decode in a graph (forward)")
    add("--layers", type=int, metavar="N", help="layers with experts that a rank holds (the model's, or 1)")
    add("--codecs", default="identity", metavar="NAME,...", help="codecs to choose from (identity)")
    add("--replicas", default="0", metavar="N,...", help="slots beyond the experts to choose from (0)")
    add_input(parser, "--trace", required=False)
    add("--skew", default="sampled", help="without a trace: even, sampled, zipf:A, lognormal:SIGMA (sampled)")
    add("--stragglers", default="0", metavar="S[,P,X]", help="ranks exp(S) slower, and X times with chance P")
    add("--network", metavar="FILE", help="tiers of links: YAML, TOML or JSON (nodes on 400 Gb/s a GPU)")
    profiles = f"a file of `imbrex profile`, or {', '.join(shipped_profiles())} (h200)"
    add("--profile", default="h200", help=profiles)
    add("--seed", type=int, default=0, help="of choices and stragglers (0)")
    add("--json", metavar="FILE", help="write everything here")
    add("--report", metavar="FILE", help="write one HTML file here")
    add("--placement", metavar="FILE", help="with --trace: write the plan's homes of experts, .yaml or .json")


def run(args: argparse.Namespace) -> int:
    """Exit code 0; 1 where no layout can run."""
    if args.placement and not args.trace_input:
        raise ValueError("--placement: popularity that is drawn says nothing of your experts; give --trace")
    profile = Profile.load(args.profile)
    history = load_input(args.trace_input, args) if args.trace_input else None
    world = World(
        profile=profile,
        fabric=_fabric(args, profile),
        spread=Spread.of_history(history) if history else Spread.parse(args.skew),
        stragglers=Stragglers.parse(args.stragglers),
    )
    request = Request(
        shape=_shape(args.model, profile),
        ranks=args.gpus,
        tokens=args.tokens,
        mode=args.mode,
        layers=LAYERS.get(args.model, 1) if args.layers is None else args.layers,
        codecs=choices_of_codec(args.codecs.split(","), profile),
        seed=args.seed,
        replicas=_numbers(args.replicas),
    )
    plans = choose(request, world)
    print("\n".join(lines(plans, request, world)))
    if args.json:
        content = as_json(plans, request, world)
        Path(args.json).write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
        print(f"json: {args.json}")
    if args.report:
        write_story(args.report, plans, request, world)
        print(f"report: {args.report}")
    if plans[0].outcome is None:
        return 1
    if args.placement:
        assert history is not None
        _write_placement(args.placement, history, plans[0].layout)
    return 0


def _write_placement(path: str, history: LoadHistory, layout: Layout) -> None:
    """Write the homes of the experts of every recorded layer, and print how even they make the ranks."""
    slots = history.num_experts + layout.replicas
    placements = plan_history(history, Target(num_ranks=layout.ep, slots=slots))
    write_plan(path, BalancePlan(placements=placements))
    print(
        f"placement: {path}: {len(placements)} layers, {slots} slots on {layout.ep} ranks; fullest rank "
        f"above the mean, balanced split, in the recorded iterations: "
        f"{describe(history, placements, 'balanced')}"
    )


def _shape(model: str, profile: Profile) -> Shape:
    shape = parse_shape(model)
    return Shape(
        width=shape.hidden_size,
        inner=shape.intermediate_size,
        experts=shape.num_experts,
        top_k=shape.top_k,
        value_bytes=int(profile["value_bytes"]),
    )


def _fabric(args: argparse.Namespace, profile: Profile) -> Fabric:
    for name in ("gpus", "nodes"):
        if getattr(args, name) < 1:
            raise ValueError(f"--{name} is {getattr(args, name)}: give at least 1")
    if args.gpus % args.nodes:
        raise ValueError(f"plan: {args.gpus} GPUs do not divide into {args.nodes} nodes; give a multiple")
    if args.network:
        return Fabric.read(args.network, args.gpus)
    return islands(profile, args.gpus, args.gpus // args.nodes)


def _numbers(text: str) -> tuple[int, ...]:
    try:
        numbers = tuple(int(part) for part in text.split(","))
    except ValueError:
        numbers = (-1,)
    if min(numbers) < 0:
        raise ValueError(f"--replicas: {text!r}; give numbers from 0 up, as 0,32")
    return numbers
