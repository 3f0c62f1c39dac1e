"""How near is one MoE layer to its experts alone, and how far from the same over NCCL?
`make gpu-bench NAME=layer`.

Forward, and forward with backward, of four published models and four numbers of tokens on all GPUs of this
machine. `imbrex bench layer` shows one case by phase, on any machine.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch

from imbrex.bench.ceilings import measure_ceilings
from imbrex.bench.exchange.clock import run_ranks
from imbrex.bench.layer.race import OPS, OURS, PAUSE_CYCLES, Entry, Race, host_microseconds, phases, race
from imbrex.bench.results import describe_run

RESULTS = Path(__file__).parent / "results" / "layer.json"
MODELS = ("qwen2-moe", "deepseek-v3", "phi3.5-moe", "mixtral")
SMS = (16, 24, 32, 48, 64, 96, 120)
TOKENS = (16384, 2048, 8192, 32768)


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
                host_us = host_microseconds(call, PAUSE_CYCLES[op])
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


def entries_of(models: list[str], tokens: list[int], backward: list[int]) -> list[Entry]:
    """Forward everywhere; gradients, and variants of our layer, where `backward` says."""
    return [
        Entry(model=model, M=m, ops=OPS if m in backward else OPS[:1], variants=m in backward)
        for model in models
        for m in tokens
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--tokens", default=",".join(map(str, TOKENS)))
    parser.add_argument("--backward", default="16384", help="tokens of the gradients (16384)")
    parser.add_argument("--profile", metavar="FOLDER", help="tables of kernels there instead of times")
    args = parser.parse_args()
    world = torch.cuda.device_count()
    if world < 2:
        raise SystemExit("benchmarks/layer.py needs two GPUs or more; `imbrex bench layer` runs anywhere")
    tokens, backward = ([int(m) for m in words.split(",") if m] for words in (args.tokens, args.backward))
    entries = entries_of(args.models.split(","), tokens, backward)
    if args.profile:
        run_ranks(profile, world, entries, args.profile)
        return
    given = [f"--{name}={value}" for name, value in vars(args).items() if value != parser.get_default(name)]
    words = " ".join(word for word in given if not word.startswith("--out"))
    command = "make gpu-bench NAME=layer" + (f" ARGS='{words}'" if words else "")
    run = describe_run(command, measure_ceilings())
    rows = run_ranks(race, world, entries, args.repeats, str(args.out), run)
    print(f"{len(rows)} rows in {args.out}")


if __name__ == "__main__":
    main()
