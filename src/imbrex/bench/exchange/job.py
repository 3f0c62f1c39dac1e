"""One rank's exchange, its inputs, and the check that what it measures is right."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from imbrex.bench.shapes import Shape
from imbrex.bench.skew import make_routing
from imbrex.kernels.exchange import layout as lay
from imbrex.kernels.exchange.exchange import NvlinkExchange, Routed
from imbrex.kernels.heap import SymmetricHeap
from imbrex.placement.layouts import contiguous
from imbrex.runtime.waits import all_gather_single

SEED = 17


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """T tokens a rank, width D, top-K of E experts on W ranks.

    routing: `uniform`, `one-rank` (all choices are experts of rank 0), or a skew of `imbrex.bench.skew`.
    slack: room for expert-major rows over their mean, where the routing is uniform.
    """

    T: int
    D: int
    K: int
    E: int
    W: int
    routing: str = "uniform"
    slack: float = 1.3

    @property
    def case(self) -> dict[str, int | str]:
        kind, _, value = self.routing.partition(":")
        routing = f"trace:{value.rpartition('/')[2]}" if kind == "trace" else self.routing
        return {"T": self.T, "D": self.D, "K": self.K, "E": self.E, "W": self.W, "routing": routing}


def draw(job: Job, rank: int) -> tuple[Tensor, Tensor, Tensor]:
    """x [T, D] bf16, ids [T, K] int64, weights [T, K] float32 of a rank."""
    make = torch.Generator(device="cuda").manual_seed(SEED + rank)
    if job.routing in ("uniform", "one-rank"):
        experts = job.E if job.routing == "uniform" else job.E // job.W
        ids = torch.rand(job.T, experts, device="cuda", generator=make).topk(job.K, dim=-1).indices
    else:
        shape = Shape(hidden_size=job.D, intermediate_size=job.D, num_experts=job.E, top_k=job.K)
        ids = make_routing(job.routing, shape, job.T, rank=rank, seed=SEED).ids_TK.cuda()
    weights = torch.rand(job.T, job.K, device="cuda", generator=make)
    x = torch.randn(job.T, job.D, device="cuda", generator=make).bfloat16()
    return x, ids, weights / weights.sum(-1, keepdim=True)


def shape_of(job: Job) -> lay.Shape:
    """The worst case of compact rows; of expert-major rows `slack` times the mean, or the worst case."""
    local = job.E // job.W
    worst = job.W * job.T * min(job.K, local) + 128 * local
    rows = worst if job.routing != "uniform" else min(worst, int(job.T * job.K * job.slack) + 128 * local)
    return lay.Shape(
        ranks=job.W,
        max_tokens=job.T,
        choices=job.K,
        experts=job.E,
        most_slots=local,
        row_bytes=2 * job.D,
        alignment=128 if job.T > 512 else 1,
        row_capacity=rows,
        token_capacity=max(1, (job.W - 1) * job.T),
    )


def open_exchange(
    job: Job, *, compact: bool = True, expert: bool = True, timeout: float = 10.0, **options: Any
) -> NvlinkExchange:
    """The exchange of a job. Collective. options: of `NvlinkExchange`."""
    group = dist.group.WORLD
    assert group is not None
    device = torch.device("cuda", torch.cuda.current_device())
    return NvlinkExchange(
        lambda nbytes: SymmetricHeap(group, nbytes, device),
        contiguous(job.E, job.W),
        shape_of(job),
        compact=compact,
        expert=expert,
        timeout=timeout,
        **options,
    )


def gather(tensor: Tensor) -> Tensor:
    out = tensor.new_empty(dist.get_world_size(), *tensor.shape)
    all_gather_single(out.view(-1, *tensor.shape[1:]), tensor)
    return out


def check(job: Job, exchange: NvlinkExchange, rank: int) -> Routed:
    """Rows to the bit in both layouts; combine of untouched rows gives x times the sum of its weights.

    AssertionError on every rank where one finds a fault.
    """
    routed = exchange.route(*draw(job, rank)[1:])
    problem = _find_fault(job, exchange, rank, routed)
    exchange.check(synchronize=True)
    wrong = torch.tensor([problem is not None], dtype=torch.int32, device="cuda")
    dist.all_reduce(wrong)
    assert not int(wrong), problem or "another rank's rows are wrong"
    return routed


def _find_fault(job: Job, exchange: NvlinkExchange, rank: int, routed: Routed) -> str | None:
    x, ids, weights = draw(job, rank)
    all_x, all_ids = gather(x), gather(ids)
    low, high = exchange.placement.rank_offsets[rank : rank + 2]
    here = (all_ids >= low) & (all_ids < high)
    position = routed.position_LWTK[0]
    faults: list[str] = []

    def expect(what: str, right: bool) -> None:
        faults.extend([] if right else [what])

    expect("positions", torch.equal(position >= 0, here))
    expect("positions twice", int(position[here].unique().numel()) == int(here.sum()))
    rows, together = exchange.dispatch_expert(x, ids, weights, 24)
    source, token, _ = here.nonzero(as_tuple=True)
    expect("expert-major rows", torch.equal(rows[0][position[here].long()], all_x[source, token]))
    expect("positions beside staging", torch.equal(together.position_LWTK, routed.position_LWTK))
    here_T = here.any(-1)
    here_T[rank] = False
    source, token = here_T.nonzero(as_tuple=True)
    if compact := exchange.layout.staged > exchange.layout.received:  # there is room for them
        lease, together = exchange.dispatch(x, ids, weights, 8)
        expect("compact rows", torch.equal(lease.rows[0, : len(source)], all_x[source, token]))
        expect("positions beside rows", torch.equal(together.position_LWTK, routed.position_LWTK))
    y = exchange.combine(rows, routed, num_sms=24, num_tokens=job.T)
    again = exchange.combine(rows, routed, num_sms=16, num_tokens=job.T)
    expect("the same bits on 24 and 16 SMs", torch.equal(y, again))
    want = x.float() * weights.sum(-1, keepdim=True)
    expect("sums", bool((y.float() - want).abs().max() <= 2**-7 * x.float().abs().max()))
    if compact:
        exchange.reduced_rows(job.D)[0, : len(source)] = all_x[source, token]
        y = exchange.combine_compact(x, routed, num_sms=8)
        ranks = torch.zeros(job.T, job.W, device="cuda").scatter_(1, ids // (high - low), 1.0)
        expect("sums of sums", torch.equal(y, (x.float() * ranks.sum(1, keepdim=True)).bfloat16()))
    return f"wrong: {', '.join(faults)}" if faults else None
