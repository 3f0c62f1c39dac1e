"""The grouped GEMM's kernel source, run on the CPU: indices, ragged ends, ring and turns, against fp64."""

from __future__ import annotations

import ctypes
import re
import shutil
from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from imbrex.kernels.ffn import glue
from imbrex.kernels.gemm import gemm
from imbrex.kernels.gemm.gemm import ALONE, FOLLOWS, Epilogue, Layout, Tiling, begins_behind, launch_gemm
from imbrex.kernels.gemm.tiling import LOW, OWN, SHARED, SMALL, TALL
from imbrex.kernels.jit import KernelError
from tests.emulated.gemm import NARROW, Edits, emulate
from tests.emulated.ragged import LIMIT, TAIL, check_rows, draw, ends_of, error, per_expert, poisoned, rows_of
from tests.ranks.forked import Forked

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="compiles the kernel with g++")
COUNTS = [130, 0, 1, 70]
PAIR = SHARED._replace(cluster=2)


@pytest.mark.parametrize(("tiling", "width"), [(SHARED, 136), (LOW, 64)], ids=["shared", "low"])
def test_forward_keeps_gate_and_up(monkeypatch: pytest.MonkeyPatch, tiling: Tiling, width: int) -> None:
    torch.manual_seed(0)
    a, b, counter = (
        rows_of(COUNTS, width),
        draw(len(COUNTS), 2 * 144, width),
        torch.zeros(2, dtype=torch.int32),
    )
    act, gate_up = poisoned(a.shape[0], 144), poisoned(a.shape[0], 288)
    emulate(monkeypatch, [a, b, act, gate_up], blocks=2)
    launch_gemm(
        Layout.FORWARD,
        a,
        b,
        ends_of(COUNTS),
        act,
        counter,
        tiling=tiling,
        epilogue=Epilogue.SWIGLU_KEEP,
        gate_up=gate_up,
    )
    reference = per_expert(COUNTS, a, b.mT)
    gate, up = reference.chunk(2, 1)
    check_rows(gate_up, reference)
    check_rows(act, F.silu(gate) * up)
    assert counter.tolist() == [0, 0]


@pytest.mark.parametrize("steps", [1, 2, 3])
@pytest.mark.parametrize("epilogue", [Epilogue.WEIGHTED, Epilogue.SWIGLU])
def test_tiles_that_begin_while_another_is_stored(
    monkeypatch: pytest.MonkeyPatch, epilogue: Epilogue, steps: int
) -> None:
    """One block, eight tiles: of one half and of two, of rows for both groups and for one."""
    torch.manual_seed(11)
    swiglu = epilogue is Epilogue.SWIGLU
    counts, columns = [200, 0, 1, 70], 352
    a, b = rows_of(counts, 64 * steps), draw(len(counts), columns, 64 * steps)
    out, weights = poisoned(a.shape[0], columns // (1 + swiglu)), torch.rand(a.shape[0])
    emulate(monkeypatch, [a, b, out], blocks=1, seed=steps)
    counter = torch.zeros(2, dtype=torch.int32)
    launch_gemm(
        Layout.FORWARD, a, b, ends_of(counts), out, counter,
        tiling=SHARED, epilogue=epilogue, weights_R=None if swiglu else weights,
    )  # fmt: skip
    products = per_expert(counts, a, b.mT)
    gate, up = products.chunk(2, 1)
    check_rows(out, F.silu(gate) * up if swiglu else products * weights[: sum(counts), None].double())


def test_segments_give_the_order_and_the_part(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two column slices over all experts, the second one first; rows weighted."""
    torch.manual_seed(1)
    a, b, weights = rows_of(COUNTS, 64), draw(len(COUNTS), 256, 64), torch.rand(sum(COUNTS) + TAIL)
    out, ends = poisoned(a.shape[0], 256), [0, *accumulate(COUNTS)]
    slices = [(e, ends[e], ends[e + 1], c, c + 128) for c in (128, 0) for e in range(len(COUNTS))]
    emulate(monkeypatch, [a, b, out], blocks=2)
    launch_gemm(
        Layout.FORWARD,
        a,
        b,
        ends_of(COUNTS),
        out,
        torch.zeros(2, dtype=torch.int32),
        tiling=NARROW,
        epilogue=Epilogue.WEIGHTED,
        weights_R=weights,
        segments=torch.tensor(slices, dtype=torch.int32),
    )
    check_rows(out, per_expert(COUNTS, a, b.mT) * weights[: sum(COUNTS), None].double())


@pytest.mark.parametrize("blocks", [1, 7, 40], ids=["one block", "few", "more than tiles"])
@pytest.mark.parametrize("tiling", [SMALL, SHARED], ids=["small", "shared"])
def test_blocks_begin_near_their_first_tile(
    monkeypatch: pytest.MonkeyPatch, blocks: int, tiling: Tiling
) -> None:
    """Of 70 experts, of which few have rows, the last one too or not; every row is computed."""
    torch.manual_seed(3)
    for filled in ({2: 3, 3: 70, 33: 1, 69: 66}, {0: 1, 40: 5}, {68: 2}):
        counts = [filled.get(expert, 0) for expert in range(70)]
        a, b, weights = rows_of(counts, 64), draw(70, 264, 64), torch.rand(sum(counts) + TAIL)
        out, counter = poisoned(a.shape[0], 264), torch.zeros(2, dtype=torch.int32)
        emulate(monkeypatch, [a, b, out], blocks=blocks)
        how = {"tiling": tiling, "epilogue": Epilogue.WEIGHTED, "weights_R": weights}
        launch_gemm(Layout.FORWARD, a, b, ends_of(counts), out, counter, **how)
        check_rows(out, per_expert(counts, a, b.mT) * weights[: sum(counts), None].double())
        assert counter.tolist() == [0, 0]


PAIRED = {
    "swiglu": (Layout.FORWARD, Epilogue.SWIGLU, SHARED, 192, 288),
    "forward": (Layout.FORWARD, Epilogue.PLAIN, SHARED, 136, 600),
    "rows' gradient": (Layout.DGRAD, Epilogue.PLAIN, SHARED, 72, 640),
}


@pytest.mark.parametrize("case", list(PAIRED))
def test_a_cluster_computes_the_same_bits(monkeypatch: pytest.MonkeyPatch, case: str) -> None:
    """Two clusters against one block; pairs that share columns, that do not, and one of a single tile."""
    torch.manual_seed(8)
    (layout, epilogue, tiling, depth, columns), counts = PAIRED[case], [200, 0, 1, 330]
    a = rows_of(counts, depth)
    b = draw(4, *((depth, columns) if layout is Layout.DGRAD else (columns, depth)))
    shape = (a.shape[0], columns // 2 if epilogue is Epilogue.SWIGLU else columns)
    found = []
    for cluster in (1, 2):
        out, counter = poisoned(*shape), torch.zeros(2, dtype=torch.int32)
        emulate(monkeypatch, [a, b, out], blocks=3 * cluster - 2, seed=cluster)
        one = tiling._replace(cluster=cluster)
        launch_gemm(layout, a, b, ends_of(counts), out, counter, tiling=one, epilogue=epilogue)
        assert counter.tolist() == [0, 0]
        found.append(out)
    assert torch.equal(found[0].view(torch.int16), found[1].view(torch.int16))
    assert found[0].isnan().sum() == TAIL * shape[1]


HIGH = {
    "swiglu": (Layout.FORWARD, Epilogue.SWIGLU, 72, 288),
    "kept": (Layout.FORWARD, Epilogue.SWIGLU_KEEP, 264, 288),
    "forward": (Layout.FORWARD, Epilogue.PLAIN, 264, 520),
    "weighted": (Layout.FORWARD, Epilogue.WEIGHTED, 136, 264),
    "rows' gradient": (Layout.DGRAD, Epilogue.PLAIN, 136, 320),
}


def both_heights(
    monkeypatch: pytest.MonkeyPatch, case: str, edits: Edits = (), seed: int = 0
) -> list[tuple[Tensor, Tensor]]:
    """The result, and gate and up where kept, in tiles of 128 rows, and twice in `TALL` ones."""
    torch.manual_seed(8)
    (layout, epilogue, depth, columns), counts = HIGH[case], [200, 0, 1, 330, 64, 129, 192, 449]
    a, weights_R = rows_of(counts, depth), torch.rand(sum(counts) + TAIL)
    b = draw(len(counts), *((depth, columns) if layout is Layout.DGRAD else (columns, depth)))
    swiglu, found = epilogue in (Epilogue.SWIGLU, Epilogue.SWIGLU_KEEP), []
    for tiling, blocks in ((SHARED, 2), (TALL, 1), (TALL, 3)):
        out, kept = poisoned(len(a), columns // 2 if swiglu else columns), poisoned(len(a), columns)
        counter, how = torch.zeros(2, dtype=torch.int32), {"tiling": tiling, "epilogue": epilogue}
        how |= {"weights_R": weights_R} if epilogue is Epilogue.WEIGHTED else {}
        how |= {"gate_up": kept} if epilogue is Epilogue.SWIGLU_KEEP else {}
        emulate(monkeypatch, [a, b, out, kept], blocks=blocks, seed=blocks + seed, edits=edits)
        launch_gemm(layout, a, b, ends_of(counts), out, counter, **how)
        assert counter.tolist() == [0, 0]
        found.append((out, kept))
    return found


@pytest.mark.parametrize("case", list(HIGH))
def test_tall_tiles_have_the_bits_of_others(monkeypatch: pytest.MonkeyPatch, case: str) -> None:
    """Experts of one block of 64 rows to eight, the last block whole and not."""
    first, *others = both_heights(monkeypatch, case)
    assert first[0].isnan().sum() == TAIL * first[0].shape[1]
    for other in others:
        for one, two in zip(first, other, strict=True):
            assert torch.equal(one.view(torch.int16), two.view(torch.int16))


@pytest.mark.parametrize("tiling", [SHARED, PAIR, SMALL], ids=["shared", "pair", "small"])
def test_gathered_rows_give_the_bits_of_a_copy(monkeypatch: pytest.MonkeyPatch, tiling: Tiling) -> None:
    """Tokens that are wanted twice, once and never; those are NaN, and so is what lies past the last row."""
    torch.manual_seed(9)
    counts, tokens = [330, 0, 1, 70], 60
    x, b = draw(tokens, 136), draw(4, 2 * 144, 136)
    x[tokens // 2 :] = float("nan")
    index = torch.randint(tokens // 2, (sum(counts) + TAIL,))
    index[sum(counts) :] = tokens - 1
    found = []
    for source in (None, index):
        out, counter = poisoned(len(index), 144), torch.zeros(2, dtype=torch.int32)
        a = x[index] if source is None else x
        emulate(monkeypatch, [a, b, out], blocks=2 * tiling.cluster)
        how = {"tiling": tiling, "epilogue": Epilogue.SWIGLU, "index_R": source}
        launch_gemm(Layout.FORWARD, a, b, ends_of(counts), out, counter, **how)
        assert counter.tolist() == [0, 0]
        found.append(out)
    assert torch.equal(found[0].view(torch.int16), found[1].view(torch.int16))
    assert found[0].isnan().sum() == TAIL * 144


@pytest.mark.parametrize("depth", [64, 512, 1160], ids=["one step", "all stages", "more than stages"])
def test_a_product_that_follows_has_the_same_bits(monkeypatch: pytest.MonkeyPatch, depth: int) -> None:
    """Columns of a block's first tile are asked for before its rows, which come in boxes of 16; few blocks
    have several tiles."""
    torch.manual_seed(9)
    counts = [3, 0, 1, 70]
    a, b, weights = rows_of(counts, depth), draw(4, 264, depth), torch.rand(sum(counts) + TAIL)
    found = []
    for beside in (ALONE, FOLLOWS):
        out, counter = poisoned(len(a), 264), torch.zeros(2, dtype=torch.int32)
        emulate(monkeypatch, [a, b, out], blocks=3)
        tiling = SMALL._replace(box=16) if beside is FOLLOWS else SMALL
        how = {"tiling": tiling, "epilogue": Epilogue.WEIGHTED, "weights_R": weights, "beside": beside}
        launch_gemm(Layout.FORWARD, a, b, ends_of(counts), out, counter, **how)
        assert counter.tolist() == [0, 0]
        found.append(out)
    assert torch.equal(found[0].view(torch.int16), found[1].view(torch.int16))
    assert found[0].isnan().sum() == TAIL * 264


@pytest.mark.parametrize("counts", [[70, 0, 200], [9, 0, 1, 64, 65] * 3], ids=["few", "many"])
@pytest.mark.parametrize(
    ("tiling", "keep"), [(SHARED, True), (SMALL, False), (LOW, True), (PAIR, False), (TALL, True)], ids=str
)
def test_a_product_behind_has_the_same_bits(
    monkeypatch: pytest.MonkeyPatch, tiling: Tiling, keep: bool, counts: list[int]
) -> None:
    """Gate and up tell of every part of fewer and of more experts than there are parts, and down leaves zeros
    behind; told of nothing, down does not end."""
    torch.manual_seed(9)
    x, gate_up, down = rows_of(counts, 72), draw(len(counts), 2 * 144, 72), draw(len(counts), 264, 144)
    groups, results = glue.Groups(torch.cat([torch.zeros(glue.COUNTERS).int(), ends_of(counts)])), []
    for behind in (False, True):
        act, kept, out = poisoned(len(x), 144), poisoned(len(x), 288), poisoned(len(x), 264)
        emulate(monkeypatch, blocks=2 * tiling.cluster)
        up: dict[str, Any] = {"epilogue": Epilogue.SWIGLU}
        if keep:
            up = {"epilogue": Epilogue.SWIGLU_KEEP, "gate_up": kept}
        more: dict[str, Any] = {"progress": groups.progress} if behind else {}
        operands = groups.ends_e, act, groups.counter
        launch_gemm(Layout.FORWARD, x, gate_up, *operands, tiling=tiling, **up, **more)
        if behind:
            assert int(groups.progress.sum()) == sum(counts) * -(-144 // (tiling.block_n // 2))
            more["beside"] = begins_behind(-(-144 // (tiling.block_n // 2)))
        operands = groups.ends_e, out, groups.other_counter
        launch_gemm(Layout.FORWARD, act, down, *operands, tiling=tiling, **more)
        assert not groups.plan[: -len(counts)].any()
        results.append(out.view(torch.int16))
    assert torch.equal(results[0], results[1])
    assert poisoned(TAIL, 264).view(torch.int16).equal(results[1][-TAIL:])


@pytest.mark.parametrize("columns", [128, 136], ids=["wide", "narrow"])
def test_gradient_of_rows(monkeypatch: pytest.MonkeyPatch, columns: int) -> None:
    torch.manual_seed(2)
    d_out, b = rows_of(COUNTS, 72), draw(len(COUNTS), 72, columns)
    out = poisoned(d_out.shape[0], columns)
    emulate(monkeypatch, [d_out, b, out], blocks=2)
    launch_gemm(
        Layout.DGRAD, d_out, b, ends_of(COUNTS), out, torch.zeros(2, dtype=torch.int32), tiling=NARROW
    )
    check_rows(out, per_expert(COUNTS, d_out, b))


def weight_gradient(
    monkeypatch: pytest.MonkeyPatch, tiling: Tiling, columns: int, edits=(), seed: int = 0
) -> float:
    """Error of one weight gradient; tiles of 3, 0, 1 and 2 steps, several a block."""
    torch.manual_seed(3)
    d_out, x = rows_of(COUNTS, 192), rows_of(COUNTS, columns)
    out = poisoned(len(COUNTS), 192, columns)
    emulate(monkeypatch, [d_out, x, out], blocks=1, edits=edits, seed=seed)
    launch_gemm(
        Layout.WGRAD, d_out, x, ends_of(COUNTS), out, torch.zeros(2, dtype=torch.int32), tiling=tiling
    )
    pieces = zip(d_out[:-TAIL].double().split(COUNTS), x[:-TAIL].double().split(COUNTS), strict=True)
    assert not out.isnan().any()
    return error(out, torch.stack([d.T @ x for d, x in pieces]))


@pytest.mark.parametrize(("tiling", "columns"), [(SHARED, 136), (OWN, 192)], ids=["narrow", "ping-pong"])
def test_gradient_of_weights(monkeypatch: pytest.MonkeyPatch, tiling: Tiling, columns: int) -> None:
    assert weight_gradient(monkeypatch, tiling, columns) < LIMIT


@pytest.mark.parametrize(
    ("tiling", "dtype"), [(SHARED, torch.float32), (OWN, torch.bfloat16)], ids=["float", "bf16"]
)
def test_gradient_is_added(monkeypatch: pytest.MonkeyPatch, tiling: Tiling, dtype: torch.dtype) -> None:
    torch.manual_seed(6)
    d_out, x, before = (
        rows_of(COUNTS, 72),
        rows_of(COUNTS, 136),
        8 * torch.randn(len(COUNTS), 72, 136).to(dtype),
    )
    out = before.clone()
    emulate(monkeypatch, [d_out, x, out], blocks=2)
    launch_gemm(
        Layout.WGRAD,
        d_out,
        x,
        ends_of(COUNTS),
        out,
        torch.zeros(2, dtype=torch.int32),
        tiling=tiling,
        epilogue=Epilogue.ADD if dtype == torch.bfloat16 else Epilogue.ADD_FLOAT,
    )
    pieces = zip(d_out[:-TAIL].double().split(COUNTS), x[:-TAIL].double().split(COUNTS), strict=True)
    wanted = torch.stack([d.T @ x for d, x in pieces]) + before.double()
    assert error(out, wanted) < (LIMIT if dtype == torch.bfloat16 else 1e-6)


FAULTS = {
    "groups without turns": (
        "if (C::kPingpong && index > 0)",
        "if (false)",
        "AssertionError|more arrivals than the barrier expects",
    ),
    "boxes outside their tensor": (
        "panels_b = least((tile.columns + 63) / 64, C::kBlockN / 64)",
        "panels_b = C::kBlockN / 64",
        "a box outside its tensor",
    ),
    "a stage freed before its product": (
        "ptx::wgmma_wait<1>();\n        if (step > 0) release_stage<C>(shared.empty + 8 * before);",
        "if (step > 0) release_stage<C>(shared.empty + 8 * before);",
        "AssertionError",
    ),
    "a half begun before it is read": (
        "low.write(d, weights);\n    if (begun) {",
        "if (begun) multiply_half<C, 0>(d, a, b, true);\n    low.write(d, weights);\n    if (begun) {",
        "AssertionError|patience|gave up",
    ),
}
"""What went wrong once, or could: the text of the kernel, the fault in its place, and how it shows."""


TALL_FAULTS = {
    "written over what the other group multiplies": (
        "if (tile.rows > 64) ptx::named_barrier(kTallBarrier, 256);",
        "",
    ),
    "loaded over panels that leave": (
        "if (thread == 0) ptx::bulk_wait_read<0>();\n            ptx::named_barrier(1 + group, 128);\n"
        "            release_stage",
        "release_stage",
    ),
    "a stage freed before its product": (
        "ptx::wgmma_wait<1>();\n        if (step > 0) release_stage<C>(shared.empty + 8 * last);\n"
        "        last",
        "if (step > 0) release_stage<C>(shared.empty + 8 * last);\n        last",
    ),
    "the third block's other half": (
        "const u32 mine = b + group * (C::kBytesB / 2);",
        "const u32 mine = b + (1 - group) * (C::kBytesB / 2);",
    ),
    "rows of the next expert": ("third = least(tile.rows - 128, 64);", "third = tile.rows > 128 ? 64 : 0;"),
}
"""The same of tall tiles."""


def run_tall_with(fault: str) -> None:
    case = "swiglu" if fault.startswith("written over") else "forward"  # two steps: groups drift apart
    for seed in range(8):
        with pytest.MonkeyPatch.context() as patch:
            first, *others = both_heights(patch, case, (TALL_FAULTS[fault],), seed)
            assert all(torch.equal(first[0].view(torch.int16), out.view(torch.int16)) for out, _ in others)


@pytest.mark.parametrize("fault", list(TALL_FAULTS))
def test_faults_of_tall_tiles_are_caught(fault: str, tmp_path: Path) -> None:
    assert Forked(run_tall_with, fault, folder=tmp_path, traced=False).wait() != 0


LOST = {
    "who multiplies": ("if (step > 0) release_stage<C>(shared.empty + 8 * before);", ""),
    "who loads": ("u32 patience = Ready::kPatience, position", "u32 patience = 0, position"),
}
"""An arrival without which both wait in vain; and somebody who waits no more, where nobody else need wait."""


@pytest.mark.parametrize(("who", "depth"), [("who multiplies", 512), ("who loads", 64)])
def test_a_lost_arrival_is_reported(monkeypatch: pytest.MonkeyPatch, who: str, depth: int) -> None:
    """Every wait ends; the launch after the one that gave up says so."""
    status = torch.zeros(1, dtype=torch.int32)
    word = ctypes.c_int32.from_address(status.data_ptr())
    monkeypatch.setattr(gemm, "products_status", lambda device: status)
    monkeypatch.setattr(gemm, "_status_word", lambda device: word)
    rows, weight, out = draw(8, depth), draw(1, 64, depth), poisoned(8, 64)
    emulate(monkeypatch, blocks=1, edits=(LOST[who],))
    counter = torch.zeros(2, dtype=torch.int32)
    with pytest.raises(KernelError, match="its result is wrong"):
        launch_gemm(Layout.FORWARD, rows, weight, ends_of([8]), out, counter, tiling=SHARED)


def run_with(fault: str) -> None:
    tiling, columns = (OWN, 192) if "turns" in fault else (SHARED, 136)
    for seed in range(0, 80, 10):  # an interleaving each
        with pytest.MonkeyPatch.context() as patch:
            assert weight_gradient(patch, tiling, columns, (FAULTS[fault][:2],), seed) < LIMIT


@pytest.mark.parametrize("fault", list(FAULTS))
def test_faults_are_caught(fault: str, tmp_path: Path) -> None:
    """In a process of its own, since the emulator ends the process where it finds one."""
    ran = Forked(run_with, fault, folder=tmp_path, traced=False)
    assert ran.wait() != 0
    assert re.search(FAULTS[fault][2], ran.stderr), ran.stderr[-500:]
