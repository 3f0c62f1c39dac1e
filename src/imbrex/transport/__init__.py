"""Transports: how rows move between ranks. A new one is a file that implements the `Transport` contract, and
a line in `TRANSPORTS`."""

from __future__ import annotations

from collections.abc import Callable

import torch.distributed as dist

from imbrex.contracts import Backend
from imbrex.cost import Load
from imbrex.runtime import checks
from imbrex.runtime.waits import RankLostError
from imbrex.runtime.words import words
from imbrex.transport import nvlink, sockets
from imbrex.transport.allgather import AllGather
from imbrex.transport.allreduce import AllReduce
from imbrex.transport.alltoall import AllToAll
from imbrex.transport.auto import Auto
from imbrex.transport.base import BytesTransport
from imbrex.transport.hierarchical import Hierarchical
from imbrex.transport.leader import Leader
from imbrex.transport.nvlink import Nvlink
from imbrex.transport.pipe import Pipe, Sequential
from imbrex.transport.tiers import Tiers
from imbrex.transport.twolevel import TwoLevel

TRANSPORTS: dict[str, Callable[..., Backend]] = {
    "alltoall": AllToAll,
    "allgather": AllGather,
    "allreduce": AllReduce,
    "nvlink": Nvlink.of,
    "1dh": Leader,
    "2dh": TwoLevel,
    "pipe": Pipe,
    "sequential": Sequential,
    "hierarchical": Hierarchical,
    "tiered": Tiers,
}
"""Makers of the backends, by name: transports, `Nvlink` and `Tiers`."""

TWO_TIERS = ("1dh", "2dh", "pipe", "sequential", "hierarchical", "tiered")

BROADCAST_FROM = 0.8
"""If a token goes to at least this share of the ranks, sending it to all of them is cheaper."""


def pick(name: str, *, num_ranks: int, top_k: int) -> tuple[str, str]:
    """The name of the transport for `name`, and the reason. `auto` never picks `allreduce`: only the user
    knows that the tokens are the same on every rank."""
    if name != "auto":
        if name not in TRANSPORTS:
            known = ", ".join(TRANSPORTS)
            raise ValueError(f"transport: {name!r} is not known; use auto, {known}, or a Transport object")
        return name, "asked for"
    if num_ranks == 1:
        return "alltoall", "one rank: nothing to move"
    share = 1 - (1 - 1 / num_ranks) ** top_k
    if share >= BROADCAST_FROM:
        return "allgather", f"a token wants {share:.0%} of the ranks at top-{top_k} on {num_ranks}"
    return "alltoall", f"a token wants only {share:.0%} of the ranks at top-{top_k} on {num_ranks}"


def make(
    transport: str | Backend | Auto,
    group: dist.ProcessGroup | None,
    *,
    num_ranks: int,
    top_k: int,
    timeout: float | None = None,
    not_nvlink: str | None = None,
    row_bytes: int = 8192,
) -> tuple[Backend, str]:
    """The backend, built on `group`, and the reason for the choice.

    not_nvlink: why `auto` may not pick `nvlink`; `None` if it may. row_bytes: bytes of a row, to estimate the
    costs of transports on several nodes.
    """
    automatic = Auto() if isinstance(transport, str) and transport == "auto" else transport
    if not isinstance(automatic, str | Auto):
        return checks.piece("transport", automatic), "given by the caller"
    chosen = automatic if isinstance(automatic, Auto) else None
    name, reason = pick("auto" if chosen else str(transport), num_ranks=num_ranks, top_k=top_k)
    if chosen is not None and num_ranks == 1 and group is not None and dist.get_world_size(group) > 1:
        reason = "all are tensor ranks of one, and every token goes to all of them"
    if chosen is None or group is None or dist.get_world_size(group) == 1:
        if name != Tiers.name:
            return TRANSPORTS[name](group, timeout=timeout), reason
        tiers = Tiers(group, timeout=timeout, not_nvlink=not_nvlink)
        about_sockets = (
            "" if group is None else sockets.remark(str(dist.get_backend(group)), tiers.nodes.num_nodes)
        )
        return tiers, reason + about_sockets
    nodes = chosen.nodes(group)
    why_not = not_nvlink
    if why_not is None:
        nvlink, why_not = Nvlink.of_or_reason(group, timeout=timeout)
        if nvlink is not None:
            return nvlink, "bfloat16 tokens on GPUs of one host that reach each other's memory"
    # On CPUs nobody expects NVLink.
    missed = f"; not nvlink: {why_not}" if "nccl" in str(dist.get_backend(group)) else ""
    if nodes is None:
        return TRANSPORTS[name](group, timeout=timeout), reason + missed
    load = Load(tokens=chosen.tokens, row_bytes=row_bytes, top_k=top_k)
    name, reason = chosen.pick(group, nodes, load, timeout)
    more = {"ranks_per_node": nodes.size} if name in TWO_TIERS else {}
    return TRANSPORTS[name](group, timeout=timeout, **more), reason + missed


__all__ = [
    "TRANSPORTS",
    "AllGather",
    "AllReduce",
    "AllToAll",
    "Auto",
    "BytesTransport",
    "Hierarchical",
    "Leader",
    "Nvlink",
    "Pipe",
    "RankLostError",
    "Sequential",
    "Tiers",
    "TwoLevel",
    "make",
    "nvlink",
    "pick",
    "words",
]
