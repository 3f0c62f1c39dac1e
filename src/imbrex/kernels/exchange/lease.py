"""Rows that are on loan: received where peers write them, in the heap; or staged, for a kernel to bring."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from imbrex.kernels.routing.routed import Routed
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
    pitch: bytes from one staged row to the next, where these are of the fp8 codec; else 0.
    movers: the first blocks, whose idle warps bring rows; `None`: all.
    plan: of the rows' groups (`kernels.ffn.glue.Groups`), of one rank, where somebody has made it.
    own_e2: int32, of one rank, where who brings rows shall write the first own row of every expert, and the
        one behind the last.
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
    pitch: int = 0
    movers: int | None = None
    plan: Tensor | None = None
    own_e2: Tensor | None = None


def staged_rows(
    x: Tensor, rows: Tensor, routed: Routed, pull: Any, **where: Any
) -> tuple[Staged, dict[str, Any]]:
    """The needs of a kernel that brings `rows`, and fields of the one that stages them. pull: where it stages
    the tokens `x`. where: the fields `group`, `exchange` and `pitch` of `Staged`."""
    ranks, room = routed.totals_L4.shape[0], rows.shape[-2]
    sizes = (ranks, room), (ranks, -(-room // COUNTED))
    token_LR, there_LC = (torch.empty(size, dtype=torch.int32, device=x.device) for size in sizes)
    staged = Staged(
        x=x,
        rows=rows,
        token_LR=token_LR,
        there_LC=there_LC,
        position_LWTK=routed.position_LWTK,
        totals_L4=routed.totals_L4,
        staged_at=pull.staged_at + pull.buffer * pull.buffer_bytes,
        **where,
    )
    counters = there_LC.shape[1]
    fields = {"pull": pull, "token": token_LR, "there": there_LC, "rows": room, "counters": counters}
    return staged, fields


@dataclass(frozen=True, kw_only=True, slots=True)
class Lease:
    """Compact rows of one call, in the heap until a later call takes their buffer.

    With two buffers, peers may write over the rows of call n once call n + 1 has begun on the device: kernels
    that were put on the stream before it read them safely, those after it do not. Example, a push every
    layer: the experts of layer 3 may read layer 3's rows; a backward that needs them keeps a copy.

    call: the number of the call, from 1. calls: how many calls the exchange has made. lasts: calls, this one
    included, after which the rows are still there.

    A call that is captured in a CUDA graph keeps its buffer: what is captured with it reads the rows of its
    own replay. Replays are not counted here.
    """

    view: Tensor
    call: int
    lasts: int
    calls: Callable[[], int]

    @property
    def live(self) -> bool:
        """Whether no call has taken the buffer yet."""
        return self.calls() < self.call + self.lasts

    @property
    def rows(self) -> Tensor:
        """[L, token_capacity, D], in the heap. Raises ValueError where the rows have expired."""
        if not self.live:
            raise ValueError(
                f"exchange: these are the rows of dispatch {self.call}, and dispatch {self.calls()} gave "
                "their buffer away: read them before it, or keep() a copy"
            )
        return self.view

    def keep(self) -> Tensor:
        """A copy, in normal memory, queued on the current stream. Raises ValueError as `rows` does."""
        return self.rows.clone()
