"""What a recorder hears of a layer: bytes to every rank, rows, drops, load and host synchronisations."""

from __future__ import annotations

from typing import Any

import torch

import imbrex
from imbrex.observe import Recorder
from imbrex.router.capacity import Capacity
from tests.ranks.pool import Pool, Ranks

E, K, D = 4, 2, 8


def run_recorded(ranks: Ranks) -> dict[str, Any]:
    """One forward and backward of three tokens a rank."""
    torch.manual_seed(0)
    gate = imbrex.Gate(capacity=Capacity(factor=0.5))
    config = imbrex.MoEConfig(hidden_size=D, intermediate_size=4, num_experts=E, top_k=K, gate=gate)
    recorder = Recorder(rank=ranks.rank)
    layer = imbrex.MoELayer(config, ranks.group, transport="alltoall", observer=recorder, layer=3)
    recorder.begin_step(0)
    x_TD = torch.randn(3, D, generator=torch.Generator().manual_seed(ranks.rank)).requires_grad_()
    layer(x_TD).sum().backward()
    recorder.end_step()
    assert layer.routing is not None
    counters = {
        name: value for (name, where), value in recorder.take_counters().items() if ("layer", 3) in where
    }
    spans = {span.name for span in recorder.spans}
    return {"ids": layer.routing.ids_TK, "kept": layer.routing.kept_TK, "counters": counters, "spans": spans}


def crossing(ids_TK: torch.Tensor, home: int) -> int:
    """Tokens that want an expert of rank `home`."""
    return int(((ids_TK // (E // 2) == home) & (ids_TK >= 0)).any(1).sum())


def test_counters_of_a_step(pool: Pool) -> None:
    results = pool.run(2, run_recorded)
    ids = torch.stack([r["ids"] for r in results])
    for rank, result in enumerate(results):
        counters, other = result["counters"], 1 - rank
        kept = result["kept"]
        assert counters["drops"] == int((~kept).sum())
        assert counters["expert_load"] == torch.bincount(ids[rank][kept], minlength=E).tolist()
        here = (ids // (E // 2) == rank) & (ids >= 0)
        assert counters["rows"] == int(here.sum())
        # One to plan the forward, one that checks in before the router's sums; the backward has none.
        assert counters["host_syncs"] == 2
        sent, received = crossing(ids[rank], other), crossing(ids[other], rank)
        # Out: D floats and three labels of K, and D of the gradient. Back: D, and D and K of the gradients.
        out, back = 4 * (D + 3 * K) + 4 * D, 4 * D + 4 * (D + K)
        assert counters["bytes_sent"][other] == sent * out + received * back
        assert counters["bytes_sent"][rank] == 0
        phases = {"route", "plan", "dispatch", "experts", "combine", "combine_backward", "dispatch_backward"}
        assert phases <= result["spans"]
