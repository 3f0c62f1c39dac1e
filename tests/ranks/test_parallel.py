"""Expert parallelism beside data parallelism: the right gradients meet, and no others."""

from __future__ import annotations

import io
import warnings
from collections.abc import Callable
from copy import deepcopy
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import imbrex
from imbrex.parallel.backward import sync_in_backward
from imbrex.placement import from_slots
from tests.ranks.layer_jobs import SEED, Case, coefficients, make_layer, run_layer, tokens_of
from tests.ranks.pool import Pool, Ranks
from tests.ranks.reference import run_reference
from tests.ranks.test_layer import SMALL, SPLIT_SLOTS, relative

MESHES = {"ep": (8,), "dp-ep": (2, 4), "ep-tp": (4, 2), "dp-ep-tp": (2, 2, 2)}


def run_synced(ranks: Ranks, case: Case, mesh_name: str | None) -> dict[str, Any]:
    """One backward and `sync_gradients`; the synced gradients of a rank."""
    place = ranks.group
    if mesh_name is not None:
        names = tuple(mesh_name.split("-"))
        place = init_device_mesh("cpu", MESHES[mesh_name], mesh_dim_names=names)
    layer = make_layer(case, place)
    x_TD = tokens_of(case, ranks.rank)
    y_TD = layer(x_TD)
    (y_TD * coefficients(y_TD)).sum().backward()
    ids = layer.routing.ids_TK if layer.routing is not None else None
    imbrex.sync_gradients(layer)
    return {
        "ids": ids,
        "experts": layer.experts.expert_ids,
        "grads": {name: p.grad for name, p in layer.named_parameters()},
        "shard": layer.experts.shard,
    }


def check_synced(case: Case, world: int, results: list[dict[str, Any]]) -> None:
    """Every rank holds the gradients of the mean of all ranks' losses."""
    truth = run_reference(case, world, replicated=False, routing=results)
    whole = make_layer(Case(config=case.config), None).experts
    for result in results:
        assert relative(result["grads"]["gate.weight"], truth["gate.weight"] / world) < 1e-5
        whole.shard = result["shard"]
        for name, grads in truth["experts"].items():
            for slot, expert in enumerate(result["experts"]):
                if expert < 0:
                    continue
                local = whole.shard_of(name, grads[expert]) / world
                assert relative(result["grads"][f"experts.{name}"][slot], local) < 1e-5, (name, expert)


@pytest.mark.parametrize("mesh_name", list(MESHES))
def test_meshes(pool: Pool, mesh_name: str) -> None:
    case = Case(config=SMALL)
    check_synced(case, 8, pool.run(8, run_synced, case, mesh_name))


def test_replicas_sum_theirs(pool: Pool) -> None:
    case = Case(config=SMALL, slots=SPLIT_SLOTS)
    check_synced(case, 4, pool.run(4, run_synced, case, None))


class Model(nn.Module):
    """A dense layer around a MoE layer."""

    def __init__(self, case: Case, group, *, recompute: bool = False) -> None:
        super().__init__()
        torch.manual_seed(SEED)
        self.before = nn.Linear(case.config.hidden_size, case.config.hidden_size)
        self.moe = make_layer(case, group)
        self.recompute = recompute

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.before(x)
        out = checkpoint(self.moe, hidden, use_reentrant=False) if self.recompute else self.moe(hidden)
        return hidden + out


def full(grad: Any) -> torch.Tensor:
    return grad.full_tensor() if hasattr(grad, "full_tensor") else grad


def run_wrapped(ranks: Ranks, case: Case, kind: str) -> dict[str, torch.Tensor]:
    """Gradients under DDP, FSDP2, activation checkpointing, or none of them."""
    model = Model(case, ranks.group, recompute=kind == "recompute")
    run: nn.Module = model
    if kind == "ddp":
        imbrex.ignore_in_ddp(model)
        run = DistributedDataParallel(model, process_group=ranks.group)
    elif kind == "fsdp":
        mesh = DeviceMesh.from_group(ranks.group, "cpu")
        fully_shard(model, mesh=mesh, ignored_params=set(imbrex.expert_parameters(model)))
    y = run(tokens_of(case, ranks.rank))
    ((y * coefficients(y)).sum() + imbrex.aux_loss(model)).backward()
    imbrex.sync_gradients(model, dense=kind in ("plain", "recompute"))
    return {name: full(p.grad).clone() for name, p in model.named_parameters()}


@pytest.mark.parametrize("kind", ["ddp", "fsdp", "recompute"])
def test_wrappers_change_no_gradient(pool: Pool, kind: str) -> None:
    case = Case(config=SMALL, tokens=(5, 2, 3, 8), losses=imbrex.AuxLosses(load_balance=0.1))
    plain = pool.run(4, run_wrapped, case, "plain")
    wrapped = pool.run(4, run_wrapped, case, kind)
    for ours, theirs in zip(wrapped, plain, strict=True):
        assert ours.keys() == theirs.keys()
        for name, grad in theirs.items():
            assert relative(ours[name], grad) < 1e-5, name


def run_wrapped_whole(ranks: Ranks, case: Case, kind: str) -> str:
    """What is said where a wrapper takes the experts for the same on every rank."""
    model = Model(case, ranks.group)
    run: nn.Module = model
    if kind == "ddp":
        run = DistributedDataParallel(model, process_group=ranks.group)
    elif kind.startswith("fsdp1"):
        ignored = list(imbrex.expert_parameters(model)) if kind.endswith("ignored") else None
        run = FullyShardedDataParallel(
            model,
            ranks.group,
            use_orig_params="flat" not in kind,
            ignored_states=ignored,
            device_id=torch.device("cpu"),
        )
    else:
        ignored = set(imbrex.expert_parameters(model)) if kind == "fsdp, averaged twice" else None
        fully_shard(model, mesh=DeviceMesh.from_group(ranks.group, "cpu"), ignored_params=ignored)
    try:
        y_TD = run(tokens_of(case, ranks.rank))
        if kind in ("fsdp", "fsdp1", "fsdp1, flat"):
            return "wrong outputs"
        y_TD.sum().backward()
        imbrex.sync_gradients(model, dense=not kind.endswith("ignored"))
    except ValueError as error:
        return str(error)
    return "nothing"


@pytest.mark.parametrize(
    ("kind", "mend"),
    [
        ("ddp", "call imbrex.ignore_in_ddp(model) before you wrap it"),
        ("fsdp", "fully_shard(..., ignored_params=set(imbrex.expert_parameters(model)))"),
        ("fsdp1", "ignored_states=list(imbrex.expert_parameters(model)))"),
        ("fsdp1, flat", "ignored_states=list(imbrex.expert_parameters(model)))"),
        ("fsdp1, ignored", "nothing"),
        ("fsdp, averaged twice", "and sync_in_backward(model, dense=False) where you call that"),
    ],
)
def test_a_wrapper_that_would_mix_experts_is_refused(pool: Pool, kind: str, mend: str) -> None:
    for said in pool.run(2, run_wrapped_whole, Case(config=SMALL), kind):
        assert said.endswith(mend)


def run_unequal(ranks: Ranks, frozen: str, sync: str) -> str:
    """What rank 0 or 1 is told where rank 1 alone has frozen something, or has another dtype."""
    model = Model(Case(config=SMALL, tokens=(5, 2, 3, 8)), ranks.group)
    model(torch.randn(3, SMALL.hidden_size)).sum().backward()
    if frozen:
        model.get_parameter(frozen).requires_grad_(ranks.rank != 1)
    elif ranks.rank == 1:
        model.bfloat16()
    try:
        if sync == "in_backward":
            sync_in_backward(model)
        else:
            imbrex.sync_gradients(model, dense=sync == "dense")
    except ValueError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("frozen", "sync", "told"),
    [
        (
            "before.weight",
            "dense",
            "sums gradients of {} with others, and ranks do of 2 to 3; give parameters the",
        ),
        ("", "dense", "with others, and ranks do of as many of other shapes, dtypes or orders; give par"),
        ("before.weight", "in_backward", "sums gradients of {} with others, and ranks do of 2 to 3"),
        ("before.weight", "experts", ""),
        ("moe.experts.down_proj", "dense", ""),
    ],
)
def test_ranks_that_train_other_parameters_are_told(pool: Pool, frozen: str, sync: str, told: str) -> None:
    """Experts that a rank has alone may be frozen there alone."""
    for number, said in zip((3, 2), pool.run(2, run_unequal, frozen, sync), strict=True):
        assert told.format(number) in said
        assert bool(told) == bool(said), said


def test_a_model_without_experts_has_nothing_to_sync() -> None:
    with pytest.warns(UserWarning, match="the model has no MoELayer, so nothing is done"):
        imbrex.sync_gradients(nn.Linear(2, 2))


def run_seeded(ranks: Ranks, mesh_name: str | None) -> dict[str, torch.Tensor]:
    """What a layer is made of where every rank has a seed of its own."""
    place = ranks.group
    if mesh_name is not None:
        place = init_device_mesh("cpu", MESHES[mesh_name], mesh_dim_names=tuple(mesh_name.split("-")))
    torch.manual_seed(SEED + ranks.rank)
    shared = imbrex.SharedExperts(intermediate_size=6, gated=True)
    layer = imbrex.MoELayer(replace(SMALL, shared=shared), place, dtype=torch.bfloat16)
    return {name: p.detach() for name, p in layer.named_parameters() if not name.startswith("experts.")}


@pytest.mark.parametrize("mesh_name", [None, "dp-ep-tp"])
def test_ranks_begin_with_the_first_one_s_gate_whatever_their_seeds(
    pool: Pool, mesh_name: str | None
) -> None:
    shared = imbrex.SharedExperts(intermediate_size=6, gated=True)
    torch.manual_seed(SEED)
    alone = imbrex.MoELayer(replace(SMALL, shared=shared), dtype=torch.bfloat16).state_dict()
    for found in pool.run(8, run_seeded, mesh_name):
        assert len(found) == 5
        assert all(torch.equal(parameter, alone[name]) for name, parameter in found.items())


def said_of(train: Callable[[], None]) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        train()
    return [str(one.message) for one in caught if "sync_gradients" in str(one.message)]


def run_unsynced(ranks: Ranks, case: Case, kind: str) -> list[str]:
    """Three steps over two layers and a head of one optimizer; what was said of gradients."""
    group = None if kind == "alone" else ranks.group
    layers = nn.ModuleList(make_layer(case, group) for _ in range(2))
    head = nn.Linear(case.config.hidden_size, 1)
    if kind == "frozen":
        layers.requires_grad_(False)
    optimizer = torch.optim.AdamW([*layers.parameters(), *head.parameters()])

    def train() -> None:
        if "resumed" in kind:
            get_optimizer_state_dict(nn.ModuleList([layers, head]), optimizer)
        for step in range(6):
            layers.train(mode=step != 2)
            x_TD = tokens_of(case, ranks.rank, replicated=kind == "replicated")
            for layer in layers:
                x_TD = x_TD + layer(x_TD)
            head(x_TD).sum().backward()
            if kind == "accumulated" and step % 2 == 0:
                continue
            if kind not in ("forgotten", "resumed, forgotten", "frozen", "alone", "replicated", "loaded"):
                imbrex.sync_gradients(layers)
            if kind == "loaded":
                layers.load_state_dict(layers.state_dict())
                continue
            optimizer.step()
            optimizer.zero_grad()

    return said_of(train)


@pytest.mark.parametrize(
    ("kind", "transport", "times"),
    [
        ("forgotten", "alltoall", 1),
        ("resumed, forgotten", "alltoall", 1),
        ("called", "alltoall", 0),
        ("resumed", "alltoall", 0),
        ("accumulated", "alltoall", 0),
        ("frozen", "alltoall", 0),
        ("loaded", "alltoall", 0),
        ("replicated", "allreduce", 0),
        ("alone", "auto", 0),
    ],
)
def test_a_step_without_synced_gradients_is_told_once(
    pool: Pool, kind: str, transport: str, times: int
) -> None:
    case = Case(config=SMALL, options={"transport": transport})
    for said in pool.run(2, run_unsynced, case, kind):
        assert len(said) == times
        assert all("call imbrex.sync_gradients(model) between backward() and step()" in one for one in said)


def test_replicated_tokens_give_every_rank_the_whole_gate_gradient(pool: Pool) -> None:
    case = Case(config=SMALL, options={"transport": "allreduce"})
    first, *others = pool.run(4, run_layer, case)
    for other in others:
        assert torch.equal(first["grads"]["gate.weight"], other["grads"]["gate.weight"])
        assert torch.equal(first["y"], other["y"])


def run_copied(ranks: Ranks, case: Case) -> tuple[bool, bool, str]:
    """Whether a copy computes what the layer does, with its own weights; what it says when experts moved."""
    layer = make_layer(case, ranks.group)
    x_TD = tokens_of(case, ranks.rank)
    y_TD = layer(x_TD)
    copied = deepcopy(layer)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.zero_()
    same, own = torch.equal(copied(x_TD), y_TD), not layer(x_TD).any()
    with pytest.raises(TypeError, match="nor can a model with a MoELayer"):
        torch.save(copied, io.BytesIO())
    layer.placement = from_slots([[3, 4, 5], [0, 1, 2]], 6)
    layer.exchange.relocate(layer.placement)
    layer(x_TD)
    try:
        copied(x_TD)
    except ValueError as error:
        return same, own, str(error)
    return same, own, "nothing"


def test_a_copy_is_over_the_same_ranks(pool: Pool) -> None:
    for same, own, said in pool.run(2, run_copied, Case(config=SMALL)):
        assert same
        assert own
        assert said.startswith(
            "MoELayer: this is a copy, and the experts of the layer that it was copied from"
        )


def test_a_group_that_does_not_divide() -> None:
    with pytest.raises(
        ValueError, match="1 ranks do not divide into tensor_parallel=2; choose a divisor of 1"
    ):
        imbrex.MoELayer(SMALL, None, tensor_parallel=2)


def run_two_layers(ranks: Ranks, case: Case) -> float:
    """Two layers over two groups, interleaved, forward and backward; against each alone."""
    layers = [make_layer(case, ranks.group) for _ in range(2)]
    x_TD = tokens_of(case, ranks.rank)
    alone = [layer(x_TD).detach() for layer in layers]
    begun = [layer.exchange.begin_dispatch(x_TD, layer.gate(x_TD)) for layer in layers]
    rows = [b.finish() for b in reversed(begun)][::-1]
    outs = [layer.experts(d) for layer, d in zip(layers, rows, strict=True)]
    back = [
        layer.exchange.begin_combine(o, d.handle, weighted=layer.experts.applies_weights)
        for layer, o, d in zip(layers, outs, rows, strict=True)
    ]
    ys = [b.finish() for b in back]
    dist.barrier(ranks.group)
    return max((y - a).abs().max().item() if y.numel() else 0.0 for y, a in zip(ys, alone, strict=True))


def test_crossings_begun_early_give_the_same_bits(pool: Pool) -> None:
    assert pool.run(4, run_two_layers, Case(config=SMALL)) == [0.0] * 4


def run_begun_gradients(ranks: Ranks, case: Case) -> float:
    layer = make_layer(case, ranks.group)
    grads = []
    for begun in (False, True):
        x_TD = tokens_of(case, ranks.rank).requires_grad_()
        layer.zero_grad()
        routing = layer.gate(x_TD)
        exchange = layer.exchange
        d = exchange.begin_dispatch(x_TD, routing).finish() if begun else exchange.dispatch(x_TD, routing)
        rows = layer.experts(d)
        weighted = layer.experts.applies_weights  # as kernels do, on a machine that has a GPU
        y = (
            exchange.begin_combine(rows, d.handle, weighted=weighted).finish(x_TD)
            if begun
            else exchange.combine(rows, d.handle, x_TD, weighted=weighted)
        )
        (y * coefficients(y)).sum().backward()
        assert x_TD.grad is not None
        grads.append((y.detach(), x_TD.grad))
    return max((a - b).abs().max().item() if a.numel() else 0.0 for a, b in zip(*grads, strict=True))


def test_gradients_of_crossings_begun_early(pool: Pool) -> None:
    assert pool.run(4, run_begun_gradients, Case(config=SMALL)) == [0.0] * 4
