"""The calls of programs written for DeepEP, over NVLink, at the shape of the targets."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import torch.distributed as dist

from imbrex.adapters.deep_ep import Buffer, HybridEPBuffer
from imbrex.bench.exchange.job import draw
from imbrex.bench.exchange.parts import MAIN, Running
from imbrex.bench.exchange.rows import Rows


def deep_ep_calls(rows: Rows, world: int) -> None:
    """Whole calls with everything in them, routing and labels included; `cached`: with an earlier handle."""
    job = replace(MAIN, W=world)
    Running(rows, job).close()  # the traffic of this job
    legacy_calls(rows)
    hybrid_calls(rows)


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
    rows.time("dispatch", name, "compact", dispatch)
    rows.time("dispatch", name, "compact", partial(buffer.dispatch, x, handle=handle), cached=True)
    rows.time("combine", name, "compact", partial(buffer.combine, received, handle), cached=True)


def hybrid_calls(rows: Rows) -> None:
    job, name = rows.job, "deep_ep.HybridEPBuffer"
    buffer: Any = HybridEPBuffer(dist.group.WORLD, job.D, job.T, job.E // job.W)
    x, ids, weights = draw(job, rows.rank)
    sizes = {"num_permuted_tokens": int(job.T * job.K * job.slack), "non_blocking": True}
    routing = {"topk_idx": ids, "topk_weights": weights, "num_of_experts": job.E}
    dispatch = partial(buffer.dispatch_with_permute, hidden=x, **routing, **sizes)
    major, _, _, _, handle = dispatch()
    rows.time("dispatch", name, "expert", dispatch)
    again = partial(buffer.dispatch_with_permute, hidden=x, handle=handle, **sizes)
    rows.time("dispatch", name, "expert", again, cached=True)
    combine = partial(buffer.combine_with_unpermute, hidden=major, handle=handle)
    rows.time("combine", name, "expert", combine, cached=True)
