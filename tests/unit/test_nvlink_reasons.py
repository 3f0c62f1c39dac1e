"""Where the NVLink kernels cannot serve, the reason is one sentence; what they need no GPU for is right."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

import imbrex
from imbrex.codec import make_wire
from imbrex.contracts import Geometry, Roles, RowForm
from imbrex.exchange.nvlink_fit import kernel_placement, row_capacity_for, why_not_nvlink
from imbrex.kernels import jit
from imbrex.kernels.ffn.glue import COUNTERS
from imbrex.kernels.routing.routed import Routed, Sizes, empty_routed
from imbrex.kernels.rows import weights
from imbrex.kernels.rows.weights import run_spread, spread
from imbrex.overlap.fused import Fused
from imbrex.placement import contiguous, from_slots, split_balanced, split_evenly
from imbrex.transport.nvlink import Nvlink, NvlinkError, Size
from tests.emulated import kernel

GOOD = Geometry(
    placement=contiguous(8, 4),
    rank=1,
    tensor_parallel=1,
    hidden_size=64,
    top_k=2,
    split=split_evenly,
    alignment=1,
)


def another_split(counts_WE: torch.Tensor, placement: imbrex.Placement) -> torch.Tensor:
    return split_evenly(counts_WE, placement)


@pytest.mark.parametrize(
    ("change", "codec", "reason"),
    [
        ({}, "identity", None),
        ({"tensor_parallel": 2}, "identity", None),
        ({"top_k": 33}, "identity", "rows must be multiples of 16 bytes, choices at most 32"),
        ({}, {"combine_backward": "int8"}, "its kernels write rows as they are or as fp8"),
        ({}, "fp8", "its kernels write fp8 rows of multiples of 512 values"),
        ({"hidden_size": 256}, {"combine": "fp8"}, None),
        ({"hidden_size": 512}, "fp8", None),
        ({"split": another_split, "placement": from_slots([[0, 1], [1, 2]], 3)}, "identity", None),
        ({"alignment": 8}, "identity", "rows are padded"),
        ({"rows_per_slot": lambda tokens: tokens}, "identity", "rows are padded"),
        ({"hidden_size": 60}, "identity", "rows must be multiples of 16 bytes, choices at most 32"),
    ],
)
def test_what_they_do_not_serve(change: dict, codec, reason: str | None) -> None:
    assert why_not_nvlink(replace(GOOD, **change), make_wire(codec)) == reason


def test_a_rank_alone_is_told_why() -> None:
    config = imbrex.MoEConfig(hidden_size=64, intermediate_size=8, num_experts=4, top_k=2)
    with pytest.raises(
        ValueError, match=r"'nvlink' does not work here: there is only one rank.*use transport='auto'"
    ):
        imbrex.MoELayer(config, transport="nvlink")


def test_a_dispatcher_that_fuses_nothing_says_why() -> None:
    config = imbrex.MoEConfig(hidden_size=64, intermediate_size=8, num_experts=4, top_k=2)
    dispatcher = imbrex.MoELayer(config).exchange.dispatcher
    assert dispatcher.why_not_form(RowForm.UNDER_WAY) is not None
    with pytest.raises(ValueError, match="no kernel fuses this exchange: nothing here gives rows that are"):
        dispatcher.fusing()


def test_weights_stand_where_their_rows_are() -> None:
    """Two ranks' tokens, two choices each: rows 2 and 0 are here."""
    routed = empty_routed(Sizes(local_ranks=1, ranks=2, choices=2, most_slots=3), 1, torch.device("cpu"))
    routed.position_LWTK[:] = torch.tensor([[[2, -1]], [[-1, 0]]])
    routed.weights_LWTK[:] = torch.tensor([[[0.5, 9.0]], [[9.0, 0.25]]])
    routed.counts_Le[:] = torch.tensor([1, 1, 7])
    weights_R, counts_e, plan, _ = spread(routed, 3, 2)
    assert weights_R[[0, 2]].tolist() == [0.25, 0.5]
    assert counts_e.tolist() == [1, 1]
    assert plan.tolist() == [0] * COUNTERS + [1, 2]


@pytest.mark.skipif(not kernel.available(), reason="g++ compiles the emulated kernels")
def test_the_kernel_spreads_as_torch_does(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = Sizes(local_ranks=1, ranks=3, choices=2, most_slots=4)
    routed = empty_routed(sizes, 40, torch.device("cpu"))
    routed.position_LWTK[:] = (torch.randperm(240) - 60).view(1, 3, 40, 2)
    routed.weights_LWTK[:] = torch.rand(1, 3, 40, 2)
    routed.counts_Le[:] = torch.tensor([50, 0, 70, 9])
    monkeypatch.setattr(weights, "_BLOCKS", 2)
    monkeypatch.setattr(weights, "_kernel", lambda *which: kernel.load(weights.shipped_variants()[0]))
    ours, theirs = run_spread(routed, 170, 3), spread(routed, 170, 3)
    for one, other in zip(ours[:3], theirs[:3], strict=True):
        assert torch.equal(one, other)


def test_parts_of_one_piece_of_memory() -> None:
    """They begin at 128 bytes, none lies in another, and the tokens there is room for are known again."""
    for sizes in (Sizes(2, 3, 5, 7), Sizes(1, 1, 1, 1), Sizes(1, 16, 8, 300)):
        for tokens in (1, 64, 777):
            routed = empty_routed(sizes, tokens, torch.device("cpu"))
            assert routed.words_TC is not None
            again = Routed.of_words(routed.words_TC, sizes)
            assert again.max_tokens == tokens
            assert again.addresses == routed.addresses == tuple(part.data_ptr() for part in again)
            first = routed.words_TC.data_ptr()
            assert [(address - first) % 128 for address in routed.addresses] == [0] * 7
            routed.words_TC.zero_()
            for number, part in enumerate(routed, 1):
                assert not part.any()
                part.fill_(number)
            assert [part.unique().tolist() for part in routed] == [[number] for number in range(1, 8)]


def test_slots_stand_for_experts_where_the_caller_splits() -> None:
    placement = from_slots([[0, 1], [1, -1]], 2)
    for split, by_slot, balanced in ((split_evenly, 0, 0), (split_balanced, 0, 1), (another_split, 1, 0)):
        told = kernel_placement(replace(GOOD, split=split, placement=placement))
        assert (told.by_slot, told.balanced) == (by_slot, balanced)
        assert told.placement.slots == ((0, 1, 2, 3) if by_slot else (0, 1, 1, -1))


def test_kernels_that_do_not_compile_are_a_reason_not_an_error() -> None:
    def load(variant: jit.Variant, device: torch.device) -> None:
        raise jit.KernelError(f"{variant} cannot be compiled: no such architecture")

    transport = object.__new__(Nvlink)
    transport.device, transport.load = torch.device("cpu"), load  # pyright: ignore
    reason = transport._why_not_loaded()
    assert reason == "routing/route.cu:route_choices[] cannot be compiled: no such architecture"
    assert str(NvlinkError(reason)).endswith("no such architecture; use transport='auto'")
    transport.load = lambda variant, device: None  # pyright: ignore
    assert transport._why_not_loaded() is None


def test_rows_for_the_tokens_of_a_call() -> None:
    """Of a few sizes only: the heap's, halved while the tokens fit."""
    size = Size(rank_offsets=(0, 3, 6), tensor=1, experts=6, choices=2, row_bytes=64)
    rows = {most: row_capacity_for(size.shape(640), most) for most in (640, 321, 320, 3, 0)}
    assert rows == {640: 2560, 321: 2560, 320: 1280, 3: 20, 0: 20}


@pytest.mark.parametrize("name", ["dispatch", "small", "push", "combine", "stage", "beside"])
@pytest.mark.parametrize("number", [0, -1, 2.5, True, None])
def test_numbers_of_multiprocessors(name: str, number: Any) -> None:
    with pytest.raises(ValueError, match=rf"Nvlink: {name}_sms={number}; give a whole number of 1 or more"):
        Nvlink(None, **{f"{name}_sms": number})


@pytest.mark.parametrize(
    ("roles", "reason"),
    [
        (Roles(stage=0), r"Roles\(stage=0\); give None or a whole number from 1 to 1024"),
        (Roles(rows=-3), r"Roles\(rows=-3\); give None or a whole number from 1"),
        (Roles(sums=1025), r"Roles\(sums=1025\); give None or a whole number from 0 to 1024"),
        (Roles(first=2.0), r"Roles\(first=2.0\); give None or a whole number from 0"),  # type: ignore[arg-type]
        (Roles(dy=1), r"Roles\(dy=1\); give None or 0"),
        ("many", r"'many' are no roles; give imbrex.contracts.Roles"),
    ],
)
def test_roles_that_are_none(roles: Any, reason: str) -> None:
    with pytest.raises(ValueError, match=f"schedule 'fused': {reason}"):
        Fused(roles)
