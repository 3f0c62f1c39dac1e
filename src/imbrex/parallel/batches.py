"""Batches for ranks whose loaders end at different steps.

    for batch in even(loader, torch.distributed.group.WORLD):
        loss_of(model, batch).backward()
        ...

Every rank of a layer takes part in every call, so a rank that leaves its loop earlier leaves the others
waiting for it. Here ranks tell each other, before every step, whether they have a batch.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator
from functools import partial
from typing import TypeVar

import torch.distributed as dist

from imbrex.exchange.agreement import raise_together
from imbrex.runtime import waits
from imbrex.runtime.words import words
from imbrex.transport.collective import Collective
from imbrex.transport.groups import hosts_of

__all__ = ["even"]
"""The name for adapters."""

Batch = TypeVar("Batch")


def even(batches: Iterable[Batch], group: dist.ProcessGroup | None) -> Iterator[Batch]:
    """The batches of this rank, as long as every rank of `group` has one; `None` is one process alone.

    Where ranks have unequal numbers of batches, the loop ends on all of them with the shortest, and every
    rank warns which rank that was. Costs one message between hosts a step. Collective: every rank must call
    it, and leave the loop at the same step.

    Raises ValueError on every rank where one rank's loader raises, with that rank's error.
    """
    if group is None or group.size() == 1:
        yield from batches
        return
    hosts, own, number = hosts_of(group), iter(batches), 0
    while True:
        batch, ended, problem = None, False, None
        try:
            batch = next(own)
        except StopIteration:
            ended = True
        except Exception as error:  # noqa: BLE001 (whatever a loader raises is every rank's to hear)
            problem = error
        if _all_have_one(hosts, ended, problem, number):
            yield batch  # pyright: ignore[reportReturnType]
            number += 1
        else:
            return


def _all_have_one(hosts: dist.ProcessGroup, ended: bool, problem: Exception | None, number: int) -> bool:
    """Whether every rank has another batch, which this rank has unless it has `ended` or has a `problem`."""
    own = words(ended, problem is not None)
    flags = own.new_empty(hosts.size() * len(own))
    tell = partial(waits.all_gather_single, flags, own, group=hosts, async_op=True)
    waits.run("the next batch", tell, on_host=True, group=hosts)
    flags_W = flags.view(-1, len(own)).tolist()
    if any(wrong for _, wrong in flags_W):
        try:
            text = None if problem is None else f"the loader raised {problem!r}"
            raise_together(Collective(hosts), "even", text)
        except ValueError as error:
            raise (problem or error) from None
    short_ranks = [str(rank) for rank, (no_more, _) in enumerate(flags_W) if no_more]
    if short_ranks and len(short_ranks) < len(flags_W):
        warnings.warn(
            f"even: rank{'s' * (len(short_ranks) > 1)} {', '.join(short_ranks)} had {number} batches and the "
            "others more, which are left out: give every rank as many, for instance by drop_last=True of the "
            "loader and a sampler that divides evenly",
            stacklevel=3,
        )
    return not short_ranks
