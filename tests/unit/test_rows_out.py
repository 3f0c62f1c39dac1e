"""Rows that come while gate and up are computed: the bits of a pull and a product, and faults that show."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from imbrex.contracts import Placement
from imbrex.kernels.gemm import gemm
from imbrex.kernels.gemm.gemm import Epilogue
from imbrex.kernels.gemm.tiling import GRADIENT_TILINGS, PAIRED, SHARED, SMALL, TALL
from imbrex.kernels.jit import KernelError
from imbrex.placement.layouts import contiguous
from tests.emulated import kernel
from tests.emulated.gemm import Edits, emulate
from tests.emulated.home import loader
from tests.emulated.rows_out import Forward, apart, begin, beside, differences, rows_before
from tests.emulated.scenario import Case, make_exchange

pytestmark = pytest.mark.skipif(not kernel.available(), reason="needs g++")
WIDTH, INNER = 448, 72
"""Seven steps, more than there are stages; columns that end within a tile."""


def case_of(ranks: int, tokens: tuple[int, ...], experts: int = 4, **more: Any) -> Case:
    return Case(placement=contiguous(experts, ranks), tokens=tokens, width=WIDTH, **{"choices": 2, **more})


CASES = {
    "one rank": case_of(1, (70,)),
    "two ranks": case_of(2, (90, 131), seed=1),
    "one gets all": case_of(2, (60, 50), seed=2, skew=1e6, drop=0.0),
    "empty ranks": case_of(4, (40, 0, 33, 5), experts=8, choices=3, seed=3),
    "one choice": case_of(2, (33, 20), choices=1, seed=4, drop=0.5),
    "eight choices": case_of(2, (24, 18), experts=16, choices=8, seed=5),
    "replicas": Case(
        placement=Placement(num_experts=3, slots=(0, 1, 2, 0), rank_offsets=(0, 2, 4)),
        tokens=(50, 61),
        choices=2,
        width=WIDTH,
        seed=6,
        balanced=True,
    ),
    "tensor ranks": case_of(2, (30, 40, 20, 10), seed=7, tensor=2),
    "tall": case_of(2, (150, 140), seed=4),
}
"""Of the last, 148 rows of an expert of rank 0 begin behind 123: a tall tile of them is three counters'."""


def made(case: Case, monkeypatch: Any, tiling: Any = SHARED, edits: Edits = (), blocks: int = 4) -> Forward:
    emulate(monkeypatch, None, blocks=blocks, edits=edits)
    return begin(case, INNER, make_exchange(case, load=kernel.load), tiling)


@pytest.mark.parametrize("name", CASES)
def test_bits_of_a_pull_and_a_product(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    forward = made(CASES[name], monkeypatch)
    wanted = apart(forward)
    for _ in range(2):  # counters, tickets and buffers of a second call
        assert differences(beside(forward), wanted) == []


@pytest.mark.parametrize("name", ["two ranks", "empty ranks", "replicas"])
def test_rows_that_are_read_before_their_product(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """By a hook on the experts: the movers in a kernel of their own."""
    forward = made(CASES[name], monkeypatch)
    assert rows_before(forward, 2, loader()) == [True] * forward.case.ranks


@pytest.mark.parametrize("movers", [1, 3])
def test_the_first_blocks_alone_can_bring_all_rows(movers: int, monkeypatch: pytest.MonkeyPatch) -> None:
    forward = made(CASES["two ranks"], monkeypatch)
    assert differences(beside(forward, movers=movers), apart(forward)) == []


@pytest.mark.parametrize("tiling", [PAIRED, SMALL, TALL], ids=("pairs", "small", "tall"))
def test_other_tilings(tiling: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    forward = made(CASES["tall" if tiling == TALL else "two ranks"], monkeypatch, tiling)
    assert differences(beside(forward), apart(forward)) == []


@pytest.mark.parametrize(
    ("name", "width"),
    [
        ("two ranks", 512),
        ("two ranks", 2560),
        ("empty ranks", 512),
        ("replicas", 512),
        ("tensor ranks", 2560),
    ],
)
def test_rows_that_cross_in_fp8_have_the_bits_of_the_codec(
    name: str, width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Decoded on their way; the own tokens never were coded."""
    case = replace(CASES[name], width=width)
    emulate(monkeypatch, None, blocks=4)
    forward = begin(case, INNER, make_exchange(case, load=kernel.load), SHARED, fp8=True)
    forward.inputs.x_WTD[:, 1, :128] = 0.0
    forward.inputs.x_WTD[:, 2, 3] = 3e30  # a scale that divides slowly
    wanted = apart(forward)
    assert differences(beside(forward), wanted) == []


GRADIENTS = {
    "plain": (Epilogue.PLAIN, SHARED),
    "plain, pairs": (Epilogue.PLAIN, PAIRED),
    "plain, small": (Epilogue.PLAIN, SMALL),
    "plain, tall": (Epilogue.PLAIN, TALL),
    "swiglu": (Epilogue.SWIGLU_GRADIENT, GRADIENT_TILINGS[0]),
    "swiglu, small": (Epilogue.SWIGLU_GRADIENT, GRADIENT_TILINGS[1]),
}


def gradient_of(case: Case, name: str, monkeypatch: Any, *, fp8: bool = False) -> Forward:
    emulate(monkeypatch, None, blocks=4)
    epilogue, tiling = GRADIENTS[name]
    exchange = make_exchange(case, load=kernel.load)
    return begin(case, 192, exchange, tiling, gradient=epilogue, fp8=fp8)


TURNS = [
    (case, name)
    for i, case in enumerate(("two ranks", "empty ranks", "replicas", "tensor ranks"))
    for j, name in enumerate(GRADIENTS)
    if (i + j) % 2 == 0
]
"""Where rows come from is nothing to the product: each way of either meets two of the other's."""


@pytest.mark.parametrize(("case", "name"), TURNS)
def test_rows_of_dy_beside_the_gradient_through_down(
    case: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    gradient = gradient_of(CASES[case], name, monkeypatch)
    wanted = apart(gradient)
    for _ in range(2):
        assert differences(beside(gradient), wanted) == []


@pytest.mark.parametrize(
    ("case", "name"),
    [
        ("two ranks", "plain, pairs"),
        ("two ranks", "swiglu"),
        ("empty ranks", "plain, pairs"),
        ("tensor ranks", "swiglu"),
    ],
)
def test_rows_of_dy_in_fp8_have_the_bits_of_the_codec(
    case: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    gradient = gradient_of(replace(CASES[case], width=1024), name, monkeypatch, fp8=True)
    gradient.inputs.x_WTD[:, 1, :128] = 0.0
    gradient.inputs.x_WTD[:, 2, 3] = 3e30
    wanted = apart(gradient)
    assert differences(beside(gradient), wanted) == []


COUNT = "                if (mine >= 0) ptx::add_relaxed_gpu(rows.there + mine / kCounted, 1);\n"
MOVE = "            if (fine)\n"
FAULTS: dict[str, Edits] = {
    "rows are counted before they are stored": (
        (COUNT, ""),
        (MOVE, f"            each([&](int, int mine) {{\n{COUNT}            }});\n{MOVE}"),
    ),
    "nobody waits": (("if (!are_there(first, last)) {", "if (false) {"),),
    "two of three counters are looked at": (
        ("if (kBlockM > kCounted && last > first + 1", "if (false"),
        # no fault, but a slow peer: what the middle counter counts comes late
        (
            MOVE,
            f"            for (int i = 0; from >= 128 && from < 256 && i < 400; ++i) ptx::pause();\n{MOVE}",
        ),
    ),
    "one of two counters is looked at": (
        ("last = (tile.row + gemm::least(tile.rows, kBlockM) - 1) / kCounted;", "last = first;"),
        # no fault, but a slow peer: what the other counter counts comes late
        (MOVE, f"            for (int i = 0; from >= 128 && i < 400; ++i) ptx::pause();\n{MOVE}"),
    ),
    "a token is stored at its lowest row only": (
        ("for (u32 to = wanted; to; to &= to - 1)", "for (u32 to = wanted & -wanted; to; to &= to - 1)"),
    ),
    "whoever draws any row brings the token": (("if (at >= 0 && at < lowest) lowest = at;", ""),),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_shows(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case, tiling = ("tall", TALL) if "three" in fault else ("two ranks", SHARED)
    forward = made(CASES[case], monkeypatch, tiling)
    wanted = apart(forward)
    emulate(monkeypatch, None, blocks=4, edits=FAULTS[fault])
    for _ in range(4):  # other interleavings
        try:
            if differences(beside(forward), wanted):
                return
        except AssertionError:  # counters
            return
    pytest.fail(f"nothing shows where {fault}")


def test_a_product_whose_rows_are_never_counted_ends_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    status = torch.zeros(1, dtype=torch.int32, device="cpu")
    monkeypatch.setattr(gemm, "products_status", lambda device: status)
    forward = made(CASES["one rank"], monkeypatch, edits=((COUNT, ""),))
    with pytest.raises((AssertionError, KernelError)):  # counters that are not full; else the next launch
        beside(forward)
    assert status.tolist() == [1]


def test_rows_of_a_peer_that_has_failed_are_no_numbers_and_the_rest_goes_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A ticket that fails; its tokens' other rows are no numbers either."""
    staged = "const bool fine = wait_staged(call, rows, own)"
    edits = ((f"{staged};", f"{staged} && from != 4 * kTicket;"),)
    forward = made(CASES["two ranks"], monkeypatch)
    wanted = apart(forward)
    emulate(monkeypatch, None, blocks=4, edits=edits)
    full = torch.full  # what is there before holds numbers: NaN becomes -1
    monkeypatch.setattr(torch, "full", lambda size, value, **how: full(size, max(-1, value), **how))
    for found, whole in zip(beside(forward), wanted, strict=True):
        failed = found[0].isnan().any(1)
        assert bool(failed[16])
        assert int(failed.sum()) > 4
        for one, other in zip(found, whole, strict=True):
            assert bool(one[failed].isnan().all())
            assert torch.equal(one[~failed], other[~failed])
