"""The dispatcher over two tiers: the oracle's numbers, its bits, one rank's mistakes, and ranks that die."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import imbrex
from imbrex.adapters import deep_ep
from imbrex.contracts import Dispatched, RowForm
from imbrex.exchange.autograd import complete
from imbrex.observe import Recorder
from imbrex.overlap.pipelined import Pipelined
from imbrex.placement import contiguous
from imbrex.transport import Hierarchical, Tiers
from imbrex.transport.collective import Collective
from imbrex.transport.groups import group_beside
from tests.emulated import kernel
from tests.ranks.emulated_nvlink import EmulatedNvlink
from tests.ranks.layer_jobs import Case, run_layer
from tests.ranks.matrix import NVLINK, OF_BFLOAT16, TOKENS
from tests.ranks.pool import Pool, RankError, Ranks
from tests.ranks.test_bad_input import MESSAGES, bad_input, good_input
from tests.ranks.test_compile import CONFIG as COMPILED
from tests.ranks.test_compile import run_compiled
from tests.ranks.test_layer import SMALL, SPLIT_SLOTS, largest_error

EMULATED = pytest.mark.skipif(not kernel.available(), reason="the emulation needs g++")
NODES = [(1, 1), (2, 1), (4, 4), (4, 2), (8, 4)]
"""Ranks, and ranks of a node."""


@pytest.fixture(scope="module")
def six() -> Iterator[Pool]:
    ranks = Pool(6, timeout_s=120.0)
    yield ranks
    ranks.close()


@pytest.fixture(scope="module")
def four() -> Iterator[Pool]:
    ranks = Pool(4, timeout_s=120.0)
    yield ranks
    ranks.close()


def run_on_nodes(ranks: Ranks, case: Case, per_node: int) -> dict[str, Any]:
    group = ranks.group if ranks.world_size > 1 else None
    options = case.options | {"transport": Tiers(group, ranks_per_node=per_node)}
    return run_layer(
        ranks,
        Case(config=case.config, tensor_parallel=case.tensor_parallel, slots=case.slots, options=options),
    )


@pytest.mark.parametrize("schedule", ["serial", "optsche-3"])
@pytest.mark.parametrize(("world", "per_node"), NODES)
def test_oracle(pool: Pool, world: int, per_node: int, schedule: str) -> None:
    case = Case(config=SMALL, options={"schedule": schedule})
    errors = largest_error(case, world, pool.run(world, run_on_nodes, case, per_node))
    assert max(errors.values()) < 1e-5, errors


@pytest.mark.parametrize("per_node", [2, 3])
def test_oracle_on_six_ranks(six: Pool, per_node: int) -> None:
    case = Case(config=SMALL, options={"schedule": "optsche-3"})
    errors = largest_error(case, 6, six.run(6, run_on_nodes, case, per_node))
    assert max(errors.values()) < 1e-5, errors


def run_over_kernels(ranks: Ranks, per_node: int, schedule: str) -> dict[str, Any]:
    """Kernels over NVLink inside the nodes, as `tests.emulated` runs them; the first rank is in a group that
    nobody else knows of, so that torch by itself would name the nodes' groups differently on its ranks."""
    alone: Any = dist.new_group([0], use_local_synchronization=True) if ranks.rank == 0 else None
    made: Any = Tiers(ranks.group, ranks_per_node=per_node)
    nodes = range(0, ranks.world_size, per_node)
    members = next(list(range(first, first + per_node)) for first in nodes if ranks.rank < first + per_node)
    before = dist.distributed_c10d._world.group_count
    made.kernels = EmulatedNvlink(group_beside(ranks.group, ranks=members))
    # Else torch 2.14 gives the next group of all ranks two names.
    assert dist.distributed_c10d._world.group_count == before
    assert dist.get_process_group_ranks(made.kernels.group) == members
    if alone is not None:
        dist.destroy_process_group(alone)
    options = {"transport": made, "schedule": schedule}
    case = Case(config=NVLINK, dtype=torch.bfloat16, tokens=TOKENS[4], options=options)
    return run_layer(ranks, case)


@EMULATED
@pytest.mark.parametrize("schedule", ["serial", "optsche-3"])
@pytest.mark.parametrize("per_node", [2, 4])
def test_kernels_inside_the_nodes(four: Pool, per_node: int, schedule: str) -> None:
    case = Case(config=NVLINK, dtype=torch.bfloat16, tokens=TOKENS[4])
    errors = largest_error(case, 4, four.run(4, run_over_kernels, per_node, schedule))
    assert max(errors.values()) < OF_BFLOAT16, errors


def test_tensor_ranks(pool: Pool) -> None:
    case = Case(config=SMALL, tensor_parallel=2, options={"schedule": "optsche-3"})
    errors = largest_error(case, 8, pool.run(8, run_on_nodes, case, 4))
    assert max(errors.values()) < 1e-5, errors


def test_replicas(pool: Pool) -> None:
    config = imbrex.MoEConfig(hidden_size=7, intermediate_size=10, num_experts=6, top_k=2, bias=True)
    case = Case(config=config, slots=SPLIT_SLOTS)
    errors = largest_error(case, 4, pool.run(4, run_on_nodes, case, 2))
    assert max(errors.values()) < 1e-5, errors


E, K, D, T = 24, 4, 5, 11


class Scaled:
    """Experts whose rows have the same bits beside any others: slot s of rank r multiplies by 1 + its number
    over 7."""

    applies_weights = False
    forms = (RowForm.ROWS,)

    def __init__(self, first: int) -> None:
        self.first = first

    def parameters(self):
        return iter(())

    def __call__(self, dispatched: Dispatched) -> Tensor:
        slots = torch.arange(len(dispatched.counts_e)) + self.first
        return dispatched.rows_RD * factors(slots.repeat_interleave(dispatched.counts_e))[:, None]


def factors(experts: Tensor) -> Tensor:
    return 1 + experts.float() / 7


def given_to(rank: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Tokens, experts, weights, and the gradient of the outputs."""
    drawn = torch.Generator().manual_seed(rank)
    ids_TK = torch.rand(T, E, generator=drawn).topk(K).indices
    ids_TK[3, 1], ids_TK[5] = -1, -1
    shapes = (T, D), (T, K), (T, D)
    x_TD, weights_TK, d_y_TD = (torch.randn(shape, generator=drawn) for shape in shapes)
    return x_TD, ids_TK, weights_TK, d_y_TD


def run_bits(ranks: Ranks, per_node: int, degrees: list[int]) -> list[tuple[Tensor, ...]]:
    transport = Tiers(ranks.group, ranks_per_node=per_node)
    exchange = imbrex.Exchange(contiguous(E, ranks.world_size), D, K, group=ranks.group, transport=transport)
    results = []
    for degree in degrees:
        x_TD, ids_TK, weights_TK, d_y_TD = given_to(ranks.rank)
        x_TD.requires_grad_()
        weights_TK.requires_grad_()
        routing = imbrex.Routing(ids_TK=ids_TK, weights_TK=weights_TK)
        experts: Any = Scaled(exchange.geometry.local_slots.start)
        y_TD = Pipelined("optsche", degree).run(x_TD, routing, exchange, experts, None).y_TD
        y_TD.backward(d_y_TD)
        assert x_TD.grad is not None
        assert weights_TK.grad is not None
        results.append((y_TD.detach(), x_TD.grad, weights_TK.grad))
    return results


def summed(terms_TKD: Tensor, ids_TK: Tensor, world: int, per_node: int) -> Tensor:
    """As the docs say: the rows of a token on a rank in ascending order, ranks of a node in theirs, nodes in
    theirs, each sum begun with nothing."""
    owner_TK = torch.where(ids_TK < 0, -1, ids_TK // (E // world))
    all_TD = torch.zeros(T, D)
    for first in range(0, world, per_node):
        node_TD = torch.zeros(T, D)
        for rank in range(first, first + per_node):
            rank_TD = torch.zeros(T, D)
            for choice in torch.where(ids_TK < 0, E, ids_TK).argsort(1).T:
                here = owner_TK.gather(1, choice[:, None]) == rank
                rank_TD += torch.where(here, terms_TKD[torch.arange(T), choice], 0.0)
            node_TD += rank_TD
        all_TD += node_TD
    return all_TD


def check_bits(world: int, per_node: int, results: list[list[tuple[Tensor, ...]]]) -> None:
    for rank, of_rank in enumerate(results):
        x_TD, ids_TK, weights_TK, d_y_TD = given_to(rank)
        rows_TKD = x_TD[:, None] * factors(ids_TK)[..., None]
        d_rows_TKD = d_y_TD[:, None] * weights_TK[..., None] * factors(ids_TK)[..., None]
        y_TD = summed(rows_TKD * weights_TK[..., None], ids_TK, world, per_node)
        d_x_TD = summed(d_rows_TKD, ids_TK, world, per_node)
        d_weights_TK = torch.where(ids_TK < 0, 0.0, (rows_TKD * d_y_TD[:, None]).sum(2))
        for chunked in of_rank:
            assert torch.equal(chunked[0], y_TD)
            assert torch.equal(chunked[1], d_x_TD)
            torch.testing.assert_close(chunked[2], d_weights_TK)
            assert torch.equal(chunked[2], of_rank[0][2])


@pytest.mark.parametrize(("world", "per_node"), [(2, 1), (4, 2), (8, 4), (8, 2)])
def test_bits_are_those_of_the_sums_by_node_whatever_the_chunks(
    pool: Pool, world: int, per_node: int
) -> None:
    check_bits(world, per_node, pool.run(world, run_bits, per_node, [1, 2, 3, 5, 16, 1]))


def test_bits_on_three_nodes(six: Pool) -> None:
    check_bits(6, 2, six.run(6, run_bits, 2, [1, 4]))


def run_deep_ep(ranks: Ranks) -> str:
    try:
        deep_ep.Buffer(ranks.group, transport=Tiers(ranks.group, ranks_per_node=1))
    except ValueError as error:
        return str(error)
    return "nothing was raised"


def test_programs_that_send_rows_themselves_are_refused(pool: Pool) -> None:
    for said in pool.run(2, run_deep_ep):
        assert "the tiered transport does not carry given rows to given ranks alone" in said


def run_again(ranks: Ranks) -> list[bool]:
    """Whether rows that are dispatched once more are the same, by what crosses how; then without a node."""
    same = []
    for per_node, codec in ((2, "identity"), (2, "int8"), (4, "int8")):
        x_TD, ids_TK, weights_TK, _ = given_to(ranks.rank)
        transport = Tiers(ranks.group, ranks_per_node=per_node)
        made: Any = {"group": ranks.group, "transport": transport, "codec": codec}
        exchange = imbrex.Exchange(contiguous(E, 4), D, K, **made)
        there = exchange.dispatch(x_TD, imbrex.Routing(ids_TK=ids_TK, weights_TK=weights_TK))
        again = exchange.dispatcher.redispatch(x_TD, there.handle.state, len(there.rows_RD))
        same.append(torch.equal(again, there.rows_RD))
    return same


def test_rows_come_again(pool: Pool) -> None:
    assert pool.run(4, run_again) == [[True] * 3] * 4


def run_with_codec(ranks: Ranks, per_node: int) -> Tensor:
    """What a lossy codec takes from the outputs."""
    outputs = []
    for codec in ("identity", "int8"):
        transport = Tiers(ranks.group, ranks_per_node=per_node)
        layer = run_layer(ranks, Case(config=SMALL, options={"transport": transport, "codec": codec}))
        outputs.append(layer["y"])
    return outputs[0] - outputs[1]


def test_codecs_are_the_networks(pool: Pool) -> None:
    assert all(not lost_TD.any() for lost_TD in pool.run(4, run_with_codec, 4))
    assert any(lost_TD.any() for lost_TD in pool.run(4, run_with_codec, 2))


def run_compiled_on_nodes(ranks: Ranks) -> dict[str, float]:
    transport = Tiers(ranks.group, ranks_per_node=1)
    case = Case(config=COMPILED, tokens=(5, 4, 3, 8), options={"transport": transport})
    return run_compiled(ranks, case, "aot_eager")


@pytest.mark.untraced
def test_fullgraph_equals_eager(pool: Pool) -> None:
    for worst in pool.run(2, run_compiled_on_nodes):
        assert max(worst.values()) < 1e-5, worst


def run_bad(ranks: Ranks, kind: str) -> str:
    transport = Tiers(ranks.group, ranks_per_node=1)
    exchange = imbrex.Exchange(contiguous(6, 2), 5, 2, group=ranks.group, transport=transport)
    try:
        exchange.dispatch(*(bad_input(kind) if ranks.rank == 1 else good_input()))
    except ValueError as error:
        dispatched = exchange.dispatch(*good_input())
        exchange.combine(dispatched.rows_RD, dispatched.handle)
        return str(error)
    return "nothing was raised"


@pytest.mark.parametrize("kind", list(MESSAGES))
def test_wrong_on_one_rank(pool: Pool, kind: str) -> None:
    answers = pool.run(2, run_bad, kind)
    assert answers[0] == answers[1]
    with pytest.raises(ValueError, match=MESSAGES[kind]):
        raise ValueError(answers[0])


def run_wrong_setting(ranks: Ranks, options: dict[str, Any], odd: dict[str, Any]) -> str:
    try:
        Tiers(ranks.group, **options | (odd if ranks.rank == 1 else {}))
    except ValueError as error:
        return str(error)
    return "nothing was raised"


@pytest.mark.parametrize(
    ("options", "odd", "says"),
    [
        ({"ranks_per_node": 2}, {"ranks_per_node": 1}, "was given other nodes than this rank"),
        ({"ranks_per_node": 3}, {}, "4 ranks do not divide into nodes of 3; give ranks_per_node="),
        ({"ranks_per_node": 2}, {"inside": "alltoall"}, "ranks disagree about inside="),
        ({"ranks_per_node": 2, "inside": "nvlink"}, {}, "inside='nvlink' does not work here: "),
        (
            {"ranks_per_node": 1, "inside": "nvlink"},
            {},
            "does not work here: a node has one rank; use inside",
        ),
        ({"ranks_per_node": 2, "inside": "wires"}, {}, "inside='wires' is not known; use one of auto"),
    ],
)
def test_wrong_settings(pool: Pool, options: dict[str, Any], odd: dict[str, Any], says: str) -> None:
    for answer in pool.run(4, run_wrong_setting, options, odd):
        assert says in answer


def run_misfit(ranks: Ranks) -> str:
    transport = Tiers(ranks.group, ranks_per_node=1)
    try:
        imbrex.Exchange(contiguous(4, 2), 4, 1, group=ranks.group, transport=transport, tensor_parallel=2)
    except ValueError as error:
        return str(error)
    return "nothing was raised"


def test_tensor_ranks_stay_on_a_node(pool: Pool) -> None:
    for said in pool.run(4, run_misfit):
        assert "2 tensor ranks are not all on one of nodes of 1; make ranks_per_node a multiple" in said


def run_counted(ranks: Ranks, kind: Any, per_node: int) -> dict[str, list[int]]:
    """Bytes of rows that this rank sends to every rank, forward and backward, as messages and as counted."""
    sent_W, post = torch.zeros(ranks.world_size, dtype=torch.int64), Collective.post
    recorder = Recorder(rank=ranks.rank)

    def counted(self, phase, sends, receives):
        for message in sends:
            sent_W[message.peer] += message.rows.numel() * (phase != "plan")
        return post(self, phase, sends, receives)

    config = imbrex.MoEConfig(hidden_size=64, intermediate_size=8, num_experts=16, top_k=8)
    made = kind(ranks.group, ranks_per_node=per_node)
    Collective.post = counted  # pyright: ignore[reportAttributeAccessIssue]
    try:
        recorder.begin_step(0)
        run_layer(
            ranks, Case(config=config, tokens=(128,), options={"transport": made, "observer": recorder})
        )
        recorder.end_step()
    finally:
        Collective.post = post
    counters = {name: value for (name, _), value in recorder.take_counters().items()}
    return {"messages": sent_W.tolist(), "sent": counters["bytes_sent"], "tiers": counters["bytes_by_tier"]}


@pytest.mark.parametrize(("world", "per_node"), [(4, 2), (8, 2)])
def test_a_token_crosses_once_to_a_node(pool: Pool, world: int, per_node: int) -> None:
    """As many rows between nodes as `hierarchical` sends, which has 12 bytes of labels a choice behind a
    token's; here they crossed before."""
    ours, theirs = (pool.run(world, run_counted, kind, per_node) for kind in (Tiers, Hierarchical))
    labels = 0
    for rank, counted in enumerate(ours):
        assert counted["sent"] == counted["messages"]
        far = [n for peer, n in enumerate(counted["sent"]) if peer // per_node != rank // per_node]
        assert counted["tiers"] == [sum(counted["sent"]) - sum(far), sum(far)]
        labels += theirs[rank]["tiers"][1] - counted["tiers"][1]
    rows = sum(counted["tiers"][1] for counted in ours) / (4 * 256 + 32)
    assert labels == rows * 12 * 8


def run_begun(ranks: Ranks) -> bool:
    """Whether rows are spread inside the node while nobody waits for the move."""
    transport = Tiers(ranks.group, ranks_per_node=2)
    exchange = imbrex.Exchange(contiguous(E, ranks.world_size), D, K, group=ranks.group, transport=transport)
    x_TD, ids_TK, weights_TK, _ = given_to(ranks.rank)
    parts = [
        (x_TD[part], imbrex.Routing(ids_TK=ids_TK[part], weights_TK=weights_TK[part])) for part in HALVES
    ]
    plans = exchange.dispatcher.agree(parts)
    with torch.no_grad():
        crossings = [
            exchange.dispatcher.dispatch(plan, x_TD, routing.weights_TK)
            for plan, (x_TD, routing) in zip(plans, parts, strict=True)
        ]
        under_way: list[Any] = [crossing.move() for crossing in crossings]
        inner = [pending.begun.future.result(10.0) for pending in under_way]
        arrived = [c.read(p.finish()) for c, p in zip(crossings, under_way, strict=True)]
    return all(begun is not None for _, begun in inner) and sum(len(a.rows_RD) for a in arrived) > 0


HALVES = slice(0, 6), slice(6, T)


def test_chunks_are_spread_while_nobody_waits(pool: Pool) -> None:
    assert pool.run(4, run_begun) == [True] * 4


TIMEOUT_S = 0.5


def lose(ranks: Ranks, dying: list[int], phase: str) -> float:
    """Ranks die in a phase; how long the others waited, each in the crossing that follows."""
    transport = Tiers(ranks.group, ranks_per_node=2)
    exchange = imbrex.Exchange(contiguous(E, 4), D, K, group=ranks.group, transport=transport)
    x_TD, ids_TK, weights_TK, _ = given_to(ranks.rank)
    routing = imbrex.Routing(ids_TK=ids_TK, weights_TK=weights_TK)
    (plan,) = exchange.dispatcher.agree([(x_TD, routing)])
    complete(exchange.dispatcher.dispatch(plan, x_TD, weights_TK))  # takes the rows that left with the plan
    dispatched = exchange.dispatch(x_TD, routing)
    dist.barrier(ranks.group)
    for part in (transport, transport.rail, transport.bytes_inside):
        part.timeout_s = TIMEOUT_S
    if ranks.rank in dying:
        os.kill(os.getpid(), signal.SIGKILL)
    exchange.dispatcher.agree_on_rows = lambda problem, dtype: None  # else all hear it before rows move
    calls = {
        "plan": lambda: exchange.dispatch(x_TD, routing),
        "dispatch": lambda: complete(exchange.dispatcher.dispatch(plan, x_TD, weights_TK)),
        "combine": lambda: exchange.combine(dispatched.rows_RD, dispatched.handle),
    }
    began = time.monotonic()
    with pytest.raises(imbrex.RankLostError, match=f"rank {ranks.rank} lost its peers in {phase}"):
        calls[phase]()
    waited = time.monotonic() - began
    raise AssertionError(f"waited {'long enough' if waited < TIMEOUT_S + 8 else 'too long'}")


def others_hear(job: Callable[..., Any], dying: list[int], *arguments: Any, timeout_s: float) -> None:
    """Runs `job` on four ranks of which some die: each of the others says that it waited long enough."""
    ranks = Pool(4, timeout_s=timeout_s, grace_s=15.0)
    try:
        with pytest.raises(RankError) as caught:
            ranks.run(4, job, dying, *arguments)
    finally:
        ranks.close()
    said = str(caught.value)
    assert said.count("waited long enough") >= 4 - len(dying), said
    assert "too long" not in said.replace("'too long'", "")


@pytest.mark.parametrize("phase", ["plan", "dispatch", "combine"])
@pytest.mark.parametrize("dying", [[3], [2, 3]], ids=["a rank", "a node"])
def test_the_others_are_told(dying: list[int], phase: str) -> None:
    others_hear(lose, dying, phase, timeout_s=120.0)
