"""What moves with an expert: every row of it, whatever its dtype, and nothing that is not a row."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from imbrex.balancer.migration import Change, _tag, land
from imbrex.balancer.payload import as_row, most_staged, optimizer_tensors, row_bytes, signature, slot_tensors
from imbrex.placement import from_slots
from imbrex.placement.moves import fetches


class Quantised(nn.Module):
    """Experts in fp8 with a scale for every block, and a bias that is trained."""

    def __init__(self, experts: tuple[int, ...]) -> None:
        super().__init__()
        first = torch.tensor([1.0 + max(e, 0) for e in experts], dtype=torch.float32)
        self.register_buffer(
            "weight", first[:, None, None].expand(-1, 4, 6).to(torch.float8_e4m3fn).contiguous()
        )
        self.register_buffer("scale", first[:, None].expand(-1, 3).clone())
        self.bias = nn.Parameter(first[:, None].expand(-1, 5).bfloat16().clone())


def test_quantised_weights_bring_their_scales() -> None:
    old = from_slots([[0, 1, 2], [3, 0, -1]], 4)
    new = from_slots([[0, 3, 2], [3, 0, 1]], 4)
    ranks = [Quantised(old.local(rank)) for rank in range(2)]
    tensors = [slot_tensors(experts, 3) for experts in ranks]
    assert row_bytes(list(tensors[0].values())) == 4 * 6 + 3 * 4 + 5 * 2
    moves = fetches(old, new)
    assert [(f.expert, f.source, f.target) for f in moves] == [(3, 1, 0), (1, 0, 1)]
    arrived = {}
    for fetch in moves:
        rows = [
            as_row(t, fetch.from_slot - old.rank_offsets[fetch.source])
            for t in tensors[fetch.source].values()
        ]
        arrived[7, fetch.slot] = [row.clone() for row in rows]
    for rank in range(2):
        change = Change(layer=7, old=old, new=new, tensors=tensors[rank])
        assert land(change, arrived, rank) == 46
        expected = slot_tensors(Quantised(new.local(rank)), 3)
        for name, tensor in tensors[rank].items():
            assert torch.equal(tensor.float(), expected[name].float()), name


def test_a_rank_without_slots_knows_what_an_expert_is() -> None:
    """Else it would allow other numbers of moves than its peers, and plan other placements."""
    ours, none = (slot_tensors(Quantised(experts), len(experts)) for experts in ((0, 1), ()))
    assert row_bytes(list(none.values())) == row_bytes(list(ours.values())) == 46
    assert most_staged(none, 2) == most_staged(ours, 2) == 2 * 3 * 256


def test_state_of_one_number_follows_its_expert() -> None:
    """A rank with one slot, whose experts have one number each; step counts stay."""
    experts = nn.Module()
    experts.scale = nn.Parameter(torch.ones(1))
    made = torch.optim.AdamW([experts.scale])
    experts.scale.grad = torch.ones(1)
    made.step()
    assert sorted(optimizer_tensors(experts, made)) == ["scale.exp_avg", "scale.exp_avg_sq"]
    assert list(slot_tensors(experts, 1)) == ["scale"]


@pytest.mark.parametrize("optimizer", ["SGD", "AdamW", "Adagrad", "RMSprop"])
def test_optimizer_state_follows(optimizer: str) -> None:
    experts = Quantised((0, 1, 2))
    experts.bias.grad = torch.ones_like(experts.bias)
    options = {"momentum": 0.9} if optimizer == "SGD" else {}
    made = getattr(torch.optim, optimizer)([experts.bias], lr=0.1, **options)
    assert optimizer_tensors(experts, made) in ({}, {"bias.sum": made.state[experts.bias].get("sum")})
    made.step()
    found = optimizer_tensors(experts, made)
    assert found
    assert all(t.shape == experts.bias.shape for t in found.values())


def test_messages_of_migrations_are_told_apart() -> None:
    """What an abandoned one left behind is not taken for another's; gloo's tags are of 32 bits."""
    tags = [_tag(number, index) for number in (0, 1, 2, 2**15 - 1) for index in (1, 2, 2**15 - 1)]
    assert len(set(tags)) == len(tags)
    assert max(tags) < 2**31


def test_what_is_not_a_row_is_refused() -> None:
    experts = Quantised((0, 1, 2))
    assert signature(slot_tensors(experts, 3)) == signature(slot_tensors(Quantised((5, 6, 7)), 3))
    experts.register_buffer("table", torch.zeros(256))
    with pytest.raises(ValueError, match=r"table of the experts has shape \[256\]"):
        slot_tensors(experts, 3)
    matrix = nn.Module()
    matrix.weight = nn.Parameter(torch.zeros(3, 8, 8))
    matrix.weight.grad = torch.ones(3, 8, 8)
    adafactor = torch.optim.Adafactor([matrix.weight])
    adafactor.step()
    with pytest.raises(ValueError, match="it cannot follow an expert"):
        optimizer_tensors(matrix, adafactor)
