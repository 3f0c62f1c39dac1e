"""Rows out to the ranks that want them, once each, and sums of rows back home: what both buffers are made of.

Rows are received by source rank, then token, the own rank's in their place, so that their order depends on
the routing alone. Example, two ranks: tokens 0 and 2 of rank 0 and tokens 0 and 1 of rank 1 want rank 1. It
receives four rows, (0, 0), (0, 2), (1, 0), (1, 1), of which the first two crossed; bringing home gives rank 0
two sums.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import cast

import torch
import torch.distributed as dist
from torch import Tensor

from imbrex.codec.cast import as_bytes, from_bytes
from imbrex.contracts import Backend, Traffic, Transport
from imbrex.exchange import rows
from imbrex.runtime.words import words
from imbrex.transport import make as make_transport

TEXT_BYTES = 240


@dataclass(frozen=True, kw_only=True, slots=True)
class Route:
    """Who sends what to whom in one dispatch, seen from one rank.

    traffic: rows that cross. own_tokens_O: int64; own tokens that stay.
    rows_W: rows received from every rank, the own one included. before: of them, those of lower ranks.
    num_tokens: T.
    """

    traffic: Traffic
    own_tokens_O: Tensor
    rows_W: tuple[int, ...]
    before: int
    num_tokens: int

    @property
    def num_rows(self) -> int:
        return sum(self.rows_W)


def make_route(wanted_TW: Tensor, rows_WW: Tensor, rank: int) -> Route:
    """wanted_TW: bool; which ranks a token must reach. rows_WW: host int64; rows every rank sends to every
    other, the diagonal included."""
    splits_2W = torch.stack([rows_WW[rank], rows_WW[:, rank]])
    splits_2W[:, rank] = 0
    others = wanted_TW.clone()
    others[:, rank] = False
    sent = torch.nonzero_static(others.T, size=int(splits_2W[0].sum()))[:, 1].clone()
    own = torch.nonzero_static(wanted_TW[:, rank], size=int(rows_WW[rank, rank]))[:, 0].clone()
    # on the host: counts came with the message
    received = rows_WW[:, rank].tolist()
    return Route(
        traffic=Traffic(sent_tokens_N=sent, splits_2W=splits_2W),
        own_tokens_O=own,
        rows_W=tuple(received),
        before=sum(received[:rank]),
        num_tokens=wanted_TW.shape[0],
    )


class Carrier:
    """What couriers share: a group, and how ranks tell each other what is wrong. `who` stands in errors."""

    def __init__(self, who: str, group: dist.ProcessGroup | None, transport: str | Backend) -> None:
        self.who = who
        self.rank = 0 if group is None else dist.get_rank(group)
        self.world_size = 1 if group is None else dist.get_world_size(group)
        self.transport = make_transport(transport, group, num_ranks=self.world_size, top_k=1)[0]

    def wrong_device(self, *tensors: Tensor | None) -> str:
        """What is wrong with the devices of a call's tensors, or nothing."""
        given = {tensor.device for tensor in tensors if tensor is not None}
        right = self.world_size == 1 or all(d.type == self.transport.device.type for d in given)
        if len(given) == 1 and right:
            return ""
        where = ", ".join(sorted(map(str, given)))
        return f"tensors are on {where}; the group takes them on {self.transport.device.type}"

    def check_alike(self, call: str, settings: Mapping[str, int], told: list[list[int]]) -> None:
        """told: the settings of every rank."""
        for place, name in enumerate(settings):
            for rank, values in enumerate(told):
                if values[place] != told[0][place]:
                    raise ValueError(
                        f"{self.who}.{call}: ranks disagree about {name}: {told[0][place]} on rank 0, "
                        f"{values[place]} on rank {rank}; give every rank the same kind of input"
                    )

    def raise_problems(self, call: str, problem: str) -> None:
        text = problem.encode("ascii", "replace")[:TEXT_BYTES].ljust(TEXT_BYTES)
        # on the host: text
        told = self.transport.exchange_counts(words(*text)).tolist()
        found = [(rank, bytes(letters).decode().rstrip()) for rank, letters in enumerate(told)]
        rank, said = next((rank, said) for rank, said in found if said)
        raise ValueError(f"{self.who}.{call}: on rank {rank}, {said}")


class Courier(Carrier):
    """Carries rows over a transport.

    transport: a name in `imbrex.transport.TRANSPORTS` or an object, which sends a token where it is wanted.
    """

    def __init__(self, who: str, group: dist.ProcessGroup | None, transport: str | Backend) -> None:
        super().__init__(who, group, transport)
        self.moves = cast("Transport", self.transport)
        # Rows go where a `Traffic` of splits says, and nowhere else.
        if self.moves.replicated or self.moves.broadcasts or self.moves.relays:
            raise ValueError(
                f"{who}: the {self.transport.name} transport does not carry given rows to given ranks alone; "
                "use 'alltoall', or 'nvlink' on the GPUs of one host"
            )

    def settle(
        self, call: str, problem: str, wanted_TW: Tensor, extra: Tensor | int, settings: Mapping[str, int]
    ) -> tuple[Tensor, list[int]]:
        """Tell every rank what this one is about to send: rows_WW, host int64, and everybody's `extra`.

        problem: what is wrong with this rank's input, or nothing; then the rest is not looked at.
        settings: what must be the same on every rank, at most one int64 each.

        Raises ValueError on every rank where one has a problem or settings differ.
        """
        head = words(bool(problem), *settings.values())
        tail = words(*[0] * (1 + self.world_size))
        if not problem:
            extra = torch.as_tensor(extra, dtype=torch.int64, device=wanted_TW.device).view(1)
            head, tail = head.to(wanted_TW.device), torch.cat([extra, wanted_TW.sum(0)])
        gathered = self.transport.exchange_counts(torch.cat([head, tail]))
        # on the host: the message has been received
        heads = gathered.tolist()
        if any(head[0] for head in heads):
            self.raise_problems(call, problem)
        self.check_alike(call, settings, [head[1:] for head in heads])
        return gathered[:, -self.world_size :], [head[len(settings) + 1] for head in heads]

    def carry(self, columns: Sequence[Tensor], route: Route) -> list[Tensor]:
        """Columns of a token [T, ...] to columns of the rows received [N, ...], of any dtype, as bytes."""
        encoded_TB = torch.cat([as_bytes(column) for column in columns], 1)
        crossed = self.moves.begin_move(encoded_TB, route.traffic).finish()
        own = encoded_TB[route.own_tokens_O]
        return cut(torch.cat([crossed[: route.before], own, crossed[route.before :]]), columns)

    def bring_home(
        self,
        columns: Sequence[Tensor],
        dtypes: Sequence[torch.dtype],
        route: Route,
        *,
        rounded: bool = False,
    ) -> list[Tensor]:
        """Columns of rows received [N, ...] summed over a token's ranks, in rank order: float32 [T, ...].

        dtypes: how a column crosses. What is summed on the own rank is not rounded. rounded: the sums of the
        first column are wanted in its dtype.
        """
        stop = route.before + len(route.own_tokens_O)
        crossing = [
            torch.cat([column[: route.before], column[stop : route.num_rows]]).to(dtype)
            for column, dtype in zip(columns, dtypes, strict=True)
        ]
        encoded = torch.cat([as_bytes(column) for column in crossing], 1)
        back = self.moves.begin_move_back(encoded, route.traffic).finish()
        sizes = route.traffic.splits_2W[0].tolist()
        summed = []
        for column, part in zip(columns, cut(back, crossing), strict=True):
            own = torch.zeros(route.num_tokens, column.shape[1], dtype=torch.float32, device=column.device)
            own[route.own_tokens_O] = column[route.before : stop].float()
            summed.append(rows.sum_home(own, part, route.traffic.sent_tokens_N, sizes, self.rank))
        return [summed[0].to(columns[0].dtype), *summed[1:]] if rounded else summed


def cut(encoded_NB: Tensor, columns: Sequence[Tensor]) -> list[Tensor]:
    """The columns that are written side by side in rows of bytes; `columns` tell their widths and dtypes."""
    sizes = [column.shape[1] * column.dtype.itemsize for column in columns]
    parts = encoded_NB.split(sizes, 1)
    return [from_bytes(part, c.shape[1], c.dtype) for part, c in zip(parts, columns, strict=True)]


def pad_rows(rows_ND: Tensor, size: int, fill: float = 0) -> Tensor:
    """Rows followed by rows of `fill` up to `size`."""
    if size <= rows_ND.shape[0]:
        return rows_ND
    # torch has few operations for fp8; its zeros are zero bytes.
    values = rows_ND.view(torch.uint8) if rows_ND.dtype.itemsize == 1 else rows_ND
    further = values.new_full((size - len(values), *values.shape[1:]), fill)
    return torch.cat([values, further]).view(rows_ND.dtype)
