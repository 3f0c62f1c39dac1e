"""The router on a GPU chooses, drops and weighs as on the CPU. Logits are multiples of 1/8: exact on both,
and they tie often."""

from __future__ import annotations

import pytest
import torch

from imbrex.router.capacity import Capacity
from imbrex.router.gates import Gate, Groups
from imbrex.router.logits import logits
from imbrex.router.losses import AuxLosses
from imbrex.router.router import Router
from tests.poison import real_empty

pytestmark = pytest.mark.gpu

T, D, E, K = 600, 8, 48, 6
GATES = {
    "mixtral": Gate(),
    "deepseek_v3": Gate(score="sigmoid", bias=True, scale=2.5, groups=Groups(num_groups=8, topk_groups=4)),
    "phi": Gate(
        score="sparsemixer", jitter=0.21
    ),  # 2 * .21 is no ratio of these logits: compilers divide roughly
    "position": Gate(capacity=Capacity(factor=0.7)),
    "probability": Gate(
        score="sigmoid", normalize=False, capacity=Capacity(factor=0.7, drop_by="probability")
    ),
}


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("name", GATES)
def test_as_on_the_cpu(name: str, compiled: bool) -> None:
    losses = AuxLosses(load_balance=0.1, sequence_balance=0.1, z=0.1)
    here = Router(D, E, K, gate=GATES[name], losses=losses)
    with torch.no_grad():
        here.weight.copy_(torch.randint(-2, 3, (E, D)) / 8)
    there = Router(D, E, K, gate=GATES[name], losses=losses, device="cuda")
    there.load_state_dict(here.state_dict())
    x_TD = torch.randint(-2, 3, (T, D)).float()
    call = torch.compile(there, fullgraph=True) if compiled else there
    want = here(x_TD, num_sequences=3)
    with real_empty():
        got = call(x_TD.cuda(), num_sequences=3)
    assert torch.equal(got.ids_TK.cpu(), want.ids_TK)
    torch.testing.assert_close(got.weights_TK.cpu(), want.weights_TK, rtol=1e-5, atol=1e-6)
    for loss, expected in want.losses.items():
        torch.testing.assert_close(got.losses[loss].cpu(), expected, rtol=1e-5, atol=1e-6)
    if want.kept_TK is not None:
        assert got.kept_TK is not None
        assert torch.equal(got.kept_TK.cpu(), want.kept_TK)
        assert 0 < want.kept_TK.sum() < T * K


def test_routing_does_not_wait_for_the_gpu() -> None:
    """Capacity and losses included: nothing of them is read on the host."""
    router = Router(D, E, K, gate=GATES["probability"], losses=AuxLosses(z=1.0), device="cuda")
    x_TD = torch.randn(T, D, device="cuda")
    router(x_TD)
    torch.cuda.set_sync_debug_mode("error")
    try:
        router(x_TD)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("name", ["mixtral", "deepseek_v3", "probability"])
@pytest.mark.parametrize("experts", [48, 256, 384])
def test_the_kernel_is_the_operators(name: str, experts: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ids of ties and of random logits; weights, losses and the gradients of tokens and gate within rounding,
    the same bits twice."""
    losses = AuxLosses(load_balance=0.5, sequence_balance=0.25, z=0.125)
    router = Router(D, experts, K, gate=GATES[name], losses=losses, device="cuda")
    router.weight.requires_grad_()
    for draw in (lambda *s: torch.randint(-2, 3, s) / 8, torch.randn):
        with torch.no_grad():
            router.weight.copy_(draw(experts, D))
        x_TD, d_TK = draw(T, D).cuda(), torch.randn(T, K, device="cuda")
        found = []
        for fused in (True, True, False):
            if not fused:
                monkeypatch.setattr("imbrex.router.router.why_not_fused", lambda *_: "compared with")
            leaf = x_TD.clone().requires_grad_()
            router.weight.grad = None
            routing = router(leaf, num_sequences=3)
            ((routing.weights_TK * d_TK).sum() + losses.total(routing.losses)).backward()
            assert router.weight.grad is not None
            values = [loss.detach() for loss in routing.losses.values()]
            gradients = leaf.grad, router.weight.grad.clone()
            found.append((routing.ids_TK, routing.weights_TK.detach(), *values, *gradients))
            monkeypatch.undo()
        for ours, again, theirs in zip(*found, strict=True):
            assert torch.equal(ours, again)
            torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


def test_losses_of_a_captured_call() -> None:
    """A replay computes the losses and gradients of what then stands in its input."""
    losses = AuxLosses(load_balance=0.5, z=0.125)
    router = Router(D, 128, K, losses=losses, device="cuda")
    x_TD = torch.randn(T, D, device="cuda").requires_grad_()

    def step() -> tuple[torch.Tensor, torch.Tensor]:
        total = losses.total(router(x_TD).losses)
        return total, torch.autograd.grad(total, [x_TD])[0]

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    with torch.no_grad():
        x_TD.copy_(torch.randn_like(x_TD))
    graph.replay()
    for replayed, now in zip(captured, step(), strict=True):
        assert torch.equal(replayed, now)


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("tokens", [0, 1, 7, 128, 3000])
def test_logits_of_bfloat16_without_copies(tokens: int, compiled: bool) -> None:
    """Logits and both gradients against float64: of the logits within the float32 sums of a tensor core, of
    the gradients within the rounding to bfloat16."""
    width, experts = 2048, 128
    x_TD = torch.randn(tokens, width, device="cuda", dtype=torch.bfloat16).requires_grad_()
    weight_ED = (torch.randn(experts, width, device="cuda") / 45).bfloat16().requires_grad_()
    call = torch.compile(logits, fullgraph=True, dynamic=True) if compiled else logits
    logits_TE = call(x_TD, weight_ED)
    assert logits_TE.dtype == torch.float32
    assert torch.equal(call(x_TD.detach(), weight_ED.detach()), logits_TE)
    exact_x, exact_weight = x_TD.detach().double(), weight_ED.detach().double()
    torch.testing.assert_close(logits_TE.double(), exact_x @ exact_weight.t(), rtol=1e-5, atol=5e-5)
    d_TE = torch.randn_like(logits_TE)
    logits_TE.backward(d_TE)
    assert x_TD.grad is not None
    assert weight_ED.grad is not None
    for found, exact in (
        (x_TD.grad, d_TE.double() @ exact_weight),
        (weight_ED.grad, d_TE.double().t() @ exact_x),
    ):
        assert found.dtype == torch.bfloat16
        torch.testing.assert_close(found.double(), exact, rtol=2.0**-8, atol=1e-3)
