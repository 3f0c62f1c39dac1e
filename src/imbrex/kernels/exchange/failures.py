"""Failures of an exchange: the words in which kernels report them, and the checks of `IMBREX_DEBUG=1`.

A kernel that fails leaves words on the host, and the error message is made of these. `IMBREX_DEBUG=1` checks
bounds before a kernel uses them, and fills unwritten memory with ones, which read as NaN or as no row. The
checks cost a host synchronisation a call; calls that are being captured in a CUDA graph are not checked.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch
from torch import Tensor

from imbrex.kernels.exchange import layout as lay
from imbrex.kernels.heap import Heap
from imbrex.kernels.routing.routed import Routed
from imbrex.kernels.structs import Struct

ALL_LIVE = (
    "; if no rank died or came late, kernels that wait for peers may not have fitted a GPU together: run "
    "layers of schedule='fused', and those of 1 or 2 tokens a rank, in one stream"
)


class ExchangeError(RuntimeError):
    """A kernel's wait timed out, or a peer gave up; the text names the rank and what it waited for. The
    exchange cannot be used again."""


class Status:
    """The words that the kernels over a heap leave on the host, a row for every rank of this process; zeros
    mean no failure. timeout: seconds, for the error message. kinds, phases: names of calls and of the things
    they wait for."""

    def __init__(
        self,
        heap: Heap,
        timeout: float,
        kinds: Sequence[str] = lay.KINDS,
        phases: Sequence[str] = lay.PHASES,
    ) -> None:
        self.heap, self.timeout, self._names = heap, timeout, (kinds, phases)
        local, pinned = heap.local.shape[0], heap.local.device.type == "cuda"
        self.words_L8 = torch.zeros(local, 8, dtype=torch.int32, device="cpu", pin_memory=pinned)
        self._codes = [ctypes.c_int32.from_address(row.data_ptr()) for row in self.words_L8]

    @property
    def failed(self) -> bool:
        return any(code.value for code in self._codes)

    def check(self) -> None:
        """Raise `ExchangeError` where a call is known to have failed."""
        for code in self._codes:  # asked before every launch
            if code.value:
                # host sync: none, the words are on the host
                raise_failure(self.words_L8.tolist(), self.timeout, *self._names)

    def group(self, *, ranks: int, blocks: int, layer: int = 0, layout: lay.Layout | None = None) -> Struct:
        """The struct that tells a launch of `blocks` about the ranks. layout: the heap's, if it has flags."""
        return lay.Group(
            heap=(ctypes.c_uint64 * lay.MAX_RANKS)(*self.heap.bases),
            timeout_ns=int(self.timeout * 1e9),
            host_status=self.words_L8,
            staged_flags=0 if layout is None else layout.staged_flags,
            reduced_flags=0 if layout is None else layout.reduced_flags,
            flags=0 if layout is None else layout.flags,
            ranks=ranks,
            first=self.heap.first,
            blocks=blocks,
            layer=layer,
        )


def raise_failure(
    statuses: Sequence[Sequence[int]],
    timeout: float,
    kinds: Sequence[str] = lay.KINDS,
    phases: Sequence[str] = lay.PHASES,
) -> None:
    """Raise `ExchangeError` if a rank's status reports a failure, rather its own than a peer's. kinds,
    phases: names of calls and of the things they wait for."""
    failures = [status for status in statuses if status[0]]
    if not failures:
        return
    cause = min(failures, key=lambda status: status[0] == lay.CODES.index(lay.PEER_GAVE_UP))
    code, rank, peer, kind, phase, epoch, block, layer = cause
    where = f" of layer {layer - 1}" if layer else ""
    raise ExchangeError(
        f"exchange: rank {rank} in {kinds[kind]} call {epoch}{where} (block {block}): {lay.CODES[code]}, "
        f"waiting for {phases[phase]} of rank {peer} (time-out {timeout} s); close this exchange and "
        f"make a new one{ALL_LIVE * (lay.CODES[code] == 'timed out')}"
    )


def poison(tensor: Tensor) -> Tensor:
    """Set all bits to one: NaN in every float format, -1 in every integer."""
    for part in [tensor] if tensor.is_contiguous() else tensor:  # the heap is, rank by rank
        part.view(torch.uint8).fill_(0xFF)
    return tensor


def _capturing(tensor: Tensor) -> bool:
    return tensor.is_cuda and torch.cuda.is_current_stream_capturing()


def check_choices(shape: lay.Shape, ids: Tensor, tokens: Tensor | None) -> None:
    """Raise ValueError if ids are out of range or repeated within a token, or if tokens are too many."""
    if _capturing(ids):
        return
    ids_LTK = ids if ids.dim() == 3 else ids[None]
    if tokens is not None:
        # host sync: asked for by IMBREX_DEBUG
        counts = tokens.tolist()
        if min(counts) < 0 or max(counts) > ids_LTK.shape[1]:
            raise ValueError(f"exchange: {counts} tokens where ids are of {ids_LTK.shape[1]}")
        there = torch.arange(ids_LTK.shape[1], device=ids.device) < tokens.to(ids.device)[:, None]
        ids_LTK = torch.where(there[..., None], ids_LTK, -1)
    sorted_LTK = ids_LTK.sort(-1).values
    twice = (sorted_LTK[..., 1:] == sorted_LTK[..., :-1]) & (sorted_LTK[..., 1:] >= 0)
    # host sync: asked for by IMBREX_DEBUG
    if bool((ids_LTK < -1).any() | (ids_LTK >= shape.experts).any()):
        raise ValueError(f"exchange: expert ids outside [-1, {shape.experts}); -1 drops a choice")
    # host sync: asked for by IMBREX_DEBUG
    if bool(twice.any()):
        raise ValueError("exchange: an expert twice among the choices of a token; give different ones, or -1")


def check_rows(routed: Routed, num_rows: int) -> None:
    """Raise ValueError if a routing has positions past the `num_rows` rows, or below -1."""
    if _capturing(routed.position_LWTK):
        return
    # host sync: asked for by IMBREX_DEBUG
    last = int(routed.position_LWTK.max()) if routed.position_LWTK.numel() else -1
    if last >= num_rows:
        raise ValueError(f"exchange: a choice has row {last} of {num_rows}; give as many rows as were routed")
    # host sync: asked for by IMBREX_DEBUG
    if bool((routed.position_LWTK < -1).any()):
        raise ValueError("exchange: positions below -1; give a routing that a call of this exchange returned")


def check_sent(shape: lay.Shape, routed: Routed) -> None:
    """Raise ValueError if a routing sends more rows than a peer has room for."""
    if _capturing(routed.send_row_LTW):
        return
    # host sync: asked for by IMBREX_DEBUG
    if routed.send_row_LTW.numel() and int(routed.send_row_LTW.max()) >= max(shape.token_capacity, 1):
        raise ValueError(f"exchange: rows past the {shape.token_capacity} that a rank can receive")
