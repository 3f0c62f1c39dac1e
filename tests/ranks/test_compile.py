"""The layer is one graph: forward and backward under torch.compile with its default arguments."""

from __future__ import annotations

import dataclasses
import os
import signal
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch._dynamo
import torch.distributed as dist
from torch import Tensor

import imbrex
import imbrex.overlap
from imbrex.contracts import Dispatched, RowForm
from imbrex.runtime import compiling, roll
from tests.emulated import kernel
from tests.poison import real_empty
from tests.ranks.emulated_nvlink import EmulatedNvlink
from tests.ranks.layer_jobs import Case, coefficients, make_layer, tokens_of
from tests.ranks.pool import Pool, RankError, Ranks

CONFIG = imbrex.MoEConfig(hidden_size=8, intermediate_size=16, num_experts=6, top_k=2)
WIDE = imbrex.MoEConfig(hidden_size=64, intermediate_size=24, num_experts=6, top_k=2)
EMULATED = pytest.mark.skipif(not kernel.available(), reason="the emulation needs g++")


def run_compiled(ranks: Ranks, case: Case, backend: str) -> dict[str, float]:
    """Largest differences between the eager and the compiled layer, over two different batches."""
    with real_empty():
        return compare(ranks, case, backend)


def compare(ranks: Ranks, case: Case, backend: str) -> dict[str, float]:
    torch.compiler.reset()
    torch._dynamo.utils.counters.clear()
    layer = make_layer(case, ranks.group)
    replicated = layer.exchange.transport.replicated
    compiled = torch.compile(layer, backend=backend, dynamic=True)
    worst: dict[str, float] = {}
    for shift in (0, 1):
        x = tokens_of(case, ranks.rank + (0 if replicated else shift), replicated=replicated)
        x = (x + shift).requires_grad_()
        seen = []
        for run in (layer, compiled):
            layer.zero_grad()
            x.grad = None
            y = run(x)
            ((y * coefficients(y)).sum() + layer.aux_loss()).backward()
            seen.append({"y": y.detach(), "x": x.grad, **{n: p.grad for n, p in layer.named_parameters()}})
        for name, eager in seen[0].items():
            difference = (eager - seen[1][name]).abs().max().item() if eager.numel() else 0.0
            worst[name] = max(worst.get(name, 0.0), difference)
    counters = torch._dynamo.utils.counters
    assert counters["stats"]["unique_graphs"] == 1, counters
    assert not counters["graph_break"], counters["graph_break"]
    return worst


@pytest.mark.untraced
@pytest.mark.parametrize("transport", ["alltoall", "allreduce"])
def test_one_graph_equals_eager(pool: Pool, transport: str) -> None:
    """How rows move is inside one operator; tokens that all ranks have make another graph."""
    losses = imbrex.AuxLosses(load_balance=0.01, z=0.001)
    case = Case(config=CONFIG, tokens=(5, 4, 3, 8), losses=losses, options={"transport": transport})
    for worst in pool.run(2, run_compiled, case, "aot_eager"):
        assert max(worst.values()) < 1e-5, worst


@pytest.mark.untraced
def test_one_graph_with_replicas_and_a_codec(pool: Pool) -> None:
    options = {"transport": "alltoall", "codec": "int8"}
    slots = [[0, 1, 2], [3, 0, 4, 5, -1]]
    case = Case(config=CONFIG, tokens=(5, 4, 3, 8), slots=slots, options=options)
    for worst in pool.run(2, run_compiled, case, "aot_eager"):
        assert max(worst.values()) < 1e-5, worst


def twice(layer: imbrex.MoELayer) -> Callable[[Tensor], Tensor]:
    """Two calls of a layer, of which the first one's losses are read by nobody."""
    return lambda x: layer(x) + layer(2 * x)


def run_beside_eager(ranks: Ranks, case: Case, calls: int = 1) -> list[float]:
    """Largest differences from eager ranks: of all ranks compiled, then of the last one alone."""
    torch.compiler.reset()
    layer = make_layer(case, ranks.group)
    run = layer if calls == 1 else twice(layer)
    compiled, last = torch.compile(run, backend="aot_eager"), ranks.rank == ranks.world_size - 1
    seen = []
    with real_empty():
        for is_compiled in (False, True, last):
            layer.zero_grad()
            x = tokens_of(case, ranks.rank).requires_grad_()
            y = (compiled if is_compiled else run)(x)
            ((y * coefficients(y)).sum() + layer.aux_loss()).backward()
            seen.append([y.detach(), x.grad, *(p.grad for p in layer.parameters())])
    return [max((a - b).abs().max().item() for a, b in zip(seen[0], s, strict=True)) for s in seen[1:]]


@pytest.mark.untraced
@pytest.mark.parametrize("meets", [False, True])
def test_a_compiled_rank_beside_an_eager_one(pool: Pool, meets: bool) -> None:
    """Ranks meet before a router's sums, and before a combine where one of them has not promised its rows:
    with losses, with shared experts."""
    shared = imbrex.layer.SharedExperts(intermediate_size=4) if meets else None
    config = dataclasses.replace(CONFIG, shared=shared)
    losses = imbrex.AuxLosses(load_balance=0.01) if meets else None
    case = Case(config=config, tokens=(5, 3), losses=losses, options={"timeout": 20.0})
    for differences in pool.run(2, run_beside_eager, case):
        assert differences == [0.0, 0.0]


@pytest.mark.untraced
def test_events_beside_a_compiled_rank(pool: Pool) -> None:
    """Nobody meets at a call: a graph breaks there, and packets go as those of ranks without one."""
    shared = imbrex.layer.SharedExperts(intermediate_size=4)
    config = dataclasses.replace(CONFIG, shared=shared)
    case = Case(config=config, tokens=(5, 3), options={"schedule": "events", "timeout": 5.0})
    for differences in pool.run(2, run_beside_eager, case):
        assert differences == [0.0, 0.0]


def run_refused(ranks: Ranks, schedule: Any) -> str:
    """What the last rank, compiled, and the others are told in their second call."""
    torch.compiler.reset()
    case = Case(config=CONFIG, tokens=(5, 3), options={"schedule": schedule, "timeout": 5.0})
    layer = make_layer(case, ranks.group)
    last, x = ranks.rank == ranks.world_size - 1, tokens_of(case, ranks.rank).requires_grad_()
    layer(x)
    try:
        with real_empty():
            (torch.compile(layer, backend="aot_eager") if last else layer)(x)
    except ValueError as error:
        return str(error)
    return "nothing was raised"


@pytest.mark.untraced
@pytest.mark.parametrize("schedule", ["megatron", imbrex.overlap.Serial(keep_rows=False)])
def test_one_chunk_that_a_graph_does_not_know(pool: Pool, schedule: Any) -> None:
    """Its ranks would meet once less before a combine, or cross once more in a backward."""
    for said in pool.run(2, run_refused, schedule):
        assert "ranks disagree about the number of chunks (a compiled layer has 1, as schedule='ser" in said
        assert ": -1 on rank 0, 1 on rank 1" in said


@pytest.mark.untraced
def test_a_sum_of_losses_that_nobody_reads_is_no_dead_code(pool: Pool) -> None:
    """A graph reads the losses of a layer's last call alone; an eager rank beside it waits in every sum."""
    case = Case(config=CONFIG, tokens=(5, 3), losses=imbrex.AuxLosses(z=0.01), options={"timeout": 5.0})
    for differences in pool.run(2, run_beside_eager, case, 2):
        assert differences == [0.0, 0.0]


def run_beside_a_slow_compiler(ranks: Ranks, transport: str) -> list[Tensor]:
    """The last rank compiles for longer than a rank may be silent; later calls take no such time."""
    torch.compiler.reset()
    schedule, _, transport = transport.rpartition(" over ")
    moves = EmulatedNvlink(ranks.group, timeout=2.0) if transport == "nvlink" else transport
    options = {"transport": moves, "timeout": 1.0, "schedule": schedule or "serial"}
    case = Case(config=WIDE, tokens=(5, 3), dtype=torch.bfloat16, options=options)
    layer = make_layer(case, ranks.group)

    def slow(graph: Any, _: Any) -> Any:
        time.sleep(1.5)
        return graph.forward

    last, x = ranks.rank == ranks.world_size - 1, tokens_of(case, ranks.rank)
    run = torch.compile(layer, backend=slow) if last else layer
    with real_empty(), torch.no_grad():
        outputs, until = [layer(x)], time.monotonic() + 30
        while not (last or compiling.who_compiles()) and time.monotonic() < until:
            time.sleep(0.01)
        outputs += [run(x), run(x)]
    assert not compiling.who_compiles()
    return outputs


@pytest.mark.untraced
@pytest.mark.parametrize(
    "transport",
    [
        "alltoall",
        "events over alltoall",
        *(pytest.param(over, marks=EMULATED) for over in ("nvlink", "events over nvlink")),
    ],
)
def test_ranks_wait_for_one_that_compiles(pool: Pool, transport: str) -> None:
    for first, *others in pool.run(2, run_beside_a_slow_compiler, transport):
        assert all(torch.equal(first, other) for other in others)


class Compiled(torch.nn.Module):
    """Experts of somebody's own that compile themselves at their first call, behind its dispatch."""

    applies_weights, forms = False, (RowForm.ROWS,)

    def __init__(self, compile_s: float) -> None:
        super().__init__()
        self.scale = torch.nn.Parameter(torch.ones(1))

        def slow(graph: Any, _: Any) -> Any:
            time.sleep(compile_s)
            return graph.forward

        self.run = torch.compile(lambda rows_RD: rows_RD * self.scale, backend=slow)

    def forward(self, dispatched: Dispatched) -> Tensor:
        return self.run(dispatched.rows_RD)


def run_beside_slow_experts(ranks: Ranks, transport: str) -> bool:
    """The last rank's experts compile for longer than a rank may be silent."""
    torch.compiler.reset()
    experts = Compiled(1.5 * (ranks.rank == ranks.world_size - 1)).bfloat16()
    moves = EmulatedNvlink(ranks.group, timeout=2.0) if transport == "nvlink" else transport
    how: dict[str, Any] = {"transport": moves, "experts": experts, "dtype": torch.bfloat16, "timeout": 1.0}
    layer, outputs = imbrex.MoELayer(WIDE, ranks.group, **how), []
    x = torch.randn(5, WIDE.hidden_size, dtype=torch.bfloat16)
    for _ in range(2):
        with real_empty(), torch.no_grad():
            outputs.append(layer(x))
    assert not compiling.who_compiles()
    return torch.equal(*outputs)


@pytest.mark.untraced
@pytest.mark.parametrize("transport", ["alltoall", pytest.param("nvlink", marks=EMULATED)])
def test_ranks_wait_for_one_whose_experts_compile_themselves(pool: Pool, transport: str) -> None:
    """Over NVLink, too: experts of somebody's own promise no rows, so hosts meet before the combine."""
    assert pool.run(2, run_beside_slow_experts, transport) == [True] * 2


def silent_and_compiling(ranks: Ranks) -> str:
    """What the roll says of a rank that compiles and answers nobody."""
    if ranks.rank == 1:
        compiling.tell_compiling()
    dist.barrier(ranks.group)
    said = "" if ranks.rank == 1 else roll.call_roll(ranks.group, "dispatch", "dispatch", 0.4)
    dist.barrier(ranks.group)
    compiling.tell_running()
    return said


def test_a_lost_rank_that_compiles_is_named(pool: Pool) -> None:
    said = "; not heard of since: rank 1; rank 1 compiles: raise the time-out (IMBREX_TIMEOUT_S)"
    assert pool.run(2, silent_and_compiling)[0] == f"{said}, or compile on every rank"


def die_compiling(ranks: Ranks, transport: str) -> None:
    """Rank 1 is killed in the middle of a compilation."""
    moves = EmulatedNvlink(ranks.group, timeout=2.0) if transport == "nvlink" else transport
    case = Case(
        config=WIDE, tokens=(5, 3), dtype=torch.bfloat16, options={"transport": moves, "timeout": 2.0}
    )
    layer = make_layer(case, ranks.group)

    def die(graph: Any, _: Any) -> None:
        time.sleep(0.2)
        os.kill(os.getpid(), signal.SIGKILL)

    run = torch.compile(layer, backend=die) if ranks.rank == 1 else layer
    with pytest.MonkeyPatch.context() as patch, real_empty(), torch.no_grad():
        patch.setattr(compiling, "LISTEN_S", 1.0)
        layer(tokens_of(case, ranks.rank))
        began = time.monotonic()
        try:
            run(tokens_of(case, ranks.rank))
        except imbrex.RankLostError as error:
            raise AssertionError(f"{time.monotonic() - began < 10}: {error}") from error


@pytest.mark.untraced
@pytest.mark.parametrize(
    ("transport", "said"),
    [
        ("alltoall", "rank 0 lost its peers in plan .*: rank 1; rank 1 compiled when it was last heard of"),
        pytest.param("nvlink", r"dispatch: ranks \[1\] did not come to call", marks=EMULATED),
    ],
    ids=["alltoall", "nvlink"],
)
def test_one_that_dies_while_it_compiles_is_lost(transport: str, said: str) -> None:
    ranks = Pool(2, timeout_s=60.0, grace_s=15.0)
    try:
        with pytest.raises(RankError, match=f"True: {said}"):
            ranks.run(2, die_compiling, transport)
    finally:
        ranks.close()
