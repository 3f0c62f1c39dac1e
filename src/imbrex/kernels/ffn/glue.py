"""The memory-bound pieces around the expert GEMMs, on the host's side of `ffn/glue.cu`.

All are persistent blocks that loop to a count on the device: their time follows the rows that there are, not
the rows that there is room for. Rows past the last of `ends_e` are neither read nor written.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from imbrex.kernels import records
from imbrex.kernels.jit import Kernel, Variant, load

SOURCE = "ffn/glue.cu"
KERNELS = (
    "plan_groups",
    "swiglu",
    "swiglu_backward",
    "add_parts",
    "gather_rows",
    "weigh_rows",
    "sum_rows",
    "sum_four_rows",
    "sum_rows_exactly",
    "clear_rows",
)
_THREADS = 256
_BLOCKS_PER_SM = 8
_UNIT = 8  # bf16 values in 16 bytes


COUNTERS = 24
"""int32 zeros before the ends, which begin at 16 bytes: a product counts its tiles in the first two, one that
begins before the product before it has ended in the next two; eight count the parts of its result that are
written (fused/down_home.cu), nine those of its rows that are made (gemm/parts.cuh), and one the ends of own
rows that are known (fused/own_rows.cuh)."""


def hit_words(experts: int) -> int:
    """Words of a list of the experts that have rows (ffn/hits.cuh)."""
    return 4 + 2 * experts


class Groups:
    """Where the rows of every expert end. `plan`: int32 [COUNTERS + e] on the device. expected: of the
    dispatch of a small batch, which tells the ends before its rows are there, how many rows a rank gets in
    the mean; 0: `plan` is older than the rows. mean_rows: the same of a batch of any size; 0: as many as
    there is room for. hits: uint32 of `hit_words`, which of them have any, where the
    dispatch tells it (ffn/hits.cuh). one_launch: for both products, where
    `ffn.both` can; `None`: where it is faster, too."""

    __slots__ = ("counter", "ends_e", "expected", "hits", "mean_rows", "one_launch", "plan")

    def __init__(
        self,
        plan: Tensor,
        *,
        expected: int = 0,
        mean_rows: int = 0,
        hits: Tensor | None = None,
        one_launch: bool | None = None,
    ) -> None:
        self.plan, self.ends_e, self.expected = plan, plan[COUNTERS:], expected
        self.mean_rows, self.hits, self.one_launch = mean_rows, hits, one_launch
        self.counter = plan
        """Two zeros, and then others."""

    @property
    def other_counter(self) -> Tensor:
        """Two zeros for a product that begins before the one before it has ended."""
        return self.plan[2:4]

    @property
    def written(self) -> Tensor:
        """Rows of every part of the last product's result that are in memory, times tiles."""
        return self.plan[4:12]

    @property
    def progress(self) -> Tensor:
        """Rows of every part of the experts that the first product has made, times tiles; zeros again behind
        the second."""
        return self.plan[12:21]

    @property
    def bounds(self) -> Tensor:
        """Ends of own rows that are known, two an expert where a dispatch looks for them."""
        return self.plan[21:22]


def glue_variants() -> list[Variant]:
    return [Variant(source=SOURCE, entry=entry) for entry in KERNELS]


@functools.cache
def _kernel(entry: str, device: torch.device) -> Kernel:
    return load(Variant(source=SOURCE, entry=entry), device)


@functools.cache
def _blocks(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count * _BLOCKS_PER_SM


def plan_groups(counts_e: Tensor) -> Groups:
    """int64 [e] rows of every expert to their ends; one small kernel, nothing on the host."""
    device, experts = counts_e.device, counts_e.numel()
    plan = torch.empty(COUNTERS + experts, dtype=torch.int32, device=device)
    groups = Groups(plan)
    args = [counts_e.contiguous(), groups.ends_e, plan, experts, COUNTERS]
    _kernel("plan_groups", device).launch(grid=1, block=32, args=args)
    return groups


def swiglu(gate_up_RG: Tensor, weights_R: Tensor | None, ends_e: Tensor) -> Tensor:
    """silu(gate) * up of every row, times its weight (float32) where given: [R, F] bf16 from [R, 2F]."""
    act_RF = gate_up_RG.new_empty(gate_up_RG.shape[0], gate_up_RG.shape[1] // 2)
    _launch("swiglu", gate_up_RG, weights_R, ends_e, ends_e.numel(), act_RF.shape[1] // _UNIT, act_RF)
    return act_RF


def swiglu_backward(
    d_act_RF: Tensor,
    gate_up_RG: Tensor,
    weights_R: Tensor | None,
    ends_e: Tensor,
    *,
    keep: bool = True,
    out: tuple[Tensor, Tensor, Tensor | None] | None = None,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """d_gate_up [R, 2F]; act [R, F] times the weights (empty without `keep`); d_weights [R] float32 (`None`
    without weights). out: where they lie; for the first two gate_up_RG and d_act_RF may be given."""
    rows, width = d_act_RF.shape
    if out is None:
        d_weights_R = None if weights_R is None else d_act_RF.new_empty(rows, dtype=torch.float32)
        act_RF = d_act_RF.new_empty(rows if keep else 0, width)
        out = torch.empty_like(gate_up_RG), act_RF, d_weights_R
    d_gate_up_RG, act_RF, d_weights_R = out
    count = ends_e, ends_e.numel(), width // _UNIT
    act = act_RF if keep else None
    _launch("swiglu_backward", d_act_RF, gate_up_RG, weights_R, *count, d_gate_up_RG, act, d_weights_R)
    return d_gate_up_RG, act_RF, d_weights_R


def add_parts(parts_PR: Tensor, ends_e: Tensor, out_R: Tensor) -> None:
    """The sum of every row's parts, float32, into `out_R`: to the bit what torch gives on a GPU."""
    kernel, rows = _kernel("add_parts", parts_PR.device), len(out_R)
    args = [parts_PR, len(parts_PR), rows, ends_e, ends_e.numel(), out_R]
    how: dict[str, Any] = {
        "grid": max(1, min(_blocks(parts_PR.device), -(-rows // _THREADS))),
        "block": _THREADS,
    }
    records.launch(kernel, args, how)


def gather_rows(x_TD: Tensor, index_R: Tensor, ends_e: Tensor, choices: int = 1) -> Tensor:
    """Expert-major copies [R, D], bf16: row r is `x_TD[index_R[r] // choices]`. index_R: int64; ends_e:
    int32, where every expert's rows end."""
    rows_RD = x_TD.new_empty(index_R.numel(), x_TD.shape[1])
    count = ends_e, ends_e.numel(), x_TD.shape[1] // _UNIT
    _launch("gather_rows", x_TD, index_R, choices, *count, rows_RD)
    return rows_RD


def weigh_rows(
    d_y: Tensor,
    rows_RD: Tensor,
    weights: Tensor | None,
    ends_e: Tensor,
    choice_R: Tensor | None = None,
    choices: int = 1,
) -> tuple[Tensor, Tensor | None]:
    """The gradient of a weighted sum of rows: d_rows [R, D], and float32 d_weights (`None` without weights).

    choice_R: int64; row r is choice k of token t, t * choices + k, and reads d_y [T, D] there; weights and
    d_weights are [T, K], 0 where no row has a choice. Without it d_y is [R, D], and weights and d_weights [R]
    go by row, unset past the last one.
    """
    d_rows_RD, d_weights = torch.empty_like(rows_RD), None
    if weights is not None:
        d_weights = torch.empty_like(weights) if choice_R is None else torch.zeros_like(weights)
    where = rows_RD, weights, ends_e, ends_e.numel(), rows_RD.shape[1] // _UNIT
    _launch("weigh_rows", d_y, choice_R, choices, *where, d_rows_RD, d_weights)
    return d_rows_RD, d_weights


def sum_rows(
    rows_RD: Tensor,
    position_TK: Tensor,
    weights_TK: Tensor | None,
    count: Tensor | None = None,
    addend_TD: Tensor | None = None,
    *,
    early: bool = False,
    out: Tensor | None = None,
) -> Tensor:
    """Sums every token's rows, times their weights (float32), in fp32 and in order of k: bf16 [T, D], in
    `out` where given. position_TK: int64; -1 adds none.

    count: int32 [1] on the device; tokens from it on are neither read nor written. addend_TD: contiguous, the
    last of a token's sum. early: whoever wrote `position_TK` has ended before the launch right before began.
    """
    tokens, choices = position_TK.shape
    y_TD = rows_RD.new_empty(tokens, rows_RD.shape[1]) if out is None else out
    units, device = rows_RD.shape[1] // _UNIT, rows_RD.device
    blocks = max(1, min(_blocks(device), -(-tokens * -(-units // 32) * 32 // _THREADS)))
    args = [rows_RD, position_TK, weights_TK, count, tokens, choices, units, y_TD, addend_TD, int(early)]
    how = {"grid": blocks, "block": _THREADS, "dependent": True}
    records.launch(_kernel("sum_rows" if choices > 4 else "sum_four_rows", device), args, how)
    return y_TD


def sum_rows_exactly(rows_RD: Tensor, position_TK: Tensor, weights_TK: Tensor | None) -> Tensor:
    """float32 [T, D]: the sums of `sum_rows` before they are rounded."""
    tokens, choices = position_TK.shape
    y_TD = rows_RD.new_empty(tokens, rows_RD.shape[1], dtype=torch.float32)
    if tokens:
        sizes = tokens, choices, rows_RD.shape[1] // _UNIT
        _launch("sum_rows_exactly", rows_RD, position_TK, weights_TK, *sizes, y_TD)
    return y_TD


def clear_rows(rows_RB: Tensor, source_R: Tensor) -> None:
    """Zero into the rows, bytes of a multiple of 16, whose source (int64) is -1. In place, on any device."""
    count, width = rows_RB.shape
    assert rows_RB.dtype == torch.uint8
    assert width % 16 == 0
    if not rows_RB.is_cuda:
        rows_RB.masked_fill_((source_R < 0)[:, None], 0)
    elif count:
        _launch("clear_rows", source_R, count, width // 16, rows_RB)


def _launch(entry: str, first: Tensor, *others: Tensor | int | None) -> None:
    device = first.device
    how: dict[str, Any] = {"grid": _blocks(device), "block": _THREADS}
    records.launch(_kernel(entry, device), [first, *others], how)
