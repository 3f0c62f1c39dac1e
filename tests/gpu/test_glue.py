"""The glue between an exchange and torch's grouped GEMM, on a GPU: values, gradients, one graph."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from imbrex.kernels.ffn.glue import add_parts
from imbrex.kernels.ffn.operators import permute, swiglu, unpermute
from tests.poison import real_empty

pytestmark = pytest.mark.gpu
COUNTS = [130, 0, 1, 70]
WIDTH, INNER, CHOICES = 1096, 264, 3


def inputs() -> dict[str, Tensor]:
    """67 tokens of 3 choices each, all of them here, for four experts; 50 rows to spare."""
    torch.manual_seed(0)
    rows, spare = sum(COUNTS), 50
    expert = torch.repeat_interleave(torch.arange(4), torch.tensor(COUNTS))[torch.randperm(rows)]
    choice = expert.argsort(stable=True)
    position = torch.empty_like(choice)
    position[choice] = torch.arange(rows)
    choice = torch.cat([choice, torch.zeros(spare, dtype=torch.int64)])
    given = {
        "x": torch.randn(rows // CHOICES, WIDTH).bfloat16(),
        "up": torch.randn(4, WIDTH, 2 * INNER).bfloat16() / WIDTH**0.5,
        "down": torch.randn(4, INNER, WIDTH).bfloat16() / INNER**0.5,
        "weights": torch.rand(rows // CHOICES, CHOICES),
        "choice": choice,
        "position": position.view(-1, CHOICES),
        "ends": torch.tensor(COUNTS).cumsum(0).to(torch.int32),
    }
    return {name: tensor.cuda() for name, tensor in given.items()}


def step(given: dict[str, Tensor]) -> Tensor:
    where = given["choice"], given["position"], given["ends"]
    rows = permute(given["x"], *where)
    gate_up = F.grouped_mm(rows, given["up"], offs=given["ends"])
    act = swiglu(gate_up, given["ends"])
    out = F.grouped_mm(act, given["down"], offs=given["ends"])
    return unpermute(out, *where, given["weights"])


def reference(given: dict[str, Tensor]) -> Tensor:
    choice, rows = given["choice"][: sum(COUNTS)], []
    for expert, piece in enumerate((given["x"][choice // CHOICES]).split(COUNTS)):
        gate, up = (piece @ given["up"][expert]).chunk(2, -1)
        rows.append((F.silu(gate) * up) @ given["down"][expert])
    weighted = torch.cat(rows) * given["weights"].flatten()[choice, None]
    return torch.zeros_like(given["x"]).index_add(0, choice // CHOICES, weighted)


def test_values_and_gradients_of_an_ffn_through_torchs_grouped_gemm() -> None:
    given = inputs()
    learnt = ("x", "up", "down", "weights")
    for name in learnt:
        given[name].requires_grad_()
    exact = {name: t.detach().double().requires_grad_() if name in learnt else t for name, t in given.items()}
    d_y = torch.randn_like(given["x"])
    y, truth = step(given), reference(exact)
    assert ((y - truth).norm() / truth.norm()) < 0.01
    grads = torch.autograd.grad(y, [given[name] for name in learnt], d_y)
    truths = torch.autograd.grad(truth, [exact[name] for name in learnt], d_y.double())
    for name, grad, wanted in zip(learnt, grads, truths, strict=True):
        assert ((grad - wanted).norm() / wanted.norm()) < 0.02, name


def test_a_captured_step_follows_new_counts() -> None:
    given = inputs()
    with torch.no_grad(), real_empty():
        step(given)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = step(given)
        given["weights"].mul_(0.5)
        given["x"].neg_()
        graph.replay()
        assert torch.equal(captured, step(given))


def test_one_compiled_graph() -> None:
    given = inputs()
    given["x"].requires_grad_()
    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    with real_empty():
        d_y = torch.randn_like(given["x"])
        y = step(given)
        (first,) = torch.autograd.grad(y, [given["x"]], d_y)
        again = compiled(given)
        (second,) = torch.autograd.grad(again, [given["x"]], d_y)
    assert torch.equal(y, again)
    assert torch.equal(first, second)


@pytest.mark.parametrize("count", [1, 3, 6, 11])
def test_parts_are_added_as_torch_adds_them(count: int) -> None:
    parts, ends = torch.randn(count, 5000, device="cuda"), torch.tensor([4000, 4900], device="cuda").int()
    sums = torch.empty(5000, device="cuda")
    add_parts(parts, ends, sums)
    assert torch.equal(sums[:4900], parts.sum(0)[:4900])
