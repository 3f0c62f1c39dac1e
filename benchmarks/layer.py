"""How near is one MoE layer to its experts alone, and how far from the same over NCCL?
`make gpu-bench NAME=layer`.

Forward, and forward with backward, of four published models and four numbers of tokens on all GPUs of this
machine. `imbrex bench layer` shows one case by phase, on any machine.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch
from ceilings import measure_ceilings

from imbrex.cli.exchange_clock import run_ranks
from imbrex.cli.layer_race import OPS, OURS, Entry, Race, host_microseconds, phases, race
from imbrex.cli.results import describe_run, write_results

RESULTS = Path(__file__).parent / "results" / "layer.json"
MODELS = ("mixtral", "qwen2-moe", "phi3.5-moe", "deepseek-v3")
SMS = (16, 24, 32, 48, 64, 96, 120)
TOKENS = (2048, 8192, 16384, 32768)


def profile(rank: int, world: int, entries: list[Entry], folder: str) -> None:
    """What runs on the GPU in three calls of ours and of the all-to-all, by kernel."""
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as listen

    for entry in entries:
        runner = Race(entry.model, rank, world)
        found = phases(runner, entry, SMS)
        if rank == 0:
            print(
                entry.model,
                entry.M,
                *(f"{name}: {us:.0f}" for name, us in found.items()),
                sep="  ",
                flush=True,
            )
        inputs = runner.inputs(entry)
        for op in entry.ops:
            for name, call in runner.calls(op, inputs).items():
                if name not in (OURS, "nccl-a2a"):
                    continue
                host_us = host_microseconds(call, op)
                if rank == 0:
                    print(entry.model, op, name, f"host {host_us:.0f} us", flush=True)
                with listen(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as heard:
                    for _ in range(3):
                        call()
                    torch.cuda.synchronize()
                if rank == 0:
                    table = heard.key_averages().table(
                        sort_by="cuda_time_total", row_limit=40, max_name_column_width=60
                    )
                    Path(folder, f"{entry.model}-{op}-{name}.txt").write_text(table)
        runner.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--tokens", default=",".join(map(str, TOKENS)))
    parser.add_argument("--ops", default=",".join(OPS))
    parser.add_argument("--sms", type=int, help="multiprocessors that move rows (the transport's own)")
    parser.add_argument("--profile", metavar="FOLDER", help="tables of kernels there instead of times")
    args = parser.parse_args()
    world = torch.cuda.device_count()
    if world < 2:
        raise SystemExit("benchmarks/layer.py needs two GPUs or more; `imbrex bench layer` runs anywhere")
    entries = [
        Entry(model=model, M=int(tokens), ops=tuple(args.ops.split(",")))
        for model in args.models.split(",")
        for tokens in args.tokens.split(",")
    ]
    if args.profile:
        run_ranks(profile, world, entries, args.profile)
        return
    ceilings = measure_ceilings()
    rows = run_ranks(race, world, entries, args.repeats, args.sms)
    command = "make gpu-bench NAME=layer"
    if given := [word for word in sys.argv[1:] if "/" not in word and word != "--out"]:
        command += f" ARGS='{' '.join(given)}'"
    write_results(args.out, "layer", describe_run(command, ceilings), rows)
    print(f"{len(rows)} rows in {args.out}")


if __name__ == "__main__":
    main()
