"""What the split kernel takes, as it is in `routing/split.cu`, and its shared memory."""

from __future__ import annotations

import ctypes

MOST_RANKS = 32


class Split(ctypes.Structure):
    """`Split` of `routing/split.cu`."""

    _fields_ = (
        *((name, ctypes.c_uint64) for name in ["counts", "shares", "first", "replica_slots", "rank_offsets"]),
        *((name, ctypes.c_int32) for name in ["experts", "slots", "ranks", "sources", "room"]),
    )


def flow_bytes(ranks: int, sources: int, room: int) -> int:
    """Shared memory of a split among `ranks`, where placements have `room` slots more than experts."""
    return 4 * (ranks * (ranks + 2) + room * (5 + 2 * sources) + 1)
