"""What does a training step need of memory at its peak? `python benchmarks/peaks.py`, on one GPU.

The models and sides of `models.py`, two ranks as two processes of one GPU. Nothing is timed: their kernels
take turns. Over such a group NCCL does not run; gloo stands in for it, and where gloo takes no CUDA tensors
they are copied to the host. So NCCL's own buffers are in no peak here. `imbrex-ep` is measured twice: as it
is, and with gate and up held beside their gradient, as until c28cc3f.
"""

from __future__ import annotations

import argparse
import gc
import os
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import transformers
from models import GIB, MODELS, SEQUENCE, Side
from torch import Tensor
from torch.multiprocessing.spawn import spawn

from imbrex.bench.exchange.clock import ENVIRONMENT
from imbrex.kernels.ffn import ffn
from imbrex.transport import Nvlink

WORLD = 2
ON_ONE_GPU = {"TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
"""torch's symmetric memory refuses ranks that share a device unless it is told not to."""


def all_gather(
    output_tensor: Tensor, input_tensor: Tensor, group: Any = None, async_op: bool = False
) -> None:
    parts = [
        torch.empty(input_tensor.numel(), dtype=input_tensor.dtype) for _ in range(dist.get_world_size(group))
    ]
    dist.all_gather(parts, input_tensor.detach().flatten().cpu(), group=group)
    output_tensor.copy_(torch.cat(parts).view_as(output_tensor))


def reduce_scatter(
    output: Tensor, input: Tensor, op: Any = None, group: Any = None, async_op: bool = False
) -> None:
    """The sum, or the mean; other ways to divide are left out, for no byte depends on them."""
    total = input.detach().flatten().float().cpu()
    dist.all_reduce(total, group=group)
    ranks = dist.get_world_size(group)
    total = total / ranks if op == dist.ReduceOp.AVG else total
    output.copy_(total.chunk(ranks)[dist.get_rank(group)].view_as(output))


def all_to_all(
    output: Tensor, rows: Tensor, sizes: Any = None, own_sizes: Any = None, group: Any = None
) -> None:
    came = torch.empty(output.shape, dtype=output.dtype)
    dist.all_to_all_single(came, rows.detach().cpu(), sizes, own_sizes, group=group)
    output.copy_(came)


class RowsBetween(torch.autograd.Function):
    """Stands in for torch's differentiable all-to-all."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, sizes: list[int], own_sizes: list[int], group: Any) -> Tensor:
        ctx.sizes, ctx.group = (own_sizes, sizes), group
        output = rows.new_empty(sum(sizes), *rows.shape[1:])
        all_to_all(output, rows, sizes, own_sizes, group)
        return output

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        sizes, own_sizes = ctx.sizes
        output = gradients[0].new_empty(sum(sizes), *gradients[0].shape[1:])
        all_to_all(output, gradients[0], sizes, own_sizes, ctx.group)
        return output, None, None, None


def stand_in() -> None:
    """Put these in the places of what gloo cannot do with CUDA tensors, and let rows go over NVLink's kernels
    though hosts talk over gloo, as those of DeepEP's calls do."""
    from transformers.distributed import expert_parallel

    Nvlink.of_or_reason = partial(Nvlink.of_or_reason, from_cpus=True)
    dist.all_gather_into_tensor = all_gather
    dist.reduce_scatter_tensor = reduce_scatter
    parts: Any = expert_parallel
    parts.all_gather_into_tensor = all_gather
    parts.all_to_all_single = lambda output, rows, group=None: all_to_all(output, rows, group=group)
    parts.all_to_all_single_autograd = RowsBetween.apply


def used() -> int:
    """Bytes of the GPU that no rank's allocator of torch has: heaps and contexts of all."""
    torch.cuda.synchronize()
    dist.barrier()
    free, total = torch.cuda.mem_get_info()
    reserved = torch.tensor(torch.cuda.memory_reserved())
    dist.all_reduce(reserved)
    dist.barrier()
    return total - free - int(reserved)


def peak_of(step: Callable[[], None]) -> float:
    """GiB of torch's allocator at the peak of the second of two steps, of the rank that has most."""
    step()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    step()
    torch.cuda.synchronize()
    most = torch.tensor(torch.cuda.max_memory_allocated() / GIB)
    dist.all_reduce(most, dist.ReduceOp.MAX)
    return most.item()


def measure(rank: int, model: str, name: str, tokens: int) -> None:
    config, before = MODELS[model].config(), used()
    side = Side(name, config, torch.device("cuda", 0), WORLD)
    side.net.train()
    torch.manual_seed(1 + rank)
    length = min(tokens, SEQUENCE)
    ids = torch.randint(config.vocab_size, (tokens // length, length), device="cuda")
    optimizer = torch.optim.AdamW(side.net.parameters(), lr=1e-5, fused=True)

    def step() -> None:
        side.gradients(ids)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    lines = [f"{name} {peak_of(step):.2f}"]
    heaps = (used() - before) / WORLD / GIB
    if name.startswith("imbrex"):
        gradients = ffn.ffn_gradients
        ffn.ffn_gradients = lambda *given, **how: gradients(*given, **how | {"consume": False})
        lines.append(f"held twice {peak_of(step):.2f}")
        ffn.ffn_gradients = gradients
    if rank == 0:
        print(f"{model} {tokens} tokens: {', '.join(lines)} GiB, and outside {heaps:.2f}", flush=True)
    side.close()


def work(rank: int, folder: str, models: list[str], sides: list[str], tokens: int) -> None:
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(WORLD)}
    torch.cuda.set_device(0)
    where = f"file://{folder}/store"
    dist.init_process_group("gloo", init_method=where, rank=rank, world_size=WORLD)
    transformers.logging.set_verbosity_error()
    stand_in()
    for model in models:
        for name in sides:
            try:
                measure(rank, model, name, tokens)
            except Exception as error:  # noqa: BLE001 (the other sides are measured all the same)
                print(
                    f"{model} {name} failed on rank {rank}: {type(error).__name__}: {error}"[:1500],
                    flush=True,
                )
            gc.collect()
            torch.cuda.empty_cache()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--models", default="mixtral-8x7b,deepseek-v2-lite,phi3.5-moe")
    parser.add_argument("--sides", default="imbrex-ep,transformers-ep,imbrex")
    parser.add_argument("--tokens", type=int, default=4096)
    args = parser.parse_args()
    os.environ |= ENVIRONMENT | ON_ONE_GPU | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29400"}
    with tempfile.TemporaryDirectory() as folder:
        spawn(
            work,
            (str(Path(folder)), args.models.split(","), args.sides.split(","), args.tokens),
            nprocs=WORLD,
        )


if __name__ == "__main__":
    main()
