"""All benchmarks that the GPUs of this machine can run, one after the other: `make gpu-bench NAME=every`.

    make gpu-bench NAME=every ARGS="--seconds 600 --out runs/gpu"

Each has a limit of its own, so that one that hangs takes nothing from the others, and nothing is begun that
may end behind `--seconds`. Its result file, in --out, is the committed one with the run put in; what it
prints is in a .log beside it. A table of what ran comes last.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).parent
TIERS = "--ranks-per-node 1 --tokens 4096 --width 7168 --inner 2048 --experts 256 --top-k 8 --dtype bfloat16"


@dataclass(frozen=True, kw_only=True, slots=True)
class Part:
    """A benchmark: its file, the result file, the least and the most GPUs that it is for, seconds that it may
    take, and its words. into: the word before the result file."""

    name: str
    results: str
    gpus: tuple[int, int]
    seconds: float
    words: str = ""
    into: str = "--out"
    nodes: bool = False

    def command(self, folder: Path) -> list[str]:
        path = str(HERE / f"{self.name}.py")
        start = [path]
        if self.nodes:  # every GPU is a host to NCCL
            start = [
                "-m",
                "imbrex",
                "netlab",
                "run",
                "--gpus",
                "--nodes",
                "2",
                "--ranks-per-node",
                "1",
                "--",
                path,
            ]
        return [sys.executable, *start, *self.words.split(), self.into, str(folder / self.results)]


MANY = 64
PARTS = (
    Part(name="decode_one", results="decode_one.json", gpus=(1, 1), seconds=90),
    Part(name="events", results="events.json", gpus=(1, 1), seconds=60),
    Part(name="serve", results="serve_one.json", gpus=(1, 1), seconds=300, words="--until 270"),
    Part(name="glue", results="glue.json", gpus=(1, 1), seconds=60, into="--json"),
    Part(name="gate", results="gate.json", gpus=(1, 1), seconds=60),
    Part(
        name="compiled_models",
        results="compiled_models.json",
        gpus=(1, 1),
        seconds=140,
        words="--repeats 10 --seconds 120",
    ),
    Part(
        name="host_time",
        results="host_time.json",
        gpus=(1, 1),
        seconds=150,
        words="--gpu 300 16 --repeats 200",
    ),
    Part(name="tiles", results="tiles.json", gpus=(1, 1), seconds=100),
    Part(name="experts", results="experts.json", gpus=(1, 1), seconds=300),
    Part(name="codecs", results="codecs.json", gpus=(1, 1), seconds=300),
    Part(name="captured", results="captured.json", gpus=(1, MANY), seconds=300, words="--seconds 200"),
    Part(name="peaks", results="peaks.json", gpus=(1, 2), seconds=120, words="--seconds 100"),
    Part(name="decode", results="decode.json", gpus=(2, 2), seconds=110),
    Part(name="events", results="events.json", gpus=(2, MANY), seconds=130, words="--layer"),
    Part(name="layer", results="layer.json", gpus=(2, MANY), seconds=300),
    Part(name="fused", results="fused.json", gpus=(2, MANY), seconds=200),
    Part(name="serve", results="serve.json", gpus=(2, MANY), seconds=300, words="--until 270"),
    Part(
        name="tiers", results="tiers.json", gpus=(2, 2), seconds=90, words=f"{TIERS} --seconds 60", nodes=True
    ),
    Part(
        name="exchange",
        results="exchange.json",
        gpus=(2, MANY),
        seconds=180,
        words="--parts main,small,sweep,beside --seconds 150",
        into="--json",
    ),
    Part(name="layer_fp8", results="layer_fp8.json", gpus=(2, MANY), seconds=120),
    Part(name="schedule_nvlink", results="schedule.json", gpus=(2, MANY), seconds=200),
    Part(name="placement_gpu", results="placement_gpu.json", gpus=(2, MANY), seconds=200),
    Part(
        name="megatron_models",
        results="megatron_models.json",
        gpus=(2, 2),
        seconds=300,
        words="--repeats 20 --rounds 1 --seconds 180",
    ),
    Part(name="models", results="models.json", gpus=(2, MANY), seconds=300, words="--seconds 270"),
)


def run(part: Part, folder: Path) -> int | None:
    """The exit status, or `None` where its time ran out. All that it has started ends with it."""
    committed = HERE / "results" / part.results
    if committed.exists() and not (folder / part.results).exists():
        shutil.copy(committed, folder)
    with (folder / f"{part.results}.log").open("w") as log:
        begun = subprocess.Popen(
            part.command(folder),
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env=os.environ | {"PYTHONUNBUFFERED": "1"},
        )
        try:
            return begun.wait(part.seconds)
        except subprocess.TimeoutExpired:
            return None
        finally:
            if begun.poll() is None:
                os.killpg(begun.pid, signal.SIGKILL)
                begun.wait()


def main() -> int:
    ask = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ask.add_argument(
        "--seconds", type=float, default=7200.0, help="nothing is begun that may end later (7200)"
    )
    ask.add_argument("--only", nargs="+", metavar="NAME", help="of the benchmarks, in this order")
    ask.add_argument("--out", type=Path, default=Path("runs/gpu"), help="a folder (runs/gpu)")
    ask.add_argument("--gpus", type=int, metavar="N", help="how many there are, where torch is not to say")
    ask.add_argument("--list", action="store_true", help="what would run, and how")
    given = ask.parse_args()
    gpus = given.gpus if given.gpus is not None else count_gpus()
    parts = chosen(gpus, given.only)
    if not parts:
        print(
            "no benchmark is for a machine without a GPU: `imbrex bench --help` has those of a CPU",
            file=sys.stderr,
        )
        return 2
    if given.list:
        for part in parts:
            print(f"{part.seconds:4.0f} s  {' '.join(part.command(given.out)[1:])}")
        return 0
    given.out.mkdir(parents=True, exist_ok=True)
    end, lines = time.monotonic() + given.seconds, []
    for part in parts:
        begin, left = time.monotonic(), end - time.monotonic()
        if part.seconds > left:
            lines.append(f"{part.name:16} left out: {left:.0f} s left, and it may take {part.seconds:.0f}")
            continue
        status = run(part, given.out)
        said = "its time ran out" if status is None else f"exit {status}"
        lines.append(f"{part.name:16} {said}, {time.monotonic() - begin:.0f} s, {given.out / part.results}")
        print(lines[-1], flush=True)
    print("", *lines, sep="\n")
    return int(not all(" exit 0," in line for line in lines))


def chosen(gpus: int, only: list[str] | None) -> list[Part]:
    """The parts for so many GPUs. Raises SystemExit where there is none of a name."""
    fitting = [part for part in PARTS if part.gpus[0] <= gpus <= part.gpus[1]]
    for name in only or ():
        if name not in {part.name for part in fitting}:
            raise SystemExit(f"--only {name}: for {gpus} GPUs there are {', '.join(p.name for p in fitting)}")
    return [part for name in only for part in fitting if part.name == name] if only else fitting


def count_gpus() -> int:
    import torch

    return torch.cuda.device_count()


if __name__ == "__main__":
    sys.exit(main())
