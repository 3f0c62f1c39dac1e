"""Every interleaving of the fused kernels' counters, for two and three ranks: nobody waits for ever, nothing
is read before it is there, every piece is summed once. Faults put into the kernels' text are found.
"""

from __future__ import annotations

import re
from typing import Any

import pytest

from imbrex.reproduce.interleavings import explore
from tests.emulated import kernel
from tests.emulated.counters import Edits, Machine, Source
from tests.emulated.down_home_counters import down_home
from tests.emulated.fused_counters import DOWN, FIRST, HOME, PROTOCOL, REDUCE, ROWS, SUMMERS
from tests.emulated.home_counters import home
from tests.emulated.others_first_counters import OWN, others_first
from tests.emulated.parts_counters import BEHIND, PARTS, parts
from tests.emulated.rows_out_counters import rows_out
from tests.emulated.scales_counters import FP8, LOAD, scales

pytestmark = [pytest.mark.skipif(not kernel.available(), reason="needs g++"), pytest.mark.untraced]


def machine(name: str, edits: Edits = ()) -> Machine:
    make, given = CASES[name]
    source = Source(edits)
    return make(source, **given)


CASES: dict[str, tuple[Any, dict[str, Any]]] = {
    "rows": (rows_out, {"ranks": 2}),
    "rows, three ranks": (rows_out, {"ranks": 3, "movers": (1, 1, 1)}),
    "rows, a rank dies": (rows_out, {"ranks": 2, "movers": (1, 1), "mortal": 0}),
    "home, sums behind": (home, {"groups": (1, 1), "first": 0}),
    "home, sums first": (home, {"groups": (1, 1), "tiles": 1}),
    "home, three ranks": (home, {"groups": (1, 1, 1), "first": 0, "blocks": (1, 1, 1), "tiles": 1}),
    "home, a rank dies": (home, {"groups": (1, 1), "first": 0, "tiles": 1, "mortal": 0}),
    "home, three calls": (home, {"groups": (0, 1), "first": 0, "tiles": 1, "calls": 3}),
    "down": (down_home, {"groups": (1, 1), "tiles": (0, 1), "parts": 2, "behind": False}),
    "down, two warps sum": (down_home, {"groups": (1, 1), "tiles": (0,)}),
    "down, three ranks": (down_home, {"groups": (1, 1, 1), "tiles": (0,), "behind": False}),
    "down, a rank dies": (
        down_home,
        {"groups": (1, 1), "tiles": (0, 1), "parts": 2, "behind": False, "mortal": 0},
    ),
    "down, three calls": (down_home, {"groups": (0, 1), "tiles": (0,), "behind": False, "calls": 3}),
    "first": (others_first, {"groups": (1, 1), "lists": (0, 1)}),
    "first, two tiles of own rows": (others_first, {"groups": (0, 1), "lists": (0, 1, 1)}),
    "first, nobody stops": (others_first, {"groups": (1, 1), "lists": (0, 1), "first": False}),
    "first, three ranks": (others_first, {"groups": (1, 1, 1), "lists": (0,), "blocks": 1}),
    "first, two warps sum": (others_first, {"groups": (1, 0), "lists": (0,), "every": True}),
    "first, a warp begins with own pieces": (
        others_first,
        {"groups": (1, 1), "lists": (0,), "every": True, "own_first": True},
    ),
    "first, own rows are looked for": (
        others_first,
        {"groups": (1, 0), "lists": (0, 1), "first": False, "blocks": 1, "finds": True},
    ),
    "first, a rank dies": (others_first, {"groups": (1, 1), "lists": (0,), "mortal": 0}),
    "parts": (parts, {"tiles": ((0, 0, 1), (0, -1, 1))}),
    "parts, two calls": (parts, {"tiles": ((0,), (-1, 1)), "calls": 2}),
    "scales": (scales, {"tiles": ((0, 1),)}),
    "scales, two calls": (scales, {"tiles": ((0, -1),), "calls": 2}),
    "first, three calls": (others_first, {"groups": (0, 1), "lists": (0,), "calls": 3}),
}


@pytest.mark.parametrize("name", CASES)
def test_no_interleaving_has_a_fault(name: str) -> None:
    explored = explore(machine(name), 100_000)
    assert explored.fault is None
    assert explored.states > 500


COUNT = "                if (mine >= 0) ptx::add_relaxed_gpu(rows.there + mine / kCounted, 1);\n"
FENCE = "            ptx::fence_gpu();\n            __syncwarp();\n"
EACH = f"            each([&](int, int mine) {{\n{COUNT}            }});\n"
CREDIT = "if (!wait_credit(call, static_cast<int>(ptx::lane_id()), 2)) return false;\n"
RUN = "if (!__all_sync(~0u, fine) || !wait_credit(call, static_cast<int>(ptx::lane_id()), 2))"
TOLD = "        tell();\n        part = tile.column / part_columns, rows_sent = rows;\n"
PIECES = "job.home = home, job.part = static_cast<int>(part), "
ENGINE = "            ptx::fence_async_shared();\n"
FLAG = "        ptx::store_relaxed_sys(flag_of(*call.group, call.group->reduced"
STARTED = "            if (call.block == 0 && warp == 4 * C::kGroups + 1)\n"
TELL_STARTED = f"{STARTED}                tell_started(call, static_cast<int>(ptx::lane_id()));\n"
FIRST_PIECES = "reduce_pieces<Sums>(call, reduce, own, tokens, others, draw_again(call, reduce, 0));"
LAST = """            if (lane == 0) ended += static_cast<int>(ptx::take_acquire_cta(&done.ended));
            last = __shfl_sync(~0u, ended, 0) == C::kGroups;  // before what is left is taken
"""
SCALE = "scales.d[i64(row + mine + 8 * i) * scales.stride_d + tile.column / kBlock] = scale_of(most[i]);\n"
SENT = "sink.rows(panel, tile.column, row, rows); });\n"
SLOT = "            shared.slots[slot] = told;  // so that consumers may ask for the rows' scales\n"
TAKEN = "? ptx::take_acquire_cta(word) : 0;\n"
FAULTS: dict[str, tuple[str, Edits, str]] = {
    "rows counted before they are stored": (
        "rows",
        ((ROWS, EACH, ""), (ROWS, "            if (fine)\n", f"{EACH}            if (fine)\n")),
        "is under way|is of call 0",
    ),
    "rows without a fence": ("rows", ((ROWS, FENCE, ""),), "is under way"),
    "rows of tokens nobody waited for": (
        "rows",
        ((ROWS, "const bool fine = wait_staged(call, rows, own);", "const bool fine = true;"),),
        "token .* is",
    ),
    "one of two counters is looked at": (
        "rows",
        ((ROWS, "last = (tile.row + gemm::least(tile.rows, kBlockM) - 1) / kCounted;", "last = first;"),),
        "row 2 is",
    ),
    "who draws any row brings the token": (
        "rows",
        ((ROWS, "if (at >= 0 && at < lowest) lowest = at;", ""),),
        "counted twice",
    ),
    "the last counter waits for a whole block": (
        "rows",
        ((ROWS, "gemm::least(kCounted, count_rows(rows) - kCounted * block)", "kCounted"),),
        "for ever",
    ),
    "sums over a stage that is being filled": (
        "home, sums first",
        (
            (HOME, "            if (sums_first) ptx::named_barrier(kLoadBarrier, kSummers + 32);\n", ""),
            (HOME, f"{ENGINE}            ptx::named_barrier(kLoadBarrier, kSummers + 32);\n", ENGINE),
        ),
        "over a tile",
    ),
    "own pieces before others'": (
        "home, sums behind",
        (
            (HOME, "bool end() {\n        if (!reduce_others()) return false;\n", "bool end() {\n"),
            (HOME, ">= home;\n", ">= home && !(!reduce_others());\n"),
        ),
        "for ever",
    ),
    "others' pieces left at the end": (
        "home, sums behind",
        ((HOME, "bool end() {\n        if (!reduce_others()) return false;\n", "bool end() {\n"),),
        "for ever",
    ),
    "the piece put aside is forgotten": (
        "home, sums first",
        (
            (
                HOME,
                "tokens, home,\n                                aside < home ? aside : draw_again(",
                "tokens, home, draw_again(",
            ),
        ),
        "summed 0 times",
    ),
    "home without credit": ("home, three calls", ((HOME, CREDIT, ""),), "sum .* is"),
    "home, credit a call early": (
        "home, three calls",
        ((HOME, CREDIT, CREDIT.replace("2", "3")),),
        "sum .* is",
    ),
    "rows of a part told without the copy engine's fence": (
        "parts",
        (
            (
                PARTS,
                "                ptx::fence_async();\n                ptx::fence_gpu();",
                "ptx::fence_gpu();",
            ),
        ),
        "is under way",
    ),
    "rows of a part told without a fence": ("parts", ((PARTS, "ptx::fence_gpu();", ""),), "is under way"),
    "a part told while it is stored": (
        "parts",
        ((PARTS, "note<kCommits>();", "note<2 * kCommits>();"),),
        "is under way",
    ),
    "the last tile of a group is not told of": (
        "parts",
        ((PARTS, "note<0>();\n        ptx::add_release_cta(", "ptx::add_release_cta("),),
        "for ever",
    ),
    "the last turn is known behind its rows": (
        "parts",
        ((PARTS, LAST, ""), (PARTS, TAKEN, TAKEN + LAST)),
        "for ever",
    ),
    "a part loaded before the wait has ended": (
        "parts",
        ((PARTS, "*status = 1;\n        ptx::fence_async();", "*status = 1;"),),
        "before the wait",
    ),
    "the first block behind sets counters of parts back": (
        "parts",
        ((BEHIND, "gridDim.x - 1", "0"),),
        "for ever",
    ),
    "counters of parts are not set back": (
        "parts, two calls",
        ((BEHIND, "progress[i] = 0;", ";"),),
        "behind both products",
    ),
    "a scale stored behind the group's barrier": (
        "scales",
        ((FP8, SCALE, ""), (FP8, SENT, SENT + SCALE)),
        "a scale of part . is under way",
    ),
    "scales told without a fence": ("scales", ((PARTS, "ptx::fence_gpu();", ""),), "is under way"),
    "scales asked for before the wait": (
        "scales",
        ((LOAD, f"            ready(tile);\n{SLOT}", f"{SLOT}            ready(tile);\n"),),
        "a scale of part . is",
    ),
    "a piece told without a fence": (
        "home, sums behind",
        (
            (
                REDUCE,
                f"        ptx::fence_sys();\n{FLAG}",
                FLAG,
            ),
        ),
        "is under way",
    ),
    "a part told with the tile that is being stored": (
        "down",
        ((DOWN, TOLD, "        part = tile.column / part_columns, rows_sent = rows;\n        tell();\n"),),
        "tile . is under way",
    ),
    "a part told before its last stores": (
        "down",
        (
            (
                "gemm/run.cuh",
                "    if (thread == 0) ptx::bulk_wait<0>();\n    sink.ended(thread);\n",
                "    sink.ended(thread);\n    if (thread == 0) ptx::bulk_wait<0>();\n",
            ),
        ),
        "tile . is under way",
    ),
    "nobody waits for a part": (
        "down",
        ((SUMMERS, "if (!wait_written(ready)) return false;", ";"),),
        "tile . is",
    ),
    "own pieces of a part drawn before others'": (
        "down",
        (
            (
                SUMMERS,
                "        bool home = number >= others;\n",
                "        number = both * parts - 1 - number;\n        bool home = number >= others;\n",
            ),
        ),
        "for ever",
    ),
    "down without credit": (
        "down, three calls",
        ((SUMMERS, RUN, "if (!__all_sync(~0u, fine))"),),
        "sum .* is",
    ),
    "down, credit a call early": (
        "down, three calls",
        ((SUMMERS, RUN, RUN.replace("2)", "3)")),),
        "sum .* is",
    ),
    "a begin that is not told": ("down, three calls", ((DOWN, TELL_STARTED, ""),), "for ever"),
    "own sums nobody waited for": (
        "down",
        ((SUMMERS, "if (job.home && !wait_reduced(call, job.flag)) return false;", ""),),
        "sum .* is",
    ),
    "tickets not set back": (
        "down, three calls",
        ((PROTOCOL, "        call.own->drawn[call.kind][0] = call.own->drawn[call.kind][1] = 0;\n", ""),),
        "summed 0 times",
    ),
    "others' tokens before their rows are written": (
        "first",
        ((FIRST, "if (!wait_written(0)) return false;", ""),),
        "tile 0 is",
    ),
    "own tokens before their rows are written": (
        "first",
        ((FIRST, "if (!wait_written(1)) return false;", ""),),
        "tile 1 is",
    ),
    "who begins with own tokens waits for their own list alone": (
        "first, a warp begins with own pieces",
        (
            (FIRST, "        if (!wait_written(0)) return false;\n", ""),
            (FIRST, FIRST_PIECES, f"if (!wait_written(0)) return false;\n{FIRST_PIECES}"),
        ),
        "tile 0 is",
    ),
    "own tokens before others' in a list": (
        "first",
        (
            (FIRST, f"            {FIRST_PIECES}\n", ""),
            (FIRST, ">= home;\n", f">= home;\n        {FIRST_PIECES}\n"),
        ),
        "for ever",
    ),
    "a block that stops drops what it has drawn": (
        "first, two tiles of own rows",
        (
            (
                FIRST,
                "        return stops && order.product > 0",
                "        const int drawn = stops ? static_cast<int>(atomicAdd(counter, 1u)) : 0;\n"
                "        return stops && order.product > 0",
            ),
        ),
        "for ever",
    ),
    "a list told with the tile that is being stored": (
        "first",
        (
            (
                FIRST,
                "            ptx::bulk_wait<C::kOutputs>();  // a commit for every 64 columns of this tile\n",
                "",
            ),
        ),
        "tile . is under way",
    ),
    "a list told before its last stores": (
        "first",
        (
            (
                "gemm/halves.cuh",
                "    if (stores.thread == 0) ptx::bulk_wait<0>();\n    sink.ended(stores.thread);\n",
                "    sink.ended(stores.thread);\n    if (stores.thread == 0) ptx::bulk_wait<0>();\n",
            ),
        ),
        "tile . is under way",
    ),
    "ends of own rows told without a fence": (
        "first, own rows are looked for",
        ((OWN, "                ptx::fence_gpu();\n", ""),),
        "own rows is under way",
    ),
    "ends of own rows told before they are stored": (
        "first, own rows are looked for",
        (
            (OWN, "                rows.own[i] = found;\n", ""),
            (OWN, "(rows.bounds, 1);\n", "(rows.bounds, 1);\n                rows.own[i] = found;\n"),
        ),
        "own rows is",
    ),
    "nobody waits for ends of own rows": (
        "first, own rows are looked for",
        ((FIRST, "while (ptx::load_acquire_gpu(known) != due && --patience)", "while (0)"),),
        "own rows is",
    ),
    "others first without credit": ("first, three calls", ((FIRST, CREDIT, ""),), "sum .* is"),
    "a begin of others first that is not told": (
        "first, three calls",
        ((FIRST, TELL_STARTED.replace("            ", "        ", 1).replace(" " * 16, " " * 12), ""),),
        "for ever",
    ),
    "a wait without an end": (
        "down, a rank dies",
        ((PROTOCOL, "        if (stop_waiting(call, phase, peer, start, polls)) return false;\n", ""),),
        "for ever",
    ),
}
"""Where, what is put in, and what the model then says."""


@pytest.mark.parametrize("name", FAULTS)
def test_faults_are_found(name: str) -> None:
    case, edits, says = FAULTS[name]
    explored = explore(machine(case, edits), 100_000)
    assert explored.fault is not None
    assert re.search(says, explored.fault), explored.fault


WAIT = "    ptx::wait_for_launches();\n"


@pytest.mark.parametrize(
    ("case", "file", "wait"),
    [
        ("home, sums first", HOME, f"        {WAIT}            fine"),
        ("home, sums first", HOME, f"    {WAIT}        fine"),
        ("home, sums first", HOME, f"    if (!home.early) {WAIT.lstrip()}"),
        ("down", DOWN, WAIT),
        ("first", FIRST, f"    {WAIT}"),
    ],
    ids=["home, sums first", "home, sums behind", "home, tiles", "down", "first"],
)
def test_a_kernel_waits_for_the_launch_before_it(case: str, file: str, wait: str) -> None:
    with pytest.raises(LookupError, match="before it waits for the launch before it"):
        machine(case, ((file, wait, wait.replace(WAIT.lstrip(), "")),))


def test_tiles_of_others_first_wait_for_their_rows() -> None:
    with pytest.raises(LookupError, match="'produce' before it waits"):
        machine("first", ((FIRST, "PartMade ready{", "Always ready{"),))


def test_what_the_model_does_not_know_is_said() -> None:
    tell = "            if (!job.home) tell();\n"
    with pytest.raises(LookupError, match="the model does not know wait_peers"):
        machine("down", ((SUMMERS, tell, f"            wait_peers();\n{tell}"),))
