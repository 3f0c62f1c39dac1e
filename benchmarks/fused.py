"""How much of what a layer's crossings cost does schedule 'fused' hide? `make gpu-bench NAME=fused`.

Forward, and forward with backward, of five published models on all GPUs of this machine: serial, fused, our
experts alone, and the layer over NCCL, in turns. The gain is serial over fused; what is hidden is that share
of the time that serial takes beyond our experts alone. Comet counts rows that stay as compute: its measure is
1 - (fused - fused without the wire) / (serial - serial without the wire). Without the wire means the same
kernels on as many rows of every expert, all of its rank's own tokens.

`--held SECONDS` runs every way of ours that long instead, one call after the other, and counts joules
(`imbrex.bench.layer.held`).
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch

from imbrex.bench.ceilings import measure_ceilings
from imbrex.bench.exchange.clock import run_ranks
from imbrex.bench.layer.held import hold_layers
from imbrex.bench.layer.race import (
    DY_BEFORE,
    FLOOR,
    FUSED_LOCAL,
    LOCAL,
    OPS,
    OURS,
    OURS_ALONE,
    OURS_FIRST,
    OURS_FUSED,
    Entry,
    race,
)
from imbrex.bench.results import describe_run

RESULTS = Path(__file__).parent / "results" / "fused.json"
MODELS = ("qwen2-moe", "qwen3-30b-a3b", "deepseek-v3", "phi3.5-moe", "mixtral")
TOKENS = (16384, 4096)
RIVALS = ("nccl-a2a", "nccl-agrs-bag")
FIRST = (0, 24)
"""Blocks that sum others' tokens beside down."""


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--tokens", default=",".join(map(str, TOKENS)))
    parser.add_argument("--ops", default=",".join(OPS))
    parser.add_argument("--only", default="", help="names of implementations, serial's among them")
    parser.add_argument("--held", type=float, default=0.0, help="seconds of each way, and count joules")
    args = parser.parse_args()
    world = torch.cuda.device_count()
    if world < 2:
        raise SystemExit("benchmarks/fused.py needs two GPUs or more")
    first = (f"{OURS_FIRST}{blocks}" for blocks in FIRST)
    only = OURS, OURS_FUSED, *first, DY_BEFORE, OURS_ALONE, LOCAL, FUSED_LOCAL, FLOOR, *RIVALS
    only = tuple(args.only.split(",")) if args.only else only
    tokens = [int(m) for m in args.tokens.split(",")]
    what = {"only": only, "ops": tuple(args.ops.split(","))}
    entries = [Entry(model=model, M=m, **what) for model in args.models.split(",") for m in tokens]
    given = [f"--{name}={value}" for name, value in vars(args).items() if value != parser.get_default(name)]
    words = " ".join(word for word in given if not word.startswith("--out"))
    command = "make gpu-bench NAME=fused" + (f" ARGS='{words}'" if words else "")
    run = describe_run(command, measure_ceilings())
    out = str(args.out)
    if args.held:
        rows = run_ranks(hold_layers, world, entries, args.held, out, run)
    else:
        rows = run_ranks(race, world, entries, args.repeats, out, run, "fused")
    print(f"{len(rows)} rows in {args.out}")


if __name__ == "__main__":
    main()
