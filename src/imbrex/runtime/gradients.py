"""Functions that scale gradients on their way back, and inner backwards that no hook hears of."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from typing import Any, Self

import torch
import torch.utils.checkpoint
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge, saved_tensors_hooks

__all__ = ["scale_gradient"]
"""The name for adapters."""


HOOKS = "_backward_hooks"
"""Where a tensor keeps its hooks, a dictionary that autograd reads at every gradient; torch has no open door
to it."""


# Without it a forward runs again for every part.
_Group: Any = getattr(torch.utils.checkpoint, "GraphExecGroup", nullcontext)


class _ScaledGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Tensor, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return gradients[0] * ctx.factor, None


def scale_gradient(x: Tensor, factor: float) -> Tensor:
    """Return `x`; its gradient is multiplied by `factor`."""
    scaled: Any = _ScaledGradient.apply(x, factor)
    return scaled


@contextmanager
def hooks_aside(parameters: Iterable[Tensor]) -> Iterator[None]:
    """Leave the hooks of `parameters` out of a backward inside of a backward, which finds a part of their
    gradients. They hear of the sum, once, when the outer one has it."""
    copies = [(hooks, dict(hooks)) for p in parameters if (hooks := getattr(p, HOOKS))]
    for hooks, _ in copies:
        hooks.clear()
    try:
        yield
    finally:
        for hooks, copy in copies:
            hooks.update(copy)


class _PartOfTask(_Group):
    """A context in which a backward counts as a part of the one that runs already, for activation checkpoints
    with `use_reentrant=False`: they run a forward again once for both.

    A checkpoint looks up what it has computed by the group of backwards, otherwise by the number of the task
    that autograd runs. This group is equal to that number.
    """

    def __init__(self) -> None:
        self.task, self.entered = torch._C._current_graph_task_id(), False

    def __hash__(self) -> int:
        return hash(self.task)

    def __eq__(self, other: object) -> bool:
        return self.task == other

    def __enter__(self) -> Self:
        if self.task >= 0:
            with suppress(RuntimeError):  # torch's, inside a group of the caller's, which shares already
                super().__enter__()
                self.entered = True
        return self

    def __exit__(self, *error: object) -> None:
        if self.entered:
            super().__exit__(*error)


Place = Tensor | GradientEdge
"""A place in a graph: a tensor, or without its values."""


class _Begin(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, before: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[None, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return None, None


class _Saved(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        return gradients[0]


def begin_of(x: Tensor) -> Tensor:
    """`x` where a graph of its own begins, none of whose parts holds it but those that save it: a leaf would
    be held by the graph."""
    begun: Any = _Begin.apply(x.detach(), x.new_empty(0).requires_grad_())
    return begun


def keep_values(x: Tensor) -> Tensor:
    """`x`, saved by a node of the graph, for `values_at` its place."""
    saved: Any = _Saved.apply(x) if x.requires_grad else x
    return saved


def end_of(x: Tensor) -> Place:
    """The place of `x` in its graph, for a backward that comes later and wants no values; `x` itself, if it
    has none."""
    return get_gradient_edge(x) if x.requires_grad else x


def values_at(place: Place) -> Tensor:
    """The values of a tensor, or those that `keep_values` has saved there, once."""
    node: Any = place.node if isinstance(place, GradientEdge) else None
    return place.detach() if isinstance(place, Tensor) else node.saved_tensors[0].detach()


def gradients_to(leaves: Sequence[Place], out: Place, d_out: Tensor) -> list[Tensor | None]:
    """The gradient of every leaf from that of `out`; `None` for one that is not used, or that its caller has
    frozen since the forward."""
    learns = [isinstance(leaf, GradientEdge) or leaf.requires_grad for leaf in leaves]
    trained: Any = [leaf for leaf, learning in zip(leaves, learns, strict=True) if learning]
    with _PartOfTask():
        gradients = iter(torch.autograd.grad(out, trained, d_out, allow_unused=True) if trained else ())
    return [next(gradients) if learning else None for learning in learns]


def _same(tensor: Tensor) -> Tensor:
    return tensor


def saving_here() -> saved_tensors_hooks:
    """A context in which a graph keeps what is saved for its backward, and a caller's hooks hear of none."""
    return saved_tensors_hooks(_same, _same)


def saves_elsewhere() -> bool:
    """Whether a caller's hooks keep what is saved for a backward. Activation checkpointing has such hooks,
    which run the forward again in the middle of its backward; torch has no open door to them."""
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)  # pyright: ignore[reportAttributeAccessIssue]
    return hooks is not None and hooks[0] is not _same


def looks_for_nan() -> bool:
    """Whether autograd raises where a function returns NaN, as `torch.autograd.set_detect_anomaly` asks: rows
    that nobody writes must not be there then. Not in a compiled graph: its backward is one function."""
    if torch.compiler.is_compiling():  # which cannot trace what is asked below
        return False
    return torch.is_anomaly_enabled() and torch.is_anomaly_check_nan_enabled()
