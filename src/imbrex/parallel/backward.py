"""Gradients that are summed over ranks while the backward still runs, as DistributedDataParallel's are.

    sync = sync_in_backward(model)             # once, on every rank
    with sync.no_sync():
        loss_of(model, first).backward()       # of several micro-batches all but the last
    loss_of(model, last).backward()            # a bucket leaves as soon as its gradients are whole
    imbrex.sync_gradients(model)               # waits for them, and sums what has not left

Data flow: a hook behind every parameter's accumulation counts what its bucket still lacks. Buckets leave in
their order and no other, so that ranks agree on it, whichever gradients come first; a bucket that a rank does
not complete, since it has not used a parameter, leaves in `sync_gradients`, with zeros. Ranks may then be in
different calls of a layer when it is summed: sums have process groups of their own. On a GPU a bucket is
copied, summed, divided and copied back on a stream of its own; on a CPU its first sum runs in gloo's threads.
The buckets are those of `sync_gradients` alone, and so are the bits.

The experts' gradients are divided by the number of ranks before they are made: the part of it that is a power
of two (all of it in the common case) divides what goes back through the experts, instead of every gradient of
every expert afterwards. That is exact but for the smallest numbers, and the sums of tokens' gradients that a
schedule in chunks makes are then rounded in another order.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from imbrex.layer import MoELayer
from imbrex.parallel.buckets import (
    Bucket,
    Moving,
    buckets_of,
    gradient_sums_of,
    moe_layers,
    num_token_ranks,
    refuse_sharded,
    refuse_unequal,
)
from imbrex.runtime.streams import Lane
from imbrex.transport.groups import group_beside

__all__ = ["sync_in_backward"]
"""The name for adapters."""


def sync_in_backward(model: nn.Module, *, dense: bool = True) -> BackwardSync:
    """Sum gradients of `model` over ranks while the backward runs, and divide the experts' on the way, from
    now on; call it between two steps. `sync_gradients(model)` is still called before gradients are clipped or
    taken, and waits for what is under way. dense: as there; what is not summed here, `sync_gradients` sums.
    Collective over the groups of the layers, each of which gets a second communicator where it is summed
    over.

    Raises ValueError where the model has no MoELayer, where FSDP shards what is summed, where ranks train
    other parameters than each other, or where this was called before and not ended by `remove()`.
    """
    layers = moe_layers(model, "sync_in_backward")
    if not layers:
        raise ValueError("sync_in_backward: the model has no MoELayer; use DistributedDataParallel")
    if syncs_of(layers):
        raise ValueError(
            "sync_in_backward: this model's gradients are summed so already; call remove() first"
        )
    refuse_sharded(model, dense=dense)
    buckets = [bucket for bucket in buckets_of(model, layers, dense=dense) if bucket.groups()]
    refuse_unequal(layers, buckets, dense=dense)
    sync = BackwardSync(layers, buckets, dense=dense)
    for layer in layers:
        layer.backward_sync = sync
        ranks = num_token_ranks(layer)
        layer.mean_over = ranks & -ranks
    return sync


def syncs_of(layers: Sequence[MoELayer]) -> list[BackwardSync]:
    """Every `BackwardSync` of these layers, each once."""
    known = (layer.backward_sync for layer in layers)
    return list({id(sync): sync for sync in known if sync is not None and sync.is_on}.values())


class BackwardSync:
    """Sums buckets in the backward, from when it is made until `remove()`; see `sync_in_backward`. Layers
    hold it, and hooks do not: torch never frees a parameter with a hook that knows it."""

    def __init__(self, layers: list[MoELayer], buckets: list[Bucket], *, dense: bool) -> None:
        self.layers, self.buckets, self.dense, self.is_on = layers, buckets, dense, True
        self._beside = _groups_beside(buckets)
        self._paused = False
        self._lanes: dict[torch.device, Lane] = {}
        self._hooks: list[Any] = []
        for number, bucket in enumerate(buckets):
            for parameter in bucket.parameters:
                hook = parameter.register_post_accumulate_grad_hook(self._hook(number))
                self._hooks.append(hook)
        self.forget()

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backwards inside only add to the gradients."""
        before, self._paused = self._paused, True
        try:
            yield
        finally:
            self._paused = before

    def forget(self) -> None:
        """Begin anew, on every rank, after a backward that raised."""
        self._came: set[int] = set()
        self._lacks = [len(bucket.parameters) for bucket in self.buckets]
        self._waits: list[Callable[[], None]] = []
        """Waits for the buckets that have left, in their order."""

    def remove(self) -> None:
        """End it, between two steps: from now on `sync_gradients` sums and divides everything."""
        for layer in self.layers:
            layer.mean_over = 1
        for hook in self._hooks:
            hook.remove()
        self._hooks, self.is_on = [], False

    @torch.no_grad()
    def finish(self, *, dense: bool) -> set[int]:
        """Sum what has not left, and wait for all; the `id`s of the parameters. `sync_gradients` calls it."""
        if self.dense and not dense:
            raise ValueError(
                "sync_gradients: dense=False, but sync_in_backward averages the other parameters too; give "
                "dense=False to both, or to none"
            )
        while len(self._waits) < len(self.buckets):
            self._leave()
        for wait in self._waits:
            wait()
        self.forget()
        return {id(parameter) for bucket in self.buckets for parameter in bucket.parameters}

    def _hook(self, number: int) -> Callable[[Tensor], None]:
        """Make the hook that torch calls when it has added to the gradient of a parameter of bucket
        `number`."""
        reference = weakref.ref(self)

        def came(parameter: Tensor) -> None:
            sync = reference()
            if sync is not None and not sync._paused:
                sync._came_to(number, parameter)

        return came

    @torch.no_grad()
    def _came_to(self, number: int, parameter: Tensor) -> None:
        if id(parameter) in self._came:
            raise RuntimeError(
                "sync_in_backward: a gradient came twice before sync_gradients(model): run all backwards of "
                "a step but the last inside `with sync.no_sync():`, and checkpoint with use_reentrant=False; "
                "behind a backward that raised, call sync.forget()"
            )
        self._came.add(id(parameter))
        self._lacks[number] -= 1
        while len(self._waits) < len(self.buckets) and self._is_whole(len(self._waits)):
            self._leave()

    def _is_whole(self, number: int) -> bool:
        # `gradient_sums` get their part without passing by here.
        bucket = self.buckets[number]
        return self._lacks[number] == 0 and not (bucket.experts and gradient_sums_of(bucket.layer))

    def _leave(self) -> None:
        """Begin the next bucket."""
        bucket = self.buckets[len(self._waits)]
        moving, device = Moving(bucket, self._beside.__getitem__), bucket.parameters[0].device
        if device.type != "cuda":
            moving.begin()
            self._waits.append(moving.wait)
            return
        lane = self._lanes.setdefault(device, Lane(device))
        self._waits.append(lane.start(moving.finish).finish)


def _groups_beside(buckets: Sequence[Bucket]) -> dict[dist.ProcessGroup, dist.ProcessGroup]:
    """A group of the same ranks for each that a bucket is summed over."""
    beside: dict[dist.ProcessGroup, dist.ProcessGroup] = {}
    for group in (group for bucket in buckets for group in bucket.groups()):
        if group not in beside:
            beside[group] = group_beside(group, dist.get_backend(group))
    return beside
