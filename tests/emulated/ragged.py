"""Rows of experts with ragged ends for the emulated kernels, and how far a result is from fp64."""

from __future__ import annotations

from itertools import accumulate

import torch
import torch.nn.functional as F
from torch import Tensor

LIMIT = 3e-3  # of ||out - ref|| / ||ref||: bf16 rounds by 2^-9 at most
TAIL = 5


def draw(*shape: int) -> Tensor:
    return torch.randn(*shape).to(torch.bfloat16)


def poisoned(*shape: int) -> Tensor:
    return torch.full(shape, float("nan"), dtype=torch.bfloat16)


def error(found: Tensor, reference: Tensor) -> float:
    return float(((found.double() - reference).norm() / reference.norm()).detach())


def ends_of(counts: list[int]) -> Tensor:
    """Between words that nobody reads."""
    return torch.tensor([77, *accumulate(counts), 99_999], dtype=torch.int32)[1:-1]


def hits_of(counts: list[int]) -> Tensor:
    """Which experts have rows, as a dispatch tells it (ffn/hits.cuh); -7: a word that nobody reads."""
    found, units, rows = [sum(count > 0 for count in counts), -7], 0, 0
    for expert, count in enumerate(counts):
        found += [expert | units << 16, rows] if count else []
        units, rows = units + -(-count // 64), rows + count
    found += [units << 16, rows]
    return torch.tensor(found + [-7] * (4 + 2 * len(counts) - len(found)), dtype=torch.int32)


def rows_of(counts: list[int], width: int) -> Tensor:
    """Rows past the counts are NaN: one that is read shows."""
    rows = draw(sum(counts) + TAIL, width)
    rows[sum(counts) :] = float("nan")
    return rows


def per_expert(counts: list[int], rows: Tensor, weight: Tensor) -> Tensor:
    pieces = rows[: sum(counts)].double().split(counts)
    return torch.cat([piece @ w.double() for piece, w in zip(pieces, weight, strict=True)])


def reference_ffn(counts: list[int], rows: Tensor, gate_up: Tensor, down: Tensor, weights: Tensor) -> Tensor:
    """SwiGLU experts and their rows' weights, in the dtype of what is given."""
    outputs = []
    for piece, up, out in zip(rows.split(counts), gate_up, down, strict=True):
        gate_R, up_R = (piece @ up.T).chunk(2, 1)
        outputs.append((F.silu(gate_R) * up_R) @ out.T)
    return torch.cat(outputs) * weights[:, None]


def dequantise(values: Tensor, scales: Tensor, high: int) -> Tensor:
    """fp64 of values whose scales are for `high` x 128 of them."""
    return values.double() * scales.double().repeat_interleave(128, -1).repeat_interleave(high, -2)


def fp8_ffn(counts: list[int], rows: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    """SwiGLU experts with the activation rounded as the kernel rounds it."""
    outputs = []
    for piece, up, out in zip(rows.split(counts), gate_up, down, strict=True):
        gate_R, up_R = (piece @ up.T).chunk(2, 1)
        act = (F.silu(gate_R) * up_R).unflatten(1, (out.shape[1] // 128, 128))
        scale = act.abs().amax(2, keepdim=True).clamp_min(1e-30) / 448
        act = (act / scale).to(torch.float8_e4m3fn).double() * scale
        outputs.append(act.flatten(1) @ out.T)
    return torch.cat(outputs)


def check_rows(out: Tensor, reference: Tensor) -> None:
    assert error(out[: reference.shape[0]], reference) < LIMIT
    assert out[reference.shape[0] :].isnan().all()
