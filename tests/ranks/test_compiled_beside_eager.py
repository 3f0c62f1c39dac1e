"""A first call over NVLink of which one rank is compiled and another is not: kernels and gloo would wait for
each other, or end the process."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import imbrex
from imbrex.kernels.ffn.ffn import ffn
from imbrex.kernels.fused.rows_out import rows_out_once
from tests.emulated import kernel
from tests.poison import real_empty
from tests.ranks.pool import Pool, Ranks
from tests.ranks.test_fused import CHOICES, EXPERTS, INNER, WIDTH, Own, emulating


class Bringing(Own):
    """imbrex's experts, whose kernels also bring rows outside of graphs."""

    def forward(self, dispatched: imbrex.Dispatched) -> Tensor:
        beside = rows_out_once(dispatched.beside)
        beside = beside and beside._replace(leave=dispatched.leave)
        weights = self.gate_up_proj, self.down_proj
        more = {"weights_R": dispatched.handle.weights_R, "beside": beside}
        return ffn(dispatched.rows_RD, *weights, dispatched.counts_e, **more)


def run_calls(ranks: Ranks, schedule: str) -> list[str]:
    """What comes of three forwards, of which the second is compiled on no rank and the others on one."""
    torch.compiler.reset()
    said, last = [], ranks.rank == 1
    config = imbrex.MoEConfig(hidden_size=WIDTH, intermediate_size=INNER, num_experts=EXPERTS, top_k=CHOICES)
    x_TD = torch.randn(31 + 9 * ranks.rank, WIDTH).bfloat16()
    with emulating(ranks) as (nvlink, _), real_empty(), torch.no_grad():
        layer = imbrex.MoELayer(
            *(config, ranks.group),
            transport=nvlink,
            schedule=schedule,
            experts=Bringing(ranks.rank, train_down=True) if schedule == "fused" else "grouped",
            dtype=torch.bfloat16,
        )
        compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
        outputs = []
        for run in (compiled if last else layer, layer, compiled if last else layer):
            try:
                outputs.append(run(x_TD))
                said.append("the same" if torch.equal(outputs[0], outputs[-1]) else "other numbers")
            except ValueError as error:
                said.append(str(error))
    return said


@pytest.mark.untraced
@pytest.mark.skipif(not kernel.available(), reason="the emulation needs g++")
@pytest.mark.parametrize("schedule", ["fused", "megatron"])
def test_a_first_call_that_one_rank_compiles_is_refused(pool: Pool, schedule: str) -> None:
    """Later ones are fused's, and in chunks refused, too."""
    for first, plain, later in pool.run(2, run_calls, schedule):
        assert "where only some are compiled, use schedule='serial'" in first
        assert plain == "the same"
        assert later == ("the same" if schedule == "fused" else first.replace("call 1", "call 4"))
