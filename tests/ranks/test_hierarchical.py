"""Transports for two tiers: the contract, the layer's numbers, and the bytes that cross between nodes."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import imbrex
from imbrex.contracts import Traffic
from imbrex.testing import ConformityError, check_transport
from imbrex.transport import AllToAll, Hierarchical, Leader, Pipe, Sequential, TwoLevel, relay
from imbrex.transport.nodes import Nodes
from tests.ranks.layer_jobs import Case, run_layer
from tests.ranks.pool import Pool, Ranks
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
        ((_, relayed),) = made.plan_relays([wanted])
        assert len(relayed["splits_2W"]) == 2 + 2 * 8 * ranks.world_size
        traffic = Traffic(sent_tokens_N=wanted.T.nonzero()[:, 1], **relayed)
        pending: Any = made.begin_move(torch.zeros(40, 3, dtype=torch.uint8), traffic)
        pending.beside.future.result(10.0)
        return said, len(pending.finish()) == 40 * (ranks.world_size - 1)
    finally:
        relay.LEAST_ROWS = before


@pytest.mark.parametrize(("world", "per_node"), [(4, 2), (8, 2)])
def test_pieces_are_passed_on_while_nobody_waits(pool: Pool, world: int, per_node: int) -> None:
    assert pool.run(world, run_in_pieces, per_node, 1) == [("", True)] * world


def test_pieces_by_number() -> None:
    with pytest.raises(ValueError, match="3 pieces; use a power of two"):
        Hierarchical(None, pieces=3)


def run_on_nodes(ranks: Ranks, case: Case, name: str, per_node: int) -> dict[str, Any]:
    made = KINDS[name](ranks.group, ranks_per_node=per_node)
    options = case.options | {"transport": made}
    return run_layer(
        ranks,
        Case(config=case.config, tensor_parallel=case.tensor_parallel, slots=case.slots, options=options),
    )


@pytest.mark.parametrize("schedule", ["serial", "optsche-3"])
@pytest.mark.parametrize(("world", "per_node", "tensor"), [(4, 2, 1), (8, 4, 2)])
@pytest.mark.parametrize("name", KINDS)
def test_oracle(pool: Pool, name: str, world: int, per_node: int, tensor: int, schedule: str) -> None:
    case = Case(config=SMALL, tensor_parallel=tensor, options={"schedule": schedule})
    results = pool.run(world, run_on_nodes, case, name, per_node)
    errors = largest_error(case, world, results)
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


def run_counted(ranks: Ranks, kind: Any) -> list[int]:
    """Bytes of rows that this rank sends to other nodes, forward and backward, two nodes of two."""
    sent = []

    class Counted(kind):
        def scatter_rows(self, phase, rows, send, receive):
            far = [n for rank, n in enumerate(send) if rank // 2 != self.rank // 2]
            sent.append(sum(far) * rows.shape[1])
            return super().scatter_rows(phase, rows, send, receive)

        def post(self, phase, sends, receives):
            far = [m.rows.numel() for m in sends if m.peer // 2 != self.rank // 2]
            sent.append(sum(far))
            return super().post(phase, sends, receives)

    made = Counted(ranks.group, **({} if kind is AllToAll else {"ranks_per_node": 2}))
    config = imbrex.MoEConfig(hidden_size=64, intermediate_size=8, num_experts=16, top_k=8)
    run_layer(ranks, Case(config=config, tokens=(128,), options={"transport": made}))
    return sent


def test_a_token_crosses_once_to_a_node(pool: Pool) -> None:
    """With 8 of 16 experts on 4 ranks a token wants nearly both ranks of the other node: half the bytes."""
    direct, once = (sum(map(sum, pool.run(4, run_counted, kind))) for kind in (AllToAll, Hierarchical))
    assert 0.48 < once / direct < 0.56


def test_nodes_by_hand_or_by_the_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    assert Nodes.of(8) == Nodes(num_nodes=1, size=8)
    assert Nodes.of(8, 2) == Nodes(num_nodes=4, size=2)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert Nodes.of(8) == Nodes(num_nodes=2, size=4)
    with pytest.raises(ValueError, match="8 ranks do not divide into nodes of 3; give ranks_per_node="):
        Nodes.of(8, 3)
