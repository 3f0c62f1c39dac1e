"""The choice of a transport for ranks on several nodes, by a short measurement of the network."""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist

from imbrex.cost.network import Link, Load, Network, at_once, fastest
from imbrex.runtime.words import words
from imbrex.transport.alltoall import AllToAll
from imbrex.transport.collective import Collective, Message
from imbrex.transport.nodes import Nodes

SMALL, SEVERAL = 64, 16
LARGE = {"cpu": 4 << 20, "cuda": 32 << 20}
"""Bytes that a rank sends. Four MiB a rank outlast the burst that a token bucket lets through."""
TAG = 1 << 29
ALL_TO_ALLS = 5
_measured: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[Nodes, Network]] = weakref.WeakKeyDictionary()


class Auto:
    """The choice `transport="auto"`, with settings.

    profile: a file with what was measured; written by the first rank if it is not there, read by all if it
        is. Without, the network is measured once a process group.
    tokens: of a rank in a call, for the costs. ranks_per_node: as for the transports of two tiers.
    """

    def __init__(
        self,
        *,
        profile: Path | str | None = None,
        tokens: int = 4096,
        ranks_per_node: int | None = None,
    ) -> None:
        if tokens < 1:
            raise ValueError(f"transport: Auto for {tokens} tokens; give at least 1")
        self.path = None if profile is None else Path(profile)
        self.tokens, self.ranks_per_node = tokens, ranks_per_node

    def nodes(self, group: dist.ProcessGroup) -> Nodes | None:
        """The nodes of a group, `None` if they are one or do not all have as many ranks. Collective."""
        nodes = Nodes.of_ranks(Collective(group), self.ranks_per_node)
        return nodes if nodes is not None and nodes.num_nodes > 1 else None

    def pick(
        self, group: dist.ProcessGroup, nodes: Nodes, load: Load, timeout: float | None
    ) -> tuple[str, str]:
        """The transport that is predicted to be fastest, and the reason. Collective."""
        network = self.network(Collective(group, timeout=timeout), group, nodes)
        (name, seconds), (second, later), *_ = fastest(network, load)
        shape = f"{nodes.num_nodes} nodes of {nodes.size}"
        sentence = f"{1e3 * seconds:.2f} ms one way, {second} {1e3 * later:.2f}"
        return name, f"by profile, {sentence}, for {load.tokens} tokens, top-{load.top_k}, on {shape}"

    def network(self, collective: Collective, group: dist.ProcessGroup, nodes: Nodes) -> Network:
        """The network: from the file, from an earlier layer of the group, or measured. Same on every rank.
        Raises ValueError, on every rank, if the first could not write the file."""
        if self.path is not None:
            words_L = words(self.path.exists(), self.path.parent.is_dir())
            words_WL = collective.exchange_counts(words_L)
            if bool(words_WL[:, 0].min()):
                return Network.load(self.path, nodes.num_nodes, nodes.size)
            if not bool(words_WL[0, 1]):
                raise ValueError(f"transport: profile {self.path} is in no folder; make it, or give another")
        known = _measured.setdefault(group, {})
        if nodes not in known:
            known[nodes] = measure(collective, nodes)
        if self.path is not None and collective.rank == 0:
            known[nodes].save(self.path)
        return known[nodes]


def measure(collective: Collective, nodes: Nodes) -> Network:
    """Measure the links inside a node, every rank to all others at once, then between nodes, every rank to
    its counterparts. Collective. The result is the shortest of several times of the slowest rank: other work
    on a machine only adds to a time."""
    node, local = divmod(collective.rank, nodes.size)
    inside = [nodes.rank(node, place) for place in range(nodes.size) if place != local]
    across = [nodes.rank(n, local) for n in range(nodes.num_nodes) if n != node]
    near, far = _time(collective, inside), _time(collective, across)
    alone = Network(nodes=nodes.num_nodes, size=nodes.size, inside=near, across=far)
    return replace(alone, together=_crowding(collective, alone))


def _crowding(collective: Collective, network: Network) -> float:
    """The factor, at least 1, by which an all-to-all is slower than the network predicts for its messages."""
    if collective.world_size == 1:
        return 1.0
    each, world = max(1, LARGE[collective.device.type] // collective.world_size), collective.world_size
    rows = torch.zeros(world, each, dtype=torch.uint8, device=collective.device)
    transport = AllToAll(collective.group, timeout=collective.timeout_s)

    def exchange() -> None:
        transport.scatter_rows("plan", rows, [1] * world, [1] * world).finish()

    seconds = _slowest([_seconds(collective, exchange) for _ in range(ALL_TO_ALLS + 1)][1:], collective)
    return max(1.0, seconds / max(at_once(network, each), 1e-9))


def _time(collective: Collective, peers: Sequence[int]) -> Link:
    if not peers:
        return Link(start=0.0, per_byte=0.0)
    few, number = len(peers), SEVERAL * len(peers)
    # The bytes are divided among the peers, since a link carries all that a rank sends.
    large = few * max(1, LARGE[collective.device.type] // few)
    return Link.through(
        (few, few * SMALL, _shortest(collective, peers, 1, SMALL, 10)),
        (number, number * SMALL, _shortest(collective, peers, SEVERAL, SMALL, 5)),
        (few, large, _shortest(collective, peers, 1, large // few, 4)),
    )


def _shortest(collective: Collective, peers: Sequence[int], number: int, nbytes: int, repeats: int) -> float:
    """Seconds that `number` messages of `nbytes` to and from every peer take, the shortest of `repeats`."""
    rows = torch.zeros(2, len(peers), number, nbytes, dtype=torch.uint8, device=collective.device)
    times = [_seconds(collective, lambda: _exchange(collective, peers, rows)) for _ in range(repeats + 1)]
    return _slowest(times[1:], collective)


def _slowest(times: Sequence[float], collective: Collective) -> float:
    """The shortest of several times, each that of the slowest rank."""
    times_WR = collective.exchange_counts(words(*(int(1e9 * seconds) for seconds in times)))
    return 1e-9 * int(times_WR.max(0).values.min())


def _seconds(collective: Collective, call: Callable[[], None]) -> float:
    """Seconds of a call that all ranks begin together."""
    collective.exchange_counts(words(0))
    begin = time.perf_counter()
    call()
    if collective.device.type == "cuda":
        # host sync: a measurement, once a process group
        torch.cuda.synchronize(collective.device)
    return time.perf_counter() - begin


def _exchange(collective: Collective, peers: Sequence[int], rows: torch.Tensor) -> None:
    """Messages to and from every peer."""
    sides = [
        [
            Message(rows=side[i, number], peer=peer, tag=TAG + number)
            for i, peer in enumerate(peers)
            for number in range(rows.shape[2])
        ]
        for side in rows
    ]
    pushed, got = collective.post("plan", sides[0], sides[1])
    for work in (*got, *pushed):
        collective.finish("plan", work)


__all__ = ["Auto", "measure"]
