"""The balanced split on a GPU: replicas from a batch's own counts, without a host synchronisation.

    shares_WS = SplitKernel(placement, device)(counts_WE)

The same integers as `imbrex.placement.split_balanced` on the CPU. The routing kernel of the NVLink exchange
has the same code inside; this one is for callers whose counts are on the device.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from imbrex.contracts import Placement
from imbrex.kernels import jit
from imbrex.kernels.routed import placement_tables

SPLIT = jit.Variant(source="split.cu", entry="split_counts")
THREADS = 256
MOST_RANKS = 32


class Split(ctypes.Structure):
    """`Split` of `split.cu`."""

    _fields_ = (
        *((name, ctypes.c_uint64) for name in ["counts", "shares", "first", "replica_slots", "rank_offsets"]),
        *((name, ctypes.c_int32) for name in ["experts", "slots", "ranks", "sources", "room"]),
    )


def shipped_variants() -> list[jit.Variant]:
    return [SPLIT]


def flow_bytes(ranks: int, sources: int, room: int) -> int:
    """Shared memory of a split among `ranks`, where placements have `room` slots more than experts."""
    return 4 * (ranks * (ranks + 2) + room * (5 + 2 * sources) + 1)


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
        pointers = [t.data_ptr() for t in (counts_WE, shares_WS, *self._tables)]
        sizes = (experts, placement.num_slots, placement.num_ranks, sources, room)
        self._kernel.launch(
            grid=1,
            block=THREADS,
            args=[Split(*pointers, *sizes)],
            smem=4 * sources * experts + flow_bytes(placement.num_ranks, sources, room),
        )
        return shares_WS
