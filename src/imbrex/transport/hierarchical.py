"""The hierarchical transport: a token crosses to a node once, is copied there, and one sum comes back."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from imbrex.contracts import Add, Pending, Traffic
from imbrex.transport.collective import Done, Message
from imbrex.transport.relay import Relay
from imbrex.transport.steps import Transfer
from imbrex.transport.twolevel import TwoLevel

ACROSS, INSIDE, PASSED_ON = 0, 1, 2
"""Steps of a transfer, in the tags of its messages."""


class Hierarchical(TwoLevel):
    """Sends a token once to each node that it goes to, where it is relayed, as DeepEP does between nodes.
    Rank l of a node talks to ranks l of other nodes, its counterparts.

    Out: a token goes to its rank's counterpart on each node that it goes to, which relays it inside the node.
    Back: ranks give their partial sums to that counterpart, which adds them in rank order and sends one row.
    The codec rounds such a sum once more. On two nodes of two, a token of rank 0 for ranks 1, 2 and 3:

        out    0 ──INSIDE──▶ 1        0 ──ACROSS──▶ 2 ──PASSED_ON──▶ 3
        back   1 ──INSIDE──▶ 0        3 ──PASSED_ON──▶ 2, adds its own to that of 3, ──ACROSS──▶ 0

    These are six messages, as with `alltoall`, but two of them between nodes instead of four.

    Bytes between nodes: one row for every token and other node that it goes to, each way. For 2 nodes of 4
    and 8 of 64 experts that is 1.0 row instead of 2.7 with `alltoall`.

    pieces: a power of two. One piece of the tokens is relayed inside the node while the next crosses, and the
    sums of one piece cross while those of the next are added; both run beside the caller. Over NCCL there is
    one piece, since its stream does one thing at a time.
    """

    name = "hierarchical"

    def __init__(
        self,
        group: dist.ProcessGroup | None,
        *,
        ranks_per_node: int | None = None,
        pieces: int = 4,
        timeout: float | None = None,
    ) -> None:
        super().__init__(group, ranks_per_node=ranks_per_node, timeout=timeout)
        if pieces < 1 or pieces & (pieces - 1):
            raise ValueError(f"transport: {pieces} pieces; use a power of two")
        self.pieces = 1 if self.groups_messages else pieces

    @property
    def sums_on_the_way(self) -> bool:
        return self.world_size > 1

    def tell_marks(self, destinations: Sequence[Tensor], counts: Sequence[Tensor]) -> list[Tensor]:
        others = [n for n in range(self.nodes.num_nodes) if n != self.node]
        unique = [counts_2SWW[1].sum(0).tolist() for counts_2SWW in counts]
        send, receive = [0] * self.world_size, [0] * self.world_size
        mine = [torch.zeros(0, self.nodes.size, dtype=torch.uint8, device=destinations[0].device)]
        for n in others:
            peer = self.nodes.rank(n, self.local)
            send[peer] = sum(table[self.rank][n] for table in unique)
            receive[peer] = sum(table[peer][self.node] for table in unique)
            for wanted_TW, table in zip(destinations, unique, strict=True):
                inside = wanted_TW[:, n * self.nodes.size : (n + 1) * self.nodes.size]
                tokens = torch.nonzero_static(inside.any(1), size=table[self.rank][n])[:, 0]
                mine.append(inside[tokens].to(torch.uint8))
        marks_W = self.scatter_rows("plan", torch.cat(mine), send, receive).finish()
        sizes = [table[self.nodes.rank(n, self.local)][self.node] for n in others for table in unique]
        blocks = marks_W.split(sizes)
        return [torch.cat([mine[0], *blocks[call :: len(counts)]]) for call in range(len(counts))]

    def home(self, traffic: Traffic) -> tuple[Tensor, list[int]]:
        return super().home(traffic) if self.world_size == 1 else self._relay(traffic).home()

    def rows_sent(self, traffic: Traffic, *, back: bool) -> Tensor:
        if self.world_size == 1:
            return super().rows_sent(traffic, back=back)
        return self._relay(traffic).sent(back=back)

    def begin_move(self, encoded_TB: Tensor, traffic: Traffic) -> Pending:
        if self.world_size == 1:
            return Done(encoded_TB[:0])
        return _Out(self, self._relay(traffic), encoded_TB)

    def begin_move_back(self, encoded_MB: Tensor, traffic: Traffic, add: Add | None = None) -> Pending:
        """Move rows home, in the order of `home`. add: sums encoded rows; by default as float32 values."""
        if self.world_size == 1:
            return Done(encoded_MB)
        return _Back(self, self._relay(traffic), encoded_MB.contiguous(), add or add_floats)

    def _relay(self, traffic: Traffic) -> Relay:
        return Relay.of(traffic, self.nodes, self.rank)


class _Out(Transfer):
    """The way out: tokens cross to this node, and are relayed inside it."""

    phase = "dispatch"

    def __init__(self, transport: Hierarchical, relay: Relay, encoded_TB: Tensor) -> None:
        super().__init__(transport, self.phase)
        self.relay = relay
        world = transport.world_size
        rows = [relay.rows(source, relay.rank) for source in range(world)]
        self.out = encoded_TB.new_empty(sum(map(sum, rows)), encoded_TB.shape[1])
        blocks = self.out.split([sum(r) for r in rows])
        self.blocks = [block.split(sizes) for block, sizes in zip(blocks, rows, strict=True)]
        self.arrived = {
            n: encoded_TB.new_empty(sum(relay.tokens(relay.counterpart(n), relay.node)), self.out.shape[1])
            for n in relay.others
        }
        self.pieces = {
            n: rows.split(relay.tokens(relay.counterpart(n), relay.node)) for n, rows in self.arrived.items()
        }
        self.first = self._cross(encoded_TB, blocks)
        self.passed = [] if transport.groups_messages else self._receive()
        self.beside = transport.lane.start(self._pass_on)

    def _cross(self, encoded_TB: Tensor, blocks: Sequence[Tensor]) -> list[list[dist.Work]]:
        """Send to the counterparts, piece by piece, and to the ranks of this node. Returns the receives of
        each piece; those inside the node are with the last."""
        relay, message = self.relay, self.message
        tokens = {n: relay.tokens_for(n).split(relay.tokens(relay.rank, n)) for n in relay.others}
        received = []
        inside = [relay.at(p) for p in relay.peers]
        for piece in relay.pieces:
            sends, gets = [], []
            for n in relay.others:
                peer = relay.counterpart(n)
                sends.append(message(encoded_TB.index_select(0, tokens[n][piece]), peer, ACROSS, piece))
                gets.append(message(self.pieces[n][piece], peer, ACROSS, piece))
            if piece == relay.pieces[-1]:
                near = [encoded_TB.index_select(0, relay.sent_tokens[peer]) for peer in inside]
                sends += [message(rows, peer, INSIDE) for rows, peer in zip(near, inside, strict=True)]
                gets += [message(blocks[peer], peer, INSIDE) for peer in inside]
            received.append(self.post(sends, gets))
        return received

    def _places(self, piece: int) -> list[Message]:
        """The receives of the rows of a piece that other ranks relay."""
        relay = self.relay
        return [
            self.message(self.blocks[relay.nodes.rank(n, p)][piece], relay.at(p), PASSED_ON, piece, n)
            for p in relay.peers
            for n in relay.others
        ]

    def _receive(self) -> list[dist.Work]:
        return [work for piece in self.relay.pieces for work in self.post([], self._places(piece))]

    @torch.no_grad()
    def _pass_on(self) -> None:
        relay = self.relay
        marks = {n: relay.marks[n].split([len(rows) for rows in self.pieces[n]]) for n in relay.others}
        for piece, received in enumerate(self.first):
            self.wait(received)
            sends = []
            for n in relay.others:
                source = relay.counterpart(n)
                for place in range(relay.nodes.size):
                    size = relay.counts[piece][source][relay.at(place)]
                    chosen = torch.nonzero_static(marks[n][piece][:, place], size=size)[:, 0]
                    if place == relay.local:
                        torch.index_select(self.pieces[n][piece], 0, chosen, out=self.blocks[source][piece])
                        continue
                    rows = self.pieces[n][piece].index_select(0, chosen)
                    sends.append(self.message(rows, relay.at(place), PASSED_ON, piece, n))
            together = self._places(piece) if self.transport.groups_messages else []
            self.passed += self.post(sends, together)
        if self.transport.groups_messages:
            # Here, in the lane, and not once more in `finish`.
            self.wait(self.passed)
            self.passed = []

    def finish(self) -> Tensor:
        self.beside.finish()
        self.wait([*self.passed, *self.works])
        return self.out


class _Back(Transfer):
    """The way back: partial sums are added inside the node, and their sums cross to the tokens' ranks."""

    phase = "combine"

    def __init__(self, transport: Hierarchical, relay: Relay, encoded_MB: Tensor, add: Add) -> None:
        super().__init__(transport, self.phase)
        self.relay = relay
        self.add, self.encoded = add, encoded_MB
        world = transport.world_size
        rows = [relay.rows(source, relay.rank) for source in range(world)]
        blocks = encoded_MB.split([sum(r) for r in rows])
        self.mine = [block.split(sizes) for block, sizes in zip(blocks, rows, strict=True)]
        home = [
            sum(relay.rows(relay.rank, r)) if r // relay.nodes.size == relay.node
            else sum(relay.tokens(relay.rank, r // relay.nodes.size)) * (r % relay.nodes.size == 0)
            for r in range(world)
        ]  # fmt: skip
        self.out = encoded_MB.new_empty(sum(home), encoded_MB.shape[1])
        self.home = self.out.split(home)
        # Partial sums of the counterparts' tokens, by the rank here that computed them.
        self.partial: dict[tuple[int, int], Sequence[Tensor]] = {}
        for n in relay.others:
            source = relay.counterpart(n)
            for place in range(relay.nodes.size):
                sizes = relay.rows(source, relay.at(place))
                buffer = encoded_MB.new_empty(sum(sizes) * (place != relay.local), encoded_MB.shape[1])
                theirs = buffer.split(sizes) if place != relay.local else self.mine[source]
                self.partial[n, place] = theirs
        self.first = self._gather(blocks)
        self.came = [] if transport.groups_messages else self.post([], self._sums())
        self.beside = transport.lane.start(self._send_sums)

    def _gather(self, blocks: Sequence[Tensor]) -> list[list[dist.Work]]:
        """Send partial sums to the ranks of this node that brought the tokens, or own them."""
        relay, message = self.relay, self.message
        received = []
        for piece in relay.pieces:
            sends, gets = [], []
            for place in relay.peers:
                peer = relay.at(place)
                for n in relay.others:
                    source = relay.nodes.rank(n, place)
                    sends.append(message(self.mine[source][piece], peer, PASSED_ON, piece, n))
                    gets.append(message(self.partial[n, place][piece], peer, PASSED_ON, piece, n))
                if piece == relay.pieces[-1]:
                    sends.append(message(blocks[peer], peer, INSIDE))
                    gets.append(message(self.home[peer], peer, INSIDE))
            received.append(self.post(sends, gets))
        return received

    def _sums(self) -> list[Message]:
        relay, sums = self.relay, []
        for n in relay.others:
            parts = self.home[relay.nodes.rank(n, 0)].split(relay.tokens(relay.rank, n))
            sums += [
                self.message(part, relay.counterpart(n), ACROSS, piece) for piece, part in enumerate(parts)
            ]
        return sums

    @torch.no_grad()
    def _send_sums(self) -> None:
        relay = self.relay
        sizes = {n: relay.tokens(relay.counterpart(n), relay.node) for n in relay.others}
        marks = {n: relay.marks[n].split(sizes[n]) for n in relay.others}
        for piece, received in enumerate(self.first):
            self.wait(received)
            sends = []
            for n in relay.others:
                pieces = []
                for place in range(relay.nodes.size):
                    rows = self.partial[n, place][piece]
                    target = torch.nonzero_static(marks[n][piece][:, place], size=len(rows))[:, 0]
                    pieces.append((rows, target))
                summed = self.add(pieces, sizes[n][piece])
                sends.append(self.message(summed, relay.counterpart(n), ACROSS, piece))
            self.came += self.post(sends, self._sums() if self.transport.groups_messages else [])
        if self.transport.groups_messages:
            self.wait(self.came)
            self.came = []

    def finish(self) -> Tensor:
        self.beside.finish()
        self.wait([*self.came, *self.works])
        return self.out


def add_floats(pieces: Sequence[tuple[Tensor, Tensor]], num_rows: int) -> Tensor:
    """Sum rows whose bytes are float32 values; a width that is no multiple of 4 is padded."""
    width = pieces[0][0].shape[1]
    wide = -(-width // 4)
    sums = torch.zeros(num_rows, wide, dtype=torch.float32, device=pieces[0][0].device)
    for rows, target in pieces:
        padded = torch.nn.functional.pad(rows, [0, 4 * wide - width]).contiguous()
        sums.index_add_(0, target, padded.view(torch.float32).view(len(rows), wide))
    return sums.view(torch.uint8).view(num_rows, 4 * wide)[:, :width].contiguous()
