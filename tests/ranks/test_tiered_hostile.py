"""Two tiers under what nobody wants: odd batches, ranks that disagree, deaths at every message of a step."""

from __future__ import annotations

import os
import signal
import time
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import imbrex
from imbrex.contracts import Strategy
from imbrex.layer import SharedExperts
from imbrex.overlap import Serial
from imbrex.overlap.pipelined import Pipelined
from imbrex.placement import contiguous
from imbrex.runtime import waits
from imbrex.transport import Tiers
from imbrex.transport.collective import Collective
from imbrex.transport.tiers import ACROSS, INSIDE, Flight
from tests.ranks.pool import Pool, Ranks
from tests.ranks.test_tiered import Scaled, factors, others_hear

pytestmark = pytest.mark.untraced

E, K = 24, 4
Batch = tuple[Tensor, imbrex.Routing, Tensor]


@pytest.fixture(scope="module")
def six() -> Iterator[Pool]:
    ranks = Pool(6, timeout_s=120.0)
    yield ranks
    ranks.close()


def exchange_of(
    ranks: Ranks, per_node: int, width: int, codec: str = "identity", timeout: float | None = None
) -> tuple[imbrex.Exchange, Any]:
    transport = Tiers(ranks.group, ranks_per_node=per_node, timeout=timeout)
    placement, made = contiguous(E, ranks.world_size), {"transport": transport, "codec": codec}
    exchange = imbrex.Exchange(placement, width, K, group=ranks.group, **made)
    return exchange, Scaled(exchange.geometry.local_slots.start)


def drawn(tokens: int, width: int, seed: int, experts: range = range(E)) -> Batch:
    """Tokens that want some of `experts`, and the gradient of the outputs."""
    source = torch.Generator().manual_seed(seed)
    ids_TK = experts.start + torch.rand(tokens, len(experts), generator=source).argsort(1)[:, :K]
    shapes = (tokens, width), (tokens, K), (tokens, width)
    x_TD, weights_TK, d_y_TD = (torch.randn(shape, generator=source) for shape in shapes)
    return x_TD, imbrex.Routing(ids_TK=ids_TK, weights_TK=weights_TK), d_y_TD


def batches(ranks: Ranks, per_node: int) -> dict[str, Batch]:
    rank, world = ranks.rank, ranks.world_size
    of_node = E // (world // per_node)
    home = [range(n * of_node, (n + 1) * of_node) for n in range(world // per_node)]
    node = rank // per_node
    by_name = {
        "nobody has tokens": drawn(0, 3, rank),
        "one has one": drawn(int(rank == world - 1), 3, rank),
        "one has all": drawn(60 * (rank == 0), 3, rank),
        "all stay on their node": drawn(9 + rank, 3, rank, home[node]),
        "all go to another": drawn(9 + rank, 3, rank, home[node - 1]),
        "all go to one node": drawn(9 + rank, 3, rank, home[0]),
        "choices are dropped": drawn(7, 3, rank),
        "many": drawn(2001 + rank, 3, rank),
    }
    by_name["choices are dropped"][1].ids_TK[:] = -1
    return by_name


def error_of(batch: Batch, exchange: imbrex.Exchange, experts: Any, schedule: Pipelined) -> float:
    """The largest error of the outputs and of both gradients."""
    (x_TD, routing, d_y_TD), errors = batch, [0.0]
    x_TD, weights_TK = (t.clone().requires_grad_() for t in (x_TD, routing.weights_TK))
    asked = imbrex.Routing(ids_TK=routing.ids_TK, weights_TK=weights_TK)
    y_TD = schedule.run(x_TD, asked, exchange, experts, None).y_TD
    y_TD.backward(d_y_TD)
    scales_TK = torch.where(routing.ids_TK < 0, 0.0, factors(routing.ids_TK))
    sums_T1 = (scales_TK * weights_TK.detach()).sum(1, keepdim=True)
    d_weights_TK = scales_TK * (x_TD.detach() * d_y_TD).sum(1, keepdim=True)
    wanted = x_TD.detach() * sums_T1, d_y_TD * sums_T1, d_weights_TK
    for ours, theirs in zip((y_TD.detach(), x_TD.grad, weights_TK.grad), wanted, strict=True):
        assert ours is not None
        errors += [float((ours - theirs).abs().max() / (1 + theirs.abs().max()))] if len(theirs) else []
    return max(errors)


def run_batches(ranks: Ranks, per_node: int) -> dict[str, float]:
    exchange, experts = exchange_of(ranks, per_node, 3)
    schedules = Pipelined("optsche", 1), Pipelined("optsche", 5)
    return {
        f"{name}, {schedule.degree}": error_of(batch, exchange, experts, schedule)
        for schedule in schedules
        for name, batch in batches(ranks, per_node).items()
    }


@pytest.mark.parametrize(("world", "per_node"), [(4, 2), (8, 4)])
def test_odd_batches(pool: Pool, world: int, per_node: int) -> None:
    for errors in pool.run(world, run_batches, per_node):
        assert max(errors.values()) < 1e-5, errors


def test_odd_batches_on_three_nodes(six: Pool) -> None:
    for errors in six.run(6, run_batches, 2):
        assert max(errors.values()) < 1e-5, errors


def run_fp8(ranks: Ranks) -> tuple[bool, float, float]:
    """Whether tokens that stay on their node lose nothing to fp8; the least and largest loss of others."""
    outputs, width = [], 256
    x_TD, routing, _ = drawn(40, width, ranks.rank)
    routing.ids_TK[::2] = drawn(20, 1, 7, range(12 * (ranks.rank // 2), 12 * (ranks.rank // 2 + 1)))[1].ids_TK
    away_T = (routing.ids_TK // 12 != ranks.rank // 2).any(1)
    for codec in ("identity", "fp8"):
        exchange, experts = exchange_of(ranks, 2, width, codec)
        with torch.no_grad():
            outputs.append(Pipelined("optsche", 3).run(x_TD, routing, exchange, experts, None).y_TD)
    lost_T = (outputs[0] - outputs[1]).norm(dim=1) / outputs[0].norm(dim=1)
    return bool((lost_T[~away_T] == 0).all()), float(lost_T[away_T].min()), float(lost_T[away_T].max())


def test_fp8_is_the_networks_alone(pool: Pool) -> None:
    for kept, least, most in pool.run(4, run_fp8):
        assert kept
        assert 0 < least <= most < 0.3


def strategy(name: str) -> Strategy:
    return Serial() if name == "serial" else Pipelined("optsche", int(name))


def run_other_chunks(ranks: Ranks, names: tuple[str, str], transport: str) -> list[str]:
    """Rank 1 runs another schedule, in the first call and when each was run by all; then all run the same."""
    given: Any = Tiers(ranks.group, ranks_per_node=1) if transport == "tiered" else transport
    exchange = imbrex.Exchange(contiguous(E, 2), 3, K, group=ranks.group, transport=given)
    experts: Any = Scaled(exchange.geometry.local_slots.start)
    x_TD, routing, _ = drawn(9, 3, ranks.rank)
    both = [strategy(name) for name in names]
    said = []
    for _ in range(2):
        try:
            both[ranks.rank].run(x_TD, routing, exchange, experts, None)
        except ValueError as error:
            said.append(str(error))
        for each in both:
            each.run(x_TD, routing, exchange, experts, None)
    return said


@pytest.mark.parametrize("transport", ["tiered", "alltoall"])
@pytest.mark.parametrize(
    "names", [("2", "3"), ("17", "3"), ("serial", "3")], ids=lambda names: "-".join(names)
)
def test_other_chunks_on_a_rank(pool: Pool, names: tuple[str, str], transport: str) -> None:
    for first, later in pool.run(2, run_other_chunks, names, transport):
        if "serial" in names:
            assert "ranks disagree about the number of chunks" in first
        else:
            assert "chunks in another order than this rank its" in first
        assert "ranks disagree about the number of chunks" in later


def run_widths(ranks: Ranks) -> tuple[str, str]:
    """A layer's words where rank 1's tokens are too wide: in its first call, and after one that was fine."""
    shared = SharedExperts(intermediate_size=4)
    config = imbrex.MoEConfig(hidden_size=6, intermediate_size=4, num_experts=E, top_k=K, shared=shared)
    transport = Tiers(ranks.group, ranks_per_node=2)
    layer = imbrex.MoELayer(config, ranks.group, transport=transport, schedule="optsche-3")
    said = []
    for _ in range(2):
        try:
            layer(torch.randn(2, 3, 6 + (ranks.rank == 1)))
        except ValueError as error:
            said.append(str(error))
        layer(torch.randn(2, 3, 6))
    first, later = said
    return first, later


def test_another_width_on_a_rank(pool: Pool) -> None:
    sentence = "dispatch: on rank 1, x has 2 dimensions and last size 7; give tokens [T, 6]"
    assert pool.run(4, run_widths) == [(sentence, sentence)] * 4


def run_out_of_time(ranks: Ranks) -> str:
    """What numbers inside a node say where a stream's wait for them has run past its time-out, so that they
    never came."""
    node, over = Tiers(ranks.group, ranks_per_node=2).bytes_inside, []

    def finish(flight: Flight) -> Tensor:
        over.append(flight)
        return plain(flight)

    def refuse_lost(group: Any) -> None:
        if over:
            raise imbrex.RankLostError("the group was given up")

    plain = Flight.finish
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Flight, "finish", finish)
        patch.setattr(waits, "refuse_lost", refuse_lost)
        try:
            node.exchange_counts(torch.tensor([1, 2]))
        except imbrex.RankLostError as error:
            return str(error)
    return "nothing was raised"


def test_numbers_that_never_came_are_not_read(pool: Pool) -> None:
    assert pool.run(2, run_out_of_time) == ["the group was given up"] * 2


def go_on_behind_a_loss(ranks: Ranks) -> str:
    """What work is told that comes behind a wait that failed."""
    node = Tiers(ranks.group, ranks_per_node=2).bytes_inside

    def lose(*_: Any, **__: Any) -> None:
        raise imbrex.RankLostError("one was lost")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(waits, "finish", lose)
        with pytest.raises(imbrex.RankLostError):
            node.finish("plan", None)
    try:
        node.begin(INSIDE, "combine", torch.empty(0, 4), [3, 3])
    except imbrex.RankLostError as error:
        return str(error)
    return "it has a number"


def test_nothing_is_numbered_behind_a_loss(pool: Pool) -> None:
    assert pool.run(2, go_on_behind_a_loss) == ["one was lost"] * 2


TIMEOUT_S = 0.5
DEATHS = {
    "labels": ("plan", ACROSS, 1),
    "rows out": ("dispatch", ACROSS, 2),
    "rows inside": ("dispatch", INSIDE, 1),
    "sums inside": ("combine", INSIDE, 1),
    "sums back": ("combine", ACROSS, 2),
    "gradients out": ("dispatch", ACROSS, 3),
    "gradients back": ("combine", ACROSS, 3),
}
"""Phase and tier of a message, and how many of such a rank has begun to send when it dies, of two chunks. Not
the last: who has all that it needs does not hear of a death."""


def die_at(ranks: Ranks, dying: list[int], at: str, asleep_s: float = 0.0) -> None:
    """asleep_s: how long a rank is silent before it dies."""
    phase, tier, which = DEATHS[at]
    sent, post = Counter[tuple[str, int]](), Collective.post

    def counted(self, of_phase, sends, receives):
        for of_tier in {message.tag >> 16 & 3 for message in sends if message.rows.numel()}:
            sent[of_phase, of_tier] += 1
            if (of_phase, of_tier) == (phase, tier) and sent[phase, tier] == which and ranks.rank in dying:
                time.sleep(asleep_s)
                os.kill(os.getpid(), signal.SIGKILL)
        return post(self, of_phase, sends, receives)

    def step(timeout: float | None) -> None:
        exchange, experts = exchange_of(ranks, 2, 3, timeout=timeout)
        x_TD, routing, d_y_TD = drawn(40, 3, ranks.rank)
        x_TD.requires_grad_()
        dist.barrier(ranks.group)
        if timeout is not None:
            patched: Any = Collective
            patched.post = counted
        Pipelined("optsche", 2).run(x_TD, routing, exchange, experts, None).y_TD.backward(d_y_TD)

    step(None)  # loads torch's compiler, for seconds
    began = time.monotonic()
    with pytest.raises(imbrex.RankLostError, match=f"rank {ranks.rank} lost its peers in "):
        step(TIMEOUT_S + 3 * asleep_s)
    waited = time.monotonic() - began
    raise AssertionError(f"waited {'long enough' if waited < TIMEOUT_S + 8 else 'too long'}")


@pytest.mark.parametrize(
    ("dying", "at"), [*(([3], at) for at in DEATHS), ([2, 3], "rows inside"), ([2, 3], "gradients back")]
)
def test_a_death_at_every_message_of_a_step(dying: list[int], at: str) -> None:
    others_hear(die_at, dying, at, timeout_s=60.0)


def test_a_silence_before_a_death() -> None:
    """Meanwhile the others have given their lanes what comes behind the rows of the dying rank."""
    others_hear(die_at, [3], "rows out", 1.0, timeout_s=60.0)
