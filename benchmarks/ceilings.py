"""The limits of the machine, measured beside a benchmark: what its figures are shares of."""

from __future__ import annotations

import statistics
from collections.abc import Callable

import torch

REPEATS = 10


def measure_ceilings() -> dict[str, float]:
    """dense_tflops (bf16, 8192^3), copy_tbps (read + written, one GPU) and, with two GPUs, copy_engine_gbps
    (256 MiB pushed to the next GPU, one direction). Nothing without a GPU."""
    if not torch.cuda.is_available():
        return {}
    side = 8192
    a, b = (torch.randn(side, side, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    source = torch.randint(255, (1 << 30,), device="cuda", dtype=torch.uint8)
    target = torch.empty_like(source)
    found = {
        "dense_tflops": 2 * side**3 / _seconds(lambda: torch.mm(a, b)) / 1e12,
        "copy_tbps": 2 * source.numel() / _seconds(lambda: target.copy_(source)) / 1e12,
    }
    if torch.cuda.device_count() > 1:
        near = source[: 1 << 28]
        far = torch.empty(1 << 28, device="cuda:1", dtype=torch.uint8)
        found["copy_engine_gbps"] = near.numel() / _seconds(lambda: far.copy_(near)) / 1e9
    return {name: round(value, 2) for name, value in found.items()}


def _seconds(work: Callable[[], object]) -> float:
    """Median over `REPEATS`, by events on the current stream."""
    times = []
    for repeat in range(-3, REPEATS):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        work()
        end.record()
        end.synchronize()
        if repeat >= 0:
            times.append(begin.elapsed_time(end) / 1e3)
    return statistics.median(times)
