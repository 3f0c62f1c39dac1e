"""A span around the backward of a piece of a forward."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from imbrex.contracts import Listener


def bracket_backward(
    observer: Listener, name: str, forward: Callable[[Tensor], Tensor], x: Tensor, **where: int
) -> Tensor:
    """`forward(x)`, with the span `name` from the gradient of its output to the gradient of `x`.

    Autograd runs what lies between in one go where `x` is the only path to earlier operations. Without an
    observer that listens, or where `x` needs no gradient, it is `forward(x)`.
    """
    if not (observer.enabled and x.requires_grad and torch.is_grad_enabled()):
        return forward(x)
    bracket = _Bracket(observer, name, where)
    return _AtGradient.apply(forward(_AtGradient.apply(x, bracket.close)), bracket.open)


class _Bracket:
    def __init__(self, observer: Listener, name: str, where: dict[str, int]) -> None:
        self._make = lambda: observer.span(name, **where)
        self._span: AbstractContextManager[Any] | None = None

    def open(self) -> None:
        self._span = self._make()
        self._span.__enter__()

    def close(self) -> None:
        if self._span is not None:
            self._span.__exit__(None, None, None)
            self._span = None


class _AtGradient(torch.autograd.Function):
    """The identity. `then` is called when the gradient comes."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, then: Callable[[], None]) -> Tensor:
        ctx.then = then
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx.then()
        return grad, None
