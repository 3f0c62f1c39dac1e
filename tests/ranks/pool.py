"""A pool of living gloo ranks: started once a test session, then given one function after another.

The ranks are forked from a server that has torch loaded, so that eight of them start in seconds, and its
compiler too, which the first call of an operator wants.
"""

from __future__ import annotations

import gc
import multiprocessing as mp
import os
import tempfile
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing import forkserver
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any

from tests import tracing
from tests.garbage import collect_seldom
from tests.poison import poison_empty

SIZES = (1, 2, 4, 8)
PRELOADED = ["torch._dynamo", "imbrex.demo.rank", "imbrex.testing", "plotly.graph_objects", "pytest"]
PRELOADED += ["torch.distributed.run", "tests.ranks.branches", "tests.ranks.pool", "tests.ranks.layer_jobs"]
GRACE_S = 3.0
"""How long the other ranks may take to answer once one has failed, and all to end."""
TRACED = 1
"""Ranks whose lines coverage counts: the others run the same, and tracing is up to half of their time."""
LAST_S = 60.0
"""How long all may take to end after the last test: they write down their coverage."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Ranks:
    """What a function that runs on every rank is given first."""

    rank: int
    world_size: int
    group: Any
    device: str = "cpu"


def warm() -> ForkServerContext:
    """Forks from a server that has loaded what ranks want, and that has one thread."""
    context = mp.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    os.environ["OMP_NUM_THREADS"] = "1"
    with tracing.processes_do_not_count():
        forkserver.ensure_running()
    return context


class RankError(AssertionError):
    """A function raised on a rank; the text holds that rank's traceback."""


class Pool:
    """`run(world, function, *arguments)` calls `function(ranks, *arguments)` on the first `world` ranks and
    returns the results by rank. Functions must stand at the top of a module, arguments must pickle.

    Torch names a group by the number of those that its process has made, and ranks that wait for each other
    under two names hang. So the next call begins with one number on all of its ranks.
    """

    def __init__(
        self, size: int, timeout_s: float = 240.0, backend: str = "gloo", grace_s: float = GRACE_S
    ) -> None:
        self.size, self.timeout_s, self.backend, self.grace_s = size, timeout_s, backend, grace_s
        self.pipes: list[Any] = []
        self.processes: list[Any] = []
        self.store = ""
        self.made = 0

    def start(self) -> None:
        context, self.made = warm(), 0
        with tempfile.NamedTemporaryFile(prefix="imbrex-pool-") as name_only:
            self.store = name_only.name
        for rank in range(self.size):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=_serve, args=(rank, self.size, self.store, self.backend, theirs), daemon=True
            )
            process.start()
            theirs.close()
            self.pipes.append(ours)
            self.processes.append(process)

    def run(self, world: int, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        try:
            return self._run(world, function, arguments)
        except RankError:
            raise
        except BaseException:
            # Of pytest-timeout, say: no later call may read this one's answers.
            self.close()
            raise

    def _run(self, world: int, function: Callable[..., Any], arguments: tuple[Any, ...]) -> list[Any]:
        if not self.processes:
            self.start()
        pipes = self.pipes[:world]
        for pipe in pipes:
            pipe.send((world, function, arguments, tracing.wanted(), self.made))
        answers: dict[int, tuple[bool, Any]] = {}
        deadline = time.monotonic() + self.timeout_s
        while len(answers) < world and (left := deadline - time.monotonic()) > 0:
            waiting = {pipe: rank for rank, pipe in enumerate(pipes) if rank not in answers}
            for pipe in wait(list(waiting), left):
                assert isinstance(pipe, Connection)
                rank = waiting[pipe]
                try:
                    ok, value, lines, made = pipe.recv()
                    answers[rank], self.made = (ok, value), max(self.made, made)
                    tracing.hear(self.processes[rank].pid, lines)
                except (EOFError, ConnectionResetError):
                    answers[rank] = (False, "died")
            if any(not ok for ok, _ in answers.values()):
                deadline = min(deadline, time.monotonic() + self.grace_s)
        failed = "\n".join(
            f"rank {rank} of {world}:\n{text}" for rank, (ok, text) in answers.items() if not ok
        )
        silent = sorted(set(range(world)) - set(answers))
        if silent or any(text == "died" for _, text in answers.values()):
            self.close()
            raise RankError(f"{failed}\nranks without an answer: {silent}; the pool starts anew")
        if failed:
            raise RankError(failed)
        return [answers[rank][1] for rank in range(world)]

    def close(self, grace_s: float | None = None) -> None:
        # A rank that sees its pipe close ends by itself, and writes down its coverage.
        for pipe in self.pipes:
            pipe.close()
        deadline = time.monotonic() + (self.grace_s if grace_s is None else grace_s)
        for process in self.processes:
            process.join(max(0.0, deadline - time.monotonic()))
            process.kill()
            process.join()
        self.pipes, self.processes = [], []
        if os.path.exists(self.store):
            os.unlink(self.store)


def _serve(rank: int, size: int, store: str, backend: str, pipe: Connection) -> None:
    import torch
    import torch.distributed as dist

    switch = tracing.Switch()
    torch.set_num_threads(1)
    collect_seldom()
    poison_empty()
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    device = "cpu"
    if backend != "gloo":
        from tests.gpu.gpus import share

        device = f"cuda:{share(rank)}"
        torch.cuda.set_device(device)
    dist.init_process_group(
        backend, init_method=f"file://{store}", rank=rank, world_size=size, timeout=timedelta(seconds=240)
    )
    smaller = {world: dist.new_group(list(range(world))) for world in SIZES if world < size}
    _put_gloo_last()
    groups, leftover = {**smaller, size: dist.group.WORLD}, Leftover()
    while True:
        try:
            world, function, arguments, traced, made = pipe.recv()
        except EOFError:
            return
        leftover.end()
        ranks = Ranks(rank=rank, world_size=world, group=groups[world], device=device)
        switch.turn(traced and rank < TRACED)
        _count_groups_from(made)
        try:
            pipe.send((True, function(ranks, *arguments), tracing.lines(), _groups_made()))
        except BaseException:  # noqa: BLE001 (whatever a rank raises is the caller's to see)
            leftover.keep()
            pipe.send((False, traceback.format_exc(), tracing.lines(), _groups_made()))


def _put_gloo_last() -> None:
    """A thread of gloo's spins while another one, off the processor, holds the lock of its connection; where
    ranks are more than processors that took an eighth of the tests' time."""
    for thread in _gloo_threads():
        os.setpriority(os.PRIO_PROCESS, thread, 19)


class Leftover:
    """Process groups that a function has made and left, on a rank that lives on: every one of gloo's has a
    thread that wakes up a hundred times a second, which by the hundredth took a sixth of two cores."""

    def __init__(self) -> None:
        self._known = set(_groups())
        self._least = len(_gloo_threads())

    def keep(self) -> None:
        """Those of a function that failed: peers may still be in them."""
        self._known.update(_groups())

    def end(self) -> None:
        """Once all ranks have answered: those made since the last call, and what only a collection frees."""
        import torch.distributed as dist

        for group in [group for group in _groups() if group not in self._known]:
            dist.destroy_process_group(group)
        left = len(_gloo_threads())
        if left > self._least:
            gc.collect()
            left = len(_gloo_threads())
        self._least = left


def _gloo_threads() -> list[int]:
    """Not all threads: one of another kind that is about to end would hide one that is left."""
    return [thread for thread, name in threads().items() if "gloo_tcp" in name]


def threads() -> dict[int, str]:
    """Names of this process's threads by their numbers; one that ends meanwhile is none."""
    names = {}
    for task in Path("/proc/self/task").iterdir():
        with suppress(FileNotFoundError, ProcessLookupError):
            names[int(task.name)] = (task / "comm").read_text().strip()
    return names


def _groups() -> list[Any]:
    import torch.distributed as dist

    return list(dist.distributed_c10d._world.pg_map)


def _groups_made() -> int:
    import torch.distributed as dist

    return dist.distributed_c10d._world.group_count


def _count_groups_from(made: int) -> None:
    import torch.distributed as dist

    dist.distributed_c10d._world.group_count = max(made, _groups_made())
