"""The GPUs that the tests of several ranks have.

A rank has a GPU of its own. Where there is only one, `IMBREX_TEST_RANKS=2` lets two ranks share it, which
shows everything but time: each is a process with its own memory, and while the kernels of one run those of
the other wait.
"""

from __future__ import annotations

import os

import torch

GPUS = torch.cuda.device_count()
RANKS = int(os.environ.get("IMBREX_TEST_RANKS", GPUS))
"""How many ranks there are for a test."""


def worlds() -> list[int]:
    """The numbers of ranks that a test of several runs with."""
    return [world for world in (2, 4) if world <= RANKS]


def share(rank: int) -> int:
    """The GPU of a rank; sets what NCCL and torch must be told before they let two ranks share one."""
    if RANKS > GPUS:
        # NCCL refuses two ranks of a host that share a GPU.
        os.environ |= {"NCCL_HOSTID": f"rank{rank}", "NCCL_P2P_DISABLE": "1", "NCCL_SHM_DISABLE": "1"}
        os.environ["TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"] = "1"
    return rank % GPUS
