"""Hooks on imbrex's experts that a fused layer runs: they see what a serial layer gives them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.library import _scoped_library

import imbrex
from imbrex.contracts import Dispatched, RowForm
from imbrex.experts.experts import Experts
from imbrex.kernels.ffn.ffn import ffn, run_ffn, run_ffn_backward
from imbrex.kernels.fused.rows_out import rows_out_once
from tests.emulated import kernel
from tests.poison import real_empty
from tests.ranks.layer_jobs import coefficients
from tests.ranks.pool import Pool, Ranks
from tests.ranks.test_fused import CHOICES, EXPERTS, INNER, emulating

pytestmark = pytest.mark.skipif(not kernel.available(), reason="the emulation needs g++")
WIDTH = 512
"""A multiple of it crosses in fp8."""


def by_kernels(experts: Experts, dispatched: Dispatched) -> Tensor:
    """`Experts.forward` of kernels, on a CPU."""
    beside = None
    if dispatched.form is RowForm.UNDER_WAY:
        beside = rows_out_once(dispatched.beside)
        if beside is not None and experts.unchanged:
            beside = beside._replace(leave=dispatched.leave)
    weights = experts.gate_up_proj, experts.down_proj
    more = {"weights_R": dispatched.handle.weights_R, "beside": beside}
    return ffn(dispatched.rows_RD, *weights, dispatched.counts_e, **more)


def a_layer(ranks: Ranks, transport: Any, schedule: str, codec: Any = "identity") -> Any:
    config = imbrex.MoEConfig(hidden_size=WIDTH, intermediate_size=INNER, num_experts=EXPERTS, top_k=CHOICES)
    options: dict[str, Any] = {"transport": transport, "schedule": schedule, "codec": codec}
    torch.manual_seed(0)
    layer = imbrex.MoELayer(config, ranks.group, dtype=torch.bfloat16, **options)
    layer.experts.implementation, layer.experts.applies_weights = "kernels", True
    return layer


def step(layer: Any, call: Callable[[Tensor], Tensor], rank: int) -> list[Any]:
    """An output and all gradients."""
    make = torch.Generator().manual_seed(rank)
    x_TD = torch.randn(31 + 9 * rank, WIDTH, generator=make).bfloat16().requires_grad_()
    y_TD = call(x_TD)
    parameters = [*layer.parameters()]
    return [y_TD, *torch.autograd.grad((y_TD.float() * coefficients(y_TD)).sum(), [x_TD, *parameters])]


def twice_the_rows(_: Any, given: tuple[Dispatched]) -> tuple[Dispatched]:
    return (replace(given[0], rows_RD=2 * given[0].rows_RD),)


def run_before(ranks: Ranks, hooked: Sequence[int], codec: Any) -> tuple[list[bool], str]:
    """Whether fused and serial give the same where a hook before the experts of some ranks changes rows."""
    answers, reason = [], ""
    with emulating(ranks) as (nvlink, _), pytest.MonkeyPatch.context() as patch:
        patch.setattr(Experts, "forward", by_kernels)
        for schedule in ("serial", "fused"):
            layer = a_layer(ranks, nvlink, schedule, codec)
            if ranks.rank in hooked:
                layer.experts.register_forward_pre_hook(twice_the_rows)
            answers.append(step(layer, layer, ranks.rank))
            reason = layer.reasons["schedule"]
    return [torch.equal(a, b) for a, b in zip(*answers, strict=True)], reason


def run_own_forward(ranks: Ranks) -> list[bool]:
    """Whether fused and serial give the same by experts that compute their rows themselves."""
    answers = []
    with emulating(ranks) as (nvlink, _):
        for schedule in ("serial", "fused"):
            layer = a_layer(ranks, nvlink, schedule)
            layer.experts.__class__ = ByTorch
            answers.append(step(layer, layer, ranks.rank))
    return [torch.equal(a, b) for a, b in zip(*answers, strict=True)]


class ByTorch(Experts):
    """Experts derived from imbrex's, with all that they say of themselves, and a forward of their own."""

    def forward(self, dispatched: Dispatched) -> Tensor:
        y_RD = self._by_products(dispatched.rows_RD, dispatched.counts_e)
        return y_RD * dispatched.handle.weights_R[:, None].to(y_RD.dtype)


def test_a_forward_of_somebodys_own_gets_rows_that_are_there(pool: Pool) -> None:
    assert pool.run(2, run_own_forward) == [[True] * 5] * 2


@pytest.mark.parametrize(
    ("hooked", "codec"), [((0, 1), "identity"), ((0,), {"dispatch": "fp8"})], ids=["both", "one, fp8"]
)
def test_a_hook_before_the_experts_finds_its_rows(pool: Pool, hooked: Sequence[int], codec: Any) -> None:
    """They are not under way, though those of its peers may be."""
    for rank, (same, reason) in enumerate(pool.run(2, run_before, hooked, codec)):
        assert same == [True] * 5
        how = "before gate and up (a hook may read them)" if rank in hooked else "beside gate and up"
        assert f"rows come {how}, " in reason


def run_in_graph(ranks: Ranks) -> list[list[bool]]:
    """Whether a fused layer gives the same in a graph as outside, and as without hooks, with a hook behind
    its experts, and before."""
    found = []
    with (
        emulating(ranks) as (nvlink, _),
        pytest.MonkeyPatch.context() as patch,
        real_empty(),
        _scoped_library("imbrex_experts_v4", "IMPL") as here,
    ):
        here.impl("ffn", run_ffn, "CPU")
        here.impl("ffn_backward", run_ffn_backward, "CPU")
        patch.setattr(Experts, "forward", by_kernels)
        for name in ("register_forward_hook", "register_forward_pre_hook"):
            torch.compiler.reset()
            layer = a_layer(ranks, nvlink, "fused")
            (without_TD, *_) = step(layer, layer, ranks.rank)
            pre = name.endswith("pre_hook")
            getattr(layer.experts, name)(twice_the_rows if pre else lambda *call: 2 * call[-1])
            compiled: Any = torch.compile(layer, backend="aot_eager", fullgraph=True)
            both = step(layer, layer, ranks.rank), step(layer, compiled, ranks.rank)
            same = [torch.equal(a, b) for a, b in zip(*both, strict=True)]
            found.append([*same, torch.equal(without_TD, both[0][0])])
    return found


@pytest.mark.untraced
def test_a_hook_is_heard_in_a_compiled_graph(pool: Pool) -> None:
    """Where the fused layer is one operator, nobody would call it."""
    for found in pool.run(2, run_in_graph):
        assert found == [[True] * 5 + [False]] * 2
