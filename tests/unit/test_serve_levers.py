"""What a lever gains: which settings are compared, and what the table says of their loops."""

from __future__ import annotations

from argparse import Namespace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from imbrex.bench.serve import command
from imbrex.bench.serve.levers import LEVERS, captions, cells_of, gains, middle, without
from imbrex.bench.serve.models import Way
from imbrex.serve.decoding import Drafting
from imbrex.serve.engine import HostTime, Settings

ALL = Settings(
    slots=4, room=32, chunk=(2, 6), interval=4, drafting=Drafting(length=1, forced=0.5), graphs=True
)


def loop(rate: float | None, step_ms: float = 1.0, **host_us: float) -> dict[str, Any]:
    host = dict.fromkeys(HostTime.NAMES, 0.0) | host_us
    return {"tokens_per_s_gpu": rate, "step_ms": step_ms, "host_us": host, "launches": 1.25}


def test_every_lever_is_off_by_itself() -> None:
    off = without(ALL, 24)
    assert off.keys() == LEVERS.keys()
    names = ("chunk", "interval", "drafting", "graphs", "buckets")
    for lever, wanted in (
        ("interval", {"interval": 1}),
        ("chunk", {"chunk": (2, 24)}),
        ("buckets", {"buckets": [4]}),
        ("graphs", {"graphs": False}),
        ("drafts", {"drafting": Drafting()}),
    ):
        plain = {name: getattr(ALL, name) for name in names}
        assert {name: getattr(off[lever], name) for name in names} == plain | wanted, lever


def test_levers_that_are_off_already_are_not_compared() -> None:
    assert without(Settings(slots=1, room=8, chunk=(1, 4)), 4) == {}
    assert without(Settings(slots=2, room=8, chunk=(1, 4)), 4).keys() == {"buckets"}
    assert without(Settings(slots=1, room=8, chunk=(1, 4)), 5).keys() == {"chunk"}


def test_a_gain_is_of_loops_beside_each_other() -> None:
    on, off = [loop(20.0), loop(30.0), loop(9.0)], [loop(10.0), loop(10.0), loop(10.0)]
    assert gains(on, off) == {"median": 2.0, "min": 0.9, "max": 3.0}
    assert gains(on, [*off[:2], loop(None)]) is None
    assert middle([loop(1.0, ms) for ms in (5.0, 1.0, 3.0)])["step_ms"] == 3.0
    assert middle([loop(1.0, ms) for ms in (5.0, 1.0)])["step_ms"] == 1.0


def test_a_line_sets_a_load_beside_itself_without_the_lever() -> None:
    def row(users: int, rate: float, off: str | None, **host_us: float) -> dict[str, Any]:
        case = {"users": users, "input": 8, "drafts": 0} | ({"off": off} if off else {})
        extra = {"gain": gains([loop(90.0)], [loop(rate)])} if off else {}
        return {"impl": "auto", "case": case} | loop(rate, **host_us) | extra

    rows = [row(2, 50.0, None), row(4, 90.0, None, seat=7.0, launch=4.0, agree=100.0, model=1000.0)]
    rows += [row(4, 60.0, "chunk", deliver=20.0, wait=500.0)]
    assert cells_of(rows) == [
        ["auto", "4", "8", "chunk", "90.0", "60.0", "1.50", "1.50, 1.50", "11", "20", "1.2", "1.2"]
    ]
    assert captions(rows) == ["without chunk: a prompt runs whole"]


def test_loops_are_in_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """All settings once, then all again: what makes a minute slow is slow with every lever and without."""
    ran = list[Settings]()
    monkeypatch.setattr(command.dist, "group", SimpleNamespace(WORLD=object()))
    monkeypatch.setattr(command, "_make", lambda *_: (nn.Module(), None))
    monkeypatch.setattr(command, "Engine", lambda model, kind, group: kind)

    def points_of(kind: Settings, loads: Any, *_: Any) -> list[dict[str, Any]]:
        ran.append(kind)
        return [loop(float(len(ran)), float(len(ran))) for _ in loads]

    monkeypatch.setattr(command, "points_of", points_of)
    args = Namespace(users="4", input="4", drafts="0", interval="4", chunk="1x1", output=3, rounds=2)
    args.ranks, args.levers, args.forced, args.weights, args.model = 2, 3, None, None, "demo"
    args.dtype, args.train, args.sizes = "float32", 0, None
    board: Any = SimpleNamespace(write=lambda phase: None)
    way = Way(transport="alltoall", codec="identity", experts="auto")
    rows = list(command.compare(args, way, torch.device("cpu"), board))
    once = [(4, (1, 1), [1, 2]), (1, (1, 1), [1, 2]), (4, (1, 4), [1, 2]), (4, (1, 1), [2])]
    assert [(kind.interval, kind.chunk, kind.buckets) for kind in ran] == once * 3
    assert [row["case"].get("off") for row in rows] == [None, "interval", "chunk", "buckets"]
    # Loops 1, 5 and 9 had all levers, 2, 6 and 10 had tokens leave after every step.
    assert rows[0]["step_ms"] == 5.0
    assert rows[1]["gain"] == {"median": round(5 / 6, 3), "min": 0.5, "max": 0.9}
