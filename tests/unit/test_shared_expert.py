"""The expert that every token visits: what a large one keeps for its backward, and its bits."""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.modules.module import (
    register_module_forward_hook,
    register_module_forward_pre_hook,
    register_module_full_backward_hook,
)

import imbrex
from imbrex.experts import SharedExpert, shared

D, F, T = 8, 6, 5
ACTIVATIONS, RESULTS = (T, F), (T, D)


def make(dtype: torch.dtype = torch.bfloat16) -> SharedExpert:
    torch.manual_seed(0)
    return SharedExpert(D, F, dtype=dtype)


class Gated(nn.Module):
    """A shared expert of a layer, with its gate or without."""

    def __init__(self, expert: SharedExpert, is_gated: bool = True) -> None:
        super().__init__()
        self.expert = expert
        kind = next(expert.parameters())
        self.score: Any = nn.Linear(kind.shape[1], 1, bias=False, dtype=kind.dtype) if is_gated else None

    def forward(self, x_TD: Tensor) -> Tensor:
        return self.expert(x_TD) if self.score is None else shared.gated(self.expert, self.score, x_TD)


def note(packed: dict[int, tuple[int, ...]], tensor: Tensor) -> Tensor:
    """Note the shape of a tensor that a node saves, each once."""
    packed[tensor.data_ptr()] = tuple(tensor.shape)
    return tensor


def kept_by(module: nn.Module, x_TD: Tensor) -> tuple[Tensor, int, int]:
    """The loss of a call, and how many activations and how many tensors of the result's shape it keeps."""
    packed: dict[int, tuple[int, ...]] = {}
    with torch.autograd.graph.saved_tensors_hooks(partial(note, packed), lambda tensor: tensor):
        loss = module(x_TD).float().square().sum()
    shapes = list(packed.values())
    return loss, shapes.count(ACTIVATIONS), shapes.count(RESULTS)


@pytest.mark.parametrize("is_gated", [False, True])
@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize(
    "frozen", ["", "expert.down_proj.weight", "expert.gate_proj.weight", "score.weight", "x"]
)
def test_large_experts_keep_gate_and_up_alone_with_the_bits_of_torch(
    monkeypatch: pytest.MonkeyPatch, frozen: str, autocast: bool, is_gated: bool
) -> None:
    """Bits of all gradients, but for what a gate's gradient goes into."""
    module, found = Gated(make(torch.float32 if autocast else torch.bfloat16), is_gated), []
    kept_TD = []
    leaves = {"x": torch.randn(T, D, dtype=module.expert.up_proj.weight.dtype)}
    leaves |= dict(module.named_parameters())
    for name, leaf in leaves.items():
        leaf.requires_grad_(name != frozen)
    learns = [name for name, leaf in leaves.items() if leaf.requires_grad]
    for large in (1, 1 << 30):
        monkeypatch.setattr(shared, "LARGE", large)
        with torch.autocast("cpu", torch.bfloat16) if autocast else nullcontext():
            loss, kept, results = kept_by(module, leaves["x"])
        if large == 1:
            assert kept == 2
        kept_TD.append(results)
        found.append([loss.detach(), *torch.autograd.grad(loss, [leaves[name] for name in learns])])
    gate_learns = is_gated and (frozen != "score.weight" or leaves["x"].requires_grad)
    assert kept_TD[0] == kept_TD[1] - gate_learns
    for name, ours, torchs in zip(["loss", *learns], *found, strict=True):
        if gate_learns and name in ("x", "score.weight"):
            torch.testing.assert_close(ours, torchs, rtol=0.02, atol=0.02)
        else:
            assert torch.equal(ours, torchs), name


def test_a_layer_does_not_keep_what_its_gate_multiplies(monkeypatch: pytest.MonkeyPatch) -> None:
    gated_shared = imbrex.SharedExperts(intermediate_size=F, gated=True)
    config = imbrex.MoEConfig(hidden_size=D, intermediate_size=F, num_experts=2, top_k=1, shared=gated_shared)
    layer, x_TD, results = imbrex.MoELayer(config), torch.randn(T, D).requires_grad_(), []
    for large in (1, 1 << 30):
        monkeypatch.setattr(shared, "LARGE", large)
        results.append(kept_by(layer, x_TD)[2])
    assert results[0] == results[1] - 1


@pytest.mark.parametrize(("scale", "much"), [(1, 1.25), (8, 0.95)])
def test_a_gates_gradient_is_as_near_to_the_truth_as_torchs(
    monkeypatch: pytest.MonkeyPatch, scale: int, much: float
) -> None:
    """Nearer where the sigmoid is near 1: torch takes how near from the rounded value. Over 18 layers of two
    sizes its errors had 1.13 of torch's by scale 1, 0.96 by 4 and 0.77 by 8."""
    torch.manual_seed(0)
    module = Gated(SharedExpert(64, 96, dtype=torch.bfloat16))
    module.score.weight.data *= scale
    x_TD, d_y_TD = torch.randn(2, 128, 64, dtype=torch.bfloat16)

    def gradients(large: int, dtype: torch.dtype) -> list[Tensor]:
        monkeypatch.setattr(shared, "LARGE", large)
        at = x_TD.to(dtype).requires_grad_()
        return list(torch.autograd.grad(module.to(dtype)(at), [at, module.score.weight], d_y_TD.to(dtype)))

    ours, torchs = gradients(1, torch.bfloat16), gradients(1 << 30, torch.bfloat16)
    for truth, *two in zip(gradients(1 << 30, torch.float64), ours, torchs, strict=True):
        ours_off, torchs_off = ((one - truth).norm() / truth.norm() for one in two)
        assert ours_off <= much * torchs_off


@pytest.mark.parametrize("is_gated", [False, True])
def test_second_derivatives_of_large_experts_are_those_of_torch(
    monkeypatch: pytest.MonkeyPatch, is_gated: bool
) -> None:
    module, found = Gated(make(torch.float64), is_gated), []
    x_TD, leaves = torch.randn(T, D, dtype=torch.float64), list(module.parameters())
    for large in (1, 1 << 30):
        monkeypatch.setattr(shared, "LARGE", large)
        leaf = x_TD.clone().requires_grad_()
        first = torch.autograd.grad(module(leaf).square().sum(), [leaf, *leaves], create_graph=True)
        found.append(torch.autograd.grad([one.square().sum() for one in first], [leaf, *leaves]))
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)


class Doubled(shared.LastProduct):
    """A linear layer of somebody's own."""

    def forward(self, input: Tensor) -> Tensor:
        return 2 * super().forward(input)


@pytest.mark.parametrize("part", ["gate_proj", "up_proj"])
def test_large_experts_whose_parts_give_another_dtype_under_autocast_are_torchs(
    monkeypatch: pytest.MonkeyPatch, part: str
) -> None:
    """As quantised linear layers do, which give their input's dtype: it failed in the backward."""
    expert, found = make(torch.float32), []
    expert.get_submodule(part).register_forward_hook(lambda *call: call[-1].float())
    for large in (1, 1 << 30):
        monkeypatch.setattr(shared, "LARGE", large)
        with torch.autocast("cpu", torch.bfloat16):
            loss = expert(torch.ones(T, D)).float().square().sum()
        found.append(torch.autograd.grad(loss, list(expert.parameters())))
    assert all(map(torch.equal, *found))


WAYS = ["subclass", "hook", "pre-hook", "backward hook", "backward pre-hook", "bias", "function"]
WAYS += ["everybody's hook", "everybody's pre-hook", "everybody's backward hook"]


@pytest.mark.parametrize("way", WAYS)
def test_a_last_product_that_does_more_is_called(
    monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest, way: str
) -> None:
    """As by adapters such as LoRA, which put a module of theirs in its place."""
    monkeypatch.setattr(shared, "LARGE", 1)
    expert, x_TD = make(torch.float32), torch.randn(T, D)
    before, down, called = expert(x_TD), expert.down_proj, []
    if way == "subclass":
        expert.down_proj = Doubled(F, D, bias=False)
        expert.down_proj.weight = down.weight
    elif way == "hook":
        down.register_forward_hook(lambda *call: 2 * call[-1])
    elif way == "pre-hook":
        down.register_forward_pre_hook(lambda *call: (2 * call[-1][0],))
    elif way == "backward hook":
        down.register_full_backward_hook(lambda *_: called.append(way))
    elif way == "backward pre-hook":
        down.register_full_backward_pre_hook(lambda *_: called.append(way))
    elif way == "everybody's hook":
        everybody = register_module_forward_hook(lambda *call: 2 * call[-1] if call[0] is down else None)
        request.addfinalizer(everybody.remove)
    elif way == "everybody's pre-hook":
        twice: Any = lambda *call: (2 * call[-1][0],) if call[0] is down else None  # noqa: E731
        everybody = register_module_forward_pre_hook(twice)
        request.addfinalizer(everybody.remove)
    elif way == "everybody's backward hook":
        everybody = register_module_full_backward_hook(lambda *call: called.append(call[0]))
        request.addfinalizer(everybody.remove)
    elif way == "bias":
        down.bias = torch.nn.Parameter(before.detach()[0])
    else:
        monkeypatch.setattr(down, "forward", lambda act_TF: 2 * act_TF @ down.weight.t())
    y_TD = expert(x_TD.requires_grad_())
    y_TD.sum().backward()
    if "backward" in way:
        assert called == [way] or down in called
    else:
        expected = before + before[0] if way == "bias" else 2 * before
        torch.testing.assert_close(y_TD, expected)


def test_sequences_give_what_their_tokens_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared, "LARGE", 1)
    expert, x_TD, found = make(torch.float32), torch.randn(2 * T, D), []
    for given in (x_TD, x_TD.view(2, T, D)):
        y = expert(given)
        found.append([y.flatten(0, -2), *torch.autograd.grad(y.square().sum(), list(expert.parameters()))])
    for flat, nested in zip(*found, strict=True):
        torch.testing.assert_close(flat, nested)


class Half(SharedExpert):
    """A shared expert of somebody's own, which takes tokens alone."""

    def forward(self, x_TD: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return super().forward(x_TD) / 2


@pytest.mark.parametrize("way", ["hook", "pre-hook", "subclass", "wider gate", "gate of another dtype"])
def test_gates_and_experts_that_do_more_are_torchs(monkeypatch: pytest.MonkeyPatch, way: str) -> None:
    """A hook of the expert hears of its own result, not of the gate's product."""
    module, x_TD, found = Gated(make(torch.float32)), torch.randn(T, D), []
    if way == "hook":
        module.expert.register_forward_hook(lambda *call: call[-1].tanh())
    elif way == "pre-hook":
        module.expert.register_forward_pre_hook(lambda module, given: (2 * given[0],))
    elif way == "subclass":
        module.expert = Half(D, F)
    elif way == "wider gate":
        module.score = nn.Linear(D, D, bias=False)
    else:
        module.score.register_forward_hook(lambda *call: call[-1].double())
    monkeypatch.setattr(shared, "LARGE", 1)
    leaves = [x_TD.requires_grad_(), *module.parameters()]
    y_TD, own_TD = module(x_TD), module.expert(x_TD)
    for gated_TD in (y_TD, torch.sigmoid(module.score(x_TD)) * own_TD):
        found.append([gated_TD, *torch.autograd.grad(gated_TD.square().sum(), leaves)])
    assert all(map(torch.equal, *found))
