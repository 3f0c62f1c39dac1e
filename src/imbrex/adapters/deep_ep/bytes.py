"""The backend over a transport that moves bytes, on any device."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import cast

import torch
import torch.distributed as dist
from torch import Tensor

from imbrex import contracts
from imbrex.adapters.deep_ep.backend import BackendBase, Labels, cut
from imbrex.adapters.deep_ep.choices import Choices, indices_to_map, pack_choices
from imbrex.adapters.deep_ep.hybrid_arrival import carry_rows
from imbrex.adapters.deep_ep.hybrid_handle import BufferConfig, Expanded, Inputs, Record
from imbrex.adapters.deep_ep.permuted import Permutation, make_permutation
from imbrex.codec import as_bytes
from imbrex.contracts import Traffic, Transport
from imbrex.exchange import rows
from imbrex.transport import words


@dataclass(frozen=True, kw_only=True, slots=True)
class Route:
    """Who sends what to whom in one dispatch, seen from one rank.

    traffic: rows that cross. own_tokens_O: int64; own tokens that stay.
    rows_W: rows received from every rank, the own one included. before: of them, those of lower ranks.
    num_tokens: T. number: of the dispatch; 0 if a program has kept the handle's tensors alone.
    """

    traffic: Traffic
    own_tokens_O: Tensor
    rows_W: tuple[int, ...]
    before: int
    num_tokens: int
    number: int = 0

    @property
    def num_rows(self) -> int:
        return sum(self.rows_W)


def make_route(wanted_TW: Tensor, rows_WW: Tensor, rank: int, number: int = 0) -> Route:
    """The route of this rank's tokens. wanted_TW: bool; which ranks a token must reach. rows_WW: host int64;
    rows every rank sends to every other, the diagonal included. number: of the dispatch."""
    splits_2W = torch.stack([rows_WW[rank], rows_WW[:, rank]])
    splits_2W[:, rank] = 0
    others = wanted_TW.clone()
    others[:, rank] = False
    tokens_N = torch.nonzero_static(others.T, size=int(splits_2W[0].sum()))[:, 1].clone()
    own = torch.nonzero_static(wanted_TW[:, rank], size=int(rows_WW[rank, rank]))[:, 0].clone()
    received = rows_WW[:, rank].tolist()
    return Route(
        traffic=Traffic(sent_tokens_N=tokens_N, splits_2W=splits_2W),
        own_tokens_O=own,
        rows_W=tuple(received),
        before=sum(received[:rank]),
        num_tokens=wanted_TW.shape[0],
        number=number,
    )


def _number_tokens(route: Route) -> Tensor:
    return torch.arange(route.num_tokens, dtype=torch.int32, device=route.own_tokens_O.device)[:, None]


class BytesBackend(BackendBase):
    """Rows over a transport that moves bytes.

    transport: a name in `imbrex.transport.TRANSPORTS` or an object, which sends a token where it is wanted.
    """

    def __init__(self, who: str, group: dist.ProcessGroup | None, transport: str | contracts.Backend) -> None:
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
        tail = words(*[0] * (1 + self.world_size))
        if not problem:
            extra = torch.as_tensor(extra, dtype=torch.int64, device=wanted_TW.device).view(1)
            tail = torch.cat([extra, wanted_TW.sum(0)])
        gathered = self._tell(call, problem, settings, tail)
        return gathered[:, -self.world_size :], gathered[:, -self.world_size - 1].tolist()

    def meet(self, call: str, problem: str, settings: dict[str, int]) -> None:
        if self.world_size > 1 or problem:
            self._tell(call, problem, settings, words(*[0] * (1 + self.world_size)))

    def _tell(self, call: str, problem: str, settings: Mapping[str, int], tail: Tensor) -> Tensor:
        """The first message of every call, as long in all, so that ranks that make different ones hear of it:
        what every rank sends, [W, 2 + `tail`]."""
        head = words(bool(problem), self.note_of(call, settings)).to(tail.device)
        self.met = True
        gathered = self.moves.exchange_counts(torch.cat([head, tail]))
        heads = gathered[:, :2].tolist()
        if any(wrong for wrong, _ in heads):
            self.raise_problems(call, problem)
        if any(note != heads[0][1] for _, note in heads):
            self.raise_difference(call, settings)
        return gathered

    def carry(self, columns: Sequence[Tensor], route: Route) -> list[Tensor]:
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
        rounded: bool,
    ) -> list[Tensor]:
        """Sums of columns at home. Those of the own rank are not rounded."""
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

    def plan_ranks(
        self,
        problem: str,
        wanted_TW: Tensor,
        columns: Sequence[Tensor],
        worst: int,
        settings: dict[str, int],
    ) -> tuple[Route, Tensor]:
        rows_WW, most_W = self.settle("dispatch", problem, wanted_TW, worst, settings)
        self.check_worst(rows_WW, most_W)
        self.dispatches += 1
        return make_route(wanted_TW, rows_WW, self.rank, self.dispatches), rows_WW

    def read_ranks(self, handle: tuple, columns: Sequence[Tensor]) -> Route:
        # host sync: only for a handle that was taken apart
        prefix = handle[0].cpu().long()
        return make_route(handle[4], prefix.diff(dim=0, prepend=torch.zeros_like(prefix[:1])), self.rank)

    def plan_choices(
        self, call: str, problem: str, inputs: Inputs, config: BufferConfig, settings: dict[str, int]
    ) -> tuple[Route, Choices]:
        if problem:
            map_TE, probs_TE = torch.zeros(0, self.world_size, dtype=torch.bool, device="cpu"), None
        elif inputs.map_TE is not None:
            map_TE, probs_TE = inputs.map_TE, inputs.probs_TE
        else:
            assert inputs.ids_TK is not None
            ids_TK, weights_TK = inputs.ids_TK, inputs.weights_TK
            map_TE, probs_TE = indices_to_map(ids_TK, weights_TK, len(ids_TK), config.num_experts)
        wanted_TW = map_TE.unflatten(1, (self.world_size, -1)).any(2)
        top_k = map_TE.sum(1).max() if len(map_TE) else 0
        rows_WW, most_W = self.settle(call, problem, wanted_TW, top_k, settings)
        self.dispatches += 1
        route = make_route(wanted_TW, rows_WW, self.rank, self.dispatches)
        return route, pack_choices(map_TE, probs_TE, max(1, *most_W))

    def reweigh(self, route: Route, weights_TK: Tensor) -> Route:
        return route

    def resize(self, route: Route, size: int) -> Route:
        return route

    def carry_with_sources(self, columns: Sequence[Tensor], route: Route) -> tuple[list[Tensor], Tensor]:
        *arrived, sources_N1 = self.carry([*columns, _number_tokens(route)], route)
        return arrived, sources_N1[:, 0]

    def carry_labelled(
        self,
        columns: Sequence[Tensor],
        ids_TK: Tensor,
        weights_TK: Tensor,
        route: Route,
        num_experts: int,
        *,
        counted: bool = True,
    ) -> tuple[list[Tensor], Tensor, Labels]:
        columns = [*columns, _number_tokens(route), ids_TK.int(), weights_TK]
        *arrived, sources_N1, ids_NK, weights_NK = self.carry(columns, route)
        per_rank = num_experts // self.world_size
        local = ids_NK.long() - self.rank * per_rank
        here = (local >= 0) & (local < per_rank)
        ids_NK, weights_NK = torch.where(here, local, -1), torch.where(here, weights_NK, 0.0)
        return arrived, sources_N1[:, 0], Labels(ids_NK, weights_NK, None)

    def heads(self, route: Route, wanted_TW: Tensor) -> Tensor:
        return torch.where(wanted_TW, wanted_TW.cumsum(0) - 1, -1).int()

    def received(self, route: Route, device: torch.device) -> Tensor:
        return torch.tensor([route.num_rows], dtype=torch.int32, device=device)

    def expand(
        self,
        inputs: Inputs,
        record: Record,
        permutation: Permutation | None,
        budget: int | None,
        *,
        on_host: bool,
    ) -> Expanded:
        arrived = carry_rows(self, inputs, record)
        record = arrived.record
        assert record.ids_NK is not None
        permutation = permutation or make_permutation(
            record.ids_NK, record.config.local(self.rank), record.config.pad_multiple, budget, on_host=on_host
        )
        weights_NK, scales_NS = arrived.weights_NK, arrived.scales_NS
        return Expanded(
            rows_RD=permutation.expand(arrived.rows_ND),
            probs_R=None if weights_NK is None else permutation.expand_choices(weights_NK),
            scales_RS=None if scales_NS is None else permutation.expand(scales_NS),
            record=record,
            permutation=permutation,
        )

    def blocks(self, inputs: Inputs, record: Record, room: int) -> Expanded:
        arrived = carry_rows(self, inputs, record)
        ids_NK, local = arrived.record.ids_NK, record.config.local(self.rank)
        assert ids_NK is not None
        permutation = make_permutation(ids_NK, local, 1, len(local) * room, on_host=False)
        permutation, scales_NS = permutation.in_blocks(room), arrived.scales_NS
        return Expanded(
            rows_RD=permutation.expand(arrived.rows_ND),
            probs_R=None,
            scales_RS=None if scales_NS is None else permutation.expand(scales_NS),
            record=arrived.record,
            permutation=permutation,
        )

    def origins(self, route: Route) -> tuple[Tensor, Tensor]:
        [tokens_N1] = self.carry([_number_tokens(route)], route)
        ranks_W = torch.arange(self.world_size, dtype=torch.int64, device=tokens_N1.device)
        rows_W = words(*route.rows_W).to(tokens_N1.device)
        owner_N = ranks_W.repeat_interleave(rows_W, output_size=route.num_rows)
        return owner_N, tokens_N1[:, 0].long()

    def weigh_home(
        self,
        call: str,
        problem: str,
        inputs: Inputs,
        rows_RD: Tensor,
        record: Record,
        settings: dict[str, int],
    ) -> Tensor:
        self.meet(call, problem, settings)
        ids_TK, weights_TK, permutation = inputs.ids_TK, inputs.weights_TK, record.permutation
        assert ids_TK is not None
        assert permutation is not None
        probs_TE = indices_to_map(ids_TK, weights_TK, len(ids_TK), record.config.num_experts)[1]
        assert probs_TE is not None
        own_TK = probs_TE.gather(1, record.choices.ids_TK.clamp(min=0))
        [weights_NK] = self.carry([own_TK], record.route)
        weights_R = permutation.expand_choices(weights_NK)
        sums_ND = permutation.reduce(rows_RD.float() * weights_R[:, None])
        y_TD = self.bring_home([sums_ND], [rows_RD.dtype], record.route, rounded=False)[0]
        return y_TD.to(rows_RD.dtype)

    def reduce(
        self, hidden: Tensor, probs: Tensor | None, record: Record, permutation: Permutation
    ) -> tuple[Tensor, Tensor | None]:
        columns, dtypes = [permutation.reduce(hidden)], [hidden.dtype, torch.float32]
        columns += [] if probs is None else [permutation.pick(probs)]
        summed = self.bring_home(columns, dtypes[: len(columns)], record.route, rounded=False)
        return summed[0].to(hidden.dtype), None if probs is None else summed[1]
