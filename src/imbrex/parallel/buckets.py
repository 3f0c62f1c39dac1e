"""Buckets of gradients: what `sync_gradients` moves, in pieces that every rank sums in one order.

A bucket is the gradient of one weight of a layer's experts, or of another parameter of `BUCKET_BYTES` or
more, which are summed where they lie; or those of other parameters of one dtype, up to so many bytes. Buckets
are in the order in which a backward is likely to have them, the last parameters first. They are the same
whether they leave after the backward or in it, and so are the bits of their sums: a ring adds in an order
that depends on the place in what it sums.
"""

from __future__ import annotations

import weakref
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from imbrex.experts import Experts
from imbrex.layer import MoELayer
from imbrex.runtime import waits

BUCKET_BYTES = 25 << 20
"""DistributedDataParallel's: below it start-up weighs, above it the last bucket leaves late."""

Sum = tuple[Tensor, dist.ProcessGroup]
"""A tensor to be summed over a group, in place, before the next step."""
_agreed: weakref.WeakKeyDictionary[MoELayer, tuple[int, ...]] = weakref.WeakKeyDictionary()
"""`id`s of the parameters that all ranks were last seen to sum, by the first layer of a model."""
Beside = Callable[[dist.ProcessGroup], dist.ProcessGroup]
"""The group of the same ranks in which to sum."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Bucket:
    """Parameters whose gradients are summed together. layer: that of the one weight of experts, or the first
    of the model; experts: which of the two."""

    parameters: tuple[nn.Parameter, ...]
    layer: MoELayer
    experts: bool

    def sums(self) -> Iterator[Sum]:
        """The steps that make the gradients those of all ranks' mean loss."""
        return _of_experts(self.parameters[0], self.layer) if self.experts else self._of_shared()

    def groups(self) -> list[dist.ProcessGroup]:
        """The groups over which it is summed, now or once a balancer has made replicas."""
        return groups_of_experts(self.layer) if self.experts else _groups(self.layer)

    def _of_shared(self) -> Iterator[Sum]:
        groups = _groups(self.layer)
        if not groups:
            return
        gradients = [_gradient(parameter) for parameter in self.parameters]
        if len(gradients) == 1 and gradients[0].is_contiguous():
            flat = gradients[0]
        else:
            flat = torch.cat([gradient.flatten() for gradient in gradients])
        for group in groups:
            yield flat, group
        flat /= num_token_ranks(self.layer)
        if flat is gradients[0]:
            return
        pieces = flat.split([gradient.numel() for gradient in gradients])
        for gradient, piece in zip(gradients, pieces, strict=True):
            gradient.copy_(piece.view_as(gradient))


def groups_of_experts(layer: MoELayer) -> list[dist.ProcessGroup]:
    """The groups over which gradients of a layer's experts are summed, now or with replicas."""
    ranks, placement = layer.ranks, layer.placement
    spare = len(placement.slots) > placement.num_experts
    some = [ranks.group if spare else None, ranks.data_group]
    return [group for group in some if group is not None and group.size() > 1]


def moe_layers(model: nn.Module, what: str) -> list[MoELayer]:
    """The MoE layers of a model, in the order of its modules. what: the function that is called, for the
    ValueError where this is no module."""
    if not isinstance(model, nn.Module):
        raise ValueError(
            f"{what}: {type(model).__name__} is no model; give the module whose MoELayers hold the "
            "experts, not its parameters: which ranks hold the others, parameters do not say"
        )
    return [module for module in model.modules() if isinstance(module, MoELayer)]


def refuse_sharded(model: nn.Module, *, dense: bool) -> None:
    """Raise ValueError where FSDP shards what is summed here."""
    experts = [p for layer in moe_layers(model, "sync_gradients") for p in layer.experts.parameters()]
    # DTensors: importing their class would cost every import of imbrex 0.3 s.
    if any(hasattr(parameter, "full_tensor") for parameter in experts):
        raise ValueError(
            "sync_gradients: FSDP shards the experts, which differ between ranks; give it "
            "fully_shard(..., ignored_params=set(imbrex.expert_parameters(model)))"
        )
    if dense and any(hasattr(parameter, "full_tensor") for parameter in model.parameters()):
        raise ValueError(
            "sync_gradients: FSDP shards and averages the other parameters; call "
            "sync_gradients(model, dense=False), and sync_in_backward(model, dense=False) where you call that"
        )


def buckets_of(model: nn.Module, layers: list[MoELayer], *, dense: bool) -> list[Bucket]:
    """The buckets of a model in the order in which they leave. dense: those of other parameters, too."""
    homes = {id(p): layer for layer in layers for p in layer.experts.parameters()}
    buckets: list[Bucket] = []
    open_ones: dict[Any, list[nn.Parameter]] = {}

    def close(parameters: list[nn.Parameter]) -> None:
        buckets.append(Bucket(parameters=tuple(parameters), layer=layers[0], experts=False))

    for parameter in reversed(list(model.parameters())):
        if not parameter.requires_grad:
            continue
        layer = homes.get(id(parameter))
        if layer is not None:
            buckets.append(Bucket(parameters=(parameter,), layer=layer, experts=True))
        elif dense and parameter.nbytes >= BUCKET_BYTES:
            close([parameter])
        elif dense:
            kind = parameter.dtype, parameter.device
            pending = open_ones.setdefault(kind, [])
            pending.append(parameter)
            if sum(p.nbytes for p in pending) >= BUCKET_BYTES:
                close(open_ones.pop(kind))
    for pending in open_ones.values():
        close(pending)
    return buckets


def refuse_unequal(layers: list[MoELayer], buckets: list[Bucket], *, dense: bool) -> None:
    """Raise ValueError, on all ranks, where some would sum other parameters than others do: sums would be
    mixed, or wait for each other. Over NCCL, where it would hold up the host, only where this rank's are not
    those of its last call. Experts that nobody else has may be frozen by one rank alone.

    layers, buckets: of the model, and what is summed of it. dense: whether parameters that all ranks share
    are."""
    shared = [group for layer in layers for group in _groups(layer) if dense]
    groups = dict.fromkeys([*shared, *(group for layer in layers for group in groups_of_experts(layer))])
    buckets = [bucket for bucket in buckets if bucket.groups()]
    ours = tuple(id(parameter) for bucket in buckets for parameter in bucket.parameters)
    on_host = all("nccl" not in str(dist.get_backend(group)) for group in groups)
    if not groups or (not on_host and _agreed.get(layers[0]) == ours):
        return
    kinds = [
        (bucket.experts, p.dtype, tuple(p.shape[bucket.experts :]))
        for bucket in buckets
        for p in bucket.parameters
    ]
    summary = len(kinds), zlib.crc32(repr(kinds).encode())
    device = torch.device("cpu") if on_host else next(layers[0].parameters()).device
    extremes = torch.tensor([*summary, *(-n for n in summary)], dtype=torch.int64, device=device)
    for group in groups:
        begin = partial(dist.all_reduce, extremes, dist.ReduceOp.MAX, group=group, async_op=True)
        waits.run("gradients", begin, on_host=on_host, group=group)
    # host sync: with NCCL, where parameters are others than before
    count, checksum, fewest, least = extremes.tolist()
    if (count, checksum) != (-fewest, -least):
        theirs = f"{-fewest} to {count}" if count != -fewest else "as many of other shapes, dtypes or orders"
        raise ValueError(
            "sync_gradients: ranks do not train the same parameters: this one sums gradients of "
            f"{summary[0]} with others, and ranks do of {theirs}; give parameters the same dtype and "
            "requires_grad on all ranks"
        )
    _agreed[layers[0]] = ours


class Moving:
    """A bucket on its way. beside: groups to sum in, where not in the layers' own."""

    def __init__(self, bucket: Bucket, beside: Beside | None = None) -> None:
        self._sums, self._beside = bucket.sums(), beside
        self._work: tuple[dist.Work | None, Sum] | None = None

    def begin(self) -> None:
        """Begin the next sum, if there is one."""
        step = next(self._sums, None)
        if step is None:
            self._work = None
            return
        tensor, group = step[0], step[1] if self._beside is None else self._beside(step[1])
        work = waits.start(
            "gradients",
            lambda: dist.all_reduce(tensor, group=group, async_op=True),
            waits.timeout_seconds(),
            group,
        )
        self._work = work, (tensor, group)

    def wait(self) -> None:
        """Wait for the sum that was begun, on a GPU with the current stream, and make the others."""
        while self._work is not None:
            work, (tensor, group) = self._work
            waits.finish("gradients", work, waits.timeout_seconds(), on_host=not tensor.is_cuda, group=group)
            self.begin()

    @torch.no_grad()
    def finish(self) -> None:
        """Make all sums, and wait for them."""
        self.begin()
        self.wait()


def num_token_ranks(layer: MoELayer) -> int:
    """Ranks that hold different tokens."""
    size = 1
    for group in layer.token_groups:
        size *= group.size()
    return size


def gradient_sums_of(layer: MoELayer) -> tuple[Tensor, Tensor] | None:
    """The tensors that take the gradients of gate_up_proj and down_proj in their place, if there are any."""
    return layer.experts.gradient_sums if isinstance(layer.experts, Experts) else None


def gradients_of_expert(parameter: nn.Parameter, layer: MoELayer) -> list[Tensor]:
    """The gradient of a weight of the local experts, zeros where none came; of weights with `gradient_sums`
    these, and what else came to them."""
    experts, gradients = layer.experts, []
    sums = gradient_sums_of(layer)
    if sums is not None:
        by_weight = zip((experts.gate_up_proj, experts.down_proj), sums, strict=True)
        gradients = [total for weight, total in by_weight if weight is parameter]
    if not gradients or parameter.grad is not None:
        gradients.append(_gradient(parameter))
    return gradients


def _of_experts(parameter: nn.Parameter, layer: MoELayer) -> Iterator[Sum]:
    ranks = layer.ranks
    for gradient in gradients_of_expert(parameter, layer):
        if layer.placement.has_replicas:
            yield from _of_replicas(gradient, layer)
        if ranks.data_group is not None and ranks.data_group.size() > 1:
            yield gradient, ranks.data_group
        left = num_token_ranks(layer) / layer.mean_over
        if left != 1:
            gradient /= left


def _of_replicas(grad: Tensor, layer: MoELayer) -> Iterator[Sum]:
    """Replicas of one expert sum their gradients, tensor rank by tensor rank."""
    ranks, placement = layer.ranks, layer.placement
    assert ranks.group is not None
    replicated = [e for e in range(placement.num_experts) if placement.slots.count(e) > 1]
    place = {expert: n for n, expert in enumerate(replicated)}
    total = grad.new_zeros(ranks.tensor_size, len(replicated), *grad.shape[1:])
    ours = [(slot, place[e]) for slot, e in enumerate(layer.experts.expert_ids) if e in place]
    for slot, n in ours:
        total[ranks.tensor_rank, n] = grad[slot]
    yield total, ranks.group
    for slot, n in ours:
        grad[slot] = total[ranks.tensor_rank, n]


def _gradient(parameter: nn.Parameter) -> Tensor:
    if parameter.grad is None:
        parameter.grad = torch.zeros_like(parameter)
    return parameter.grad


def _groups(layer: MoELayer) -> list[dist.ProcessGroup]:
    return [group for group in layer.token_groups if group.size() > 1]
