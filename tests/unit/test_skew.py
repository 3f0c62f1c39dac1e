"""Shapes and routings for benchmarks: shares as asked for, no expert twice, traces read back."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from imbrex.bench.shapes import MODELS, Shape, parse_shape
from imbrex.bench.skew import draw_choices, make_routing

MIXTRAL = MODELS["mixtral"]


def loads(ids_TK: torch.Tensor, num_experts: int) -> torch.Tensor:
    return torch.bincount(ids_TK.flatten(), minlength=num_experts) / ids_TK.numel()


def test_a_shape_is_scaled_to_multiples_of_8() -> None:
    assert parse_shape("mixtral") == MIXTRAL
    assert parse_shape("deepseek-v3", 1000) == Shape(
        hidden_size=8, intermediate_size=8, num_experts=256, top_k=8
    )
    assert str(parse_shape("qwen2-moe", 16)) == "D=128 F=88 E=64 K=4"
    assert parse_shape("7,5,3,2") == Shape(hidden_size=7, intermediate_size=5, num_experts=3, top_k=2)


@pytest.mark.parametrize("text", ["mixtrl", "1,2,3", "8,8,2,4", "8,8,0,0", "8,8,4,x"])
def test_a_wrong_model_says_what_there_is(text: str) -> None:
    with pytest.raises(ValueError, match=r"--model: .*D,F,E,K"):
        parse_shape(text)


@pytest.mark.parametrize("skew", ["uniform", "zipf:1.2", "std:0.032", "std:0"])
def test_no_expert_twice_and_weights_sum_to_one(skew: str) -> None:
    routing = make_routing(skew, MODELS["deepseek-v3"] if skew[0] != "s" else MIXTRAL, 500)
    assert (routing.ids_TK.sort(1).values.diff(dim=1) > 0).all()
    torch.testing.assert_close(routing.weights_TK.sum(1), torch.ones(500))


@pytest.mark.parametrize("std", [0.01, 0.032, 0.05, 0.1])
def test_the_load_has_the_deviation_asked_for(std: float) -> None:
    load = loads(make_routing(f"std:{std}", MIXTRAL, 20_000).ids_TK, 8)
    assert float(load.std(correction=0)) == pytest.approx(std, rel=0.05)


def test_choices_keep_their_shares() -> None:
    shares = torch.tensor([0.5, 0.25, 0.125, 0.125])
    ids_TK = draw_choices(shares, 20_000, 2, torch.Generator().manual_seed(0))
    torch.testing.assert_close(loads(ids_TK, 4), shares, atol=0.01, rtol=0)
    assert (ids_TK == 0).any(1).all(), "an expert with probability K * 1/2 = 1 is in every row"


def test_zipf_is_the_same_popularity_on_every_rank_with_other_tokens() -> None:
    shape = MODELS["qwen2-moe"]
    first, second = (make_routing("zipf:1", shape, 20_000, rank=rank).ids_TK for rank in (0, 1))
    assert not torch.equal(first, second)
    torch.testing.assert_close(loads(first, 64), loads(second, 64), atol=0.01, rtol=0)
    assert float(loads(first, 64).max()) == pytest.approx(1 / sum(1 / e for e in range(1, 65)), rel=0.05)


def test_a_trace_is_read_by_rank_and_wraps(tmp_path: Path) -> None:
    ids = np.array([[[0, 1], [1, 2], [2, 3]], [[3, 2], [2, 1], [1, 0]]], dtype=np.int16)
    weights = np.full((2, 3, 2), 0.25, dtype=np.float16)
    np.savez(tmp_path / "t.npz", law_ids=ids, law_w=weights)
    shape = Shape(hidden_size=8, intermediate_size=8, num_experts=4, top_k=2)
    routing = make_routing(f"trace:{tmp_path}/t.npz:law_ids:1", shape, 2, rank=1)
    assert routing.ids_TK.tolist() == [[1, 0], [3, 2]]
    assert routing.weights_TK.tolist() == [[0.25, 0.25], [0.25, 0.25]]
    small = Shape(hidden_size=8, intermediate_size=8, num_experts=3, top_k=2)
    with pytest.raises(ValueError, match="up to 3 but the model routes to 2 of 3 experts"):
        make_routing(f"trace:{tmp_path}/t.npz", small, 2)
    with pytest.raises(ValueError, match="layers 0 to 1, not 2"):
        make_routing(f"trace:{tmp_path}/t.npz:law_ids:2", shape, 2)


@pytest.mark.parametrize(
    ("skew", "said"),
    [
        ("zip:1", "uniform, zipf:A"),
        ("zipf:x", "not a number"),
        ("std:-1", "from 0 up"),
        ("std:0.4", "do not reach"),
        ("trace:/nowhere.npz", "cannot read"),
    ],
)
def test_a_wrong_skew_says_how_to_mend_it(skew: str, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        make_routing(skew, MIXTRAL, 4)


def test_a_file_that_is_no_trace_is_one_sentence(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", np.array([{}], dtype=object))
    with pytest.raises(ValueError, match=r"a\.npy \(it holds no array of numbers .* give a \.npy or \.npz"):
        make_routing(f"trace:{tmp_path / 'a.npy'}", MIXTRAL, 4)


def test_recorded_load_fits_any_model(tmp_path: Path) -> None:
    """Of 4 recorded experts with loads 4, 3, 2, 1 the first two: 4/7 and 3/7; a token takes either once."""
    np.save(tmp_path / "ids.npy", np.repeat(np.arange(4), [4, 3, 2, 1]).reshape(5, 2))
    two = Shape(hidden_size=8, intermediate_size=8, num_experts=2, top_k=1)
    ids_TK = make_routing(f"load:{tmp_path / 'ids.npy'}", two, 20_000).ids_TK
    torch.testing.assert_close(loads(ids_TK, 2), torch.tensor([4 / 7, 3 / 7]), atol=0.01, rtol=0)
    with pytest.raises(
        ValueError, match="4 experts in every layer of the trace, layers 1, are too few for 8"
    ):
        make_routing(f"load:{tmp_path / 'ids.npy'}", MIXTRAL, 10)
    np.save(tmp_path / "ids.npy", np.array([[2, 3]]))
    with pytest.raises(ValueError, match="the trace never chose the first 2 of its 4 experts"):
        make_routing(f"load:{tmp_path / 'ids.npy'}", two, 10)


def test_experts_beyond_a_recorded_layer_are_the_next_layer_s(tmp_path: Path) -> None:
    """Layers of 4 experts, from layer 1 on and round: loads 1, 1, 1, 7 and 4, 3, 2, 1, of 20 together."""
    loads_of = [[4, 3, 2, 1], [1, 1, 1, 7]]
    np.save(tmp_path / "ids.npy", np.stack([np.repeat(np.arange(4), n).reshape(5, 2) for n in loads_of]))
    eight = Shape(hidden_size=8, intermediate_size=8, num_experts=8, top_k=1)
    ids_TK = make_routing(f"load:{tmp_path / 'ids.npy'}::1", eight, 20_000).ids_TK
    expected = torch.tensor([1, 1, 1, 7, 4, 3, 2, 1]) / 20
    torch.testing.assert_close(loads(ids_TK, 8), expected, atol=0.01, rtol=0)
