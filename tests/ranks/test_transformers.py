"""transformers' own switch `ep_implementation="imbrex"`: each rank loads its experts, imbrex moves tokens."""

import copy
import importlib.util
import os
import warnings
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import torch._dynamo
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from transformers import AutoModelForCausalLM
from transformers.distributed.configuration_utils import DistributedConfig
from transformers.distributed.expert_parallel import EPImplementationInterface

import imbrex
from imbrex.adapters.transformers import InPlace, _begin, register
from tests.poison import real_empty
from tests.ranks.pool import PRELOADED, Pool, Ranks
from tests.tiny_models import model_of

# Loaded once, before the ranks are forked, not by each of them.
PRELOADED.append("tests.tiny_models")


def moved(ranks: Ranks, shared: bool, stock: bool, empty: bool):
    """Errors of outputs and gradients of six experts, three on each of two ranks, against all six on one.

    shared: both ranks hold the same tokens. stock: transformers computes the experts. empty: the second
    rank has no tokens, and the first wants the first rank's experts only.
    """
    mesh = init_device_mesh("cpu", (4, 2, 1), mesh_dim_names=("dp", "ep", "tp"))
    ep, rank = mesh["ep"], mesh["ep"].get_local_rank()
    whole = model_of("qwen2_moe").get_submodule("model.layers.0.mlp.experts")
    part = copy.deepcopy(whole)
    for name, parameter in whole.named_parameters():
        setattr(part, name, nn.Parameter(parameter.detach().chunk(2)[rank].clone()))
    part.num_experts, part._is_expert_parallel = 3, True
    if stock:
        part.has_bias = 0
    register()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        experts = EPImplementationInterface()["imbrex"](part, ep, ep if shared else mesh["tp"])
    assert len([w for w in caught if "has_bias is 0" in str(w.message)]) == stock
    torch.manual_seed(0 if shared else ranks.rank)
    tokens = (0 if rank else 4) if empty else 5 if shared else 4 + rank
    x, weights = torch.randn(tokens, 16).requires_grad_(), torch.rand(tokens, 2).requires_grad_()
    ids = torch.rand(tokens, 3 if empty else 6).argsort(1)[:, :2]
    inputs = [x, weights, *whole.parameters()]
    # Of no tokens transformers' own experts know no gradients.
    want = whole(x, ids, weights) + 0 * sum(value.sum() for value in inputs)
    got = experts(x, ids, weights)
    pull = torch.randn_like(want)
    theirs = [gradient.contiguous() for gradient in torch.autograd.grad(want, inputs, pull)]
    for gradient in () if shared else theirs[2:]:
        dist.all_reduce(gradient, group=ep.get_group())
    ours = torch.autograd.grad(got, [x, weights, *part.parameters()], pull)
    expected = [*theirs[:2], *(gradient.chunk(2)[rank] for gradient in theirs[2:])]
    for mine, other in zip([got, *ours], [want, *expected], strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-4, atol=1e-5)
    return tokens


@pytest.mark.parametrize("stock", [False, True], ids=["own", "stock"])
@pytest.mark.parametrize(("shared", "empty"), [(False, False), (True, False), (False, True)])
def test_outputs_and_gradients_are_those_of_all_experts_on_one_rank(pool, shared, empty, stock):
    counts = pool.run(8, moved, shared, stock, empty)
    assert counts == ([4, 0] * 4 if empty else [5] * 8 if shared else [4, 5] * 4)


def one_compiled(ranks: Ranks) -> str:
    """What each of two ranks is told that hold the same tokens and train, where one is compiled; both have
    run forward before, plain and so."""
    torch.compiler.reset()
    mesh = init_device_mesh("cpu", (2,))
    part: Any = model_of("qwen2_moe").get_submodule("model.layers.0.mlp.experts")
    for name, parameter in list(part.named_parameters()):
        setattr(part, name, nn.Parameter(parameter.detach()[:3].clone()))
    part.num_experts, part._is_expert_parallel = 3, True
    register()
    experts = EPImplementationInterface()["imbrex"](part, mesh, mesh)
    x, ids, weights = torch.ones(5, 16), torch.tensor([[1, 4]] * 5), torch.ones(5, 2)
    run = torch.compile(experts.__call__, backend="eager") if ranks.rank else experts
    with torch.no_grad():
        assert torch.equal(experts(x, ids, weights), run(x, ids, weights))
    with pytest.raises(ValueError, match=r"shares a model by tp_size, .*: compile all") as caught:
        run(x.requires_grad_(), ids, weights)
    return str(caught.value)


def test_training_where_one_of_the_ranks_that_share_a_model_is_compiled_is_refused(pool: Pool) -> None:
    assert len({*pool.run(2, one_compiled)}) == 1


@pytest.mark.parametrize("shared", [1, 2])
def test_a_rank_compiled_alone_before_the_first_call_reads_why(shared: int) -> None:
    """It makes the first exchange as it traces, and the others stand in a sum of transformers' then."""
    lost = Mock(begin=Mock(side_effect=imbrex.RankLostError("rank 1 lost its peers in plan")))
    meshes = {"ep_mesh": Mock(**{"size.return_value": 2}), "tp_mesh": Mock(**{"size.return_value": shared})}
    said = "in plan; ranks that share a model .tp_size. compile it all or none" if shared > 1 else "in plan$"
    with pytest.raises(imbrex.RankLostError, match=said):
        _begin(SimpleNamespace(**meshes, experts=nn.Module(), seat=lost), 16, 2, torch.float32)


@pytest.fixture(scope="module")
def pair() -> Iterator[Pool]:
    """A world of two: transformers lays its meshes over all ranks there are."""
    pool = Pool(2)
    yield pool
    pool.close(20)


def rebuilt(ranks: Ranks, folder: str, sizes: dict[str, Any], experts: str):
    """Logits, generated tokens and gradients of the model on one rank, and of the one that is spread."""
    os.environ |= {"RANK": str(ranks.rank), "WORLD_SIZE": "2", "LOCAL_RANK": str(ranks.rank)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "LOCAL_WORLD_SIZE": "2"}
    register(experts="grouped")
    shared = sizes["tp_size"] == 2
    whole: Any = AutoModelForCausalLM.from_pretrained(folder, experts_implementation="eager")
    config = DistributedConfig(**sizes, ep_implementation="imbrex")
    model: Any = AutoModelForCausalLM.from_pretrained(
        folder, distributed_config=config, experts_implementation=experts
    )
    torch.manual_seed(0 if shared else ranks.rank)
    ids = torch.randint(32, (2, 5 if shared else 5 + ranks.rank))
    with torch.no_grad():
        far = float((model(ids).logits - whole(ids).logits).abs().max())
    same = generates_alike(model, whole, ids, 4 if shared else 4 - ranks.rank)
    model(ids).logits.square().sum().backward()
    whole(ids).logits.square().sum().backward()
    gradients = {name: p.grad for name, p in whole.named_parameters()}
    for gradient in gradients.values():
        if not shared:
            # FSDP takes the mean of the ranks' losses.
            torch.distributed.all_reduce(gradient, group=ranks.group)
            gradient /= 2
    spared = asked_by_fsdp(model, ids)
    ours = {
        n: p.grad.full_tensor() / 2 for n, p in model.named_parameters() if hasattr(p.grad, "full_tensor")
    }
    worst = max(float((ours[n] - gradients[n]).abs().max() / gradients[n].abs().max()) for n in ours)
    held = model.get_parameter("model.layers.1.mlp.experts.down_proj").to_local().shape[0]
    return (
        far,
        same,
        worst,
        held,
        sum("experts" in name for name in ours),
        spared,
        shared and breaks(model, ids),
    )


def generates_alike(model: Any, whole: Any, ids: torch.Tensor, size: int) -> bool:
    """Also in a captured step, where ranks of other tokens want other numbers of them."""
    whole.generation_config.eos_token_id = model.generation_config.eos_token_id = None
    options = {"do_sample": False, "max_new_tokens": 4}
    answer = whole.generate(ids, **options)
    captured = imbrex.capture(model, batch=2, length=12).generate(ids, max_new_tokens=size)
    same = torch.equal(captured, answer[:, ids.shape[1] :][:, :size])
    return same and torch.equal(model.generate(ids, **options), answer)


def breaks(model: Any, ids: torch.Tensor) -> int:
    """Of a compiled forward's graph. FSDP has those of its own."""
    torch.compiler.reset()
    torch._dynamo.utils.counters.clear()
    with real_empty(), torch.no_grad():
        torch.compile(model, backend="eager")(ids, use_cache=False)
    return sum(torch._dynamo.utils.counters["graph_break"].values())


def asked_by_fsdp(model: Any, ids: torch.Tensor) -> list[bool]:
    """Whether FSDP had the sum where the operand was, by layer, in a second backward that doubles the
    gradients."""
    allocate, asked = InPlace.allocate, []

    def noted(*args: Any, **kind: Any) -> torch.Tensor:
        asked.append(allocate(*args, **kind))
        return asked[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(InPlace, "allocate", noted)
        model(ids).logits.square().sum().backward()
    return [asked[i] is asked[i + 1] for i in range(0, len(asked), 2)]


def test_what_fsdp_left_behind_is_no_sum():
    """A backward that ended between the two calls: the next operand is no old one."""
    own, kind = InPlace(), {"dtype": torch.float32, "device": torch.device("cpu")}
    left = own.allocate((4,), **kind)
    first = own.allocate((4,), **kind)
    assert first is not left
    with torch.cpu.stream(torch.cpu.Stream()):
        assert own.allocate((4,), **kind) is first
        assert own.allocate((4,), **kind) is not first


LAYOUTS = {"own tokens": {"fsdp_size": 2, "tp_size": 1, "ep_size": 2}, "same": {"tp_size": 2, "ep_size": 2}}


@pytest.mark.skipif(
    importlib.util.find_spec("accelerate") is None,
    reason="transformers spreads a model only where accelerate is installed",
)
@pytest.mark.parametrize(("family", "layout"), [("mixtral", "same"), ("deepseek_v3", "own tokens")])
def test_a_model_spread_by_transformers_says_the_same(pair, tmp_path, family, layout):
    model = model_of(family)
    model.save_pretrained(tmp_path)
    num_experts = model.get_submodule("model.layers.1.mlp.experts").num_experts
    results = pair.run(2, rebuilt, str(tmp_path), LAYOUTS[layout], "eager")
    for far, same, worst, held, compared, spared, broken in results:
        assert far < 1e-5
        assert same
        assert not broken
        assert worst < 1e-4
        assert held == num_experts // 2
        assert compared >= 2
        # transformers spreads by FSDP only what has batches of its own.
        assert spared == [True] * (len(spared) if layout == "own tokens" else 0)
        assert bool(spared) == (layout == "own tokens")
