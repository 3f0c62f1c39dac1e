"""Does it pay to move one chunk of tokens while another is computed? Schedules beside `serial`.

    imbrex netlab run --nodes 2 --ranks-per-node 1 --inter 1gbit -- benchmarks/schedule.py

Forward and backward apart; the median over calls of the slowest rank; all schedules in turn within a round,
so that what else the machine does meets all of them alike. Predictions come from a profile of the same
process.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable

import torch
import torch.distributed as dist

import imbrex
from imbrex import overlap
from imbrex.cli.results import describe_run, write_results
from imbrex.overlap.auto import choose, predict
from imbrex.overlap.pipelined import Pipelined, parameters_of
from imbrex.overlap.profile import Profile, measure

QUESTION = "Does it pay to move one chunk of tokens while another is computed?"


def main() -> None:
    args = parse()
    dist.init_process_group("gloo")
    group = dist.group.WORLD
    assert group is not None
    torch.manual_seed(0)
    config = imbrex.MoEConfig(
        hidden_size=args.width, intermediate_size=args.inner, num_experts=2 * group.size(), top_k=args.top_k
    )
    layer = imbrex.MoELayer(config, group, transport=args.transport, codec=args.codec, experts="grouped")
    x_TD = torch.randn(args.tokens, args.width)
    with torch.no_grad():
        routing = layer.gate(x_TD)
    profile = measure(
        layer.exchange, layer.experts, x_TD, routing, parameters_of(layer.experts), degrees=(1, 2, 4, 8)
    )
    names = args.schedules.split(",")
    rows = time_all(args, layer, x_TD, {name: strategy(name, profile) for name in names})
    if group.rank() == 0:
        report(args, rows, profile, group.size())


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=QUESTION)
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--inner", type=int, default=704)
    parser.add_argument("--top-k", type=int, default=1)
    parser.add_argument("--codec", default="identity")
    parser.add_argument("--transport", default="alltoall")
    parser.add_argument("--schedules", default="serial,megatron,tutel,optsche-2,optsche-4,optsche-8,exact-4")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--network", default="netlab 1gbit")
    parser.add_argument("--out", default=None, help="a results file")
    return parser.parse_args()


def strategy(name: str, profile: Profile):
    """By name; with the profile's times where the scheduler looks at them."""
    made = overlap.make(name)
    if not isinstance(made, Pipelined) or not name.startswith("exact"):
        return made
    sizes = [profile.tokens / made.degree] * made.degree
    return Pipelined(
        made.scheduler,
        made.degree,
        times=(profile.times(sizes), profile.times(sizes, backward=True)),
        name=name,
    )


def time_all(args: argparse.Namespace, layer, x_TD: torch.Tensor, strategies: dict) -> dict[str, list]:
    """Seconds (forward, backward) of every round by schedule, of the slowest rank."""
    found: dict[str, list] = {name: [] for name in strategies}
    for number in range(args.rounds + 2):
        for name, one in strategies.items():
            layer.strategy = one
            x = x_TD.clone().requires_grad_()
            outputs: list[torch.Tensor] = []
            forward = _timed(layer, lambda x=x, o=outputs: o.append(layer(x)))
            backward = _timed(layer, lambda o=outputs: o[0].backward(torch.ones_like(o[0])))
            if number >= 2:
                found[name].append((forward, backward))
    return found


def _timed(layer, step: Callable[[], object]) -> float:
    layer.exchange.transport.exchange_counts(torch.zeros(1, dtype=torch.int64))
    begin = time.perf_counter()
    step()
    took = torch.tensor([int(1e9 * (time.perf_counter() - begin))])
    return 1e-9 * int(layer.exchange.transport.exchange_counts(took).max())


def report(args: argparse.Namespace, rows: dict[str, list], profile: Profile, world: int) -> None:
    case = {
        "T": args.tokens,
        "D": args.width,
        "F": args.inner,
        "K": args.top_k,
        "W": world,
        "codec": args.codec,
        "transport": args.transport,
        "network": args.network,
    }
    alone = profile.times([profile.tokens])
    sys.stdout.write(
        "tasks alone, ms: " + ", ".join(f"{t.kind.name} {1e3 * s:.1f}" for t, s in alone.items()) + "\n"
    )
    sys.stdout.write(f"chosen by prediction: {choose(profile)}\n")
    written: list[dict] = []
    for name, rounds in rows.items():
        forward, backward = (statistics.median(part) for part in zip(*rounds, strict=True))
        scheduler, _, degree = name.rpartition("-")
        guess = predict(profile, scheduler, int(degree)) if scheduler in overlap.SCHEDULERS else None
        said = f", predicted {1e3 * guess.forward:.1f} and {1e3 * guess.backward:.1f}" if guess else ""
        sys.stdout.write(f"{name:12} forward {1e3 * forward:7.1f} ms, backward {1e3 * backward:7.1f}{said}\n")
        chances = (None, None) if guess is None else (guess.forward, guess.backward)
        written += rows_of(name, case, rounds, chances)
    if args.out:
        words = [word for word in sys.argv[1:] if word not in ("--out", args.out)]
        command = "imbrex netlab run ... -- benchmarks/schedule.py " + " ".join(words)
        write_results(args.out, QUESTION, describe_run(command), written)


def rows_of(name: str, case: dict, rounds: list, chances: tuple[float | None, float | None]) -> list[dict]:
    """Rows of a results file, forward and backward, with the predicted seconds where there are any."""
    found = []
    for op, part, chance in (("forward", 0, chances[0]), ("backward", 1, chances[1])):
        times = [1e6 * r[part] for r in rounds]
        measured = {"median_us": statistics.median(times), "min_us": min(times), "max_us": max(times)}
        predicted = None if chance is None else 1e6 * chance
        found.append(
            {"op": op, "impl": name, "case": case, **measured, "n": len(times), "predicted_us": predicted}
        )
    return found


if __name__ == "__main__":
    main()
