"""A rank that compiles is waited for as long as its note changes."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import pytest
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore

from imbrex.runtime import compiling


@pytest.fixture(autouse=True)
def store(monkeypatch: pytest.MonkeyPatch) -> Iterator[HashStore]:
    """That of three ranks, of which this process is the first."""
    shared = HashStore()
    monkeypatch.setattr(compiling, "_store", lambda: shared)
    monkeypatch.setattr(compiling, "_silent", {})
    monkeypatch.setattr(compiling, "LISTEN_S", 0.3)
    monkeypatch.setattr(compiling, "LOOK_S", 0.01)
    monkeypatch.setattr(compiling, "BEAT_S", 0.02)
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_world_size", lambda: 3)
    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    yield shared
    compiling.tell_no_more()


def names() -> list[str]:
    return [thread.name for thread in threading.enumerate()]


def test_a_note_changes_until_it_is_taken_back(store: HashStore, monkeypatch: pytest.MonkeyPatch) -> None:
    compiling.tell_compiling()
    # As another rank sees it.
    monkeypatch.setattr(dist, "get_rank", lambda: int(threading.current_thread().name != "imbrex-compiling"))
    assert compiling.who_compiles() == compiling.who_compiles() == [0]
    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    compiling.tell_running()
    assert store.get("imbrex/compiling/0") == b"0"
    until = time.monotonic() + 10
    while "imbrex-compiling" in names() and time.monotonic() < until:
        time.sleep(0.01)
    assert "imbrex-compiling" not in names()


def test_a_note_that_stays_as_it_is_is_heard_out_once(store: HashStore) -> None:
    store.set("imbrex/compiling/1", f"{time.time()} 7")
    began = time.monotonic()
    assert compiling.who_compiles() == []
    assert compiling.compilers(0.0) == {1: False}
    heard_out = time.monotonic()
    assert heard_out - began >= 0.3
    assert compiling.who_compiles() == []
    assert time.monotonic() - heard_out < 0.3
    threading.Timer(0.1, store.set, ("imbrex/compiling/1", f"{time.time()} 8")).start()
    store.set("imbrex/compiling/1", f"{time.time()} 7 once more")
    assert compiling.who_compiles() == [1]


def test_one_that_compiles_no_more_while_others_listen_is_about_to_come(store: HashStore) -> None:
    store.set("imbrex/compiling/2", f"{time.time()}")
    threading.Timer(0.1, store.set, ("imbrex/compiling/2", "0")).start()
    assert compiling.who_compiles() == [2]
    assert compiling.who_compiles() == []


def test_nobody_compiles_for_longer_than_half_an_hour(store: HashStore) -> None:
    store.set("imbrex/compiling/1", f"{time.time() - 1900}")
    assert compiling.compilers(0.0) == {}
