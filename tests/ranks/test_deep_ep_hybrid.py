"""What every call of `HybridEPBuffer` returns, against lists made row by row, to the bit."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import Tensor

from imbrex.adapters.deep_ep import Buffer, HybridEPBuffer, indices_to_map
from tests.ranks.pool import Pool, Ranks
from tests.ranks.test_deep_ep import TOKENS, D, E, draw, expect

PAD = 4
HALF_EMPTY = (0, 0, 0, 2)


def make(ranks: Ranks) -> HybridEPBuffer:
    return HybridEPBuffer(ranks.group, D, 16, E // ranks.world_size)


def spread(ids: Tensor, weights: Tensor, width: int) -> Tensor:
    out = torch.zeros(len(ids), width)
    for row, (ids_K, weights_K) in enumerate(zip(ids.tolist(), weights.tolist(), strict=True)):
        for expert, weight in zip(ids_K, weights_K, strict=True):
            if expert >= 0:
                out[row, expert] = weight
    return out


def permuted(expected: dict[str, Any], pad: int) -> tuple[list[tuple[int, int]], list[int]]:
    """(row received, choice) of every expert-major row, -1 for padding, and the counts."""
    pairs: list[tuple[int, int]] = []
    counts = []
    for expert in range(len(expected["counts"])):
        mine = [(row, ids.index(expert)) for row, ids in enumerate(expected["ids"].tolist()) if expert in ids]
        mine += [(-1, -1)] * (-len(mine) % pad)
        pairs += mine
        counts.append(len(mine))
    return pairs, counts


def run_compact(ranks: Ranks, tokens: tuple[int, ...]) -> dict[str, Any]:
    buffer = make(ranks)
    x_TD, ids_TK, weights_TK = draw(ranks.rank, tokens)
    rows, probs, scales, handle = buffer.dispatch(
        x_TD, scaling_factor=x_TD[:, :2].float(), topk_idx=ids_TK, topk_weights=weights_TK, num_of_experts=E
    )
    map_TE, probs_TE = indices_to_map(ids_TK, weights_TK, len(ids_TK), E)
    by_map = buffer.dispatch(x_TD, routing_map=map_TE, probs=probs_TE)
    again = buffer.dispatch(-x_TD, probs=None if probs_TE is None else 2 * probs_TE, handle=handle)
    bare = buffer.dispatch(x_TD, routing_map=map_TE, num_dispatched_tokens=30)
    assert bare[1] is None
    assert probs is not None
    local = range(ranks.rank * E // ranks.world_size, (ranks.rank + 1) * E // ranks.world_size)
    here = torch.zeros_like(probs)
    here[:, local.start : local.stop] = probs[:, local.start : local.stop]
    return {
        "rows": [rows, by_map[0], -again[0]],
        "padded": bare[0],
        "probs": [probs, by_map[1], None if again[1] is None else again[1] / 2],
        "scales": scales,
        "handle": (len(handle), handle[3].tolist(), handle[4], handle[5]),
        "sum": buffer.combine(rows, handle=handle),
        "sum of probs": buffer.combine(rows, here, handle),
    }


@pytest.mark.parametrize("world", [1, 2, 4])
@pytest.mark.parametrize("tokens", [TOKENS, HALF_EMPTY], ids=["ragged", "nearly none"])
def test_compact_rows(pool: Pool, world: int, tokens: tuple[int, ...]) -> None:
    width = E // world
    for rank, found in enumerate(pool.run(world, run_compact, tokens)):
        expected = expect(rank, world, tokens)
        size = len(expected["x"])
        x_TD, ids_TK, weights_TK = draw(rank, tokens)
        assert all(torch.equal(rows, expected["x"]) for rows in found["rows"])
        assert torch.equal(found["padded"][:size], expected["x"])
        assert found["padded"].shape == (30, D)
        assert not found["padded"][size:].any()
        local = spread(expected["ids"], expected["weights"], width)
        for probs in found["probs"]:
            assert torch.equal(probs[:, rank * width : (rank + 1) * width], local)
        assert torch.equal(found["scales"], expected["x"][:, :2].float())
        fields, received, local_map, count = found["handle"]
        assert (fields, received, count) == (7, [size], len(x_TD))
        ones = spread(expected["ids"], torch.ones(size, 3), width)
        assert torch.equal(local_map, ones.bool())
        ranks_T = torch.tensor([len({i // width for i in ids if i >= 0}) for ids in ids_TK.tolist()])
        assert torch.equal(found["sum"][0], x_TD * ranks_T[:, None])
        assert found["sum"][1] is None
        assert torch.equal(found["sum of probs"][1], spread(ids_TK, weights_TK, E))


def run_permuted(ranks: Ranks, tokens: tuple[int, ...], budget: int | None) -> dict[str, Any]:
    buffer = make(ranks)
    x_TD, ids_TK, weights_TK = draw(ranks.rank, tokens)
    sizes: dict[str, Any] = {"pad_multiple": PAD, "num_permuted_tokens": budget}
    rows, probs, scales, counts, handle = buffer.dispatch_with_permute(
        hidden=x_TD.to(torch.float8_e4m3fn),
        scaling_factor=x_TD[:, :2].float(),
        topk_idx=ids_TK,
        topk_weights=weights_TK,
        num_of_experts=E,
        use_fp8=True,
        non_blocking=budget is not None,
        **sizes,
    )
    size = None if budget is None else torch.tensor(budget, device="cpu")
    again = buffer.dispatch_with_permute(
        hidden=-x_TD, handle=handle, pad_multiple=PAD, num_permuted_tokens=size
    )
    assert rows.dtype == torch.float8_e4m3fn
    outputs = rows.bfloat16()
    summed = buffer.combine_with_unpermute(hidden=outputs, probs=probs, handle=handle, pad_multiple=PAD)
    return {
        "rows": [outputs, -again[0]],
        "probs": probs,
        "scales": scales,
        "counts": [counts, again[3]],
        "fields": [len(handle), len(again[4])],
        "flags": [handle[-1], handle[10], again[4][10]],
        "kept": (handle[7].tolist(), handle[8], handle[9].hidden_dim, handle[9].num_of_experts_per_rank),
        "sum": summed,
        "alone": buffer.combine_with_unpermute(hidden=outputs, handle=again[4])[1],
    }


@pytest.mark.parametrize("budget", [None, 64, 8, 0], ids=["exact", "ample", "too small", "none"])
@pytest.mark.parametrize("world", [1, 2, 4])
@pytest.mark.parametrize("tokens", [TOKENS, HALF_EMPTY], ids=["ragged", "nearly none"])
def test_expert_major_rows(pool: Pool, world: int, tokens: tuple[int, ...], budget: int | None) -> None:
    width = E // world
    received = [expect(rank, world, tokens) for rank in range(world)]
    kept = []
    results = pool.run(world, run_permuted, tokens, budget)
    for found, expected in zip(results, received, strict=True):
        pairs, counts = permuted(expected, PAD)
        size = len(pairs) if budget is None else budget
        overflow = len(pairs) > size
        assert [int(flag != 0) for flag in found["flags"]] == [overflow] * 3
        starts = [sum(counts[:e]) for e in range(width)]
        clipped = [min(count, max(0, size - start)) for count, start in zip(counts, starts, strict=True)]
        assert [c.tolist() for c in found["counts"]] == [clipped] * 2
        assert found["counts"][0].dtype == torch.int64
        assert found["fields"] == [11, 11]
        pairs = (pairs + [(-1, -1)] * size)[:size]
        kept.append([(expected["source"][row], expected["token"][row], k) for row, k in pairs if row >= 0])
        pool_ND = torch.cat([expected["x"], torch.zeros(1, D).bfloat16()])
        index = torch.tensor([row for row, _ in pairs], dtype=torch.int64)
        assert all(torch.equal(rows, pool_ND[index]) for rows in found["rows"])
        assert torch.equal(found["scales"], pool_ND[index][:, :2].float())
        probs = [expected["weights"][row, k].item() if row >= 0 else 0.0 for row, k in pairs]
        assert torch.equal(found["probs"], torch.tensor(probs))
    for rank, found in enumerate(results):
        x_TD, ids_TK, weights_TK = draw(rank, tokens)
        survived = [pair for rows in kept for pair in rows if pair[0] == rank]
        still = torch.zeros_like(ids_TK, dtype=torch.bool)
        for _, token, choice in survived:
            still[token, choice] = True
        assert torch.equal(found["sum"][0], x_TD * still.sum(1)[:, None])
        assert torch.equal(found["sum"][1], spread(torch.where(still, ids_TK, -1), weights_TK, E))
        assert found["alone"] is None
        assert found["kept"][1:] == (len(x_TD), D, width)


SHAPES = [
    # ranks, experts, choices, width, dtype, whether all tokens want one expert
    (8, 8, 5, 7, torch.bfloat16, False),
    (4, 12, 1, 1, torch.float16, False),
    (2, 6, 6, 33, torch.float32, False),
    (8, 40, 3, 5, torch.bfloat16, True),
]


def run_shape(ranks: Ranks, experts: int, top_k: int, width: int, dtype: torch.dtype, one: bool) -> None:
    """Every token comes back once from each of its ranks, or of its choices."""
    drawn = torch.Generator().manual_seed(ranks.rank)
    tokens = 13 * ranks.rank % 11
    x_TD = torch.randint(-3, 4, (tokens, width), generator=drawn).to(dtype)
    ids_TK = torch.rand(tokens, experts, generator=drawn).argsort(1)[:, :top_k]
    ids_TK[torch.rand(tokens, top_k, generator=drawn) < 0.3] = -1
    if one:
        ids_TK[:], ids_TK[:, 1:2] = -1, experts // 2
    per_rank = experts // ranks.world_size
    ranks_T = torch.tensor([len({i // per_rank for i in ids if i >= 0}) for ids in ids_TK.tolist()])
    legacy: Any = Buffer(ranks.group)
    layout = legacy.get_dispatch_layout(ids_TK, experts)
    rows, _, _, counts, handle, _ = legacy.dispatch(
        x_TD,
        num_tokens_per_rank=layout[0],
        num_tokens_per_expert=layout[2],
        is_token_in_rank=layout[3],
        topk_idx=ids_TK,
        topk_weights=torch.ones(tokens, top_k),
    )
    assert torch.equal(legacy.combine(rows, handle)[0], x_TD * ranks_T.view(-1, 1).to(dtype))
    hybrid = HybridEPBuffer(ranks.group, width, tokens, per_rank)
    rows, _, _, padded, handle = hybrid.dispatch_with_permute(hidden=x_TD, topk_idx=ids_TK, pad_multiple=3)
    assert padded.tolist() == [(count + 2) // 3 * 3 for count in counts]
    summed, _ = hybrid.combine_with_unpermute(hidden=rows, handle=handle)
    assert torch.equal(summed, x_TD * (ids_TK >= 0).sum(1)[:, None].to(dtype))


@pytest.mark.parametrize(("world", "experts", "top_k", "width", "dtype", "one"), SHAPES)
def test_any_shape(
    pool: Pool, world: int, experts: int, top_k: int, width: int, dtype: torch.dtype, one: bool
) -> None:
    pool.run(world, run_shape, experts, top_k, width, dtype, one)


def run_bad(ranks: Ranks, kind: str) -> tuple[str, list[int]]:
    buffer = HybridEPBuffer(ranks.group, 6, 4, 2)
    map_TE = torch.eye(4, dtype=torch.bool)
    good: dict[str, Any] = {"hidden": torch.ones(4, 6), "routing_map": map_TE, "probs": map_TE.float()}
    bad = {
        "flat": {"hidden": torch.ones(6)},
        "map": {"routing_map": map_TE.float()},
        "short": {"routing_map": map_TE[:3]},
        "probs": {"probs": map_TE.double()},
        "none": {"routing_map": None, "probs": None},
        "range": {"routing_map": None, "probs": None, "topk_idx": torch.full((4, 1), 4)},
        "ids": {"routing_map": None, "probs": None, "topk_idx": torch.zeros(3, 1).long()},
        "experts": {"num_of_experts": 5},
        "waiting": {"non_blocking": True},
        "padding": {"pad_multiple": -1},
        "room": {"num_permuted_tokens": -1},
        "multiple": {"non_blocking": True, "num_permuted_tokens": 6, "pad_multiple": 4},
        "no probs": {"probs": None},
        "scales": {"scaling_factor": torch.ones(4, 1)},
        "width": {"hidden": torch.ones(4, 5)},
        "device": {"hidden": torch.ones(4, 6, device="meta")},
    }[kind]
    said = ""
    try:
        buffer.dispatch_with_permute(**(good | bad if ranks.rank == 1 else good))
    except ValueError as error:
        said = str(error)
    return said, buffer.dispatch_with_permute(**good)[3].tolist()


MESSAGES = {
    "flat": r"on rank 1, hidden is \[6\]; give \[T, D\]",
    "map": r"on rank 1, routing_map is torch.float32 \[4, 4\]; give bool \[4, 4\]",
    "short": r"on rank 1, routing_map is torch.bool \[3, 4\]; give bool \[4, 4\]",
    "probs": r"on rank 1, probs is torch.float64 \[4, 4\]; give float32",
    "none": r"on rank 1, no routing; give routing_map, topk_idx, or the handle",
    "range": r"on rank 1, ids of topk_idx outside \[-1, 4\)",
    "ids": r"on rank 1, topk_idx is \[3, 1\] for 4 tokens",
    "experts": r"on rank 1, 5 experts on 2 ranks; give a multiple",
    "waiting": r"on rank 1, non_blocking without num_permuted_tokens",
    "padding": r"on rank 1, pad_multiple is -1; give a whole number from 1",
    "room": r"on rank 1, num_permuted_tokens is -1; give a whole number from 0",
    "multiple": r"on rank 1, num_permuted_tokens 6 is not a multiple of pad_multiple 4",
    "no probs": r"ranks disagree about whether probabilities are given: 1 on rank 0, 0 on rank 1",
    "scales": r"ranks disagree about the bytes of a row: 24 on rank 0, 28 on rank 1",
    "width": r"ranks disagree about the bytes of a row: 24 on rank 0, 20 on rank 1",
    "device": r"on rank 1, tensors are on cpu, meta; the group takes them on cpu",
}


@pytest.mark.parametrize("kind", MESSAGES)
def test_one_rank_s_mistake_is_every_rank_s_and_the_buffer_goes_on(pool: Pool, kind: str) -> None:
    (first, counts), (second, _) = pool.run(2, run_bad, kind)
    assert re.match(rf"deep_ep\.HybridEPBuffer\.dispatch_with_permute: {MESSAGES[kind]}", first), first
    assert first == second
    assert counts == [2, 2]


def run_foreign_handle(ranks: Ranks) -> list[str]:
    """What ranks are told where one of them has no handle, and where calls that have it go on."""
    buffer, x_TD = HybridEPBuffer(ranks.group, 6, 4, 2), torch.ones(4, 6)
    rows, _, _, _, handle = buffer.dispatch_with_permute(hidden=x_TD, topk_idx=torch.arange(4)[:, None])
    said = []
    for call in (buffer.combine, buffer.combine_with_unpermute):
        with pytest.raises(ValueError, match=call.__name__) as error:
            call(hidden=rows, handle=None if ranks.rank == 1 else handle)
        said.append(str(error.value))
    assert torch.equal(buffer.combine_with_unpermute(hidden=rows, handle=handle)[0], x_TD)
    return said


def test_one_rank_without_its_handle_is_every_rank_s_error(pool: Pool) -> None:
    first, second = pool.run(2, run_foreign_handle)
    assert first == second
    assert all("on rank 1, pass the handle that a dispatch returned, whole" in text for text in first)


def run_wrong_probs(ranks: Ranks) -> list[str]:
    """One rank without new probabilities for a handle, with too narrow ones, with too few of rows."""
    buffer, x_TD, odd = HybridEPBuffer(ranks.group, 6, 4, 2), torch.ones(4, 6), ranks.rank == 1
    rows, *_, handle = buffer.dispatch_with_permute(hidden=x_TD, topk_idx=torch.arange(4)[:, None])
    said, probs_TE, probs_R = [], torch.ones(4, 4), torch.ones(4)
    again, back = {"hidden": x_TD, "handle": handle}, {"hidden": rows, "handle": handle}
    for wrong in (None, probs_TE[:, 1:]):
        with pytest.raises(ValueError, match="dispatch_with_permute") as error:
            buffer.dispatch_with_permute(**again, probs=wrong if odd else probs_TE)
        said.append(str(error.value))
    with pytest.raises(ValueError, match="combine_with_unpermute") as error:
        buffer.combine_with_unpermute(**back, probs=probs_R[1:] if odd else probs_R)
    assert torch.equal(buffer.dispatch_with_permute(**again, probs=probs_TE)[1], probs_R)
    assert torch.equal(buffer.combine_with_unpermute(**back, probs=probs_R)[1], torch.eye(4))
    return [*said, str(error.value)]


def test_one_rank_s_probabilities_are_looked_at_before_anything_moves(pool: Pool) -> None:
    first, second = pool.run(2, run_wrong_probs)
    assert first == second
    assert "ranks disagree about whether probabilities are given: 1 on rank 0, 0 on rank 1" in first[0]
    assert "on rank 1, probs is torch.float32 [4, 3]; give float32 [4, 4]" in first[1]
    assert "on rank 1, probs is torch.float32 [3]; give float32 [4]" in first[2]


def run_different_buffers(ranks: Ranks) -> str:
    with pytest.raises(ValueError, match="HybridEPBuffer") as error:
        HybridEPBuffer(ranks.group, 6 + ranks.rank, 4, 2)
    return str(error.value)


def test_buffers_that_differ_are_refused(pool: Pool) -> None:
    assert all("ranks disagree about hidden_dim" in text for text in pool.run(2, run_different_buffers))
