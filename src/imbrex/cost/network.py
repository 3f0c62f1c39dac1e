"""Predicts the time of an exchange on a network of two tiers, with one model for each transport.

A rank sends T tokens of B bytes, each to k experts that are spread evenly over N nodes of M ranks. A token
goes to a given rank with probability p = 1 - (1 - 1/(N M))^k, and to a given node with q = 1 - (1 - 1/N)^k. A
message takes `start` seconds, and `per_byte` for each byte, after the network's latency. These are measured
with all ranks sending at once, so they include what ranks of a node share.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path


@dataclass(frozen=True, kw_only=True, slots=True)
class Link:
    """The times of one tier.

    latency: seconds until the first byte arrives. start: seconds of every further message. per_byte: seconds
    per byte of a rank, if all ranks send.
    """

    start: float
    per_byte: float
    latency: float = 0.0

    @staticmethod
    def through(
        one: tuple[int, float, float], several: tuple[int, float, float], large: tuple[int, float, float]
    ) -> Link:
        """Fit a link to three measurements (messages, bytes, seconds): one message, several, and many
        bytes."""
        start = max(0.0, (several[2] - one[2]) / (several[0] - one[0]))
        rest = large[2] - one[2] - (large[0] - one[0]) * start
        per_byte = max(0.0, rest / (large[1] - one[1]))
        return Link(start=start, per_byte=per_byte, latency=max(0.0, one[2] - one[0] * start))

    def __call__(self, messages: float, nbytes: float) -> float:
        return (self.latency if messages else 0.0) + messages * self.start + nbytes * self.per_byte


@dataclass(frozen=True, kw_only=True, slots=True)
class Network:
    """The measured links of `nodes` nodes of `size` ranks: inside a node, and between nodes.

    together: how many times longer the library's all-to-all takes than its messages alone, because all ranks'
    messages meet in the ports. Over gloo and four nodes it is 1.0; gloo's own all-to-all takes 1.3.
    """

    nodes: int
    size: int
    inside: Link
    across: Link
    together: float = 1.0

    def save(self, path: Path | str) -> None:
        Path(path).write_text(json.dumps(asdict(self), indent=1) + "\n", encoding="utf-8")

    @staticmethod
    def load(path: Path | str, nodes: int, size: int) -> Network:
        """Read a measurement. Raises ValueError if the file is none, or is of a group of another shape."""
        try:
            read = json.loads(Path(path).read_text(encoding="utf-8"))
            inside, across = Link(**read["inside"]), Link(**read["across"])
            network = Network(
                nodes=read["nodes"],
                size=read["size"],
                inside=inside,
                across=across,
                together=read.get("together", 1.0),
            )
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(
                f"transport: {path} holds no measurement of a network ({error!r}); remove it"
            ) from None
        if (network.nodes, network.size) != (nodes, size):
            raise ValueError(
                f"transport: {path} was measured on {network.nodes} nodes of {network.size} ranks, these are "
                f"{nodes} of {size}; give another file"
            )
        return network


@dataclass(frozen=True, kw_only=True, slots=True)
class Load:
    """The exchange of a rank: its tokens, the bytes of a row, and the choices of a token."""

    tokens: int
    row_bytes: int
    top_k: int


def rows(network: Network, load: Load) -> tuple[float, float]:
    """The bytes that a rank has for another rank, and for another node if each token goes there once."""
    ranks, nodes = network.nodes * network.size, network.nodes
    every = load.tokens * load.row_bytes
    to_rank = every * (1 - (1 - 1 / ranks) ** load.top_k)
    return to_rank, every * (1 - (1 - 1 / nodes) ** load.top_k)


def alltoall(network: Network, load: Load) -> float:
    """The seconds if all messages are sent at once: those of the slower tier (ScheMoE, Eq. 16)."""
    return network.together * at_once(network, rows(network, load)[0])


def allgather(network: Network, load: Load) -> float:
    """The seconds if every token goes to every rank, with all messages sent at once."""
    return at_once(network, load.tokens * load.row_bytes)


def pipe(network: Network, load: Load) -> float:
    """The seconds of `alltoall`, and of one more message to start."""
    return network.together * at_once(network, rows(network, load)[0]) + network.inside.start


def sequential(network: Network, load: Load) -> float:
    """The seconds of one tier after the other (Eq. 17)."""
    return sum(_direct(network, rows(network, load)[0]))


def two_level(network: Network, load: Load) -> float:
    """The seconds of 2DH: first all rows inside the node, then between ranks of the same place in their
    nodes."""
    first, n, m = rows(network, load)[0], network.nodes, network.size
    return network.inside(m - 1, (m - 1) * n * first) + network.across(n - 1, (n - 1) * m * first)


def leader(network: Network, load: Load) -> float:
    """The seconds of 1DH: through the first rank of the node, whose link carries all rows of the node in and
    out."""
    first, n, m = rows(network, load)[0], network.nodes, network.size
    inside = network.inside(m - 1, (m - 1) * n * m * first)
    # One sender a node does not share its link with the others.
    return 2 * inside + network.across(n - 1, (n - 1) * m * first)


def hierarchical(network: Network, load: Load, pieces: int = 4) -> float:
    """The seconds if a row goes once to a node, and on to its ranks, in pieces: those of the slower tier, and
    of one piece on the other."""
    (first, once), n, m = rows(network, load), network.nodes, network.size
    across = network.across(pieces * (n - 1), (n - 1) * once)
    inside = network.inside((1 + pieces * (n - 1)) * (m - 1), n * (m - 1) * first)
    return max(across, inside) + min(across, inside) / pieces


def at_once(network: Network, one: float) -> float:
    """The seconds of messages of `one` bytes to every other rank, sent at the same time."""
    return max(_direct(network, one))


def _direct(network: Network, one: float) -> tuple[float, float]:
    """Seconds inside and between nodes with `one` bytes for every other rank."""
    near, far = network.size - 1, (network.nodes - 1) * network.size
    return network.inside(near, near * one), network.across(far, far * one)


COSTS: Mapping[str, Callable[[Network, Load], float]] = {
    "alltoall": alltoall,
    "allgather": allgather,
    "pipe": pipe,
    "sequential": sequential,
    "1dh": leader,
    "2dh": two_level,
    "hierarchical": hierarchical,
}
"""Predicted seconds of moving rows to the experts, which are also those of moving them back, by name of the
transport."""


ALIKE = 1.02
"""Predictions up to so many times the least are not told apart: a measurement varies more."""


def fastest(network: Network, load: Load) -> list[tuple[str, float]]:
    """The transports in the order of their predicted seconds, but first the simplest of those that are not
    told apart from the fastest."""
    seconds = {name: cost(network, load) for name, cost in COSTS.items()}
    least = min(seconds.values())
    simplest = next(name for name in seconds if seconds[name] <= ALIKE * least)
    return sorted(seconds.items(), key=lambda pair: (pair[0] != simplest, pair[1]))
