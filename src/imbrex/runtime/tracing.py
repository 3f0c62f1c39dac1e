"""Whether a call is traced: only then must our functions be torch operators."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad, function
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

__all__ = ["in_trace_too"]
"""The name for adapters."""

Backward = Callable[..., Any]
_PLAIN = (Tensor, torch.nn.Parameter)
FORWARD = vars(forward_ad)
"""Torch's state of derivatives that are computed along with values, as by `torch.func.jvp`: they are where
`_current_level` is 0 or more. Without gradients nothing of torch's refuses them, and moves that write into
memory drop them."""


def traced(*tensors: Tensor | None) -> bool:
    """Whether a compiler, a dispatch mode or a tensor subclass sees operators.

    Otherwise an autograd function is used, because an operator in Python costs the host 20 to 70 us a call,
    and as much in the backward: torch's dispatcher, trees of arguments, checks of aliases.
    """
    return torch.compiler.is_compiling() or seen(*tensors)


def seen(*tensors: Tensor | None) -> bool:
    """Whether a dispatch mode or a tensor subclass sees operators: `traced`, for a caller who knows that no
    compiler does."""
    if is_in_torch_dispatch_mode():
        return True
    for tensor in tensors:  # noqa: SIM110  a generator costs more than what it looks at
        if tensor is not None and type(tensor) not in _PLAIN:
            return True
    return False


class Node(torch.autograd.Function):
    """An autograd function that only runs where nothing is traced. Its `apply` leaves out what torch's does
    for functorch, three calls a tensor; under functorch it is torch's, which refuses with a sentence."""

    @classmethod
    def apply(cls, *args: Any) -> Any:
        if torch._C._are_functorch_transforms_active():
            return super().apply(*args)
        return super(function.Function, cls).apply(*args)  # pyright: ignore[reportAttributeAccessIssue]


def in_trace_too(function: Callable[..., None]) -> Callable[..., None]:
    """Mark a function that a first call uses to prepare existing objects. When a compiler traces that call,
    the function runs, and the graph uses what it has made. Its first argument is any object, the others are
    constants."""

    def run(addresses: list[int], *constants: Any) -> None:
        function(*(ctypes.cast(address, ctypes.py_object).value for address in addresses), *constants)

    # torch 2.11 hands over no objects, but every version their addresses, and makes sure that they stay.
    def call(*arguments: Any) -> None:
        run([id(owner) for owner in arguments[:1]], *arguments[1:])

    vars(run)["_dynamo_marked_constant"] = True
    return call


def asked_once(function: Callable[..., Any]) -> Callable[..., Any]:
    """Cache the result of a function that never changes in a process. For a compiler the result is a
    constant."""
    answers: dict[Any, Any] = {}

    def ask(*arguments: Any) -> Any:
        if arguments not in answers:
            answers[arguments] = function(*arguments)
        return answers[arguments]

    # What `torch.compiler.assume_constant_result` sets, which imports the compiler.
    vars(ask)["_dynamo_marked_constant"] = True
    return ask


def plain(tensor: Tensor) -> bool:
    """Whether our operators can take a tensor of this class; a DTensor is not plain. For a compiler its
    inputs are."""
    return type(tensor) in _PLAIN


def differentiated(*tensors: Tensor | None) -> bool:
    """Whether a gradient may be needed of what is computed from these tensors."""
    if torch.is_grad_enabled():
        for tensor in tensors:
            if tensor is not None and tensor.requires_grad:
                return True
    return False


def autocast_on(x: Tensor) -> bool:
    """Whether autocast is on for the device of `x`. The text of a device's type is made anew every time,
    which takes the host longer than the question. Tokens on `meta`, which nobody computes, have none."""
    return not x.is_meta and torch.is_autocast_enabled("cuda" if x.is_cuda else x.device.type)


def autocast_now(kind: str) -> Callable[[], Any]:
    """Contexts that restore the present state of autocast on devices of this kind, for what is computed again
    later."""
    enabled, dtype = torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)
    return functools.partial(torch.autocast, kind, dtype=dtype, enabled=enabled)


def once_differentiable(backward: Backward) -> Backward:
    """Make a function's backward refuse to be differentiated, as torch's decorator does. It saves the fifteen
    calls that switch recording off, if nothing records."""
    recorded = function.once_differentiable(backward)

    @functools.wraps(backward)
    def run(ctx: Any, *gradients: Any) -> Any:
        return (recorded if torch.is_grad_enabled() else backward)(ctx, *gradients)

    return run
