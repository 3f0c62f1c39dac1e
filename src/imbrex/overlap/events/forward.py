"""The forward of a call: sends packets, computes packets as they come, sends replies, and ends the patience
for late peers."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from imbrex.codec.cast import from_bytes
from imbrex.codec.columns import write
from imbrex.contracts import Experts, Routing, RowExchange
from imbrex.exchange import plan, rows
from imbrex.exchange.agreement import DTYPES
from imbrex.overlap.events.call import Call
from imbrex.overlap.events.ledger import Home, Kind, Ledger
from imbrex.overlap.events.seat import Letter, Seat, Stage
from imbrex.runtime.waits import Deadline
from imbrex.transport.messages import Envelope


@dataclass(frozen=True, kw_only=True, slots=True)
class Packet:
    """The rows of a home for the experts here: decoded [n, D], and slots and weights of their choices."""

    rows_ND: Tensor
    slot_NK: Tensor
    weights_NK: Tensor

    def nothing(self) -> Packet:
        """This packet without its rows."""
        return Packet(rows_ND=self.rows_ND[:0], slot_NK=self.slot_NK[:0], weights_NK=self.weights_NK[:0])


@dataclass(frozen=True, kw_only=True, slots=True)
class Batch:
    """Packets of several homes as the experts want them, in the order of `serial`: by slot, home, token.

    sizes: rows of every home. source_R, position_PK: as in `imbrex.exchange.rows`, over the packets' rows.
    """

    ranks: tuple[int, ...]
    sizes: tuple[int, ...]
    rows_RD: Tensor
    weights_R: Tensor
    counts_e: Tensor
    source_R: Tensor
    position_PK: Tensor

    @staticmethod
    def of(packets: dict[int, Packet], local: range) -> Batch:
        ordered = [packets[rank] for rank in sorted(packets)]
        slot_PK = torch.cat([packet.slot_NK for packet in ordered])
        weights_PK = torch.cat([packet.weights_NK for packet in ordered])
        pool_PD = torch.cat([packet.rows_ND for packet in ordered])
        flat = slot_PK.flatten()
        here = (flat >= local.start) & (flat < local.stop)
        order = torch.argsort(torch.where(here, flat, local.stop), stable=True)
        counts_e = plan.count_choices(torch.where(here, flat - local.start, -1), len(local))
        choice_R = order[: int(counts_e.sum())]
        position = torch.full_like(flat, -1)
        position[choice_R] = torch.arange(len(choice_R), device="cpu")
        source_R = choice_R // slot_PK.shape[1]
        return Batch(
            ranks=tuple(sorted(packets)),
            sizes=tuple(len(packet.rows_ND) for packet in ordered),
            rows_RD=pool_PD.index_select(0, source_R),
            weights_R=weights_PK.flatten()[choice_R],
            counts_e=counts_e,
            source_R=source_R,
            position_PK=position.view_as(slot_PK),
        )


class Forward(Call):
    """A call over connections. Where a backward may follow, packets are one task."""

    def __init__(
        self,
        seat: Seat,
        exchange: RowExchange,
        experts: Experts,
        x_TD: Tensor,
        routing: Routing,
        *,
        keep: bool,
    ) -> None:
        super().__init__(exchange, experts, x_TD, routing, keep=keep)
        self.seat = seat
        self.ledger = Ledger(self.geometry.rank, exchange.world_size, seat.epsilon, at_once=not keep)
        self.letters: list[Letter] = []
        self.packets: dict[int, Packet] = {}
        self.replies: dict[int, Tensor] = {}
        self.graph: tuple[Batch, Tensor] | None = None
        self.own_TD = torch.zeros(x_TD.shape, dtype=torch.float32, device="cpu")
        self.dtype = x_TD.dtype
        self.began = time.monotonic()
        self.since: float | None = None
        self.gave_up = False
        self.call = seat.begin(self)

    @torch.no_grad()
    def send(self) -> None:
        """Rows to every peer, none to most of them perhaps, so that all know at once what there is."""
        observer, layer = self.exchange.observer, self.exchange.layer
        with observer.span("plan", layer=layer):
            slot_TK = plan.only_slots(self.ids_TK, self.geometry.placement)
            self.slot_TK = slot_TK
            tensor_size = self.geometry.tensor_parallel
            wanted_TW = plan.ranks_wanted(slot_TK, self.geometry.placement, tensor_size)
            self.tokens = [column.nonzero().squeeze(1) for column in wanted_TW.T]
            labels = [slot_TK.int(), self.weights_TK]
        with observer.span("dispatch", layer=layer):
            encoded = write([self.x_TD, *labels], self.wire.dispatch, self.dtype)
            dtype, choices, budget = DTYPES.index(self.dtype), self.ids_TK.numel(), self.seat.budget
            budget.earn(choices)
            far_ranks = self.seat.far_behind()
            self._say(self.ledger.skip(far_ranks))
            for peer in self.seat.peers:
                if peer not in far_ranks:
                    body = encoded.index_select(0, self.tokens[peer])
                    self.post(peer, Kind.PACKET, body, (dtype, budget.give(peer), choices, 0, 0))
        own = Packet(rows_ND=self.x_TD, slot_NK=slot_TK, weights_NK=self.weights_TK)
        self.packets[self.geometry.rank] = own
        self.count_load()

    def run(self) -> None:
        """Compute what comes and answer it, until nothing is awaited any more."""
        observer, layer = self.exchange.observer, self.exchange.layer
        while not self.ledger.over:
            self.seat.pump(0.0)
            self._hear()
            ranks = self.ledger.task()
            if ranks:
                self._compute(ranks)
            elif not self.ledger.over:
                with observer.span("combine" if self.ledger.computed else "dispatch", layer=layer):
                    self._wait()
        self._end_wait()
        self._say(self.ledger.settle(self.geometry.tensor_parallel))

    def _wait(self) -> None:
        """Wait until there is something to do or nobody is missing. When patience ends, give up on the peers
        that are missing."""
        ledger, seat = self.ledger, self.seat
        deadline = Deadline(seat.timeout_s)
        while not (ledger.over or ledger.task()):
            now, left = time.monotonic(), math.inf
            if ledger.may_give_up:
                self.since = now if self.since is None else self.since
                patience = seat.patience
                since = self.began if patience.from_begin else self.since
                if ledger.is_decided:
                    left = 0.0
                elif seat.budget.covers(ledger.open_pairs):
                    left = since + patience.seconds(self.call, self._stage) - now
            if left <= 0:
                self._give_up()
                return
            what = "combine" if ledger.computed else "dispatch"
            seat.wait(what, sorted(ledger.missing), deadline, left)
            self._hear()

    def _give_up(self) -> None:
        peers, spent = sorted(self.ledger.missing), not self.ledger.is_decided
        for peer in peers:
            with self.exchange.observer.span("give_up", layer=self.exchange.layer, peer=peer):
                pass  # a mark in the trace
        messages = self.ledger.give_up()
        self._say(messages)
        for peer, kind in messages:
            if kind is Kind.REFUSED:
                self.seat.budget.refuse(peer)
        self.seat.miss(peers)
        if spent:
            self.gave_up = True
            self.seat.patience.give_up(self.call, self._stage)

    @property
    def _stage(self) -> Stage:
        return Stage.REPLIES if self.ledger.at_once or self.ledger.computed else Stage.PACKETS

    def _end_wait(self) -> None:
        """End a wait: patience remembers how long the last peers took, unless this rank gave up on them."""
        patience = self.seat.patience
        if self.ledger.epsilon and not self.gave_up:
            now = time.monotonic()
            since = self.began if patience.from_begin else now if self.since is None else self.since
            patience.remember(now - since, self._stage)
        self.since = None

    def _say(self, messages: list[tuple[int, Kind]]) -> None:
        for peer, kind in messages:
            self.seat.mail.send(peer, Envelope(call=self.call, kind=kind))

    def _hear(self) -> None:
        letters, self.letters = self.letters, []
        for peer, envelope, body in letters:
            kind = Kind(envelope.kind)
            if kind in (Kind.GRADIENT, Kind.GRADIENT_BACK):
                self.letters.append((peer, envelope, body))
            elif self.ledger.hear(peer, kind):
                if kind is Kind.PACKET:
                    self._check_alike(peer, envelope)
                    self.packets[peer] = self._unpack(body)
                else:
                    self.replies[peer] = body

    def _check_alike(self, peer: int, envelope: Envelope) -> None:
        theirs = DTYPES[envelope.details[0]]
        if theirs != self.dtype:
            raise ValueError(
                f"dispatch: ranks disagree about the dtype of x: {self.dtype} on rank {self.seat.rank}, "
                f"{theirs} on rank {peer}; every rank must make the same calls with the same kind of input"
            )

    def _unpack(self, body: Tensor) -> Packet:
        width, top_k, codec = self.x_TD.shape[1], self.weights_TK.shape[1], self.wire.dispatch
        nbytes = codec.nbytes(width, self.dtype)
        labels = body[:, nbytes:].unflatten(1, (2, 4 * top_k))
        return Packet(
            rows_ND=codec.decode(body[:, :nbytes], width, self.dtype),
            slot_NK=from_bytes(labels[:, 0], top_k, torch.int32).long(),
            weights_NK=from_bytes(labels[:, 1], top_k, torch.float32),
        )

    def _compute(self, ranks: list[int]) -> None:
        """Run the experts on the rows of these ranks, and send them the replies at once."""
        if not self.ledger.at_once:
            self._end_wait()
        batch = Batch.of({rank: self.packets[rank] for rank in ranks}, self.geometry.local_slots)
        out_RD = self.compute(batch)
        observer, layer = self.exchange.observer, self.exchange.layer
        with observer.span("combine", layer=layer), torch.no_grad():
            weights_R = None if self.experts.applies_weights else batch.weights_R
            sums_PD = rows.reduce(
                out_RD.detach(), batch.position_PK, weights_R, self.geometry.max_rows_per_token
            )
            self.ledger.compute(ranks)
            for rank, sums_ND in zip(batch.ranks, sums_PD.split(batch.sizes), strict=True):
                if rank == self.geometry.rank:
                    self.own_TD = sums_ND
                else:
                    self.post(rank, Kind.REPLY, write([sums_ND], self.wire.combine, self.dtype))
        if self.keep:
            self.graph = batch, out_RD

    def compute(self, batch: Batch) -> Tensor:
        """The experts' rows of a batch."""
        self.exchange.observer.count("rows", len(batch.rows_RD), layer=self.exchange.layer)
        return self.run_experts(batch.rows_RD, batch.weights_R, batch.counts_e)

    @torch.no_grad()
    def outputs(self, addend_TD: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Outputs [T, D], the sums of the ranks that count in rank order; and the choices that were kept."""
        exchange, counts = self.exchange, self.ledger.counts
        with exchange.observer.span("combine", layer=exchange.layer):
            tokens_N, sizes = self.traffic()
            width, codec = self.x_TD.shape[1], self.wire.combine
            bodies = [self.replies[rank] for rank, size in enumerate(sizes) if size]
            back_ND = self.x_TD.new_empty(0, width)
            if bodies:
                back_ND = codec.decode(torch.cat(bodies), width, self.dtype)
            own_TD = self.own_TD if counts[self.geometry.rank] else torch.zeros_like(self.own_TD)
            y_TD = rows.sum_home(own_TD, back_ND, tokens_N, sizes, self.geometry.rank)
            y_TD = y_TD if addend_TD is None else y_TD + addend_TD.float()
        return y_TD.to(self.dtype), self._kept_choices()

    def traffic(self) -> tuple[Tensor, list[int]]:
        """The token of every row of the hosts that count, by rank, and how many rows each has; the own rank's
        stay."""
        sizes = [
            len(tokens) if counts and rank != self.geometry.rank else 0
            for rank, (tokens, counts) in enumerate(zip(self.tokens, self.ledger.counts, strict=True))
        ]
        parts = [self.tokens[rank] for rank, size in enumerate(sizes) if size]
        return torch.cat(parts or [self.tokens[0][:0]]), sizes

    def _kept_choices(self) -> Tensor | None:
        """The choices that count, bool [T, K]; `None` where none was dropped."""
        missing_hosts = [rank for rank, counts in enumerate(self.ledger.counts) if not counts]
        if not missing_hosts:
            return None
        placement = self.geometry.placement
        counts_S = torch.tensor(self.ledger.counts, dtype=torch.bool, device="cpu")[
            plan.owner_of_slot(placement, self.x_TD.device) * self.geometry.tensor_parallel
        ]
        kept_TK = counts_S[self.slot_TK.clamp(min=0)] | (self.slot_TK < 0)
        self.seat.budget.charge(int((~kept_TK).sum()))
        self.count_drops(kept_TK, [int(state is not Home.COUNTS) for state in self.ledger.home])
        return None if bool(kept_TK.all()) else kept_TK

    def post(self, peer: int, kind: Kind, body: Tensor, details: Any = (0, 0, 0, 0, 0)) -> None:
        envelope = Envelope(
            call=self.call, kind=kind, rows=body.shape[0], row_bytes=body.shape[1], details=details
        )
        self.seat.mail.send(peer, envelope, body)
        if self.exchange.observer.enabled:
            bytes_W = [0] * self.exchange.world_size
            bytes_W[peer] = body.numel()
            self.exchange.observer.count("bytes_sent", bytes_W, layer=self.exchange.layer)


__all__ = ["Batch", "Forward", "Packet"]
