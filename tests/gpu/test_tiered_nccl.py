"""The dispatcher over two tiers on GPUs: NCCL between nodes, bytes or kernels over NVLink inside them.

On two GPUs nodes are one rank each, or there is one node of two; and by four processes, two to a GPU, two
nodes of two: NCCL refuses two ranks on one GPU of one host only, and NCCL_HOSTID says where a host ends.
"""

from __future__ import annotations

import os
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from imbrex.transport import Tiers
from tests.gpu.gpus import GPUS, RANKS
from tests.ranks.layer_jobs import Case, run_layer
from tests.ranks.matrix import NVLINK, OF_BFLOAT16
from tests.ranks.pool import Pool, Ranks
from tests.ranks.test_layer import SMALL, largest_error

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(180),
    pytest.mark.skipif(RANKS < 2, reason="nodes need two GPUs"),
]
SCHEDULES = ["serial", "optsche-3"]


def run_on_nodes(ranks: Ranks, case: Case, per_node: int, inside: str) -> dict[str, Any]:
    made = Tiers(ranks.group, ranks_per_node=per_node, inside=inside)
    options = case.options | {"transport": made}
    return run_layer(ranks, Case(config=case.config, dtype=case.dtype, tokens=case.tokens, options=options))


def case_of(inside: str, schedule: str) -> tuple[Case, float]:
    """The case, and the largest relative error. Gradients of bfloat16 differ by rounding."""
    options = {"schedule": schedule}
    if inside == "nvlink":
        return Case(config=NVLINK, dtype=torch.bfloat16, tokens=(64, 0, 37), options=options), OF_BFLOAT16
    return Case(config=SMALL, options=options), 1e-5


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize(("per_node", "inside"), [(1, "alltoall"), (2, "alltoall"), (2, "nvlink")])
def test_oracle(nccl: Pool, per_node: int, inside: str, schedule: str) -> None:
    case, most = case_of(inside, schedule)
    errors = largest_error(case, 2, nccl.run(2, run_on_nodes, case, per_node, inside))
    assert max(errors.values()) < most, errors


def be_one_of_four(rank: int, folder: str) -> None:
    os.environ |= {"NCCL_HOSTID": f"node{rank // 2}", "NCCL_NET": "Socket"}
    torch.cuda.set_device(rank % 2)
    store, wait = f"file://{folder}/store", timedelta(seconds=90)
    dist.init_process_group("nccl", init_method=store, rank=rank, world_size=4, timeout=wait)
    ranks = Ranks(rank=rank, world_size=4, group=dist.group.WORLD, device=f"cuda:{rank % 2}")
    results = {}
    for inside in ("nvlink", "alltoall"):
        for schedule in SCHEDULES:
            results[inside, schedule] = run_on_nodes(ranks, case_of(inside, schedule)[0], 2, inside)
    torch.save(results, Path(folder) / str(rank))
    torch.cuda.synchronize()
    dist.barrier()


@pytest.mark.skipif(GPUS < 2, reason="the ranks of a node want a GPU each")
def test_two_nodes_of_two_on_two_gpus(tmp_path: Path) -> None:
    mp.spawn(be_one_of_four, (str(tmp_path),), nprocs=4)  # pyright: ignore[reportPrivateImportUsage]
    results = [torch.load(tmp_path / str(rank), weights_only=False) for rank in range(4)]
    for inside, schedule in results[0]:
        case, most = case_of(inside, schedule)
        errors = largest_error(case, 4, [of_rank[inside, schedule] for of_rank in results])
        assert max(errors.values()) < most, (inside, schedule, errors)
