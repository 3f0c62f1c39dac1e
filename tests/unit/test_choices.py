"""The order of a rank's own choices: `rows/choices.cu` by emulation against a stable sort."""

from __future__ import annotations

import pytest
import torch

from imbrex.kernels.rows import choices
from tests.emulated import kernel
from tests.emulated.ragged import hits_of

pytestmark = pytest.mark.skipif(not kernel.available(), reason="compiles the kernels with g++")


@pytest.fixture(autouse=True)
def _emulated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        choices, "_kernel", lambda entry, rounds, _: kernel.load(choices._variant(entry, rounds))
    )


@pytest.mark.parametrize(("tokens", "experts", "top_k"), [(0, 3, 2), (1, 8, 8), (300, 40, 6), (2100, 33, 8)])
def test_the_order_is_that_of_a_stable_sort(tokens: int, experts: int, top_k: int) -> None:
    """One block and, above 512 choices, several; an expert without choices; one choice in five dropped."""
    torch.manual_seed(0)
    ids = torch.rand(tokens, experts).argsort(1)[:, :top_k]
    ids[(ids == 2) | (torch.rand(ids.shape) < 0.2)] = -1
    # the caller's errors are dropped, also those whose low words are legal
    ids[:, -1][ids[:, -1] == 1] = experts
    ids[:, 0][ids[:, 0] == 3] = -(2**32) + 1
    ids[:, 0][ids[:, 0] == 4] = 2**32 + 1
    weights = torch.rand(ids.shape)
    found = choices.order_choices(ids, weights, experts)
    flat = torch.where(
        (ids < 0) | (ids > experts), experts, ids
    ).flatten()  # those that are dropped come last
    order = flat.argsort(stable=True)
    rows = int((flat < experts).sum())
    position = torch.full_like(order, -1)
    position[order[:rows]] = torch.arange(rows)
    assert torch.equal(found.position_TK.flatten(), position)
    assert torch.equal(found.choice_R[:rows], order[:rows])
    assert torch.equal(found.token_R[:rows], order[:rows] // top_k)
    assert torch.equal(found.weights_R[:rows], weights.flatten()[order[:rows]])
    counts = torch.bincount(flat, minlength=experts + 1)[:experts]
    assert torch.equal(found.counts_e, counts)
    assert torch.equal(found.ends_e, counts.cumsum(0).int())


@pytest.mark.parametrize(
    ("tokens", "experts", "top_k", "live"),
    [(1, 8, 8, 1.0), (100, 40, 6, 0.8), (150, 40, 8, 0.8), (250, 33, 8, 0.0)],
)
def test_a_small_batch_has_the_same_order_and_its_rows(
    tokens: int, experts: int, top_k: int, live: float
) -> None:
    """One round of choices and four, none of them kept in the last."""
    torch.manual_seed(0)
    ids = torch.rand(tokens, experts).argsort(1)[:, :top_k]
    ids[torch.rand(ids.shape) >= live] = -1
    weights, x = torch.rand(ids.shape), torch.randn(tokens, 24).bfloat16()
    order, few = choices.order_choices(ids, weights, experts), choices.order_few(x, ids, weights, experts, 12)
    rows = int(order.counts_e.sum())
    assert torch.equal(few.position_TK, order.position_TK)
    assert torch.equal(few.counts_e, order.counts_e)
    assert few.plan.tolist() == [0] * 12 + order.ends_e.tolist()
    hits = hits_of(order.counts_e.tolist())
    assert torch.equal(few.hits[hits != -7], hits[hits != -7])
    assert torch.equal(few.choice_R[:rows], order.choice_R[:rows])
    assert torch.equal(few.weights_R[:rows], order.weights_R[:rows])
    assert torch.equal(few.rows_RD[:rows], x[order.token_R[:rows]])
