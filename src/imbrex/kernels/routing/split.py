"""The balanced split on a GPU: replicas from a batch's own counts, without a host synchronisation.

    shares_WS = SplitKernel(placement, device)(counts_WE)

The same integers as `imbrex.placement.split_balanced` on the CPU. The routing kernel of the NVLink exchange
has the same code inside; this one is for callers whose counts are on the device.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from imbrex.contracts import Placement
from imbrex.kernels import jit
from imbrex.kernels.routing.routed import placement_tables
from imbrex.kernels.routing.split_layout import MOST_RANKS, Split, flow_bytes

SPLIT = jit.Variant(source="routing/split.cu", entry="split_counts")
THREADS = 256


def shipped_variants() -> list[jit.Variant]:
    return [SPLIT]


class SplitKernel:
    """The split for one placement. Replays of a captured graph follow counts, and tables written anew.

    load: `jit.load`, or what stands in for it. Raises KernelError where kernels do not run, ValueError for
    more than 32 ranks.
    """

    def __init__(
        self,
        placement: Placement,
        device: torch.device,
        *,
        load: Callable[..., Any] = jit.load,
    ) -> None:
        if placement.num_ranks > MOST_RANKS:
            raise ValueError(f"split: {placement.num_ranks} ranks; the kernel splits over {MOST_RANKS}")
        self.placement = placement
        self._kernel = load(SPLIT, device)
        self._tables = placement_tables(placement, device)

    def __call__(self, counts_WE: Tensor) -> Tensor:
        """int64 [W, E], choices of every rank (or of one row for all), to int64 [W, S], on the device."""
        placement, sources = self.placement, counts_WE.shape[0]
        assert counts_WE.dtype == torch.int64
        counts_WE = counts_WE.contiguous()
        shares_WS = counts_WE.new_empty(sources, placement.num_slots)
        experts, room = placement.num_experts, max(placement.num_slots - placement.num_experts, 0)
        args = Split(
            counts=counts_WE,
            shares=shares_WS,
            first_replica=self._tables[0],
            replica_slots=self._tables[1],
            rank_offsets=self._tables[2],
            experts=experts,
            slots=placement.num_slots,
            ranks=placement.num_ranks,
            sources=sources,
            room=room,
        )
        self._kernel.launch(
            grid=1,
            block=THREADS,
            args=[args],
            smem=4 * sources * experts + flow_bytes(placement.num_ranks, sources, room),
        )
        return shares_WS
