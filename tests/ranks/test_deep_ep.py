"""What every call of the legacy `Buffer` returns, against lists made row by row, to the bit."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from imbrex.adapters.deep_ep import Buffer, Config
from tests.ranks.pool import Pool, Ranks

E, K, D = 8, 3, 256
TOKENS = (5, 0, 3, 8)


def draw(rank: int, tokens: tuple[int, ...] = TOKENS) -> tuple[Tensor, Tensor, Tensor]:
    """Integer-valued bf16 tokens, so that sums are exact; ids with -1; weights."""
    drawn = torch.Generator().manual_seed(rank)
    count = tokens[rank]
    kind: Any = {"dtype": torch.float32, "device": "cpu", "generator": drawn}
    x_TD = torch.randint(-8, 9, (count, D), **kind).bfloat16()
    ids_TK = torch.rand(count, E, **kind).argsort(1)[:, :K]
    ids_TK[torch.rand(count, K, **kind) < 0.4] = -1
    return x_TD, ids_TK, torch.rand(count, K, **kind)


def expect(rank: int, world: int, tokens: tuple[int, ...] = TOKENS) -> dict[str, Any]:
    """The rows of a rank one by one: source rank, token, choices and weights of its own experts."""
    per_rank = E // world
    mine = range(rank * per_rank, (rank + 1) * per_rank)
    found: dict[str, Any] = {"source": [], "token": [], "x": [], "ids": [], "weights": []}
    for source in range(world):
        x_TD, ids_TK, weights_TK = draw(source, tokens)
        for token, ids in enumerate(ids_TK.tolist()):
            if not set(ids) & set(mine):
                continue
            found["source"].append(source)
            found["token"].append(token)
            found["x"].append(x_TD[token])
            found["ids"].append([i - mine.start if i in mine else -1 for i in ids])
            kept = [weights_TK[token, k].item() if i in mine else 0.0 for k, i in enumerate(ids)]
            found["weights"].append(kept)
    found["x"] = torch.stack(found["x"]) if found["x"] else torch.zeros(0, D).bfloat16()
    found["ids"] = torch.tensor(found["ids"], dtype=torch.int64).view(-1, K)
    found["weights"] = torch.tensor(found["weights"]).view(-1, K)
    found["counts"] = [int((found["ids"] == e).sum()) for e in range(per_rank)]
    return found


def dispatch(buffer: Any, x: Any, ids_TK: Tensor, weights_TK: Tensor | None, **options: Any) -> Any:
    per_rank, per_rdma, per_expert, in_rank, event = buffer.get_dispatch_layout(ids_TK, E)
    return buffer.dispatch(
        x,
        num_tokens_per_rank=per_rank,
        num_tokens_per_rdma_rank=per_rdma,
        is_token_in_rank=in_rank,
        num_tokens_per_expert=per_expert,
        topk_idx=None if weights_TK is None else ids_TK,
        topk_weights=weights_TK,
        previous_event=event,
        **options,
    )


def run_calls(ranks: Ranks, tokens: tuple[int, ...]) -> dict[str, Any]:
    buffer: Any = Buffer(ranks.group)
    x_TD, ids_TK, weights_TK = draw(ranks.rank, tokens)
    found: dict[str, Any] = {"layout": buffer.get_dispatch_layout(ids_TK, E)[:4]}
    rows, ids, weights, counts, handle, _ = dispatch(
        buffer, x_TD, ids_TK, weights_TK, expert_alignment=4, config=Config(24, 8, 256)
    )
    found |= {"x": rows, "ids": ids, "weights": weights, "counts": counts, "handle": tuple(handle)}
    bare = dispatch(buffer, x_TD, ids_TK, None)
    found["bare"] = bare[0], bare[3]
    assert bare[1] is None
    assert bare[2] is None
    again = buffer.dispatch(2 * x_TD, handle=handle)
    assert again[1:5] == (None, None, None, None)
    found["again"] = again[0]
    found["apart"] = buffer.dispatch(2 * x_TD, handle=tuple(handle))[0]
    chosen = {"topk_idx": ids_TK, "topk_weights": 2 * weights_TK, "expert_alignment": 4}
    found["chosen"] = buffer.dispatch(x_TD, handle=handle, **chosen)[:5]
    per_expert = found["layout"][2]
    found["chosen apart"] = buffer.dispatch(
        x_TD, handle=tuple(handle), num_tokens_per_expert=per_expert, **chosen
    )[:5]
    bias = torch.full_like(x_TD, 16), torch.full_like(x_TD, 32)
    found["sum"] = buffer.combine(rows, handle)[:2]
    found["sum of weights"] = buffer.combine(rows, handle, topk_weights=weights, bias=bias)[:2]
    found["one bias"] = buffer.combine(rows, tuple(handle), bias=bias[0])[0]
    return found


@pytest.mark.parametrize("world", [1, 2, 4])
@pytest.mark.parametrize("tokens", [TOKENS, (0, 0, 0, 2)], ids=["ragged", "nearly none"])
def test_every_call(pool: Pool, world: int, tokens: tuple[int, ...]) -> None:
    for rank, found in enumerate(pool.run(world, run_calls, tokens)):
        x_TD, ids_TK, weights_TK = draw(rank, tokens)
        expected = expect(rank, world, tokens)
        assert torch.equal(found["x"], expected["x"])
        assert found["x"].dtype == torch.bfloat16
        assert torch.equal(found["ids"], expected["ids"])
        assert torch.equal(found["weights"], expected["weights"])
        assert found["counts"] == [(count + 3) // 4 * 4 for count in expected["counts"]]
        assert torch.equal(found["bare"][0], expected["x"])
        assert found["bare"][1] == expected["counts"]
        assert torch.equal(found["again"], 2 * expected["x"])
        assert torch.equal(found["apart"], 2 * expected["x"])
        for how in ("chosen", "chosen apart"):
            rows, ids, weights, counts, handle = found[how]
            assert torch.equal(rows, expected["x"])
            assert torch.equal(ids, expected["ids"])
            assert torch.equal(weights, 2 * expected["weights"])
            assert counts == found["counts"]
            assert handle is None
        ranks_T = torch.tensor([len({i // (E // world) for i in ids if i >= 0}) for ids in ids_TK.tolist()])
        total = x_TD * ranks_T[:, None]
        assert torch.equal(found["sum"][0], total)
        assert found["sum"][1] is None
        assert torch.equal(found["sum of weights"][0], total + 48)
        assert torch.equal(found["sum of weights"][1], torch.where(ids_TK < 0, 0.0, weights_TK))
        assert torch.equal(found["one bias"], total + 16)


def test_the_layout_and_the_handle(pool: Pool) -> None:
    world = 4
    received = [expect(rank, world) for rank in range(world)]
    for rank, found in enumerate(pool.run(world, run_calls, TOKENS)):
        per_rank, per_rdma, per_expert, in_rank = found["layout"]
        prefix, sent, channel, sources, wanted, heads = found["handle"]
        to_rank = [received[r]["source"].count(rank) for r in range(world)]
        assert per_rank.tolist() == to_rank
        assert per_rank.dtype == per_expert.dtype == prefix.dtype == sources.dtype == torch.int32
        assert per_rdma is None
        ids_TK = draw(rank)[1]
        assert per_expert.tolist() == [int((ids_TK == e).sum()) for e in range(E)]
        for to in range(world):
            counts = [received[to]["source"].count(source) for source in range(world)]
            assert prefix[:, to].tolist() == torch.tensor(counts).cumsum(0).tolist()
            tokens = [
                t for s, t in zip(received[to]["source"], received[to]["token"], strict=True) if s == rank
            ]
            assert in_rank[:, to].nonzero().flatten().tolist() == tokens
            assert heads[tokens, to].tolist() == list(range(len(tokens)))
        assert torch.equal(in_rank, wanted)
        assert (heads[~wanted] == -1).all()
        assert sources.tolist() == received[rank]["token"]
        assert sent.flatten().tolist() == to_rank
        assert channel.tolist() == [[0]] * world


def run_worst_and_fp8(ranks: Ranks) -> dict[str, Any]:
    buffer: Any = Buffer(ranks.group)
    x_TD, ids_TK, weights_TK = draw(ranks.rank)
    scales_TS = x_TD[:, :2].float() / 3
    pair = x_TD.to(torch.float8_e4m3fn), scales_TS
    rows, ids, weights, counts, handle, _ = dispatch(buffer, pair, ids_TK, weights_TK, num_worst_tokens=20)
    again = buffer.dispatch(pair, handle=handle)[0]
    summed, summed_weights, _ = buffer.combine(rows[0].bfloat16(), handle, topk_weights=weights)
    return {
        "values": [part[0].view(torch.uint8) for part in (rows, again)],
        "scales": [part[1] for part in (rows, again)],
        "dtype": rows[0].dtype,
        "ids": ids,
        "weights": weights,
        "counts": counts,
        "sources": handle[3],
        "sum": summed,
        "sum of weights": summed_weights,
    }


def test_worst_case_sizes_and_fp8(pool: Pool) -> None:
    for rank, found in enumerate(pool.run(4, run_worst_and_fp8)):
        expected = expect(rank, 4)
        size = len(expected["x"])
        x_TD, ids_TK, weights_TK = draw(rank)
        assert found["dtype"] == torch.float8_e4m3fn
        assert found["counts"] == []
        for values, scales in zip(found["values"], found["scales"], strict=True):
            assert values.shape == (20, D)
            assert torch.equal(values[:size], expected["x"].to(torch.float8_e4m3fn).view(torch.uint8))
            assert torch.equal(scales[:size], expected["x"][:, :2].float() / 3)
            assert not values[size:].any()
        assert torch.equal(found["ids"][:size], expected["ids"])
        assert (found["ids"][size:] == -1).all()
        assert not found["weights"][size:].any()
        assert found["sources"][size:].eq(-1).all()
        ranks_T = torch.tensor([len({i // 2 for i in ids if i >= 0}) for ids in ids_TK.tolist()])
        assert torch.equal(found["sum"], x_TD * ranks_T[:, None])
        assert torch.equal(found["sum of weights"], torch.where(ids_TK < 0, 0.0, weights_TK))


MESSAGES = {
    "flat": r"on rank 1, x is \[\[12\]\]; give \[T, D\]",
    "tokens": r"on rank 1, a layout of \[3, 2\] for 2 tokens on 2 ranks",
    "missing": r"on rank 1, a part of the layout is missing",
    "half": r"on rank 1, topk_idx without topk_weights",
    "no width": r"on rank 1, x is \[\[3, 0\]\]; give \[T, D\]",
    "no choice": r"on rank 1, topk_idx and topk_weights are \[3, 0\] and \[3, 0\]; give \[3, K\]",
    "choices": r"on rank 1, topk_idx and topk_weights are \[3, 3\] and \[3, 2\]; give \[3, K\]",
    "int32": r"on rank 1, topk_idx torch.int32, topk_weights torch.float32; give int64 and float32",
    "counts": r"on rank 1, num_tokens_per_rank does not count is_token_in_rank",
    "device": r"on rank 1, tensors are on cpu, meta; the group takes them on cpu",
    "width": r"ranks disagree about the bytes of a row: 512 on rank 0, 510 on rank 1",
    "experts": r"ranks disagree about the number of experts: 8 on rank 0, 16 on rank 1",
    "nothing": r"on rank 1, AttributeError: 'NoneType' object has no attribute 'dim'",
    "dtype": r"ranks disagree about the dtype of rows: torch.bfloat16 on rank 0, torch.float16 on rank 1",
    "outside": r"on rank 1, topk_idx has ids outside \[-1, 8\)",
    "worst": r"rank 0 receives 6 tokens, more than num_worst_tokens, 4; give the tokens of all",
}


def spoil(kind: str, given: dict[str, Any]) -> dict[str, Any]:
    x = given["x"]
    return given | {
        "flat": {"x": x.flatten()[:12]},
        "tokens": {"x": x[:2]},
        "missing": {"is_token_in_rank": None},
        "half": {"topk_weights": None},
        "choices": {"topk_weights": given["topk_weights"][:, :2]},
        "int32": {"topk_idx": given["topk_idx"].int()},
        "counts": {"num_tokens_per_rank": given["num_tokens_per_rank"] + 1},
        "device": {"x": x.to("meta")},
        "width": {"x": x[:, :-1]},
        "nothing": {"x": None},
        "no width": {"x": x[:, :0]},
        "no choice": {"topk_idx": given["topk_idx"][:, :0], "topk_weights": given["topk_weights"][:, :0]},
        "dtype": {"x": x.half()},
        "outside": {"topk_idx": given["topk_idx"] + 1},
        "experts": {"num_tokens_per_expert": given["num_tokens_per_expert"].repeat(2)},
    }.get(kind, {})


def run_bad(ranks: Ranks, kind: str) -> tuple[str, list[int]]:
    buffer: Any = Buffer(ranks.group)
    x_TD = torch.ones(3, D).bfloat16()
    ids_TK = torch.tensor([[0, 4, 1], [2, 6, -1], [7, 3, 5]])
    per_rank, _, per_expert, in_rank, _ = buffer.get_dispatch_layout(ids_TK, E)
    good: dict[str, Any] = {
        "x": x_TD,
        "num_tokens_per_rank": per_rank,
        "is_token_in_rank": in_rank,
        "num_tokens_per_expert": per_expert,
        "topk_idx": ids_TK,
        "topk_weights": torch.ones(3, 3),
    }
    options = {"num_worst_tokens": 4} if kind == "worst" else {}
    said = ""
    try:
        buffer.dispatch(**(spoil(kind, good) if ranks.rank == 1 else good), **options)
    except ValueError as error:
        said = str(error)
    return said, buffer.dispatch(**good)[3]


@pytest.mark.parametrize("kind", MESSAGES)
def test_one_rank_s_mistake_is_every_rank_s_and_the_buffer_goes_on(pool: Pool, kind: str) -> None:
    (first, counts), (second, _) = pool.run(2, run_bad, kind)
    assert re.match(rf"deep_ep\.Buffer\.dispatch: {MESSAGES[kind]}", first), first
    assert first == second
    assert counts == [2, 2, 2, 2]


def run_wrong_shapes(ranks: Ranks) -> list[str]:
    """Mistakes that every rank sees for itself, before anything moves."""
    buffer: Any = Buffer(ranks.group)
    x_TD, ids_TK, weights_TK = draw(0)
    rows, _, weights, _, handle, _ = dispatch(buffer, x_TD, ids_TK, weights_TK)
    calls = [
        lambda: buffer.get_dispatch_layout(ids_TK.int(), E),
        lambda: buffer.get_dispatch_layout(ids_TK, E + 1),
        lambda: buffer.get_dispatch_layout(ids_TK + E, E),
        lambda: buffer.dispatch(x_TD, handle=handle, topk_idx=ids_TK),
        lambda: buffer.dispatch(x_TD[1:], handle=handle),
        lambda: buffer.combine(rows[1:], handle),
        lambda: buffer.combine(rows, handle, topk_weights=weights[1:]),
        lambda: buffer.combine(rows.to(torch.float8_e4m3fn), handle),
        lambda: buffer.dispatch(x_TD, handle=handle, expert_alignment=0),
        lambda: buffer.dispatch(x_TD, num_worst_tokens=-1),
    ]
    said = []
    for call in calls:
        with pytest.raises(ValueError, match=r"deep_ep\.Buffer") as error:
            call()
        said.append(str(error.value))
    return said


def test_mistakes_that_need_no_other_rank(pool: Pool) -> None:
    said = pool.run(2, run_wrong_shapes)[0]
    for text, expected in zip(
        said,
        [
            "torch.int32 [5, 3]; give topk_idx int64 [T, K]",
            "9 experts on 2 ranks; give a multiple",
            "ids outside [-1, 8); -1 drops a choice",
            "topk_idx without topk_weights",
            "the handle is of 5 tokens; dispatch as many again",
            "give a row for each",
            "give a row for each",
            "give bfloat16, float16 or float32",
            "expert_alignment is 0; give a whole number from 1",
            "a part of the layout is missing",
        ],
        strict=True,
    ):
        assert expected in text


def run_wrong_combine(ranks: Ranks, kind: str) -> tuple[list[str], bool]:
    """One rank's mistake in calls without a plan, then the same call as it should be."""
    buffer: Any = Buffer(ranks.group)
    x_TD, ids_TK, weights_TK = draw(ranks.rank, (5, 3))
    rows, _, weights, _, handle, _ = dispatch(buffer, x_TD, ids_TK, weights_TK)
    another = dispatch(buffer, x_TD, ids_TK, weights_TK)[4]
    odd = ranks.rank == 1
    wrong: dict[str, Callable[[], Any]] = {
        "rows": lambda: buffer.combine(rows[1:] if odd else rows, handle),
        "width": lambda: buffer.combine(rows[:, :8] if odd else rows, handle),
        "dtype": lambda: buffer.combine(rows.float() if odd else rows, handle),
        "weights": lambda: buffer.combine(rows, handle, topk_weights=None if odd else weights),
        "bias": lambda: buffer.combine(rows, handle, bias=x_TD[1:] if odd else x_TD),
        "tokens": lambda: buffer.dispatch(x_TD[1:] if odd else x_TD, handle=handle),
        "handle": lambda: buffer.combine(rows, None if odd else handle),
        "handle again": lambda: buffer.dispatch(x_TD, handle=[1, 2] if odd else handle),
        "no rows": lambda: buffer.combine(None if odd else rows, handle),
        "another handle": lambda: buffer.combine(rows, another if odd else handle),
        "another call": lambda: (
            dispatch(buffer, x_TD, ids_TK, weights_TK) if odd else buffer.combine(rows, handle)
        ),
        "no handle": lambda: (
            dispatch(buffer, x_TD, ids_TK, weights_TK) if odd else buffer.dispatch(x_TD, handle=handle)
        ),
    }
    said = []
    for _ in range(2):
        try:
            wrong[kind]()
            said.append("nothing")
        except ValueError as error:
            said.append(str(error))
    return said, bool(torch.isfinite(buffer.combine(rows, handle)[0]).all())


WRONG = {
    "no rows": "combine: on rank 1, AttributeError: 'NoneType' object has no attribute 'dtype'",
    "another handle": "combine: ranks disagree about which dispatch the handle is of: 1 on rank 0, 2 on rank",
    "rows": "combine: on rank 1, .* rows received; give a row for each",
    "width": "combine: ranks disagree about the width of rows",
    "dtype": "combine: ranks disagree about the dtype of rows",
    "weights": "combine: ranks disagree about what goes home beside them",
    "bias": "combine: on rank 1, bias is",
    "tokens": "dispatch with a handle: on rank 1, .* tokens; dispatch as many again",
    "handle": "combine: on rank 1, handle is a NoneType; give that of a dispatch by this buffer",
    "handle again": "dispatch with a handle: on rank 1, handle is a list; give that of a dispatch",
}
CALLS = {
    "another call": "ranks make different calls: combine on rank 0, dispatch on rank 1; make the same",
    "no handle": "ranks make different calls: dispatch with a handle on rank 0, dispatch on rank 1",
}


@pytest.mark.parametrize("kind", [*WRONG, *CALLS])
def test_one_rank_s_mistake_without_a_plan_is_every_rank_s_at_every_call(pool: Pool, kind: str) -> None:
    (said, good), (other, fine) = pool.run(2, run_wrong_combine, kind)
    assert (said, good, fine) == (other, True, True)
    expected = rf"\.{WRONG[kind]}" if kind in WRONG else f": {CALLS[kind]}"
    for text in said:
        assert re.match(rf"deep_ep\.Buffer{expected}", text), text


def run_and_count_meetings(ranks: Ranks) -> list[int]:
    """Messages of counts in a dispatch with choices, and in one without."""
    buffer: Any = Buffer(ranks.group)
    x_TD, ids_TK, weights_TK = draw(ranks.rank)
    transport, told = buffer._backend.transport, []
    exchange = transport.exchange_counts
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(transport, "exchange_counts", lambda given: told.append(len(given)) or exchange(given))
        found = []
        for weights in (weights_TK, None):
            told.clear()
            dispatch(buffer, x_TD, ids_TK, weights)
            found.append(len(told))
    return found


def test_choices_that_come_with_the_rows_are_counted_where_they_arrive(pool: Pool) -> None:
    assert pool.run(2, run_and_count_meetings) == [[1, 2]] * 2
