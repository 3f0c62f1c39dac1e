"""The limits of the machine, measured beside a benchmark: what its figures are shares of."""

from __future__ import annotations

import statistics
from collections.abc import Callable

import torch

REPEATS = 10
SIDE, COPY_BYTES, READ_BYTES, PUSH_BYTES = 8192, 1 << 30, 1 << 31, 1 << 28


def measure_ceilings() -> dict[str, float]:
    """dense_tflops (bf16, 8192^3), copy_tbps (`copy_tbps`) and, with two GPUs, copy_engine_gbps (256 MiB
    pushed to the next GPU, one direction). Nothing without a GPU."""
    if not torch.cuda.is_available():
        return {}
    a, b = (torch.randn(SIDE, SIDE, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    limits = {"dense_tflops": 2 * SIDE**3 / _median(lambda: torch.mm(a, b)) / 1e12, "copy_tbps": copy_tbps()}
    if torch.cuda.device_count() > 1:
        near, far = (torch.empty(PUSH_BYTES, device=f"cuda:{gpu}", dtype=torch.uint8) for gpu in (0, 1))
        limits["copy_engine_gbps"] = PUSH_BYTES / _median(lambda: far.copy_(near)) / 1e9
    return {name: round(value, 2) for name, value in limits.items()}


def copy_tbps(device: torch.device | str = "cuda") -> float:
    """TB/s of a copy of 1 GiB inside a GPU's memory, read and written."""
    source = torch.randint(255, (COPY_BYTES,), device=device, dtype=torch.uint8)
    target = torch.empty_like(source)
    return 2 * source.nbytes / _median(lambda: target.copy_(source)) / 1e12


def read_tbps(device: torch.device | str = "cuda") -> float:
    """TB/s of reading 2 GiB of a GPU's memory by a sum, at its best."""
    values = torch.ones(READ_BYTES // 2, dtype=torch.bfloat16, device=device)
    return values.nbytes / min(_times(values.sum)) / 1e12


def seconds_of(work: Callable[[], object]) -> float:
    """Seconds of one call, by events on the current stream; waits for its end."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    work()
    end.record()
    # host sync: a measurement reads its clock
    end.synchronize()
    return begin.elapsed_time(end) / 1e3


def _times(work: Callable[[], object]) -> list[float]:
    """Seconds of `REPEATS` calls behind three that warm up."""
    return [seconds_of(work) for _ in range(REPEATS + 3)][3:]


def _median(work: Callable[[], object]) -> float:
    return statistics.median(_times(work))
