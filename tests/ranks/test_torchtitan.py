"""imbrex in the place of torchtitan's all-to-all: outputs and gradients of both, and of dense experts.

Without torchtitan's wheel, which requirements-doors.txt names, a stand-in of its contract is all there is.
With it, its own token dispatcher, configuration and override run, from their released files.
"""

from __future__ import annotations

import importlib
import logging
import sys
from collections.abc import Iterator
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, fields
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from tests.ranks.alone import alone, why_not_installed
from tests.ranks.pool import Pool, Ranks

E, K, D, TOKENS = 8, 3, 16, [11, 6]
DOOR, DISPATCHERS = "imbrex.adapters.torchtitan", "models.common.token_dispatcher"
REASON = why_not_installed("torchtitan", "0.3.0", "requirements-doors.txt")


@pytest.fixture(scope="module")
def pair() -> Iterator[Pool]:
    """Ranks of their own: torchtitan's operators stay registered in them."""
    pool = Pool(2)
    yield pool
    pool.close(20)


@dataclass(kw_only=True, slots=True)
class Config:
    num_experts: int
    top_k: int


@dataclass(kw_only=True, slots=True)
class Padded(Config):
    pad_multiple: int


class Base:
    """What `BaseEPTokenDispatcher` gives those that derive from it."""

    def __init__(self, config: Config) -> None:
        self.num_experts, self.top_k = config.num_experts, config.top_k
        self.ep_mesh: DeviceMesh | None = None

    def wire_meshes(self, *, ep_mesh: DeviceMesh | None) -> None:
        self.ep_mesh = ep_mesh
        self.init_buffer()

    def init_buffer(self) -> None:
        raise NotImplementedError


def derive(source: Any, kind: Any, **settings: Any) -> Any:
    shared = {f.name: getattr(source, f.name) for f in fields(source)}
    return kind(**{n: v for n, v in shared.items() if n in {f.name for f in fields(kind)}} | settings)


def contract() -> dict[str, dict[str, Any]]:
    """torchtitan's names that our module takes, as torchtitan 0.3.0 has them."""
    return {
        "config": {"derive": derive, "override": lambda *, target, description: lambda factory: factory},
        DISPATCHERS: {
            "AllToAllTokenDispatcher": SimpleNamespace(Config=Config),
            "BaseEPTokenDispatcher": Base,
        },
    }


RELEASED = ["config.configurable", "config.override", DISPATCHERS, "ops.scatter_add"]
BESIDE: dict[str, dict[str, Any]] = {
    "observability": {"structured_logger": SimpleNamespace(log_trace_span=lambda name: nullcontext())},
    "tools.logging": {"logger": logging.getLogger("torchtitan")},
    "distributed.spmd_types": {"maybe_set_sparse_mesh": nullcontext},
    "distributed.utils": {"get_spmd_backend": lambda: "default"},
}


def read_released() -> Any:
    """torchtitan's dispatchers; what its package of configurations gives its own modules is put there."""
    config = importlib.import_module("torchtitan.config")
    for name in ("configurable", "override"):
        theirs = vars(importlib.import_module(f"torchtitan.config.{name}"))
        vars(config).update({n: v for n, v in theirs.items() if not n.startswith("__")})
    return importlib.import_module(f"torchtitan.{DISPATCHERS}")


def batch(rank: int) -> tuple[Tensor, Tensor, Tensor]:
    drawn = torch.Generator().manual_seed(rank)
    x_TD = torch.randn(TOKENS[rank], D, generator=drawn)
    scores_TK, ids_TK = torch.rand(TOKENS[rank], E, generator=drawn).topk(K, 1)
    return x_TD.requires_grad_(), scores_TK.requires_grad_(), ids_TK


def weights() -> Tensor:
    return torch.randn(E, D, D, generator=torch.Generator().manual_seed(99)).mul_(0.3).requires_grad_()


def dense(ranks: Ranks) -> list[Tensor]:
    """Output, gradients of this rank's tokens, scores and experts, where every rank has all experts."""
    w_EDD, outputs, inputs = weights(), [], []
    for rank in range(ranks.world_size):
        x_TD, scores_TK, ids_TK = batch(rank)
        every_TED = torch.einsum("td,edf->tef", x_TD, w_EDD).tanh()
        chosen_TKD = every_TED.gather(1, ids_TK[:, :, None].expand(-1, -1, D))
        outputs.append((chosen_TKD * scores_TK[:, :, None]).sum(1))
        inputs.append((x_TD, scores_TK))
    sum(y.square().sum() for y in outputs).backward()  # pyright: ignore[reportAttributeAccessIssue]
    x_TD, scores_TK = inputs[ranks.rank]
    assert w_EDD.grad is not None
    assert x_TD.grad is not None
    assert scores_TK.grad is not None
    own = w_EDD.grad.view(ranks.world_size, -1, D, D)[ranks.rank]
    return [outputs[ranks.rank].detach(), x_TD.grad, scores_TK.grad, own]


def trained(ranks: Ranks, dispatcher: Any, multiple: int = 1) -> list[Tensor]:
    """The same over a token dispatcher, with experts of this rank alone."""
    x_TD, scores_TK, ids_TK = batch(ranks.rank)
    counts_E = torch.bincount(ids_TK.flatten(), minlength=E)
    w_eDD = weights().detach().view(ranks.world_size, -1, D, D)[ranks.rank].clone().requires_grad_()
    rows_RD, counts_e, metadata = dispatcher.dispatch(x_TD, scores_TK, ids_TK, counts_E)
    assert counts_e.dtype == counts_E.dtype
    assert not (counts_e % multiple).any()
    parts = rows_RD.split(counts_e.tolist())
    y_RD = torch.cat([(part @ w).tanh() for part, w in zip(parts, w_eDD, strict=True)])
    y_TD = dispatcher.combine(y_RD, metadata, x_TD)
    y_TD.square().sum().backward()
    assert w_eDD.grad is not None
    assert x_TD.grad is not None
    assert scores_TK.grad is not None
    return [y_TD.detach(), x_TD.grad, scores_TK.grad, w_eDD.grad]


def errors(ours: list[Tensor], theirs: list[Tensor]) -> list[float]:
    return [float((a - b).abs().max()) for a, b in zip(ours, theirs, strict=True)]


def of_contract(ranks: Ranks) -> list[float]:
    """Errors of our dispatcher, plain and padded, against dense experts."""
    mesh = DeviceMesh.from_group(ranks.group, "cpu")
    with alone("torchtitan", [], contract()), ExitStack() as after:
        ours = importlib.import_module(DOOR)
        after.callback(sys.modules.pop, DOOR)
        gaps = []
        for config, multiple in (
            (Config(num_experts=E, top_k=K), 1),
            (Padded(num_experts=E, top_k=K, pad_multiple=8), 8),
        ):
            dispatcher = ours.ImbrexTokenDispatcher(ours.exchange(config, transport="alltoall"))
            dispatcher.wire_meshes(ep_mesh=mesh)
            gaps += errors(trained(ranks, dispatcher, multiple), dense(ranks))
        return gaps


def of_one_rank(ranks: Ranks) -> list[float]:
    with alone("torchtitan", [], contract()), ExitStack() as after:
        ours = importlib.import_module(DOOR)
        after.callback(sys.modules.pop, DOOR)
        dispatcher = ours.ImbrexTokenDispatcher(ours.exchange(Config(num_experts=E, top_k=K), codec="fp8"))
        dispatcher.wire_meshes(ep_mesh=None)
        return errors(trained(ranks, dispatcher), dense(ranks))


def of_release(ranks: Ranks) -> tuple[list[float], str]:
    """Errors against torchtitan's own dispatcher, and what its override has put in the place of that."""
    mesh = DeviceMesh.from_group(ranks.group, "cpu")
    with alone("spmd_types", [], {}), alone("torchtitan", RELEASED, BESIDE), ExitStack() as after:
        theirs, config = read_released(), importlib.import_module("torchtitan.config")
        all_to_all = theirs.AllToAllTokenDispatcher

        class Layer(config.Configurable):
            @dataclass(kw_only=True, slots=True)
            class Config(config.Configurable.Config):
                token_dispatcher: Any

        tree = Layer.Config(token_dispatcher=all_to_all.Config(num_experts=E, top_k=K))
        plain = tree.token_dispatcher.build()
        after.callback(sys.modules.pop, DOOR, None)
        settings = config.OverrideConfig(imports=[(f"{DOOR}.exchange", {"transport": "alltoall"})])
        config.apply_overrides(settings, tree)
        ours = tree.token_dispatcher.build()
        results = []
        for dispatcher in (ours, plain):
            dispatcher.wire_meshes(ep_mesh=mesh)
            results.append(trained(ranks, dispatcher))
        return errors(*results), type(ours).__name__


def test_our_dispatcher_is_dense_experts(pair: Pool) -> None:
    for gaps in pair.run(2, of_contract):
        assert max(gaps) < 2e-5


def test_a_rank_without_a_mesh_keeps_its_tokens(pair: Pool) -> None:
    (gaps,) = pair.run(1, of_one_rank)
    assert max(gaps) < 2e-5


@pytest.mark.skipif(REASON is not None, reason=str(REASON))
def test_their_override_gives_their_results(pair: Pool) -> None:
    for gaps, name in pair.run(2, of_release):
        assert name == "ImbrexTokenDispatcher"
        assert max(gaps) < 2e-5
