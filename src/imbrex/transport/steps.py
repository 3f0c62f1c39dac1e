"""Transfers of several steps: the rows that one step brings are relayed in the next, beside the caller.

    transfer = Stepped(transport, "dispatch", rows, [Step(send=..., receive=...), Step(..., arrange=...)])
    ...                            # a thread or a stream relays the rows
    arrived = transfer.finish()

Messages carry tags, so that several threads can have steps of several transfers under way. Collectives would
not do: gloo matches them by order, and two threads have no common order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from imbrex.runtime.words import words
from imbrex.transport.collective import Message
from imbrex.transport.tiered import Tiered


class Transfer:
    """The messages of one move of rows: posts them and waits for them."""

    def __init__(self, transport: Tiered, phase: str) -> None:
        self.transport, self.phase = transport, phase
        self.call = transport.next_call() % (1 << 12)
        self.works: list[dist.Work] = []
        self.held: list[Message] = []

    def message(self, rows: Tensor, peer: int, step: int, piece: int = 0, node: int = 0) -> Message:
        """A message whose tag is unique among those that the two ranks can have under way: bits of the call,
        the step, the piece and the node. The highest bit keeps it apart from the caller's own messages."""
        tag = 1 << 30 | self.call << 18 | step << 16 | piece % 16 << 12 | node % 4096
        return Message(rows=rows, peer=peer, tag=tag)

    def post(self, sends: Sequence[Message], receives: Sequence[Message]) -> list[dist.Work]:
        """Start messages. Returns the receives, for the caller to wait for; `finish` waits for the sends."""
        self.held += sends
        pushed, got = self.transport.post(self.phase, sends, receives)
        self.works += pushed
        return got

    def wait(self, works: Sequence[dist.Work]) -> None:
        for work in works:
            self.transport.finish(self.phase, work)


@dataclass(frozen=True, kw_only=True, slots=True)
class Step:
    """An uneven all-to-all: `send[r]` rows to rank r, `receive[r]` rows from it.

    arrange: makes the rows to send, by destination, from the rows of the step before, by source; `None` sends
        those as they are.
    """

    send: Sequence[int]
    receive: Sequence[int]
    arrange: Callable[[Tensor], Tensor] | None = None


class Stepped(Transfer):
    """Steps one after the other. The first begins at once; a lane begins the others, so no caller waits."""

    def __init__(self, transport: Tiered, phase: str, rows: Tensor, steps: Sequence[Step]) -> None:
        super().__init__(transport, phase)
        self.steps = steps
        self.arrived = [rows.new_empty(sum(step.receive), rows.shape[1]) for step in steps]
        # Receives of all steps are posted first: a fast rank's messages need not wait in gloo's buffers.
        numbers = () if transport.groups_messages else range(len(steps))
        ahead = [self.post([], self._places(number)) for number in numbers]
        first = self._send(0, rows)
        self.received = ahead or [self.post(first, self._places(0))]
        if ahead:
            self.post(first, [])
        self.beside = transport.lane.start(self._go_on)

    def _places(self, number: int) -> list[Message]:
        blocks = self.arrived[number].split(list(self.steps[number].receive))
        return [self.message(b, peer, number) for peer, b in enumerate(blocks) if peer != self.transport.rank]

    def _send(self, number: int, rows: Tensor) -> list[Message]:
        """The messages that a step sends. Rows that stay on this rank are copied."""
        step, rank = self.steps[number], self.transport.rank
        rows = rows if step.arrange is None else step.arrange(rows)
        blocks = rows.contiguous().split(list(step.send))
        self.arrived[number].split(list(step.receive))[rank].copy_(blocks[rank])
        return [self.message(block, peer, number) for peer, block in enumerate(blocks) if peer != rank]

    @torch.no_grad()
    def _go_on(self) -> None:
        together = self.transport.groups_messages
        for number in range(1, len(self.steps)):
            self.wait(self.received[number - 1])
            sends = self._send(number, self.arrived[number - 1])
            if together:
                self.received.append(self.post(sends, self._places(number)))
            else:
                self.post(sends, [])
        self.wait(self.received[-1])

    def finish(self) -> Tensor:
        self.beside.finish()
        self.wait(self.works)
        return self.arrived[-1]


def rows_sent(steps: Sequence[Step], rank: int) -> Tensor:
    """int64 [W]: rows that the steps send to every other rank."""
    sent_W = torch.stack([words(*step.send) for step in steps]).sum(0)
    sent_W[rank] = 0
    return sent_W


__all__ = ["Step", "Stepped", "Transfer", "rows_sent"]
