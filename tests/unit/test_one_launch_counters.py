"""Every interleaving of a launch that computes both products of a small batch: nobody waits for ever, no
activation is read before it is there, counters are set back. Faults put into the kernel's text are found.
"""

from __future__ import annotations

import re
from typing import Any

import pytest

from imbrex.reproduce.interleavings import explore
from tests.emulated import kernel
from tests.emulated.counters import Edits, Source
from tests.emulated.one_launch_counters import BOTH, OneLaunch

pytestmark = [pytest.mark.skipif(not kernel.available(), reason="needs g++"), pytest.mark.untraced]

CASES: dict[str, Any] = {
    "one block": {"units": 2, "ups": 2, "downs": 1, "blocks": 1},
    "one block, one unit": {"units": 1, "ups": 2, "downs": 2, "blocks": 1},
    "two blocks": {"units": 2, "ups": 1, "downs": 2, "blocks": 2},
    "a part of two units": {"units": 9, "ups": 1, "downs": 1, "blocks": 1},
    "a first tile of down": {"units": 1, "ups": 2, "downs": 2, "blocks": 3},
    "blocks without tiles": {"units": 1, "ups": 1, "downs": 1, "blocks": 3},
    "no rows": {"units": 0, "ups": 1, "downs": 1, "blocks": 2},
    "a block dispatches": {"units": 1, "ups": 2, "downs": 1, "blocks": 2, "busy": 1},
    "all dispatch": {"units": 1, "ups": 1, "downs": 2, "blocks": 2, "busy": 2},
    "two dispatch": {"units": 1, "ups": 1, "downs": 1, "blocks": 3, "busy": 2},
}


FP8_CASES: dict[str, Any] = {
    **{name: CASES[name] for name in ("one block", "one block, one unit", "a part of two units", "no rows")},
    "two blocks": {"units": 1, "ups": 2, "downs": 1, "blocks": 2},
    "a first tile of down": {"units": 1, "ups": 1, "downs": 1, "blocks": 2},
}


@pytest.mark.parametrize("name", FP8_CASES)
def test_no_interleaving_in_fp8_has_a_fault(name: str) -> None:
    explored = explore(OneLaunch(Source(), **FP8_CASES[name], fp8=True), 200_000)
    assert explored.fault is None
    assert explored.states > 10


@pytest.mark.parametrize("name", CASES)
def test_no_interleaving_has_a_fault(name: str) -> None:
    explored = explore(OneLaunch(Source(), **CASES[name]), 200_000)
    assert explored.fault is None
    assert explored.states > 10


SLOT = (
    "        shared.slots[slot] = {tile.expert, tile.row,  tile.rows, tile.column,\n"
    "                              tile.columns, steps, position,  work.down ? -1 - work.part : work.part};\n"
    "        ptx::mbarrier_arrive(shared.slot_full + 8 * slot);\n"
)
BEGIN = "        if (index == 0) ahead = begin(work, ring, ahead);\n"
WAIT = "        if (!Up::kQuantises && work.down) written.wait(work.part);\n"
TAKE = "        tile = take_slot<Up>(shared, ++index, patience);\n"
TELL = "            if (thread == 0) tell_part(both, tile.together);\n"
STORED = "        ptx::bulk_wait<0>();\n"
FENCE = "    ptx::fence_gpu();\n    ptx::add_relaxed_gpu("
FAULTS: dict[str, tuple[str, Edits, str]] = {
    "down does not wait": ("two blocks", ((BOTH, WAIT, ""),), "activation . is"),
    "a tile is counted before it is in memory": (
        "two blocks",
        ((BOTH, STORED, ""),),
        "under way",
    ),
    "a tile is counted without a fence": (
        "two blocks",
        ((BOTH, FENCE, FENCE.replace("    ptx::fence_gpu();\n", "")),),
        "under way",
    ),
    "a part is due a tile early": (
        "a first tile of down",
        ((BOTH, "< due * ups)", "< due * ups - 1)"),),
        "activation . is",
    ),
    "a part's units are counted short": (
        "a part of two units",
        ((BOTH, "return (part * units + kParts - 1) / kParts;", "return part * units / kParts;"),),
        "activation . is|for ever",
    ),
    "nobody is told of a tile that waits, and tiles are counted when the next is known": (
        "one block, one unit",
        (
            (BOTH, SLOT, ""),
            (BOTH, WAIT, f"{WAIT}{SLOT}"),
            (BOTH, TELL, f"    {TAKE}{TELL}"),
            (BOTH, f"        }}\n{TAKE}", "        }\n"),
        ),
        "for ever",
    ),
    "rows are asked for before they are placed": (
        "a block dispatches",
        (
            (BOTH, BEGIN, ""),
            (BOTH, "        const auto load", f"{BEGIN}const auto load"),
        ),
        "not placed",
    ),
    "the first block that is done sets counters back": (
        "two blocks",
        ((BOTH, "== of_all - 1)", "== 0)"),),
        "for ever|twice|set back|know|times",
    ),
}
"""Where, what is put in, and what the model then says."""


FP8_FAULTS: dict[str, tuple[str, Edits, str]] = {
    "down does not wait": (
        "two blocks",
        ((BOTH, "            if (ptx::lane_id() == 0) written.wait(-1 - tile.together);\n", ""),),
        "activation . is",
    ),
    "a tile is counted without a fence": FAULTS["a tile is counted without a fence"],
    "a part is due a tile early": FAULTS["a part is due a tile early"],
    "who asks for columns sets counters back": (
        "two blocks",
        (
            (BOTH, "    if (!Up::kQuantises) leave(both, team.all());\n", "    leave(both, team.all());\n"),
            (BOTH, "    if (ptx::lane_id() == 0) leave(both, kQuantisers * gridDim.x);\n", ""),
        ),
        "for ever|set back",
    ),
    "the first block that is done sets counters back": FAULTS[
        "the first block that is done sets counters back"
    ],
}


@pytest.mark.parametrize("name", FP8_FAULTS)
def test_faults_in_fp8_are_found(name: str) -> None:
    case, edits, says = FP8_FAULTS[name]
    explored = explore(OneLaunch(Source(edits), **FP8_CASES[case], fp8=True), 200_000)
    assert explored.fault is not None
    assert re.search(says, explored.fault), explored.fault


@pytest.mark.parametrize("name", FAULTS)
def test_faults_are_found(name: str) -> None:
    case, edits, says = FAULTS[name]
    explored = explore(OneLaunch(Source(edits), **CASES[case]), 200_000)
    assert explored.fault is not None
    assert re.search(says, explored.fault), explored.fault
