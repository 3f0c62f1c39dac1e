"""Rows that a later call takes back: compact rows in the heap, and staged rows that a kernel brings."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from imbrex.kernels.routing.routed import Routed
from imbrex.kernels.structs import Struct

COUNTED = 128
"""The rows of one counter (kCounted of fused/movers.cuh)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Staged:
    """Everything that a kernel needs to bring the rows of a call, for every rank L of this process.

    x: this rank's tokens, [L, T, D]. rows: expert-major memory to fill, [L, room, D]. Of a single rank both
        lack L.
    token_LR: int32; rank * max_tokens + token of every row.
    there_LC: int32; how many of every 128 rows have arrived, at first zeros.
    position_LWTK, totals_L4: as in `Routed`. staged_at: the offset of the tokens in every heap.
    group: makes the struct that tells a launch about the ranks, from a local rank and a number of blocks.
    exchange: the serial number of the exchange that staged the rows.
    pitch: bytes from one staged row to the next if they are of the fp8 codec; else 0.
    movers: how many blocks, from the first, bring rows with idle warps; `None`: all.
    plan: the plan of the rows' groups (`kernels.ffn.glue.Groups`) of one rank, if it has been made.
    own_e2: int32, of one rank: memory for the first own row of every expert and the one behind its last, if
        the kernel that brings rows is to write them.
    mean_rows: rows of that rank in the mean; 0: not known.
    uses: a mark for every forward that has taken its rows.
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
    mean_rows: int = 0
    uses: list[None] = field(default_factory=list)


class StagedMemory(NamedTuple):
    """Memory of the caller's for `token_LR` and `there_LC` of a `Staged`."""

    token_LR: Tensor
    there_LC: Tensor


def counters_of(room: int) -> int:
    """The counters of so many rows: C of `there_LC`."""
    return -(-room // COUNTED)


def staged_rows(
    x: Tensor, rows: Tensor, routed: Routed, pull: Any, memory: StagedMemory | None = None, **where: Any
) -> tuple[Staged, dict[str, Any]]:
    """The `Staged` for a kernel that brings `rows`, and the fields of the argument of the kernel that stages
    the tokens. x: where the first of the two finds the own ones. pull: the other's `Pull`. where: the fields
    `group`, `exchange` and `pitch` of `Staged`."""
    ranks, room = routed.totals_L4.shape[0], rows.shape[-2]
    if memory is None:
        sizes = (ranks, room), (ranks, counters_of(room))
        memory = StagedMemory(*(torch.empty(size, dtype=torch.int32, device=x.device) for size in sizes))
    token_LR, there_LC = memory
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
    """The compact rows of one call, in the heap until a later call takes their buffer.

    With two buffers, peers may overwrite the rows of call n once call n + 1 has begun on the device: kernels
    queued before that call read the rows safely, kernels queued after it do not. If every layer pushes once,
    the experts of layer 3 may read layer 3's rows, and a backward that needs them keeps a copy.

    call: the number of the call, from 1. calls: gives the number of calls made so far. lasts: for how many
    calls, this one included, the rows stay.

    A call captured in a CUDA graph keeps its buffer, and what is captured with it reads the rows of its own
    replay. Replays are not counted here.
    """

    view: Tensor
    call: int
    lasts: int
    calls: Callable[[], int]

    @property
    def live(self) -> bool:
        """Whether the rows are still there: no later call has taken their buffer."""
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
