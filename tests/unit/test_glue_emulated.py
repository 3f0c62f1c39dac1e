"""The glue kernels' source on the CPU, against torch; rows past the counts are NaN, and one that is read or
written shows."""

from __future__ import annotations

import shutil

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from imbrex.exchange import rows as pool_rows
from imbrex.kernels.ffn import glue, operators
from tests.emulated.gemm import emulate

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="compiles the kernels with g++")
LIMIT = 2**-8
SPARE = 7


@pytest.fixture(autouse=True)
def cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    emulate(monkeypatch, blocks=2)


def rows_of(count: int, width: int) -> Tensor:
    rows = torch.randn(count + SPARE, width).bfloat16()
    rows[count:] = float("nan")
    return rows


def check(found: Tensor, reference: Tensor) -> None:
    """Equal up to one rounding where the reference has rows, untouched past them."""
    count = reference.shape[0]
    torch.testing.assert_close(found[:count].double(), reference, rtol=LIMIT, atol=1e-6)
    assert found[count:].isnan().all()


def test_parts_are_added_in_the_order_of_torch_on_a_gpu() -> None:
    """Sums of parts that are four apart, and then of those."""
    for count in (1, 3, 4, 11):
        parts, sums = torch.randn(count, 600), torch.full((600,), float("nan"))
        glue.add_parts(parts, torch.tensor([100, 590], dtype=torch.int32), sums)
        four = [sum(parts[i::4], torch.zeros(600)) for i in range(4)]
        assert torch.equal(sums[:590], (four[0] + four[1] + four[2] + four[3])[:590])
        assert sums[590:].isnan().all()


@pytest.mark.parametrize("width", [8, 1040])
@pytest.mark.parametrize("weighted", [False, True])
def test_swiglu_and_its_gradients(width: int, weighted: bool) -> None:
    count, ends = 11, torch.tensor([4, 4, 11], dtype=torch.int32)
    gate_up, d_act = rows_of(count, 2 * width), rows_of(count, width)
    weights = torch.rand(count + SPARE) if weighted else None
    exact = gate_up[:count].double().requires_grad_()
    scale = (torch.ones(count) if weights is None else weights[:count]).double().requires_grad_()
    gate, up = exact.chunk(2, 1)
    act = F.silu(gate) * up * scale[:, None]
    d_exact, d_scale = torch.autograd.grad(act, (exact, scale), d_act[:count].double())
    check(operators.run_swiglu(gate_up, weights, ends), act.detach())
    d_gate_up, d_weights = operators.run_swiglu_backward(d_act, gate_up, weights, ends)
    check(d_gate_up, d_exact)
    assert d_weights.numel() == (count + SPARE if weighted else 0)
    if weighted:
        torch.testing.assert_close(d_weights[:count].double(), d_scale, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("weighted", [False, True])
def test_permute_and_unpermute_and_their_gradients(weighted: bool) -> None:
    """Three experts of which the middle one is another rank's: its choices have no row."""
    tokens, choices, width = 9, 2, 1096
    ids = torch.stack([torch.randperm(3)[:choices] for _ in range(tokens)])
    choice = ids.flatten().argsort(stable=True)
    choice = choice[ids.flatten()[choice] != 1]
    count = choice.numel()
    position = torch.full((tokens * choices,), -1)
    position[choice] = torch.arange(count)
    position = position.view(tokens, choices)
    ends = torch.tensor([int((ids == 0).sum()), count], dtype=torch.int32)
    choice_R = torch.cat([choice, torch.full((SPARE,), 10**6)])
    x, d_y = torch.randn(tokens, width).bfloat16(), torch.randn(tokens, width).bfloat16()
    weights = torch.rand(tokens, choices) if weighted else None

    rows = operators.run_permute(x, choice_R, position, ends)
    assert torch.equal(rows[:count], x[choice // choices])
    assert rows[count:].isnan().all()

    exact = rows[:count].double().requires_grad_()
    scale = (torch.ones(tokens, choices) if weights is None else weights).double().requires_grad_()
    y = torch.zeros(tokens, width, dtype=torch.float64)
    y = y.index_add(0, choice // choices, exact * scale.flatten()[choice, None])
    d_exact, d_scale = torch.autograd.grad(y, (exact, scale), d_y.double())
    check(operators.run_unpermute(rows, choice_R, position, ends, weights), y.detach())
    d_rows, d_weights = operators.run_unpermute_backward(d_y, rows, choice_R, weights, ends, choices)
    check(d_rows, d_exact)
    if weighted:
        torch.testing.assert_close(d_weights.double(), d_scale, rtol=1e-4, atol=1e-4)
        assert (d_weights[position < 0] == 0).all()


def test_rows_that_are_there_already() -> None:
    """Without choices, gradient and weight of a row stand where the row does."""
    count, width = 5, 264
    ends = torch.tensor([5], dtype=torch.int32)
    d_y, rows, weights = rows_of(count, width), rows_of(count, width), torch.rand(count + SPARE)
    d_rows, d_weights = glue.weigh_rows(d_y, rows, weights, ends)
    check(d_rows, d_y[:count].double() * weights[:count, None].double())
    assert d_weights is not None
    expected = (d_y[:count].double() * rows[:count].double()).sum(1)
    torch.testing.assert_close(d_weights[:count].double(), expected, rtol=1e-4, atol=1e-4)


def test_sums_end_at_the_count_of_tokens() -> None:
    rows, position = torch.randn(6, 512).bfloat16(), torch.tensor([[0, 5], [-1, 2], [1, 1], [3, 4]])
    found = glue.sum_rows(rows, position, None, torch.tensor([2], dtype=torch.int32))
    check(found, torch.stack([rows[0].double() + rows[5].double(), rows[2].double()]))


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("choices", [3, 19])
def test_sums_that_are_not_rounded(weighted: bool, choices: int) -> None:
    """Float32, by order of the choices: to the bit what torch's own sums in that order are. The same
    rounded, where positions are asked for early, too."""
    rows, position = torch.randn(6, 520).bfloat16(), torch.randint(-3, 6, (9, choices)).clamp_min(-1)
    position[1] = -1
    weights = torch.rand(9, choices) if weighted else None
    expected = torch.zeros(9, 520)
    for k in range(choices):
        scale = torch.ones(9) if weights is None else weights[:, k]
        expected += torch.where(position[:, k, None] < 0, 0, rows[position[:, k]].float() * scale[:, None])
    assert torch.equal(glue.sum_rows_exactly(rows, position, weights), expected)
    for early in (False, True):
        assert torch.equal(glue.sum_rows(rows, position, weights, early=early), expected.bfloat16())


def test_pool_rows_are_summed_in_ascending_order_by_the_kernel_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """Choices name rows in any order, and rows that nobody names are NaN."""
    given = torch.randn(7, 264).bfloat16()
    given[3] = float("nan")
    position = torch.tensor([[6, 0, -1], [-1, -1, -1], [4, 2, 1], [-1, 5, -1]])
    weights = torch.rand(7)
    expected = [pool_rows.reduce(given, position, w, 2 + (w is None)) for w in (weights, None)]
    monkeypatch.setattr(pool_rows, "by_kernels", lambda rows: True)
    found = [pool_rows.reduce(given, position, w, 2 + (w is None)) for w in (weights, None)]
    assert torch.equal(torch.stack(found), torch.stack(expected))
