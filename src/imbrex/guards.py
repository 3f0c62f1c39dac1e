"""Refuses a step on gradients of a call that failed, and tells, once, of gradients that are taken the wrong
way: by an optimizer before `sync_gradients` has seen them, or by torch's own clipping, which sees other
experts on every rank; and of losses that have none.

Each rank would go its own way, silently: gates, shared experts and replicas drift apart.
"""

from __future__ import annotations

import functools
import math
import warnings
import weakref
from collections.abc import Iterable
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

from imbrex.contracts import Placement
from imbrex.ranks import Ranks

__all__ = ["PartialStateWarning"]
"""The name for adapters."""


class Watched(Protocol):
    """A layer whose gradients `sync_gradients` has to see: a `MoELayer`."""

    ranks: Ranks
    placement: Placement
    token_groups: Any

    @property
    def experts(self) -> nn.Module: ...

    def parameters(self) -> Iterable[Tensor]: ...

    def check(self) -> None: ...


class PartialStateWarning(UserWarning):
    """A state dict holds the experts of one rank only; `imbrex.parallel.checkpoint` knows, and is quiet."""


_watched: weakref.WeakSet[Any] = weakref.WeakSet()
_living: weakref.WeakSet[Any] = weakref.WeakSet()
_clipped_apart: weakref.WeakSet[Any] = weakref.WeakSet()
"""Layers whose experts differ between ranks, until torch's clipping was seen to take their gradients."""


def watch(layer: Watched) -> None:
    """Look at the first step of an optimizer that has gradients of `layer`, and at none after it."""
    if layer.ranks.size * layer.ranks.data_size > 1:
        _begin()
        _watched.add(layer)
        _living.add(layer)
    if layer.ranks.size > 1:
        _clipped_apart.add(layer)


def seen(layer: Watched) -> None:
    """`sync_gradients` was called: a loop that calls it once calls it always."""
    _watched.discard(layer)


@functools.cache
def _begin() -> None:
    """Hook into every optimizer of the process, since optimizers know no layers. If nothing is watched, a
    step costs a look at an empty set."""
    register_optimizer_step_pre_hook(_look)
    # Clipping has no hooks; this name is what it alone calls, wherever its callers have it from.
    inner = getattr(clip_grad, "_clip_grads_with_norm_", None)
    if inner is not None:

        @functools.wraps(inner)
        def outer(parameters: Any, max_norm: float, *arguments: Any, **keywords: Any) -> None:
            parameters = [parameters] if isinstance(parameters, Tensor) else list(parameters)
            # Who clips to infinity asks for the norm, to print it, and scales nothing.
            if max_norm != math.inf:
                _look_at_clipping(parameters)
            inner(parameters, max_norm, *arguments, **keywords)

        clip_grad._clip_grads_with_norm_ = outer


def _look(optimizer: Optimizer, _arguments: Any, _keywords: Any) -> None:
    _refuse_failed(optimizer)
    if torch.compiler.is_compiling() or not _watched or _stands_still(optimizer):
        return
    stepped = {id(p) for group in optimizer.param_groups for p in group["params"] if p.grad is not None}
    layers = [layer for layer in _watched if any(id(p) in stepped for p in layer.parameters())]
    for layer in layers:
        _watched.discard(layer)
    if any(_differ(layer) for layer in layers):
        warnings.warn(
            "MoELayer: this optimizer takes gradients that every rank has of its own tokens only, so routers "
            "and other weights that ranks share drift apart: call imbrex.sync_gradients(model) between "
            "backward() and step(), with dense=False under DDP or FSDP",
            stacklevel=3,
        )


def _refuse_failed(optimizer: Optimizer) -> None:
    """Raise what a layer raises whose call has failed on the device: its gradients are not of this batch.
    Layers of other optimizers may be gone for good, while this one's go on."""
    if torch.compiler.is_compiling():
        return
    for layer in list(_living):
        try:
            layer.check()
        except RuntimeError:
            ours = {id(p) for p in layer.parameters()}
            if any(id(p) in ours for group in optimizer.param_groups for p in group["params"]):
                raise


def _look_at_clipping(parameters: list[Tensor]) -> None:
    if torch.compiler.is_compiling() or not _clipped_apart:
        return
    clipped = {id(parameter) for parameter in parameters if parameter.grad is not None}
    layers = [layer for layer in _clipped_apart if any(id(p) in clipped for p in layer.experts.parameters())]
    for layer in layers:
        _clipped_apart.discard(layer)
    if layers:
        warnings.warn(
            "MoELayer: torch's clip_grad_norm_ takes the norm of this rank's experts alone, so ranks scale "
            "the gradients of weights that they share by different factors, and these drift apart: call "
            "imbrex.clip_grad_norm_(model, max_norm)",
            stacklevel=5,
        )


def look_at_losses(total: Tensor, weight: Tensor) -> None:
    """Warn of losses of a gate that trains, asked for where gradients are on, whose call had none."""
    if torch.is_grad_enabled() and weight.requires_grad and not total.requires_grad:
        warnings.warn(
            "aux_loss: the layer's last call ran without gradients, so its losses train nothing: under "
            "torch.no_grad(), or under torch.utils.checkpoint with use_reentrant=True; give "
            "use_reentrant=False",
            stacklevel=4,
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
