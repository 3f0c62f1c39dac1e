"""DeepEP's low-latency calls against lists made row by row, over gloo and over emulated NVLink."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import Tensor

from imbrex.adapters.deep_ep import Buffer
from tests.emulated import kernel
from tests.ranks.pool import Pool, Ranks
from tests.ranks.test_deep_ep_nvlink import Emulated

E, K, D, MOST = 8, 3, 512, 6
TOKENS = (5, 0, 3, 6)
WAYS = {
    "bf16": {"use_fp8": False},
    "fp8": {},
    "powers": {"round_scale": True},
    "exponents": {"round_scale": True, "use_ue8m0": True},
}


@pytest.fixture(params=["gloo", "nvlink"])
def joined(pool: Pool, request: pytest.FixtureRequest) -> Any:
    """The pool, as it is or with its ranks joined by NVLink's kernels, which g++ compiled."""
    if request.param == "nvlink" and not kernel.available():
        pytest.skip("the emulation needs g++")
    return Emulated(pool) if request.param == "nvlink" else pool


def draw(rank: int, tokens: tuple[int, ...] = TOKENS) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens of few bits, so that sums are exact; ids with -1; weights that are powers of two."""
    make = torch.Generator().manual_seed(rank)
    count = tokens[rank]
    kind: Any = {"dtype": torch.float32, "device": "cpu", "generator": make}
    x_TD = torch.randint(-8, 9, (count, D), **kind).bfloat16()
    ids_TK = torch.rand(count, E, **kind).argsort(1)[:, :K]
    ids_TK[torch.rand(count, K, **kind) < 0.3] = -1
    return x_TD, ids_TK, 2.0 ** torch.randint(-2, 2, (count, K), **kind)


def rows_of(rank: int, world: int, tokens: tuple[int, ...]) -> list[list[tuple[int, int]]]:
    """(source rank, token) of every row of every local expert of a rank."""
    per_rank, found = E // world, []
    for expert in range(rank * per_rank, (rank + 1) * per_rank):
        pairs = [(w, draw(w, tokens)[1].tolist()) for w in range(world)]
        found.append([(w, token) for w, lists in pairs for token, ids in enumerate(lists) if expert in ids])
    return found


def run_calls(ranks: Ranks, tokens: tuple[int, ...], options: dict[str, Any]) -> dict[str, Any]:
    buffer: Any = Buffer(ranks.group, low_latency_mode=True, num_rdma_bytes=1 << 20)
    assert buffer.low_latency_mode
    buffer.clean_low_latency_buffer(MOST, D, E)
    x_TD, ids_TK, weights_TK = draw(ranks.rank, tokens)
    stats = torch.full((E // ranks.world_size,), 7, dtype=torch.int32)
    rows, counts, handle, event, hook = buffer.low_latency_dispatch(
        x_TD,
        ids_TK,
        MOST,
        E,
        cumulative_local_expert_recv_stats=stats,
        return_recv_hook=True,
        **options,
    )
    hook()
    found: dict[str, Any] = {"rows": rows, "counts": counts, "stats": stats, "handle": tuple(handle)}
    assert handle[2:] == (MOST, D, E)
    for block, count in zip(blocks_of(rows), counts.tolist(), strict=True):
        block[count:] = float("nan")  # rows of no token are not read
    ours = blocks_of(rows)
    done, event, hook = buffer.low_latency_combine(ours, ids_TK, weights_TK, handle, async_finish=True)
    event.current_stream_wait()
    assert hook is None
    buffer.get_next_low_latency_combine_buffer(handle)[:] = 2 * ours
    out = torch.zeros_like(x_TD)
    double, _, hook = buffer.low_latency_combine(
        ours, ids_TK, weights_TK, handle, zero_copy=True, return_recv_hook=True, out=out, use_logfmt=True
    )
    hook()
    assert double is out
    return found | {"sums": done, "double": double}


def blocks_of(rows: Any) -> Tensor:
    """bfloat16 [e, W * MOST, D], the values of fp8 rows times their scales."""
    if isinstance(rows, Tensor):
        return rows
    values, scales = rows
    if scales.dtype == torch.int32:
        bytes_e = scales.contiguous().view(torch.uint8).int()
        scales = (bytes_e << 23).view(torch.float32)
    return (values.float().unflatten(2, (-1, 128)) * scales[..., None]).flatten(2).bfloat16()


def as_crossed(x_D: Tensor, options: dict[str, Any]) -> Tensor:
    """A token as it arrives, block by block."""
    if not options.get("use_fp8", True):
        return x_D
    parts = []
    for block in x_D.float().split(128):
        largest = torch.tensor(max(1e-4, float(block.abs().max())))
        scale = largest * (1 / 448)
        if options.get("round_scale"):
            scale = 2.0 ** torch.ceil(torch.log2(scale))
        parts.append((block * (1 / scale)).to(torch.float8_e4m3fn).float() * scale)
    return torch.cat(parts).bfloat16()


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("world", [1, 2, 4])
def test_rows_in_blocks_and_sums(joined: Any, world: int, way: str) -> None:
    check(joined, world, TOKENS, WAYS[way])


def test_nearly_no_tokens(joined: Any) -> None:
    check(joined, 4, (0, 0, 0, 2), {"use_fp8": False})


def check(joined: Any, world: int, tokens: tuple[int, ...], options: dict[str, Any]) -> None:
    drawn = [draw(rank, tokens) for rank in range(world)]
    arrived = [[as_crossed(x_D, options) for x_D in x_TD] for x_TD, _, _ in drawn]
    for rank, found in enumerate(joined.run(world, run_calls, tokens, options)):
        expected = rows_of(rank, world, tokens)
        info, ranges, *_ = found["handle"]
        assert found["counts"].tolist() == [len(rows) for rows in expected]
        assert found["counts"].dtype == info.dtype == torch.int32
        assert found["stats"].tolist() == [7 + len(rows) for rows in expected]
        assert blocks_of(found["rows"]).shape == (E // world, world * MOST, D)
        assert info.shape == (E // world, world * MOST)
        for place, pairs in enumerate(expected):
            rows = blocks_of(found["rows"])[place]
            for at, (source, token) in enumerate(pairs):
                assert torch.equal(rows[at], arrived[source][token])
            assert info[place, : len(pairs)].tolist() == [token for _, token in pairs]
            sources = [source for source, _ in pairs]
            for source in range(world):
                begin, count = int(ranges[place, source]) >> 32, int(ranges[place, source]) & 0xFFFFFFFF
                assert sources[begin : begin + count] == [source] * sources.count(source)
        x_TD, ids_TK, weights_TK = drawn[rank]
        factor_T = torch.where(ids_TK < 0, 0.0, weights_TK).sum(1)
        whole = torch.stack([*arrived[rank], torch.zeros(D).bfloat16()])[: len(x_TD)].float()
        rtol, atol = (2**-7, 0.05) if options.get("use_fp8", True) else (0, 0)
        for sums, times in ((found["sums"], 1), (found["double"], 2)):
            expected_TD = times * whole * factor_T[:, None]
            torch.testing.assert_close(sums.float(), expected_TD, rtol=rtol, atol=times * atol)


def test_scales_lie_side_by_side(pool: Pool) -> None:
    """As DeepEP's: the scales of an expert's rows one after the other, a column of blocks after the next."""
    for found in pool.run(2, run_calls, TOKENS, {}):
        values, scales = found["rows"]
        assert values.is_contiguous()
        assert scales.stride() == (2 * MOST * D // 128, 1, 2 * MOST)


MISTAKES = {
    "tokens": "on rank 1, 7 tokens, num_max_dispatch_tokens_per_rank is 6",
    "dtype": "on rank 1, x is torch.float32; give bfloat16",
    "width": "on rank 1, rows of 520 values; fp8 takes a multiple of 128",
    "most": "ranks disagree about num_max_dispatch_tokens_per_rank: 6 on rank 0, 8 on rank 1",
    "ids": "on rank 1, ids of topk_idx outside",
    "twice": "on rank 1, a token of topk_idx wants an expert twice",
    "experts": "on rank 1, 7 experts on 2 ranks; give a multiple",
    "exponents": "on rank 1, use_ue8m0 without round_scale",
    "both": "on rank 1, async_finish and return_recv_hook",
    "stats": r"on rank 1, cumulative_local_expert_recv_stats is \[8\]; give int32 \[4\]",
}


def make_mistake(ranks: Ranks, kind: str) -> tuple[str, bool]:
    """What was raised, and whether the next calls work."""
    buffer: Any = Buffer(ranks.group)
    x_TD, ids_TK, weights_TK = draw(ranks.rank, (5, 5))
    wrong = ranks.rank == 1
    given: dict[str, Any] = {"x": x_TD, "topk_idx": ids_TK, "num_experts": E}
    given["num_max_dispatch_tokens_per_rank"] = MOST
    changes = {
        "tokens": {"x": x_TD[[0] * 7], "topk_idx": ids_TK[[0] * 7]},
        "dtype": {"x": x_TD.float()},
        "width": {"x": torch.zeros(5, 520).bfloat16()},
        "most": {"num_max_dispatch_tokens_per_rank": 8},
        "ids": {"topk_idx": ids_TK + E},
        "twice": {"topk_idx": torch.full_like(ids_TK, 3)},
        "experts": {"num_experts": 7},
        "exponents": {"use_ue8m0": True},
        "stats": {"cumulative_local_expert_recv_stats": torch.zeros(8, dtype=torch.int32)},
        "both": {"async_finish": True, "return_recv_hook": True},
    }
    with pytest.raises(ValueError, match="low_latency_dispatch") as caught:
        buffer.low_latency_dispatch(**given | (changes[kind] if wrong else {}))
    _, _, handle, _, _ = buffer.low_latency_dispatch(**given)
    rows = torch.ones(E // 2, 2 * MOST, D).bfloat16()
    y_TD, _, _ = buffer.low_latency_combine(rows, ids_TK, weights_TK, handle)
    factor_T = torch.where(ids_TK < 0, 0.0, weights_TK).sum(1)
    return str(caught.value), torch.equal(y_TD.float(), factor_T[:, None].expand(-1, D))


@pytest.mark.parametrize("kind", MISTAKES)
def test_one_rank_s_mistake_is_every_rank_s_and_the_buffer_goes_on(joined: Any, kind: str) -> None:
    for said, works in joined.run(2, make_mistake, kind):
        assert re.search(MISTAKES[kind], said)
        assert works


SUMS = {
    "rows": r"on rank 1, x is torch.bfloat16 \[4, 5, 512\]; give bfloat16 \[4, 12, 512\]",
    "weights": r"on rank 1, topk_idx and topk_weights are \[5, 3\] and \[5, 2\]; give \[5, K\]",
    "out": r"on rank 1, out is torch.float32 \[5, 512\]; give bfloat16 \[5, 512\]",
    "no rows": "on rank 1, zero_copy, but no rows were asked for",
    "others": "on rank 1, topk_idx has experts that the dispatch did not have; give its topk_idx again",
    "handle": "on rank 1, pass the handle that low_latency_dispatch returned, whole",
}


def make_mistake_in_sums(ranks: Ranks, kind: str) -> tuple[str, bool]:
    buffer: Any = Buffer(ranks.group)
    x_TD, ids_TK, weights_TK = draw(ranks.rank, (5, 5))
    _, _, handle, _, _ = buffer.low_latency_dispatch(x_TD, ids_TK, MOST, E, use_fp8=False)
    rows = torch.ones(E // 2, 2 * MOST, D).bfloat16()
    given: dict[str, Any] = {"x": rows, "topk_idx": ids_TK, "topk_weights": weights_TK, "handle": handle}
    changes = {
        "rows": {"x": rows[:, :5]},
        "weights": {"topk_weights": weights_TK[:, :2]},
        "out": {"out": torch.zeros(5, D)},
        "no rows": {"zero_copy": True},
        "others": {"topk_idx": torch.where(ids_TK < 0, -1, (ids_TK + 1) % E)},
        "handle": {"handle": tuple(handle)},
    }
    with pytest.raises(ValueError, match="low_latency_combine") as caught:
        buffer.low_latency_combine(**given | (changes[kind] if ranks.rank == 1 else {}))
    few = {"topk_idx": ids_TK[:, :2], "topk_weights": weights_TK[:, :2]}
    buffer.low_latency_combine(**given | (few if ranks.rank == 1 else {}))
    y_TD, _, _ = buffer.low_latency_combine(**given)
    factor_T = torch.where(ids_TK < 0, 0.0, weights_TK).sum(1)
    return str(caught.value), torch.equal(y_TD.float(), factor_T[:, None].expand(-1, D))


@pytest.mark.parametrize("kind", SUMS)
def test_one_rank_s_mistake_in_sums(joined: Any, kind: str) -> None:
    for said, works in joined.run(2, make_mistake_in_sums, kind):
        assert re.search(SUMS[kind], said)
        assert works


def test_a_handle_that_was_taken_apart_is_refused() -> None:
    buffer: Any = Buffer(None)
    x_TD, ids_TK, weights_TK = draw(0)
    rows, _, handle, _, _ = buffer.low_latency_dispatch(x_TD, ids_TK, MOST, E, use_fp8=False)
    with pytest.raises(ValueError, match="low_latency_combine: on rank 0, pass the handle that low_latency"):
        buffer.low_latency_combine(rows, ids_TK, weights_TK, tuple(handle))


def test_the_size_hint_is_a_number_of_bytes() -> None:
    assert Buffer.get_low_latency_rdma_size_hint(128, 7168, 8, 256) == 128 * 7168 * 2 * 2 * 8
