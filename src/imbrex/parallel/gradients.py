"""Expert parallelism beside data parallelism: whose gradients are summed over which ranks."""

from __future__ import annotations

import warnings
from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from imbrex import guards
from imbrex.layer import MoELayer
from imbrex.parallel.backward import syncs_of
from imbrex.parallel.buckets import (
    Moving,
    buckets_of,
    gradients_of_expert,
    moe_layers,
    refuse_sharded,
    refuse_unequal,
)


def expert_parameters(model: nn.Module) -> Iterator[nn.Parameter]:
    """Parameters that are different experts on different ranks. Keep them out of data parallelism:
    `fully_shard(model, ignored_params=set(imbrex.expert_parameters(model)))`, or `ignore_in_ddp(model)`."""
    for layer in moe_layers(model, "expert_parameters"):
        yield from layer.experts.parameters()


def ignore_in_ddp(model: nn.Module) -> None:
    """Tell DistributedDataParallel, before it wraps `model`, to leave the experts' gradients alone. They are
    for `sync_gradients(model, dense=False)`, after each backward."""
    experts = {id(parameter) for parameter in expert_parameters(model)}
    names = [name for name, parameter in model.named_parameters() if id(parameter) in experts]
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, names)


def aux_loss(model: nn.Module) -> Tensor | float:
    """The auxiliary losses of all MoE layers at their last call, times their coefficients, summed."""
    return sum((layer.aux_loss() for layer in moe_layers(model, "aux_loss")), 0.0)


@torch.no_grad()
def sync_gradients(model: nn.Module, *, dense: bool = True) -> None:
    """Make every gradient that of the mean of all ranks' losses. Call it after the backward, on every rank.

    An expert's gradient already holds all tokens of its group. It is summed with those of its replicas and
    of the same expert in other groups, and divided by the number of ranks that hold different tokens; never
    mixed with another expert's. `dense`: average all other parameters too (not under DDP or FSDP, which do).
    Collective over the groups of the layers. Gradients are rewritten in place, and so are `gradient_sums` of
    experts, which stand for them: once a step, when the sums are whole. What
    `imbrex.parallel.backward.sync_in_backward` has begun is waited for, and only the rest is summed here.

    Raises ValueError where FSDP shards what is to be summed here, and on every rank where ranks train other
    parameters than each other; what `MoELayer.check` raises where a call of a layer has failed.
    """
    layers = moe_layers(model, "sync_gradients")
    if not layers:
        warnings.warn("sync_gradients: the model has no MoELayer, so nothing is done", stacklevel=3)
        return
    refuse_sharded(model, dense=dense)
    for layer in layers:
        layer.check()
        guards.seen(layer)
    done: set[int] = set()
    for begun in syncs_of(layers):
        done |= begun.finish(dense=dense)
    buckets = buckets_of(model, layers, dense=dense)
    left = [bucket for bucket in buckets if done.isdisjoint(map(id, bucket.parameters))]
    refuse_unequal(layers, left, dense=dense)
    for bucket in left:
        Moving(bucket).finish()


def expert_gradients(layer: MoELayer) -> list[Tensor]:
    """Gradients of the local experts, zeros where none came; of weights with `gradient_sums` these, and what
    else came to them."""
    trained = (parameter for parameter in layer.experts.parameters() if parameter.requires_grad)
    return [gradient for parameter in trained for gradient in gradients_of_expert(parameter, layer)]
