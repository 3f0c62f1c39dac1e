"""A rank that dies or falls silent ends the others' waits within the time-out, naming the phase."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import imbrex
from imbrex.placement import contiguous
from imbrex.router.global_batch import GlobalBatch
from imbrex.runtime import roll, waits
from imbrex.transport.alltoall import FEW_BYTES, AllToAll
from tests.ranks.pool import Pool, RankError, Ranks

TIMEOUT_S = 0.5


def lose_in_the_backward(ranks: Ranks) -> None:
    """Rank 1 dies between forward and backward."""
    config = imbrex.MoEConfig(hidden_size=4, intermediate_size=4, num_experts=2, top_k=1)
    layer = imbrex.MoELayer(config, ranks.group, transport="alltoall", timeout=2.0)
    x_TD = torch.randn(3, 4, requires_grad=True)
    for _ in range(2):
        loss = layer(x_TD).sum()
        dist.barrier(ranks.group)
        if x_TD.grad is not None and ranks.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        loss.backward()


def call_in_a_fork(ranks: Ranks) -> tuple[str, list[float]]:
    """What a child that was forked after the groups were made is told, and that the ranks go on."""
    config = imbrex.MoEConfig(hidden_size=4, intermediate_size=4, num_experts=2, top_k=1)
    layer = imbrex.MoELayer(config, ranks.group, transport="alltoall")
    x_TD = torch.ones(3, 4)
    before = layer(x_TD).tolist()
    reads, writes = os.pipe()
    if os.fork() == 0:
        try:
            layer(x_TD)
            told = "no word"
        except BaseException as error:  # noqa: BLE001 - the child ends here, whatever it was
            told = f"{type(error).__name__}: {error}"
        os.write(writes, told.encode())
        os._exit(0)
    os.wait()
    told = os.read(reads, 4096).decode()
    assert layer(x_TD).tolist() == before
    return told, before


def test_a_fork_of_a_rank_is_told_at_once(pool) -> None:
    for rank, (told, _) in enumerate(pool.run(2, call_in_a_fork)):
        assert told.startswith(f"RuntimeError: this process was forked from rank {rank} (pid ")
        assert "which do not survive a fork: call layers on the ranks only" in told


def test_a_loss_in_the_backward_pass_is_said_so() -> None:
    ranks = Pool(2, timeout_s=120.0, grace_s=10.0)
    try:
        with pytest.raises(RankError) as caught:
            ranks.run(2, lose_in_the_backward)
    finally:
        ranks.close()
    said = next(line for line in str(caught.value).splitlines() if "RankLostError: " in line)
    assert "rank 0 lost its peers in the backward pass" in said
    why, _, missing = said.partition("; ")
    assert "of layer 0: " in why
    assert why.endswith(("a rank died or left", "a rank was silent for 2 s"))
    assert missing == "not heard of since: rank 1"


def lose_behind_the_experts(ranks: Ranks) -> None:
    """Rank 1 dies with rows that it had promised to combine, so that nobody asks for its word before."""
    config = imbrex.MoEConfig(hidden_size=4, intermediate_size=4, num_experts=2, top_k=1)
    layer = imbrex.MoELayer(config, ranks.group, transport="alltoall", timeout=2.0)
    layer(torch.randn(3, 4))
    assert layer.exchange.dispatcher.promised
    if ranks.rank == 1:
        layer.exchange.combine = lambda *rows, **how: os.kill(os.getpid(), signal.SIGKILL)  # type: ignore[method-assign,assignment]
    layer(torch.randn(3, 4))


def test_a_death_behind_a_promise_is_heard_where_the_sums_cross() -> None:
    ranks = Pool(2, timeout_s=120.0, grace_s=10.0)
    try:
        with pytest.raises(RankError, match="rank 0 lost its peers in combine of layer 0"):
            ranks.run(2, lose_behind_the_experts)
    finally:
        ranks.close()


def run_and_lose(ranks: Ranks, how: str, phase: str, few_bytes: int) -> None:
    """Rank 1 dies or sleeps in `phase`; rank 0 goes on into the same crossing. few_bytes: up to so many go by
    gloo's own all-to-all, more by messages."""
    x_TD, ids_TK = torch.randn(3, 4), torch.tensor([[0], [1], [0]])
    routing = imbrex.Routing(ids_TK=ids_TK, weights_TK=torch.ones(3, 1))
    transport = AllToAll(ranks.group)
    transport.few_bytes = few_bytes
    exchange = imbrex.Exchange(contiguous(2, 2), 4, 1, group=ranks.group, transport=transport)
    dispatched = exchange.dispatch(x_TD, routing)
    dist.barrier(ranks.group)
    # Of a death one hears by the connection, of silence by the time-out.
    transport.timeout_s = 60.0 if how == "dies" else TIMEOUT_S
    if ranks.rank == 1:
        if how == "dies":
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(TIMEOUT_S + 4)
        return
    began = time.monotonic()
    try:
        if phase == "plan":
            exchange.dispatch(x_TD, routing)
        else:
            exchange.combine(dispatched.rows_RD, dispatched.handle)
    except imbrex.RankLostError as error:
        waited = time.monotonic() - began
        raise AssertionError(
            f"waited {'long enough' if waited < TIMEOUT_S + 8 else 'too long'}: {error}"
        ) from error


@pytest.mark.parametrize("how", ["dies", "sleeps"])
@pytest.mark.parametrize(
    ("phase", "few_bytes"), [("plan", FEW_BYTES), ("combine", FEW_BYTES), ("combine", 0)]
)
def test_the_others_are_told(how: str, phase: str, few_bytes: int) -> None:
    # One that died has answered; one that sleeps is not waited for.
    ranks = Pool(2, timeout_s=120.0, grace_s=10.0 if how == "dies" else 0.1)
    try:
        why = "a rank died or left" if how == "dies" else "a rank was silent for 0.5 s"
        said = rf"waited long enough: rank 0 lost its peers in {phase} of layer 0: {why}; "
        said += (
            "not heard of since: rank 1" + (r"\n", "; a rank that calls a layer fewer times")[phase == "plan"]
        )
        with pytest.raises(RankError, match=said):
            ranks.run(2, run_and_lose, how, phase, few_bytes)
    finally:
        ranks.close()


ROOT = Path(__file__).resolve().parents[2]
LEAVE = """
import sys, torch, torch.distributed as dist, imbrex
from imbrex.runtime.waits import leave
from tests.ranks.forked import gloo_threads
def call():
    layer = imbrex.MoELayer(imbrex.MoEConfig(hidden_size=4, intermediate_size=4, num_experts=2, top_k=1),
        dist.group.WORLD, transport="alltoall")
    layer.cycle = lambda: layer
    layer(torch.randn(3, 4)).sum().backward()
dist.init_process_group("gloo", init_method="file://" + sys.argv[1], rank=0, world_size=1)
assert "torch._dynamo" not in sys.modules
call()
print(len(gloo_threads()))
assert "torch._dynamo" in sys.modules
leave()
print(len(gloo_threads(wait_s=5.0)))
"""


@pytest.mark.untraced
def test_no_thread_outlives_the_groups_that_were_left(tmp_path: Path) -> None:
    """Such a thread may end the process as Python ends. Cycles of a model keep its group; so did the default
    arguments of a module of torch's that its compiler imports, were it not imported before."""
    words = [sys.executable, "-c", LEAVE, str(tmp_path / "store")]
    told = subprocess.run(words, capture_output=True, text=True, timeout=240, cwd=ROOT)
    assert told.returncode == 0, told.stderr
    before, after = map(int, told.stdout.split())
    assert before >= 2
    assert after == 0


HELD = """
import torch, torch.distributed as dist, imbrex
from imbrex.router.global_batch import GlobalBatch
from imbrex.runtime import roll, waits
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
held = dist.group.WORLD
for _ in range(1000):
    dist.all_reduce(torch.ones(8), async_op=True)
states = list(waits._wakings().values())
assert len(states) >= 2 and all("State:" in state and "voluntary" in state for state in states), states
dist.destroy_process_group()
"""


@pytest.mark.untraced
def test_a_program_ends_well_while_it_holds_its_group() -> None:
    """Threads of a group that a layer holds let go of the last tensors when the program has ended: three of
    five such programs were aborted."""
    told = subprocess.run([sys.executable, "-c", HELD], capture_output=True, text=True, timeout=240, cwd=ROOT)
    assert told.returncode == 0, told.stderr


def test_the_end_waits_for_threads_that_wake(monkeypatch: pytest.MonkeyPatch) -> None:
    states = iter(["R 1", "S 1", "S 2", "R 2", "R 2", "S 2", "S 2", "S 3"])
    monkeypatch.setattr(waits, "_wakings", lambda: {"7": next(states).replace("S", "S (sleeping)")})
    waits.rest()
    assert next(states) == "S 3"


def end_or_wait_elsewhere(ranks: Ranks, how: str) -> str:
    """What rank 0 is told whose peer's program ends before its call, or which waits where its peer is not."""
    transport = AllToAll(ranks.group)
    exchange = imbrex.Exchange(contiguous(2, 2), 4, 1, group=ranks.group, transport=transport)
    waits.enter(0)
    dist.barrier(ranks.group)
    transport.timeout_s = 60.0 if how != "elsewhere" else TIMEOUT_S
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("IMBREX_TIMEOUT_S", str(TIMEOUT_S))
        if ranks.rank == 1 and how == "elsewhere":
            with pytest.raises(imbrex.RankLostError) as caught:
                GlobalBatch((ranks.group,)).sum(torch.ones(3))
            return str(caught.value)
        if ranks.rank == 1:
            error = ValueError("no\nsuch batch") if how == "raises" else None
            patch.setattr(sys, "last_value", error, raising=False)
            roll.tell_end()
            os.kill(os.getpid(), signal.SIGKILL)
        try:
            exchange.check_in(torch.ones(2, 4))
        except imbrex.RankLostError as error:
            if how != "elsewhere":
                failed = "the program of rank 1 has ended with ValueError: no" if how == "raises" else ""
                assert roll.who_failed(ranks.group) == failed
                raise
            return str(error)
    return ""


@pytest.mark.parametrize("how", ["raises", "ends"])
def test_how_the_program_of_a_lost_rank_has_ended(how: str) -> None:
    ranks = Pool(2, timeout_s=120.0, grace_s=10.0)
    said = "rank 0 lost its peers in plan of layer 0: a rank died or left; the program of rank 1 has ended "
    said += (
        r"with ValueError: no\n"
        if how == "raises"
        else "without an exception; a rank that calls a layer fewer times"
    )
    try:
        with pytest.raises(RankError, match=said):
            ranks.run(2, end_or_wait_elsewhere, how)
    finally:
        ranks.close()


def wait_in_a_backward(ranks: Ranks) -> str:
    """What a rank is told that skips a backward, or that waits in it."""
    config = imbrex.MoEConfig(hidden_size=4, intermediate_size=4, num_experts=2, top_k=1)
    layer = imbrex.MoELayer(config, ranks.group, transport="alltoall", timeout=TIMEOUT_S)
    x_TD = torch.randn(3, 4)
    y_TD = layer(x_TD)
    with pytest.raises(imbrex.RankLostError) as caught:
        layer(x_TD) if ranks.rank == 1 else y_TD.sum().backward()
    return str(caught.value)


def test_a_backward_that_one_rank_skips_is_named() -> None:
    ranks = Pool(2, timeout_s=120.0)
    try:
        here, there = ranks.run(2, wait_in_a_backward)
    finally:
        ranks.close()
    assert "lost its peers in the backward pass, " in here
    assert "; ranks wait for each other, rank 1 in plan of layer 0: " in here
    assert "; ranks wait for each other, rank 0 in the backward pass, " in there


def test_ranks_that_wait_for_each_other_say_where() -> None:
    ranks = Pool(2, timeout_s=120.0)
    try:
        here, there = ranks.run(2, end_or_wait_elsewhere, "elsewhere")
    finally:
        ranks.close()
    assert "; ranks wait for each other, rank 1 in route: all must make the same calls" in here
    assert "; ranks wait for each other, rank 0 in plan of layer 0: all must make the same calls" in there


ENDS = """
import sys
from imbrex import MoELayer
from imbrex.runtime import roll, waits
waits._wakings = lambda: print(7)
class Group:
    get_group_store = lambda self: self
    set = lambda self, key, how: print(key, how)
held = Group()
roll._told[held] = 3
"""


def test_the_end_of_a_program_that_has_a_layer_looks_at_threads_and_tells_others() -> None:
    told = subprocess.run([sys.executable, "-c", ENDS], capture_output=True, text=True, cwd=ROOT)
    assert told.stdout == "imbrex/ended/3 without an exception\n7\n", told.stderr


def make_alone(ranks: Ranks) -> str:
    """What a rank is told that makes a layer which its peer does not make."""
    waits._Place.layer = None
    if ranks.rank == 1:
        time.sleep(1.0)
        return ""
    config = imbrex.MoEConfig(hidden_size=4, intermediate_size=4, num_experts=2, top_k=1)
    with pytest.raises(imbrex.RankLostError) as caught:
        imbrex.MoELayer(config, ranks.group, transport="alltoall", timeout=TIMEOUT_S)
    return str(caught.value)


def test_a_layer_that_one_rank_makes_has_no_batches_to_count() -> None:
    ranks = Pool(2, timeout_s=120.0)
    try:
        said, _ = ranks.run(2, make_alone)
    finally:
        ranks.close()
    assert "lost its peers in the set-up of Exchange: a rank was silent for 0.5 s; not heard of since" in said
    assert said.endswith("rank 1; make it on every rank of the group")
