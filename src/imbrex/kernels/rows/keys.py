"""The greedy token of rows whose vocabulary is split over ranks: the host's side of `rows/keys.cu`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from imbrex.kernels import jit
from imbrex.kernels.exchange import layout as lay
from imbrex.kernels.exchange.failures import Status
from imbrex.kernels.heap import Heap
from imbrex.kernels.structs import struct

KEYS = struct("rows/keys.cu", "Keys")
THREADS, WORD_BYTES, MAILBOXES = 256, 8, 2
SIZES = {torch.float32: 4, torch.bfloat16: 2}


def variant(value_bytes: int) -> jit.Variant:
    """The kernel for logits of so many bytes."""
    return jit.Variant(source="rows/keys.cu", entry="choose_tokens", defines=(("VALUE_BYTES", value_bytes),))


def shipped_variants() -> list[jit.Variant]:
    return [variant(size) for size in SIZES.values()]


class TokenChoice:
    """Chooses tokens among the ranks of a heap of its own; one launch a call, also in a graph's replay.

    make_heap: from a number of bytes to a `Heap` (collective). room: the most rows of a rank in a call.
    timeout: seconds.
    """

    def __init__(
        self,
        make_heap: Callable[[int], Heap],
        ranks: int,
        room: int,
        *,
        timeout: float = 60.0,
        load: Callable[..., Any] = jit.load,
    ) -> None:
        self.ranks, self.room, self.timeout = ranks, room, timeout
        words = MAILBOXES * ranks * room * 2
        self.heap = make_heap(lay.CONTROL_BYTES + words * WORD_BYTES)
        device = self.heap.local.device
        self._kernels = {dtype: load(variant(size), device) for dtype, size in SIZES.items()}
        self._status = Status(self.heap, timeout)
        self._group = self._status.group(ranks=ranks, blocks=1)

    def why_not(self, logits_PV: Tensor) -> str | None:
        """Why tokens cannot be chosen by these logits of all ranks' rows, or `None`."""
        if logits_PV.dtype not in SIZES:
            return f"logits of {logits_PV.dtype}; they are float32 or bfloat16"
        if len(logits_PV) > self.ranks * self.room:
            return f"{len(logits_PV) // self.ranks} rows of a rank; there is room for {self.room}"
        return None

    def choose(self, logits_LPV: Tensor, vocabulary: int) -> Tensor:
        """Tokens int64 [L, T], as `torch.argmax` over the whole vocabulary, of the L ranks of this process.

        logits_LPV: by slices of equal lengths, of which the last may be shorter or empty, for the P = W T
        rows of all ranks. Launched by all ranks; raises ExchangeError where an earlier call failed.
        """
        self.check()
        local, rows, slice_ = logits_LPV.shape
        assert logits_LPV.is_contiguous()
        best_LP = logits_LPV.argmax(-1) if slice_ else None
        token_LT = torch.empty(local, rows // self.ranks, dtype=torch.int64, device=logits_LPV.device)
        args = KEYS(
            logits=logits_LPV,
            best=best_LP,
            token=token_LT,
            pitch=slice_,
            mailbox=lay.CONTROL_BYTES,
            vocabulary=vocabulary,
            slice=-(-vocabulary // self.ranks),
            rows=rows // self.ranks,
            room=self.room,
        )
        if rows:
            kernel = self._kernels[logits_LPV.dtype]
            kernel.launch(grid=local, block=THREADS, args=[self._group, args])
        return token_LT

    def check(self) -> None:
        """Raise `ExchangeError` if a call is known to have failed."""
        self._status.check()

    def close(self) -> None:
        """Free the heap; asks no other rank. Graphs that have it cannot be replayed."""
        self.heap.close(together=False)
