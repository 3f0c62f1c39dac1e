"""Notes of ranks that compile, in the store that all share. Others wait longer for such a rank, as long as
its note changes: a thread of that rank renews it, so that one which dies while it compiles is lost."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Iterable
from contextlib import suppress
from typing import Any

import torch.distributed as dist

from imbrex.runtime.tracing import in_trace_too

COMPILING_S = 1800.0
"""The longest that a rank counts as one that compiles."""
BEAT_S = 0.5
"""Seconds between two changes of a note."""
LISTEN_S = 20.0
"""The longest that a rank which compiles may leave its note as it is: a collection of garbage, or a library
that is loaded, may hold Python's lock for seconds."""
LOOK_S = 0.05
OVER = "0"
"""The note of a rank that compiles no more."""


class _Note:
    """The note of this rank. compiling: it compiles, since `since`. layer: a layer, and has not run it yet.
    over: set once the thread that renews the note is to end."""

    compiling = layer = False
    since = 0.0
    over = threading.Event()
    writing = threading.Lock()


def _after_fork() -> None:
    """A child's note is nobody's, and a lock that the parent's thread held stays locked."""
    _Note.compiling = _Note.layer = False
    _Note.writing = threading.Lock()


os.register_at_fork(after_in_child=_after_fork)
_silent: dict[int, str] = {}
"""Notes that have not changed for `LISTEN_S`, by rank."""


@in_trace_too
def tell_compiling() -> None:
    """Note, as a compiler traces a layer, that this rank comes later than others."""
    _begin_compiling()
    _Note.layer = True


def tell_running() -> None:
    """Take that note back, as this rank meets others again. From the first such call on, it is written for
    whatever else is compiled, too: experts by themselves, or what stands between two layers."""
    dynamo = sys.modules.get("torch._dynamo.callback")
    # Torch's reset forgets who listens.
    if dynamo is not None and _begin_compiling not in dynamo.callback_handler.start_callbacks:
        dynamo.callback_handler.register_start_callback(_begin_compiling)
        dynamo.callback_handler.register_end_callback(_end_compiling)
    if _Note.compiling:
        tell_no_more()


def tell_no_more() -> None:
    """Take the note back, if there is one, and end its thread."""
    _Note.layer = False
    _end_compiling()


def _begin_compiling(*_: object) -> None:
    if not (dist.is_initialized() and dist.get_world_size() > 1):
        return
    _Note.since = time.time()
    _write(f"{_Note.since}")
    if not _Note.compiling:
        _Note.compiling, _Note.over = True, threading.Event()
        threading.Thread(target=_renew, args=(_Note.over,), name="imbrex-compiling", daemon=True).start()


def _end_compiling(*_: object) -> None:
    if _Note.compiling and not _Note.layer:
        _Note.compiling = False
        with _Note.writing:
            _Note.over.set()
            _write(OVER)


def _renew(over: threading.Event) -> None:
    """Change the note until it is over, by a connection of its own: the main thread may wait in the other."""
    try:
        store = _store().clone()
    except (AttributeError, NotImplementedError, RuntimeError, ValueError):
        store = None  # somebody's own kind of store
    number = 0
    while not over.wait(BEAT_S):
        number += 1
        with _Note.writing:
            if not over.is_set():
                _write(f"{_Note.since} {number}", store)


def _store() -> Any:
    return dist.distributed_c10d._get_default_store()  # pyright: ignore[reportAttributeAccessIssue]


def _write(note: str, store: Any = None) -> None:
    with suppress(
        RuntimeError, ValueError
    ):  # the store has gone with the rank that held it: so will this one
        (store or _store()).set(_key(dist.get_rank()), note)


def _key(rank: int) -> str:
    return f"imbrex/compiling/{rank}"


def who_compiles() -> list[int]:
    """The other ranks that compile now, none for longer than `COMPILING_S`. Waits until their notes change,
    which takes as long as `BEAT_S` if all live, and else `LISTEN_S`, once."""
    return [rank for rank, lives in compilers(LISTEN_S).items() if lives]


def compilers(listen_s: float) -> dict[int, bool]:
    """The other ranks that compile, or did when they were last heard of; whether they are heard of within
    `listen_s`."""
    if not dist.is_initialized():
        return {}
    since, until = time.time() - COMPILING_S, time.monotonic() + listen_s
    notes = {r: n for r, n in _notes(range(dist.get_world_size())).items() if float(n.split()[0]) > since}
    heard = dict.fromkeys(notes, False)
    waiting = {rank for rank, note in notes.items() if _silent.get(rank) != note}
    while waiting and time.monotonic() < until:
        time.sleep(LOOK_S)
        now = _notes(waiting)
        if not now:
            break  # the store has gone
        changed = {rank for rank, note in now.items() if note != notes[rank]}
        heard.update(dict.fromkeys(changed, True))  # one that compiles no more is about to come
        waiting -= changed
    if listen_s >= LISTEN_S:
        _silent.update((rank, notes[rank]) for rank in waiting)
    return heard


def _notes(ranks: Iterable[int]) -> dict[int, str]:
    """The notes of those of these ranks, this one aside, that have ever compiled."""
    try:
        store, keys = _store(), {rank: _key(rank) for rank in ranks if rank != dist.get_rank()}
        return {rank: store.get(key).decode() for rank, key in keys.items() if store.check([key])}
    except (RuntimeError, ValueError):
        return {}
