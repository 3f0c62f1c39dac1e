"""The exchange among real GPUs under what goes on for long or goes wrong: a thousand calls, two exchanges at
once, a peer that sleeps, a peer that dies."""

from __future__ import annotations

import os
import tempfile
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.multiprocessing.spawn import spawn

from imbrex.kernels.exchange import layout as lay
from imbrex.kernels.exchange.exchange import NvlinkExchange, Routed
from imbrex.kernels.exchange.failures import ExchangeError
from imbrex.kernels.heap import SymmetricHeap
from imbrex.placement.layouts import contiguous
from tests.gpu.gpus import RANKS, share, worlds
from tests.ranks.pool import Pool, Ranks

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(300),
    pytest.mark.skipif(RANKS < 2, reason="peers need two GPUs"),
]
T, K, E, D = 96, 6, 16, 256
CALLS = 1000
TIMEOUT_S = 3.0


def open_exchange(ranks: Ranks, timeout: float = 20.0) -> NvlinkExchange:
    group, world = ranks.group, ranks.world_size
    local = E // world
    shape = lay.Shape(
        ranks=world,
        max_tokens=T,
        choices=K,
        experts=E,
        most_slots=local,
        row_bytes=2 * D,
        alignment=8,
        row_capacity=world * T * min(K, local) + 8 * local,
        token_capacity=(world - 1) * T,
    )
    device = torch.device("cuda", torch.cuda.current_device())
    return NvlinkExchange(
        lambda nbytes: SymmetricHeap(group, nbytes, device), contiguous(E, world), shape, timeout=timeout
    )


def tokens_of(rank: int, call: int) -> Tensor:
    """[T, D] bf16 that names its rank, token and call in every sixth value: whole numbers below 256."""
    token = torch.arange(T, device="cuda")
    names = [torch.full_like(token, rank + 1), token, token // 7, torch.full_like(token, call % 251)]
    names += [(token * 5 + call) % 241, (token * 3 + rank) % 239]
    return torch.stack(names, 1).repeat(1, D // 6 + 1)[:, :D].bfloat16().contiguous()


def choices_of(rank: int, call: int) -> tuple[Tensor, int]:
    """ids [T, K] and how many tokens: their number, the choices of a token and the skew change by call."""
    make = torch.Generator().manual_seed(1009 * call + rank)
    count = int(torch.randint(0, T + 1, (1,), generator=make)) if call % 5 else T * (rank == call % 2)
    skew = (call % 3) * 4.0 * torch.arange(E) / E
    ids = (torch.rand(T, E, generator=make) + skew).topk(K, dim=-1).indices
    ids[:, 1 + call % K :] = -1
    ids[torch.rand(T, K, generator=make) < 0.1 * (call % 4)] = -1
    return ids[:count], count


class Checker:
    """Makes calls and adds up, on the device, how many values were wrong."""

    def __init__(self, ranks: Ranks, exchange: NvlinkExchange) -> None:
        self.ranks, self.exchange = ranks, exchange
        self.wrong = torch.zeros((), dtype=torch.int64, device="cuda")

    def call(self, call: int) -> Routed:
        ids, count = choices_of(self.ranks.rank, call)
        ids, x = ids.cuda(non_blocking=True), tokens_of(self.ranks.rank, call)[:count]
        weights = torch.full(ids.shape, 2.0, device="cuda")
        routed = self.exchange.route(ids, weights)
        rows = self.exchange.pull(x, routed, num_sms=1 + call % 16)[0]
        for source in range(self.ranks.world_size):
            position = routed.position_LWTK[0, source].long()
            right = tokens_of(source, call)[:, None].expand(-1, K, -1)
            self.wrong += ((rows[position.clamp(min=0)] != right) & (position >= 0)[..., None]).sum()
        y = self.exchange.combine(rows[None], routed, num_sms=1 + call % 7, num_tokens=count)
        self.wrong += (y != self.sums(x, ids)).sum()
        return routed

    def sums(self, x: Tensor, ids: Tensor) -> Tensor:
        """Twice x for every choice; what other ranks add up crosses in bf16, which three times 201 is not."""
        total, local = torch.zeros(x.shape, device="cuda"), E // self.ranks.world_size
        for rank in range(self.ranks.world_size):
            chosen = ((ids >= 0) & (ids // local == rank)).sum(1, keepdim=True)
            partial = 2 * chosen * x.float()
            total += partial if rank == self.ranks.rank else partial.bfloat16()
        return total.bfloat16()


def run_many(ranks: Ranks, calls: int) -> int:
    exchange = open_exchange(ranks)
    checker = Checker(ranks, exchange)
    for call in range(calls):
        checker.call(call)
    exchange.check(synchronize=True)
    exchange.close()
    return int(checker.wrong)


@pytest.mark.parametrize("world", worlds())
def test_a_thousand_calls_with_changing_tokens_choices_and_skew(nccl: Pool, world: int) -> None:
    assert nccl.run(world, run_many, CALLS if world == worlds()[-1] else CALLS // 4) == [0] * world


def run_interleaved(ranks: Ranks, calls: int) -> int:
    """Two exchanges, each on a stream of its own, whose calls meet in any order on the GPU."""
    checkers = [Checker(ranks, open_exchange(ranks)) for _ in range(2)]
    streams = [torch.cuda.Stream() for _ in checkers]
    torch.cuda.synchronize()
    for call in range(calls):
        for which in (0, 1) if (call + ranks.rank) % 2 else (1, 0):
            with torch.cuda.stream(streams[which]):
                checkers[which].call(2 * call + which)
    for checker in checkers:
        checker.exchange.check(synchronize=True)
    for checker in checkers:
        checker.exchange.close()
    return sum(int(checker.wrong) for checker in checkers)


@pytest.mark.parametrize("world", worlds())
def test_two_exchanges_on_two_streams(nccl: Pool, world: int) -> None:
    assert nccl.run(world, run_interleaved, 100) == [0] * world


def run_with_a_sleeper(ranks: Ranks) -> tuple[int, float]:
    exchange = open_exchange(ranks)
    checker = Checker(ranks, exchange)
    checker.call(0)
    torch.cuda.synchronize()
    begun = time.monotonic()
    if ranks.rank == 1:
        time.sleep(2.0)
    checker.call(1)
    exchange.check(synchronize=True)
    took = time.monotonic() - begun
    checker.call(2)
    exchange.check(synchronize=True)
    exchange.close()
    return int(checker.wrong), took


def test_a_peer_that_sleeps_only_delays(nccl: Pool) -> None:
    for wrong, took in nccl.run(worlds()[-1], run_with_a_sleeper):
        assert wrong == 0
        assert 1.9 < took < 4.0


def lose_a_rank(rank: int, world: int, folder: str) -> None:
    """The last rank leaves without a word after the first call; what the others saw, into a file each."""
    device = torch.device("cuda", share(rank))
    torch.cuda.set_device(device)
    dist.init_process_group(
        "nccl",
        init_method=f"file://{folder}/store",
        rank=rank,
        world_size=world,
        device_id=device,
    )
    ranks = Ranks(rank=rank, world_size=world, group=dist.group.WORLD, device="cuda")
    exchange = open_exchange(ranks, timeout=TIMEOUT_S)
    checker = Checker(ranks, exchange)
    checker.call(0)
    exchange.check(synchronize=True)
    dist.barrier()
    torch.cuda.synchronize()
    if rank == world - 1:
        os._exit(0)
    begun, said = time.monotonic(), []
    for _ in range(2):  # the call that waits in vain, and one that does not begin
        try:
            checker.call(1)
            exchange.check(synchronize=True)
        except ExchangeError as error:
            said.append(str(error))
    exchange.close()
    Path(folder, f"rank{rank}").write_text(f"{time.monotonic() - begun}\n" + "\n".join(said))
    os._exit(0)


@pytest.mark.parametrize("world", worlds())
def test_a_peer_that_dies_is_every_ranks_exception_within_the_time_out(world: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        spawn(lose_a_rank, args=(world, folder), nprocs=world, join=True)
        for rank in range(world - 1):
            took, *said = Path(folder, f"rank{rank}").read_text().splitlines()
            assert float(took) < TIMEOUT_S + 3.0
            assert len(said) == 2, said
            assert "timed out, waiting for" in said[0] or "a peer gave up" in said[0], said
            assert f"rank {world - 1}" in said[0] or "gave up" in said[0], said
