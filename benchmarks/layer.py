"""What does one MoE layer cost, phase by phase, with each transport? `make gpu-bench NAME=layer`.

Runs `imbrex bench layer` for published models on all GPUs of this machine, or for two small shapes without
any, and puts all rows into one run of the result file.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from ceilings import measure_ceilings

from imbrex.cli.results import describe_run, write_results

RESULTS = Path(__file__).parent / "results" / "layer.json"
COMMAND = "make gpu-bench NAME=layer"
ON_GPUS = [
    [f"--model={model}", *more]
    for model in ("mixtral", "qwen2-moe", "phi3.5-moe", "deepseek-v3")
    for more in (["--tokens=2048,8192,16384"], ["--tokens=8192", "--backward"])
]
ON_CPUS = [
    [f"--model={model}", "--ranks=2", "--scale=32", "--tokens=512", *more]
    for model in ("mixtral", "qwen2-moe")
    for more in ([], ["--backward"])
]


def run_case(words: list[str]) -> list[dict]:
    """The rows of one command."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "case.json"
        command = [sys.executable, "-m", "imbrex", "bench", "layer", *words, f"--json={file}"]
        print("imbrex bench layer", *words, flush=True)
        subprocess.run(command, check=True)
        return [{k: v for k, v in row.items() if k != "run"} for row in json.loads(file.read_text())["rows"]]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--only", default="", help="run the cases whose command contains this")
    args = parser.parse_args()
    cases = ON_GPUS if torch.cuda.is_available() else ON_CPUS
    rows = []
    for words in cases:
        if args.only in " ".join(words):
            rows += run_case([*words, f"--repeats={args.repeats}"])
    command = COMMAND + (f" ARGS='--only {args.only}'" if args.only else "")
    write_results(args.out, "layer", describe_run(command, measure_ceilings()), rows)
    print(f"{len(rows)} rows in {args.out}")


if __name__ == "__main__":
    main()
