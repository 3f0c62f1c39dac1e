"""Copies from the pool, where a token stands once, to expert-major rows, one for each of its experts; and
sums on the way back."""

from __future__ import annotations

import torch
from torch import Tensor

from imbrex.codec.cast import pick_rows
from imbrex.kernels.ffn.glue import sum_rows_exactly
from imbrex.kernels.ffn.widths import MULTIPLE
from imbrex.kernels.jit import cached_why_not_portable

__all__ = ["expand", "index_rows", "pick_scalars", "reduce", "sum_home"]
"""The names for adapters."""


def index_rows(
    slot_PK: Tensor, position_PK: Tensor, weights_PK: Tensor, local: range, num_rows: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Where every pool row goes, and where every row comes from.

    slot_PK, position_PK: of all choices; only those with a slot in `local` are this rank's.
    Returns source_R (pool row, -1 for padding), position_PK (-1 where not this rank's), weights_R (float32).
    Example: local slots 2, 3; slots [[0, 3], [2, 3]] at positions [[0, 1], [0, 2]], 4 rows: source
    [1, 0, 1, -1], positions [[-1, 1], [0, 2]].
    """
    here = (slot_PK >= local.start) & (slot_PK < local.stop)
    num_pool, top_k = slot_PK.shape
    target = torch.where(here, position_PK, num_rows).flatten()
    pool_row = torch.arange(num_pool, device=slot_PK.device).repeat_interleave(top_k)
    source_R = slot_PK.new_full((num_rows + 1,), -1, dtype=torch.int64).scatter_(0, target, pool_row)
    weights_R = torch.zeros(num_rows + 1, dtype=torch.float32, device=slot_PK.device)
    weights_R.scatter_(0, target, weights_PK.flatten())
    return source_R[:-1].clone(), torch.where(here, position_PK, -1), weights_R[:-1].clone()


def expand(parts: list[Tensor], source_R: Tensor, scale_R: Tensor | None = None) -> Tensor:
    """Copy pool rows to the rows that come from them, times `scale_R` in float32 where given.

    parts: the pool [P, D] in pieces. Padding rows become zero.
    """
    zero = parts[0].new_zeros(1, parts[0].shape[1])
    pool = torch.cat([*parts, zero])
    rows_RD = pick_rows(pool, torch.where(source_R < 0, pool.shape[0] - 1, source_R))
    return rows_RD if scale_R is None else (rows_RD.float() * scale_R[:, None]).to(rows_RD.dtype)


def reduce(rows_RD: Tensor, position_PK: Tensor, weights_R: Tensor | None, max_rows: int) -> Tensor:
    """Sum the rows of every pool row, times their weights, in float32 and in ascending row order.

    max_rows: the most rows that a pool row can have. Returns float32 [P, D]. Rows that no position names are
    not read.
    """
    num_rows = rows_RD.shape[0]
    if num_rows == 0 or position_PK.numel() == 0:
        return rows_RD.new_zeros(position_PK.shape[0], rows_RD.shape[1], dtype=torch.float32)
    ordered, _ = torch.where(position_PK < 0, num_rows, position_PK).sort(1)
    ordered = ordered[:, :max_rows]
    if not by_kernels(rows_RD):
        return _reduce_by_columns(rows_RD, ordered, weights_R)
    ordered = torch.where(ordered < num_rows, ordered, -1)
    weights = None if weights_R is None else pick_scalars(weights_R, ordered)
    return sum_rows_exactly(rows_RD.contiguous(), ordered, weights)


def by_kernels(rows_RD: Tensor) -> bool:
    """Whether kernels sum these rows. torch's operators go over all of them six times a choice."""
    fits = rows_RD.is_cuda and rows_RD.dtype == torch.bfloat16 and rows_RD.shape[1] % MULTIPLE == 0
    return fits and cached_why_not_portable(rows_RD.get_device()) is None


def _reduce_by_columns(rows_RD: Tensor, ordered_PK: Tensor, weights_R: Tensor | None) -> Tensor:
    """`reduce` of ordered positions; the number of rows where there is none."""
    num_rows, width = rows_RD.shape
    out = torch.zeros(ordered_PK.shape[0], width, dtype=torch.float32, device=rows_RD.device)
    for column in ordered_PK.T:
        has = column < num_rows
        if rows_RD.device.type == "cpu":
            pool_row = has.nonzero().squeeze(1)
            rows = rows_RD.index_select(0, column[pool_row]).float()
            if weights_R is not None:
                rows *= weights_R[column[pool_row], None]
            out.index_add_(0, pool_row, rows)
        else:
            safe = column.clamp(max=num_rows - 1)
            rows = rows_RD[safe].float()
            if weights_R is not None:
                rows *= weights_R[safe, None]
            out += torch.where(has[:, None], rows, 0)
    return out


def pick_scalars(values_R: Tensor, position_PK: Tensor) -> Tensor:
    """The value of every choice's row, 0 where the choice is another rank's: float32 [P, K]."""
    if values_R.numel() == 0:
        return torch.zeros(position_PK.shape, dtype=torch.float32, device=position_PK.device)
    return torch.where(position_PK < 0, 0.0, values_R[position_PK.clamp(min=0)].float())


def sum_home(
    own_TD: Tensor, sent_back_ND: Tensor, sent_tokens_N: Tensor, sizes: list[int], rank: int
) -> Tensor:
    """Add the partial sums that came back to those of the own rank, in rank order, in float32.

    sizes: rows sent to every rank; 0 for `rank` itself, in whose place the own partial sums are added.
    """
    out = torch.zeros_like(own_TD, dtype=torch.float32)
    begin = 0
    for source, size in enumerate(sizes):
        if source == rank:
            out += own_TD
        elif size:
            piece = slice(begin, begin + size)
            out.index_add_(0, sent_tokens_N[piece], sent_back_ND[piece].float())
            begin += size
    return out
