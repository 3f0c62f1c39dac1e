"""Ranks of one host, a process each, and how a call among them is timed."""

from __future__ import annotations

import os
import statistics
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import spawn

from imbrex.observe.clock import device_microseconds

# Multicast objects can hold the fabric of a shared host, and nothing here needs them; a module that loads
# late may wait for a kernel that waits for it.
ENVIRONMENT = {
    "NCCL_NVLS_ENABLE": "0",
    "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
    "NVSHMEM_DISABLE_NVLS": "1",
    "CUDA_MODULE_LOADING": "EAGER",
}


@dataclass(frozen=True, slots=True)
class Timing:
    """Microseconds of one call, each sample the slowest rank's."""

    median_us: float
    min_us: float
    max_us: float
    n: int


def run_ranks(work: Callable[..., Any], world: int, *args: Any) -> Any:
    """Run `work(rank, world, *args)` on `world` GPUs; returns what rank 0 returned (torch.save-able)."""
    os.environ.update(ENVIRONMENT)
    with tempfile.TemporaryDirectory() as folder:
        spawn(_enter, (work, world, folder, args), nprocs=world, join=True)
        return torch.load(Path(folder) / "answer", weights_only=False)


def _enter(rank: int, work: Callable[..., Any], world: int, folder: str, args: tuple[Any, ...]) -> None:
    torch.cuda.set_device(rank)
    dist.init_process_group(
        "nccl",
        init_method=f"file://{folder}/store",
        rank=rank,
        world_size=world,
        device_id=torch.device("cuda", rank),
    )
    answer = work(rank, world, *args)
    if rank == 0:
        torch.save(answer, Path(folder) / "answer")
    dist.barrier()
    torch.cuda.synchronize()
    os._exit(0)  # the runtime's own teardown of symmetric memory may wait for peers that are gone


class Clock:
    """A call on the GPU's clock: ranks aligned by a tiny all-reduce, cache flushed, launches queued ahead."""

    def __init__(self, n: int = 20, warm: int = 3) -> None:
        self.n, self.warm = n, warm
        self._flush = torch.empty(256 << 20, dtype=torch.uint8, device="cuda")
        self._align = torch.zeros(1, device="cuda")

    def __call__(self, call: Callable[[], Any]) -> Timing:
        spans = []
        for _ in range(self.warm + self.n):
            self._flush.zero_()
            spans.append(device_microseconds(call, align=lambda: dist.all_reduce(self._align)))
        times = torch.tensor(spans[self.warm :], device="cuda")
        dist.all_reduce(times, op=dist.ReduceOp.MAX)
        sample = times.tolist()
        return Timing(
            median_us=statistics.median(sample), min_us=min(sample), max_us=max(sample), n=len(sample)
        )
