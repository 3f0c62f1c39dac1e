"""`torch.empty` that returns NaN, so that no test passes on memory that happened to hold zeros.

Processes started by a test are not patched by its fixtures: their entry function calls `poison_empty()` too.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

POISONED = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
SITES = ((torch, "empty"), (torch, "empty_like"), (torch, "empty_strided"), (torch.Tensor, "new_empty"))


def poison_empty() -> Callable[[], None]:
    """Patch torch; returns the function that undoes it. A second call changes nothing."""
    undo = [_patch(owner, name) for owner, name in SITES]

    def restore() -> None:
        for step in undo:
            step()

    return restore


@contextmanager
def real_empty() -> Iterator[None]:
    """The functions of torch itself, for torch.compile, which cannot trace the patched ones, nor the real
    ones if it made its table of known functions while they were patched."""
    from torch._dynamo.trace_rules import get_torch_obj_rule_map

    get_torch_obj_rule_map.cache_clear()
    patched = [(owner, name, getattr(owner, name)) for owner, name in SITES]
    for owner, name, function in patched:
        setattr(owner, name, getattr(function, "__wrapped__", function))
    try:
        yield
    finally:
        for owner, name, function in patched:
            setattr(owner, name, function)


def _patch(owner: Any, name: str) -> Callable[[], None]:
    original = getattr(owner, name)
    if hasattr(original, "__wrapped__"):
        return lambda: None

    @functools.wraps(original)
    def poisoned(*args: Any, **kwargs: Any) -> torch.Tensor:
        made = original(*args, **kwargs)
        # While a graph is being traced there is no memory yet.
        if made.dtype in POISONED and not torch.compiler.is_compiling() and made.device.type != "meta":
            with torch.no_grad():
                made.fill_(float("nan"))
        return made

    setattr(owner, name, poisoned)
    return lambda: setattr(owner, name, original)
