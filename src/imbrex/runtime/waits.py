"""Collectives with a time-out: all of the library are started and waited for here."""

from __future__ import annotations

import atexit
import gc
import os
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

# Its functions keep the default group of the moment as a default argument. torch's compiler imports it at the
# first call of an operator; imported here, before there is a group, it keeps none alive. See `leave`.
import torch.distributed.nn.functional

from imbrex.runtime.compiling import tell_running, who_compiles
from imbrex.runtime.deadlines import deadlines
from imbrex.runtime.roll import call_roll, tell_end, who_failed

__all__ = ["all_gather_single", "finish", "reduce_scatter_single", "run", "start"]
"""The names for adapters."""

DEFAULT_TIMEOUT_S = 60.0
MAX_TIMEOUT_S = 1e6
"""The longest time-out. Clocks of kernels and sockets overflow far above it."""

all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
"""One tensor from all ranks; torch 2.13 gave it this name and deprecates the older one."""
reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
"""The sum of a tensor over ranks, a piece to each; likewise."""


REST_S = 5.0
"""The longest time for which the end of Python waits for gloo's threads."""


class RankLostError(RuntimeError):
    """A collective failed or timed out: a rank died, is stuck, or left."""


def timeout_seconds(timeout: float | None = None) -> float:
    """`timeout`, else `IMBREX_TIMEOUT_S`, else 60 s. Raises ValueError where it is no number above zero,
    or more than a million seconds."""
    text = os.environ.get("IMBREX_TIMEOUT_S") if timeout is None else timeout
    try:
        seconds = DEFAULT_TIMEOUT_S if text is None else float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds <= MAX_TIMEOUT_S:
        raise ValueError(
            f"timeout: {text!r} is not a number of seconds above 0, and at most {MAX_TIMEOUT_S:.0f} "
            "(timeout= or IMBREX_TIMEOUT_S)"
        )
    return seconds


class _Place:
    """The layer whose rows this process moves, or moved last; `None`: nobody said."""

    layer: int | None = None


def enter(layer: int) -> None:
    """Name the layer whose rows are moved from now on, for the message if a peer is lost."""
    _Place.layer = layer


def start(
    what: str,
    begin: Callable[[], dist.Work | None],
    timeout_s: float,
    group: dist.ProcessGroup | None = None,
) -> dist.Work | None:
    """Start a collective. A failure becomes a RankLostError that names `what`. group: the ranks to ask who
    else is lost."""
    _check_not_forked()
    refuse_lost(group)
    tell_running()
    try:
        return begin()
    except RuntimeError as error:
        raise _lost(what, timeout_s, error, group) from error


def finish(
    what: str,
    work: dist.Work | None,
    timeout_s: float,
    *,
    on_host: bool,
    group: dist.ProcessGroup | None = None,
) -> None:
    """Wait for a collective, at most `timeout_s`. On a GPU only the stream waits. If it waits for longer, or
    for a rank whose program has failed, the group is aborted, and `refuse_lost` raises from then on; see
    `deadlines`. The same holds for every replay of a captured wait."""
    try:
        if work is None:
            return
        if on_host:
            _wait_on_host(work, timeout_s)
        elif group is None:
            work.wait()
        else:
            where, captured = _where(what), torch.cuda.is_current_stream_capturing()
            bound = deadlines.bound_replays if captured else deadlines.bound
            late = partial(_silent, where, what, timeout_s, group)
            bound(work.wait, group, timeout_s, late)
    except RuntimeError as error:
        raise _lost(what, timeout_s, error, group) from error


class Deadline:
    """The end of a host's wait for other ranks: after as long as they may be silent, and again while one of
    them compiles."""

    def __init__(self, seconds: float) -> None:
        self.seconds, self.until = seconds, time.monotonic() + seconds

    def moves(self) -> bool:
        """Whether it had passed, and has moved on since a rank compiles."""
        if time.monotonic() < self.until or not who_compiles():
            return False
        self.until = time.monotonic() + self.seconds
        return True

    def left(self) -> float:
        """Seconds until then; none or fewer where it has passed and nobody compiles."""
        left = self.until - time.monotonic()
        return self.seconds if left <= 0 and self.moves() else left


def _wait_on_host(work: dist.Work, timeout_s: float) -> None:
    deadline = Deadline(timeout_s)
    while True:
        try:
            work.wait(timedelta(seconds=timeout_s))
            return
        except RuntimeError:
            if not deadline.moves():
                raise


def refuse_lost(group: dist.ProcessGroup | None) -> None:
    """Raise RankLostError if a stream's wait for this group has timed out, so that its results are wrong."""
    if deadlines.lost:
        deadlines.refuse_lost(group)


def run(
    what: str,
    begin: Callable[[], dist.Work | None],
    *,
    on_host: bool,
    group: dist.ProcessGroup | None = None,
) -> None:
    """Start a collective and wait for it, with the time-out of the environment."""
    timeout_s = timeout_seconds()
    finish(what, start(what, begin, timeout_s, group), timeout_s, on_host=on_host, group=group)


def leave() -> None:
    """Destroy all process groups, once nothing but garbage refers to them, and end their threads. See
    `rest`."""
    dist.destroy_process_group()
    gc.collect()


@atexit.register
def rest() -> None:
    """Tell other ranks, as Python ends, that it does, and wait until gloo's threads have nothing left to do;
    at most `REST_S`.

    They live as long as something refers to their group: a layer does, also behind `destroy_process_group`.
    One that lets go of the last collective's tensors while Python ends takes the process with it ("terminate
    called without an active exception", one run in eight on a machine with more work than cores). A thread
    that works, or waits for Python's lock, goes to sleep and wakes again; one without work does not.
    """
    tell_end()
    look_s, end, before = 4 * sys.getswitchinterval(), time.monotonic() + REST_S, {}
    while (now := _wakings()) and time.monotonic() < end:
        if now == before and all("S (sleeping)" in state for state in now.values()):
            return
        before = now
        time.sleep(look_s)


def _wakings() -> dict[str, str]:
    """Threads of gloo that work for a group: whether each sleeps, and how often it has gone to sleep.
    Empty where the system is not Linux, which says so."""
    wakings: dict[str, str] = {}
    for task in Path("/proc/self/task").glob("*"):
        try:
            if (task / "comm").read_text().strip() == "pt_gloo_runloop":
                status = (task / "status").read_text().splitlines()
                wakings[task.name] = " ".join(s for s in status if s.startswith(("State", "voluntary")))
        except OSError:
            continue  # it has ended
    return wakings


_BACKWARD = {"dispatch": ", sending rows to the experts", "combine": ", fetching rows from the experts"}


MOVES = ("plan", "dispatch", "combine")
"""Phases of a call of one layer; the others are of a model."""


def _lost(
    what: str, timeout_s: float, error: RuntimeError, group: dist.ProcessGroup | None = None
) -> RankLostError:
    """The words of gloo or NCCL, addresses and lines of their sources, are the cause's."""
    where, text = _where(what), str(error).lower()
    if any(word in text for word in ("timed out", "timeout", "time out")):
        return _silent(where, what, timeout_s, group)
    if "connection" in text or "peer" in text:
        why = "a rank died or left"
    else:
        why = f"a rank died, left or was silent for {timeout_s:g} s"
    return _of_loss(where, why + call_roll(group, what, where, timeout_s))


def _silent(where: str, what: str, timeout_s: float, group: dist.ProcessGroup | None) -> RankLostError:
    if failed := who_failed(group):
        return _of_loss(where, failed)
    roll = call_roll(group, what, where, timeout_s)
    return _of_loss(where, f"a rank was silent for {timeout_s:g} s{roll}")


def _of_loss(where: str, why: str) -> RankLostError:
    rank = dist.get_rank() if dist.is_initialized() else 0
    return RankLostError(f"rank {rank} lost its peers in {where}: {why}")


def _where(what: str) -> str:
    """The phase of this thread, with its layer."""
    of = f" of layer {_Place.layer}" if what in MOVES and _Place.layer is not None else ""
    if torch._C._current_graph_task_id() >= 0:
        # The same moves as in the forward, the other way round: their names would mislead.
        what = f"the backward pass{_BACKWARD.get(what, f', {what}')}"
    return f"{what}{of}"


class _Inherited:
    """The groups of the process that this one was forked from, which do not work here."""

    group: Any = None
    pid = 0


def _after_fork() -> None:
    _Inherited.group, _Inherited.pid = (
        (dist.group.WORLD, os.getppid()) if dist.is_initialized() else (None, 0)
    )


os.register_at_fork(after_in_child=_after_fork)


def _check_not_forked() -> None:
    """Raise RuntimeError in a forked process: the groups' threads and connections stayed with the parent, and
    a collective would wait for ever or break the parent's."""
    if _Inherited.group is not None and dist.is_initialized() and dist.group.WORLD is _Inherited.group:
        raise RuntimeError(
            f"this process was forked from rank {dist.get_rank()} (pid {_Inherited.pid}) after it had joined "
            "its groups, which do not survive a fork: call layers on the ranks only, or start processes "
            "by spawn and let each call init_process_group"
        )
