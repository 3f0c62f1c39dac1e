"""Values of all ranks, and what went wrong on one of them, within imbrex's waits. Torch's own way to gather
objects leaves those that wait for a lost rank to the half hour of its group, and names nobody."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from imbrex.runtime import waits

__all__ = ["SLOW_S", "attempt", "gather", "quote"]
"""The names for adapters."""

T = TypeVar("T")
SLOW_S = 1800.0
"""How long ranks wait for one that reads or writes files; a disk is slower than a peer."""


def attempt(call: Callable[[], T]) -> tuple[T, None] | tuple[None, BaseException]:
    """Runs `call`; its result, or what it raises, whatever that is: a rank that left without a word would
    leave the others waiting."""
    try:
        return call(), None
    except BaseException as error:  # noqa: BLE001 (told to every rank, then raised)
        return None, error


def quote(
    problem: BaseException | None, kinds: tuple[type[Exception], ...] = (OSError, ValueError)
) -> tuple[type[Exception], str] | None:
    """The kind and the words of a problem for other ranks: one of `kinds`, else RuntimeError, since others
    need more than words to be made."""
    if problem is None:
        return None
    kind = next((kind for kind in kinds if isinstance(problem, kind)), None)
    return (kind, str(problem)) if kind else (RuntimeError, f"{type(problem).__name__}: {problem}")


def gather(
    what: str,
    value: T,
    group: dist.ProcessGroup,
    timeout_s: float | None = None,
    own: BaseException | None = None,
) -> list[T]:
    """`value` of every rank of a group, pickled. Collective. own: this rank's problem, which the caller
    raises, and which is the cause of a RankLostError. A rank that was interrupted waits for no longer than
    usual to tell the others, and for nobody who is lost."""
    interrupted = None if isinstance(own, Exception) else own
    if timeout_s is None or interrupted is not None:
        timeout_s = waits.timeout_seconds()
    try:
        return _gather(what, value, group, timeout_s)
    except waits.RankLostError as error:
        if interrupted is not None:
            raise interrupted from None
        raise error from own or error.__cause__


def _gather(what: str, value: T, group: dist.ProcessGroup, timeout_s: float) -> list[T]:
    device = "cuda" if "nccl" in str(dist.get_backend(group)) else "cpu"

    def run(call: Callable[..., Any], *tensors: torch.Tensor) -> None:
        work = waits.start(what, partial(call, *tensors, group=group, async_op=True), timeout_s, group)
        waits.finish(what, work, timeout_s, on_host=device == "cpu", group=group)

    own = torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8).to(device)
    sizes_W = torch.empty(group.size(), dtype=torch.int64, device=device)
    size = torch.tensor([len(own)], dtype=torch.int64, device=device)
    run(waits.all_gather_single, sizes_W, size)
    # host sync: a few, as a model is made, read or written
    sizes = sizes_W.tolist()
    waits.refuse_lost(group)
    longest = max(sizes)
    rows = torch.empty(len(sizes) * longest, dtype=torch.uint8, device=device)
    run(waits.all_gather_single, rows, torch.nn.functional.pad(own, (0, longest - len(own))))
    # host sync: as above
    rows_W = rows.cpu().view(len(sizes), longest)
    waits.refuse_lost(group)
    return [pickle.loads(bytes(row[:size].tolist())) for row, size in zip(rows_W, sizes, strict=True)]
