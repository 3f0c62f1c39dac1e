"""Tensors that the routing kernel takes and gives."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from imbrex.contracts import Placement


class Addresses(NamedTuple):
    """Where the parts of a `Routed` are, as kernels are told."""

    position_LWTK: int
    weights_LWTK: int
    recv_row_LWT: int
    send_row_LTW: int
    counts_Le: int
    totals_L4: int
    tokens_LW: int


ALIGNED = 32
"""Words: parts of packed memory begin at multiples of it."""


class Sizes(NamedTuple):
    """How many local ranks L, ranks W, choices K and slots e at most the parts of a `Routed` have."""

    local_ranks: int
    ranks: int
    choices: int
    most_slots: int

    @property
    def columns(self) -> int:
        """Words of packed memory for a token of every rank."""
        return self.local_ranks * self.ranks * (2 * self.choices + 2)

    @property
    def more_rows(self) -> int:
        """Rows of so many words for what does not grow with the tokens, and for parts to be aligned."""
        few = self.local_ranks * (self.most_slots + 4 + self.ranks) + len(Addresses._fields) * ALIGNED
        return -(-few // self.columns)

    def parts(self, max_tokens: int) -> dict[str, tuple[int, tuple[int, ...]]]:
        """The first word and the shape of every part."""
        local, ranks, by_rank = self.local_ranks, self.ranks, (self.local_ranks, self.ranks, max_tokens)
        shapes = (
            (*by_rank, self.choices),
            (*by_rank, self.choices),
            by_rank,
            (local, max_tokens, ranks),
            (local, self.most_slots),
            (local, 4),
            (local, ranks),
        )
        parts, at = {}, 0
        for name, shape in zip(Addresses._fields, shapes, strict=True):
            parts[name] = at, shape
            at += -(-math.prod(shape) // ALIGNED) * ALIGNED
        return parts


class Routed:
    """Positions of every row. L is the number of ranks in this process (1, except for virtual ranks).

    position_LWTK: int32; expert-major row, on this rank, of every choice of every rank's tokens; -1: not
        here.
    weights_LWTK: float32; the gate weights of every rank's tokens.
    recv_row_LWT: int32; compact row received for a token of another rank; -1: none.
    send_row_LTW: int32; the row of an own token at every rank, -1: not sent; own column 0 where a choice is
        local.
    counts_Le: int32; rows of every local slot, padding included.
    totals_L4: int32; expert-major rows R, rows received M, 1 on overflow (then rows past the capacity are
        dropped), 0.
    tokens_LW: int32; tokens of every rank.

    words_TC: int32; the memory of all of them, where it is one piece: then tensors are made when somebody
        looks at them. Seven of them cost the host as much as a launch, and kernels want addresses only.
    """

    position_LWTK: Tensor
    weights_LWTK: Tensor
    recv_row_LWT: Tensor
    send_row_LTW: Tensor
    counts_Le: Tensor
    totals_L4: Tensor
    tokens_LW: Tensor
    words_TC: Tensor | None = None
    addresses: Addresses
    max_tokens: int
    _sizes: Sizes

    def __init__(self, *parts: Tensor, **named: Tensor) -> None:
        named |= zip(Addresses._fields, parts, strict=False)
        assert set(named) == set(Addresses._fields)
        self.__dict__.update(named)
        self.max_tokens = self.position_LWTK.shape[2]
        self.addresses = Addresses(*(part.data_ptr() for part in self))

    @classmethod
    def of_words(cls, words_TC: Tensor, sizes: Sizes) -> Routed:
        """The parts that lie in one piece of memory, as `empty_routed` makes it."""
        routed = cls.__new__(cls)
        routed.words_TC, routed._sizes = words_TC, sizes
        routed.max_tokens, offsets = _offsets(sizes, words_TC.shape[0])
        first = words_TC.data_ptr()
        routed.addresses = Addresses(*[first + at for at in offsets])
        return routed

    @property
    def num_choices(self) -> int:
        """L W T K."""
        local, ranks, choices, _ = self._sizes
        return local * ranks * self.max_tokens * choices

    def __getattr__(self, name: str) -> Tensor:
        if name not in Addresses._fields or self.words_TC is None:
            raise AttributeError(name)
        at, shape = self._sizes.parts(self.max_tokens)[name]
        part = self.words_TC.view(-1)[at : at + math.prod(shape)].view(shape)
        part = part.view(torch.float32) if name == "weights_LWTK" else part
        self.__dict__[name] = part
        return part

    def __iter__(self) -> Iterator[Tensor]:
        return (getattr(self, name) for name in Addresses._fields)

    def with_position(self, position_LWTK: Tensor) -> Routed:
        """This routing with other positions; the other parts stay what they are, made or not."""
        other = Routed.__new__(Routed)
        other.__dict__ |= self.__dict__ | {"position_LWTK": position_LWTK}
        other.addresses = self.addresses._replace(position_LWTK=position_LWTK.data_ptr())
        return other

    def without(self, served_W: Tensor, num_rows: int) -> tuple[Routed, Tensor]:
        """Where rows stand when those of other ranks than the `served_W` (bool) are left out, of one local
        rank with room for `num_rows`; and the row that each was.

        Example: rows 0 1 2 3 of ranks 0 1 0 1. Without rank 0, rows 0 1 are what was 1 3.
        """
        assert self.words_TC is not None
        left = Routed.of_words(self.words_TC.clone(), self._sizes)
        position_WTK, counts_e = self.position_LWTK[0].long(), self.counts_Le[0].long()
        stays_WTK = (position_WTK >= 0) & served_W[:, None, None]
        stays_R = torch.zeros(num_rows + 1, dtype=torch.bool, device=served_W.device)
        stays_R[torch.where(stays_WTK, position_WTK, num_rows)] = True
        stays_R[num_rows] = False
        before_R = F.pad(stays_R.cumsum(0), (1, 0))
        left.position_LWTK[0] = torch.where(stays_WTK, before_R[position_WTK.clamp(min=0)], -1).int()
        left.counts_Le[0] = before_R[F.pad(counts_e.cumsum(0), (1, 0))].diff().int()
        left.totals_L4[0, 0] = before_R[num_rows]
        return left, torch.argsort((~stays_R[:num_rows]).int(), stable=True)

    def replace(self, **parts: Tensor) -> Routed:
        """This routing with other tensors for some parts."""
        return Routed(**dict(zip(Addresses._fields, self, strict=True)) | parts)


@functools.cache
def _offsets(sizes: Sizes, rows: int) -> tuple[int, tuple[int, ...]]:
    """Most tokens of a rank in so many rows of words, and bytes from the first word to each part."""
    max_tokens = rows - sizes.more_rows
    return max_tokens, tuple(4 * at for at, _ in sizes.parts(max_tokens).values())


def empty_routed(sizes: Sizes, max_tokens: int, device: torch.device) -> Routed:
    """Room for what a routing kernel writes of at most `max_tokens` tokens a rank."""
    words_TC = torch.empty(_size(sizes, max_tokens), dtype=torch.int32, device=device)
    return Routed.of_words(words_TC, sizes)


@functools.cache
def _size(sizes: Sizes, max_tokens: int) -> tuple[int, int]:
    return max_tokens + sizes.more_rows, sizes.columns


Tables = tuple[Tensor, Tensor, Tensor]
"""A placement on the device; see `placement_tables`."""


def placement_tables(placement: Placement, device: torch.device) -> Tables:
    """first_replica [E + 1], replica_slots [S], rank_offsets [W + 1]; int32."""
    by_expert: list[list[int]] = [[] for _ in range(placement.num_experts)]
    for slot, expert in enumerate(placement.slots):
        if expert >= 0:
            by_expert[expert].append(slot)
    first = [0]
    for slots in by_expert:
        first.append(first[-1] + len(slots))
    flat = [slot for slots in by_expert for slot in slots]
    flat += [-1] * (placement.num_slots - len(flat))
    first_replica, slots, offsets = (
        torch.tensor(values, dtype=torch.int32, device=device)
        for values in (first, flat, placement.rank_offsets)
    )
    return first_replica, slots, offsets


def write_tables(tables: Tables, placement: Placement) -> None:
    """Another placement of as many experts in the same slots into `tables`, queued without waiting: a
    captured call follows."""
    for old, new in zip(tables, placement_tables(placement, torch.device("cpu")), strict=True):
        old.copy_(new.pin_memory() if old.is_cuda else new, non_blocking=True)
