"""One rank's exchange, its inputs, and the check that what it measures is right."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from imbrex.kernels import exchange_layout as lay
from imbrex.kernels.exchange import NvlinkExchange, Routed
from imbrex.kernels.heap import SymmetricHeap
from imbrex.placement.layouts import contiguous


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """T tokens a rank, width D, top-K of E experts; `routing` names how they are drawn."""

    T: int
    D: int
    K: int
    E: int
    W: int
    routing: str = "uniform"
    slack: float = 1.3

    @property
    def case(self) -> dict[str, int | str]:
        return {
            "T": self.T,
            "D": self.D,
            "K": self.K,
            "E": self.E,
            "W": self.W,
            "dtype": "bf16",
            "routing": self.routing,
        }


def draw(job: Job, rank: int) -> tuple[Tensor, Tensor, Tensor]:
    """x [T, D] bf16, ids [T, K] int64, weights [T, K] float32 of a rank."""
    make = torch.Generator(device="cuda").manual_seed(17 + rank)
    scores = torch.rand(job.T, job.E, device="cuda", generator=make)
    if job.routing == "zipf":
        scores = scores.log() / (1.0 / torch.arange(1, job.E + 1, device="cuda") ** 1.2)
    elif job.routing == "one-rank":
        scores[:, : job.E // job.W] += 1
    ids = scores.topk(job.K, dim=-1).indices
    weights = torch.rand(job.T, job.K, device="cuda", generator=make)
    x = torch.randn(job.T, job.D, device="cuda", generator=make).bfloat16()
    return x, ids, weights / weights.sum(-1, keepdim=True)


def open_exchange(
    job: Job, *, compact: bool = True, expert: bool = True, combine_team: int = 1
) -> NvlinkExchange:
    """Sized for the worst case of compact rows, and for `slack` times the mean of expert-major rows."""
    group = dist.group.WORLD
    assert group is not None
    local = job.E // job.W
    worst = job.W * job.T * min(job.K, local) + 128 * local
    rows = worst if job.routing != "uniform" else min(worst, int(job.T * job.K * job.slack) + 128 * local)
    shape = lay.Shape(
        ranks=job.W,
        max_tokens=job.T,
        choices=job.K,
        experts=job.E,
        most_slots=local,
        row_bytes=2 * job.D,
        alignment=128 if job.T > 512 else 1,
        row_capacity=rows,
        token_capacity=(job.W - 1) * job.T,
    )
    device = torch.device("cuda", torch.cuda.current_device())
    return NvlinkExchange(
        lambda nbytes: SymmetricHeap(group, nbytes, device),
        contiguous(job.E, job.W),
        shape,
        compact=compact,
        expert=expert,
        timeout=10.0,
        combine_team=combine_team,
    )


def gather(tensor: Tensor) -> Tensor:
    out = tensor.new_empty(dist.get_world_size(), *tensor.shape)
    dist.all_gather_into_tensor(out.view(-1, *tensor.shape[1:]), tensor)
    return out


def check(job: Job, exchange: NvlinkExchange, rank: int) -> Routed:
    """Rows to the bit in both layouts; combine of untouched rows gives x times the sum of its weights."""
    x, ids, weights = draw(job, rank)
    routed = exchange.route(ids, weights)
    all_x, all_ids = gather(x), gather(ids)
    low, high = exchange.placement.rank_offsets[rank : rank + 2]
    here = (all_ids >= low) & (all_ids < high)
    position = routed.position_LWTK[0]
    assert torch.equal(position >= 0, here)
    assert int(position[here].unique().numel()) == int(here.sum())
    rows = exchange.pull(x, routed, 24)
    source, token, _ = here.nonzero(as_tuple=True)
    assert torch.equal(rows[0][position[here].long()], all_x[source, token])
    wanted = here.any(-1)
    wanted[rank] = False
    source, token = wanted.nonzero(as_tuple=True)
    if exchange.layout.staged > exchange.layout.received:  # room for compact rows
        received = exchange.push(x, routed, 8)
        assert torch.equal(received[0, : len(source)], all_x[source, token])
    y = exchange.combine(rows, routed, num_sms=24, num_tokens=job.T)
    again = exchange.combine(rows, routed, num_sms=16, num_tokens=job.T)
    assert torch.equal(y, again)
    want = x.float() * weights.sum(-1, keepdim=True)
    assert (y.float() - want).abs().max() <= 2**-7 * x.float().abs().max()
    exchange.reduced_rows(job.D)[0, : len(source)] = all_x[source, token]
    y = exchange.combine_compact(x, routed, num_sms=8)
    ranks = torch.zeros(job.T, job.W, device="cuda")
    ranks.scatter_(1, ids // (high - low), 1.0)
    assert torch.equal(y, (x.float() * ranks.sum(1, keepdim=True)).bfloat16())
    exchange.check(synchronize=True)
    return routed
