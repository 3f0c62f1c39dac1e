"""Tokens that lie where peers find them, and rows for them that nobody has filled yet."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from imbrex.kernels.structs import Struct

COUNTED = 128
"""Rows that one counter counts (kCounted of fused/movers.cuh)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Staged:
    """Everything that a kernel needs to bring the rows of a call, for every rank L of this process.

    x: the own tokens, [.., T, D]. rows: expert-major, [.., room, D], to be filled; without L where that is 1.
    token_LR: int32; rank * max_tokens + token of every row. there_LC: int32; rows of every 128 that have
        come, zeros.
    position_LWTK, totals_L4: of `Routed`. staged_at: where in every heap the tokens are.
    group: from a local rank and a number of blocks to what a launch is told of the ranks.
    exchange: a number of whose call it was.
    movers: the first blocks, whose idle warps bring rows; `None`: all.
    """

    x: Tensor
    rows: Tensor
    token_LR: Tensor
    there_LC: Tensor
    position_LWTK: Tensor
    totals_L4: Tensor
    staged_at: int
    group: Callable[[int, int], Struct]
    exchange: int
    movers: int | None = None
