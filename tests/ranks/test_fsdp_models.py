"""The models of Hybrid-EP's article, scaled down, with FSDP2 around everything but the experts: losses, norms
and weights of all transports are those of all-gather, and of a model that is not sharded."""

from __future__ import annotations

from contextlib import nullcontext
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from transformers import AutoModelForCausalLM, DeepseekV3Config, Qwen3MoeConfig

import imbrex
from imbrex.adapters.huggingface import replace_blocks, restore_blocks
from imbrex.parallel.backward import sync_in_backward
from tests.ranks.pool import PRELOADED, Pool, Ranks
from tests.tiny_models import DEEPSEEK, QWEN, small

# Loaded once, before the ranks are forked, not by each of them.
PRELOADED.append("tests.tiny_models")

STEPS, MICRO = 2, 2
MODELS = {
    "deepseek-v3": small(DeepseekV3Config, **DEEPSEEK | {"n_routed_experts": 16, "num_hidden_layers": 3}),
    "qwen3-235b": small(Qwen3MoeConfig, **QWEN | {"num_experts": 16}),
}


def model_of(ranks: Ranks, name: str, transport: str, sharded: bool) -> Any:
    torch.manual_seed(0)
    model: Any = AutoModelForCausalLM.from_config(deepcopy(MODELS[name]))
    replace_blocks(model, ranks.group, transport=transport, losses=imbrex.AuxLosses(load_balance=0.01))
    if sharded:
        mesh = DeviceMesh.from_group(ranks.group, "cpu")
        experts = set(imbrex.expert_parameters(model))
        for part in (*model.model.layers, model):
            fully_shard(part, mesh=mesh, ignored_params=experts)
    return model


def trained(
    ranks: Ranks, name: str, transport: str, sharded: bool = True, in_backward: bool = False, folder: str = ""
) -> tuple[list[float], bool]:
    """The mean loss of all ranks and the norm of all gradients, of every step; whether what was saved in
    `folder` is read by transformers, bit for bit."""
    model = model_of(ranks, name, transport, sharded)
    experts = list(imbrex.expert_parameters(model))
    known = set(map(id, experts))
    rest = [parameter for parameter in model.parameters() if id(parameter) not in known]
    groups = [{"params": experts}, {"params": rest}]
    optimizer = torch.optim.AdamW(groups, lr=1e-2, fused=True)
    sync = sync_in_backward(model, dense=not sharded) if in_backward else None
    seen: list[float] = []
    for step in range(STEPS):
        mean = torch.zeros(())
        for micro in range(MICRO):
            last = micro == MICRO - 1
            if sharded:
                model.set_requires_gradient_sync(last)
            with nullcontext() if sync is None or last else sync.no_sync():
                loss = loss_of(ranks, model, step * MICRO + micro) / MICRO
                loss.backward()
            mean += loss.detach()
        imbrex.sync_gradients(model, dense=not sharded)
        norm = imbrex.clip_grad_norm_(model, 0.5)
        optimizer.step()
        optimizer.zero_grad()
        dist.all_reduce(mean, group=ranks.group)
        seen += [float(mean) / ranks.world_size, float(norm)]
    return seen, not folder or is_read(ranks, model, folder)


def loss_of(ranks: Ranks, model: Any, number: int) -> Tensor:
    """The loss of this rank's own tokens, as many as it has."""
    drawn = torch.Generator().manual_seed(100 * number + ranks.rank)
    ids = torch.randint(32, (2, 4 + ranks.rank), generator=drawn)
    return model(ids, labels=ids).loss + imbrex.aux_loss(model)


@torch.no_grad()
def is_read(ranks: Ranks, model: Any, folder: str) -> bool:
    model.save_pretrained(folder)
    with pytest.raises(ValueError, match="FSDP2 would go on with the replaced ones"):
        restore_blocks(model)
    plain = AutoModelForCausalLM.from_pretrained(folder)
    ids = torch.arange(12).view(2, 6)
    return bool((model(ids).logits - plain(ids).logits).abs().max() < 1e-5)


@pytest.mark.parametrize(("name", "world"), [("deepseek-v3", 2), ("qwen3-235b", 4)])
def test_losses_are_those_of_all_gather(pool: Pool, tmp_path: Path, name: str, world: int) -> None:
    allgather = pool.run(world, trained, name, "allgather", True, False, str(tmp_path))
    assert all(read for _, read in allgather)
    whole = pool.run(world, trained, name, "allgather", False)
    for (ours, _), (theirs, _) in zip(allgather, whole, strict=True):
        assert ours == pytest.approx(theirs, rel=1e-5)
    for transport, in_backward in (("alltoall", False), ("2dh", True)):
        for (ours, _), (theirs, _) in zip(
            pool.run(world, trained, name, transport, True, in_backward), allgather, strict=True
        ):
            assert ours == pytest.approx(theirs, rel=1e-6)
