"""The memory-bound pieces around the expert GEMMs, on the host's side of `experts_glue.cu`."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
from torch import Tensor

from imbrex.kernels.jit import Kernel, Variant, load

SOURCE = "experts_glue.cu"
KERNELS = ("plan_groups", "swiglu_backward", "gather_rows", "sum_rows")
_THREADS = 256
_BLOCKS_PER_SM = 8
_UNIT = 8  # bf16 values in 16 bytes


COUNTERS = 4
"""int32 zeros that tile schedulers count in, in front of the ends."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Groups:
    """Where the rows of every expert end. `plan`: int32 [COUNTERS + e] on the device."""

    plan: Tensor

    @property
    def ends_e(self) -> Tensor:
        return self.plan[COUNTERS:]

    @property
    def counter(self) -> Tensor:
        return self.plan[:2]


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
    _kernel("plan_groups", device).launch(
        grid=1, block=32, args=[counts_e.contiguous(), plan[COUNTERS:], plan, experts, COUNTERS]
    )
    return Groups(plan=plan)


def swiglu_backward(
    d_act_RF: Tensor, gate_up_RG: Tensor, weights_R: Tensor | None, ends_e: Tensor
) -> tuple[Tensor, Tensor, Tensor | None]:
    """d_gate_up [R, 2F], act [R, F] times the weights, d_weights [R] float32 (`None` without weights)."""
    rows, width = d_act_RF.shape
    d_gate_up_RG, act_RF = torch.empty_like(gate_up_RG), torch.empty_like(d_act_RF)
    d_weights_R = (
        None if weights_R is None else torch.empty(rows, dtype=torch.float32, device=d_act_RF.device)
    )
    _kernel("swiglu_backward", d_act_RF.device).launch(
        grid=_blocks(d_act_RF.device),
        block=_THREADS,
        args=[
            d_act_RF,
            gate_up_RG,
            weights_R,
            ends_e,
            ends_e.numel(),
            width // _UNIT,
            d_gate_up_RG,
            act_RF,
            d_weights_R,
        ],
    )
    return d_gate_up_RG, act_RF, d_weights_R


def gather_rows(x_TD: Tensor, index_R: Tensor, ends_e: Tensor) -> Tensor:
    """Expert-major copies: row r is `x_TD[index_R[r]]`; rows past the last end are not written."""
    rows_RD = x_TD.new_empty(index_R.numel(), x_TD.shape[1])
    _kernel("gather_rows", x_TD.device).launch(
        grid=_blocks(x_TD.device),
        block=_THREADS,
        args=[x_TD, index_R, ends_e, ends_e.numel(), x_TD.shape[1] // _UNIT, rows_RD],
    )
    return rows_RD


def sum_rows(rows_RD: Tensor, position_TK: Tensor, weights_TK: Tensor | None) -> Tensor:
    """y_TD: every token's rows, times their weights, summed in fp32 in order of k; position -1 adds none."""
    tokens, choices = position_TK.shape
    y_TD = rows_RD.new_empty(tokens, rows_RD.shape[1])
    _kernel("sum_rows", rows_RD.device).launch(
        grid=_blocks(rows_RD.device),
        block=_THREADS,
        args=[rows_RD, position_TK, weights_TK, tokens, choices, rows_RD.shape[1] // _UNIT, y_TD],
    )
    return y_TD
