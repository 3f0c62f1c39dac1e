"""Gradients of weights apart from those of the rows: computed when there is time, not when the rows wait.

deferral = Deferral()
with deferral.record():
    out = experts(rows)                        # grouped products note that they are recorded
d_rows, = torch.autograd.grad(out, [rows], d_out)
...                                            # the rows' gradients are on their way
grads = deferral.gradients(parameters)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor

_current: ContextVar[Deferral | None] = ContextVar("imbrex_deferral", default=None)

VIEWS = ("AccumulateGrad", "TransposeBackward0", "TBackward0", "PermuteBackward0", "ToCopyBackward0")
"""Steps from a parameter to the weight that is multiplied which keep nothing: they can be gone back twice."""


class Deferral:
    """Products of one call of the experts whose weight gradients are still to be computed."""

    def __init__(self) -> None:
        self._products: list[tuple[Tensor, Callable[[], Tensor | None]]] = []

    @contextmanager
    def record(self) -> Iterator[None]:
        """Products computed inside, in this thread, leave their weight gradients to `gradients`."""
        token = _current.set(self)
        try:
            yield
        finally:
            _current.reset(token)

    def add(self, weight: Tensor, gradient: Callable[[], Tensor | None]) -> None:
        """Called in the backward: `gradient` computes that of `weight`, or adds it where it belongs."""
        self._products.append((weight, gradient))

    def gradients(self, parameters: Sequence[Tensor]) -> list[Tensor | None]:
        """Of every parameter what the recorded products contribute, or None. Once."""
        found: list[Tensor | None] = [None] * len(parameters)
        for weight, gradient in self._products:
            d_weight = gradient()
            if d_weight is None:
                continue
            grads = torch.autograd.grad(weight, parameters, d_weight, allow_unused=True)
            for place, grad in enumerate(grads):
                before = found[place]
                found[place] = grad if before is None or grad is None else before + grad
                if grad is None:
                    found[place] = before
        self._products.clear()
        return found


def recording(weight: Tensor) -> Deferral | None:
    """Who takes the gradient of a product with `weight`: nobody where it is not recorded, or where the weight
    is computed from parameters and not just a view or a copy of one."""
    current = _current.get()
    if current is None or not weight.requires_grad:
        return None
    node: Any = weight.grad_fn
    while node is not None:
        if node.name().split("::")[-1] not in VIEWS:
            return None
        node = node.next_functions[0][0] if node.next_functions else None
    return current


__all__ = ["Deferral", "recording"]
