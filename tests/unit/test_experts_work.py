"""What a rank's experts get in a benchmark: the rows asked for, spread as the law has it over all ranks."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from imbrex.bench.experts.rival import ffn, ways_to_sum
from imbrex.bench.experts.work import choices_received, experts_of, make_work
from imbrex.bench.shapes import MODELS, Shape

SMALL = Shape(hidden_size=16, intermediate_size=8, num_experts=8, top_k=2)


def counts(model: str, rows: int, skew: str, ranks: int = 4) -> torch.Tensor:
    shape = MODELS[model]
    ids_TK = choices_received(shape, ranks, rows, skew)
    assert int((ids_TK >= 0).sum()) == rows
    assert (ids_TK >= 0).any(1).all(), "a token without a choice here does not come here"
    sorted_TK = ids_TK.sort(1).values
    assert ((sorted_TK.diff(dim=1) > 0) | (sorted_TK[:, 1:] < 0)).all(), "no expert twice"
    return torch.bincount(ids_TK[ids_TK >= 0], minlength=experts_of(shape, ranks))


def test_a_work_is_one_rank_s_part() -> None:
    """Expert-major rows, whose tokens and positions agree; a weight of 0 where the choice went elsewhere."""
    work = make_work(SMALL, 4, 50, "uniform", device="cpu")
    assert work.counts_e.sum() == 50
    assert work.counts_e.numel() == 2
    assert work.ends_e.tolist() == work.counts_e.cumsum(0).tolist()
    tokens, choices = (work.position_TK >= 0).nonzero(as_tuple=True)
    rows = work.position_TK[tokens, choices]
    assert rows.sort().values.tolist() == list(range(50))
    assert torch.equal(work.source_R[rows], tokens)
    assert ((work.weights_TK > 0) == (work.position_TK >= 0)).all()
    assert (work.x_TD.shape, work.gate_up_eGD.shape, work.down_eDF.shape) == (
        (len(work.position_TK), 16),
        (2, 16, 16),
        (2, 16, 8),
    )


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("rows", [64, 1024])
def test_balanced_counts_are_equal_to_a_row(model: str, rows: int) -> None:
    found = counts(model, rows, "balanced")
    assert found.max() - found.min() <= 1


def test_two_experts_of_a_rank_differ_as_the_law_has_it() -> None:
    """Zipf's 8 shares with exponent 1, capped at a half: whichever two are here, they are a tenth apart."""
    found = counts("mixtral", 4096, "zipf:1").float()
    assert found.max() > 1.1 * found.min()
    assert counts("mixtral", 4096, "uniform").float().std() < 100


def test_recorded_loads_are_those_of_all_the_model_s_experts(tmp_path: Path) -> None:
    """Experts 0 and 1 of 8 in the ratio 3 to 1, each of the others as often as these two on average."""
    np.save(tmp_path / "ids.npy", np.repeat(np.arange(8), [3, 1, 2, 2, 2, 2, 2, 2]).reshape(4, 4))
    ids_TK = choices_received(SMALL, 4, 4000, f"load:{tmp_path / 'ids.npy'}")
    share = float((ids_TK == 0).sum()) / 4000
    assert share == pytest.approx(0.75, abs=0.02)


def test_what_a_rank_never_gets_is_said(tmp_path: Path) -> None:
    np.save(tmp_path / "ids.npy", np.array([[4, 5], [6, 7], [5, 6], [7, 4]]))
    with pytest.raises(ValueError, match=r"sends rank 0 of 2 only 0 of \d+ rows"):
        choices_received(SMALL, 2, 10, f"load:{tmp_path / 'ids.npy'}")


def test_experts_of_one_rank() -> None:
    assert experts_of(MODELS["deepseek-v3"], 4) == 64
    with pytest.raises(ValueError, match="--ranks 3 does not divide 256"):
        experts_of(MODELS["deepseek-v3"], 3)


@pytest.mark.parametrize("skew", ["balanced", "uniform"])
def test_the_rival_s_ways_to_sum_are_one_result(skew: str) -> None:
    """All beside a loop over tokens and their choices, in float32."""
    work = make_work(SMALL, 2, 60, skew, device="cpu")
    rows_RD = ffn(work.x_TD[work.source_R], work.gate_up_eGD, work.down_eDF, work.ends_e).float()
    right = torch.zeros(work.x_TD.shape)
    for token, choice in (work.position_TK >= 0).nonzero().tolist():
        right[token] += work.weights_TK[token, choice] * rows_RD[work.position_TK[token, choice]]
    assert right.norm() > 1
    for way, inputs in ways_to_sum(work).values():
        found = way(*inputs)
        assert found.dtype == torch.bfloat16
        torch.testing.assert_close(found.float(), right, atol=0.02, rtol=0.02)
