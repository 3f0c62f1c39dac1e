"""Transports for two tiers: the contract, the layer's numbers, and the bytes that cross between nodes."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch

import imbrex
from imbrex.observe import Recorder
from imbrex.testing import ConformityError, check_transport
from imbrex.transport import AllToAll, Auto, Hierarchical, Leader, Pipe, Sequential, TwoLevel, relay
from imbrex.transport.nodes import Nodes
from tests.ranks.layer_jobs import Case, run_layer
from tests.ranks.pool import Pool, RankError, Ranks
from tests.ranks.test_layer import SMALL, SPLIT_SLOTS, largest_error

KINDS = {
    "1dh": Leader,
    "2dh": TwoLevel,
    "pipe": Pipe,
    "sequential": Sequential,
    "hierarchical": Hierarchical,
}


def run_check(ranks: Ranks, name: str, per_node: int) -> str:
    group = ranks.group if ranks.world_size > 1 else None
    try:
        check_transport(KINDS[name](group, ranks_per_node=per_node), group)
    except ConformityError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(("world", "per_node"), [(1, 1), (2, 1), (4, 2), (8, 4), (4, 4)])
@pytest.mark.parametrize("name", KINDS)
def test_contract(pool: Pool, name: str, world: int, per_node: int) -> None:
    assert pool.run(world, run_check, name, per_node) == [""] * world


def run_in_pieces(ranks: Ranks, per_node: int, least: int) -> tuple[str, bool]:
    """The contract with pieces of few rows; and whether rows are passed on before they are waited for."""
    before, relay.LEAST_ROWS = relay.LEAST_ROWS, least
    try:
        made = Hierarchical(ranks.group, ranks_per_node=per_node, pieces=8)
        said = ""
        try:
            check_transport(made, ranks.group)
        except ConformityError as error:
            said = str(error)
        wanted = torch.arange(ranks.world_size).expand(40, -1) != ranks.rank
        (traffic,) = made.plan([wanted], None)
        assert traffic.hops[0].shape == (2, 8, ranks.world_size, ranks.world_size)
        pending: Any = made.begin_move(torch.zeros(40, 3, dtype=torch.uint8), traffic)
        pending.beside.future.result(10.0)
        return said, len(pending.finish()) == 40 * (ranks.world_size - 1)
    finally:
        relay.LEAST_ROWS = before


@pytest.mark.parametrize(("world", "per_node"), [(4, 2), (8, 2)])
def test_pieces_are_passed_on_while_nobody_waits(pool: Pool, world: int, per_node: int) -> None:
    assert pool.run(world, run_in_pieces, per_node, 1) == [("", True)] * world


def run_begun(ranks: Ranks, name: str) -> int:
    """Rows that later steps bring while nobody waits for the move."""
    made = KINDS[name](ranks.group, ranks_per_node=2)
    begun, start = [], made.lane.start

    def started(work):
        begun.append(start(work))
        return begun[-1]

    made.lane.start = started
    wanted = torch.arange(4).expand(40, -1) != ranks.rank
    (traffic,) = made.plan([wanted], None)
    pending = made.begin_move(torch.full((40, 3), ranks.rank, dtype=torch.uint8), traffic)
    (beside,) = begun
    beside.future.result(10.0)
    return int(pending.finish().sum())


@pytest.mark.parametrize("name", ["1dh", "2dh", "sequential"])
def test_later_steps_begin_while_nobody_waits(pool: Pool, name: str) -> None:
    assert pool.run(4, run_begun, name) == [40 * 3 * (6 - rank) for rank in range(4)]


def test_pieces_by_number() -> None:
    with pytest.raises(ValueError, match="3 pieces; use a power of two"):
        Hierarchical(None, pieces=3)


class AtOnce:
    """What a lane's work has become when `start` returns, as on a GPU, where it is queued."""

    def __init__(self, work) -> None:
        work()

    def finish(self) -> None:
        pass


def run_as_over_nccl(ranks: Ranks, name: str, per_node: int) -> str:
    """The contract with messages posted as NCCL wants them: told apart by nothing but their order."""

    class Ordered(KINDS[name]):
        groups_messages = True

    made = Ordered(ranks.group, ranks_per_node=per_node)
    made.lane.start = AtOnce
    try:
        check_transport(made, ranks.group)
    except ConformityError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("name", "world", "per_node"),
    [
        *((name, 4, 2) for name in ("1dh", "2dh", "sequential", "hierarchical")),
        ("2dh", 8, 4),
        ("hierarchical", 8, 4),
    ],
)
def test_messages_match_by_order(pool: Pool, name: str, world: int, per_node: int) -> None:
    assert pool.run(world, run_as_over_nccl, name, per_node) == [""] * world


def run_on_nodes(ranks: Ranks, case: Case, name: str, per_node: int) -> dict[str, Any]:
    made = KINDS[name](ranks.group, ranks_per_node=per_node)
    options = case.options | {"transport": made}
    return run_layer(
        ranks,
        Case(config=case.config, tensor_parallel=case.tensor_parallel, slots=case.slots, options=options),
    )


@pytest.mark.parametrize("schedule", ["serial", "optsche-3"])
@pytest.mark.parametrize("name", KINDS)
def test_oracle(pool: Pool, name: str, schedule: str) -> None:
    """On two nodes of four ranks, two of them an expert's; on fewer ranks the matrix runs all of these."""
    case = Case(config=SMALL, tensor_parallel=2, options={"schedule": schedule})
    errors = largest_error(case, 8, pool.run(8, run_on_nodes, case, name, 4))
    assert max(errors.values()) < 1e-5, errors


@pytest.mark.parametrize("name", KINDS)
def test_replicas(pool: Pool, name: str) -> None:
    config = imbrex.MoEConfig(hidden_size=7, intermediate_size=10, num_experts=6, top_k=2, bias=True)
    case = Case(config=config, slots=SPLIT_SLOTS)
    errors = largest_error(case, 4, pool.run(4, run_on_nodes, case, name, 2))
    assert max(errors.values()) < 1e-5, errors


@pytest.mark.parametrize(("codec", "most"), [("bf16", 0.012), ("int8", 0.02), ("fp8", 0.08)])
def test_codecs_round_once_more_on_the_way_back(pool: Pool, codec: str, most: float) -> None:
    case = Case(config=SMALL, options={"codec": codec})
    errors = largest_error(case, 4, pool.run(4, run_on_nodes, case, "hierarchical", 2))
    assert 1e-4 < max(errors.values()) < most, errors


def run_counted(ranks: Ranks, kind: Any, per_node: int) -> dict[str, list[int]]:
    """Bytes of rows that this rank sends to every rank, forward and backward, as messages and as counted."""
    sent_W = torch.zeros(ranks.world_size, dtype=torch.int64)
    recorder = Recorder(rank=ranks.rank)

    class Counted(kind):
        def post(self, phase, sends, receives):
            for message in sends if phase != "plan" else ():
                sent_W[message.peer] += message.rows.numel()
            return super().post(phase, sends, receives)

    made = Counted(ranks.group, **({} if kind is AllToAll else {"ranks_per_node": per_node}))
    config = imbrex.MoEConfig(hidden_size=64, intermediate_size=8, num_experts=16, top_k=8)
    recorder.begin_step(0)
    run_layer(ranks, Case(config=config, tokens=(128,), options={"transport": made, "observer": recorder}))
    recorder.end_step()
    found: dict[str, list[int]] = {"sent": [0] * ranks.world_size, "tiers": [0, 0]}
    for (name, _), value in recorder.take_counters().items():
        if name in ("bytes_sent", "bytes_by_tier"):
            found["sent" if name == "bytes_sent" else "tiers"] = list(value)
    return found | {"messages": sent_W.tolist()}


@pytest.mark.parametrize(("world", "per_node"), [(4, 2), (8, 2), (8, 4)])
@pytest.mark.parametrize("name", KINDS)
def test_bytes_are_counted_as_they_travel(pool: Pool, name: str, world: int, per_node: int) -> None:
    for rank, found in enumerate(pool.run(world, run_counted, KINDS[name], per_node)):
        assert found["sent"] == found["messages"]
        far = [n for peer, n in enumerate(found["sent"]) if peer // per_node != rank // per_node]
        assert found["tiers"] == [sum(found["sent"]) - sum(far), sum(far)]


def test_a_token_crosses_once_to_a_node(pool: Pool) -> None:
    """With 8 of 16 experts on 4 ranks a token wants nearly both ranks of the other node: half the bytes."""
    direct, once = (
        sum(
            sum(found["sent"][2 * (rank < 2) :][:2])
            for rank, found in enumerate(pool.run(4, run_counted, kind, 2))
        )
        for kind in (AllToAll, Hierarchical)
    )
    assert 0.48 < once / direct < 0.56


def test_nodes_by_hand_or_by_the_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    assert Nodes.of(8) == Nodes(num_nodes=1, size=8)
    assert Nodes.of(8, 2) == Nodes(num_nodes=4, size=2)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert Nodes.of(8) == Nodes(num_nodes=2, size=4)
    for size in (3, 0):
        says = f"8 ranks do not divide into nodes of {size}; give ranks_per_node="
        with pytest.raises(ValueError, match=says):
            Nodes.of(8, size)


@pytest.mark.parametrize(
    ("node_of_W", "found"),
    [
        ([0, 0, 1, 1], Nodes(num_nodes=2, size=2)),
        ([3, 3, 3], Nodes(num_nodes=1, size=3)),
        ([5, 2], Nodes(num_nodes=2, size=1)),
        ([0, 1, 0, 1], None),
        ([0, 0, 1], None),
        ([0, 0, 1, 0], None),
    ],
)
def test_nodes_are_blocks_of_neighbours(node_of_W: list[int], found: Nodes | None) -> None:
    assert Nodes.in_blocks(node_of_W) == found


def run_launched(ranks: Ranks, node_of_W: list[int]) -> tuple[Any, ...]:
    """What `hierarchical` and `auto` make of it when the launcher says on which node each rank is."""
    os.environ.update(LOCAL_WORLD_SIZE="4", GROUP_RANK=str(node_of_W[ranks.rank]))
    try:
        found = Auto().nodes(ranks.group)
        try:
            return found, Hierarchical(ranks.group).nodes
        except ValueError as error:
            return found, str(error)
    finally:
        del os.environ["LOCAL_WORLD_SIZE"], os.environ["GROUP_RANK"]


def run_counted_on(ranks: Ranks, node_of_W: list[int]) -> dict[str, list[int]]:
    os.environ.update(LOCAL_WORLD_SIZE="4", GROUP_RANK=str(node_of_W[ranks.rank]))
    try:
        return run_counted(ranks, AllToAll, 0)
    finally:
        del os.environ["LOCAL_WORLD_SIZE"], os.environ["GROUP_RANK"]


@pytest.mark.parametrize("node_of_W", [[0, 0, 1, 1], [0, 1, 1, 1]])
def test_bytes_by_tier_are_those_of_the_launchers(pool: Pool, node_of_W: list[int]) -> None:
    """Of four ranks, each of a node of four: by one launcher's number alone they are one node. What are no
    blocks of one size is not counted by tier."""
    for rank, found in enumerate(pool.run(4, run_counted_on, node_of_W)):
        far = sum(n for peer, n in enumerate(found["sent"]) if node_of_W[peer] != node_of_W[rank])
        assert far > 0
        assert found["tiers"] == ([sum(found["sent"]) - far, far] if node_of_W == [0, 0, 1, 1] else [0, 0])


def test_a_group_over_several_launchers(pool: Pool) -> None:
    """Four ranks of two nodes of four: neighbours are two nodes of two; every second one is none."""
    two = Nodes(num_nodes=2, size=2)
    assert pool.run(4, run_launched, [0, 0, 1, 1]) == [(two, two)] * 4
    for found, says in pool.run(4, run_launched, [0, 1, 0, 1]):
        assert found is None
        assert "needs nodes of equally many neighbouring ranks, which this group's are not" in says


def run_other_nodes(ranks: Ranks) -> None:
    Hierarchical(ranks.group, ranks_per_node=2 if ranks.rank else 1)


def test_ranks_that_are_given_other_nodes_all_hear_it(pool: Pool) -> None:
    with pytest.raises(RankError, match="rank 1 was given other nodes than this rank"):
        pool.run(4, run_other_nodes)
