"""The rival of imbrex's expert kernels: the same work by torch's grouped products and operators.

Two things are made ready before: where rows come from, and the choices of a token that are here.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from imbrex.bench.experts.work import Work

Way = tuple[Callable[..., Tensor], tuple[Tensor, ...]]
"""A function and its inputs."""


def ffn(rows_RD: Tensor, gate_up_eGD: Tensor, down_eDF: Tensor, ends_e: Tensor) -> Tensor:
    gate_RF, up_RF = F.grouped_mm(rows_RD, gate_up_eGD.mT, offs=ends_e).chunk(2, -1)
    return F.grouped_mm(F.silu(gate_RF) * up_RF, down_eDF.mT, offs=ends_e)


@functools.cache
def compiled(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    return torch.compile(function, dynamic=True)


def ways_to_sum(work: Work) -> dict[str, Way]:
    """Ways from tokens in their own order to their weighted sums in bf16, by name; which is fastest differs.

    Two of them read as many rows for every token as the one with the most has here, row 0 times 0 for those
    that are missing; `bag` reads those that there are.
    """
    here_TK = work.position_TK >= 0
    count_T = here_TK.sum(1)
    # host sync: once a case, outside what is timed
    first_TC = (~here_TK).to(torch.uint8).argsort(dim=1, stable=True)[:, : int(count_T.max())]
    experts = work.x_TD, work.gate_up_eGD, work.down_eDF, work.ends_e, work.source_R
    weights_TK = work.weights_TK.bfloat16()
    padded = work.position_TK.gather(1, first_TC).clamp(min=0), weights_TK.gather(1, first_TC)
    ragged = work.position_TK[here_TK], count_T.cumsum(0) - count_T, weights_TK[here_TK]
    return {
        "product": (sum_by_product, (*experts, *padded)),
        "multiplied": (sum_multiplied, (*experts, *padded)),
        "bag": (sum_by_bag, (*experts, *ragged)),
    }


def sum_by_product(*inputs: Tensor) -> Tensor:
    *arguments, position_TC, weights_TC = inputs
    return torch.bmm(weights_TC[:, None], _gathered(*arguments)[position_TC]).squeeze(1)


def sum_multiplied(*inputs: Tensor) -> Tensor:
    *arguments, position_TC, weights_TC = inputs
    return (_gathered(*arguments)[position_TC] * weights_TC[..., None]).sum(1)


def sum_by_bag(*inputs: Tensor) -> Tensor:
    *arguments, position_R, starts_T, weights_R = inputs
    rows_RD = _gathered(*arguments)
    return F.embedding_bag(position_R, rows_RD, starts_T, mode="sum", per_sample_weights=weights_R)


def _gathered(*inputs: Any) -> Tensor:
    x_TD, gate_up_eGD, down_eDF, ends_e, source_R = inputs
    return ffn(x_TD[source_R], gate_up_eGD, down_eDF, ends_e)
