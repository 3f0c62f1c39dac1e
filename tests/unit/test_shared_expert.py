"""The expert that every token visits: what a large one keeps for its backward, and its bits."""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial

import pytest
import torch
from torch import Tensor
from torch.nn.modules.module import register_module_full_backward_hook

from imbrex.experts import SharedExpert, shared

D, F, T = 8, 6, 5
ACTIVATIONS = (T, F)


def make(dtype: torch.dtype = torch.bfloat16) -> SharedExpert:
    torch.manual_seed(0)
    return SharedExpert(D, F, dtype=dtype)


def note(packed: dict[int, tuple[int, ...]], tensor: Tensor) -> Tensor:
    """Note the shape of a tensor that a node saves, each once."""
    packed[tensor.data_ptr()] = tuple(tensor.shape)
    return tensor


def kept_by(expert: SharedExpert, x_TD: Tensor) -> tuple[Tensor, int]:
    """The loss of a call, and how many activations it keeps."""
    packed: dict[int, tuple[int, ...]] = {}
    with torch.autograd.graph.saved_tensors_hooks(partial(note, packed), lambda tensor: tensor):
        loss = expert(x_TD).float().square().sum()
    return loss, list(packed.values()).count(ACTIVATIONS)


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("frozen", ["", "down_proj.weight", "gate_proj.weight", "x"])
def test_large_experts_keep_gate_and_up_alone_with_the_bits_of_torch(
    monkeypatch: pytest.MonkeyPatch, frozen: str, autocast: bool
) -> None:
    expert, found = make(torch.float32 if autocast else torch.bfloat16), []
    leaves = {"x": torch.randn(T, D, dtype=expert.up_proj.weight.dtype).requires_grad_()}
    leaves |= dict(expert.named_parameters())
    for name, leaf in leaves.items():
        leaf.requires_grad_(name != frozen)
    learns = [leaf for leaf in leaves.values() if leaf.requires_grad]
    for large in (1, 1 << 30):
        monkeypatch.setattr(shared, "LARGE", large)
        with torch.autocast("cpu", torch.bfloat16) if autocast else nullcontext():
            loss, kept = kept_by(expert, leaves["x"])
        if large == 1:
            assert kept == 2
        found.append([loss.detach(), *torch.autograd.grad(loss, learns)])
    assert all(map(torch.equal, *found))


def test_second_derivatives_of_large_experts_are_those_of_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    expert, found = make(torch.float64), []
    x_TD, leaves = torch.randn(T, D, dtype=torch.float64), list(expert.parameters())
    for large in (1, 1 << 30):
        monkeypatch.setattr(shared, "LARGE", large)
        leaf = x_TD.clone().requires_grad_()
        (first,) = torch.autograd.grad(expert(leaf).square().sum(), [leaf], create_graph=True)
        found.append(torch.autograd.grad(first.square().sum(), [leaf, *leaves]))
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


WAYS = ["subclass", "hook", "pre-hook", "backward hook", "everybody's backward hook", "bias", "function"]


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
