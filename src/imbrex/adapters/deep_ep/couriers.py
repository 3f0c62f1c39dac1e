"""Which courier carries the rows of a buffer, and rows by whichever it is."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from imbrex.adapters.deep_ep.courier import Courier, Route
from imbrex.adapters.deep_ep.nvlink_courier import Link, NvlinkCourier
from imbrex.contracts import Backend
from imbrex.transport import Nvlink


def open_courier(
    who: str, group: dist.ProcessGroup | None, transport: str | Backend
) -> Courier | NvlinkCourier:
    """transport: `auto` is NVLink where its kernels can run for this group, else `alltoall`. Collective."""
    if transport == "auto":
        transport = "alltoall" if group is None else Nvlink.of_or_reason(group)[0] or "alltoall"
    kernels = transport == "nvlink" or isinstance(transport, Nvlink)
    return (NvlinkCourier if kernels else Courier)(who, group, transport)


def carry(courier: Courier | NvlinkCourier, columns: Sequence[Tensor], route: Route | Link) -> list[Tensor]:
    """Columns of a token to columns of compact rows."""
    if isinstance(route, Link):
        assert isinstance(courier, NvlinkCourier)
        return courier.carry(columns, route)
    assert isinstance(courier, Courier)
    return courier.carry(columns, route)


def bring_home(
    courier: Courier | NvlinkCourier,
    columns: Sequence[Tensor],
    dtypes: Sequence[torch.dtype],
    route: Route | Link,
    *,
    rounded: bool,
) -> list[Tensor]:
    """Columns of compact rows summed over a token's ranks."""
    if isinstance(route, Link):
        assert isinstance(courier, NvlinkCourier)
        return courier.bring_home(columns, route, rounded=rounded)
    assert isinstance(courier, Courier)
    return courier.bring_home(columns, dtypes, route, rounded=rounded)
