"""Index arithmetic checked by hand, and by its laws on random routings."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from imbrex.contracts import Placement, Plan, Routing
from imbrex.exchange import plan, rows
from imbrex.exchange.exchange import Exchange
from imbrex.placement import contiguous, from_slots, split_evenly
from imbrex.transport.base import straight


def make_plans(ids_W: list[torch.Tensor], placement: Placement, **options) -> list[Plan]:
    """The plans of all ranks, made in one process."""
    tensor_size = options.get("tensor_size", 1)
    counts_WE = torch.stack([plan.count_choices(ids, placement.num_experts) for ids in ids_W])
    split_WS = split_evenly(counts_WE, placement)
    slots = [plan.choose_slots(ids, split_WS[r], placement) for r, ids in enumerate(ids_W)]
    wanted = [plan.ranks_wanted(slot, placement, tensor_size) for slot in slots]
    rows_WW = torch.stack([w.sum(0) for w in wanted]).fill_diagonal_(0)
    traffics = [straight(wanted[r], rows_WW, r) for r in range(len(ids_W))]
    return [
        plan.make_plan(slots[r], split_WS, traffic, placement, r, **options)
        for r, traffic in enumerate(traffics)
    ]


def test_the_example_of_the_module() -> None:
    ids_W = [torch.tensor([[2], [0], [2]]), torch.tensor([[2], [1]])]
    first, second = make_plans(ids_W, contiguous(4, 2))
    assert first.counts_e.tolist() == [1, 1]
    assert second.counts_e.tolist() == [3, 0]
    assert first.position_TK.flatten().tolist() == [0, 0, 1]
    assert second.position_TK.flatten().tolist() == [2, 1]
    assert first.traffic.sent_tokens_N.tolist() == [0, 2]
    assert first.traffic.splits_2W.tolist() == [[0, 2], [0, 1]]
    assert second.traffic.sent_tokens_N.tolist() == [1]


def test_a_token_goes_once_to_a_rank() -> None:
    ids_W = [torch.tensor([[2, 3], [0, 3]]), torch.tensor([[0, 1]])]
    first, second = make_plans(ids_W, contiguous(4, 2))
    assert first.traffic.splits_2W[0].tolist() == [0, 2]
    assert second.traffic.splits_2W[0].tolist() == [1, 0]
    assert second.counts_e.tolist() == [1, 2]


def test_alignment_and_capacity_pad_every_slot() -> None:
    ids_W = [torch.tensor([[0], [0], [0]])]
    (aligned,) = make_plans(ids_W, contiguous(2, 1), alignment=8)
    assert (aligned.counts_e.tolist(), aligned.num_rows) == ([8, 0], 8)
    (full,) = make_plans(ids_W, contiguous(2, 1), rows_per_slot=5)
    assert full.counts_e.tolist() == [5, 5]
    (raised,) = make_plans(ids_W, contiguous(2, 1), rows_per_slot=2)
    assert raised.counts_e.tolist() == [3, 3]


def test_tensor_ranks_all_get_the_token() -> None:
    placement = contiguous(2, 2)
    wanted = plan.ranks_wanted(torch.tensor([[0], [1], [-1]]), placement, 2)
    assert wanted.int().tolist() == [[1, 1, 0, 0], [0, 0, 1, 1], [0, 0, 0, 0]]


def test_order_within() -> None:
    assert plan.order_within(torch.tensor([1, 0, 1, -1, 1]), 2)[[0, 1, 2, 4]].tolist() == [0, 0, 1, 2]


def test_replicas_take_their_shares_in_slot_order() -> None:
    placement = from_slots([[0, 1], [0, -1]], 2)
    split = split_evenly(torch.tensor([[3, 0], [3, 1]]), placement)
    assert split.tolist() == [[2, 0, 1, 0], [1, 1, 2, 0]]
    slots = plan.choose_slots(torch.tensor([[0], [0], [0]]), split[0], placement)
    assert slots.flatten().tolist() == [0, 0, 2]


def test_an_expert_with_one_slot_has_no_choice() -> None:
    """Spares anywhere, experts in any order; what the split says does not matter."""
    placement = from_slots([[2, -1, 0], [1, -1, 3]], 4)
    ids_TK = torch.tensor([[0, 3], [-1, 2], [1, -1]])
    wanted = [[2, 5], [-1, 0], [3, -1]]
    assert plan.only_slots(ids_TK, placement).tolist() == wanted
    assert plan.choose_slots(ids_TK, torch.zeros(6).long(), placement).tolist() == wanted


class Operators(TorchDispatchMode):
    """The names of the operators that were called."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


def test_a_plan_opens_no_team_of_threads() -> None:
    """`repeat_interleave` with a tensor does, for two values; three of them were 40 ms of every dispatch."""
    placement = contiguous(6, 3)
    with Operators() as called:
        make_plans(
            [torch.tensor([[2, 3], [0, 3]]), torch.tensor([[0, 1]]), torch.tensor([[5, 4]])], placement
        )
    assert "aten.sort.stable" in called.names
    assert "aten.repeat_interleave.Tensor" not in called.names
    here = torch.device("cpu")
    assert plan.owner_of_slot(placement, here) is plan.owner_of_slot(contiguous(6, 3), here)
    assert plan.owner_of_slot(placement, here).tolist() == [0, 0, 1, 1, 2, 2]


@pytest.mark.parametrize(("experts", "ranks", "offsets"), [(5, 3, (0, 2, 4, 5)), (2, 4, (0, 1, 2, 2, 2))])
def test_contiguous_placements(experts: int, ranks: int, offsets: tuple[int, ...]) -> None:
    assert contiguous(experts, ranks).rank_offsets == offsets


@settings(max_examples=150, deadline=None, derandomize=True)
@given(
    seed=st.integers(0, 10**6),
    tokens=st.lists(st.integers(0, 9), min_size=3, max_size=3),
    top_k=st.integers(1, 5),
    replicas=st.booleans(),
    alignment=st.sampled_from([1, 4, 16]),
)
def test_every_choice_has_a_row_of_its_own(
    seed: int, tokens: list[int], top_k: int, replicas: bool, alignment: int
) -> None:
    drawn = torch.Generator().manual_seed(seed)
    placement = from_slots([[0, 1], [2, 3, 0], [4, -1, 1]], 5) if replicas else contiguous(5, 3)
    ids_W = []
    for count in tokens:
        ids = torch.rand(count, 5, generator=drawn).argsort(1)[:, :top_k]
        ids_W.append(torch.where(torch.rand(ids.shape, generator=drawn) < 0.2, -1, ids))
    plans = make_plans(ids_W, placement, alignment=alignment)
    owner = plan.owner_of_slot(placement, torch.device("cpu"))
    for rank, made in enumerate(plans):
        assert made.num_rows == int(made.counts_e.sum())
        assert all(count % alignment == 0 for count in made.counts_e.tolist())
        starts = [0, *made.counts_e.cumsum(0).tolist()]
        taken = []
        for source, (ids, other) in enumerate(zip(ids_W, plans, strict=True)):
            for token, k in (other.slot_TK >= 0).nonzero().tolist():
                slot = int(other.slot_TK[token, k])
                if owner[slot] != rank:
                    continue
                assert placement.slots[slot] == int(ids[token, k])
                local, row = slot - placement.rank_offsets[rank], int(other.position_TK[token, k])
                assert starts[local] <= row < starts[local + 1]
                taken.append((local, source, token, row))
        in_order = [row for *_, row in sorted(taken)]
        assert in_order == sorted(set(in_order)), "rows of a slot by source rank, then token, no row twice"


def test_rows_and_back() -> None:
    source_R, position_PK, weights_R = rows.index_rows(
        torch.tensor([[0, 3], [2, 3]]),
        torch.tensor([[0, 1], [0, 2]]),
        torch.tensor([[9.0, 0.5], [2.0, 3.0]]),
        range(2, 4),
        4,
    )
    assert source_R.tolist() == [1, 0, 1, -1]
    assert position_PK.tolist() == [[-1, 1], [0, 2]]
    assert weights_R.tolist() == [2.0, 0.5, 3.0, 0.0]
    x_PD = torch.tensor([[1.0], [10.0]])
    rows_RD = rows.expand([x_PD], source_R)
    assert rows_RD.flatten().tolist() == [10.0, 1.0, 10.0, 0.0]
    assert rows.reduce(rows_RD, position_PK, weights_R, 2).flatten().tolist() == [0.5, 50.0]
    assert rows.pick_scalars(weights_R, position_PK).tolist() == [[0.0, 0.5], [2.0, 3.0]]


def test_rows_past_the_plan_are_never_read() -> None:
    rows_RD = torch.tensor([[1.0], [torch.nan]])
    assert rows.reduce(rows_RD, torch.tensor([[0], [-1]]), torch.ones(2), 1).flatten().tolist() == [1.0, 0.0]


def test_rows_are_summed_in_ascending_order() -> None:
    """1e8 - 1e8 + 1 is 1 in the order of rows, and 0 in that of the choices."""
    rows_RD = torch.tensor([[1e8], [-1e8], [1.0]])
    assert rows.reduce(rows_RD, torch.tensor([[2, 0, 1]]), None, 3).item() == 1.0


def test_padding_rows_have_no_weight_gradient() -> None:
    exchange = Exchange(contiguous(2, 1), 8, 1, transport="alltoall", alignment=4)
    weights_TK = torch.ones(3, 1, requires_grad=True)
    routing = Routing(ids_TK=torch.tensor([[0], [1], [0]]), weights_TK=weights_TK)
    dispatched = exchange.dispatch(torch.ones(3, 8), routing)
    rows_RD = torch.full((8, 8), torch.nan)
    rows_RD[[0, 1, 4]] = 2.0
    y_TD = exchange.combine(rows_RD, dispatched.handle)
    (gradient_R,) = torch.autograd.grad(y_TD.sum(), dispatched.handle.weights_R)
    assert gradient_R.tolist() == [16.0, 16.0, 0.0, 0.0, 16.0, 0.0, 0.0, 0.0]


def test_partial_sums_meet_in_rank_order() -> None:
    own = torch.tensor([[1.0], [2.0]])
    back = torch.tensor([[10.0], [20.0], [300.0]])
    tokens = torch.tensor([0, 1, 1])
    assert rows.sum_home(own, back, tokens, [2, 0, 1], 1).flatten().tolist() == [11.0, 322.0]


@pytest.mark.parametrize(("rank", "sums"), [(0, [1, 1e8, -1e8]), (2, [1e8, -1e8, 1]), (1, [1e8, 1, -1e8])])
def test_the_own_partial_sum_is_added_in_its_place(rank: int, sums: list[float]) -> None:
    """Numbers whose sum tells their order: 1 is lost where it meets 1e8 first."""
    back = torch.tensor([[value] for source, value in enumerate(sums) if source != rank])
    sizes = [int(source != rank) for source in range(3)]
    total = rows.sum_home(torch.tensor([[sums[rank]]]), back, torch.tensor([0, 0]), sizes, rank)
    assert total.item() == (1.0 if rank == 2 else 0.0)
