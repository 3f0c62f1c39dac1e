"""Whether a call is being traced: only then do operators have to be operators."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import function
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

__all__ = ["in_trace_too"]
"""The name for adapters."""

Backward = Callable[..., Any]
_PLAIN = (Tensor, torch.nn.Parameter)


def traced(*tensors: Tensor | None) -> bool:
    """Whether somebody sees operators, not numbers: a compiler, a mode, a kind of tensor of its own.

    Elsewhere a function of autograd's saves what an operator in Python costs the host on its way through
    torch's dispatcher, trees of arguments and checks of aliases: 20 to 70 us a call, and as much backward.
    """
    if torch.compiler.is_compiling() or is_in_torch_dispatch_mode():
        return True
    for tensor in tensors:  # noqa: SIM110  a generator costs more than what it looks at
        if tensor is not None and type(tensor) not in _PLAIN:
            return True
    return False


def in_trace_too(function: Callable[..., None]) -> Callable[..., None]:
    """Marks what a first call prepares on objects that are there, to run when a compiler traces that call: a
    graph has what it made as it has all else that it finds."""
    vars(function)["_dynamo_marked_constant"] = True
    return function


def asked_once(function: Callable[..., Any]) -> Callable[..., Any]:
    """Makes a function of what never changes in a process answer from memory; to a compiler its answers are
    constants."""
    answers: dict[Any, Any] = {}

    def ask(*arguments: Any) -> Any:
        if arguments not in answers:
            answers[arguments] = function(*arguments)
        return answers[arguments]

    # What `torch.compiler.assume_constant_result` sets, which imports the compiler.
    vars(ask)["_dynamo_marked_constant"] = True
    return ask


def plain(tensor: Tensor) -> bool:
    """Whether operators of ours know its kind: not a DTensor, say. To a compiler its inputs are plain."""
    return type(tensor) in _PLAIN


def differentiated(*tensors: Tensor | None) -> bool:
    """Whether a gradient may be asked of what comes of them."""
    if torch.is_grad_enabled():
        for tensor in tensors:
            if tensor is not None and tensor.requires_grad:
                return True
    return False


def autocast_now(kind: str) -> Callable[[], Any]:
    """Contexts in which autocast is as it is now on devices of this kind, for what is computed once more."""
    enabled, dtype = torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)
    return functools.partial(torch.autocast, kind, dtype=dtype, enabled=enabled)


def once_differentiable(backward: Backward) -> Backward:
    """Makes the backward of a function refuse to be differentiated, as torch's does; where nobody records a
    backward, without the fifteen calls that switch recording off."""
    recorded = function.once_differentiable(backward)

    @functools.wraps(backward)
    def run(ctx: Any, *gradients: Any) -> Any:
        return (recorded if torch.is_grad_enabled() else backward)(ctx, *gradients)

    return run
