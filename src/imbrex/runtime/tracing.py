"""Whether a call is being traced: only then do operators have to be operators."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

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


def differentiated(*tensors: Tensor | None) -> bool:
    """Whether a gradient may be asked of what comes of them."""
    if torch.is_grad_enabled():
        for tensor in tensors:
            if tensor is not None and tensor.requires_grad:
                return True
    return False
