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
from tests.ranks.pool import Pool, RankError, Ranks

TIMEOUT_S = 2.0


def run_and_lose(ranks: Ranks, how: str, phase: str) -> None:
    """Rank 1 dies or sleeps in `phase`; rank 0 goes on into the same crossing."""
    x_TD, ids_TK = torch.randn(3, 4), torch.tensor([[0], [1], [0]])
    routing = imbrex.Routing(ids_TK=ids_TK, weights_TK=torch.ones(3, 1))
    for timeout_s in (60.0, TIMEOUT_S):  # the first call loads torch's compiler, for seconds
        exchange = imbrex.Exchange(
            contiguous(2, 2), 4, 1, group=ranks.group, transport="alltoall", timeout=timeout_s
        )
        dispatched = exchange.dispatch(x_TD, routing)
        dist.barrier(ranks.group)
    if ranks.rank == 1:
        if how == "dies":
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(3 * TIMEOUT_S)
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
            f"waited {'long enough' if waited < 2 * TIMEOUT_S else 'too long'}: {error}"
        ) from error


@pytest.mark.parametrize("how", ["dies", "sleeps"])
@pytest.mark.parametrize("phase", ["plan", "combine"])
def test_the_others_are_told(how: str, phase: str) -> None:
    # One that died has answered; one that sleeps is not waited for.
    ranks = Pool(2, timeout_s=120.0, grace_s=10.0 if how == "dies" else 0.1)
    try:
        said = (
            rf"waited long enough: rank 0 lost its peers in {phase}: a rank died, left or was silent for 2 s"
        )
        with pytest.raises(RankError, match=said):
            ranks.run(2, run_and_lose, how, phase)
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


def test_no_thread_outlives_the_groups_that_were_left(tmp_path: Path) -> None:
    """Such a thread may end the process as Python ends. Cycles of a model keep its group; so did the default
    arguments of a module of torch's that its compiler imports, were it not imported before."""
    words = [sys.executable, "-c", LEAVE, str(tmp_path / "store")]
    told = subprocess.run(words, capture_output=True, text=True, timeout=240, cwd=ROOT)
    assert told.returncode == 0, told.stderr
    before, after = map(int, told.stdout.split())
    assert before >= 2
    assert after == 0
