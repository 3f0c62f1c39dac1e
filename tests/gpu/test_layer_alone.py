"""A layer of one rank on a GPU in bfloat16, by kernels: the dense oracle in float64, torch's operators."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

import imbrex
from imbrex.contracts import Routing, RowForm
from imbrex.exchange import alone
from imbrex.exchange.alone import STATE
from imbrex.kernels.gate.logits import why_not_few
from imbrex.overlap.serial import Serial
from imbrex.router.capacity import Capacity
from imbrex.router.logits import logits
from tests.ranks.layer_jobs import Case, run_layer
from tests.ranks.test_layer import largest_error, relative

pytestmark = pytest.mark.gpu

LIMIT = 0.03
SHAPE: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 128, "num_experts": 9, "top_k": 4}
ALONE: Any = SimpleNamespace(group=None, world_size=1, device="cuda", rank=0)
CASES = {
    "kernels": ({}, {}),
    "grouped": ({}, {"experts": "grouped"}),
    "loop": ({}, {"experts": "loop"}),
    "dropped": ({"gate": imbrex.Gate(capacity=Capacity(factor=0.7))}, {}),
    "rows copied again": ({}, {"schedule": Serial(keep_rows=False)}),
    "chunks": ({}, {"schedule": "optsche-3"}),
}


@pytest.mark.parametrize("tokens", [1, 37, 3000])
@pytest.mark.parametrize("name", list(CASES))
def test_outputs_and_all_gradients(name: str, tokens: int) -> None:
    shape, options = CASES[name]
    config = imbrex.MoEConfig(**{**SHAPE, **shape})
    case = Case(config=config, dtype=torch.bfloat16, tokens=(tokens,), options=options)
    first, second = (run_layer(ALONE, case) for _ in range(2))
    errors = largest_error(case, 1, [first])
    assert max(errors.values()) < LIMIT, errors
    assert torch.equal(first["y"], second["y"])
    for parameter, gradient in first["grads"].items():
        assert torch.equal(gradient, second["grads"][parameter]), parameter


@pytest.mark.parametrize("experts", ["kernels", "grouped"])
def test_dropped_choices_leave_no_nan_where_autograd_looks_for_it(experts: str) -> None:
    config = imbrex.MoEConfig(**SHAPE, gate=imbrex.Gate(capacity=Capacity(factor=0.5)))
    layer = imbrex.MoELayer(config, experts=experts, device="cuda", dtype=torch.bfloat16)
    x_TD = torch.randn(300, 64, device="cuda", dtype=torch.bfloat16).requires_grad_()
    with torch.autograd.set_detect_anomaly(True):
        layer(x_TD).float().square().sum().backward()
    assert all(bool(p.grad.isfinite().all()) for p in layer.parameters() if p.grad is not None)


def make(transport: str = "auto", **options: Any) -> imbrex.MoELayer:
    torch.manual_seed(3)
    config = imbrex.MoEConfig(**SHAPE, shared=imbrex.SharedExperts(intermediate_size=64))
    return imbrex.MoELayer(config, transport=transport, device="cuda", dtype=torch.bfloat16, **options)


def test_shared_experts_are_added() -> None:
    x = torch.randn(200, 64, device="cuda", dtype=torch.bfloat16)
    found = []
    for transport in ("auto", "alltoall"):
        leaf, layer = x.clone().requires_grad_(), make(transport)
        y = layer(leaf)
        y.float().square().sum().backward()
        assert leaf.grad is not None
        found.append((y.detach(), leaf.grad))
    assert max(relative(a, b) for a, b in zip(*found, strict=True)) < LIMIT


def test_the_layer_says_that_kernels_serve_it() -> None:
    assert "kernels order and sum its rows" in make().reasons["transport"]
    assert "kernels" not in make("alltoall").reasons["transport"]


@torch.no_grad()
def test_nothing_is_asked_of_the_device() -> None:
    layer, x = make(), torch.randn(64, 64, device="cuda", dtype=torch.bfloat16)
    layer(x)
    torch.cuda.set_sync_debug_mode("error")
    try:
        layer(x)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@torch.no_grad()
@pytest.mark.parametrize("tokens", [8, 1000])
def test_a_captured_layer_follows_its_tokens(tokens: int) -> None:
    layer, x = make(), torch.randn(tokens, 64, device="cuda", dtype=torch.bfloat16)
    layer(x)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = layer(x)
    for _ in range(3):
        x.copy_(torch.randn_like(x))
        graph.replay()
        assert torch.equal(y, layer(x))


@torch.no_grad()
@pytest.mark.parametrize("tokens", [1, 8, 100, 512])
def test_a_small_batch_has_the_bits_of_any(tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its order, rows and groups by one launch, with choices that are not kept; eager and captured."""
    layer, x = make(), torch.randn(tokens, 64, device="cuda", dtype=torch.bfloat16)
    live_TK = (torch.rand(tokens, device="cuda") < 0.7)[:, None].expand(-1, SHAPE["top_k"])
    y = layer(x, kept_TK=live_TK)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        again = layer(x, kept_TK=live_TK)
    for _ in range(20):
        graph.replay()
    monkeypatch.setattr(alone, "MOST_FEW", 0)
    wanted = layer(x, kept_TK=live_TK)
    assert torch.equal(y, wanted)
    assert torch.equal(again, wanted)


@pytest.mark.parametrize("tokens", [520, 700])
def test_tokens_in_place_give_the_bits_of_copied_rows(tokens: int) -> None:
    layer, x = make(), torch.randn(tokens, 64, device="cuda", dtype=torch.bfloat16)
    wanted = layer(x).detach()
    with torch.no_grad():
        assert torch.equal(layer(x), wanted)
        assert layer.routing is not None
        assert layer.experts.forms[0] is RowForm.INDEXED
        dispatched = layer.exchange.dispatch(x, layer.routing, forms=layer.experts.forms)
        assert dispatched.index_R is not None
        copied = layer.exchange.dispatch(x, layer.routing)
        assert torch.equal(copied.rows_RD, x[dispatched.index_R])


@torch.no_grad()
def test_tokens_in_place_in_fp8() -> None:
    """The bits of rows that are copied and then quantised, however many choices a token has."""
    torch.manual_seed(4)
    for top_k in (2, 8):
        shape: dict[str, Any] = {
            "hidden_size": 256,
            "intermediate_size": 128,
            "num_experts": 12,
            "top_k": top_k,
        }
        kind: Any = {"experts": "kernels-fp8", "device": "cuda", "dtype": torch.bfloat16}
        layer = imbrex.MoELayer(imbrex.MoEConfig(**shape), **kind)
        x = torch.randn(300, 256, device="cuda", dtype=torch.bfloat16)
        y = layer(x)
        assert layer.routing is not None
        copied = layer.exchange.dispatch(x, layer.routing)
        rows_RD = layer.experts(copied)
        assert torch.equal(layer.exchange.combine(rows_RD, copied.handle, weighted=True), y)


def test_a_compiled_layer_goes_by_the_same_kernels() -> None:
    layer, x = make(), torch.randn(64, 64, device="cuda", dtype=torch.bfloat16)
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    assert relative(compiled(x).detach(), layer(x).detach()) < LIMIT
    assert layer.routing is not None
    assert len(layer.exchange.dispatch(x, layer.routing).handle.state) == len(STATE)


@pytest.mark.parametrize("tokens", [1, 4, 300])
@pytest.mark.parametrize("backend", ["aot_eager", "cudagraphs"])
def test_a_compiled_layer_that_nobody_differentiates(backend: str, tokens: int) -> None:
    """One operator, of the launches and bits of a plain call of the same choices; and what a graph of it
    replays. The choices are given: a compiled gate sums the logits of few tokens in another order."""
    layer = make()

    def run(x: torch.Tensor, ids_TK: torch.Tensor, weights_TK: torch.Tensor) -> torch.Tensor:
        routing = Routing(ids_TK=ids_TK, weights_TK=weights_TK)
        return layer.strategy.run(x, routing, layer.exchange, layer.experts, None).y_TD

    with torch.no_grad():
        compiled = torch.compile(run, backend=backend, fullgraph=True)
        for _ in range(4):
            x = torch.randn(tokens, 64, device="cuda", dtype=torch.bfloat16)
            layer(x)
            assert layer.routing is not None
            given = x, layer.routing.ids_TK, layer.routing.weights_TK
            assert torch.equal(compiled(*given).clone(), run(*given))


def test_no_tokens() -> None:
    layer = make()
    x = torch.zeros(0, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    layer(x).sum().backward()
    assert layer.experts.down_proj.grad is not None
    assert layer.experts.down_proj.grad.abs().max() == 0.0


@torch.no_grad()
@pytest.mark.parametrize(("tokens", "experts", "width"), [(1, 128, 2048), (8, 256, 7168), (31, 9, 64)])
def test_logits_of_few_tokens(tokens: int, experts: int, width: int) -> None:
    """Of float32 sums, whose order is the kernel's; the same bits in a graph, and whoever is beside."""
    torch.manual_seed(5)
    kind: Any = {"device": "cuda", "dtype": torch.bfloat16}
    x_TD, weight_ED = torch.randn(tokens, width, **kind), torch.randn(experts, width, **kind)
    assert why_not_few(x_TD, weight_ED) is None
    logits_TE = logits(x_TD, weight_ED)
    exact, terms = (
        a @ b.t()
        for a, b in ((x_TD.double(), weight_ED.double()), (x_TD.double().abs(), weight_ED.double().abs()))
    )
    assert ((logits_TE.double() - exact).abs() <= terms * 2.0**-20).all()
    assert torch.equal(logits(x_TD[-1:], weight_ED), logits_TE[-1:])
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        again = logits(x_TD, weight_ED)
    graph.replay()
    assert torch.equal(again, logits_TE)
