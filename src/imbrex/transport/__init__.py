"""How rows move. A new transport is one file that keeps the `Transport` contract, and one line below."""

from __future__ import annotations

from collections.abc import Callable

import torch.distributed as dist

from imbrex.contracts import Transport
from imbrex.transport.allgather import AllGather
from imbrex.transport.allreduce import AllReduce
from imbrex.transport.alltoall import AllToAll
from imbrex.transport.hierarchical import Hierarchical
from imbrex.transport.leader import Leader
from imbrex.transport.nvlink import Nvlink
from imbrex.transport.pipe import Pipe, Sequential
from imbrex.transport.twolevel import TwoLevel
from imbrex.waiting import RankLostError

TRANSPORTS: dict[str, Callable[..., Transport]] = {
    "alltoall": AllToAll,
    "allgather": AllGather,
    "allreduce": AllReduce,
    "nvlink": Nvlink.of,
    "1dh": Leader,
    "2dh": TwoLevel,
    "pipe": Pipe,
    "sequential": Sequential,
    "hierarchical": Hierarchical,
}

BROADCAST_FROM = 0.8
"""Share of ranks a token wants from which sending it to all of them costs less than sorting out which."""


def pick(name: str, *, num_ranks: int, top_k: int) -> tuple[str, str]:
    """The transport for `name` and why. `auto` never picks `allreduce`: only the user knows that the tokens
    are the same on every rank."""
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
    transport: str | Transport,
    group: dist.ProcessGroup | None,
    *,
    num_ranks: int,
    top_k: int,
    timeout: float | None = None,
    not_nvlink: str | None = None,
) -> tuple[Transport, str]:
    """The transport, built on `group`, and the reason for the choice.

    not_nvlink: why `auto` may not pick `nvlink`, where it may not.
    """
    if not isinstance(transport, str):
        return transport, "given by the caller"
    name, reason = pick(transport, num_ranks=num_ranks, top_k=top_k)
    if transport == "auto" and group is not None and dist.get_world_size(group) > 1:
        found = not_nvlink or Nvlink.of_or_reason(group, timeout=timeout)
        if isinstance(found, Nvlink):
            return found, "bfloat16 tokens on GPUs of one host that reach each other's memory"
        reason = f"{reason}; not nvlink: {found}"
    return TRANSPORTS[name](group, timeout=timeout), reason


__all__ = [
    "TRANSPORTS",
    "AllGather",
    "AllReduce",
    "AllToAll",
    "Hierarchical",
    "Leader",
    "Nvlink",
    "Pipe",
    "RankLostError",
    "Sequential",
    "TwoLevel",
    "make",
    "pick",
]
