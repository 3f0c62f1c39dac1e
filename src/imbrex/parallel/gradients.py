"""Expert parallelism beside data parallelism: whose gradients are summed over which ranks."""

from __future__ import annotations

import warnings
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from imbrex import guards
from imbrex.layer import MoELayer
from imbrex.runtime import waits


def moe_layers(model: nn.Module) -> list[MoELayer]:
    """The MoE layers of a model, in the order of its modules."""
    return [module for module in model.modules() if isinstance(module, MoELayer)]


def expert_parameters(model: nn.Module) -> Iterator[nn.Parameter]:
    """Parameters that are different experts on different ranks. Keep them out of data parallelism:
    `fully_shard(model, ignored_params=set(imbrex.expert_parameters(model)))`, or `ignore_in_ddp(model)`."""
    for layer in moe_layers(model):
        yield from layer.experts.parameters()


def ignore_in_ddp(model: nn.Module) -> None:
    """Tell DistributedDataParallel, before it wraps `model`, to leave the experts' gradients alone."""
    experts = {id(parameter) for parameter in expert_parameters(model)}
    names = [name for name, parameter in model.named_parameters() if id(parameter) in experts]
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, names)


def aux_loss(model: nn.Module) -> Tensor | float:
    """The auxiliary losses of all MoE layers at their last call, times their coefficients, summed."""
    return sum((layer.aux_loss() for layer in moe_layers(model)), 0.0)


@torch.no_grad()
def sync_gradients(model: nn.Module, *, dense: bool = True) -> None:
    """After the backward: make every gradient that of the mean of all ranks' losses.

    An expert's gradient already holds all tokens of its group. It is summed with those of its replicas and
    of the same expert in other groups, and divided by the number of ranks that hold different tokens; never
    mixed with another expert's. `dense`: average all other parameters too (not under DDP or FSDP, which do).
    Collective over the groups of the layers. Gradients are rewritten in place, and so are `gradient_sums` of
    experts, which stand for them: once a step, when the sums are whole.
    """
    layers = moe_layers(model)
    if not layers:
        warnings.warn("sync_gradients: the model has no MoELayer, so nothing is done", stacklevel=3)
        return
    _refuse_sharded(model, dense=dense)
    for layer in layers:
        layer.check()
    for layer in layers:
        guards.seen(layer)
        _sync_experts(layer)
    if dense:
        experts = {id(parameter) for parameter in expert_parameters(model)}
        shared = [p for p in model.parameters() if id(p) not in experts and p.requires_grad]
        _average(shared, layers[0])


def _refuse_sharded(model: nn.Module, *, dense: bool) -> None:
    # DTensors: importing their class would cost every import of imbrex 0.3 s.
    if any(hasattr(parameter, "full_tensor") for parameter in expert_parameters(model)):
        raise ValueError(
            "sync_gradients: FSDP shards the experts, which differ between ranks; give it "
            "fully_shard(..., ignored_params=set(imbrex.expert_parameters(model)))"
        )
    if dense and any(hasattr(parameter, "full_tensor") for parameter in model.parameters()):
        raise ValueError(
            "sync_gradients: FSDP shards and averages the other parameters; call "
            "sync_gradients(model, dense=False)"
        )


def num_token_ranks(layer: MoELayer) -> int:
    """Ranks that hold different tokens."""
    size = 1
    for group in layer.token_groups:
        size *= group.size()
    return size


def expert_gradients(layer: MoELayer) -> list[Tensor]:
    """Gradients of the local experts, zeros where none came; of weights with `gradient_sums` these, and what
    else came to them."""
    experts, gradients = layer.experts, []
    summed: dict[int, Tensor] = {}
    sums = getattr(experts, "gradient_sums", None)
    if sums is not None:
        d_gate_up, d_down = sums
        summed = {id(experts.gate_up_proj): d_gate_up, id(experts.down_proj): d_down}
    for parameter in experts.parameters():
        if not parameter.requires_grad:
            continue
        if id(parameter) in summed:
            gradients.append(summed[id(parameter)])
        elif parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        if parameter.grad is not None:
            gradients.append(parameter.grad)
    return gradients


def _sync_experts(layer: MoELayer) -> None:
    for gradient in expert_gradients(layer):
        if layer.placement.has_replicas:
            _sum_replicas(gradient, layer)
        if layer.ranks.data_group is not None:
            _all_reduce(gradient, layer.ranks.data_group)
        gradient /= num_token_ranks(layer)


def _sum_replicas(grad: Tensor, layer: MoELayer) -> None:
    """Replicas of one expert sum their gradients, tensor rank by tensor rank."""
    ranks, placement = layer.ranks, layer.placement
    assert ranks.group is not None
    replicated = [e for e in range(placement.num_experts) if placement.slots.count(e) > 1]
    place = {expert: n for n, expert in enumerate(replicated)}
    total = grad.new_zeros(ranks.tensor_size, len(replicated), *grad.shape[1:])
    ours = [(slot, place[e]) for slot, e in enumerate(layer.experts.expert_ids) if e in place]
    for slot, n in ours:
        total[ranks.tensor_rank, n] = grad[slot]
    _all_reduce(total, ranks.group)
    for slot, n in ours:
        grad[slot] = total[ranks.tensor_rank, n]


def _average(parameters: list[nn.Parameter], layer: MoELayer) -> None:
    """One all-reduce over the ranks that hold different tokens, for all parameters of a dtype together."""
    groups = [group for group in layer.token_groups if group.size() > 1]
    if not groups:
        return
    for dtype in sorted({p.dtype for p in parameters}, key=str):
        grads = []
        for parameter in parameters:
            if parameter.dtype == dtype:
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
                grads.append(parameter.grad)
        flat = torch.cat([grad.flatten() for grad in grads])
        for group in groups:
            _all_reduce(flat, group)
        flat /= num_token_ranks(layer)
        pieces = flat.split([grad.numel() for grad in grads])
        for grad, piece in zip(grads, pieces, strict=True):
            grad.copy_(piece.view_as(grad))


def _all_reduce(x: Tensor, group: dist.ProcessGroup) -> None:
    waits.run(
        "gradients",
        lambda: dist.all_reduce(x, group=group, async_op=True),
        on_host=not x.is_cuda,
        group=group,
    )
