"""The number of connections of NCCL's sockets, which limits its bandwidth on a network without RDMA.

Between two ranks NCCL has one connection and one thread for it, but on the clouds that it knows. Two H200 as
two nodes moved 58.6 MB each way in 38 ms with that, in 17 with four threads of four connections each. NCCL
reads the numbers once a process, before its first communicator, and for all groups alike.
"""

from __future__ import annotations

import os

import torch.distributed as dist

WIDE = {"NCCL_SOCKET_NTHREADS": "4", "NCCL_NSOCKS_PERTHREAD": "4"}
"""Threads, and connections a thread. NCCL allows at most 16 threads and 64 connections in all."""


def widen() -> str | None:
    """Have NCCL open as many connections and threads as `WIDE` says, for all groups of this process; why not,
    or `None`.

    To be called before `torch.distributed.init_process_group`. What the environment says stands.
    """
    own = _in_environment()
    if own:
        return f"the environment says {own}"
    if dist.is_initialized():
        return "there are groups already, and NCCL may have read its numbers; call it before the first"
    os.environ.update(WIDE)
    return None


def remark(backend: str, num_nodes: int) -> str:
    """The end of the reason for a transport between nodes: how many connections NCCL is told to open."""
    if "nccl" not in backend or num_nodes == 1:
        return ""
    own = _in_environment()
    if own:
        return f"; NCCL's sockets, if it uses them, as the environment says: {own}"
    return (
        "; NCCL's sockets, if it uses them, have one connection: imbrex.transport.sockets.widen() before "
        "init_process_group gives them 16"
    )


def _in_environment() -> str:
    return " ".join(f"{name}={os.environ[name]}" for name in WIDE if name in os.environ)


__all__ = ["WIDE", "remark", "widen"]
