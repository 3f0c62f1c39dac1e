"""What do the experts of one rank cost? `make gpu-bench NAME=experts`, on one Hopper GPU.

    make gpu-bench NAME=experts ARGS="--trace deepseek_v2_lite_routing.npz:law_ids"

Forward, forward from unpermuted tokens, forward and backward, the grouped GEMMs alone and decode, for the
published models on one of four ranks, beside torch, eager and compiled; all rows into one run.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from imbrex.bench.experts import command as bench
from imbrex.bench.results import describe_run, write_results

RESULTS = Path(__file__).parent / "results" / "experts.json"
COMMAND = "make gpu-bench NAME=experts"
MODELS = "--model=mixtral,qwen2-moe,phi3.5-moe,deepseek-v3,qwen3-30b-a3b"
REPEATS = {16384: 20, 65536: 10, 4096: 20, 1024: 20}
"""By rows of a rank, in the order that they are measured."""
PAIR = "--impls=imbrex,imbrex-fp8,imbrex-fp8-rows,torch"
OPS = "--ops=grouped_gemm,ffn,ffn_unpermuted,ffn_training"
DECODE = ["--model=deepseek-v3", "--rows=64,128,256,512", "--ops=decode", PAIR]
BETWEEN = {"deepseek-v3": 10240, "qwen3-30b-a3b": 5120, "qwen2-moe": 2560}
"""Rows of a rank of which an expert gets 160 in the mean: tiles of 192 (kernels/gemm/tall.cuh)."""
COMPILED = [MODELS, "--rows=16384", "--skew=uniform", "--ops=ffn,ffn_unpermuted,ffn_training", "--repeats=10"]
"""With torch compiled, whose compilation takes longer than all measurements: last."""


def sweep(trace: str | None) -> list[list[str]]:
    """Arguments of `imbrex bench experts`, a list for every call. trace: adds its load to the skews."""
    recorded = [f"load:{trace}"] if trace else []
    skews = f"--skew={','.join(['balanced', 'uniform', 'zipf:0.6', *recorded])}"
    rows = [
        [MODELS, f"--rows={rows}", skews, OPS, PAIR, f"--repeats={times}"] for rows, times in REPEATS.items()
    ]
    rows += [
        [f"--model={model}", f"--rows={number}", skews, OPS, PAIR, "--repeats=20"]
        for model, number in BETWEEN.items()
    ]
    return [*rows, [*DECODE, f"--skew={','.join(['uniform', *recorded])}"], COMPILED]


def main() -> None:
    """Rows are written after every call, so that a run that is cut short keeps what it has."""
    own = argparse.ArgumentParser()
    own.add_argument(
        "--trace", metavar="FILE[:ARRAY[:LAYER]]", help="ids that a model's gate chose; adds its skew"
    )
    own.add_argument("--out", type=Path, default=RESULTS)
    options = own.parse_args()
    trace = options.trace
    parser = argparse.ArgumentParser()
    bench.add_arguments(parser)
    rows: list[dict[str, Any]] = []
    for words in sweep(trace):
        rows += bench.measure(parser.parse_args(words))
        command = f'{COMMAND} ARGS="--trace {Path(trace).name}"' if trace else COMMAND
        run = describe_run(command, bench.ceilings_of(rows))
        write_results(options.out, bench.QUESTION, run, rows)


if __name__ == "__main__":
    main()
