"""Sums and gathers over the ranks of a group as torch operators: one node each for `torch.compile`."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor
from torch.library import custom_op

from imbrex.runtime import waits


def _group(name: str) -> dist.ProcessGroup:
    return dist.distributed_c10d._resolve_process_group(name)  # pyright: ignore


@custom_op("imbrex::sum_over_ranks", mutates_args=())
def sum_over_ranks(x: Tensor, group_name: str, group_size: int) -> Tensor:
    """The sum of `x` over the ranks of a group. Its gradient: see `GlobalBatch`."""
    total = x.clone(memory_format=torch.contiguous_format)
    group = _group(group_name)
    waits.run(
        "route",
        lambda: dist.all_reduce(total, group=group, async_op=True),
        on_host=not total.is_cuda,
        group=group,
    )
    return total


@sum_over_ranks.register_fake
def _(x: Tensor, group_name: str, group_size: int):
    return torch.empty_like(x, memory_format=torch.contiguous_format)


@custom_op("imbrex::sum_over_ranks_backward", mutates_args=())
def sum_over_ranks_backward(d_total: Tensor, group_size: int) -> Tensor:
    """The gradient of a sum over ranks, whose total every rank differentiates."""
    return d_total * group_size


@sum_over_ranks_backward.register_fake
def _(d_total: Tensor, group_size: int):
    return torch.empty_like(d_total)


def _sum_setup(ctx, inputs, output):
    ctx.group_size = inputs[2]


def _sum_backward(ctx, d_total):
    return sum_over_ranks_backward(d_total, ctx.group_size), None, None


sum_over_ranks.register_autograd(_sum_backward, setup_context=_sum_setup)


@custom_op("imbrex::gather_over_ranks", mutates_args=())
def gather_over_ranks(x: Tensor, group_name: str, group_size: int) -> Tensor:
    """`x` [...] of every rank of a group as [group_size, ...]. Not differentiable."""
    gathered = x.new_empty(group_size * x.numel())
    flat, group = x.flatten(), _group(group_name)

    def begin():
        return waits.all_gather_single(gathered, flat, group=group, async_op=True)

    waits.run("route", begin, on_host=not x.is_cuda, group=group)
    return gathered.view(group_size, *x.shape)


@gather_over_ranks.register_fake
def _(x: Tensor, group_name: str, group_size: int):
    return x.new_empty(group_size, *x.shape)
