"""The base of transports that move bytes. Rows go straight from rank to rank; subclasses may relay them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from imbrex.contracts import Traffic
from imbrex.transport.collective import Collective


class BytesTransport(Collective):
    """The base of transports: all of `imbrex.contracts.Transport` except `name` and the moves, for rows that
    no rank relays."""

    broadcasts = False
    relays = False
    sums_encoded = False
    ranks_per_node: int | None = None

    @property
    def sums_on_the_way(self) -> bool:
        return False

    def plan(self, destinations: Sequence[Tensor], rows: Sequence[Tensor] | None) -> list[Traffic]:
        rows = self.sizes_of(destinations) if rows is None else rows
        return [straight(mine, sizes, self.rank) for mine, sizes in zip(destinations, rows, strict=True)]

    def sizes_of(self, destinations: Sequence[Tensor]) -> list[Tensor]:
        """The rows that every rank sends to every other, int64 [W, W] for every dispatch. Collective."""
        gathered = self.exchange_counts(torch.cat([wanted_TW.sum(0) for wanted_TW in destinations]))
        return [sizes.clone().fill_diagonal_(0) for sizes in gathered.chunk(len(destinations), 1)]

    def fake_hops(self, ids_TK: Tensor, size: Callable[[], Any]) -> list[Tensor]:
        return []

    def home(self, traffic: Traffic) -> tuple[Tensor, list[int]]:
        return traffic.sent_tokens_N, traffic.splits_2W[0].tolist()

    def rows_sent(self, traffic: Traffic, *, back: bool) -> Tensor:
        return traffic.splits_2W[int(back)]

    def all_reduce(self, partial_TD: Tensor) -> Tensor:
        raise AssertionError("only a replicated transport sums over ranks")

    def sum_encoded(
        self, partial_TD: Tensor, encode: Callable[[Tensor], Tensor], decode: Callable[[Tensor], Tensor]
    ) -> Tensor:
        raise AssertionError("only a replicated transport sums over ranks")


def straight(wanted_TW: Tensor, rows_WW: Tensor, rank: int) -> Traffic:
    """The traffic of rows that go from rank to rank without a relay. wanted_TW: bool, the ranks that a token
    goes to; column `rank` is ignored. rows_WW: int64 on the host, the rows that every rank sends to every
    other, with zeros on the diagonal."""
    splits_2W = torch.stack([rows_WW[rank], rows_WW[:, rank]])
    others = wanted_TW.clone()
    others[:, rank] = False
    tokens_N = torch.nonzero_static(others.T, size=int(splits_2W[0].sum()))[:, 1].clone()
    return Traffic(sent_tokens_N=tokens_N, splits_2W=splits_2W)


__all__ = ["BytesTransport", "straight"]
