"""Batches for ranks that have unequal numbers of them.

    for batch in even(loader, torch.distributed.group.WORLD):   # a training ends with the shortest loader
        loss_of(model, batch).backward()
        ...
    with in_step(model):                                        # inference goes on until all have ended
        for batch in requests:
            model(batch)

Every rank of a layer takes part in every call, so a rank that leaves its loop earlier leaves the others
waiting for it. Here ranks tell each other, before every step, whether they have a batch.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from types import NoneType
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from imbrex.exchange.agreement import DTYPES, raise_together
from imbrex.layer import MoELayer
from imbrex.parallel.buckets import moe_layers
from imbrex.runtime import waits
from imbrex.runtime.checks import expect
from imbrex.runtime.words import words
from imbrex.transport.collective import Collective
from imbrex.transport.groups import hosts_of

__all__ = ["even", "in_step"]
"""The names for adapters."""

Batch = TypeVar("Batch")
WRAPPERS = {"DistributedDataParallel", "FullyShardedDataParallel", "FSDPModule"}
"""Classes of torch, by name since their import takes 0.3 s, of which a module communicates in its calls."""
NO_CALL, PLAIN_CALL = 0, 1
"""Words that ranks tell each other before a call. Greater numbers are of calls under autocast."""


def even(batches: Iterable[Batch], group: dist.ProcessGroup | None) -> Iterator[Batch]:
    """The batches of this rank, as long as every rank of `group` has one; `None` is one process alone.

    Where ranks have unequal numbers of batches, the loop ends on all of them with the shortest, and every
    rank warns which rank that was. Costs one message between hosts a step. Collective: every rank must call
    it, and leave the loop at the same step.

    Where one rank's loader raises, that rank gets its own error and every other one a ValueError that names
    the rank and the error.
    """
    kinds = (dist.ProcessGroup, NoneType)
    expect("even: group", group, kinds, "give a process group, as torch.distributed.group.WORLD")
    if group is None or group.size() == 1:
        yield from batches
        return
    hosts, own, number = hosts_of(group), None, 0
    while True:
        batch, ended, problem = None, False, None
        try:
            own = iter(batches) if own is None else own
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
    flags_W = _tell(hosts, words(ended, problem is not None)).tolist()
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


@contextmanager
def in_step(model: nn.Module) -> Iterator[None]:
    """A context in which every rank calls `model` for inference as often as it likes, or never: evaluation of
    unequal numbers of batches, or continuous batching of other requests on every rank.

    Before a call ranks tell each other, by one message between hosts. A rank that has left its batches behind
    goes on in the layers alone, without tokens, until all ranks have: so leaving the context waits for all.
    Autocast around a call is that of its layers on all ranks. Collective: every rank enters it. Calls must be
    seen by Python, so they are no replays of CUDA graphs.

    Raises ValueError where the model has no MoELayer, where its ranks must have the same tokens, where it
    communicates outside of its layers, and in a call of a model that is training: its backward would not be
    shared.
    """
    layers = moe_layers(model, "in_step")
    if not layers or any(layer.exchange.transport.replicated for layer in layers):
        raise ValueError(
            "in_step: the model has no MoELayer, or one by transport 'allreduce', whose ranks have the same "
            "tokens; call the model on every rank"
        )
    ranks = layers[0].ranks
    groups = [hosts_of(g) for g in (ranks.group, ranks.data_group) if g is not None and g.size() > 1]
    if groups:
        _refuse_wrapped(model)

    def call(module: nn.Module, *_: object) -> None:
        if module.training:
            raise ValueError("in_step: this model is training; call model.eval(), or see batches.even")
        _next_call(groups, _call_now(layers[0]))

    hook, lost = model.register_forward_pre_hook(call), False
    try:
        yield
    except waits.RankLostError:
        lost = True
        raise
    finally:
        hook.remove()
        if not lost:
            _help(groups, layers)


def _refuse_wrapped(model: nn.Module) -> None:
    """Raise ValueError where a call of the model communicates by itself: helpers call its layers alone."""
    kinds = {base.__name__ for module in model.modules() for base in type(module).__mro__}
    if kinds & WRAPPERS:
        raise ValueError(
            "in_step: DistributedDataParallel or FSDP wraps the model, and communicates in every call of it; "
            "give and call the module inside of DistributedDataParallel, or with FSDP call the model equally "
            "often on every rank, without tokens where there are none"
        )


@torch.no_grad()
def _help(groups: Sequence[dist.ProcessGroup], layers: Sequence[MoELayer]) -> None:
    """Take part, without tokens, in the calls of others, until there are none."""
    while groups and (call := _next_call(groups, NO_CALL)) != NO_CALL:
        dtype = None if call == PLAIN_CALL else DTYPES[call - PLAIN_CALL - 1]
        for layer in layers:
            weight = next(layer.experts.parameters())
            with torch.autocast(weight.device.type, dtype, enabled=dtype is not None):
                layer(weight.new_zeros(0, layer.config.hidden_size))


def _call_now(layer: MoELayer) -> int:
    """This rank's word of a call: whether it is under autocast, and of which dtype."""
    kind = layer.gate.weight.device.type
    if not torch.is_autocast_enabled(kind):
        return PLAIN_CALL
    return PLAIN_CALL + 1 + DTYPES.index(torch.get_autocast_dtype(kind))


def _next_call(groups: Sequence[dist.ProcessGroup], mine: int) -> int:
    """The call that this rank or another one makes of the model now."""
    for group in groups:
        mine = int(_tell(group, words(mine)).max())
    return mine


def _tell(hosts: dist.ProcessGroup, own: Tensor) -> Tensor:
    """The numbers of every rank, [W, n], on the host."""
    numbers = own.new_empty(hosts.size() * len(own))
    tell = partial(waits.all_gather_single, numbers, own, group=hosts, async_op=True)
    waits.run("the next batch", tell, on_host=True, group=hosts)
    return numbers.view(hosts.size(), -1)
