"""The choice of a buffer's backend."""

from __future__ import annotations

import torch.distributed as dist

from imbrex import contracts
from imbrex.adapters.deep_ep.backend import Backend
from imbrex.adapters.deep_ep.bytes import BytesBackend
from imbrex.adapters.deep_ep.nvlink import NvlinkBackend
from imbrex.transport import Nvlink


def open_backend(who: str, group: dist.ProcessGroup | None, transport: str | contracts.Backend) -> Backend:
    """Opens the way of the rows. transport: `auto` is NVLink where its kernels can run for this group, also
    one of gloo whose ranks all use a GPU, else `alltoall`. Collective. Raises ValueError for a group without
    this rank."""
    if group is not None and not isinstance(group, dist.ProcessGroup):
        raise ValueError(f"{who}: group is {group!r}; give a process group that this rank is in")
    if transport == "auto":
        link = None if group is None else Nvlink.of_or_reason(group, from_cpus=True)[0]
        transport = link or "alltoall"
    kernels = transport == "nvlink" or isinstance(transport, Nvlink)
    return (NvlinkBackend if kernels else BytesBackend)(who, group, transport)
