"""Tells, once, of an optimizer that takes a layer's gradients before `sync_gradients` has seen them.

Each rank would go its own way, silently: gates, shared experts and replicas drift apart.
"""

from __future__ import annotations

import functools
import warnings
import weakref
from collections.abc import Iterable
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

from imbrex.contracts import Placement
from imbrex.ranks import Ranks


class Watched(Protocol):
    """A layer whose gradients `sync_gradients` has to see: a `MoELayer`."""

    ranks: Ranks
    placement: Placement
    token_groups: Any

    def parameters(self) -> Iterable[Tensor]: ...


class PartialStateWarning(UserWarning):
    """A state dict holds the experts of one rank only; `imbrex.parallel.checkpoint` knows, and is quiet."""


_watched: weakref.WeakSet[Any] = weakref.WeakSet()


def watch(layer: Watched) -> None:
    """Look at the first step of an optimizer that has gradients of `layer`, and at none after it."""
    if layer.ranks.size * layer.ranks.data_size > 1:
        _begin()
        _watched.add(layer)


def seen(layer: Watched) -> None:
    """`sync_gradients` was called: a loop that calls it once calls it always."""
    _watched.discard(layer)


@functools.cache
def _begin() -> None:
    """For the whole process, since optimizers know no layers. Where nothing is watched it costs a look at an
    empty set a step."""
    register_optimizer_step_pre_hook(_look)


def _look(optimizer: Optimizer, _arguments: Any, _keywords: Any) -> None:
    if torch.compiler.is_compiling() or not _watched or _stands_still(optimizer):
        return
    taken = {id(p) for group in optimizer.param_groups for p in group["params"] if p.grad is not None}
    layers = [layer for layer in _watched if any(id(p) in taken for p in layer.parameters())]
    for layer in layers:
        _watched.discard(layer)
    if any(_differ(layer) for layer in layers):
        warnings.warn(
            "MoELayer: this optimizer takes gradients that every rank has of its own tokens only, so routers "
            "and other weights that ranks share drift apart: call imbrex.sync_gradients(model) between "
            "backward() and step(), with dense=False under DDP or FSDP",
            stacklevel=3,
        )


def _stands_still(optimizer: Optimizer) -> bool:
    """Whether it changes nothing: `torch.distributed.checkpoint` makes an optimizer's state by such a step,
    before a state is saved or loaded."""
    rates = [group.get("lr") for group in optimizer.param_groups]
    return all(
        not rate.is_cuda and float(rate) == 0 if isinstance(rate, Tensor) else rate == 0 for rate in rates
    )


def _differ(layer: Watched) -> bool:
    """Whether ranks hold other gradients of what they share: over `allreduce` alone they do not."""
    return layer.placement.has_replicas or any(group.size() > 1 for group in layer.token_groups)
