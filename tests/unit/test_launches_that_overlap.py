"""Kernels of a small batch that begin beside the one before them: what they may touch before it has ended."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from imbrex.kernels import arguments, jit
from imbrex.kernels.exchange.groups import empty_groups
from imbrex.kernels.ffn import glue
from imbrex.kernels.gemm.gemm import ALONE, FOLLOWS, Epilogue, Layout, Tiling, launch_gemm
from imbrex.kernels.gemm.tiling import LOW, SMALL
from imbrex.kernels.routing.routed import Sizes, empty_routed
from imbrex.kernels.rows import weights
from imbrex.kernels.structs import SOURCES, struct
from imbrex.placement import contiguous
from tests.emulated import kernel
from tests.emulated.gemm import Edits, EmulatedKernel, emulate
from tests.emulated.kernel import available
from tests.emulated.ragged import TAIL, draw, ends_of, poisoned, rows_of
from tests.emulated.scenario import Case, check_small, make_exchange, make_inputs, route

pytestmark = pytest.mark.skipif(not available(), reason="needs g++")

COUNTS = [3, 0, 1, 70]
LATE: Edits = (
    (
        "    if (threadIdx.x < 128 * C::kGroups) ptx::wait_for_launches();\n",
        """    if (threadIdx.x == 0 && blockIdx.x == 0) {
        for (int i = 0; i < 200; ++i) ptx::pause();
        for (int e = 0; e < count; ++e) const_cast<int*>(ends)[e] = segments[e];
    }
""",
    ),
    ("run<C>({&map_a, &map_b, ends, segments, count", "run<C>({&map_a, &map_b, ends, nullptr, count"),
)
"""The launch before tells the ends, which the test has given as `segments`, long after this one has begun."""
AT_ONCE = ("    if (threadIdx.x / 32 == 4 * C::kGroups) wait_for_ends(ends, count);\n", "")


def first_product(
    monkeypatch: pytest.MonkeyPatch, tiling: Tiling, edits: Edits = ()
) -> tuple[torch.Tensor, torch.Tensor]:
    """A product alone, and one that begins before anybody knows where rows end."""
    torch.manual_seed(3)
    a, b = rows_of(COUNTS, 320), draw(len(COUNTS), 2 * 144, 320)
    results = []
    for beside in (ALONE, FOLLOWS):
        out, counter, ends = poisoned(len(a), 144), torch.zeros(2, dtype=torch.int32), ends_of(COUNTS)
        late = beside is FOLLOWS
        told = torch.full_like(ends, -1) if late else ends
        emulate(monkeypatch, blocks=3, edits=(*LATE, *edits) if late else ())
        how = {"tiling": tiling, "epilogue": Epilogue.SWIGLU, "beside": beside}
        launch_gemm(Layout.FORWARD, a, b, told, out, counter, **how, **({"segments": ends} if late else {}))
        assert counter.tolist() == [0, 0]
        results.append(out.view(torch.int16))
    return results[0], results[1]


@pytest.mark.parametrize("tiling", [SMALL, LOW], ids=["small", "low"])
def test_a_product_begins_before_it_is_known_where_rows_end(
    monkeypatch: pytest.MonkeyPatch, tiling: Tiling
) -> None:
    alone, beside = first_product(monkeypatch, tiling)
    assert torch.equal(alone, beside)
    assert poisoned(TAIL, 144).view(torch.int16).equal(beside[-TAIL:])


def test_a_product_that_does_not_wait_for_the_ends_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    alone, beside = first_product(monkeypatch, SMALL, (AT_ONCE,))
    assert not torch.equal(alone, beside)


def edited(monkeypatch: pytest.MonkeyPatch, files: dict[str, list[tuple[str, str]]]) -> Any:
    """What loads kernels from sources with these texts replaced, wherever a file has them."""
    for name, pairs in files.items():
        text = (SOURCES / name).read_text(encoding="utf-8")
        for old, new in pairs:
            assert old in text, f"{name} does not say {old!r}"
            text = text.replace(old, new)
        monkeypatch.setitem(arguments.HEADERS, name, text)
    mark = ("EDITED", sum(map(ord, str(files))))

    def load(variant: jit.Variant, device: Any = None) -> Any:
        touched = files.keys() & jit.sources_of(variant).keys()
        return kernel.load(replace(variant, defines=(*variant.defines, mark)) if touched else variant)

    return load


SMALL_CASE = Case(placement=contiguous(8, 2), tokens=(20, 17), choices=3)
TOLD = """__device__ inline void check_told(const Small& small, const int* plan, int end) {
    for (int i = 0; end >= 0 && i < small.counters; ++i)
        if (plan[i] != 0) emu::fail("the last end is told before a counter is there");
    for (int i = 0, before = 0; end >= 0 && i + 1 < small.slots; before = plan[small.counters + i++])
        if (plan[small.counters + i] < before) emu::fail("the last end is told before another");
}
"""
ALL_TOLD = """    for (int i = 0; i < small.counters; ++i)
        if (small.plan[call.local * static_cast<i64>(small.counters + small.slots) + i] != 0)
            emu::fail("who has rows is told before a counter is there");
"""
HITS = "    ffn::tell_hits(hits_of(call, small)"
ENTRIES = """    for (u32 i = 0; lane == 0 && i <= count; ++i)
        if (entry[i].x == 0x7fffffff || entry[i].y == 0x7fffffff)
            emu::fail("it is told how many experts have rows before one of them is there");
"""
LAST = "    if (lane == 0) ptx::store_release_gpu(hits, count);\n"
FIRST = "// One thread, when all that `write_groups` writes before is there; negative: it is not.\n"
STORE = "    ptx::store_release_gpu(reinterpret_cast<u32*>(plan + small.counters"
BEGIN = "    ptx::launch_dependents();\n    if (!fine) {"
UNKNOWN = """    if (small.row_weights && tells_groups(call) && threadIdx.x == 0 &&
        small.plan[(call.local + 1) * static_cast<i64>(small.counters + small.slots) - 1] >= 0)
        emu::fail("the next kernel may take old ends for those of this call");
    if (small.row_weights && tells_groups(call) && threadIdx.x == 0 &&
        static_cast<int>(hits_of(call, small)[0]) >= 0)
        emu::fail("the next kernel may take experts of an old call for those of this one");
"""


@pytest.mark.parametrize("sms", [2, 3, 5])
def test_who_has_rows_and_the_last_end_are_told_when_all_else_is_known(
    monkeypatch: pytest.MonkeyPatch, sms: int
) -> None:
    looks = [
        (FIRST, TOLD + FIRST),
        (STORE, "    check_told(small, plan, end);\n" + STORE),
        (BEGIN, UNKNOWN + BEGIN),
        (HITS, ALL_TOLD + HITS),
    ]
    files = {"exchange/small.cuh": looks, "ffn/hits.cuh": [(LAST, ENTRIES + LAST)]}
    exchange = make_exchange(SMALL_CASE, load=edited(monkeypatch, files), timeout=20.0)
    inputs = make_inputs(SMALL_CASE, "cpu")
    groups = empty_groups(2, exchange.shape.row_capacity, exchange.shape.most_slots, 12, exchange.device)
    for _ in range(2):
        groups.plan.fill_(7)
        groups.hits.fill_(0x7FFFFFFF)
        given = inputs.x_WTD, inputs.ids_WTK, inputs.weights_WTK, sms, inputs.tokens_W
        exchange.dispatch_small(*given, groups=groups)
        exchange.check(synchronize=True)
        assert (groups.plan[:, 12:] >= 0).all()


WAIT = "ptx::wait_for_launches();"
NOTE = "emu_waited.insert(&emu::self());"
WAITED = """#include <set>
namespace sums {
inline std::set<const void*> emu_waited;
inline void check_waited() {
    if (!emu_waited.count(&emu::self())) emu::fail("rows are asked for before they are there");
}
}  // namespace sums
"""
CHECK = "    ::sums::check_waited();\n"
SPOIL = "    if (ptx::lane_id() == 0) leave_if_failed(call, kRowsReduced);\n"
END = "    end_call(call);\n"
BEHIND = "BEHIND_DISPATCH ? !is_routed(name_call(group, kCombine), reduce.early)"
UNLESS_EARLY = f"    if ({BEHIND} : !reduce.early)\n        "


def test_sums_ask_for_rows_when_these_are_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor do they touch memory that the kernel before may still read."""
    terms = (SOURCES / "exchange/terms.cuh").read_text(encoding="utf-8")
    body = terms[terms.index("sum_tokens(") :]
    head = body[: body.index("{\n") + 2]
    files = {
        "exchange/terms.cuh": [("namespace sums {\n\nusing", WAITED + "namespace sums {\n\nusing")],
        "exchange/reduce.cuh": [(WAIT, NOTE), (SPOIL, "    check_waited();\n" + SPOIL)],
        "exchange/reduce.cu": [
            (UNLESS_EARLY + WAIT, "    emu_waited.erase(&emu::self());"),
            (WAIT, NOTE),
            (END, "    check_waited();\n" + END),
        ],
    }
    files["exchange/terms.cuh"].append((head, head + "    check_waited();\n"))
    monkeypatch.setattr(jit, "latest_launch", lambda device: SimpleNamespace(entry=FOLLOWS.file[1]))
    check_small(SMALL_CASE, make_exchange(SMALL_CASE, load=edited(monkeypatch, files), timeout=20.0))


CONTROL = struct("peers/protocol.cuh", "Control")


@pytest.mark.parametrize(
    ("placed", "told", "waits"), [(4, 3, False), (3, 3, True), (4, 1, True), (4, 2, True), (0, 0, True)]
)
def test_sums_behind_a_launch_that_dispatches_wait_until_routing_is_written(
    monkeypatch: pytest.MonkeyPatch, placed: int, told: int, waits: bool
) -> None:
    """Five blocks dispatch, one of which tells where tokens go, and is not counted among those that place."""
    note = "control_of(group, group.first)->unused = 1;"
    files = {"exchange/reduce.cu": [(UNLESS_EARLY + WAIT, UNLESS_EARLY + note)]}
    exchange, inputs = make_exchange(SMALL_CASE, load=edited(monkeypatch, files)), make_inputs(SMALL_CASE)
    routed, heaps = route(SMALL_CASE, exchange, inputs), exchange.heap.local
    at, unused = CONTROL.drawn.offset + 8 * 4, CONTROL.unused.offset
    heaps[:, at : at + 8] = torch.tensor([placed, told], dtype=torch.int32).view(torch.uint8)
    rows = torch.randn(2, exchange.shape.row_capacity, SMALL_CASE.width).bfloat16()
    y = exchange.combine(rows, routed, num_sms=2, behind=5)
    exchange.check(synchronize=True)
    assert bool(heaps[:, unused].any()) is waits
    again, tokens = exchange.combine(rows, routed, num_sms=2), min(SMALL_CASE.tokens)
    assert torch.equal(y[:, :tokens], again[:, :tokens])


def test_sums_of_a_rank_alone_ask_for_rows_when_these_are_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """And only for positions before, which are older than the launch that makes the rows."""
    asked = "    const u32 there = __ballot_sync(0xffffffffu, row >= 0);\n"
    head = "namespace ffn {\n\nstruct __align__(16) Eight"
    edits = (head, WAITED + head), (WAIT, "::sums::" + NOTE), (asked, CHECK + asked)
    sums = EmulatedKernel(jit.Variant(source=glue.SOURCE, entry="sum_four_rows"), 0, None, edits)
    monkeypatch.setattr(glue, "_kernel", lambda entry, _: sums)
    monkeypatch.setattr(glue, "_blocks", lambda _: 2)
    rows, position = torch.randn(5, 264).bfloat16(), torch.tensor([[0, 4, -1], [3, 1, 2], [-1, 4, 0]])
    y = glue.sum_rows(rows, position, None, early=True)
    wanted = torch.cat([rows.float(), torch.zeros(1, 264)])[position].sum(1)
    assert (y.float() - wanted).abs().max() <= 2**-7 * wanted.abs().max()


def test_weights_are_spread_when_routing_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """And nothing is written before: the launch before may still read what stands there."""
    first = "__device__ __forceinline__ int first() { "
    edits = [
        ("namespace rows {\n\nconstexpr", WAITED + "namespace rows {\n\nconstexpr"),
        (first, first + "::sums::check_waited(); "),
        (WAIT, "::sums::" + NOTE),
    ]
    files = {"rows/weights.cu": edits}
    monkeypatch.setattr(weights, "_BLOCKS", 2)
    variant, load = weights.shipped_variants()[0], edited(monkeypatch, files)
    monkeypatch.setattr(weights, "_kernel", lambda *which: load(variant))
    routed = empty_routed(Sizes(local_ranks=1, ranks=3, choices=2, most_slots=4), 40, torch.device("cpu"))
    routed.position_LWTK[:] = (torch.randperm(240) - 60).view(1, 3, 40, 2)
    routed.weights_LWTK[:] = torch.rand(1, 3, 40, 2)
    routed.counts_Le[:] = torch.tensor([50, 0, 70, 9])
    ours, theirs = weights.run_spread(routed, 170, 3), weights.spread(routed, 170, 3)
    assert all(torch.equal(one, other) for one, other in zip(ours[:3], theirs[:3], strict=True))
