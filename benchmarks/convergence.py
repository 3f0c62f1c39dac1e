"""Does a codec change what a model learns? The same language model with each, seed by seed.

    python -m benchmarks.convergence --data shakespeare.txt --teams 8 --out results/convergence.json

Rows cross between two gloo ranks, encoded forward and backward; see `imbrex/reproduce/training.py`.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace

from imbrex.bench.results import describe_run, write_results
from imbrex.demo.corpus import load_corpus
from imbrex.reproduce.convergence import summary
from imbrex.reproduce.table_6 import row_of
from imbrex.reproduce.teams import train_all
from imbrex.reproduce.training import RANKS, VARIANTS, Size

QUESTION = "Does a codec change what a model learns?"
SLOW = "zfp2d-8"
FIRST = ("none", "fp16", "bf16", "fp8", "int8", "int8-truncated", "nvfp4", "dense")


def main() -> None:
    args = parse()
    size = Size()
    recipe = replace(size.recipe, steps=args.steps)
    size = replace(size, recipe=recipe, held_out=args.held_out, encode_on=args.encode_on)
    tasks = [(name, seed) for name, seed in order(args.seeds) if name in args.variants]
    corpus = load_corpus(args.data, length=recipe.length)
    found = train_all(
        tasks, corpus, size=size, teams=args.teams, stop_after_s=args.stop_after, folder=args.folder
    )
    sys.stdout.write("\n".join(summary(found)) + "\n")
    if args.out:
        words = [word for word in sys.argv[1:] if word not in ("--out", args.out)]
        run = describe_run("python -m benchmarks.convergence " + " ".join(words))
        write_results(args.out, QUESTION, run, [row_of(one, size) for one in found])


def order(seeds: int) -> list[tuple[str, int]]:
    """The slowest first, then what the claim needs, then the rest; seed by seed."""
    ranked = [SLOW], FIRST, [name for name in VARIANTS if name not in (SLOW, *FIRST)]
    return [(name, seed) for names in ranked for seed in range(seeds) for name in names]


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=QUESTION)
    parser.add_argument("--data", nargs="*", default=[], help="text; else the standard library's source")
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--held-out", type=int, default=64, help="batches of the last loss")
    parser.add_argument("--variants", nargs="*", default=list(VARIANTS), choices=list(VARIANTS))
    parser.add_argument("--teams", type=int, default=1, help=f"trainings side by side, {RANKS} cores each")
    parser.add_argument("--stop-after", type=float, default=3600.0, help="seconds; begin nothing later")
    parser.add_argument("--encode-on", default="cpu", help="device that ZFP runs on")
    parser.add_argument("--folder", default=None, help="keep every training's result here; resumes")
    parser.add_argument("--out", default=None, help="a results file")
    return parser.parse_args()


if __name__ == "__main__":
    main()
