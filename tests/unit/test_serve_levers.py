"""What a lever gains: which settings are compared, and what the table says of their loops."""

from __future__ import annotations

from typing import Any

from imbrex.bench.serve.levers import LEVERS, captions, cells_of, gains, middle, without
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
