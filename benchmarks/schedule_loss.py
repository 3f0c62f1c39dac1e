"""How much longer than the best order does ScheMoE's take where its assumptions do not hold?

    python benchmarks/schedule_loss.py --out benchmarks/results/schedule.json

Simulated: `optsche` and `exact` on random times of the tasks, several families of them, 2, 3 and 4 chunks.
The backward's rows compare ScheMoE's order with the weights' gradients inside the experts' task, as the paper
has it, with the best order where they are free.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
from collections.abc import Callable

from imbrex.bench.results import describe_run, write_results
from imbrex.overlap import SCHEDULERS, Kind, Task, makespan
from imbrex.schedule.tasks import tasks

QUESTION = "Does it pay to move one chunk of tokens while another is computed?"
Drawn = dict[Kind, float]


def even(drawn: random.Random) -> Drawn:
    """The paper's assumption: a kind takes the same out and back, chunks are alike."""
    encode, decode = (drawn.uniform(0.02, 0.5) for _ in range(2))
    move, experts = (_wide(drawn) for _ in range(2))
    times = {Kind.encode_out: encode, Kind.encode_back: encode, Kind.decode_out: decode}
    return times | {
        Kind.decode_back: decode,
        Kind.move_out: move,
        Kind.move_back: move,
        Kind.experts: experts,
    }


def one_way(drawn: random.Random) -> Drawn:
    """Encoded on the way out only: the way back is twice as long."""
    times = even(drawn)
    return times | {Kind.encode_back: 0.0, Kind.decode_back: 0.0, Kind.move_back: 2 * times[Kind.move_out]}


def uneven(drawn: random.Random) -> Drawn:
    """Out and back differ."""
    back = even(drawn)
    return even(drawn) | {k: back[k] for k in (Kind.encode_back, Kind.move_back, Kind.decode_back)}


FAMILIES: dict[str, tuple[Callable[[random.Random], Drawn], bool, bool]] = {
    "as the paper assumes": (even, False, False),
    "codec on the way out only": (one_way, False, False),
    "out and back differ": (uneven, False, False),
    "chunk sizes differ, 0.2 to 1.8": (even, True, False),
    "both differ": (uneven, True, False),
    "backward, weights free": (even, False, True),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=QUESTION)
    parser.add_argument("--instances", type=int, default=200)
    parser.add_argument("--out", default=None, help="a results file")
    args = parser.parse_args()
    rows = []
    for family, (draw, ragged, weights) in FAMILIES.items():
        for degree in (2, 3, 4):
            number = args.instances if not weights or degree < 4 else args.instances // 4
            losses = [
                loss(draw, degree, random.Random(seed), ragged=ragged, weights=weights)
                for seed in range(number)
            ]
            measured = {
                "worse_share": sum(value > 1e-9 for value in losses) / number,
                "mean_percent": 100 * statistics.mean(losses),
                "max_percent": 100 * max(losses),
            }
            said = ", ".join(f"{name} {value:.3g}" for name, value in measured.items())
            sys.stdout.write(f"{family:32} {degree} chunks: {said}\n")
            case = {"family": family, "chunks": degree, "network": "simulated"}
            rows.append({"op": "order-loss", "impl": "optsche", "case": case, "n": number, **measured})
    if args.out:
        command = f"python benchmarks/schedule_loss.py --instances {args.instances}"
        write_results(args.out, QUESTION, describe_run(command), rows)


def loss(
    draw: Callable[[random.Random], Drawn], degree: int, drawn: random.Random, *, ragged: bool, weights: bool
) -> float:
    """optsche / best - 1."""
    kinds = draw(drawn)
    sizes = [drawn.uniform(0.2, 1.8) if ragged else 1.0 for _ in range(degree)]
    times = {task: kinds[task.kind] * sizes[task.chunk] for task in tasks(degree)}
    first = makespan(SCHEDULERS["optsche"](times), times)
    if weights:
        # Half of the experts' backward is the weights'.
        for chunk in range(degree):
            half = times[Task(kind=Kind.experts, chunk=chunk)] / 2
            times[Task(kind=Kind.experts, chunk=chunk)] = times[Task(kind=Kind.weights, chunk=chunk)] = half
    return first / makespan(SCHEDULERS["exact"](times), times) - 1


def _wide(drawn: random.Random) -> float:
    """Evenly on a logarithmic scale, 0.05 to 2."""
    return 0.05 * 40 ** drawn.random()


if __name__ == "__main__":
    main()
