"""A layer in one process: names, parameters, reasons, and what it needs no ranks for."""

from __future__ import annotations

import copy
import gc
import io
import pickle
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch._dynamo
from torch import Tensor
from torch.nn.modules.module import (
    register_module_full_backward_hook,
    register_module_full_backward_pre_hook,
)
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import imbrex
from imbrex import AuxLosses, contracts
from imbrex.codec.int8 import Int8
from imbrex.contracts import Dispatched, Output, Routing, RowExchange, RowForm
from imbrex.exchange import autograd
from imbrex.experts import experts, products, weights_of_kernels
from imbrex.experts.experts import Experts, Shard
from imbrex.kernels import why_not_portable
from imbrex.observe import Recorder
from imbrex.overlap import Serial
from imbrex.placement import contiguous
from imbrex.runtime.waits import timeout_seconds
from imbrex.testing import dense
from imbrex.transport import pick


def make(**options) -> imbrex.MoELayer:
    config = {"hidden_size": 8, "intermediate_size": 12, "num_experts": 4, "top_k": 2}
    shape = {
        k: options.pop(k) for k in list(options) if k in {*config, "shared", "gate", "activation", "bias"}
    }
    return imbrex.MoELayer(imbrex.MoEConfig(**{**config, **shape}), **options)


def test_parameters_are_named_and_shaped_as_in_hugging_face() -> None:
    layer = make(shared=imbrex.SharedExperts(intermediate_size=6, gated=True))
    assert {name: tuple(p.shape) for name, p in layer.named_parameters()} == {
        "gate.weight": (4, 8),
        "experts.gate_up_proj": (4, 24, 8),
        "experts.down_proj": (4, 8, 12),
        "shared_expert.gate_proj.weight": (6, 8),
        "shared_expert.up_proj.weight": (6, 8),
        "shared_expert.down_proj.weight": (8, 6),
        "shared_expert_gate.weight": (1, 8),
    }


@pytest.mark.parametrize("gated", [False, True])
def test_shared_experts_are_added(gated: bool) -> None:
    layer = make(shared=imbrex.SharedExperts(intermediate_size=6, gated=gated))
    x = torch.randn(2, 5, 8)
    flat = x.reshape(-1, 8)
    y = layer(x)
    assert layer.routing is not None
    assert layer.shared_expert is not None
    shared = layer.shared_expert(flat)
    if layer.shared_expert_gate is not None:
        shared = torch.sigmoid(layer.shared_expert_gate(flat)) * shared
    truth = dense(flat, layer.routing, layer.experts) + shared
    assert (y.reshape(-1, 8) - truth).abs().max().item() < 1e-6


class SharedFirst(Serial):
    """Computes the shared experts before the dispatch."""

    def run(
        self,
        x_TD: Tensor,
        routing: Routing,
        exchange: RowExchange,
        experts: contracts.Experts,
        addend: Callable[[], Tensor] | None,
    ) -> Output:
        assert addend is not None
        added_TD = addend()
        return super().run(x_TD, routing, exchange, experts, lambda: added_TD)


def test_gradients_do_not_tell_when_the_shared_experts_were_computed() -> None:
    """Three projections read the tokens. In bfloat16 their gradients, added one by one to that of the routed
    experts, would round otherwise where they come behind it."""
    shared = imbrex.SharedExperts(intermediate_size=6, gated=True)
    layer = make(shared=shared, dtype=torch.bfloat16)
    x_TD, found = torch.randn(64, 8).bfloat16(), []
    for strategy in (Serial(), SharedFirst()):
        layer.strategy, leaf = strategy, x_TD.clone().requires_grad_()
        layer(leaf).float().square().sum().backward()
        found.append(leaf.grad)
    assert torch.equal(*found)


def test_shards_of_a_seed_make_the_whole() -> None:
    whole = Experts((0, 1, 2), 6, 8, bias=True, seed=7)
    halves = [Experts((1, 2), 6, 8, bias=True, seed=7, shard=Shard(rank=r, size=2)) for r in range(2)]
    down = torch.cat([h.down_proj for h in halves], 2)
    assert torch.equal(down, whole.down_proj[1:])
    gate = torch.cat([h.gate_up_proj[:, :4] for h in halves], 1)
    assert torch.equal(gate, whole.gate_up_proj[1:, :8])
    assert torch.equal(Experts((2, 0), 6, 8, seed=7).down_proj[0], whole.down_proj[2])
    assert not torch.equal(Experts((0,), 6, 8, seed=8).down_proj[0], whole.down_proj[0])


def test_a_spare_slot_holds_zeros() -> None:
    assert Experts((0, -1), 4, 4).gate_up_proj[1].abs().max().item() == 0.0


@pytest.mark.parametrize(
    ("ranks", "top_k", "name", "reason"),
    [
        (1, 2, "alltoall", "one rank: nothing to move"),
        (4, 8, "allgather", "a token wants 90% of the ranks at top-8 on 4"),
        (4, 2, "alltoall", "a token wants only 44% of the ranks at top-2 on 4"),
    ],
)
def test_auto_says_why(ranks: int, top_k: int, name: str, reason: str) -> None:
    assert pick("auto", num_ranks=ranks, top_k=top_k) == (name, reason)


def test_the_layer_says_what_was_chosen() -> None:
    reasons = make().reasons
    assert reasons["transport"] == "alltoall: one rank: nothing to move"
    assert reasons["experts"].startswith("grouped: " if why_not_portable() else "kernels: ")
    assert "transport=alltoall" in repr(make())
    fused = make(schedule="fused").reasons["schedule"]
    assert "runs serially: one rank has nothing to bring" in fused


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"num_experts": True, "top_k": 1}, "MoEConfig: num_experts is True; give a whole number"),
        ({"hidden_size": 8.5}, "MoEConfig: hidden_size is 8.5; give a whole number"),
        ({"gate": "sigmoid"}, r"MoEConfig: gate is 'sigmoid'; give an object, as in Gate\(score='sigmoid'\)"),
        ({"losses": 0.01}, r"MoELayer: losses is 0.01; give AuxLosses\(load_balance=...\)"),
        ({"placement": [0, 1, 2, 3]}, "MoELayer: placement is .*; make one with imbrex.placement"),
        ({"group": "world"}, r"MoELayer: group is 'world'; give a process group, as torch.distributed"),
        (
            {"group": torch.distributed.GroupMember.NON_GROUP_MEMBER},
            "MoELayer: this rank is not in the group",
        ),
        (
            {"placement": contiguous(5, 1)},
            "MoELayer: placement is of 5 experts, the config of 4; make another",
        ),
        ({"data_group": 2}, "MoELayer: data_group is 2; give a process group"),
        ({"observer": Recorder}, r"MoELayer: observer is <class .*; give an object, as Recorder"),
        ({"layer": "first"}, "MoELayer: layer is 'first'; give its number"),
        ({"dtype": "bfloat16"}, "MoELayer: dtype is 'bfloat16'; give one of torch's, as torch.bfloat16"),
        ({"dtype": torch.complex64}, "MoELayer: dtype is torch.complex64; give one of torch.float32, "),
        ({"codec": Int8}, r"codec: Int8 is a class; give an object, Int8\(...\)"),
        ({"codec": 8}, "codec: 8 has no name, nbytes, encode, decode; give a name, or an object that keeps"),
        ({"transport": object()}, "transport: a object has no name, replicated, device, exchange_counts"),
        (
            {"schedule": 4},
            "schedule: 4 has no name, reason, run; give a name, or .* imbrex.contracts.Strategy",
        ),
        ({"experts": torch.nn.Linear(8, 8)}, "experts: a Linear has no applies_weights, forms; give a name"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_what_is_no_piece_is_refused_with_what_to_give(options, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        make(**options)


def test_a_layer_without_values_is_refused_until_it_has_some() -> None:
    shared = imbrex.SharedExperts(intermediate_size=6, gated=True)
    layer = make(shared=shared, device="meta")
    with pytest.raises(
        ValueError,
        match=r"MoELayer: gate\.weight is on the meta device .* call layer\.to_empty\(device=\.\.\.\), t",
    ):
        layer(torch.randn(3, 8))
    layer.to_empty(device="cpu")
    torch.manual_seed(5)
    layer.reset_parameters()
    made = make(shared=shared)
    torch.manual_seed(5)
    made.reset_parameters()
    assert {name: p.shape for name, p in made.named_parameters()} == {
        name: p.shape for name, p in layer.named_parameters()
    }
    for ours, theirs in zip(layer.parameters(), made.parameters(), strict=True):
        assert torch.equal(ours, theirs)
        assert 0 < ours.abs().max().item() <= 8**-0.5 + 6**-0.5
    assert layer(torch.randn(3, 8)).isfinite().all()


def test_copies_and_averages_of_a_layer_have_weights_of_their_own() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), make(shared=imbrex.SharedExperts(intermediate_size=6)))
    x = torch.randn(5, 8)
    y = model(x)
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.5))
    assert torch.equal(average(x), y)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1.0)
    assert torch.equal(copy.deepcopy(average)(x), y)
    for _ in range(2):  # the first copies
        average.update_parameters(model)
    assert torch.equal(average(x), model(x))
    copied = copy.deepcopy(model)
    copied(x).sum().backward()
    assert all(p.grad is not None for p in copied.parameters())
    assert all(p.grad is None for p in model.parameters())


def test_a_batch_of_sequences_has_the_mean_of_their_losses() -> None:
    layer = make(losses=imbrex.AuxLosses(sequence_balance=1.0))
    x, losses = torch.randn(2, 4, layer.config.hidden_size), []
    for given in (x[0], x[1], x, x.flatten(0, 1)):
        layer(given)
        losses.append(torch.as_tensor(imbrex.aux_loss(layer)).item())
    assert losses[2] == pytest.approx((losses[0] + losses[1]) / 2)
    assert losses[3] != pytest.approx(losses[2]), "tokens without sequences are of one"


@pytest.mark.filterwarnings("ignore:For backward hooks to be called")  # torch's own, of a gate's result
def test_only_experts_that_nobody_reads_give_away_their_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is written over: a hook, of the result or of its gradient, reads it. Nor are they left out of a call
    that hooks want to hear of."""
    layer, given = make(intermediate_size=16), []
    monkeypatch.setattr(experts, "give_gradient", given.append)
    monkeypatch.setattr(layer.experts, "applies_weights", True)
    monkeypatch.setattr(layer.experts, "implementation", "kernels")
    layer(torch.randn(5, layer.config.hidden_size))
    assert len(given) == 1
    for hooked in (
        layer.experts.register_forward_hook,
        layer.experts.register_full_backward_hook,
        layer.experts.register_full_backward_pre_hook,
        register_module_full_backward_hook,
        register_module_full_backward_pre_hook,
    ):
        hook = hooked(lambda *_: None)
        assert weights_of_kernels(layer.experts) is None
        layer(torch.randn(5, layer.config.hidden_size))
        hook.remove()
    assert len(given) == 1
    assert weights_of_kernels(layer.experts) is not None


def test_saving_a_layer_itself_is_refused_with_what_to_save() -> None:
    layer = make()
    for save in (pickle.dumps, lambda whole: torch.save(whole, io.BytesIO())):
        with pytest.raises(TypeError, match=r"nor can a model with a MoELayer, .*save model\.state_dict\(\)"):
            save(torch.nn.Sequential(layer))
    torch.save(layer.state_dict(), io.BytesIO())
    assert copy.copy(layer).experts is layer.experts


def test_a_width_is_no_config() -> None:
    with pytest.raises(ValueError, match=r"MoELayer: config is 16; give MoEConfig\(hidden_size=...\)"):
        imbrex.MoELayer(16)  # pyright: ignore[reportArgumentType]


def test_a_state_of_other_ranks_says_what_to_use() -> None:
    half = imbrex.MoELayer(imbrex.MoEConfig(hidden_size=4, intermediate_size=4, num_experts=2, top_k=1))
    whole = imbrex.MoELayer(imbrex.MoEConfig(hidden_size=4, intermediate_size=4, num_experts=4, top_k=1))
    with pytest.raises(RuntimeError, match=r"of 2 experts, and 4 live on this rank: save with imbrex\.par"):
        whole.load_state_dict(half.state_dict())


def test_ranks_that_forgot_to_make_a_group_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "4")
    with pytest.warns(
        UserWarning, match=r"holds all experts .* call torch.distributed.init_process_group\(\)"
    ):
        make(group=torch.distributed.group.WORLD)


def test_autocast_decides_the_dtype() -> None:
    layer = make()
    with torch.autocast("cpu", torch.bfloat16):
        assert layer(torch.randn(3, 8)).dtype == torch.bfloat16


def test_an_exchange_that_is_gone_says_so() -> None:
    exchange = imbrex.Exchange(contiguous(2, 1), 4, 1)
    x = torch.randn(2, 4, requires_grad=True)
    routing = imbrex.Routing(ids_TK=torch.tensor([[0], [1]]), weights_TK=torch.ones(2, 1))
    dispatched = exchange.dispatch(x, routing)
    exchange.close()
    with pytest.raises(RuntimeError, match=r"closed, or deleted while a result of it is .* make a new one"):
        exchange.combine(dispatched.rows_RD, dispatched.handle)


def test_deleted_layers_leave_nothing_behind() -> None:
    gc.collect()
    before = len(autograd._live)
    layer = make()
    layer(torch.randn(2, 8))
    assert len(autograd._live) > before
    del layer
    gc.collect()
    assert len(autograd._live) == before


def test_the_time_out_comes_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    assert timeout_seconds(3) == 3.0
    monkeypatch.setenv("IMBREX_TIMEOUT_S", "5")
    assert timeout_seconds() == 5.0
    for wrong in ("soon", "inf", "nan", "-1", "0", "1e7"):
        monkeypatch.setenv("IMBREX_TIMEOUT_S", wrong)
        with pytest.raises(ValueError, match=f"'{wrong}' is not a number of seconds above 0"):
            timeout_seconds()


@pytest.mark.parametrize("op", ["dispatch", "combine", "check_in"])
def test_operators_obey_torchs_rules(op: str) -> None:
    exchange = imbrex.Exchange(contiguous(3, 1), 4, 2)
    x = torch.randn(5, 4, requires_grad=True)
    ids = torch.tensor([[0, 1], [2, -1], [1, 0], [-1, -1], [2, 1]])
    weights = torch.rand(5, 2, requires_grad=True)
    key = exchange.dispatcher.family[-1].key
    inputs = (x, weights, ids, key, False)
    if op == "combine":
        rows, weights_R, _, state = autograd.dispatch_op(*inputs)
        rows, weights_R = (t.detach().requires_grad_() for t in (rows, weights_R))
        inputs = (rows, weights_R, None, state, 5, key, False, False)
    if op == "check_in":
        inputs = (x.detach(), key, "")
    torch.library.opcheck(
        getattr(autograd, f"{op}_op"), inputs, test_utils=("test_schema", "test_faketensor")
    )
    if op == "dispatch":
        outputs = autograd.dispatch_op(*inputs)
        (outputs[0].sum() + outputs[1].sum()).backward()
        assert x.grad is not None
        assert x.grad[:, 0].tolist() == [2.0, 1.0, 2.0, 0.0, 2.0]


class Seen(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.add(func._schema.name)
        return func(*args, **(kwargs or {}))


def test_operators_are_for_those_who_trace() -> None:
    """Elsewhere the same gradients come without torch's dispatcher, and can be asked for only once."""
    ours = {"imbrex::dispatch", "imbrex::combine", "imbrex::dispatch_backward", "imbrex::combine_backward"}
    found, layer, x = [], make(), torch.randn(5, 8)
    for mode in (Seen(), profile(activities=[ProfilerActivity.CPU])):
        mine = x.clone().requires_grad_()
        layer.zero_grad()
        with mode:
            layer(mine).square().sum().backward()
        found.append([mine.grad, *(p.grad for p in layer.parameters())])
        names = mode.names if isinstance(mode, Seen) else {event.name for event in mode.events() or ()}
        assert names & ours == (ours if isinstance(mode, Seen) else set())
    for traced, eager in zip(*found, strict=True):
        assert torch.equal(traced, eager)
    mine = x.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(layer(mine).square().sum(), mine, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        gradient.sum().backward()


def test_grouped_products_by_hand() -> None:
    """Groups of 2, 0 and 1 rows: [[1], [2]] * 10 and [[3]] * 30."""
    rows = torch.tensor([[1.0], [2.0], [3.0], [99.0]], requires_grad=True)
    weight = torch.tensor([[[10.0]], [[20.0]], [[30.0]]], requires_grad=True)
    out = products.grouped_mm(rows, weight, torch.tensor([2, 0, 1]))
    assert out[:3].flatten().tolist() == [10.0, 20.0, 90.0]
    (out[:3] * torch.tensor([[1.0], [1.0], [2.0]])).sum().backward()
    assert weight.grad is not None
    assert rows.grad is not None
    assert weight.grad.flatten().tolist() == [3.0, 0.0, 6.0]
    assert rows.grad[:3].flatten().tolist() == [10.0, 10.0, 60.0]


@pytest.mark.parametrize(
    "call",
    [
        imbrex.sync_gradients,
        imbrex.aux_loss,
        lambda p: list(imbrex.expert_parameters(p)),
        imbrex.ignore_in_ddp,
    ],
)
def test_parameters_are_no_model(call: Any) -> None:
    with pytest.raises(ValueError, match="generator is no model; give the module whose MoELayers hold"):
        call(torch.nn.Linear(2, 2).parameters())


@pytest.mark.parametrize("width", [0, -3, 2.5, "4", True])
def test_sizes_of_shared_experts(width: Any) -> None:
    with pytest.raises(
        ValueError, match=r"SharedExperts: intermediate_size is .*; (give a whole|it must be)"
    ):
        imbrex.SharedExperts(intermediate_size=width)


def test_a_checkpoint_inside_of_a_graph_gives_the_same() -> None:
    """A layer keeps its routing, with losses: a side effect that torch is to be told of."""
    layer, x_TD, answers = make(losses=AuxLosses(load_balance=0.1)), torch.randn(5, 8), []
    whole = partial(checkpoint, layer, x_TD.requires_grad_(), use_reentrant=False)
    with torch._dynamo.config.patch(skip_fwd_side_effects_in_bwd_under_checkpoint=True):
        for run in (partial(layer, x_TD), torch.compile(whole, backend="eager", fullgraph=True)):
            y_TD: Any = run()
            loss = y_TD.square().sum() + imbrex.aux_loss(layer)
            answers.append([y_TD, *torch.autograd.grad(loss, [x_TD, *layer.parameters()])])
    assert [torch.equal(a, b) for a, b in zip(*answers, strict=True)] == [True] * 5


def test_losses_of_a_call_without_gradients_are_told() -> None:
    """torch's older way to checkpoint runs the forward without gradients, and hands on its result alone."""
    layer, x = make(losses=imbrex.AuxLosses(z=0.1)), torch.randn(3, 8, requires_grad=True)
    checkpoint(layer, x, use_reentrant=True)
    with pytest.warns(UserWarning, match="its losses train nothing: .*; give use_reentrant=False"):
        imbrex.aux_loss(layer)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with torch.no_grad():
            imbrex.aux_loss(layer)
        imbrex.aux_loss(layer.eval())
        checkpoint(layer.train(), x, use_reentrant=False)
        imbrex.aux_loss(layer)
        checkpoint(make(), x, use_reentrant=True)
        layer.gate.requires_grad_(False)
        checkpoint(layer, x, use_reentrant=True)
        imbrex.aux_loss(layer)


class Wide(torch.nn.Module):
    """Experts that give rows of another dtype than they get."""

    applies_weights, forms = False, (RowForm.ROWS,)

    def forward(self, dispatched: Dispatched) -> Tensor:
        return dispatched.rows_RD.double()


@pytest.mark.parametrize("schedule", ["serial", "optsche-2"])
def test_outputs_have_the_dtype_of_tokens_whatever_own_experts_give(schedule: str) -> None:
    layer, x = make(experts=Wide(), schedule=schedule), torch.randn(3, 8, requires_grad=True)
    y = layer(x)
    y.sum().backward()
    assert y.dtype == torch.float32
    torch.testing.assert_close(y, x)  # two weights of a token sum to 1


class Pair(torch.nn.Module):
    """Experts that give more than rows."""

    applies_weights, forms = False, (RowForm.ROWS,)

    def forward(self, dispatched: Dispatched) -> tuple[Tensor, None]:
        return dispatched.rows_RD, None


def test_what_is_no_tensor_routing_or_handle() -> None:
    layer, x = make(), torch.randn(3, 8)
    layer(x)
    exchange, routing = layer.exchange, layer.routing
    calls: list[tuple[Callable[..., Any], tuple[Any, ...], str]] = [
        (exchange.dispatch, (x, (1, 2)), "dispatch: x is a Tensor, its routing a tuple; give tokens"),
        (
            exchange.begin_dispatch,
            (None, routing),
            "dispatch: x is a NoneType, its routing a Routing; give",
        ),
        (exchange.combine, (x, None), "combine: rows are a Tensor, their handle a NoneType; give one tensor"),
        (make(experts=Pair()), (x,), "combine: rows are a tuple, their handle a Handle; give one tensor"),
    ]
    for call, arguments, said in calls:
        with pytest.raises(TypeError, match=said):
            call(*arguments)
