"""Connections of NCCL's sockets: asked for before the first group, and never against the environment."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch.distributed as dist

from imbrex import transport
from imbrex.transport import Tiers, sockets


@pytest.fixture(autouse=True)
def plain(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in sockets.WIDE:
        # Set first, so that what the test sets is gone afterwards.
        monkeypatch.setenv(name, "1")
        monkeypatch.delenv(name)


def test_they_are_asked_for_once() -> None:
    assert sockets.widen() is None
    assert {name: os.environ[name] for name in sockets.WIDE} == sockets.WIDE
    assert sockets.widen() == "the environment says NCCL_SOCKET_NTHREADS=4 NCCL_NSOCKS_PERTHREAD=4"


def test_the_environment_stands(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NCCL_SOCKET_NTHREADS", "2")
    assert sockets.widen() == "the environment says NCCL_SOCKET_NTHREADS=2"
    assert "NCCL_NSOCKS_PERTHREAD" not in os.environ


def test_with_a_group_it_is_too_late(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    assert "there are groups already" in str(sockets.widen())
    assert not {*sockets.WIDE} & {*os.environ}


def test_the_reason_says_it(monkeypatch: pytest.MonkeyPatch) -> None:
    class TwoNodes(Tiers):
        def __init__(self, group: Any, **_: Any) -> None:
            self.nodes = type("Two", (), {"num_nodes": 2})()

    group: Any = object()
    monkeypatch.setattr(dist, "get_backend", lambda _: "nccl")
    monkeypatch.setattr(dist, "get_world_size", lambda _: 2)
    monkeypatch.setattr(transport, "Tiers", TwoNodes)
    _, reason = transport.make("tiered", group, num_ranks=2, top_k=2)
    assert reason.endswith("imbrex.transport.sockets.widen() before init_process_group gives them 16")
    sockets.widen()
    _, reason = transport.make("tiered", group, num_ranks=2, top_k=2)
    assert reason.endswith("says: NCCL_SOCKET_NTHREADS=4 NCCL_NSOCKS_PERTHREAD=4")
    monkeypatch.setattr(dist, "get_backend", lambda _: "gloo")
    assert "NCCL" not in transport.make("tiered", group, num_ranks=2, top_k=2)[1]
