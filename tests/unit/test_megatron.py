"""imbrex in Megatron-Core's specs: what is put where, and numbers on one rank, against stand-ins of its
contract. Its released wheel: tests/ranks/test_megatron_wheel.py."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.ranks.alone import alone

E, K, D, WIDTH, T = 6, 2, 8, 12, 5
DOOR, MOE = "imbrex.adapters.megatron", "core.transformer.moe"


@dataclass
class Spec:
    module: Any
    params: dict[str, Any] = field(default_factory=dict)
    submodules: Any = None


@dataclass
class Submodules:
    experts: Any = None
    mlp: Any = None
    layer_specs: Any = None


class Alone:
    """A group of one rank."""

    def size(self) -> int:
        return 1

    def rank(self) -> int:
        return 0


GROUPS = SimpleNamespace(ep=Alone(), expt_tp=Alone(), expt_dp=Alone())


class TheirLayer(nn.Module):
    """The order in which Megatron's layer asks its parts."""

    def __init__(self, config: Any, submodules: Any, layer_number: Any, groups: Any) -> None:
        super().__init__()
        self.config, self.ep_group, self.layer_number = config, groups.ep, layer_number
        self.experts = submodules.experts(config.num_moe_experts, config, pg_collection=groups)

    def forward(self, hidden: Tensor, map_TE: Tensor, probs_TE: Tensor) -> Tensor:
        its: Any = self
        tokens, probs = its.token_dispatcher.dispatch_preprocess(hidden, map_TE, probs_TE)
        output, bias = its.routed_experts_compute(*its.dispatch(tokens, probs))
        assert bias is None
        return its.token_dispatcher.combine_postprocess(its.combine(output))


class TheirDispatcher:
    def __init__(self, config: Any, pg_collection: Any) -> None:
        self.config = config


class TheirExperts(nn.Module):
    """One product an expert, times probabilities; rows must be as many as the counts say."""

    def __init__(self, num_experts: int, config: Any, pg_collection: Any) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(num_experts, D, D))

    def forward(self, rows: Tensor, counts: Tensor, probs: Tensor) -> tuple[Tensor, None]:
        parts = torch.split(rows, counts.tolist())
        out = torch.cat([part @ weight for part, weight in zip(parts, self.weight, strict=True)])
        return out * probs[:, None], None


@pytest.fixture
def door() -> Iterator[Any]:
    names = {
        f"{MOE}.moe_layer": {"MoELayer": TheirLayer},
        f"{MOE}.moe_utils": {"get_default_pg_collection": lambda: GROUPS},
        f"{MOE}.token_dispatcher": {"MoETokenDispatcher": TheirDispatcher},
    }
    with alone("megatron", [], names):
        yield importlib.import_module(DOOR)
    sys.modules.pop(DOOR, None)


def config(**more: Any) -> Any:
    plain = {"gated_linear_unit": True, "activation_func": F.silu, "add_bias_linear": False}
    sizes = {"hidden_size": D, "moe_ffn_hidden_size": WIDTH, "num_moe_experts": E, "moe_router_topk": K}
    drawn = dict.fromkeys(("init_method", "output_layer_init_method"), partial(nn.init.normal_, std=0.3))
    rest = {"params_dtype": torch.float32, "use_cpu_initialization": True, "perform_initialization": True}
    return SimpleNamespace(**plain | sizes | drawn | rest | {"expert_model_parallel_size": 1} | more)


def choices() -> tuple[Tensor, Tensor]:
    """Megatron's map and probabilities; the last token has one choice left."""
    probs_TE = torch.rand(T, E, requires_grad=True)
    map_TE = torch.zeros(T, E, dtype=torch.bool)
    for token in range(T):
        map_TE[token, [(token * 2) % E, (token * 2 + 3) % E]] = True
    map_TE[-1, (T * 2 - 2) % E] = False
    return map_TE, probs_TE


@pytest.mark.parametrize("schedule", ["serial", "optsche-2"])
@pytest.mark.parametrize("experts", ["auto", "megatron"])
def test_numbers_and_gradients_are_those_of_dense_experts(door: Any, experts: str, schedule: str) -> None:
    torch.manual_seed(0)
    spec = door.with_imbrex(partial(TheirLayer, submodules=Submodules(TheirExperts)), schedule=schedule)
    layer = spec(config(), experts=experts)
    hidden, (map_TE, probs_TE) = torch.randn(T, 1, D, requires_grad=True), choices()
    y = layer(hidden, map_TE, probs_TE)
    if experts == "auto":
        ours = layer.experts.experts
        gate, up = (torch.einsum("tod,efd->etf", hidden, w) for w in ours.gate_up_proj.chunk(2, 1))
        every = torch.einsum("etf,edf->etd", F.silu(gate) * up, ours.down_proj)
    else:
        every = torch.einsum("tod,edg->etg", hidden, layer.experts.weight)
    expected = torch.einsum("etd,te->td", every, probs_TE * map_TE).view_as(y)
    torch.testing.assert_close(y, expected, rtol=1e-5, atol=1e-5)
    wanted = [hidden, probs_TE, *layer.experts.parameters()]
    for mine, theirs in zip(
        torch.autograd.grad(y.square().sum(), wanted),
        torch.autograd.grad(expected.square().sum(), wanted),
        strict=True,
    ):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-4)


def test_the_layer_stands_wherever_theirs_did(door: Any) -> None:
    """In 0.16's specs of modules and in later ones, which are functions; what else was said stays."""
    older = Spec(nn.Module, submodules=Submodules(mlp=Spec(TheirLayer, {"a": 1}, Submodules(TheirExperts))))
    newer = Spec(nn.Module, submodules=Submodules(mlp=partial(TheirLayer, submodules=Submodules("x"))))
    dense = Spec(nn.Module, submodules=Submodules(mlp=Spec(nn.Linear)))
    block = Submodules(layer_specs=[dense, older, newer])
    ours = door.with_imbrex(block, codec="bf16").layer_specs
    assert ours[0] is dense
    assert ours[1].submodules.mlp.module is door.ImbrexMoELayer
    assert ours[1].submodules.mlp.params == {"a": 1, "codec": "bf16"}
    assert ours[2].submodules.mlp.func is door.ImbrexMoELayer
    assert ours[2].submodules.mlp.keywords == {"submodules": Submodules("x"), "codec": "bf16"}
    assert older.submodules.mlp.module is TheirLayer
    with pytest.raises(ValueError, match="the spec has no MoELayer of Megatron's"):
        door.with_imbrex(dense)
    with pytest.raises(
        ValueError, match="with_imbrex: there is no setting 'transprot'; use transport, codec"
    ):
        door.with_imbrex(block, transprot="alltoall")


def test_what_is_not_there_is_refused(door: Any) -> None:
    build = door.with_imbrex(partial(TheirLayer, submodules=Submodules(TheirExperts)))
    for name in door.REFUSED:
        with pytest.raises(ValueError, match=f"{name} is set; "):
            build(config(**{name: True}))
    with pytest.raises(ValueError, match="ImbrexExperts: activation_func is"):
        build(config(activation_func=F.relu), experts="loop")
    with pytest.warns(UserWarning, match="Megatron computes its experts, not imbrex: fp8 is e4m3"):
        assert isinstance(build(config(fp8="e4m3")).experts, TheirExperts)
    pair = SimpleNamespace(size=lambda: 2)
    with pytest.raises(ValueError, match="set expert_tensor_parallel_size=1"):
        build(config(), pg_collection=SimpleNamespace(ep=Alone(), expt_tp=pair, expt_dp=Alone()))
