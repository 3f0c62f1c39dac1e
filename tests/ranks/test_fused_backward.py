"""dx home beside the weights' gradients in a whole backward, kernels by g++: the bits of serial."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import Tensor

import imbrex
from imbrex.contracts import RowForm
from imbrex.exchange.nvlink import NvlinkDispatcher
from imbrex.kernels.ffn.ffn import ffn
from imbrex.kernels.fused import home
from imbrex.overlap import Serial, chunks, pipelined
from imbrex.placement import contiguous
from tests.emulated import kernel
from tests.emulated.gemm import emulate
from tests.emulated.home import loader
from tests.ranks.emulated_nvlink import EmulatedNvlink
from tests.ranks.layer_jobs import coefficients
from tests.ranks.pool import Pool, Ranks

pytestmark = pytest.mark.skipif(not kernel.available(), reason="the emulation needs g++")
EXPERTS, WIDTH, INNER, CHOICES = 4, 256, 64, 2


class Kernels(torch.nn.Module):
    """Experts of imbrex's kernels; down's weight may be trained or not."""

    applies_weights, forms = False, (RowForm.ROWS,)

    def __init__(self, rank: int, *, train_down: bool) -> None:
        super().__init__()
        make = torch.Generator().manual_seed(rank)
        shapes = (EXPERTS // 2, 2 * INNER, WIDTH), (EXPERTS // 2, WIDTH, INNER)
        gate_up, down = (torch.randn(shape, generator=make).bfloat16() / 8 for shape in shapes)
        self.gate_up = torch.nn.Parameter(gate_up)
        self.down = torch.nn.Parameter(down, requires_grad=train_down)

    def forward(self, dispatched: imbrex.Dispatched) -> Tensor:
        return ffn(dispatched.rows_RD, self.gate_up, self.down, dispatched.counts_e)


def run_both(ranks: Ranks, codec: str, train_down: bool) -> tuple[list[bool], int]:
    """Whether y and all gradients are those of serial; how many launches did both."""
    launches = []

    def launch(*args, **options):
        launches.append(1)
        return home.home_beside_gradients(*args, **options)

    with pytest.MonkeyPatch.context() as patch:
        emulate(patch, blocks=2)
        patch.setattr(home, "multiprocessors", lambda device: 2)
        patch.setattr("imbrex.exchange.nvlink.home_beside_gradients", launch)
        nvlink = EmulatedNvlink(ranks.group)
        nvlink.load = loader()  # pyright: ignore[reportAttributeAccessIssue]
        exchange = imbrex.Exchange(
            *(contiguous(EXPERTS, ranks.world_size), WIDTH, CHOICES),
            group=ranks.group,
            transport=nvlink,
            dtype=torch.bfloat16,
            codec={"dispatch_backward": codec},
        )
        dispatcher = exchange.dispatcher
        assert isinstance(dispatcher, NvlinkDispatcher)
        given = {"beside": dispatcher.dispatch_backward_beside}
        patch.setattr(pipelined, "Backward", partial(chunks.Backward, **given))
        answers = []
        for strategy in (Serial(), pipelined.Pipelined("optsche", 1)):
            make = torch.Generator().manual_seed(7 + ranks.rank)
            tokens = 40 - 9 * ranks.rank
            ids_TK = torch.rand(tokens, EXPERTS, generator=make).topk(CHOICES).indices
            weights_TK = torch.rand(tokens, CHOICES, generator=make).requires_grad_()
            x_TD = torch.randn(tokens, WIDTH, generator=make).bfloat16().requires_grad_()
            experts = Kernels(ranks.rank, train_down=train_down)
            routing = imbrex.Routing(ids_TK=ids_TK, weights_TK=weights_TK)
            y_TD = strategy.run(x_TD, routing, exchange, experts, None).y_TD
            (y_TD.float() * coefficients(y_TD)).sum().backward()
            grads = [leaf.grad for leaf in (x_TD, weights_TK, experts.gate_up, experts.down)]
            answers.append([y_TD, *(grad for grad in grads if grad is not None)])
        exchange.check()
    return [torch.equal(a, b) for a, b in zip(*answers, strict=True)], len(launches)


@pytest.mark.parametrize(
    ("codec", "train_down", "launches"), [("identity", True, 1), ("identity", False, 0), ("fp8", True, 0)]
)
def test_bits_are_those_of_serial(pool: Pool, codec: str, train_down: bool, launches: int) -> None:
    for same, launched in pool.run(2, run_both, codec, train_down):
        assert same == [True] * (4 + train_down)
        assert launched == launches
