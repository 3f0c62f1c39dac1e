"""DeepEP V2's `ElasticBuffer` in its compact mode, against lists made row by row, to the bit."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch

from imbrex.adapters.deep_ep import ElasticBuffer
from tests.emulated import kernel
from tests.ranks.pool import Pool, Ranks
from tests.ranks.test_deep_ep import TOKENS, D, E, K, draw, expect
from tests.ranks.test_deep_ep_nvlink import Emulated

MOST = 9
EMULATED = pytest.mark.skipif(not kernel.available(), reason="the emulation needs g++")


@pytest.fixture(params=["gloo", pytest.param("nvlink", marks=EMULATED)])
def over(request: pytest.FixtureRequest, pool: Pool) -> Any:
    return pool if request.param == "gloo" else Emulated(pool)


def run_calls(ranks: Ranks, waits: bool) -> dict[str, Any]:
    buffer: Any = ElasticBuffer(ranks.group, num_max_tokens_per_rank=MOST, hidden=D, num_topk=K)
    buffer.barrier()
    x_TD, ids_TK, weights_TK = draw(ranks.rank)
    stats = torch.full((E // buffer.num_ranks,), 7, dtype=torch.int32)
    how = {"num_experts": E, "expert_alignment": 4, "do_cpu_sync": waits}
    rows, ids, weights, handle, _ = buffer.dispatch(
        x_TD, ids_TK, weights_TK, cumulative_local_expert_recv_stats=stats, **how
    )
    found: dict[str, Any] = {"rows": rows, "ids": ids, "weights": weights, "stats": stats}
    names = ("num_recv_tokens_per_expert_list", "psum_num_recv_tokens_per_expert", "recv_src_metadata")
    names += ("psum_num_recv_tokens_per_scaleup_rank", "topk_idx", "num_recv_tokens")
    found |= {name: getattr(handle, name) for name in names}
    found["bare"] = buffer.dispatch(x_TD, ids_TK, **how)[:3]
    again, ids_again, none, same, _ = buffer.dispatch(2 * x_TD, handle=handle)
    assert none is None
    assert same is handle
    found["again"] = again, ids_again
    found["weights again"] = buffer.dispatch(x_TD, topk_weights=2 * weights_TK, handle=handle)[2]
    found["sum"] = buffer.combine(rows, handle)[:2]
    bias = torch.full_like(x_TD, 16), torch.full_like(x_TD, 32)
    found["sum of weights"] = buffer.combine(rows, handle, topk_weights=weights, bias=bias)[:2]
    return found


@pytest.mark.parametrize("waits", [True, False], ids=["exact", "room for all"])
@pytest.mark.parametrize("world", [2, 4])
def test_every_call(over: Any, world: int, waits: bool) -> None:
    for rank, found in enumerate(over.run(world, run_calls, waits)):
        x_TD, ids_TK, weights_TK = draw(rank)
        expected = expect(rank, world)
        rows = len(expected["x"])
        room = rows if waits else MOST * world
        aligned = [(count + 3) // 4 * 4 for count in expected["counts"]]
        assert len(found["rows"]) == len(found["ids"]) == len(found["weights"]) == room
        for name in ("rows", "ids", "weights"):
            assert torch.equal(found[name][:rows], expected["x" if name == "rows" else name])
        assert (found["ids"][rows:] == -1).all()
        assert not found["rows"][rows:].any()
        assert found["num_recv_tokens"] == room
        assert found["num_recv_tokens_per_expert_list"] == (aligned if waits else [])
        assert found["psum_num_recv_tokens_per_expert"].tolist() == torch.tensor(aligned).cumsum(0).tolist()
        of_ranks = [expected["source"].count(source) for source in range(world)]
        ends = found["psum_num_recv_tokens_per_scaleup_rank"]
        assert ends.tolist() == torch.tensor(of_ranks).cumsum(0).tolist()
        assert ends.dtype == torch.int32
        assert found["stats"].tolist() == [7 + count for count in expected["counts"]]
        assert torch.equal(found["topk_idx"], ids_TK)
        check_sources(found["recv_src_metadata"], expected, rows)
        assert torch.equal(found["bare"][0], found["rows"])
        assert found["bare"][2] is None
        assert torch.equal(found["again"][0], 2 * found["rows"])
        assert torch.equal(found["again"][1], found["ids"])
        assert torch.equal(found["weights again"], 2 * found["weights"])
        ranks_T = torch.tensor([len({i // (E // world) for i in ids if i >= 0}) for ids in ids_TK.tolist()])
        assert torch.equal(found["sum"][0], x_TD * ranks_T[:, None])
        assert found["sum"][1] is None
        assert torch.equal(found["sum of weights"][0], x_TD * ranks_T[:, None] + 48)
        assert torch.equal(found["sum of weights"][1], torch.where(ids_TK < 0, 0.0, weights_TK))


def check_sources(metadata: torch.Tensor, expected: dict[str, Any], rows: int) -> None:
    """A row's token among all ranks', and its place among its rank's rows with its first choice here."""
    assert metadata.shape[1] == K + 2
    assert metadata.dtype == torch.int32
    assert (metadata[rows:] == -1).all()
    assert (metadata[:, 2:] == -1).all()
    pairs = list(zip(expected["source"], expected["token"], strict=True))
    for row, (source, token) in enumerate(pairs):
        first = [i >= 0 for i in expected["ids"][row].tolist()].index(True)
        place = row - expected["source"].index(source)
        assert metadata[row, :2].tolist() == [source * MOST + token, place * K + first]


def run_fp8(ranks: Ranks) -> Any:
    buffer: Any = ElasticBuffer(ranks.group, num_max_tokens_per_rank=MOST)
    x_TD, ids_TK, weights_TK = draw(ranks.rank)
    scales = torch.arange(len(x_TD) * 2, dtype=torch.float32).view(-1, 2) + 100 * ranks.rank
    values = x_TD.to(torch.float8_e4m3fn)
    how = {"num_experts": E, "use_tma_aligned_col_major_sf": True}
    (rows, of_rows), *_ = buffer.dispatch((values, scales), ids_TK, weights_TK, **how)
    return rows.view(torch.uint8), of_rows, of_rows.stride()


def test_scales_lie_by_columns(pool: Pool) -> None:
    for rank, (rows, scales, stride) in enumerate(pool.run(2, run_fp8)):
        expected = expect(rank, 2)
        assert torch.equal(rows, expected["x"].to(torch.float8_e4m3fn).view(torch.uint8))
        pairs = zip(expected["source"], expected["token"], strict=True)
        assert scales.tolist() == [[2.0 * t + 100 * s, 2.0 * t + 1 + 100 * s] for s, t in pairs]
        assert stride == (1, -(-len(rows) // 4) * 4)


MESSAGES = {
    "more tokens than the limit": "8 tokens, num_max_tokens_per_rank=3",
    "no ids": "topk_idx is missing",
    "ids out of range": "ids outside",
    "experts": "7 experts on 2 ranks",
    "no handle": "combine: on rank 1, handle is a NoneType",
}


def run_wrong(ranks: Ranks, kind: str) -> list[str]:
    buffer: Any = ElasticBuffer(ranks.group, num_max_tokens_per_rank=MOST)
    x_TD, ids_TK, weights_TK = draw(3)
    how: dict[str, Any] = {"num_experts": E}
    inputs = [x_TD, ids_TK, weights_TK]
    if ranks.rank == 1:
        if kind == "no ids":
            inputs = [x_TD]
        elif kind == "ids out of range":
            inputs[1] = ids_TK + E
        elif kind == "experts":
            how["num_experts"] = 7
        elif kind == "more tokens than the limit":
            how["num_max_tokens_per_rank"] = 3
    told = []
    try:
        if kind == "no handle":
            rows, _, _, handle, _ = buffer.dispatch(*inputs, **how)
            buffer.combine(rows, handle if ranks.rank == 0 else None)
        buffer.dispatch(*inputs, **how)
    except ValueError as error:
        told.append(str(error))
    assert len(buffer.dispatch(x_TD, ids_TK, weights_TK, num_experts=E)[0])
    return told


@pytest.mark.parametrize("kind", MESSAGES)
def test_one_ranks_mistake_is_every_ranks_and_the_buffer_goes_on(over: Any, kind: str) -> None:
    for told in over.run(2, run_wrong, kind):
        assert re.search(MESSAGES[kind], *told)


def test_what_a_handle_has_already_is_refused() -> None:
    buffer: Any = ElasticBuffer(None, num_max_tokens_per_rank=MOST)
    x_TD, ids_TK, weights_TK = draw(0)
    handle = buffer.dispatch(x_TD, ids_TK, weights_TK, num_experts=E)[3]
    with pytest.raises(ValueError, match="with a handle"):
        buffer.dispatch(x_TD, ids_TK, handle=handle)
    assert ElasticBuffer.get_buffer_size_hint(None, 4, 8, 2) == 4 * (16 + 24)
    sized = ElasticBuffer(None, num_max_tokens_per_rank=4, hidden=8, num_topk=2)
    assert (sized.num_bytes, ElasticBuffer(None, 7).num_bytes) == (4 * (16 + 24), 7)
    assert (sized.num_scaleout_ranks, sized.num_scaleup_ranks, sized.scaleup_rank_idx) == (1, 1, 0)
    assert sum(TOKENS) > MOST
