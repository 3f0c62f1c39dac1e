"""The memory of a plan beside that of a layer on gloo ranks, as the kernel counts its pages."""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from imbrex import MoEConfig, MoELayer
from imbrex.contracts import Routing
from imbrex.simulate import Fabric, Layout, Profile, Request, Shape, Spread, Stragglers, World, islands
from imbrex.simulate.memory import memory_of_rows
from imbrex.transport import Hierarchical, Pipe, Tiers, TwoLevel
from tests.ranks.pool import Pool, Ranks

CORES = Profile.load("two-cores")
WORLD, NODE, TOKENS = 4, 2, 512
WAYS = ("alltoall", "tiered", "hierarchical", "allgather", "2dh", "pipe")
SHAPE = Shape(width=1024, inner=16, experts=16, top_k=2, value_bytes=4)
RESET = Path("/proc/self/clear_refs")
MMAP_THRESHOLD = -3
"""glibc's M_MMAP_THRESHOLD: what is larger has pages of its own, which go back as it is freed."""

pytestmark = pytest.mark.skipif(not RESET.exists(), reason="a peak is reset by Linux alone")


class Chosen(nn.Module):
    """A gate that gives the same choices at every call."""

    is_collective = False

    def __init__(self, ids_TK: Tensor) -> None:
        super().__init__()
        self.ids_TK = ids_TK

    def forward(self, x_TD: Tensor, **how: Any) -> Routing:
        weights_TK = torch.full(self.ids_TK.shape, 0.5, requires_grad=torch.is_grad_enabled())
        return Routing(ids_TK=self.ids_TK, weights_TK=weights_TK)


def memory(name: str) -> int:
    """Bytes that /proc/self/status says of this process."""
    (line,) = [line for line in Path("/proc/self/status").read_text().splitlines() if name in line]
    return int(line.split()[1]) << 10


def peak_of_layer(ranks: Ranks, transport: str, schedule: str, uneven: bool, training: bool) -> float:
    """Bytes that a layer takes at its peak. uneven: all choose the first experts, which are on one rank."""
    config = MoEConfig(
        hidden_size=SHAPE.width, intermediate_size=SHAPE.inner, num_experts=SHAPE.experts, top_k=SHAPE.top_k
    )
    noded = {"tiered": Tiers, "hierarchical": Hierarchical, "2dh": TwoLevel, "pipe": Pipe}.get(transport)
    by = transport if noded is None else noded(ranks.group, ranks_per_node=NODE)
    layer = MoELayer(config, ranks.group, transport=by, schedule=schedule)
    torch.manual_seed(ranks.rank)
    scores_TE = torch.arange(16.0, 0, -1).expand(TOKENS, 16) if uneven else torch.rand(TOKENS, 16)
    layer.gate = Chosen(scores_TE.topk(SHAPE.top_k).indices)  # type: ignore[assignment]
    x_TD = torch.randn(TOKENS, SHAPE.width, requires_grad=training)

    def step() -> None:
        y_TD = layer(x_TD)
        if training:
            y_TD.sum().backward()

    libc = ctypes.CDLL(None)
    assert libc.mallopt(MMAP_THRESHOLD, 1 << 17)
    try:
        with torch.set_grad_enabled(training):
            step()  # gradients of parameters are there now
            dist.barrier(ranks.group)
            before = memory("VmRSS")
            RESET.write_text("5")
            step()
            peak = memory("VmHWM") - before
            dist.barrier(ranks.group)
    finally:
        libc.mallopt(MMAP_THRESHOLD, 32 << 20)
        layer.close()
    return peak


CASES = [
    *((way, "serial", uneven, training) for way in WAYS[:2] for uneven, training in ((0, 1), (1, 0))),
    *((way, "serial", both, both) for way in WAYS for both in (0, 1)),
    *((way, "optsche-1", both, both) for way in ("alltoall", "tiered", "allgather") for both in (0, 1)),
    *((way, "optsche-2", both, both) for way in ("tiered", "2dh") for both in (0, 1)),
    *(("alltoall", "optsche-4", both, both) for both in (0, 1)),
]


@pytest.mark.parametrize(("transport", "schedule", "uneven", "training"), CASES)
def test_a_layer_takes_what_its_plan_says(
    pool: Pool, transport: str, schedule: str, uneven: int, training: int
) -> None:
    """Uneven, one rank has all rows of all ranks, and the pool of a node all tokens."""
    measured = max(pool.run(WORLD, peak_of_layer, transport, schedule, bool(uneven), bool(training)))
    request = Request(shape=SHAPE, ranks=WORLD, tokens=TOKENS, mode="train" if training else "forward")
    nodes: Fabric = islands(CORES, WORLD, NODE)
    world = World(profile=CORES, fabric=nodes, spread=Spread(), stragglers=Stragglers())
    layout = Layout(ep=WORLD, transport=transport, schedule=schedule)
    said = memory_of_rows(request, world, layout, float(WORLD) if uneven else 1.0)
    # When the pieces of several chunks are freed differs from run to run.
    least, most = (0.98, 1.25) if schedule == "serial" else (0.95, 1.6)
    assert least * measured < said < most * measured
