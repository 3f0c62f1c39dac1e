"""The backward of a call: gradients to the hosts that counted, and back. It has no patience: what counted in
the forward counts here, on both sides."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from imbrex.codec.cast import from_bytes
from imbrex.codec.columns import write
from imbrex.exchange import rows
from imbrex.overlap.events.forward import Batch, Forward
from imbrex.overlap.events.ledger import Host, Kind
from imbrex.overlap.gradients import gradients_of
from imbrex.runtime.waits import Deadline


class Backward:
    """Gradients of tokens, weights and `parameters` of a call; the graph of its experts is gone afterwards.

    Rows that were computed in vain are left out: the experts are then computed once more, on the rest, so
    that the gradients are to the bit those of a call that was given the mask.
    """

    def __init__(self, forward: Forward, d_y_TD: Tensor, parameters: Sequence[Tensor]) -> None:
        self.forward, self.d_y_TD, self.parameters = forward, d_y_TD, parameters
        self.rank, self.counts = forward.geometry.rank, forward.ledger.counts
        self.gradients: dict[int, Tensor] = {}
        self.came_back: dict[int, Tensor] = {}

    @torch.no_grad()
    def run(self) -> tuple[Tensor, Tensor, list[Tensor | None]]:
        """d_x_TD, d_weights_TK, and those of the parameters."""
        forward = self.forward
        observer, layer, seat = forward.exchange.observer, forward.exchange.layer, forward.seat
        with observer.span("combine_backward", layer=layer):
            encoded = write([self.d_y_TD], forward.wire.combine_backward, forward.dtype)
            tokens_N, sizes = forward.traffic()
            for peer in seat.peers:
                if self.counts[peer]:
                    body = encoded.index_select(0, forward.tokens[peer])
                    forward.post(peer, Kind.GRADIENT, body)
            self._wait("combine", self._undecided)
        batch, d_rows_RD, d_weights_R, d_parameters = self._experts()
        with observer.span("dispatch_backward", layer=layer):
            own_TD, own_TK = self._send_back(batch, d_rows_RD, d_weights_R)
            self._wait("dispatch", lambda: {p for p, size in enumerate(sizes) if size} - set(self.came_back))
            return *self._sum_home(own_TD, own_TK, tokens_N, sizes), d_parameters

    def _undecided(self) -> set[int]:
        return self.forward.ledger.unknown - set(self.gradients)

    def _wait(self, what: str, missing: Callable[[], set[int]]) -> None:
        seat = self.forward.seat
        deadline = Deadline(seat.timeout_s)
        seat.pump(0.0)
        self._hear()
        while missing():
            seat.wait(f"the backward pass, {what}", sorted(missing()), deadline, math.inf)
            self._hear()

    def _hear(self) -> None:
        forward = self.forward
        letters, forward.letters = forward.letters, []
        for peer, envelope, body in letters:
            kind = Kind(envelope.kind)
            if kind is Kind.GRADIENT:
                self.gradients[peer] = body
            elif kind is Kind.GRADIENT_BACK:
                self.came_back[peer] = body
            else:
                forward.ledger.hear(peer, kind)

    def _experts(self) -> tuple[Batch, Tensor, Tensor, list[Tensor | None]]:
        """Run the experts' backward: the batch of rows that counted, the gradients of its rows, of their
        weights and of the parameters."""
        forward = self.forward
        batch, out_RD = self._graph()
        d_y_RD = self._gradients_of(batch).index_select(0, batch.source_R)
        weighted, observer = forward.experts.applies_weights, forward.exchange.observer
        d_out_RD = d_y_RD if weighted else (d_y_RD.float() * batch.weights_R[:, None]).to(d_y_RD.dtype)
        inputs = batch.rows_RD, batch.weights_R if weighted else None, self.parameters
        with observer.span("experts_backward", layer=forward.exchange.layer):
            d_rows_RD, d_weights_R, d_parameters = gradients_of(out_RD, d_out_RD, *inputs)
        if d_weights_R is None:
            d_weights_R = (out_RD.detach().float() * d_y_RD.float()).sum(1)
        return batch, d_rows_RD, d_weights_R, d_parameters

    def _graph(self) -> tuple[Batch, Tensor]:
        """The rows that counted, and the experts' results for them, whose graph the backward goes through."""
        forward = self.forward
        assert forward.graph is not None
        batch, out_RD = forward.graph
        forward.graph = None
        counted_ranks = {p for p in self.gradients if forward.ledger.host[p] is Host.COMPUTED}
        if self.counts[self.rank]:
            counted_ranks.add(self.rank)
        if counted_ranks == set(batch.ranks):
            return batch, out_RD
        packets = {rank: forward.packets[rank] for rank in sorted(counted_ranks)}
        if not packets:
            packets[self.rank] = forward.packets[self.rank].nothing()
        batch = batch.of(packets, forward.geometry.local_slots)
        return batch, forward.compute(batch)

    def _gradients_of(self, batch: Batch) -> Tensor:
        """The gradient of every token in the homes' packets: this rank's own as it is, the others'
        decoded."""
        codec, width, dtype = self.forward.wire.combine_backward, self.d_y_TD.shape[1], self.forward.dtype
        parts = [
            self.d_y_TD[: batch.sizes[place]]
            if rank == self.rank
            else codec.decode(self.gradients[rank], width, dtype)
            for place, rank in enumerate(batch.ranks)
        ]
        return torch.cat(parts)

    def _send_back(self, batch: Batch, d_rows_RD: Tensor, d_weights_R: Tensor) -> tuple[Tensor, Tensor]:
        """Send every home the sums of its tokens' gradients; return those of this rank's own tokens and of
        their weights."""
        forward = self.forward
        codec = forward.wire.dispatch_backward
        sums_PD = rows.reduce(d_rows_RD, batch.position_PK, None, forward.geometry.max_rows_per_token)
        scalars_PK = rows.pick_scalars(d_weights_R, batch.position_PK)
        own_TD = torch.zeros(self.d_y_TD.shape, dtype=torch.float32, device="cpu")
        own_TK = torch.zeros_like(forward.weights_TK)
        pieces = zip(batch.ranks, sums_PD.split(batch.sizes), scalars_PK.split(batch.sizes), strict=True)
        for rank, sums_ND, scalars_NK in pieces:
            if rank != self.rank:
                forward.post(rank, Kind.GRADIENT_BACK, write([sums_ND, scalars_NK], codec, d_rows_RD.dtype))
            elif len(sums_ND):
                own_TD, own_TK = sums_ND, scalars_NK
        return own_TD, own_TK

    def _sum_home(
        self, own_TD: Tensor, own_TK: Tensor, tokens_N: Tensor, sizes: list[int]
    ) -> tuple[Tensor, Tensor]:
        codec, width, dtype = self.forward.wire.dispatch_backward, self.d_y_TD.shape[1], self.forward.dtype
        nbytes, bodies = (
            codec.nbytes(width, dtype),
            [self.came_back[p] for p, size in enumerate(sizes) if size],
        )
        back_ND, back_NK = own_TD[:0], own_TK[:0]
        if bodies:
            came = torch.cat(bodies)
            back_ND = codec.decode(came[:, :nbytes], width, dtype)
            back_NK = from_bytes(came[:, nbytes:], own_TK.shape[1], torch.float32)
        d_x_TD = rows.sum_home(own_TD, back_ND, tokens_N, sizes, self.rank).to(dtype)
        return d_x_TD, rows.sum_home(own_TK, back_NK, tokens_N, sizes, self.rank)


__all__ = ["Backward"]
