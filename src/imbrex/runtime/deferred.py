"""Gradients of weights that are computed later than those of the rows, so that rows can move meanwhile.

deferral = Deferral()
with deferral.record():
    out = experts(rows)                        # grouped products note that they are recorded
d_rows, = torch.autograd.grad(out, [rows], d_out)
...                                            # the rows' gradients move
grads = deferral.gradients(parameters)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from torch import Tensor

from imbrex.runtime.gradients import gradients_to, hooks_aside

_current: ContextVar[Deferral | None] = ContextVar("imbrex_deferral", default=None)

Gradient = Callable[[Tensor | None], Tensor | None]
"""Computes a weight's gradient. It is added in place to the given tensor, or returned by itself; `None` if it
has been added elsewhere."""

VIEWS = ("AccumulateGrad", "TransposeBackward0", "TBackward0", "PermuteBackward0", "ToCopyBackward0")
"""Autograd nodes between a parameter and the weight that is multiplied which save nothing, so that the
backward may go through them twice."""


class Deferral:
    """The products of one call of the experts whose weight gradients are still to be computed. early: in
    memory that is taken in the backward, for a kernel that begins with them before it has ended."""

    def __init__(self, *, early: bool = False) -> None:
        self.early = early
        self._products: list[tuple[Tensor, Gradient]] = []

    @contextmanager
    def record(self) -> Iterator[None]:
        """A context in which the products of this thread leave their weight gradients to `gradients`."""
        token = _current.set(self)
        try:
            yield
        finally:
            _current.reset(token)

    def add(self, weight: Tensor, gradient: Gradient) -> None:
        """Note, in the backward, that `gradient` computes the gradient of `weight`."""
        self._products.append((weight, gradient))

    def take(self) -> list[tuple[Tensor, Gradient]]:
        """Return the recorded products and forget them. The caller then computes and adds their gradients
        itself."""
        products, self._products = self._products, []
        return products

    def gradients(
        self, parameters: Sequence[Tensor], sums: Sequence[Tensor | None] | None = None
    ) -> list[Tensor | None]:
        """The gradient of every parameter from the recorded products, or `None` for one without. Call it
        once.

        sums: results of earlier such calls; they are added to in place.
        """
        gradients: list[Tensor | None] = [None] * len(parameters) if sums is None else list(sums)
        for weight, gradient in self._products:
            place = next((i for i, parameter in enumerate(parameters) if parameter is weight), None)
            d_weight = gradient(None if place is None else gradients[place])
            if d_weight is None:
                continue
            if place is not None:
                gradients[place] = d_weight
                continue
            with hooks_aside(parameters):
                more = gradients_to(parameters, weight, d_weight)
            gradients = [added(total, grad) for total, grad in zip(gradients, more, strict=True)]
        self._products.clear()
        return gradients


def added(total: Tensor | None, grad: Tensor | None) -> Tensor | None:
    """The sum of both, written to `total`; the other one if one is `None`."""
    if total is None or grad is None:
        return grad if total is None else total
    return total.add_(grad)


def recording(weight: Tensor) -> Deferral | None:
    """The deferral that takes the gradient of a product with `weight`, or `None` if none records, or if the
    weight is computed from parameters and is not just a view or a copy of one."""
    current = _current.get()
    if current is None or not weight.requires_grad:
        return None
    node: Any = weight.grad_fn
    while node is not None:
        if node.name().split("::")[-1] not in VIEWS:
            return None
        node = node.next_functions[0][0] if node.next_functions else None
    return current


__all__ = ["Deferral", "Gradient", "added", "recording"]
