"""Layouts that the planner says can run are layers that run."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.device_mesh import init_device_mesh

from imbrex import MoEConfig, MoELayer, sync_gradients
from imbrex.placement import contiguous
from imbrex.simulate import Layout, Profile, Request, Shape, Spread, Stragglers, World, choose, islands
from imbrex.transport import Hierarchical, Pipe, Tiers, TwoLevel
from tests.ranks.pool import Pool, Ranks

CORES = Profile.load("two-cores")
RANKS, NODE = 4, 2
CONFIG = MoEConfig(hidden_size=16, intermediate_size=8, num_experts=8, top_k=2)
NODED: dict[str, Any] = {"hierarchical": Hierarchical, "tiered": Tiers, "2dh": TwoLevel, "pipe": Pipe}


def planned() -> list[Layout]:
    """Of every division and transport that can run, the schedules in turn."""
    request = Request(
        shape=Shape(width=16, inner=8, experts=8, top_k=2, value_bytes=4), ranks=RANKS, tokens=8
    )
    fabric = islands(CORES, RANKS, NODE)
    world = World(profile=CORES, fabric=fabric, spread=Spread(), stragglers=Stragglers())
    by_way: dict[tuple[int, int, str], list[Layout]] = {}
    for plan in choose(request, world):
        layout = plan.layout
        if plan.outcome is not None and layout.codec == "identity" and not layout.replicas:
            by_way.setdefault((layout.ep, layout.tp, layout.transport), []).append(layout)
    every = [sorted(several, key=lambda of: of.schedule) for several in by_way.values()]
    return [several[number % len(several)] for number, several in enumerate(every)]


def run_layouts(ranks: Ranks, layouts: list[Layout]) -> list[bool]:
    """Whether a step of each has gradients of all tokens that are finite, and experts as many as planned."""
    found = []
    for layout in layouts:
        sizes = layout.dp, layout.ep, layout.tp
        mesh = init_device_mesh("cpu", sizes, mesh_dim_names=("dp", "ep", "tp"))
        noded = NODED.get(layout.transport)
        group = mesh["ep", "tp"]._flatten().get_group()
        transport = layout.transport if noded is None else noded(group, ranks_per_node=NODE)
        moe = MoELayer(CONFIG, mesh, transport=transport, codec=layout.codec, schedule=layout.schedule)
        x_TD = torch.randn(8, 16, requires_grad=True)
        moe(x_TD).square().sum().backward()
        sync_gradients(moe)
        assert x_TD.grad is not None
        same = moe.placement == contiguous(8, layout.ep)
        found.append(same and bool(x_TD.grad.isfinite().all()) and bool(x_TD.grad.any(1).all()))
        moe.close()
    return found


def test_layouts_that_are_planned_run(pool: Pool) -> None:
    layouts = planned()
    ways = {layout.transport for layout in layouts}
    assert ways == {"alltoall", "allgather", *NODED}
    assert len({layout.schedule for layout in layouts}) == 4
    assert len(layouts) >= 15
    assert pool.run(RANKS, run_layouts, layouts) == [[True] * len(layouts)] * RANKS
