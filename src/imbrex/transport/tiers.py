"""The backend of `tiered`: ranks in two tiers, inside a node and across nodes, between which rows move
separately.

The tier across nodes connects a rank with its counterparts, the ranks at the same place in other nodes.
`imbrex.exchange.tiered` moves rows over it first, then inside the node. Messages between two ranks have tags,
so messages of several chunks and of both tiers can be under way at the same time, over one process group.

NCCL does one thing at a time for a group. Kernels over NVLink inside a node do not depend on it.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import torch
import torch.distributed as dist
from torch import Tensor

from imbrex.contracts import Pending
from imbrex.runtime import waits
from imbrex.runtime.streams import Lane
from imbrex.runtime.words import words
from imbrex.transport.alltoall import AllToAll
from imbrex.transport.collective import Collective, Done, Message
from imbrex.transport.groups import group_beside
from imbrex.transport.nodes import Nodes
from imbrex.transport.nvlink import Nvlink

ACROSS, INSIDE, WORDS = 0, 1, 2
"""The tiers in messages' tags: rows between nodes, rows inside a node, and numbers inside a node."""
INSIDES = ("auto", "alltoall", "nvlink")


@dataclass(kw_only=True, slots=True)
class _Shared:
    """State that all layers of a group share: the numbers of messages by tier, and a lane that does one work
    after the other, so that messages are numbered in the order of the calls.

    lost: how a wait failed, if one has. After that no messages are numbered: later ones would match other
    messages of the peers, and gloo ends a process whose receive is too small for what arrives.
    """

    lane: Lane
    calls: tuple[Iterator[int], ...] = field(default_factory=lambda: tuple(itertools.count() for _ in "123"))
    node: dist.ProcessGroup | None = None
    lost: str = ""


_shared: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[int, _Shared]] = weakref.WeakKeyDictionary()
"""The shared state, by group and number of ranks in a node."""


class Flight:
    """An uneven all-to-all by messages. The caller's thread creates it, which numbers it and posts its
    receives; `send` may be called later on another thread."""

    def __init__(self, members: Members, phase: str, tier: int, out: Tensor, receive: Sequence[int]) -> None:
        self.members, self.phase, self.out = members, phase, out
        call = members.number(tier) % (1 << 12)
        # The highest bit keeps it apart from the caller's own messages, the low ones from `steps.Transfer`'s.
        self.tag = 1 << 30 | call << 18 | tier << 16 | 0xFFFF
        self.places = self._messages(out, receive)
        self.held: list[Tensor] = []
        self.sent: list[dist.Work] = []
        self.came = [] if members.groups_messages else members.post(phase, [], self.places)[1]

    def _messages(self, rows: Tensor, sizes: Sequence[int]) -> list[Message]:
        blocks, rank = rows.split(list(sizes)), self.members.rank
        return [Message(rows=b, peer=p, tag=self.tag) for p, b in enumerate(blocks) if p != rank]

    def send(self, rows: Tensor, send: Sequence[int]) -> Flight:
        """Start sending rows, which are ordered by destination, `send[r]` of them to member r."""
        rows = rows.contiguous()
        self.held.append(rows)
        places = self.places if self.members.groups_messages else []
        self.sent, came = self.members.post(self.phase, self._messages(rows, send), places)
        self.came += came
        return self

    def wait(self) -> Tensor:
        """Wait for the rows that arrive, and return them. Call it once. On a GPU only the current stream
        waits."""
        came, self.came = self.came, []
        for work in came:
            self.members.finish(self.phase, work)
        return self.out

    def finish(self) -> Tensor:
        """Wait for the rows that arrive and for those that are sent. Returns the rows that arrived."""
        self.wait()
        for work in self.sent:
            self.members.finish(self.phase, work)
        self.held.clear()
        return self.out


class Members(AllToAll):
    """A transport between some ranks of a group; member r is rank `ranks[r]` of the group."""

    few_bytes = 0

    def __init__(self, whole: Collective, ranks: Sequence[int], shared: _Shared) -> None:
        super().__init__(whole.group, timeout=whole.timeout_s)
        self.ranks, self.shared = tuple(ranks), shared
        self.rank, self.world_size = self.ranks.index(whole.rank), len(self.ranks)

    def post(
        self, phase: str, sends: Sequence[Message], receives: Sequence[Message]
    ) -> tuple[list[dist.Work], list[dist.Work]]:
        sides = ([replace(m, peer=self.ranks[m.peer]) for m in side] for side in (sends, receives))
        return super().post(phase, *sides)

    def number(self, tier: int) -> int:
        """The number of the next message. Raises RankLostError once a wait of the group has failed."""
        if self.shared.lost:
            raise waits.RankLostError(self.shared.lost)
        return next(self.shared.calls[tier])

    def start(self, phase: str, begin: Callable[[], dist.Work | None]) -> dist.Work | None:
        with self._noting_loss():
            return super().start(phase, begin)

    def finish(self, phase: str, work: dist.Work | None) -> None:
        with self._noting_loss():
            super().finish(phase, work)

    @contextmanager
    def _noting_loss(self) -> Iterator[None]:
        try:
            yield
        except waits.RankLostError as error:
            self.shared.lost = str(error)
            raise

    def exchange_counts(self, message: Tensor) -> Tensor:
        if self.world_size == 1:
            return super().exchange_counts(message)
        own = message.to(self.message_device).contiguous().view(torch.uint8)[None]
        out = own.new_empty(self.world_size, own.shape[1])
        out[self.rank] = own[0]
        each = [1] * self.world_size
        flight = Flight(self, "plan", WORDS, out, each)
        flight.send(own.expand(self.world_size, -1), each).finish()
        # host sync: the counts decide the sizes of what follows
        counts = out.view(torch.int64).cpu()
        waits.refuse_lost(self.group)
        return counts

    def scatter_rows(self, phase: str, rows: Tensor, send: Sequence[int], receive: Sequence[int]) -> Pending:
        return (
            Done(rows) if self.world_size == 1 else self.begin(INSIDE, phase, rows, receive).send(rows, send)
        )

    def begin(self, tier: int, phase: str, like: Tensor, receive: Sequence[int]) -> Flight:
        """Start a flight with memory for rows as wide as `like`, `receive[r]` of them from member r."""
        return Flight(self, phase, tier, like.new_empty(sum(receive), like.shape[1]), receive)


class Tiers(Collective):
    """Two tiers of ranks: nodes of equally many neighbouring ranks, to each of which a row crosses once.

    ranks_per_node: the size of a node, if the launcher does not say it.
    inside: how rows move in a node: `nvlink` by kernels, for bfloat16 tokens on GPUs; `alltoall` as bytes;
    `auto` by kernels if `not_nvlink` is None and the GPUs can, otherwise as bytes.
    """

    name = "tiered"
    broadcasts, relays = False, True

    def __init__(
        self,
        group: dist.ProcessGroup | None,
        *,
        ranks_per_node: int | None = None,
        inside: str = "auto",
        timeout: float | None = None,
        not_nvlink: str | None = "nobody said that tokens are bfloat16",
    ) -> None:
        super().__init__(group, timeout=timeout)
        if inside not in INSIDES:
            raise ValueError(f"transport: inside={inside!r} is not known; use one of {', '.join(INSIDES)}")
        nodes = Nodes.of_ranks(self, ranks_per_node)
        if nodes is None:
            raise ValueError(
                "transport: tiered needs nodes of equally many neighbouring ranks, which this group's are "
                "not; give ranks_per_node=, or use transport='alltoall'"
            )
        self.nodes, self.ranks_per_node = nodes, nodes.size
        self.node, self.place = divmod(self.rank, nodes.size)
        shared = self._meet()
        self.lane = shared.lane
        self.rail = Members(self, [nodes.rank(n, self.place) for n in range(nodes.num_nodes)], shared)
        self.bytes_inside = Members(self, [nodes.rank(self.node, p) for p in range(nodes.size)], shared)
        self.kernels = self._kernels(shared, inside, not_nvlink)

    def _meet(self) -> _Shared:
        if self.group is None:
            return _Shared(lane=Lane(self.device, 1))
        by_size = _shared.setdefault(self.group, {})
        if self.nodes.size not in by_size:
            by_size[self.nodes.size] = _Shared(lane=Lane(self.device, 1))
        return by_size[self.nodes.size]

    def _kernels(self, shared: _Shared, inside: str, not_nvlink: str | None) -> Nvlink | None:
        """The kernels inside the node: on all nodes, or on none."""
        settings = words(INSIDES.index(inside), not_nvlink is None)
        if (self.exchange_counts(settings) != settings).any():
            raise ValueError(
                f"transport: ranks disagree about inside= (here {inside!r}) or the dtype; give every rank "
                "of the group the same"
            )
        if inside == "alltoall" or (inside == "auto" and not_nvlink is not None):
            return None
        kernels, reason = None, "a node has one rank"
        if self.nodes.size > 1:
            kernels, reason = Nvlink.of_or_reason(self._group_of_node(shared), timeout=self.timeout_s)
        if not self.exchange_counts(words(kernels is None)).any():
            return kernels
        if inside == "nvlink":
            raise ValueError(
                f"transport: inside='nvlink' does not work here: {reason or 'another node cannot'}; use "
                "inside='alltoall'"
            )
        return None

    def _group_of_node(self, shared: _Shared) -> dist.ProcessGroup:
        """Where the kernels' heap is met. Collective at its first call."""
        # One that was destroyed is not in torch's map any more.
        if shared.node is None or shared.node not in dist.distributed_c10d._world.pg_map:
            assert self.group is not None
            shared.node = group_beside(self.group, ranks=self.bytes_inside.ranks)
        return shared.node


__all__ = ["ACROSS", "INSIDE", "Flight", "Members", "Tiers"]
