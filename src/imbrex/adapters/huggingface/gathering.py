"""Gathers all experts of a layer from the ranks that hold them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from imbrex import MoELayer, RankLostError
from imbrex.experts import Experts
from imbrex.runtime import problems, waits

T = TypeVar("T")


class Team:
    """The ranks that together hold the layers of a model: those of their group, and of the data group.

    layers: these layers; or, before there are any, what they will be given: a group or a mesh, and a data
    group. first: whether this is the one that writes. what: the collective call they make, for errors.
    advice: the end of the error of a rank that nobody joins.
    """

    def __init__(self, layers: Sequence[Any], what: str, advice: str = "") -> None:
        first: Any = layers[0]
        groups = (first.ranks.group, first.ranks.data_group) if isinstance(first, MoELayer) else layers
        if isinstance(first, DeviceMesh):
            groups = [first.get_group(dimension) for dimension in range(first.ndim)]
        self.groups = [g for g in groups if isinstance(g, dist.ProcessGroup) and g.size() > 1]
        self.first = all(group.rank() == 0 for group in self.groups)
        self.what, self.advice = what, advice

    def meet(self) -> None:
        """Raises RankLostError where a rank does not come within the usual time-out."""
        try:
            for group in self.groups:
                here = torch.zeros(1, dtype=torch.int32, device=wire_device(group))
                call = partial(dist.all_reduce, here, group=group, async_op=True)
                waits.run(self.what, call, on_host=wire_device(group) == "cpu", group=group)
        except RankLostError as error:
            sentence = f"{error}; {self.what} is collective: call it on every rank{self.advice}"
            raise RankLostError(sentence) from error

    def agree(self, problem: BaseException | None = None) -> None:
        """Raises on every rank where one has a problem: its own there, one that quotes it elsewhere. Waits
        for as long as one may read or write."""
        sentence = problems.quote(problem)
        if sentence is not None:
            sentence = sentence[0], f"{self._here()}: {sentence[1]}"
        for group in self.groups:
            heard = problems.gather(self.what, sentence, group, problems.SLOW_S, problem)
            sentence = next((other for other in heard if other is not None), None)
        if problem is not None:
            raise problem
        if sentence is not None:
            raise sentence[0](f"{self.what}: {sentence[1]}")

    def attempt(self, call: Callable[[], T]) -> T:
        """Runs `call` on every rank; this rank's result, or on all the error of one: see `agree`."""
        result, problem = problems.attempt(call)
        self.agree(problem)
        return cast("T", result)

    def hear(self, value: T) -> dict[int, T]:
        """`value` of every rank, by its number: numbers, texts and tuples of them."""
        heard = {dist.get_rank() if self.groups else 0: value}
        for group in self.groups:
            parts = problems.gather(self.what, heard, group)
            heard = {rank: value for part in parts for rank, value in part.items()}
        return heard

    def _here(self) -> str:
        return f"on rank {dist.get_rank()}" if self.groups else "here"


def why_not_gathered(layer: MoELayer) -> str | None:
    """Why the experts of this layer cannot be put together, or `None`."""
    experts: torch.nn.Module = layer.experts
    if not isinstance(experts, Experts):
        return (
            f"experts are a {type(experts).__name__}, not imbrex's own: merge or remove what wraps them "
            "(of PEFT: merge_and_unload()) first"
        )
    if any(hasattr(parameter, "full_tensor") for parameter in experts.parameters()):
        return (
            "FSDP shards the experts, which differ between ranks: leave them out by "
            "ignored_params=set(imbrex.expert_parameters(model))"
        )
    return None


def gather_experts(layer: MoELayer, *, everywhere: bool) -> dict[str, Tensor]:
    """gate_up_proj [E, 2F, D] and down_proj [E, D, F], whole, in the experts' dtype: on the CPU of the first
    rank and nothing elsewhere, or, `everywhere`, on every rank and on the experts' device. Collective."""
    ranks = layer.ranks
    if not everywhere and ranks.data_group is not None and ranks.data_group.rank() > 0:
        return {}
    receives = everywhere or ranks.rank == 0
    config, wholes = layer.config, {}
    shapes = {
        "gate_up_proj": (2 * config.intermediate_size, config.hidden_size),
        "down_proj": (config.hidden_size, config.intermediate_size),
    }
    for name, shape in shapes.items():
        own: Tensor = getattr(layer.experts, name).detach()
        device = own.device if everywhere else "cpu"
        whole = torch.empty(config.num_experts, *shape, dtype=own.dtype, device=device) if receives else None
        placed: set[tuple[int, int]] = set()
        for rank in range(ranks.size):
            ids, piece = layer.placement.local(rank // ranks.tensor_size), rank % ranks.tensor_size
            part = own if rank == ranks.rank else None
            if ranks.group is not None:
                part = _pass(own, rank, (len(ids), *own.shape[1:]), ranks.group, everywhere=everywhere)
            if whole is not None and part is not None:
                # A replica's copy is the same as the one that came first.
                slots = [(slot, e) for slot, e in enumerate(ids) if e >= 0 and (e, piece) not in placed]
                placed |= {(e, piece) for _, e in slots}
                for slot, expert in slots:
                    _place(whole[expert], name, part[slot], piece, ranks.tensor_size)
        if whole is not None:
            wholes[name] = whole
    return wholes


def wire_device(group: dist.ProcessGroup) -> str:
    """The device whose tensors the group communicates: `cuda` with NCCL, else `cpu`."""
    return "cuda" if "nccl" in str(dist.get_backend(group)) else "cpu"


def _pass(
    own: Tensor, source: int, shape: tuple[int, ...], group: dist.ProcessGroup, *, everywhere: bool
) -> Tensor | None:
    """The part [slots, ...] of rank `source`: on every rank, or on the first and on `source`."""
    rank, device = group.rank(), wire_device(group)
    if not everywhere and (source == 0 or rank not in (0, source)):
        return own if rank == source else None
    if rank == source:
        values = own.contiguous().to(device)
    else:
        values = torch.empty(shape, dtype=own.dtype, device=device)
    if values.numel() == 0:
        return values
    raw = values.flatten().view(torch.uint8)
    if everywhere:
        call = partial(dist.broadcast, raw, group=group, group_src=source, async_op=True)
    elif rank == 0:
        call = partial(dist.irecv, raw, group=group, group_src=source)
    else:
        call = partial(dist.isend, raw, group=group, group_dst=0)
    what = "the gathering of experts"
    work = waits.start(what, call, problems.SLOW_S, group)
    waits.finish(what, work, problems.SLOW_S, on_host=device == "cpu", group=group)
    return values


def _place(whole: Tensor, name: str, part: Tensor, piece: int, pieces: int) -> None:
    """Put one expert's piece of the width into the whole expert."""
    if name == "down_proj":
        whole.chunk(pieces, 1)[piece].copy_(part)
        return
    for full, half in zip(whole.chunk(2), part.chunk(2), strict=True):
        full.chunk(pieces)[piece].copy_(half)
