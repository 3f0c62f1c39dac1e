"""The gate's kernels, emulated, against the router's operators of torch."""

from __future__ import annotations

import pytest
import torch

from imbrex.kernels.gate import choose as kernels
from imbrex.router.gates import Gate, Groups, choose
from tests.emulated import kernel

pytestmark = pytest.mark.skipif(not kernel.available(), reason="compiles the kernels with g++")
GATES = {  # of two variants of the kernels, each a second of g++
    "softmax": (Gate(), 8, 2),
    "scores as they are": (Gate(normalize=False, scale=2.0), 60, 4),
    "sigmoid": (Gate(score="sigmoid"), 200, 8),
    "deepseek_v2": (
        Gate(normalize=False, scale=16.0, groups=Groups(num_groups=8, topk_groups=3, by="max")), 64, 6,
    ),
    "deepseek_v3": (
        Gate(score="sigmoid", bias=True, scale=2.5, groups=Groups(num_groups=8, topk_groups=4)), 256, 8,
    ),
    "all of them": (Gate(), 32, 32),
}  # fmt: skip


@pytest.fixture(autouse=True)
def _emulated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        kernels,
        "_kernel",
        lambda entry, values, sigmoid, _: kernel.load(kernels._variant(entry, values, sigmoid)),
    )


def by_torch(logits_TE, bias_E, gate: Gate, top_k: int):
    scores_TE = logits_TE.sigmoid() if gate.score == "sigmoid" else logits_TE.softmax(-1)
    ids_TK, weights_TK = choose(scores_TE, bias_E, gate, top_k)
    return ids_TK, weights_TK * gate.scale


@pytest.mark.parametrize("name", GATES)
@pytest.mark.parametrize("tokens", [0, 1, 70])
def test_as_the_operators(name: str, tokens: int) -> None:
    """Logits of few values, so that many tie; then weights and gradients of any."""
    gate, experts, top_k = GATES[name]
    bias_E = torch.randint(-3, 4, (experts,)) / 64 if gate.bias else None
    ties_TE = torch.randint(-2, 3, (tokens, experts)) / 8
    for logits_TE in (ties_TE, torch.randn(tokens, experts)):
        ours, theirs = (logits_TE.clone().requires_grad_() for _ in range(2))
        ids_TK, weights_TK = kernels.choose_experts(ours, bias_E, gate.choice(top_k))
        expected_ids_TK, expected_TK = by_torch(theirs, bias_E, gate, top_k)
        assert torch.equal(ids_TK, expected_ids_TK)
        torch.testing.assert_close(weights_TK, expected_TK, rtol=2e-6, atol=1e-7)
        d_weights_TK = torch.randn(tokens, top_k)
        weights_TK.backward(d_weights_TK)
        expected_TK.backward(d_weights_TK)
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-5, atol=1e-6 * gate.scale)


def test_the_example_of_its_head() -> None:
    logits = torch.tensor([[0.0, 2.0, 5.0, 0.0]]).clamp(min=1).log().requires_grad_()
    ids, weights = kernels.choose_experts(logits, None, Gate().choice(2))
    weights.backward(torch.tensor([[7.0, 0.0]]))
    assert ids.tolist() == [[2, 1]]
    torch.testing.assert_close(weights.detach(), torch.tensor([[5 / 7, 2 / 7]]))
    torch.testing.assert_close(logits.grad, torch.tensor([[0.0, -10 / 7, 10 / 7, 0.0]]))


@pytest.mark.parametrize("fill", [float("nan"), float("inf"), -float("inf"), -200.0])
def test_ids_are_legal_whatever_the_logits(fill: float) -> None:
    for name in ("softmax", "deepseek_v3"):
        gate, experts, top_k = GATES[name]
        bias_E = torch.zeros(experts) if gate.bias else None
        logits_TE = torch.full((3, experts), fill)
        logits_TE[1, 5] = 1.0
        ids_TK, _ = kernels.choose_experts(logits_TE, bias_E, gate.choice(top_k))
        assert all(len(set(row)) == top_k and 0 <= min(row) <= max(row) < experts for row in ids_TK.tolist())


def test_the_same_bits_twice() -> None:
    logits_TE = torch.randn(9, 256)
    choice = GATES["deepseek_v3"][0].choice(8)
    first, second = (kernels.choose_experts(logits_TE, None, choice) for _ in range(2))
    assert torch.equal(first[0], second[0])
    assert torch.equal(first[1], second[1])


def test_what_they_do_not_take_is_said() -> None:
    assert "on a GPU" in str(kernels.why_not_fused(torch.zeros(1, 4), Gate().choice(2)))
