"""What does the exchange give a training step of Megatron-Core? `make gpu-bench NAME=megatron_models`.

Hybrid-EP's models at their published widths, of few layers, in Megatron-Core 0.16.1's own program
(`benchmarks/megatron_program.py`), experts over all ranks, a sequence of 4096 tokens a micro-batch. Ways to
move tokens: Megatron's all-to-all and all-gather, its flex dispatcher over our `deep_ep` with both back ends,
and imbrex's layer in its spec. Experts are imbrex's in all of these, since the wheel alone has only a loop
over experts, so the exchange alone differs; `alltoall-megatron` has Megatron's `GroupedMLP`, with torch's
`grouped_mm` for the package that it wants. The program is `ddp` (its DistributedDataParallel) or `fsdp`
(Megatron-FSDP, everything sharded; experts have no replica on two ranks, so of them nothing is).

What was cut, by bytes a rank on two GPUs: a weight with its float32 gradient, master copy and both moments
takes 18 bytes, so DeepSeek-V3's layer takes 5.64 billion weights of experts, 101.5 GB, and one layer of 61
fits 141 GB (gradients on their way take 11 GB more); Qwen3-235B's takes 1.21 billion, 21.7 GB, and four of 94
do. Vocabularies are cut as layers are; DeepSeek-V3's dense layers and its multi-token prediction are left
out. Under Megatron-FSDP, all ways alike, DeepSeek-V3 has 128 of its 256 experts, eight a token as ever: with
all of them its reduction, a copy of their float32 gradients (22.5 GB), did not fit. That copy is left out
since, for it is wrong where experts have no replica (`leave_out_lone_reductions`): by count 65 GB are used,
and 120 with all experts, beside what the process itself takes. Random weights and tokens, bfloat16; the first
steps' losses of all ways of a program agree within `TOLERANCE`.

TFLOP/s of a GPU are those of `Published.flops`. Ranks are started anew after a way that fails or hangs, so
that it takes nothing from the others. Wants the wheels of megatron-core 0.16.1 and einops, and 141 GB a GPU.
"""

from __future__ import annotations

import argparse
import gc
import importlib.metadata
import json
import os
import statistics
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from benchmarks.megatron_program import MODELS, WAYS, Published, prepare, run
from torch.multiprocessing.spawn import start_processes

from imbrex.bench.ceilings import measure_ceilings
from imbrex.bench.exchange.clock import ENVIRONMENT
from imbrex.bench.results import describe_run, write_results

QUESTION = "What does the exchange give a training step of Megatron-Core?"
RESULTS = Path(__file__).parent / "results" / "megatron_models.json"
CASES = ("deepseek-v3:fsdp", "deepseek-v3:ddp", "qwen3-235b-a22b:ddp")
SHARDED = ("alltoall", "hybridep", "imbrex", "deepep")
"""The ways in which the sharded program is run: those of the article, and imbrex's."""
LATER = ("allgather", "alltoall-megatron")
"""The ways that come behind all others of all cases, and are lost first where time runs short."""
TOLERANCE = 0.005
"""How far the losses of the first steps may be from the first way's, in parts of them: bfloat16 rounds a
value by up to 0.004, and a loss is the mean of thousands."""


@dataclass(frozen=True, slots=True)
class Task:
    """A way to train one model in one program."""

    model: str
    program: str
    way: str

    def __str__(self) -> str:
        return f"{self.model} {self.program} {self.way}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """How ways are run. limit, start: seconds of one, and of the ranks' start. end: no way begins behind this
    moment of the monotonic clock. around: what surrounds a rank's ways."""

    world: int
    models: Mapping[str, Published] = field(default_factory=lambda: MODELS)
    device: str = "cuda"
    microbatches: int = 4
    warm: int = 3
    repeats: int = 5
    limit: float = 60.0
    start: float = 90.0
    end: float = float("inf")
    around: Callable[[], AbstractContextManager[None]] = nullcontext


def rank_work(rank: int, folder: str, tasks: Sequence[Task], plan: Plan) -> None:
    """Run the tasks, and tell the parent by lines of a file. A rank whose way fails ends."""
    number = None
    try:
        device = _join(rank, folder, plan)
        with plan.around():
            for number, task in enumerate(tasks):
                if rank == 0:
                    _tell(folder, {"begins": number})
                figures = run(
                    plan.models[task.model],
                    task.way,
                    task.program,
                    microbatches=plan.microbatches,
                    warm=plan.warm,
                    repeats=plan.repeats,
                    device=device,
                )
                if rank == 0:
                    _tell(folder, {"ends": number, **figures})
                dist.barrier()  # that is told before another rank fails in the next way
    except BaseException as error:  # noqa: BLE001 (it is told, and the other ways are run)
        last = traceback.extract_tb(error.__traceback__)[-1]
        where = f"{type(error).__name__} at {Path(last.filename).name}:{last.lineno}"
        _tell(
            folder, {"fails": number, "error": f"rank {rank}, {where}: {' '.join(str(error).split())[:120]}"}
        )
        os._exit(1)
    os._exit(0)


def _join(rank: int, folder: str, plan: Plan) -> torch.device:
    """The rank's device, once it has met the others."""
    device = torch.device("cuda", rank) if plan.device == "cuda" else torch.device(plan.device)
    settings: dict[str, Any] = {"rank": rank, "world_size": plan.world}
    if plan.device == "cuda":
        torch.cuda.set_device(device)
    backend = "nccl" if plan.device == "cuda" else "gloo"
    dist.init_process_group(backend, init_method=f"file://{folder}/store", **settings)
    prepare(plan.world, device)
    return device


def _tell(folder: str, event: dict[str, Any]) -> None:
    with open(Path(folder) / "events", "a", encoding="utf-8") as file:
        file.write(json.dumps(event) + "\n")


def compete(tasks: Sequence[Task], plan: Plan) -> Iterator[tuple[Task, dict[str, Any] | str]]:
    """The figures of every task as it ends, or words on why it failed; one that failed is not begun again.

    Raises RuntimeError where the ranks end before any task.
    """
    left = list(tasks)
    while left and time.monotonic() < plan.end:
        for number, answer in _attempt(tuple(left), plan):
            if number is None:
                raise RuntimeError(f"Megatron's ranks: {answer}")
            task = left[number]
            yield task, answer
            done = number + 1
            if isinstance(answer, str):
                left = [other for other in left[done:] if other != task]
                break
        else:
            return


def _attempt(tasks: Sequence[Task], plan: Plan) -> Iterator[tuple[int | None, dict[str, Any] | str]]:
    """The answers of ranks that are started once, until one way fails."""
    with tempfile.TemporaryDirectory() as folder:
        method = "spawn" if plan.device == "cuda" else "fork"
        work = folder, tasks, plan
        # A fork that collected a group of this process would wait for threads that it does not have.
        gc.collect()
        ranks = start_processes(rank_work, work, nprocs=plan.world, join=False, start_method=method)
        assert ranks is not None
        processes: list[Any] = list(ranks.processes)
        try:
            yield from _answers(Path(folder) / "events", processes, plan)
        finally:
            for process in processes:
                process.kill()
            for process in processes:
                process.join()


def _answers(
    path: Path, processes: Sequence[Any], plan: Plan
) -> Iterator[tuple[int | None, dict[str, Any] | str]]:
    running, heard, seconds, since = None, 0, plan.start, time.monotonic()
    while True:
        ended = not any(process.is_alive() for process in processes)
        lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
        for line in lines[heard:]:
            event = json.loads(line)
            if "begins" in event:
                running, seconds, since = event["begins"], plan.limit, time.monotonic()
                if time.monotonic() > plan.end:
                    return
            elif "fails" in event:
                yield event["fails"], event["error"]
                return
            else:
                yield event["ends"], event
                running = None
        heard = len(lines)
        if ended and running is None and heard:
            return
        if ended or time.monotonic() > since + seconds:
            yield running, "ended without a word" if ended else f"no answer within {seconds:.0f} s"
            return
        time.sleep(0.05)


class Board:
    """The rows of all ways that ended, and the sentences of those that failed."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.heard: dict[Task, list[dict[str, Any]]] = {}
        self.first: dict[tuple[str, int], tuple[Task, list[float]]] = {}
        self.failed: dict[Task, str] = {}

    def hear(self, task: Task, answer: dict[str, Any] | str) -> None:
        """Take the answer of a task; one whose first losses are not those of the others has failed."""
        if isinstance(answer, dict):
            same = task.model, self._experts(task)
            first, losses = self.first.setdefault(same, (task, answer["losses"]))
            off = max(abs(a / b - 1) for a, b in zip(answer["losses"], losses, strict=True))
            if off <= TOLERANCE:
                self.heard.setdefault(task, []).append(answer)
                return
            answer = f"losses {answer['losses']} are not those of {first}, {losses}"
        self.failed[task] = answer
        self.heard.pop(task, None)

    def _experts(self, task: Task) -> int:
        return self.plan.models[task.model].under(task.program).settings["num_moe_experts"]

    def rows(self) -> list[dict[str, Any]]:
        return [self._row(task, rounds) for task, rounds in self.heard.items()]

    def _row(self, task: Task, rounds: Sequence[dict[str, Any]]) -> dict[str, Any]:
        published, plan = self.plan.models[task.model], self.plan
        steps = [1e6 * step for one in rounds for step in one["steps"]]
        gradients = [1e6 * part for one in rounds for part in one["gradients"]]
        tokens = plan.microbatches * published.sequence
        step_us = statistics.median(steps)
        return {
            "op": "step",
            "impl": task.way,
            "case": {
                "model": task.model,
                "program": task.program,
                "experts": WAYS[task.way].experts,
                "layers": published.layers,
                "E": self._experts(task),
                "T": published.sequence,
                "microbatches": plan.microbatches,
                "W": plan.world,
                "dtype": "bf16",
            },
            "median_us": round(step_us, 1),
            "min_us": round(min(steps), 1),
            "max_us": round(max(steps), 1),
            "n": len(steps),
            "gradients_us": round(statistics.median(gradients), 1),
            "tokens_per_s": round(1e6 * tokens / step_us),
            "tflops": round(published.flops() * tokens / step_us / 1e6, 1),
            "peak_gib": round(max(one["peak_gib"] for one in rounds), 2),
            "losses": [round(loss, 5) for loss in rounds[0]["losses"]],
        }

    def table(self) -> str:
        """A line for every way: milliseconds of a step with their spread, of that gradients, TFLOP/s of a
        GPU, how many times as fast as all-to-all, peak GiB; and one for every failure, without its reason."""
        rows = {Task(r["case"]["model"], r["case"]["program"], r["impl"]): r for r in self.rows()}
        lines = []
        for task, row in rows.items():
            base = rows.get(Task(task.model, task.program, "alltoall"))
            over = f"{base['median_us'] / row['median_us']:.3f}" if base else "-"
            step, least, largest = (row[name] / 1e3 for name in ("median_us", "min_us", "max_us"))
            lines.append(
                f"{task!s:42} {step:7.1f} ms ({least:.1f}-{largest:.1f}, n {row['n']}) gradients "
                f"{row['gradients_us'] / 1e3:7.1f}  {row['tflops']:6.1f} TFLOP/s  x{over}  "
                f"{row['peak_gib']:.1f} GiB  loss {row['losses'][-1]}"
            )
        return "\n".join([*lines, *(f"{task!s:42} FAILED" for task in self.failed)])


def tasks_of(cases: str, ways: str) -> list[Task]:
    """The tasks of one round: every way of every case `model:program`, those of `LATER` behind all others,
    and last DeepEP's interface in the sharded program."""
    pairs = [case.split(":") for case in cases.split(",")]
    tasks = [
        Task(model, program, way)
        for model, program in pairs
        for way in ways.split(",")
        if program != "fsdp" or way in SHARDED
    ]
    return sorted(tasks, key=_turn)


def _turn(task: Task) -> int:
    if (task.program, task.way) == ("fsdp", "deepep"):
        return len(LATER) + 1
    return LATER.index(task.way) + 1 if task.way in LATER else 0


def options() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--repeats", type=int, default=5, help="steps of a round")
    parser.add_argument("--rounds", type=int, default=4, help="how often all ways take their turn")
    parser.add_argument("--microbatches", type=int, default=4)
    parser.add_argument("--cases", default=",".join(CASES), help="model:program")
    parser.add_argument("--ways", default=",".join(WAYS))
    parser.add_argument("--layers", type=int, help="so many of each model, in the place of what fits 141 GB")
    parser.add_argument("--limit", type=float, default=60.0, help="seconds of one way")
    parser.add_argument("--seconds", type=float, default=900.0, help="begin no way after so many")
    return parser


def main() -> None:
    parser = options()
    args = parser.parse_args()
    begun, world = time.monotonic(), torch.cuda.device_count()
    if world < 2:
        raise SystemExit("benchmarks/megatron_models.py needs two GPUs")
    words = [f"--{name}={value}" for name, value in vars(args).items() if value != parser.get_default(name)]
    said = " ".join(word for word in words if not word.startswith("--out"))
    command = "make gpu-bench NAME=megatron_models" + (f" ARGS='{said}'" if said else "")
    os.environ.update(ENVIRONMENT)
    described = describe_run(command, measure_ceilings())
    described["versions"]["megatron-core"] = importlib.metadata.version("megatron-core")
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    plan = Plan(
        world=world,
        models={name: replace(model, layers=args.layers or model.layers) for name, model in MODELS.items()},
        microbatches=args.microbatches,
        repeats=args.repeats,
        limit=args.limit,
        end=begun + args.seconds,
    )
    board = Board(plan)
    for task, answer in compete(tasks_of(args.cases, args.ways) * args.rounds, plan):
        board.hear(task, answer)
        told = isinstance(answer, dict) and f"{statistics.median(answer['steps']) * 1e3:.1f} ms"
        words = f"failed: {board.failed[task]}" if task in board.failed else told
        print(f"{time.monotonic() - begun:5.0f} s  {task} {words}", flush=True)
        write_results(args.out, QUESTION, described, board.rows())
    print(board.table())
    print(f"{len(board.rows())} rows in {args.out}")


if __name__ == "__main__":
    main()
