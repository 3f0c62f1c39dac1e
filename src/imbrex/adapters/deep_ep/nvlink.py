"""A buffer's backend over NVLink: kernels write rows straight to the GPU where they are needed, without the
host.

The kernels know the experts of this rank's tokens and of all others', so one routing gives both layouts. A
*compact* row, one per token on a rank, is an expert-major row of a rank with a single expert. It is pulled
straight into the returned tensor, with this rank's own rows in their place. Example: two experts on this
rank; the positions of three tokens' choices are [[0, -1], [-1, -1], [1, 2]]. Tokens 0 and 2 are received, and
the compact positions are 0, -1, 1.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from imbrex import contracts
from imbrex.adapters.deep_ep.backend import MOST_TOKENS, BackendBase, Labels, cut
from imbrex.adapters.deep_ep.choices import Choices, pack_choices
from imbrex.adapters.deep_ep.hybrid_handle import BufferConfig, Expanded, Inputs, Record
from imbrex.adapters.deep_ep.permuted import Permutation, place_choices
from imbrex.codec import as_bytes
from imbrex.exchange import rows
from imbrex.kernels.exchange import NvlinkExchange
from imbrex.kernels.ffn import clear_rows
from imbrex.kernels.routing import Routed
from imbrex.kernels.rows import Placed, index_rows, pack_labels, place_compact, read_labels
from imbrex.observe import Observer
from imbrex.placement import contiguous
from imbrex.runtime import waits
from imbrex.transport import Nvlink, nvlink, words

ALL_EXPERTS = 16
"""A routing map over so few experts is packed whole."""


@dataclass(frozen=True, kw_only=True, slots=True)
class KernelRoute:
    """Who sends what to whom in one dispatch, on the device.

    size: of the kernels. expert: the routing as expert-major rows. traffic_WW: int32; tokens that every rank
    has for every other. num_tokens: T. room: for so many tokens of a rank.
    number: of the dispatch; 0 if a program has kept the handle's tensors alone.
    placed: the routing as compact rows, and num_rows: rows of the compact tensors that a program holds;
    `None` before it has any. full: they are known to be received, all of them.
    """

    size: nvlink.Size
    expert: Routed
    traffic_WW: Tensor
    num_tokens: int
    room: int
    number: int
    placed: Placed | None = None
    num_rows: int | None = None
    full: bool = False

    @property
    def compact(self) -> Placed:
        assert self.placed is not None
        return self.placed

    def received(self, rank: int) -> Tensor:
        """Compact rows that there are: int32 [1]."""
        if self.placed is not None:
            return self.placed.received
        return self.traffic_WW[:, rank].sum(0, dtype=torch.int32).view(1)


class NvlinkBackend(BackendBase):
    """The backend of the kernels of `imbrex.kernels.exchange`.

    Rows of any bytes go out; bfloat16 rows are summed on the way back. Before a dispatch the hosts of the
    ranks meet over shared memory, so that one rank's mistake is every rank's `ValueError`; the GPUs are asked
    for nothing.
    """

    transport: Nvlink

    def __init__(self, who: str, group: dist.ProcessGroup | None, transport: str | contracts.Backend) -> None:
        super().__init__(who, group, transport)
        self._most_choices: dict[int, int] = {}
        self._ranks_W: Tensor | None = None
        self._none: Tensor
        self._zeros = torch.zeros(0, dtype=torch.float32, device=self.transport.device)
        self.transport.join(self)

    def close(self) -> None:
        self.transport.leave(self)

    def plan(
        self,
        call: str,
        problem: str,
        ids_TK: Tensor,
        weights_TK: Tensor | None,
        settings: Mapping[str, int],
        num_experts: int,
        columns: Sequence[Tensor],
        alignment: int = 1,
    ) -> KernelRoute:
        """Route. ids_TK: int64, -1 drops a choice; experts are spread evenly over the ranks. columns: what
        will be carried, besides at most 8 bytes a choice and 16. alignment: of an expert's rows."""
        tokens, choices = ids_TK.shape
        if not problem and choices > nvlink.MOST_CHOICES:
            problem = (
                f"{choices} choices a token; NVLink's kernels take {nvlink.MOST_CHOICES}: use 'alltoall'"
            )
        if self.transport.max_tokens is not None and tokens > self.transport.max_tokens:
            problem = problem or f"{tokens} tokens; Nvlink(max_tokens=) is {self.transport.max_tokens}"
        largest, row_bytes = tokens, 0
        if not problem:
            largest = max(tokens, settings.get(MOST_TOKENS, 0))
            row_bytes = _row_bytes(columns, 8 * choices + 16)
        heaps = {
            "the number of choices": choices,
            "pad_multiple": alignment,
            "the bytes that a row takes": row_bytes,
        }
        room = self._meet(call, problem, {**settings, **heaps, **settings}, largest)
        placement = _placement(num_experts, self.world_size)
        size = nvlink.Size(
            rank_offsets=placement.rank_offsets,
            tensor=1,
            experts=num_experts,
            choices=choices,
            row_bytes=row_bytes,
            alignment=alignment,
        )
        kernels = self.transport.exchange_for(size, placement, room, Observer())
        weights = self._no_weights(tokens, choices) if weights_TK is None else weights_TK.float()
        traffic_WW = torch.empty(self.world_size, self.world_size, dtype=torch.int32, device=ids_TK.device)
        routed = kernels.route(ids_TK.long(), weights, traffic=traffic_WW)
        self.dispatches += 1
        return KernelRoute(
            size=size,
            expert=routed,
            traffic_WW=traffic_WW,
            num_tokens=tokens,
            room=room,
            number=self.dispatches,
        )

    def _no_weights(self, tokens: int, choices: int) -> Tensor:
        if self._zeros.numel() < tokens * choices:
            self._zeros = torch.zeros(tokens * choices, dtype=torch.float32, device=self.transport.device)
        return self._zeros[: tokens * choices].view(tokens, choices)

    def meet(self, call: str, problem: str, settings: dict[str, int]) -> None:
        self._meet(call, problem, settings, 0)

    def _meet(self, call: str, problem: str, settings: Mapping[str, int], tokens: int) -> int:
        """Let the hosts meet over shared memory and compare their calls: the most tokens of a rank."""
        note = self.note_of(call, settings)
        self.met = True
        tokens_W, wrong = self.transport.agree_on_call(tokens, fine=not problem, note=note)
        if wrong is not None:
            self.raise_problems(call, problem)
        if not self.transport.agreed:
            self.raise_difference(call, settings)
        return max(tokens_W)

    def why_not_sum(self, rows_ND: Tensor, route: KernelRoute) -> str:
        problem, room = super().why_not_sum(rows_ND, route), route.size.row_bytes
        if problem or rows_ND.dtype != torch.bfloat16 or 2 * rows_ND.shape[1] <= room:
            return problem
        return f"{2 * rows_ND.shape[1]} bytes a row to sum, {room} dispatched; give rows as wide as those"

    def most_choices(self, chosen_T: Tensor, num_experts: int) -> int:
        """Columns of choices for tokens of that many experts: of all where those are few, else what the first
        tokens of any rank want, rounded up to a multiple of 8. Collective at the first call."""
        if num_experts <= ALL_EXPERTS:
            return num_experts
        if num_experts not in self._most_choices:
            own = chosen_T.max() if len(chosen_T) else words(0)[0]
            # host sync: once a number of experts
            largest = int(self.transport.exchange_counts(own.long().view(1)).max())
            self._most_choices[num_experts] = min(num_experts, max(8, -(-largest // 8) * 8))
        return self._most_choices[num_experts]

    def resize(self, route: KernelRoute, size: int) -> KernelRoute:
        link = route
        worst = self.world_size * link.room
        placed = link.placed
        if placed is None or len(placed.source_R) < size:
            parts = link.expert, link.traffic_WW, self.rank, link.num_tokens
            placed = place_compact(*parts, max(worst, size), load=self.transport.load)
        received = 0
        if size < worst:
            # host sync: the size of what is returned
            received = int(placed.received)
            size = max(received, size)
        return replace(link, placed=placed, num_rows=size, full=0 < size == received)

    def _kernels(self, link: KernelRoute) -> NvlinkExchange:
        return self.transport.exchange_of(link.size, link.expert.max_tokens)

    def carry(self, columns: Sequence[Tensor], route: KernelRoute) -> list[Tensor]:
        """Columns of a token [T, ...] to columns of compact rows [`num_rows`, ...]; those past what is
        received are zero."""
        source_R = route.compact.source_R[: route.num_rows]
        way = route, route.compact.routed, len(source_R), source_R
        pulled = self.pull(columns[0], *way)
        if len(columns) == 1:
            return [pulled]
        others = torch.cat([as_bytes(column) for column in columns[1:]], 1)
        return [pulled, *cut(self.pull(others, *way), columns[1:])]

    def carry_labelled(
        self,
        columns: Sequence[Tensor],
        ids_TK: Tensor,
        weights_TK: Tensor,
        route: KernelRoute,
        num_experts: int,
        *,
        counted: bool = True,
    ) -> tuple[list[Tensor], Tensor, Labels]:
        arrived, sources = self.carry_with_sources(columns, route)
        load, per_rank = self.transport.load, num_experts // self.world_size
        packed = pack_labels(ids_TK.contiguous(), weights_TK.contiguous(), load=load)
        source_R = route.compact.source_R[: route.num_rows]
        rows_NB = self.pull(packed, route, route.compact.routed, len(source_R))
        here = ids_TK.shape[1], self.rank * per_rank, per_rank
        read = read_labels(rows_NB, *here, source_R, counted=counted, load=load)
        return arrived, sources, Labels(*read)

    def sums_of(
        self, route: KernelRoute, rows_WW: Tensor, device: torch.device
    ) -> tuple[Tensor, Tensor, Tensor]:
        sums, world = route.compact.sums, self.world_size
        own, zeros = (sums.as_strided((world, 1), (1, 1), world * (world + i)) for i in range(2))
        return sums.as_strided((world, world), (world, 1)), own, zeros

    def pull(
        self, column: Tensor, link: KernelRoute, routed: Routed, num_rows: int, source_R: Tensor | None = None
    ) -> Tensor:
        """A column of a token to its rows [R, ...]; those whose `source_R`, if given, is -1 are zero."""
        size = column.shape[1] * column.dtype.itemsize
        if size % nvlink.ROW_MULTIPLE == 0 and num_rows and column is in_pieces(column):
            out = torch.empty(num_rows, column.shape[1], dtype=column.dtype, device=column.device)
            self._kernels(link).pull(column, routed, self.transport.sms.dispatch, out)
            if source_R is not None and not (link.full and link.compact.routed is routed):
                clear_rows(out.view(torch.uint8), source_R)
            return out
        encoded = in_pieces(as_bytes(column))
        # Peers pull from here also where nothing comes.
        out = encoded.new_empty(1, max(num_rows, 1), encoded.shape[1])
        self._kernels(link).pull(encoded, routed, self.transport.sms.dispatch, out)
        if num_rows and source_R is not None:
            clear_rows(out[0], source_R)
        return cut(out[0, :num_rows, :size], [column])[0]

    def bring_home(
        self,
        columns: Sequence[Tensor],
        dtypes: Sequence[torch.dtype],
        route: KernelRoute,
        *,
        rounded: bool,
    ) -> list[Tensor]:
        """The first column, bfloat16, summed over a token's ranks by the kernels: float32 [T, D], or bfloat16
        where `rounded`. The others, a few floats a row, go home as they are and are summed there."""
        summed = [self.combine(columns[0], route, route.compact.routed, rounded=rounded)[0]]
        position_WT = route.compact.routed.position_LWTK[0, :, :, 0].long()
        for column in columns[1:]:
            summed.append(self.send_home(pick(column, position_WT))[: route.num_tokens])
        return summed

    def combine(
        self,
        rows_RD: Tensor,
        link: KernelRoute,
        routed: Routed,
        *,
        rounded: bool,
        values: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """Rows of a token summed on its ranks, and the sums at home, in rank order: [T, D]. Kernels sum
        bfloat16; other rows are summed here and cross as float32 in equal pieces, a slow path.

        values: a number of every row, [R]; of a token's choices they come home too, float32 [T, K].
        """
        if rows_RD.dtype != torch.bfloat16:
            position_NK = routed.position_LWTK[0].flatten(0, 1).long()
            sums_ND = rows.reduce(rows_RD, position_NK, None, position_NK.shape[1])
            y_TD = self.send_home(sums_ND.view(self.world_size, -1, rows_RD.shape[1]))[: link.num_tokens]
            home_TK = None
            if values is not None:
                home_TK = self.send_home(pick(values, routed.position_LWTK[0].long()))[: link.num_tokens]
            return y_TD.to(rows_RD.dtype) if rounded else y_TD, home_TK
        width = rows_RD.shape[1]
        assert 2 * width <= link.size.row_bytes
        padded_RD = in_pieces(rows_RD)
        numbers = None
        if values is not None:
            home_TK = values.new_empty(link.num_tokens, link.size.choices, dtype=torch.float32)
            some = values if len(values) else values.new_zeros(1)  # an empty tensor has no address
            numbers = some.float().contiguous(), home_TK
        y_TD = self._kernels(link).combine(
            padded_RD[None],
            routed,
            weighted=False,
            num_sms=self.transport.sms.combine,
            num_tokens=link.num_tokens,
            out_dtype=torch.bfloat16 if rounded else torch.float32,
            values=numbers,
        )
        return y_TD[:, :width], None if numbers is None else numbers[1]

    def send_home(self, given_WTC: Tensor) -> Tensor:
        """float32 [W, most, ...] for the tokens of every rank, summed at home in rank order: [most, ...]."""
        parts, group = given_WTC.to(self.transport.message_device), self.transport.group
        home = torch.empty_like(parts)
        work = self.transport.start(
            "combine", lambda: dist.all_to_all_single(home, parts, group=group, async_op=True)
        )
        self.transport.finish("combine", work)
        home = home.to(given_WTC.device)
        total = torch.zeros_like(home[0])
        for part in home:
            total += part
        return total

    def tell(self, values: Tensor) -> Tensor:
        """The values of every rank, [W, ...], on the device."""
        own, group = values.contiguous().to(self.transport.message_device), self.transport.group
        values_W = own.new_empty(self.world_size, *own.shape)
        work = self.transport.start(
            "dispatch",
            lambda: waits.all_gather_single(values_W.view(-1), own.view(-1), group, async_op=True),
        )
        self.transport.finish("dispatch", work)
        return values_W.to(values.device)

    def reweigh(self, route: KernelRoute, weights_TK: Tensor) -> KernelRoute:
        """Weights of all ranks' tokens."""
        link = route
        missing = link.expert.weights_LWTK.shape[2] - len(weights_TK)
        weights_1WTK = self.tell(F.pad(weights_TK, [0, 0, 0, missing]))[None]
        return replace(link, expert=link.expert.replace(weights_LWTK=weights_1WTK))

    def plan_ranks(
        self,
        problem: str,
        wanted_TW: Tensor,
        columns: Sequence[Tensor],
        worst: int,
        settings: dict[str, int],
    ) -> tuple[KernelRoute, Tensor]:
        settings |= {"num_worst_tokens": worst}
        route = self._route_ranks(problem, wanted_TW, columns, settings)
        rows_WW = route.traffic_WW
        if 0 < worst < self.world_size * route.room:
            # host sync: only where so many might not have room
            self.check_worst(rows_WW.cpu(), [worst] * self.world_size)
        return self.resize(route, worst), rows_WW

    def _route_ranks(
        self, problem: str, wanted_TW: Tensor, columns: Sequence[Tensor], settings: dict[str, int]
    ) -> KernelRoute:
        """The route of tokens whose choices are ranks, so that the kernels bring a token to each once."""
        if self._ranks_W is None or self._ranks_W.device != wanted_TW.device:
            self._ranks_W = torch.arange(self.world_size, dtype=torch.int64, device=wanted_TW.device)
            self._none = torch.full_like(self._ranks_W[:1], -1)
        ranks_TW = torch.where(wanted_TW, self._ranks_W, self._none)
        return self.plan("dispatch", problem, ranks_TW, None, settings, self.world_size, columns)

    def read_ranks(self, handle: tuple, columns: Sequence[Tensor]) -> KernelRoute:
        route = self._route_ranks("", handle[4], columns, {})
        route = self.resize(route, self.world_size * route.room)
        return replace(route, num_rows=handle[3].shape[0], number=0)

    def plan_choices(
        self, call: str, problem: str, inputs: Inputs, config: BufferConfig, settings: dict[str, int]
    ) -> tuple[KernelRoute, Choices]:
        choices = self._choose(inputs, config.num_experts, problem)
        routing, columns = (choices.ids_TK, choices.weights_TK), [] if problem else inputs.columns
        more = settings, config.num_experts, columns, config.pad_multiple
        return self.plan(call, problem, *routing, *more), choices

    def _choose(self, inputs: Inputs, num_experts: int, problem: str) -> Choices:
        """Choices in as many columns as the kernels are made for. The host waits for the GPU only at the
        first map of more than `ALL_EXPERTS` experts."""
        if problem:
            return Choices(ids_TK=words()[:, None], weights_TK=None)
        if inputs.map_TE is None:
            assert inputs.ids_TK is not None
            ids_TK = inputs.ids_TK.long()
            order_TK = torch.where(ids_TK < 0, num_experts, ids_TK).argsort(dim=1, stable=True)
            weights_TK = None if inputs.weights_TK is None else inputs.weights_TK.float().gather(1, order_TK)
            return Choices(ids_TK=ids_TK.gather(1, order_TK), weights_TK=weights_TK)
        chosen_T = inputs.map_TE.sum(1)
        top_k = self.most_choices(chosen_T, num_experts)
        choices = pack_choices(inputs.map_TE, inputs.probs_TE, top_k)
        # More than there is room for: an id that the kernels refuse on every rank.
        ids_TK = torch.where((chosen_T > top_k)[:, None], num_experts, choices.ids_TK)
        return Choices(ids_TK=ids_TK, weights_TK=choices.weights_TK)

    def carry_with_sources(
        self, columns: Sequence[Tensor], route: KernelRoute
    ) -> tuple[list[Tensor], Tensor]:
        return self.carry(columns, route), route.compact.source_int_R[: route.num_rows]

    def heads(self, route: KernelRoute, wanted_TW: Tensor) -> Tensor:
        return route.compact.place_TW

    def received(self, route: KernelRoute, device: torch.device) -> Tensor:
        return route.received(self.rank)

    def expand(
        self,
        inputs: Inputs,
        record: Record,
        permutation: Permutation | None,
        budget: int | None,
        *,
        on_host: bool,
    ) -> Expanded:
        permutation = permutation or permute(record.route, budget, on_host=on_host)
        routed = expert_major(record.route, permutation)
        source_R, weights_R = index_rows(
            routed.position_LWTK, routed.weights_LWTK, permutation.num_rows, load=self.transport.load
        )
        way = record.route, routed, len(source_R), source_R
        rows_RD, *scales = [self.pull(column, *way) for column in inputs.columns]
        return Expanded(
            rows_RD=rows_RD,
            probs_R=None if record.choices.weights_TK is None else weights_R,
            scales_RS=scales[0] if scales else None,
            record=record,
            permutation=permutation,
        )

    def blocks(self, inputs: Inputs, record: Record, room: int) -> Expanded:
        size = record.config.num_of_experts_per_rank * room
        permutation = permute(record.route, size, on_host=False).in_blocks(room)
        way = record.route, expert_major(record.route, permutation), size
        rows_RD, *scales = [self.pull(column, *way) for column in inputs.columns]
        return Expanded(
            rows_RD=rows_RD,
            probs_R=None,
            scales_RS=scales[0] if scales else None,
            record=record,
            permutation=permutation,
        )

    def origins(self, route: KernelRoute) -> tuple[Tensor, Tensor]:
        _, world, places, _ = route.expert.position_LWTK.shape
        all_N = torch.arange(world * places, dtype=torch.int64, device=self.transport.device)
        return all_N // places, all_N % places

    def weigh_home(
        self,
        call: str,
        problem: str,
        inputs: Inputs,
        rows_RD: Tensor,
        record: Record,
        settings: dict[str, int],
    ) -> Tensor:
        """The weights go to the experts' ranks as they do in every routing: with the ids, by its kernel."""
        columns = 0 if inputs.ids_TK is None else inputs.ids_TK.shape[-1]
        if not problem and columns > record.route.size.choices:
            problem = f"topk_idx has {columns} columns, more than dispatched; give its topk_idx again"
        self.meet(call, problem, settings)
        link, kernels, permutation = record.route, self._kernels(record.route), record.permutation
        assert permutation is not None
        choices = self._choose(inputs, record.config.num_experts, "")
        ids_TK, weights_TK = choices.ids_TK, choices.weights_TK
        assert weights_TK is not None
        if fewer := link.size.choices - ids_TK.shape[1]:
            ids_TK, weights_TK = F.pad(ids_TK, [0, fewer], value=-1), F.pad(weights_TK, [0, fewer])
        routed = kernels.route(ids_TK, weights_TK)
        position = permutation.position_NK.view_as(routed.position_LWTK).int()
        width = rows_RD.shape[1]
        y_TD = kernels.combine(
            in_pieces(rows_RD)[None],
            routed.with_position(position),
            num_sms=self.transport.sms.combine,
            num_tokens=link.num_tokens,
        )
        return y_TD[:, :width]

    def reduce(
        self, hidden: Tensor, probs: Tensor | None, record: Record, permutation: Permutation
    ) -> tuple[Tensor, Tensor | None]:
        routed = expert_major(record.route, permutation)
        return self.combine(hidden, record.route, routed, rounded=True, values=probs)


@functools.lru_cache(maxsize=64)
def _placement(num_experts: int, ranks: int) -> contracts.Placement:
    return contiguous(num_experts, ranks)


def in_pieces(rows_RD: Tensor) -> Tensor:
    """Rows as kernels load them, 16 bytes at a time: these if they lie so, else a copy, with zeros up
    to a multiple. `F.pad` copies also where there is nothing to add."""
    missing = -rows_RD.shape[1] * rows_RD.dtype.itemsize % nvlink.ROW_MULTIPLE
    if missing:
        return F.pad(rows_RD, [0, missing // rows_RD.dtype.itemsize]).contiguous()
    rows_RD = rows_RD.contiguous()
    return rows_RD.clone() if rows_RD.data_ptr() % nvlink.ROW_MULTIPLE else rows_RD


def pick(values: Tensor, position: Tensor) -> Tensor:
    """The values [R, ...] of the rows at `position`, any shape; 0 where it is -1. float32."""
    choices = values.new_zeros(*position.shape, *values.shape[1:], dtype=torch.float32)
    if not len(values):
        return choices
    here = (position >= 0).view(*position.shape, *[1] * (values.dim() - 1))
    return torch.where(here, values[position.clamp(min=0)].float(), choices)


def _row_bytes(columns: Sequence[Tensor], more: int) -> int:
    """The bytes of a row that has room for the first column and for its sums in bfloat16, or for all other
    columns and `more`, whichever takes more."""
    first, *others = columns
    head = first.shape[1] * max(2, first.dtype.itemsize)
    labels = more + sum(column.shape[1] * column.dtype.itemsize for column in others)
    return -(-max(head, labels) // nvlink.ROW_MULTIPLE) * nvlink.ROW_MULTIPLE


def expert_major(link: KernelRoute, permutation: Permutation) -> Routed:
    """The routing with the rows where `permutation` has them."""
    position = permutation.position_NK.view_as(link.expert.position_LWTK).int()
    return link.expert.with_position(position)


def permute(link: KernelRoute, budget: int | None, *, on_host: bool) -> Permutation:
    """Does as `make_permutation`, for the tokens of all ranks in place of the rows received, [W * most, K]:
    as they were routed."""
    position_NK = link.expert.position_LWTK[0].flatten(0, 1)
    return place_choices(position_NK, link.expert.counts_Le[0].long(), budget, on_host=on_host)
