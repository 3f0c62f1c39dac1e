"""Many small trainings side by side: teams of ranks that take the next one from a list."""

from __future__ import annotations

import json
import multiprocessing
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from datetime import timedelta
from multiprocessing.sharedctypes import Synchronized
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import spawn

from imbrex.demo.corpus import Corpus
from imbrex.launch.memory import check_memory
from imbrex.reproduce.training import RANKS, Size, train
from imbrex.runtime.waits import leave

Task = tuple[str, int]
"""A variant and a seed."""


def train_all(
    tasks: Sequence[Task],
    corpus: Corpus,
    *,
    size: Size,
    teams: int,
    stop_after_s: float = 1e9,
    folder: str | None = None,
) -> list[dict[str, Any]]:
    """Train every (variant, seed) with `teams` teams of `RANKS` processes of one thread each.

    No task is begun after `stop_after_s`; tasks that were not begun are missing in the results. folder: keep
    every result there as it comes; what it already has is not trained again.
    """
    # Processes that join on one host need no other interface, and a host may lack a name of its own.
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    os.environ["OMP_NUM_THREADS"] = "1"
    next_task = multiprocessing.get_context("spawn").Value("i", 0)
    with tempfile.TemporaryDirectory(prefix="imbrex-") as meeting:
        results_at = Path(folder or meeting)
        results_at.mkdir(parents=True, exist_ok=True)
        left = [task for task in tasks if not _result(results_at, task).exists()]
        more = (next_task, left, corpus, size, Path(meeting), results_at, time.time() + stop_after_s)
        if left:
            check_memory(min(teams, len(left)) * RANKS)
            spawn(_member, args=more, nprocs=min(teams, len(left)) * RANKS)
        paths = [_result(results_at, task) for task in tasks]
        return [json.loads(path.read_text()) for path in paths if path.exists()]


def _result(folder: Path, task: Task) -> Path:
    variant, seed = task
    return folder / f"{variant.replace(', ', '-').replace(' ', '-')}-{seed}.json"


def _member(
    process: int,
    counter: Synchronized,
    tasks: list[Task],
    corpus: Corpus,
    size: Size,
    meeting: Path,
    folder: Path,
    stop_at: float,
) -> None:
    torch.set_num_threads(1)
    team, rank = divmod(process, RANKS)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{meeting}/team-{team}",
        rank=rank,
        world_size=RANKS,
        timeout=timedelta(seconds=size.timeout_s),
    )
    while (number := _take(counter, len(tasks), stop_at, rank)) >= 0:
        variant, seed = tasks[number]
        result = train(variant, seed, corpus, size)
        if rank == 0:
            _tell(variant, seed, result)
            row = {"variant": variant, "seed": seed, "text": _text(corpus), **result}
            _result(folder, tasks[number]).write_text(json.dumps(row))
    dist.barrier()
    leave()


def _take(counter: Synchronized, count: int, stop_at: float, rank: int) -> int:
    """The next task of this team, the same on its ranks; -1 when there is none."""
    number = torch.tensor([-1])
    if rank == 0 and time.time() < stop_at:
        with counter.get_lock():
            if counter.value < count:
                number[0] = counter.value
                counter.value += 1
    dist.broadcast(number, 0)
    return int(number)


def _text(corpus: Corpus) -> str:
    return f"{corpus.name}: {len(corpus.train):,} bytes, {len(corpus.held_out):,} held out"


def _tell(variant: str, seed: int, result: dict[str, Any]) -> None:
    nats, seconds = result["held_out_nats"], result["seconds"]
    sys.stdout.write(f"{variant:28} seed {seed}: {nats:.4f} nats a byte held out, {seconds:.0f} s\n")
    sys.stdout.flush()
