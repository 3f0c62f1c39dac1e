"""`imbrex plan --model deepseek-v3 --gpus 64 --nodes 8 --tokens 16384`: the best layout, and the reasons
against others."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from imbrex.bench.results import check_file
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
MOST_EXPERTS = 65536
"""Experts that are simulated: the choices of each are drawn."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--model", default="deepseek-v3", help=f"{', '.join(MODELS)}, or D,F,E,K (deepseek-v3)")
    add("--gpus", type=int, required=True, metavar="N", help="ranks of all nodes")
    add("--nodes", type=int, metavar="N", help="nodes of as many ranks each (1, or as the network has them)")
    add("--tokens", type=int, default=4096, metavar="T", help="tokens of a rank in a step (4096)")
    add("--mode", choices=MODES, default="forward", help="train, forward, or decode in a graph (forward)")
    add("--layers", type=int, metavar="N", help="layers with experts that a rank holds (the model's, or 1)")
    add("--codecs", default="identity", metavar="NAME,...", help="codecs to choose from (identity)")
    add("--replicas", default="0", metavar="N,...", help="slots beyond the experts to choose from (0)")
    add_input(parser, "--trace", required=False)
    add("--skew", help="without a trace: even, sampled, zipf:A, lognormal:SIGMA (sampled)")
    add("--stragglers", default="0", metavar="S[,P,X]", help="ranks exp(S) slower, and X times with chance P")
    add("--network", metavar="FILE", help="tiers of links: YAML, TOML or JSON (nodes on 400 Gb/s a GPU)")
    profiles = f"a file of `imbrex profile`, or {', '.join(shipped_profiles())} (h200)"
    add("--profile", default="h200", help=profiles)
    add("--seed", type=int, default=0, help="of choices and stragglers (0)")
    add("--json", metavar="FILE", help="write everything here; - for stdout, and nothing else")
    add("--report", metavar="FILE", help="write one HTML file here")
    add("--placement", metavar="FILE", help="with --trace: write the plan's homes of experts, .yaml or .json")


def run(args: argparse.Namespace) -> int:
    """Exit code 0; 1 where no layout can run."""
    _check_files(args)
    if args.skew is not None and args.trace_input is not None:
        raise ValueError("--skew: a trace says how choices fall; give one of the two")
    profile = Profile.load(args.profile)
    shape = _shape(args.model, profile)
    history = _history(args, shape) if args.trace_input is not None else None
    world = World(
        profile=profile,
        fabric=_fabric(args, profile),
        spread=Spread.of_history(history) if history else Spread.parse(args.skew or "sampled"),
        stragglers=Stragglers.parse(args.stragglers),
    )
    request = Request(
        shape=shape,
        ranks=args.gpus,
        tokens=args.tokens,
        mode=args.mode,
        layers=LAYERS.get(args.model, 1) if args.layers is None else args.layers,
        codecs=choices_of_codec(args.codecs.split(","), profile),
        seed=args.seed,
        replicas=_numbers(args.replicas),
    )
    plans = choose(request, world)
    # What a program reads has the output for itself.
    output = sys.stderr if args.json == "-" else sys.stdout
    print("\n".join(lines(plans, request, world)), file=output)
    if args.json:
        _write_json(args.json, as_json(plans, request, world))
    if args.report:
        write_story(args.report, plans, request, world)
        print(f"report: {args.report}", file=output)
    if plans[0].outcome is None:
        return 1
    if args.placement:
        assert history is not None
        print(_write_placement(args.placement, history, plans[0].layout), file=output)
    return 0


def _check_files(args: argparse.Namespace) -> None:
    ours: dict[str, str | None] = {
        "trace": args.trace_input,
        "network": args.network,
        "profile": args.profile,
    }
    for name in ("json", "report", "placement"):
        path = getattr(args, name)
        if (name, path) != ("json", "-"):
            check_file(name, path, **ours)
            ours[name] = path
    if args.placement and args.trace_input is None:
        raise ValueError("--placement: popularity that is drawn says nothing of your experts; give --trace")


def _write_json(path: str, content: dict[str, Any]) -> None:
    text = json.dumps(content, indent=1) + "\n"
    if path == "-":
        sys.stdout.write(text)
        return
    Path(path).write_text(text, encoding="utf-8")
    print(f"json: {path}")


def _history(args: argparse.Namespace, shape: Shape) -> LoadHistory:
    """The trace. Raises ValueError where it is of another model."""
    history = load_input(args.trace_input, args)
    if history.top_k not in (0, shape.top_k):
        raise ValueError(
            f"--trace: its tokens have {history.top_k} choices, the model's {shape.top_k}; give a trace of "
            "this model"
        )
    if history.num_experts < shape.experts and not args.experts:
        raise ValueError(
            f"--trace: it has {history.num_experts} experts, the model {shape.experts}; give a trace of this "
            f"model, or --experts {shape.experts} with ids of which the last never came"
        )
    return history


def _write_placement(path: str, history: LoadHistory, layout: Layout) -> str:
    """Write the homes of the experts of every recorded layer, and say how even they make the ranks."""
    slots = history.num_experts + layout.replicas
    placements = plan_history(history, Target(num_ranks=layout.ep, slots=slots))
    write_plan(path, BalancePlan(placements=placements))
    return (
        f"placement: {path}: {len(placements)} layers, {slots} slots on {layout.ep} ranks; fullest rank "
        f"above the mean, balanced split, in the recorded iterations: "
        f"{describe(history, placements, 'balanced')}"
    )


def _shape(model: str, profile: Profile) -> Shape:
    shape = parse_shape(model)
    if shape.num_experts > MOST_EXPERTS:
        raise ValueError(f"--model: {shape.num_experts} experts; give at most {MOST_EXPERTS}")
    return Shape(
        width=shape.hidden_size,
        inner=shape.intermediate_size,
        experts=shape.num_experts,
        top_k=shape.top_k,
        value_bytes=int(profile["value_bytes"]),
    )


def _fabric(args: argparse.Namespace, profile: Profile) -> Fabric:
    nodes = 1 if args.nodes is None else args.nodes
    for name, number in (("gpus", args.gpus), ("nodes", nodes)):
        if number < 1:
            raise ValueError(f"--{name} is {number}: give at least 1")
    if args.gpus % nodes:
        raise ValueError(f"plan: {args.gpus} GPUs do not divide into {nodes} nodes; give a multiple")
    if args.network is None:
        return islands(profile, args.gpus, args.gpus // nodes)
    fabric = Fabric.read(args.network, args.gpus)
    size = min(fabric.node, args.gpus)
    if args.gpus % size or (args.nodes is not None and args.gpus != nodes * size):
        on = "" if args.nodes is None else f" on {nodes} nodes"
        raise ValueError(
            f"plan: {args.gpus} GPUs{on} are not whole nodes of {fabric.node}, as the first tier of "
            f"{args.network} has; change one of them"
        )
    return fabric


def _numbers(text: str) -> tuple[int, ...]:
    try:
        numbers = tuple(int(part) for part in text.split(","))
    except ValueError:
        numbers = (-1,)
    if min(numbers) < 0:
        raise ValueError(f"--replicas: {text!r}; give numbers from 0 up, as 0,32")
    return numbers
