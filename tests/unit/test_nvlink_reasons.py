"""Where the NVLink kernels cannot serve, the reason is one sentence; what they need no GPU for is right."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import imbrex
from imbrex.codec import make_wire
from imbrex.crossings import Geometry
from imbrex.crossings_nvlink import spread, unfit
from imbrex.placement import contiguous, from_slots, split_evenly

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
        ({"tensor_parallel": 2}, "identity", "experts are split over tensor ranks"),
        ({}, {"combine_backward": "int8"}, "rows are encoded"),
        ({"split": another_split}, "identity", None),
        (
            {"split": another_split, "placement": from_slots([[0, 1], [1, 2]], 3)},
            "identity",
            "its kernels split replicas evenly, and another split was asked for",
        ),
        ({"alignment": 8}, "identity", "rows are padded"),
        ({"rows_per_slot": lambda tokens: tokens}, "identity", "rows are padded"),
        ({"hidden_size": 60}, "identity", "rows must be multiples of 16 bytes, choices at most 32"),
    ],
)
def test_what_they_do_not_serve(change: dict, codec, reason: str | None) -> None:
    assert unfit(replace(GOOD, **change), make_wire(codec)) == reason


def test_a_rank_alone_is_told_why() -> None:
    config = imbrex.MoEConfig(hidden_size=64, intermediate_size=8, num_experts=4, top_k=2)
    with pytest.raises(
        ValueError, match=r"'nvlink' does not work here: there is only one rank.*use transport='auto'"
    ):
        imbrex.MoELayer(config, transport="nvlink")


def test_weights_stand_where_their_rows_are() -> None:
    """Two ranks' tokens, two choices each: rows 2 and 0 are here; row 1 has no choice and weighs nothing."""
    position_LWTK = torch.tensor([[[[2, -1]], [[-1, 0]]]], dtype=torch.int32)
    weights_LWTK = torch.tensor([[[[0.5, 9.0]], [[9.0, 0.25]]]])
    assert spread(weights_LWTK, position_LWTK, 3).tolist() == [0.25, 0.0, 0.5]
