"""The struct that the split kernel takes, as it is in `routing/split.cu`, and its shared memory."""

from __future__ import annotations

from imbrex.kernels.structs import struct

MOST_RANKS = 32
Split = struct("routing/split.cu", "Split")


def flow_bytes(ranks: int, sources: int, room: int) -> int:
    """Shared memory of a split among `ranks`, where placements have `room` slots more than experts."""
    return 4 * (ranks * (ranks + 2) + room * (5 + 2 * sources) + 1)
