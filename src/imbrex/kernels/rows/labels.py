"""Choices that go with compact rows, packed and read in one launch: the host's side of `rows/labels.cu`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from imbrex.kernels import jit
from imbrex.kernels.structs import struct

PACK = jit.Variant(source="rows/labels.cu", entry="pack_labels")
READ = jit.Variant(source="rows/labels.cu", entry="read_labels")
LABELS = struct("rows/labels.cu", "Labels")
THREADS, MOST_BLOCKS, MULTIPLE = 256, 264, 16


def shipped_variants() -> list[jit.Variant]:
    return [PACK, READ]


def pack_labels(ids_TK: Tensor, weights_TK: Tensor, *, load: Callable[..., Any] = jit.load) -> Tensor:
    """Labels of tokens, uint8 [T, bytes], a multiple of 16. ids_TK: int64, of any expert, or -1; weights_TK:
    float32; both contiguous."""
    tokens, choices = ids_TK.shape
    pitch = -(-8 * choices // MULTIPLE) * MULTIPLE
    rows = torch.empty(tokens, pitch, dtype=torch.uint8, device=ids_TK.device)
    _launch(load, PACK, ids_TK, weights_TK, rows, None, range(0))
    return rows


def read_labels(
    rows_NB: Tensor,
    choices: int,
    first: int,
    num_local: int,
    source_N: Tensor | None = None,
    *,
    counted: bool = True,
    load: Callable[..., Any] = jit.load,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Labels as they came, of a rank whose experts are `num_local` from `first` on: local expert of every
    choice, int64 [N, K], or -1; its weight, float32, or 0; choices of every local expert, int32 [e], if
    `counted`. source_N: int64; rows whose source is -1 have no choices, whatever they hold."""
    size, device = (rows_NB.shape[0], choices), rows_NB.device
    ids_NK = torch.empty(size, dtype=torch.int64, device=device)
    weights_NK = torch.empty(size, dtype=torch.float32, device=device)
    counts_e = torch.zeros(num_local, dtype=torch.int32, device=device) if counted else None
    here = range(first, first + num_local)
    _launch(load, READ, ids_NK, weights_NK, rows_NB, counts_e, here, source_N)
    return ids_NK, weights_NK, counts_e


def _launch(
    load: Callable[..., Any],
    variant: jit.Variant,
    ids: Tensor,
    weights: Tensor,
    rows: Tensor,
    counts: Tensor | None,
    here: range,
    source: Tensor | None = None,
) -> None:
    count, choices = ids.shape
    if count == 0:
        return
    assert ids.is_contiguous()
    assert weights.is_contiguous()
    args = LABELS(
        ids=ids,
        weights=weights,
        rows=rows,
        counts=counts,
        source=source,
        count=count,
        choices=choices,
        pitch=rows.shape[1],
        first=here.start,
        experts=len(here),
    )
    blocks = min(-(-count * choices // THREADS), MOST_BLOCKS) if ids.is_cuda else 2
    load(variant, ids.device).launch(grid=blocks, block=THREADS, args=[args])
