"""`rows/compact.cu`, emulated: the example at its head, and random routings against counting by hand."""

from __future__ import annotations

import pytest
import torch

from imbrex.kernels.routing.routed import Routed
from imbrex.kernels.rows.compact import index_rows, place_compact
from imbrex.kernels.rows.labels import pack_labels, read_labels
from imbrex.placement.layouts import contiguous
from tests.emulated import kernel
from tests.emulated.scenario import Case, make_exchange, make_inputs

pytestmark = pytest.mark.skipif(not kernel.available(), reason="the emulation needs g++")


def test_the_example_of_its_head() -> None:
    """Two ranks of three tokens; the own tokens 0 and 2 stay, 1 and 2 go to rank 1, whose token 1 comes."""
    none = torch.zeros(0, dtype=torch.int32)
    routed = Routed(
        position_LWTK=torch.full((1, 2, 3, 2), -1, dtype=torch.int32),
        weights_LWTK=torch.zeros(1, 2, 3, 2),
        recv_row_LWT=torch.tensor([[[-1, -1, -1], [-1, 0, -1]]], dtype=torch.int32),
        send_row_LTW=torch.tensor([[[0, -1], [-1, 0], [0, 1]]], dtype=torch.int32),
        counts_Le=none,
        totals_L4=none,
        tokens_LW=none,
    )
    traffic_WW = torch.tensor([[2, 2], [1, 0]], dtype=torch.int32)
    placed = place_compact(routed, traffic_WW, 0, 3, 6, load=kernel.load)
    assert placed.routed.position_LWTK[0, :, :, 0].tolist() == [[0, -1, 1], [-1, 2, -1]]
    assert bool((placed.routed.position_LWTK[..., 1] == -1).all())
    assert placed.source_R.tolist() == [0, 2, 1, -1, -1, -1]
    assert placed.place_TW.tolist() == [[0, -1], [-1, 0], [1, 1]]
    assert placed.received.tolist() == [3]
    assert placed.source_int_R.tolist() == [0, 2, 1, -1, -1, -1]
    assert placed.sums.tolist() == [2, 2, 3, 2, 2, 2, 0, 0]


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_tokens_are_placed_by_source_then_token(rank: int) -> None:
    case = Case(placement=contiguous(6, 3), tokens=(1100, 40, 1030), choices=2, width=8, drop=0.4)
    exchange, inputs = make_exchange(case, load=kernel.load, timeout=30.0), make_inputs(case)
    traffic_LWW = torch.full((3, 3, 3), -7, dtype=torch.int32)
    routed = exchange.route(inputs.ids_WTK, inputs.weights_WTK, inputs.tokens_W, traffic=traffic_LWW)
    exchange.check()
    wanted_WTW = torch.stack([((inputs.ids_WTK // 2) == rank).any(-1) & (inputs.ids_WTK >= 0).any(-1)
                              for rank in range(3)], -1)  # fmt: skip
    for source, tokens in enumerate(case.tokens):
        wanted_WTW[source, tokens:] = False
    assert torch.equal(traffic_LWW, wanted_WTW.sum(1).int().expand(3, 3, 3))
    mine = Routed(*(part[rank : rank + 1].contiguous() for part in routed))
    tokens, received = case.tokens[rank], int(wanted_WTW[:, :, rank].sum())
    placed = place_compact(mine, traffic_LWW[rank], rank, tokens, received + 9, load=kernel.load)
    here_WT = wanted_WTW[:, :, rank]
    order_WT = here_WT.flatten().cumsum(0).view_as(here_WT) - 1
    assert torch.equal(placed.routed.position_LWTK[0, :, :, 0], torch.where(here_WT, order_WT, -1).int())
    assert placed.source_R.tolist() == [*here_WT.nonzero()[:, 1].tolist(), *[-1] * 9]
    own_TW = wanted_WTW[rank, :tokens]
    assert torch.equal(placed.place_TW, torch.where(own_TW, own_TW.cumsum(0) - 1, -1).int())
    assert placed.received.tolist() == [received]
    assert torch.equal(placed.source_int_R, placed.source_R.int())
    traffic_WW = traffic_LWW[rank]
    sums = [*traffic_WW.cumsum(0).flatten().tolist(), *traffic_WW[rank].tolist(), 0, 0, 0]
    assert placed.sums.tolist() == sums


def test_rows_know_their_tokens() -> None:
    """The example at its head, and a choice past the rows."""
    position = torch.tensor([[[[2, -1], [0, 1]], [[-1, 7], [4, -1]]]], dtype=torch.int32)
    weights = torch.tensor([[[[0.5, 9.0], [0.25, 1.0]], [[9.0, 9.0], [2.0, 9.0]]]])
    source_R, weights_R = index_rows(position, weights, 6, load=kernel.load)
    assert source_R.tolist() == [1, 1, 0, -1, 3, -1]
    assert weights_R.tolist() == [0.25, 1.0, 0.5, 0.0, 2.0, 0.0]


def test_labels_come_as_they_left() -> None:
    """The example at their head, and of the row to spare nothing."""
    ids_TK, weights_TK = (
        torch.tensor([[5, 2], [7, -1], [4, 5]]),
        torch.tensor([[0.5, 0.25], [1, 2], [3, 4.0]]),
    )
    rows_TB = pack_labels(ids_TK, weights_TK, load=kernel.load)
    assert rows_TB.shape == (3, 16)
    assert rows_TB[0].view(torch.int32)[:2].tolist() == [6, 3]
    rows_NB = torch.cat([rows_TB, torch.zeros(1, 16, dtype=torch.uint8)])
    ids_NK, weights_NK, counts_e = read_labels(rows_NB, 2, 4, 4, load=kernel.load)
    assert ids_NK.tolist() == [[1, -1], [3, -1], [0, 1], [-1, -1]]
    assert weights_NK.tolist() == [[0.5, 0.0], [1.0, 0.0], [3.0, 4.0], [0.0, 0.0]]
    assert counts_e is not None
    assert counts_e.tolist() == [1, 2, 0, 1]
    spare = torch.tensor([3, -1, 0, -1])  # which nobody cleared
    ids_NK, weights_NK, counts_e = read_labels(rows_NB, 2, 4, 4, spare, counted=False, load=kernel.load)
    assert ids_NK.tolist() == [[1, -1], [-1, -1], [0, 1], [-1, -1]]
    assert weights_NK.tolist() == [[0.5, 0.0], [0.0, 0.0], [3.0, 4.0], [0.0, 0.0]]
    assert counts_e is None
    *nothing, counts_e = read_labels(rows_NB[:0], 2, 4, 4, load=kernel.load)
    assert [len(part) for part in nothing] == [0, 0]
    assert counts_e is not None
    assert counts_e.tolist() == [0, 0, 0, 0]
