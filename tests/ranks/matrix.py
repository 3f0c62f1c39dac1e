"""The matrix: every codec x transport x schedule x tensor ranks, each cell one layer forward and backward.

A cell's outputs and all gradients are compared with the dense oracle in float64. `pytest --matrix full` runs
the whole product on 4 and on 8 ranks; otherwise a share of it, in which any two of codec, transport, schedule
and tensor ranks meet.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

import imbrex
from imbrex.codec import CODECS, make
from imbrex.contracts import Backend, Codec
from imbrex.transport import TRANSPORTS, TWO_TIERS, Auto
from tests.ranks.emulated_nvlink import EmulatedNvlink
from tests.ranks.layer_jobs import Case, run_layer
from tests.ranks.pool import Pool, Ranks
from tests.ranks.reference import run_reference
from tests.ranks.test_layer import errors_beside

NODES = "auto on two nodes"
MOVING = [*(name for name in TRANSPORTS if name != "nvlink"), "auto", NODES]
ZFP = ["zfp1d-8", "zfp1d-16", "zfp2d-8", "zfp2d-12", "zfp2d-16"]
"""Of the rates, which one body serves, those whose rows can be told from wrong ones."""
LOSSY = [name for name in CODECS if name != "identity" and not name.startswith("zfp")] + ZFP
OFTEN = [name for name in LOSSY if name not in ("zfp1d-16", "zfp2d-8", "zfp2d-16")]
"""The share's: rates of one body differ in their bytes a row, which the codecs' own suite tries."""
TENSOR = (1, 2)

SCHEDULES = {
    4: ("serial", "optsche-3", "stage-major-2", "exact-2", "sequential-3", "fastermoe"),
    8: ("serial", "optsche-5", "stage-major-5", "exact-2", "sequential-3", "fastermoe"),
}
TOKENS = {4: (5, 0, 3, 8), 8: (2, 0, 1, 3)}
"""By the number of ranks, in turn: ragged chunks, ranks without tokens; on 8 more chunks than tokens."""

CONFIG = imbrex.MoEConfig(hidden_size=144, intermediate_size=8, num_experts=6, top_k=3)
NVLINK = replace(CONFIG, hidden_size=512)
"""Its kernels write fp8 rows of multiples of 512 values, and move bfloat16 alone."""
OF_BFLOAT16 = 0.03
"""2^-8 a rounding, and a value meets five of them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Cell:
    codec: str | Codec
    transport: str
    schedule: str
    tensor: int = 1
    world: int = 4

    @property
    def case(self) -> Case:
        config, dtype = (NVLINK, torch.bfloat16) if self.transport == "nvlink" else (CONFIG, torch.float32)
        return Case(config=config, dtype=dtype, tensor_parallel=self.tensor, tokens=TOKENS[self.world])

    @property
    def tolerance(self) -> float:
        """Of a relative L2 error. A value is rounded at most three times on its way, by no more than the
        bound times the largest of its row, which is about twice their root mean square. A bound that says
        less than a half (4 bits, ZFP at low rates) must still tell right rows from wrong ones."""
        codec = make(self.codec)
        moved = OF_BFLOAT16 if self.transport == "nvlink" else 1e-5
        if codec.name == "identity":
            return moved
        return min(3 * 2 * codec.error_bound(1.0, torch.float32) + moved, 0.5)


def codecs_of(transport: str) -> list[str]:
    return ["identity", "fp8"] if transport == "nvlink" else ["identity", *LOSSY]


def product(transport: str, world: int) -> list[Cell]:
    """All cells of a transport."""
    every = itertools.product(codecs_of(transport), SCHEDULES[world], TENSOR)
    return [Cell(codec=c, transport=transport, schedule=s, tensor=t, world=world) for c, s, t in every]


def share(transport: str, world: int) -> list[Cell]:
    """On 4 ranks each codec with the next schedule in turn, which turns with the transports too, and every
    schedule of a transport; on 8 the two schedules with more chunks than tokens."""
    schedules = SCHEDULES[world]
    if world == 8:
        # Its emulation takes ten times as long.
        pairs = [("identity", schedules[1], 1), ("fp8", schedules[2], 1)][transport == "nvlink" :]
    else:
        turn, pairs = [*MOVING, "nvlink"].index(transport), []
        codecs = [name for name in codecs_of(transport) if name in ("identity", *OFTEN)]
        for i in range(max(len(codecs), len(schedules))):
            schedule = schedules[(i + turn) % len(schedules)]
            pairs.append((codecs[i % len(codecs)], schedule, 1 + (i // 6 + i // 2 + turn) % 2))
    return [Cell(codec=c, transport=transport, schedule=s, tensor=t, world=world) for c, s, t in pairs]


def make_transport(ranks: Ranks, name: str) -> str | Backend | Auto:
    of_node = ranks.world_size // 2
    if name == "auto":
        return name
    if name == "nvlink":
        return EmulatedNvlink(ranks.group)
    if name == NODES:
        return Auto(ranks_per_node=of_node)
    return TRANSPORTS[name](ranks.group, **({"ranks_per_node": of_node} if name in TWO_TIERS else {}))


def run_cells(ranks: Ranks, cells: Sequence[Cell]) -> list[dict[str, Any]]:
    results = []
    for cell in cells:
        options = {"codec": cell.codec, "schedule": cell.schedule}
        options["transport"] = make_transport(ranks, cell.transport)
        try:
            results.append(run_layer(ranks, replace(cell.case, options=options)))
        except Exception as error:
            error.add_note(f"in {cell}")
            raise
    return results


def errors_of(pool: Pool, cells: Sequence[Cell]) -> list[float]:
    """The largest relative error of outputs and all gradients of every cell; they differ in codec, schedule
    and tensor ranks only."""
    first, by_cell = cells[0], []
    # A run of all of them would not end before the pool gives up.
    for at in range(0, len(cells), 15):
        by_cell += zip(*pool.run(first.world, run_cells, cells[at : at + 15]), strict=True)
    replicated = first.transport == "allreduce"
    truth = run_reference(first.case, first.world, replicated=replicated, routing=by_cell[0])
    return [max(errors_beside(truth, first.case, list(results)).values()) for results in by_cell]
