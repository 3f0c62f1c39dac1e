"""The meeting point of a benchmark's ranks that a launcher started."""

from __future__ import annotations

import os
from typing import Any

import torch
import torch.distributed as dist


def meet(store: str | None) -> torch.device:
    """Join a launcher's ranks, over gloo on CPUs and NCCL where there are GPUs. This rank's device.

    store: a file where the ranks meet; without, at MASTER_ADDR. A rank's GPU has the number of LOCAL_RANK.
    Raises ValueError where no launcher started this.
    """
    if "RANK" not in os.environ:
        raise ValueError("no launcher started this; use imbrex netlab run -- SCRIPT, or torchrun")
    meeting: dict[str, Any] = {}
    if store is not None:
        ranks = {"rank": int(os.environ["RANK"]), "world_size": int(os.environ["WORLD_SIZE"])}
        meeting = {"init_method": f"file://{store}", **ranks}
    if not torch.cuda.is_available():
        dist.init_process_group("gloo", **meeting)
        return torch.device("cpu")
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", **meeting)
    return device
