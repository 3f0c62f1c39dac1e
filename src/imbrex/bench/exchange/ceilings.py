"""The limits of the machine, measured on the spot by every rank at once."""

from __future__ import annotations

import statistics

import torch
import torch.distributed as dist

from imbrex.bench.exchange.clock import Clock
from imbrex.kernels.heap import SymmetricHeap
from imbrex.observe.clock import device_microseconds

SIDE = 8192
COPY_BYTES = 256 << 20


def dense_ceiling() -> float:
    """TFLOP/s of a bf16 product of 8192^3, the slowest rank's."""
    left, right = (torch.randn(SIDE, SIDE, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    times = [device_microseconds(lambda: torch.mm(left, right)) for _ in range(13)][3:]
    slowest = torch.tensor(statistics.median(times), device="cuda")
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    # host sync: a measurement
    return 2 * SIDE**3 / float(slowest) / 1e6


def copy_engine_ceiling(clock: Clock) -> float:
    """GB/s of one direction: every rank copies 256 MiB into the next rank's memory at once."""
    group, rank, world = dist.group.WORLD, dist.get_rank(), dist.get_world_size()
    assert group is not None
    heap = SymmetricHeap(group, COPY_BYTES, torch.device("cuda", torch.cuda.current_device()))
    source = torch.randint(255, (COPY_BYTES,), dtype=torch.uint8, device="cuda")
    target = heap.view((rank + 1) % world, 0, COPY_BYTES)
    took = clock(lambda: target.copy_(source)).median_us
    heap.close()
    return COPY_BYTES / took / 1e3
