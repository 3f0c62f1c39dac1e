"""Ranks that share experts, by schedule='fused' and by events: every way to divide two and four ranks, ragged
and skewed batches, ranks without tokens."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

import imbrex
from imbrex.contracts import RowForm
from imbrex.experts.experts import Experts, Shard
from imbrex.kernels.ffn.ffn import ffn
from imbrex.kernels.fused.rows_out import rows_out
from imbrex.overlap import Events, Fused, Serial
from imbrex.placement import contiguous
from tests.emulated import kernel
from tests.ranks.layer_jobs import coefficients
from tests.ranks.pool import Pool, Ranks
from tests.ranks.test_fused import emulating

pytestmark = [
    pytest.mark.skipif(not kernel.available(), reason="the emulation needs g++"),
    pytest.mark.untraced,
]
EXPERTS, WIDTH, PIECE, CHOICES = 8, 256, 64, 2
TOKENS = (0, 31, 5, 140)


class Pieces(Experts):
    """A rank's pieces of imbrex's experts, by emulated kernels."""

    def __init__(self, slots: tuple[int, ...], shard: Shard) -> None:
        sizes = slots, WIDTH, PIECE * shard.size
        super().__init__(*sizes, seed=3, dtype=torch.bfloat16, shard=shard)
        self.implementation, self.applies_weights, self.brought = "kernels", True, 0

    @property
    def forms(self) -> tuple[RowForm, ...]:
        return RowForm.ROWS, RowForm.UNDER_WAY

    def forward(self, dispatched: imbrex.Dispatched) -> Tensor:
        under_way = dispatched.form is RowForm.UNDER_WAY
        self.brought += under_way
        beside = rows_out(dispatched.beside)._replace(leave=dispatched.leave) if under_way else None
        weights = self.gate_up_proj, self.down_proj
        more = {"weights_R": dispatched.handle.weights_R, "beside": beside}
        return ffn(dispatched.rows_RD, *weights, dispatched.counts_e, **more)


def skewed(rank: int) -> tuple[Tensor, imbrex.Routing]:
    """Tokens of which every one wants expert 0, and some nobody else."""
    make, tokens = torch.Generator().manual_seed(7 + rank), TOKENS[rank]
    scores_TE = torch.rand(tokens, EXPERTS, generator=make)
    scores_TE[:, 0] += 1
    ids_TK = scores_TE.topk(CHOICES).indices
    ids_TK[::5, 1] = -1
    weights_TK = torch.rand(tokens, CHOICES, generator=make).requires_grad_()
    x_TD = torch.randn(tokens, WIDTH, generator=make).bfloat16().requires_grad_()
    return x_TD, imbrex.Routing(ids_TK=ids_TK, weights_TK=weights_TK)


def run_pieces(ranks: Ranks, tensor: int) -> tuple[list[list[bool]], list[int]]:
    """Which of outputs and gradients have the bits of serial, by fused, by events without patience and by
    events with patience; and how many calls of each brought their rows."""
    placement, answers, brought = contiguous(EXPERTS, ranks.world_size // tensor), [], []
    with emulating(ranks) as (nvlink, _):
        exchange = imbrex.Exchange(
            *(placement, WIDTH, CHOICES),
            group=ranks.group,
            tensor_parallel=tensor,
            transport=nvlink,
            dtype=torch.bfloat16,
        )
        shard = Shard(rank=ranks.rank % tensor, size=tensor)
        for schedule in (Serial(), Fused(), Events(), Events(math.inf, 1)):
            x_TD, routing = skewed(ranks.rank)
            experts = Pieces(placement.local(ranks.rank // tensor), shard)
            y_TD = schedule.run(x_TD, routing, exchange, experts, None).y_TD
            loss = (y_TD.float() * coefficients(y_TD)).sum()
            leaves = [x_TD, routing.weights_TK, *experts.parameters()]
            answers.append([y_TD, *torch.autograd.grad(loss, leaves)])
            brought.append(experts.brought)
        exchange.check(synchronize=True)
    truth, *others = answers
    return [[torch.equal(a, b) for a, b in zip(other, truth, strict=True)] for other in others], brought


@pytest.mark.parametrize(("world", "tensor"), [(2, 1), (2, 2), (4, 1), (4, 2), (4, 4)])
def test_every_way_to_divide_the_ranks_has_the_bits_of_serial(pool: Pool, world: int, tensor: int) -> None:
    for same, brought in pool.run(world, run_pieces, tensor):
        assert same == [[True] * 5] * 3
        assert brought == [0, 1, 1, 0]
