"""Events over NVLink without a GPU: gloo ranks, shared memory, kernels by g++. Forwards without gradients do
without a late rank; gradients are serial's."""

from __future__ import annotations

import re
import time
import warnings
from dataclasses import replace
from typing import Any

import pytest
import torch

import imbrex
from imbrex.kernels.exchange.failures import ExchangeError
from imbrex.overlap import Events
from tests.emulated import kernel
from tests.ranks.emulated_nvlink import EmulatedNvlink
from tests.ranks.layer_jobs import Case, make_layer, tokens_of
from tests.ranks.pool import Pool, Ranks
from tests.ranks.test_events import one_step

pytestmark = pytest.mark.skipif(not kernel.available(), reason="the emulation needs g++")
CONFIG = imbrex.MoEConfig(hidden_size=64, intermediate_size=24, num_experts=8, top_k=3)
CASE = Case(config=CONFIG, tokens=(5, 9, 3, 8), dtype=torch.bfloat16)
LATE, LATE_S, TAU_S, STEPS = 3, 4.0, 0.5, 2


def run_late(ranks: Ranks, case: Case, late: bool, epsilon: int) -> dict[str, Any]:
    """Some forwards, of whom rank 3 is late in all but the first; each again by serial, given its mask."""
    nvlink = EmulatedNvlink(ranks.group, timeout=60.0)
    torch.manual_seed(0)
    options: dict[str, Any] = {"transport": nvlink, "schedule": Events(TAU_S if epsilon else 0.0, epsilon)}
    ours = make_layer(replace(case, options=options), ranks.group)
    torch.manual_seed(0)
    serial = make_layer(replace(case, options={"transport": nvlink}), ranks.group)
    same, dropped = [], []
    for step in range(STEPS):
        x_TD = tokens_of(case, ranks.rank + 10 * step)
        if late and step and ranks.rank == LATE:
            time.sleep(LATE_S)
        mine = one_step(ours, x_TD, None, False)
        kept_TK = mine.pop("kept")
        theirs = one_step(serial, x_TD, kept_TK, False)
        same.append(torch.equal(mine["y"], theirs["y"]))
        dropped.append(int((~kept_TK).sum()))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with_grad = [one_step(layer, tokens_of(case, ranks.rank), None, True) for layer in (ours, serial)]
    warned = any("runs with gradients as serial" in str(one.message) for one in caught)
    same.append(warned == (epsilon > 0))
    same.append(all(torch.equal(with_grad[0][n], with_grad[1][n]) for n in with_grad[0] if n != "kept"))
    reasons = ours.reasons["schedule"]
    ours.close()
    return {"same": all(same), "dropped": dropped, "reasons": reasons}


@pytest.mark.parametrize("tensor_ranks", [1, 2])
def test_without_patience_the_bits_are_those_of_serial(pool: Pool, tensor_ranks: int) -> None:
    for answer in pool.run(4, run_late, replace(CASE, tensor_parallel=tensor_ranks), False, 0):
        assert answer["same"]
        assert answer["dropped"] == [0] * STEPS


def test_a_late_rank_is_done_without_and_its_mask_replays_to_the_bit(pool: Pool) -> None:
    answers = pool.run(4, run_late, CASE, True, 1)
    for rank, answer in enumerate(answers):
        assert answer["same"], rank
        assert "by the GPU's clock; with gradients as serial" in answer["reasons"]
        assert answer["dropped"][1] > 0, (rank, answer)


def run_wrong(ranks: Ranks) -> str:
    """The error of a rank where rank 1's second input is wrong."""
    nvlink = EmulatedNvlink(ranks.group, timeout=20.0)
    layer = make_layer(replace(CASE, options={"transport": nvlink, "schedule": Events()}), ranks.group)
    x_TD = tokens_of(CASE, ranks.rank)
    with torch.no_grad():
        layer(x_TD)
        try:
            layer(x_TD[:, :-1] if ranks.rank == 1 else x_TD)
            layer.check()
        except (ValueError, ExchangeError) as error:
            return str(error)
    return ""


def test_a_wrong_input_fails_on_all_ranks(pool: Pool) -> None:
    sentences = pool.run(4, run_wrong)
    assert sentences[1].startswith("dispatch: on rank 1, x ")
    for rank in (0, 2, 3):
        # Whose first call is not over when rank 1 gives up, loses that one.
        assert re.search(r"in events call [12] .*: a peer gave up", sentences[rank])


def run_refused(ranks: Ranks, schedule: Any, options: dict[str, Any]) -> str:
    nvlink = EmulatedNvlink(ranks.group, timeout=20.0)
    parts = options | {"transport": nvlink, "schedule": schedule}
    with torch.no_grad(), pytest.raises(ValueError, match="schedule") as caught:
        make_layer(replace(CASE, options=parts), ranks.group)(tokens_of(CASE, ranks.rank))
    return str(caught.value)


def test_what_the_kernels_do_not_serve_is_every_ranks_sentence(pool: Pool) -> None:
    for answer in pool.run(2, run_refused, Events("p95", 1), {}):
        assert "over nvlink none is learnt" in answer
