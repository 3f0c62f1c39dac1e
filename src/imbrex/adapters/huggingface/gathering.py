"""Gathers all experts of a layer from the ranks that hold them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
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


@dataclass(kw_only=True, slots=True)
class _Room:
    """Memory for one of the experts' tensors, had before its first part crosses. own: this rank's part where
    it crosses; part: another's as it comes, of the most slots; whole: of all experts."""

    own: Tensor
    part: Tensor | None
    whole: Tensor | None


def gather_experts(layer: MoELayer, team: Team, *, everywhere: bool) -> dict[str, Tensor]:
    """gate_up_proj [E, 2F, D] and down_proj [E, D, F], whole, in the experts' dtype: on the CPU of the first
    rank and nothing elsewhere, or, `everywhere`, on every rank and on the experts' device. Collective over
    the team, of which one rank's error is raised on all."""
    data_group = layer.ranks.data_group
    if not everywhere and data_group is not None and data_group.rank() > 0:
        names = ()
    else:
        names = "gate_up_proj", "down_proj"
    rooms = team.attempt(lambda: {name: _make_room(layer, name, everywhere=everywhere) for name in names})

    def fill() -> None:
        problem = None
        for name, room in rooms.items():
            for source in range(layer.ranks.size):
                # The others wait for the parts of this rank, whatever it does with theirs.
                _, wrong = problems.attempt(partial(_take, layer, name, room, source, everywhere=everywhere))
                if isinstance(wrong, RankLostError):
                    raise wrong
                problem = problem or wrong
        if problem is not None:
            raise problem

    team.attempt(fill)
    return {name: room.whole for name, room in rooms.items() if room.whole is not None}


def _make_room(layer: MoELayer, name: str, *, everywhere: bool) -> _Room:
    config, ranks = layer.config, layer.ranks
    width, hidden = config.intermediate_size, config.hidden_size
    shape = (hidden, width) if name == "down_proj" else (2 * width, hidden)
    own: Tensor = getattr(layer.experts, name).detach()
    whole = part = None
    if everywhere or ranks.rank == 0:
        device = own.device if everywhere else "cpu"
        whole = torch.empty(config.num_experts, *shape, dtype=own.dtype, device=device)
    if ranks.group is None:
        return _Room(own=own, part=None, whole=whole)
    wire = wire_device(ranks.group)
    if whole is not None:
        slots = max(len(layer.placement.local(rank)) for rank in range(ranks.size // ranks.tensor_size))
        part = torch.empty(slots, *own.shape[1:], dtype=own.dtype, device=wire)
    crosses = everywhere or ranks.rank > 0
    return _Room(own=own.contiguous().to(wire) if crosses else own, part=part, whole=whole)


def _take(layer: MoELayer, name: str, room: _Room, source: int, *, everywhere: bool) -> None:
    """Give the part of rank `source` to all who gather, and put it where it belongs."""
    ranks = layer.ranks
    ids, piece = layer.placement.local(source // ranks.tensor_size), source % ranks.tensor_size
    values = room.own
    if source != ranks.rank:
        if room.part is None:
            return
        values = room.part[: len(ids)]
    if ranks.group is not None and len(ids) > 0 and (everywhere or source > 0):
        _pass(values, source, ranks.group, everywhere=everywhere)
    if room.whole is None:
        return
    # A replica's copy is the same as the one that came first.
    earlier = {e for rank in range(source // ranks.tensor_size) for e in layer.placement.local(rank)}
    for slot, expert in enumerate(ids):
        if expert >= 0 and expert not in earlier:
            _place(room.whole[expert], name, values[slot], piece, ranks.tensor_size)


def wire_device(group: dist.ProcessGroup) -> str:
    """The device whose tensors the group communicates: `cuda` with NCCL, else `cpu`."""
    return "cuda" if "nccl" in str(dist.get_backend(group)) else "cpu"


def _pass(values: Tensor, source: int, group: dist.ProcessGroup, *, everywhere: bool) -> None:
    """The values of rank `source`, to every rank or to the first."""
    raw = values.flatten().view(torch.uint8)
    if everywhere:
        call = partial(dist.broadcast, raw, group=group, group_src=source, async_op=True)
    elif group.rank() == 0:
        call = partial(dist.irecv, raw, group=group, group_src=source)
    else:
        call = partial(dist.isend, raw, group=group, group_dst=0)
    what = "the gathering of experts"
    work = waits.start(what, call, problems.SLOW_S, group)
    waits.finish(what, work, problems.SLOW_S, on_host=not values.is_cuda, group=group)


def _place(whole: Tensor, name: str, part: Tensor, piece: int, pieces: int) -> None:
    """Put one expert's piece of the width into the whole expert."""
    if name == "down_proj":
        whole.chunk(pieces, 1)[piece].copy_(part)
        return
    for full, half in zip(whole.chunk(2), part.chunk(2), strict=True):
        full.chunk(pieces)[piece].copy_(half)
