"""Notes of ranks in the store that they share, for the error of a lost rank: where a rank waits that has lost
somebody, and how the program of one has ended that is heard of no more."""

from __future__ import annotations

import os
import sys
import time
import weakref
from typing import Any

import torch.distributed as dist

from imbrex.runtime.compiling import BEAT_S, compilers, tell_no_more

ROLL_S = 1.0
"""The longest that ranks wait for each other's word once they have lost somebody."""
BEGINS = ("plan", "route", "schedule events")
"""Phases in which a call begins: a rank that makes fewer calls is missed there."""
UNEVEN = (
    "; a rank that calls a layer fewer times is lost in this way: give every rank as many batches, by "
    "drop_last=True or imbrex.parallel.batches.even, or evaluate inside its in_step(model)"
)
WELL = "without an exception"
ASK_S = 1.0
"""Seconds after which one who waits asks `who_failed`, and between two such questions."""
_FAILED = "imbrex/failed"
_COMPILES = "compiles: raise the time-out (IMBREX_TIMEOUT_S), or compile on every rank"
_DIED = "compiled when it was last heard of"
_told: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
"""This process's rank, by groups whose ranks hear how its program ends."""
os.register_at_fork(after_in_child=_told.clear)


def will_tell(group: dist.ProcessGroup) -> None:
    """Have this rank tell the ranks of a group how its program ends, if the group lives until then."""
    _told[group] = dist.get_rank()


def call_roll(group: dist.ProcessGroup | None, what: str, where: str, timeout_s: float) -> str:
    """Words on the ranks of a group: who does not say that it has lost somebody too, since it died, left or
    is elsewhere; or, where all say it, who waits where. what, where: this rank's phase, and the phase with
    its layer."""
    if group is None or not dist.is_initialized() or group.size() == 1:
        return ""
    # Before a call names its layer, a rank is in set-up.
    begins = what in BEGINS and (what != "plan" or "layer" in where)
    try:
        store: Any = dist.distributed_c10d._get_default_store()  # pyright: ignore
        mine, ranks = dist.get_rank(), dist.get_process_group_ranks(group)
        store.set(f"imbrex/lost/{mine}", f"{time.time()} {where}")
        silent, until = set(ranks) - {mine}, time.monotonic() + min(ROLL_S, timeout_s / 4)
        while silent and time.monotonic() < until:
            time.sleep(0.02)
            silent = {r for r in silent if _lost_lately(store, r, timeout_s) is None}
        if not silent:
            return _who_is_where(store, sorted({*ranks} - {mine}), where, timeout_s)
        return _on_the_silent(group, sorted(silent), begins)
    except (RuntimeError, ValueError):
        # The store went with the rank that held it, rank 0 or a launcher: nobody knows more.
        return (
            "" if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True" else _without_store(group, begins)
        )


def _without_store(group: dist.ProcessGroup, begins: bool) -> str:
    """Words where rank 0 held the store of all ranks, and has died or left with it."""
    if dist.get_rank() == 0 or 0 not in dist.get_process_group_ranks(group):
        return ""
    return "; gone with the store that it held: rank 0" + UNEVEN * begins


def _who_is_where(store: Any, others: list[int], where: str, timeout_s: float) -> str:
    """Words on ranks that all wait, where they wait in different phases: then for each other."""
    places = [(r, _lost_lately(store, r, timeout_s) or where) for r in others]
    if all(place == where for _, place in places):
        return ""
    listed = ", ".join(f"rank {r} in {place}" for r, place in places)
    return f"; ranks wait for each other, {listed}: all must make the same calls in the same order"


def _on_the_silent(group: dist.ProcessGroup, silent: list[int], begins: bool) -> str:
    store: Any = group.get_group_store()  # pyright: ignore[reportAttributeAccessIssue]
    ended = {r: store.get(_end_of(r)).decode() for r in silent if store.check([_end_of(r)])}
    unheard, uneven = [r for r in silent if r not in ended], begins
    words = "".join(f"; the program of rank {r} has ended {how}" for r, how in ended.items())
    if unheard:
        words += f"; not heard of since: rank{'s' * (len(unheard) > 1)} {', '.join(map(str, unheard))}"
        for rank, lives in compilers(2 * BEAT_S).items():
            if rank in unheard:
                uneven = False
                words += f"; rank {rank} {_COMPILES if lives else _DIED}"
    elif any(how != WELL for how in ended.values()):
        uneven = False
    return words + UNEVEN * uneven


def _lost_lately(store: Any, rank: int, timeout_s: float) -> str | None:
    """Where a rank said that it has lost somebody, if it did so lately."""
    key = f"imbrex/lost/{rank}"
    if not store.check([key]):
        return None
    when, _, where = store.get(key).decode().partition(" ")
    return where if time.time() - float(when) < timeout_s + 2 * ROLL_S else None


def _end_of(rank: int) -> str:
    return f"imbrex/ended/{rank}"


def tell_end() -> None:
    """Write down, as Python ends, how this rank's program does: for the groups that something still refers
    to, destroyed or not."""
    tell_no_more()
    error: BaseException | None = getattr(sys, "last_exc", None) or getattr(sys, "last_value", None)
    how = WELL if error is None else f"with {type(error).__name__}: {error}".splitlines()[0][:240]
    for group, rank in list(_told.items()):
        try:
            store: Any = group.get_group_store()  # pyright: ignore[reportAttributeAccessIssue]
            store.set(_end_of(rank), how)
            if error is not None:
                store.set(_FAILED, f"the program of rank {rank} has ended {how}")
        except (RuntimeError, ValueError):
            continue  # the store has gone


def who_failed(group: dist.ProcessGroup | None) -> str:
    """Words on a rank of the group whose program has ended with an exception, so that nobody needs to wait
    for it; empty if there is none."""
    if group is None:
        return ""
    try:
        store: Any = group.get_group_store()  # pyright: ignore[reportAttributeAccessIssue]
        return store.get(_FAILED).decode() if store.check([_FAILED]) else ""
    except (RuntimeError, ValueError):
        return ""  # the store has gone
