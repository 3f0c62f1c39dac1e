"""The calls of programs written for DeepEP, over NVLink, at the shape of the targets."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from imbrex.adapters.deep_ep import Buffer, HybridEPBuffer
from imbrex.bench.exchange.job import draw
from imbrex.bench.exchange.parts import MAIN, Running
from imbrex.bench.exchange.rows import Rows

HOST_PAUSE_CYCLES = 5_000_000
"""A pause of about 2.5 ms: longer than a host takes to queue any of these calls."""


def deep_ep_calls(rows: Rows, world: int) -> None:
    """Whole calls with everything in them, routing and labels included; `cached`: with an earlier handle."""
    job = replace(MAIN, W=world)
    Running(rows, job).close()  # the traffic of this job
    legacy_calls(rows)
    hybrid_calls(rows)


def host_times(call: Callable[[], Any], repeats: int = 20) -> dict[str, Any]:
    """Medians by the host's clock, the slowest rank's. host_us: to queue the call, the ranks' meeting
    included, where it does not wait for the GPU. called_us: from an idle GPU to the results."""
    queued, called = [], []
    for _ in range(3 + repeats):
        for paused, spent in ((True, queued), (False, called)):
            # host sync: a measurement begins on an idle GPU
            torch.cuda.synchronize()
            dist.barrier()
            if paused:
                torch.cuda._sleep(HOST_PAUSE_CYCLES)
            begin = time.perf_counter()
            call()
            if not paused:
                # host sync: and ends with the results
                torch.cuda.synchronize()
            spent.append(1e6 * (time.perf_counter() - begin))
    medians = torch.tensor([statistics.median(spent[3:]) for spent in (queued, called)], device="cuda")
    dist.all_reduce(medians, op=dist.ReduceOp.MAX)
    # host sync: once a call that is timed
    return dict(zip(("host_us", "called_us"), (round(us, 1) for us in medians.tolist()), strict=True))


def legacy_calls(rows: Rows) -> None:
    job, name = rows.job, "deep_ep.Buffer"
    buffer: Any = Buffer(dist.group.WORLD)
    x, ids, weights = draw(job, rows.rank)
    per_rank, _, per_expert, token_in_rank, _ = buffer.get_dispatch_layout(ids, job.E)
    dispatch = partial(
        buffer.dispatch,
        x,
        num_tokens_per_rank=per_rank,
        is_token_in_rank=token_in_rank,
        num_tokens_per_expert=per_expert,
        topk_idx=ids,
        topk_weights=weights,
        num_worst_tokens=job.W * job.T,
    )
    received, *_, handle, _ = dispatch()
    again, back = partial(buffer.dispatch, x, handle=handle), partial(buffer.combine, received, handle)
    rows.time("dispatch", name, "compact", dispatch, **host_times(dispatch))
    rows.time("dispatch", name, "compact", again, cached=True, **host_times(again))
    rows.time("combine", name, "compact", back, cached=True, **host_times(back))
    asking = partial(dispatch, num_worst_tokens=0)
    called_us = host_times(asking)["called_us"]
    rows.time("dispatch", f"{name}, sizes told", "compact", asking, called_us=called_us)


def hybrid_calls(rows: Rows) -> None:
    job, name = rows.job, "deep_ep.HybridEPBuffer"
    buffer: Any = HybridEPBuffer(dist.group.WORLD, job.D, job.T, job.E // job.W)
    x, ids, weights = draw(job, rows.rank)
    sizes = {"num_permuted_tokens": int(job.T * job.K * job.slack), "non_blocking": True}
    routing = {"topk_idx": ids, "topk_weights": weights, "num_of_experts": job.E}
    dispatch = partial(buffer.dispatch_with_permute, hidden=x, **routing, **sizes)
    major, _, _, _, handle = dispatch()
    rows.time("dispatch", name, "expert", dispatch, **host_times(dispatch))
    again = partial(buffer.dispatch_with_permute, hidden=x, handle=handle, **sizes)
    rows.time("dispatch", name, "expert", again, cached=True, **host_times(again))
    combine = partial(buffer.combine_with_unpermute, hidden=major, handle=handle)
    rows.time("combine", name, "expert", combine, cached=True, **host_times(combine))
