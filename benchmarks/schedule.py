"""Does it pay to move one chunk of tokens while another is computed? Schedules beside `serial`.

    imbrex netlab run --nodes 2 --ranks-per-node 1 --inter 1gbit -- benchmarks/schedule.py
    imbrex netlab run --nodes 2 --ranks-per-node 1 --inter 1gbit -- benchmarks/schedule.py --sweep 0:10
    imbrex netlab run ... -- benchmarks/schedule.py --sweep 0:20 --in-turns

`optsche-2-joined` is `optsche-2` with the weights' gradients computed with the rows', to see what it gives to
leave them for the waits.

Forward and backward of the strategy apart, router excluded; the median over calls of the slowest rank; all
schedules in turn within a round, so that what else the machine does meets all of them alike. Predictions come
from a profile of the same process. `--sweep` takes some of the configurations in `SWEEP` and says for each
what `auto` predicts, what it then takes, and what the best of the others takes. With `--in-turns` nothing is
predicted: a round goes through all of them, so that a minute in which the machine does something else costs
each of them a round; beside the seconds stand those of a processor, all ranks together.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

import imbrex
from imbrex import overlap
from imbrex.bench.results import describe_run, write_results
from imbrex.launch.local import meet
from imbrex.launch.netlab import started_by
from imbrex.overlap.pipelined import Pipelined, parameters_of
from imbrex.overlap.profiler import measure
from imbrex.runtime.waits import leave
from imbrex.schedule.choice import Choice, choose, predict
from imbrex.schedule.profile import Profile
from imbrex.schedule.schedulers import Scheduler

QUESTION = "Does it pay to move one chunk of tokens while another is computed?"
DEGREES = (1, 2, 4, 8)
LISTS = ("experts", "codec", "transport")
"""Options that take several, as in `--codec identity,fp8`."""
JOINED = "-joined"
SWEEP = [
    {"tokens": tokens, "width": width, "inner": inner, "codec": codec, "top_k": top_k}
    for tokens, width, inner, codec, top_k in (
        (2048, 512, 88, "identity", 1),
        (2048, 512, 176, "identity", 1),
        (2048, 512, 352, "identity", 1),
        (2048, 512, 704, "identity", 1),
        (2048, 512, 176, "bf16", 1),
        (2048, 512, 176, "int8", 1),
        (2048, 512, 352, "int8", 1),
        (2048, 512, 176, "fp8", 1),
        (1024, 512, 176, "identity", 1),
        (1024, 512, 352, "identity", 1),
        (1024, 512, 352, "identity", 2),
        (2048, 512, 176, "identity", 2),
        (2048, 256, 352, "identity", 1),
        (4096, 256, 176, "identity", 1),
        (4096, 256, 176, "int8", 1),
        (1024, 1024, 176, "identity", 1),
        (1024, 1024, 352, "identity", 1),
        (1024, 1024, 352, "bf16", 2),
        (3072, 512, 176, "identity", 1),
        (1536, 768, 264, "identity", 1),
    )
]


@dataclass(frozen=True, kw_only=True, slots=True)
class Layer:
    """A layer and what it is given."""

    moe: imbrex.MoELayer
    x_TD: Tensor
    routing: imbrex.Routing

    def profile(self) -> Profile:
        """The times of its tasks, measured."""
        parameters = parameters_of(self.moe.experts)
        moe = self.moe
        return measure(moe.exchange, moe.experts, self.x_TD, self.routing, parameters, degrees=DEGREES)


class Took(NamedTuple):
    """Seconds of the slowest rank, and of a processor, of all ranks together."""

    wall: float
    processor: float

    def __add__(self, other: Took) -> Took:  # pyright: ignore[reportIncompatibleMethodOverride]
        return Took(self.wall + other.wall, self.processor + other.processor)


Rounds = list[tuple[Took, Took]]
"""A forward and a backward each."""


def main() -> None:
    args = parse()
    device = meet(args.store)
    group = dist.group.WORLD
    assert group is not None
    if args.sweep:
        first, last = map(int, args.sweep.split(":"))
        configurations = [argparse.Namespace(**{**vars(args), **more}) for more in SWEEP[first:last]]
        if args.in_turns:
            written = in_turns(args.rounds, [(one, make_layer(one, group, device)) for one in configurations])
        else:
            written = [row for one in configurations for row in sweep(one, make_layer(one, group, device))]
    else:
        lists = itertools.product(*(vars(args)[name].split(",") for name in LISTS))
        each = [argparse.Namespace(**{**vars(args), **dict(zip(LISTS, one, strict=True))}) for one in lists]
        written = [row for one in each for row in compare(one, make_layer(one, group, device))]
    if group.rank() == 0 and args.out:
        words = [word for word in sys.argv[1:] if word not in ("--out", args.out, "--store", args.store)]
        command = " ".join((started_by(), "benchmarks/schedule.py", *words))
        write_results(args.out, QUESTION, describe_run(command, gpus=group.size()), written)
    leave()


def make_layer(args: argparse.Namespace, group: dist.ProcessGroup, device: torch.device) -> Layer:
    torch.manual_seed(0)
    config = imbrex.MoEConfig(
        hidden_size=args.width, intermediate_size=args.inner, num_experts=2 * group.size(), top_k=args.top_k
    )
    kind: dict[str, Any] = {"device": device, "dtype": getattr(torch, args.dtype)}
    pieces = {"transport": args.transport, "codec": args.codec, "experts": args.experts}
    moe = imbrex.MoELayer(config, group, **pieces, **kind)
    x_TD = torch.randn(args.tokens, args.width, **kind)
    with torch.no_grad():
        routing = moe.gate(x_TD)
    routing = imbrex.Routing(ids_TK=routing.ids_TK, weights_TK=routing.weights_TK)
    return Layer(moe=moe, x_TD=x_TD, routing=routing)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=QUESTION)
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--inner", type=int, default=176)
    parser.add_argument("--top-k", type=int, default=1)
    parser.add_argument("--codec", default="identity")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--transport", default="alltoall")
    parser.add_argument("--experts", default="grouped", help="how they compute: grouped, kernels, loop")
    parser.add_argument(
        "--schedules", default="serial,megatron,fastermoe,tutel,optsche-2,optsche-4,optsche-8,exact-4"
    )
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--sweep", default=None, metavar="FIRST:LAST", help="configurations of SWEEP")
    parser.add_argument(
        "--in-turns", action="store_true", help="of a sweep: all in every round, no predictions"
    )
    parser.add_argument("--network", default="netlab", help="its name in the result file")
    parser.add_argument("--rates", default="1gbit between nodes", help="said in the result file")
    parser.add_argument("--store", default=None, help="a file where ranks meet, instead of MASTER_ADDR")
    parser.add_argument("--out", default=None, help="a results file")
    return parser.parse_args()


def compare(args: argparse.Namespace, layer: Layer) -> list[dict]:
    """All schedules asked for, on one configuration."""
    profile = layer.profile()
    strategies = {name: strategy(name, profile) for name in args.schedules.split(",")}
    rounds = time_all(args.rounds, layer, strategies)
    world = dist.get_world_size()
    return report(args, rounds, profile, world) if dist.get_rank() == 0 else []


def strategy(name: str, profile: Profile):
    """By name; with the profile's times where the scheduler looks at them."""
    if name.endswith(JOINED):
        scheduler, degree = name.removesuffix(JOINED).rsplit("-", 1)
        return Pipelined(joined(scheduler), int(degree), name=name)
    made = overlap.make(name)
    if not isinstance(made, Pipelined) or not name.startswith("exact"):
        return made
    return chosen(profile, made.scheduler, made.degree, name)


def joined(scheduler: str) -> Scheduler:
    """The order without tasks for the weights' gradients, which then belong to `experts`."""

    def without(times: overlap.Times) -> overlap.Order:
        found = overlap.SCHEDULERS[scheduler](times)
        kept = tuple(task for task in found.compute if task.kind != overlap.Kind.weights)
        return overlap.Order(compute=kept, moves=found.moves)

    return without


def chosen(profile: Profile, scheduler: Any, degree: int, name: str) -> Pipelined:
    return Pipelined(scheduler, degree, times=profile.even_times(degree), name=name)


def time_all(rounds: int, layer: Layer, strategies: dict) -> dict[str, Rounds]:
    """What every round took by schedule, two more before that are not kept."""
    every: dict[str, Rounds] = {name: [] for name in strategies}
    for _ in range(rounds + 2):
        for name, one in strategies.items():
            every[name].append(time_once(layer, one))
    return {name: some[2:] for name, some in every.items()}


def time_once(layer: Layer, one: Any) -> tuple[Took, Took]:
    """One forward and one backward."""
    x_TD = layer.x_TD.clone().requires_grad_()
    weights_TK = layer.routing.weights_TK.clone().requires_grad_()
    routing = imbrex.Routing(ids_TK=layer.routing.ids_TK, weights_TK=weights_TK)
    moe, outputs = layer.moe, []
    forward = _timed(
        layer, lambda: outputs.append(one.run(x_TD, routing, moe.exchange, moe.experts, None).y_TD)
    )
    backward = _timed(layer, lambda: outputs[0].backward(torch.ones_like(outputs[0])))
    moe.zero_grad()
    return forward, backward


def _timed(layer: Layer, step: Callable[[], object]) -> Took:
    exchange_counts = layer.moe.exchange.transport.exchange_counts
    exchange_counts(torch.zeros(2, dtype=torch.int64))
    begin, used = time.perf_counter(), time.process_time()
    step()
    if layer.x_TD.is_cuda:
        torch.cuda.synchronize()
    ours = time.perf_counter() - begin, time.process_time() - used
    all_WX = exchange_counts(torch.tensor([int(1e9 * part) for part in ours])).reshape(-1, 2)
    return Took(1e-9 * int(all_WX[:, 0].max()), 1e-9 * int(all_WX[:, 1].sum()))


def in_turns(rounds: int, layers: list[tuple[argparse.Namespace, Layer]]) -> list[dict]:
    """All schedules of all layers, each once a round; two rounds before are not kept."""
    names = ("serial", *(f"optsche-{degree}" for degree in DEGREES if degree > 1))
    every: dict[tuple[int, str], Rounds] = {}
    for number in range(rounds + 2):
        for at, (_, layer) in enumerate(layers):
            for name in names:
                took = time_once(layer, overlap.make(name))
                if number >= 2:
                    every.setdefault((at, name), []).append(took)
    written: list[dict] = []
    for at, (args, layer) in enumerate(layers):
        case = case_of(args, layer.moe.ranks.expert_size)
        for name in names:
            written += rows_of("layer", name, case, every[at, name], None)
            both = [1e3 * part for part in medians_of(every[at, name])]
            if dist.get_rank() == 0:
                sys.stdout.write(f"{case} {name}: {both[0]:.1f} and {both[1]:.1f} ms\n")
    return written


def sweep(args: argparse.Namespace, layer: Layer) -> list[dict]:
    """What `auto` predicts for one configuration, and what it and the others then take."""
    profile = layer.profile()
    choice = choose(profile, DEGREES)
    picked = f"{choice.scheduler}-{choice.degree}"
    names = [*(f"optsche-{degree}" for degree in DEGREES if degree > 1), "serial"]
    strategies = {name: strategy(name, profile) for name in names}
    strategies["auto"] = chosen(profile, overlap.SCHEDULERS[choice.scheduler], choice.degree, picked)
    rounds = time_all(args.rounds, layer, strategies)
    medians = {name: medians_of(r) for name, r in rounds.items()}
    best = min(medians, key=lambda name: sum(medians[name]))
    found = []
    for name in ("auto", *names[:-1]):
        guess = choice if name == "auto" else predict(profile, "optsche", int(name.split("-")[1]))
        found += rows_of("prediction", name, case_of(args, layer.moe.ranks.expert_size), rounds[name], guess)
    tasks = predict(replace(profile, whole={}), choice.scheduler, choice.degree)
    for row in found:
        row |= {"picked": picked, "best": best, "best_us": 1e6 * sum(medians[best])}
        row |= {"from_tasks_us": 1e6 * tasks.seconds} if row["impl"] == "auto" else {}
    if dist.get_rank() == 0:
        took = medians["auto"]
        off = [100 * (g / t - 1) for g, t in zip((choice.forward, choice.backward), took, strict=True)]
        both = 100 * (choice.seconds / sum(took) - 1)
        regret = 100 * (sum(took) / sum(medians[best]) - 1)
        sys.stdout.write(
            f"{args.tokens} x {args.width}, inner {args.inner}, {args.codec}, top-{args.top_k}: {picked} "
            f"{1e3 * took[0]:.1f} and {1e3 * took[1]:.1f} ms, predicted {off[0]:+.1f} % and {off[1]:+.1f} %, "
            f"both {both:+.1f} % (tasks alone {100 * (tasks.seconds / sum(took) - 1):+.1f}); best {best}, "
            f"{regret:.1f} % better; contention "
            f"{profile.contention.compute:.2f} {profile.contention.moves:.2f}; "
            + " ".join(f"{n} {1e3 * a:.0f}+{1e3 * b:.0f}" for n, (a, b) in medians.items())
            + "\n"
        )
        sys.stdout.flush()
    return found


def medians_of(rounds: Iterable[tuple[Took, Took]]) -> list[float]:
    return [statistics.median(took.wall for took in part) for part in zip(*rounds, strict=True)]


def case_of(args: argparse.Namespace, world: int) -> dict[str, Any]:
    case = {"T": args.tokens, "D": args.width, "F": args.inner, "K": args.top_k, "W": world}
    case |= {"codec": args.codec, "transport": args.transport, "dtype": args.dtype}
    case |= {"experts": args.experts} if args.experts != "grouped" else {}
    return case | {"network": args.network, "rates": args.rates}


def report(args: argparse.Namespace, rows: dict[str, Rounds], profile: Profile, world: int) -> list[dict]:
    alone = profile.times([profile.tokens]), profile.times([profile.tokens], backward=True)
    for name, times in zip(("forward", "backward"), alone, strict=True):
        said = ", ".join(f"{t.kind.name} {1e3 * s:.1f}" for t, s in times.items())
        sys.stdout.write(f"{name} alone, ms: {said}\n")
    pieces = f"{args.experts}, {args.codec}, {args.transport}"
    sys.stdout.write(f"{pieces}: {profile.contention}\nchosen: {choose(profile, DEGREES)}\n")
    written: list[dict] = []
    for name, rounds in rows.items():
        forward, backward = medians_of(rounds)
        scheduler, _, degree = name.rpartition("-")
        known = scheduler in overlap.SCHEDULERS
        guess = predict(profile, scheduler, int(degree)) if known else None
        said = f", predicted {1e3 * guess.forward:.1f} and {1e3 * guess.backward:.1f}" if guess else ""
        sys.stdout.write(f"{name:12} forward {1e3 * forward:7.1f} ms, backward {1e3 * backward:7.1f}{said}\n")
        written += rows_of("layer", name, case_of(args, world), rounds, guess)
    return written


def rows_of(op: str, name: str, case: dict, rounds: Rounds, guess: Choice | None) -> list[dict]:
    """Rows of a results file: both ways together, forward and backward, with what was predicted."""
    found = []
    guesses = {} if guess is None else {"forward": guess.forward, "backward": guess.backward}
    for way in ("both", "forward", "backward"):
        each = [r[0] + r[1] if way == "both" else r[way == "backward"] for r in rounds]
        times = [1e6 * took.wall for took in each]
        row = {"op": op if way == "both" else f"{op}-{way}", "impl": name, "case": case, "n": len(times)}
        row |= {"median_us": statistics.median(times), "min_us": min(times), "max_us": max(times)}
        row["processor_us"] = 1e6 * statistics.median(took.processor for took in each)
        if guess is not None:
            row["predicted_us"] = 1e6 * guesses.get(way, guess.seconds)
        found.append(row)
    return found


if __name__ == "__main__":
    main()
