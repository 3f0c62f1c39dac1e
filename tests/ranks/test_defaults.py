"""Whatever torch's default dtype and device are, results are the same to the bit.

The device `meta` stands in for a GPU: what is made there by mistake has no values, and meets the CPU's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch

import imbrex
from imbrex.router.capacity import Capacity
from imbrex.transport import TWO_TIERS
from tests.emulated import kernel
from tests.ranks import test_deep_ep, test_deep_ep_hybrid
from tests.ranks.layer_jobs import Case, run_layer
from tests.ranks.matrix import LOSSY, make_transport
from tests.ranks.pool import Pool, Ranks
from tests.ranks.test_deep_ep import TOKENS
from tests.ranks.test_deep_ep_nvlink import over_nvlink

KINDS = ["bfloat16", "float64", "meta", "deterministic"]


@contextmanager
def defaults(kind: str) -> Iterator[None]:
    """Torch's default dtype or device, of a user who set it; or deterministic operators alone, where memory
    that nobody wrote is NaN."""
    dtype = torch.get_default_dtype()
    try:
        if kind in ("meta", "cuda"):
            torch.set_default_device(kind)
        elif kind == "deterministic":
            torch.use_deterministic_algorithms(True)
        else:
            torch.set_default_dtype(getattr(torch, kind))
        yield
    finally:
        torch.set_default_dtype(dtype)
        torch.set_default_device(None)
        torch.use_deterministic_algorithms(False)


def run_under(ranks: Ranks, kind: str, function: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
    with defaults(kind):
        return function(ranks, *arguments)


class Under:
    """A pool whose ranks have another default."""

    def __init__(self, pool: Pool, kind: str) -> None:
        self.pool, self.kind = pool, kind

    def run(self, world: int, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        return self.pool.run(world, run_under, self.kind, function, arguments)


GATE = imbrex.Gate(score="sigmoid", bias=True, capacity=Capacity(factor=1.0))
LOSSES = imbrex.AuxLosses(load_balance=0.01, z=0.001)
CONFIG = imbrex.MoEConfig(hidden_size=128, intermediate_size=8, num_experts=6, top_k=3)
RICH = replace(CONFIG, gate=GATE, bias=True, shared=imbrex.SharedExperts(intermediate_size=8, gated=True))
NVLINK = replace(CONFIG, hidden_size=512)
PLACES = [[0, 1, 2, 3], [4, 5, 0, 1]]

Cells = list[tuple[str, dict[str, Any], dict[str, Any]]]
CELLS: Cells = [
    *((name, {"config": RICH, "losses": LOSSES}, {}) for name in ("alltoall", "allgather", "allreduce")),
    *((name, {}, {"schedule": "optsche-2"}) for name in TWO_TIERS),
    *(("alltoall", {}, {"codec": name}) for name in LOSSY),
    *(("alltoall", {"slots": PLACES}, {"split": split}) for split in ("even", "balanced", "nearest")),
    ("alltoall", {"tensor_parallel": 2}, {"schedule": "exact-2"}),
    ("allgather", {}, {"schedule": "stage-major-2", "experts": "loop"}),
    ("alltoall", {}, {"schedule": "fastermoe"}),
]
OVER_NVLINK: Cells = [
    ("nvlink", {}, {}),
    ("nvlink", {}, {"codec": "fp8", "schedule": "optsche-2"}),
    ("nvlink", {"slots": PLACES}, {"split": "nearest"}),
]


def run_cells(ranks: Ranks, cells: Cells) -> list[dict[str, Any]]:
    found = []
    for transport, change, options in cells:
        nvlink = transport == "nvlink"
        config, dtype = (NVLINK, torch.bfloat16) if nvlink else (CONFIG, torch.float32)
        case = replace(Case(config=config, dtype=dtype, tokens=(3, 5)), **change)
        made = make_transport(ranks, transport)
        try:
            found.append(run_layer(ranks, replace(case, options={**options, "transport": made})))
        except Exception as error:
            error.add_note(f"in {transport}, {change}, {options}")
            raise
    return found


def same(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    return a == b


@pytest.fixture(scope="module")
def truth(pool: Pool) -> Callable[[Cells], Any]:
    """What cells come to where nobody set a default; computed once."""
    known: dict[int, Any] = {}

    def of(cells: Cells) -> Any:
        if id(cells) not in known:
            known[id(cells)] = pool.run(2, run_cells, cells)
        return known[id(cells)]

    return of


def compare(truth: list[Any], pool: Pool, kind: str, cells: Cells) -> None:
    found = Under(pool, kind).run(2, run_cells, cells)
    for by_cell in zip(cells, *truth, *found, strict=True):
        cell, first, second, *others = by_cell
        assert same(first, others[0]), cell
        assert same(second, others[1]), cell


@pytest.mark.parametrize("kind", KINDS)
def test_the_layer(pool: Pool, truth: Callable[[Cells], Any], kind: str) -> None:
    compare(truth(CELLS), pool, kind, CELLS)


@pytest.mark.skipif(not kernel.available(), reason="the emulation needs g++")
@pytest.mark.parametrize("kind", KINDS)
def test_the_layer_over_nvlink(pool: Pool, truth: Callable[[Cells], Any], kind: str) -> None:
    compare(truth(OVER_NVLINK), pool, kind, OVER_NVLINK)


class Emulated(Under):
    def run(self, world: int, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        return super().run(world, over_nvlink, function, arguments)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("joined", [Under, Emulated])
def test_deep_ep_s_buffers(pool: Pool, kind: str, joined: type[Under]) -> None:
    if joined is Emulated and not kernel.available():
        pytest.skip("the emulation needs g++")
    ranks: Any = joined(pool, kind)
    test_deep_ep.test_every_call(ranks, 2, TOKENS)
    test_deep_ep_hybrid.test_compact_rows(ranks, 2, TOKENS)
    test_deep_ep_hybrid.test_expert_major_rows(ranks, 2, TOKENS, 64)
