"""A rank alone by kernels, emulated: what a layer over torch's operators computes, forward and backward."""

from __future__ import annotations

import copy
import functools
from types import SimpleNamespace

import pytest
import torch
import torch._dynamo
from torch._dynamo.backends.common import aot_autograd
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

import imbrex
from imbrex.contracts import Dispatched, Routing, RowForm
from imbrex.exchange import alone, alone_recorded
from imbrex.exchange.alone import STATE, AloneDispatcher
from imbrex.exchange.exchange import Exchange
from imbrex.experts.experts import Experts
from imbrex.kernels.ffn import ffn, glue
from imbrex.kernels.rows import choices
from imbrex.overlap.serial import Serial
from imbrex.placement import contiguous, split_evenly
from imbrex.router.capacity import Capacity
from tests.emulated import kernel
from tests.emulated.gemm import emulate

pytestmark = pytest.mark.skipif(not kernel.available(), reason="compiles the kernels with g++")
LIMIT = 2e-2  # of the norm: bfloat16 rounds rows, sums and gradients at other points


@pytest.fixture(autouse=True)
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    emulate(monkeypatch, blocks=2)
    monkeypatch.setattr(
        choices, "_kernel", lambda entry, rounds, _: kernel.load(choices._variant(entry, rounds))
    )
    monkeypatch.setattr(
        AloneDispatcher,
        "fits",
        lambda self, x_TD: x_TD.dtype == torch.bfloat16 and self.why_not_geometry is None,
    )


def error(found: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((found.double() - wanted.double()).norm() / wanted.double().norm().clamp_min(1e-30))


def run(transport: str, x: torch.Tensor, **options: object) -> dict[str, torch.Tensor]:
    gate = imbrex.Gate(capacity=Capacity(factor=0.7))
    config = imbrex.MoEConfig(
        hidden_size=16,
        intermediate_size=24,
        num_experts=5,
        top_k=3,
        gate=gate,
        shared=imbrex.SharedExperts(intermediate_size=8),
    )
    torch.manual_seed(1)
    layer = imbrex.MoELayer(config, transport=transport, dtype=torch.bfloat16, **options)  # pyright: ignore
    x = x.clone().requires_grad_()
    y = layer(x)
    y.float().square().sum().backward()
    assert layer.routing is not None
    assert bool((layer.routing.ids_TK < 0).any())
    grads = {name: p.grad for name, p in layer.named_parameters() if p.grad is not None}
    assert x.grad is not None
    return {"y": y.detach(), "x": x.grad, **grads}


@pytest.mark.parametrize("keep_rows", [True, False])
def test_a_layer_and_its_gradients(keep_rows: bool) -> None:
    """Choices dropped, shared experts added, rows kept or copied again for the backward."""
    x = torch.randn(37, 16, generator=torch.Generator().manual_seed(0)).bfloat16()
    found, again = (run("auto", x, schedule=Serial(keep_rows=keep_rows)) for _ in range(2))
    wanted = run("alltoall", x)
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        assert torch.equal(found[name], again[name]), name
        assert error(found[name], value) < LIMIT, name


def exchange_of(**options: object) -> Exchange:
    return Exchange(contiguous(4, 1), 8, 2, **options)  # pyright: ignore


def test_rows_of_a_dispatch_and_sums_of_a_combine() -> None:
    """Integers: the sums are exact. Two tokens, the second choice of the second dropped."""
    exchange = exchange_of()
    x = torch.arange(16).view(2, 8).bfloat16()
    routing = Routing(
        ids_TK=torch.tensor([[3, 0], [0, -1]]), weights_TK=torch.tensor([[2.0, 4.0], [8.0, 9.0]])
    )
    dispatched = exchange.dispatch(x, routing)
    assert len(dispatched.handle.state) == len(STATE)
    assert dispatched.counts_e.tolist() == [2, 0, 0, 1]
    assert torch.equal(dispatched.rows_RD[:3], x[[0, 1, 0]])
    assert dispatched.handle.weights_R[:3].tolist() == [4.0, 8.0, 2.0]
    y = exchange.combine(dispatched.rows_RD, dispatched.handle, addend=x)
    assert torch.equal(y, x * torch.tensor([[7.0], [9.0]]).bfloat16())
    weighted = dispatched.rows_RD * dispatched.handle.weights_R[:, None].bfloat16()
    assert torch.equal(exchange.combine(weighted, dispatched.handle, weighted=True), y - x)
    assert torch.equal(exchange.begin_combine(dispatched.rows_RD, dispatched.handle).finish(x), y)


class InPlace(Experts):
    """Kernels without a GPU, emulated; tells whether its tokens came in place."""

    came = False

    @property
    def forms(self) -> tuple[RowForm, ...]:
        return (RowForm.INDEXED, RowForm.ROWS)[torch.is_grad_enabled() :]

    def forward(self, dispatched: Dispatched) -> torch.Tensor:
        self.came = dispatched.form is RowForm.INDEXED
        return super().forward(dispatched)


def test_a_small_batch_is_one_launch_with_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows, their groups and sums, of choices of which some are dropped; one row more is no small batch."""
    config = imbrex.MoEConfig(hidden_size=64, intermediate_size=64, num_experts=5, top_k=3)
    torch.manual_seed(3)
    layer = imbrex.MoELayer(config, dtype=torch.bfloat16)
    monkeypatch.setattr(alone, "MOST_FEW", 69)
    launches: list[str] = []
    of_name = choices._kernel
    monkeypatch.setattr(
        choices, "_kernel", lambda entry, *more: launches.append(entry) or of_name(entry, *more)
    )
    with torch.no_grad():
        x = torch.randn(24, 64).bfloat16()
        kept_TK = torch.rand(24, 3) < 0.8
        few, many = layer(x[:23], kept_TK=kept_TK[:23]), layer(x, kept_TK=kept_TK)
    assert launches == ["order_few", "place_choices"]
    assert torch.equal(few, many[:23])


def test_experts_read_tokens_in_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without gradients, of a batch that is not small; with them, rows are copied."""
    monkeypatch.setattr(alone, "MOST_FEW", 0)
    config = imbrex.MoEConfig(hidden_size=64, intermediate_size=64, num_experts=5, top_k=3)
    experts = InPlace((0, 1, 2, 3, 4), 64, 64, dtype=torch.bfloat16)
    experts.applies_weights = True
    layer = imbrex.MoELayer(config, experts=experts, dtype=torch.bfloat16)
    x = torch.randn(23, 64, generator=torch.Generator().manual_seed(2)).bfloat16()
    wanted = layer(x).detach()
    assert not experts.came
    with torch.no_grad():
        assert error(layer(x), wanted) < LIMIT
    assert experts.came


def test_no_tokens() -> None:
    exchange, x = exchange_of(), torch.zeros(0, 8).bfloat16()
    routing = Routing(ids_TK=torch.zeros(0, 2, dtype=torch.int64), weights_TK=torch.zeros(0, 2))
    dispatched = exchange.dispatch(x, routing)
    assert dispatched.counts_e.tolist() == [0, 0, 0, 0]
    assert exchange.combine(dispatched.rows_RD, dispatched.handle).shape == (0, 8)


def test_what_the_kernels_do_not_serve_goes_as_before() -> None:
    routing = Routing(ids_TK=torch.tensor([[3, 0]]), weights_TK=torch.ones(1, 2))
    for exchange, dtype in (
        (exchange_of(), torch.float32),
        (exchange_of(transport="alltoall"), torch.bfloat16),
        (exchange_of(alignment=4), torch.bfloat16),
        (exchange_of(split=lambda counts, placement: split_evenly(counts, placement)), torch.bfloat16),
    ):
        dispatched = exchange.dispatch(torch.ones(1, 8, dtype=dtype), routing)
        assert len(dispatched.handle.state) == 4
        assert exchange.combine(dispatched.rows_RD, dispatched.handle).tolist() == [[2.0] * 8]


def test_a_wrong_input_is_refused() -> None:
    ids = torch.tensor([[4, 0]])
    with pytest.raises(ValueError, match="on rank 0, choice 0 of token 0 is expert 4"):
        exchange_of().dispatch(torch.ones(1, 8).bfloat16(), Routing(ids_TK=ids, weights_TK=torch.ones(1, 2)))


@pytest.mark.untraced
@pytest.mark.parametrize("dynamic", [None, True])
@pytest.mark.parametrize("training", [True, False])
def test_a_compiler_sees_sizes_that_it_knows(training: bool, dynamic: bool | None) -> None:
    """One graph without a size that only the run knows, with the bits of the calls that nobody compiled."""
    torch.compiler.reset()
    config = imbrex.MoEConfig(hidden_size=16, intermediate_size=24, num_experts=5, top_k=3)
    torch.manual_seed(1)
    layer = imbrex.MoELayer(config, dtype=torch.bfloat16)
    graphs: list[torch.fx.GraphModule] = []

    def keep(graph: torch.fx.GraphModule, _: object) -> torch.fx.GraphModule:
        graphs.append(graph)
        return graph

    compiled = torch.compile(layer, backend=aot_autograd(fw_compiler=keep), fullgraph=True, dynamic=dynamic)
    for tokens in (37, 20):
        x = torch.randn(tokens, 16, generator=torch.Generator().manual_seed(0)).bfloat16()
        found = []
        for run in (layer, compiled):
            leaf = x.clone().requires_grad_(training)
            with torch.set_grad_enabled(training):
                y = run(leaf)
            if training:
                y.float().square().sum().backward()
            found.append((y.detach(), leaf.grad))
        assert torch.equal(found[0][0], found[1][0])
        assert not training or torch.equal(found[0][1], found[1][1])
    assert graphs
    assert not any("new_dynamic" in str(g.code) or _unknown(g) for g in graphs)


def by_steps(layer: imbrex.MoELayer, x: torch.Tensor) -> torch.Tensor:
    """What a layer gives for its last routing, one step after the other, by kernels."""
    assert layer.routing is not None
    dispatched = layer.exchange.dispatch(x, layer.routing)
    weights = layer.experts.gate_up_proj, layer.experts.down_proj, dispatched.counts_e
    out_RD = ffn.ffn(dispatched.rows_RD, *weights, weights_R=dispatched.handle.weights_R)
    added = None if layer.shared_expert is None else layer._shared_output(x)
    return layer.exchange.combine(out_RD, dispatched.handle, added, weighted=True)


@pytest.mark.untraced
@pytest.mark.parametrize("tokens", [5, 37])
@pytest.mark.parametrize("shared", [False, True])
def test_a_layer_that_nobody_differentiates_is_one_operator(
    monkeypatch: pytest.MonkeyPatch, tokens: int, shared: bool
) -> None:
    """Few tokens are ordered and grouped in one launch, as outside of a graph, and groups are not planned
    again; of many, experts read tokens in place. The bits are those of the steps by the same kernels."""
    torch.compiler.reset()
    monkeypatch.setattr(alone, "MOST_FEW", 60)
    monkeypatch.setattr(Experts, "unchanged", True)
    config = imbrex.MoEConfig(
        hidden_size=64,
        intermediate_size=64,
        num_experts=5,
        top_k=3,
        shared=imbrex.SharedExperts(intermediate_size=8) if shared else None,
    )
    torch.manual_seed(1)
    layer = imbrex.MoELayer(config, dtype=torch.bfloat16)
    layer.experts.implementation, layer.experts.one_launch = "kernels", False  # that is not emulated here
    planned = []
    monkeypatch.setattr(ffn, "plan_groups", lambda counts_e: planned.append(1) or glue.plan_groups(counts_e))
    x, graphs = torch.randn(tokens, 64).bfloat16(), []

    def keep(graph: torch.fx.GraphModule, _: object) -> torch.fx.GraphModule:
        graphs.append(str(graph.code))
        return graph

    with torch.no_grad():
        y = torch.compile(layer, backend=keep, fullgraph=True)(x)
        assert not planned
        steps = by_steps(layer, x)
    assert torch.equal(y, steps)
    (graph,) = graphs
    assert graph.count("imbrex_alone_v1.layer") == 1
    assert "imbrex.dispatch" not in graph
    with torch.enable_grad():
        torch.compile(layer, backend=keep, fullgraph=True)(x)
    assert "imbrex.dispatch" in graphs[-1]


def _unknown(graph: torch.fx.GraphModule) -> bool:
    """Whether a size of a tensor is known to the run alone."""
    values = [node.meta.get("val") for node in graph.graph.nodes]
    tensors = [v for v in values if isinstance(v, torch.Tensor)]
    return any(free_unbacked_symbols(tensor) for tensor in tensors)


def test_counts_must_fit_into_a_multiprocessor(monkeypatch: pytest.MonkeyPatch) -> None:
    """18 words an expert, and one for each choice of a small batch, of 4 bytes; an L40S has 99 KB."""
    monkeypatch.setattr(choices, "why_not_portable", lambda _: None)
    room = SimpleNamespace(shared_memory_per_block_optin=99 * 1024)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: room)
    assert choices.why_not_ordered(1294, 41) is None
    assert "at most 1294 experts, not 1295" in str(choices.why_not_ordered(1295, 41))


@pytest.mark.untraced
@torch._dynamo.config.patch(allow_unspec_int_on_nn_module=True)
def test_one_graph_serves_layers_of_unlike_numbers_of_experts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their number is then one that only the run knows (docs/layer.md); a GPU's limit is a constant."""
    torch.compiler.reset()
    monkeypatch.setattr(choices, "why_not_portable", lambda _: None)
    room = SimpleNamespace(shared_memory_per_block_optin=99 * 1024)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: room)
    monkeypatch.setattr(AloneDispatcher, "why_not_dtype", lambda *_: None)
    monkeypatch.setattr(
        AloneDispatcher,
        "fits",
        lambda self, _: self.geometry.placement.num_experts <= choices.most_ordered(42),
    )
    torch.manual_seed(1)
    for experts in (4, 8):
        config = imbrex.MoEConfig(hidden_size=16, intermediate_size=24, num_experts=experts, top_k=2)
        layer = imbrex.MoELayer(config, dtype=torch.bfloat16)
        x = torch.randn(37, 16).bfloat16()
        y = layer(x)
        layer.compile(backend="aot_eager", fullgraph=True)
        assert torch.equal(layer(x), y)


@pytest.fixture
def of_kernels(monkeypatch: pytest.MonkeyPatch) -> imbrex.MoELayer:
    """A layer whose experts kernels compute, with a shared one; memory comes back as a GPU's does."""
    monkeypatch.setattr(Experts, "unchanged", True)
    again = functools.cache(lambda nbytes, device: torch.empty(nbytes, dtype=torch.uint8))
    monkeypatch.setattr(alone_recorded, "new_piece", again)
    monkeypatch.setattr(alone_recorded, "launch_all", lambda launches: [each.launch() for each in launches])
    shared = imbrex.SharedExperts(intermediate_size=8)
    config = imbrex.MoEConfig(hidden_size=64, intermediate_size=64, num_experts=5, top_k=3, shared=shared)
    torch.manual_seed(1)
    layer = imbrex.MoELayer(config, dtype=torch.bfloat16)
    layer.experts.implementation, layer.experts.one_launch = "kernels", False  # that is not emulated here
    return layer


def test_few_choices_are_launched_from_a_record(
    monkeypatch: pytest.MonkeyPatch, of_kernels: imbrex.MoELayer
) -> None:
    """Other tokens, masks, values of weights and their places: the bits of single steps."""
    layer, made = of_kernels, []
    record = alone_recorded._record
    monkeypatch.setattr(alone_recorded, "_record", lambda *call: made.append(1) or record(*call))
    with torch.no_grad():
        for tokens, records in ((5, 1), (5, 1), (7, 2), (5, 2), (7, 2)):
            x = torch.randn(64, tokens).bfloat16().t()  # as torch gives them, not as kernels take them
            assert torch.equal(layer(x), by_steps(layer, x))
            assert len(made) == records
        x, kept_TK = torch.randn(5, 64).bfloat16(), torch.rand(5, 3) < 0.6
        first = layer(x, kept_TK=kept_TK)
        assert torch.equal(layer(x, kept_TK=kept_TK), first)
        assert not torch.equal(layer(x), first)
        layer.experts.down_proj.mul_(2)
        assert torch.equal(layer(x), by_steps(layer, x))
        assert len(made) == 2
        layer.experts.down_proj.data = layer.experts.down_proj.data.clone()
        assert torch.equal(layer(x), by_steps(layer, x))
        assert len(made) == 3
        assert torch.equal(copy.deepcopy(layer)(x), layer(x))
        with pytest.raises(ValueError, match="last size 32"):
            layer(x[:, :32].contiguous())
        layer.shared_expert = None
        for x in torch.randn(2, 5, 64).bfloat16():
            assert torch.equal(layer(x), by_steps(layer, x))
        assert len(made) == 5


@pytest.mark.parametrize("learns", [False, True])
def test_views_give_what_their_values_do(of_kernels: imbrex.MoELayer, learns: bool) -> None:
    layer, x_TD, found = of_kernels, torch.randn(5, 64).bfloat16(), []
    with torch.set_grad_enabled(learns):
        routing = layer.gate(x_TD)
        for change in (torch.clone, lambda values: torch.stack([values, 2 * values], -1)[..., 0]):
            given = Routing(ids_TK=change(routing.ids_TK), weights_TK=change(routing.weights_TK))
            arguments = change(x_TD), given, layer.exchange, layer.experts
            # No record serves an addend that lies apart, and steps here are not by the experts' kernels.
            addend = functools.partial(change if learns else torch.clone, x_TD)
            found.append(Serial().run(*arguments, addend).y_TD)
    assert torch.equal(*found)


def test_calls_that_no_record_serves(monkeypatch: pytest.MonkeyPatch, of_kernels: imbrex.MoELayer) -> None:
    """With gradients, of a shared expert alone too; of many choices; none."""
    layer = of_kernels
    monkeypatch.setattr(alone_recorded, "_record", lambda *_: pytest.fail("recorded"))
    layer(torch.randn(5, 64).bfloat16())
    layer.requires_grad_(False)
    assert layer.shared_expert is not None
    layer.shared_expert.requires_grad_()
    layer(torch.randn(5, 64).bfloat16()).float().sum().backward()
    assert all(p.grad is not None for p in layer.shared_expert.parameters())
    monkeypatch.setattr(alone, "MOST_FEW", 14)
    with torch.no_grad():
        layer(torch.randn(5, 64).bfloat16())
        layer(torch.randn(0, 64).bfloat16())


def test_experts_that_learn_or_lie_apart_are_not_recorded(
    monkeypatch: pytest.MonkeyPatch, of_kernels: imbrex.MoELayer
) -> None:
    """Nothing else of the layer learns, and no shared expert is added."""
    layer, x = of_kernels, torch.randn(5, 64).bfloat16()
    layer.requires_grad_(False)
    layer.shared_expert = None
    monkeypatch.setattr(alone_recorded, "_record", lambda *_: pytest.fail("recorded"))
    for weight in (layer.experts.gate_up_proj, layer.experts.down_proj):
        layer(x.clone().requires_grad_()).float().sum().backward()
        weight.requires_grad_()
        layer(x).float().sum().backward()
        assert weight.grad is not None
        weight.requires_grad_(False)
        together, wide = weight.data, torch.stack([weight.data, weight.data], -1)
        weight.data = wide[..., 0]
        with torch.no_grad():
            layer(x)
        weight.data = together
