"""The common base of transports over torch.distributed: a group, bounded waits, the exchange of counts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from threading import Lock

import torch
import torch.distributed as dist
from torch import Tensor

from imbrex.runtime import roll, waits


@dataclass(frozen=True, kw_only=True, slots=True)
class Message:
    """Rows from or to one rank of the group. tag: tells messages between the same two ranks apart."""

    rows: Tensor
    peer: int
    tag: int


class Collective:
    """A process group, with bounded waits. `group=None` is a group of one, which never communicates.

    device: the device of rows. message_device: the device that the group's own collectives need.
    """

    name = "collective"
    replicated = False

    def __init__(self, group: dist.ProcessGroup | None, *, timeout: float | None = None) -> None:
        self.group = group
        if group is not None:
            roll.will_tell(group)
        self.timeout_s = waits.timeout_seconds(timeout)
        self.rank = 0 if group is None else dist.get_rank(group)
        self.world_size = 1 if group is None else dist.get_world_size(group)
        self.device = self.message_device = torch.device("cpu") if group is None else device_of(group)
        self._under_way: dict[dist.Work, tuple[object, int, int]] = {}
        # A lane's thread starts messages while the caller's thread finishes others.
        self._noting = Lock()

    def exchange_counts(self, message: Tensor) -> Tensor:
        """int64 [L] of this rank to int64 [W, L] of all ranks, on the host."""
        if self.world_size == 1:
            # host sync: the counts decide the sizes of what follows
            return message.cpu()[None]
        own = message.to(self.message_device)
        gathered = own.new_empty(self.world_size * own.numel())
        work = self.start("plan", lambda: waits.all_gather_single(gathered, own, self.group, async_op=True))
        self.finish("plan", work)
        # host sync: the counts decide the sizes of what follows
        counts = gathered.view(self.world_size, -1).cpu()
        waits.refuse_lost(self.group)
        return counts

    @property
    def groups_messages(self) -> bool:
        """Whether messages that may be under way together must be posted together, as NCCL requires."""
        return self.message_device.type == "cuda"

    def post(
        self, phase: str, sends: Sequence[Message], receives: Sequence[Message]
    ) -> tuple[list[dist.Work], list[dist.Work]]:
        """Start messages, except empty ones, which both sides skip. gloo matches messages by tag, in any
        order; NCCL by order alone. Returns the works to wait for, of sends and of receives."""
        sends, receives = ([m for m in side if m.rows.numel()] for side in (sends, receives))
        if not self.groups_messages:
            got = [self._start(phase, dist.irecv, m) for m in receives]
            return [self._start(phase, dist.isend, m) for m in sends], got
        sides = (dist.isend, sends), (dist.irecv, receives)
        ops = [
            dist.P2POp(op, m.rows, group=self.group, group_peer=m.peer) for op, side in sides for m in side
        ]
        if not ops:
            return [], []
        works: list[dist.Work] = []
        self.start(phase, lambda: works.extend(dist.batch_isend_irecv(ops)))
        return [], works

    def _start(self, phase: str, op: Callable[..., dist.Work | None], m: Message) -> dist.Work:
        peer = {"group_dst" if op is dist.isend else "group_src": m.peer}
        work = self.start(phase, lambda: op(m.rows, group=self.group, tag=m.tag, **peer))
        assert work is not None
        with self._noting:
            self._under_way[work] = op, m.peer, m.tag
        return work

    def start(self, phase: str, begin: Callable[[], dist.Work | None]) -> dist.Work | None:
        return waits.start(phase, begin, self.timeout_s, self.group)

    def finish(self, phase: str, work: dist.Work | None) -> None:
        on_host = self.message_device.type == "cpu"
        waits.finish(phase, work, self.timeout_s, on_host=on_host, group=self.group)
        if work in self._under_way:
            with self._noting:
                self._forget(work)

    def _forget(self, work: dist.Work) -> None:
        """Release a finished message, and earlier ones of its kind, which are finished too though nobody has
        waited for them, for example after an exception. Until then they must be kept: gloo stops reading from
        a peer if a message comes for a receive that was released."""
        kind = self._under_way[work]
        for before in [other for other, its in self._under_way.items() if its == kind]:
            del self._under_way[before]
            if before is work:
                return


class Done:
    """A move that has finished."""

    def __init__(self, rows: Tensor) -> None:
        self.rows = rows

    def finish(self) -> Tensor:
        return self.rows


class InFlight:
    """A collective under way. Keeps the memory that it reads until it has finished."""

    def __init__(
        self,
        transport: Collective,
        phase: str,
        work: dist.Work | None,
        rows: Tensor,
        reads: Tensor,
        select: Callable[[Tensor], Tensor] | None = None,
    ) -> None:
        self.transport, self.phase, self.work, self.rows = transport, phase, work, rows
        self.reads: Tensor | None = reads
        self.select = select

    def finish(self) -> Tensor:
        self.transport.finish(self.phase, self.work)
        self.reads = None
        return self.rows if self.select is None else self.select(self.rows)


class Posted:
    """Messages under way. Keeps the memory that they read until they have finished."""

    def __init__(
        self, transport: Collective, phase: str, works: Sequence[dist.Work], rows: Tensor, reads: Tensor
    ) -> None:
        self.transport, self.phase, self.works, self.rows = transport, phase, works, rows
        self.reads: Tensor | None = reads

    def finish(self) -> Tensor:
        for work in self.works:
            self.transport.finish(self.phase, work)
        self.reads = None
        return self.rows


def device_of(group: dist.ProcessGroup) -> torch.device:
    """The device on which a group communicates: the current GPU if its back end is NCCL, else the CPU."""
    if "nccl" in str(dist.get_backend(group)) and torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")
