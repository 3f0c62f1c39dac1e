"""Latent attention, absorbed and expanded: the same of chunks that begin anywhere in any slots."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from imbrex.serve import attention
from imbrex.serve.attention import FEW, MANY, Latent, LatentAttention, Rotary, Span, expands
from imbrex.serve.between import AS_WRITTEN
from imbrex.serve.decoding import Drafting
from imbrex.serve.engine import Engine, Settings
from imbrex.serve.request import Request
from tests.unit.test_serve import LATENT, greedy, make, prompts

ROOM, WIDTH, SLOTS = 150, 16, 6
V3 = Latent(num_heads=128, query_rank=1536, kv_rank=512, nope=128, rope=64, value=128)


class OnGpu(Tensor):
    """A tensor of a CPU that says it is a GPU's."""

    is_cuda = True  # type: ignore[assignment]


def flash(
    q_BSHC: Tensor, k_RGC: Tensor, v_RGC: Tensor, span: Span, begin_B1: Tensor, used_B: Tensor
) -> Tensor:
    """What flash attention demands and does: a row's last token sees all of its keys, and one whose keys all
    stand behind it gets zeros."""
    for x in (q_BSHC, k_RGC, v_RGC):
        assert (x.shape[-1], x.stride(-1)) == (q_BSHC.shape[-1], 1)
        assert all(number % 8 == 0 for number in (x.shape[-1], x.storage_offset(), *x.stride()[:-1]))
    assert torch.equal(begin_B1.diff(), used_B)
    out_BSHC = torch.zeros_like(q_BSHC)
    for row, (begin, used) in enumerate(zip(begin_B1.tolist(), used_B.tolist(), strict=False)):
        seen_SL = torch.ones(span.length, used, dtype=torch.bool).tril(used - span.length)
        k, v = (x[None, begin : begin + used] for x in (k_RGC, v_RGC))
        y = attention._dot(q_BSHC[row : row + 1], k, v, seen_SL)
        out_BSHC[row] = y[0].masked_fill(~seen_SL.any(1)[:, None, None], 0)
    return out_BSHC


@pytest.mark.parametrize(
    ("length", "dtype", "kind"),
    [(FEW + 1, torch.float64, Tensor), (MANY, torch.float32, Tensor), (MANY, torch.float32, OnGpu)],
)
@torch.no_grad()
def test_chunks_expanded_are_those_absorbed(
    length: int, dtype: torch.dtype, kind: type[Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows that begin at 0, 7 and 80, a dummy, one that is half full; values narrower than keys."""
    torch.manual_seed(0)
    monkeypatch.setattr(attention, "_flash", flash)
    sizes = Latent(num_heads=3, query_rank=12, kv_rank=12, nope=12, rope=4, value=8)
    module = LatentAttention(sizes, WIDTH, eps=1e-6, dtype=dtype, device=torch.device("cpu"))
    turn_LC = Rotary(sizes.rope, 1e4, ROOM, dtype=dtype, device=torch.device("cpu")).turn_LC
    live_BS = torch.arange(length) < torch.tensor([length, length, 0, length // 2])[:, None]
    start_B, slots_B = torch.tensor([0, 7, 0, 80]), torch.tensor([3, 0, 5, 1])
    x_TD = torch.randn(4 * length, WIDTH, dtype=dtype)
    before_ZLC = torch.randn(SLOTS, ROOM, sizes.kv_rank + sizes.rope, dtype=dtype)
    outs, caches = list[Tensor](), list[Tensor]()
    for wide, other in ((True, "_absorbed"), (False, "_expanded")):
        span = Span(start_B, length, ROOM, live_T=live_BS.flatten(), slots_B=slots_B)
        caches.append(before_ZLC.clone())
        with monkeypatch.context() as patched:
            patched.setattr(attention, "expands", lambda *_, wanted=wide: wanted)
            patched.setattr(LatentAttention, other, None)
            y_TD = module(x_TD.as_subclass(kind), span, (caches[-1],), turn_LC[span.position_T], AS_WRITTEN)
        outs.append(y_TD[span.live_T].as_subclass(Tensor))
    torch.testing.assert_close(*outs)
    assert torch.equal(*caches)


@pytest.mark.parametrize("drafts", [0, 3])
def test_tokens_of_chunks_that_are_expanded(drafts: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The oracle without a cache is absorbed."""
    monkeypatch.setattr(attention, "MANY", FEW + 1)
    model = make(LATENT)
    settings = Settings(slots=2, room=30, chunk=(2, FEW + 1), drafting=Drafting(length=drafts))
    engine = Engine(model, settings)
    answers = [engine.submit(Request(prompt=prompt, max_tokens=6)) for prompt in prompts(5, 13, 2)]
    engine.run()
    for answer in answers:
        assert answer.tokens == greedy(model, list(answer.request.prompt), 6)


def test_used_parts_of_slots_stand_one_behind_another() -> None:
    index_P, begin_B1, used_B = Span(torch.tensor([3, 0]), 2, 8).packing()
    assert index_P[:7].tolist() == [0, 1, 2, 3, 4, 8, 9]
    assert len(index_P) == 16
    assert index_P.max() < 16
    assert begin_B1.tolist() == [0, 5, 7]
    assert used_B.tolist() == [5, 2]
    live_T = torch.tensor([False, False, True, False, False, False])
    span = Span(torch.tensor([6, 1, 5]), 2, 8, live_T=live_T, slots_B=torch.tensor([4, 2, 0]))
    index_P, begin_B1, used_B = span.packing()
    assert index_P[:5].tolist() == [32, 16, 17, 18, 0]
    assert begin_B1.tolist() == [0, 1, 4, 5]
    assert {begin_B1.dtype, used_B.dtype} == {torch.int32}


@pytest.mark.parametrize(
    ("sizes", "length", "device", "dtype", "major", "wanted"),
    [
        (V3, MANY, "cpu", torch.float64, 0, True),
        (V3, MANY - 1, "cpu", torch.float64, 0, False),
        (V3, MANY, "cuda", torch.bfloat16, 9, True),
        (V3, MANY - 1, "cuda", torch.bfloat16, 9, False),
        (V3, MANY, "cuda", torch.float16, 9, False),
        (V3, MANY, "cuda", torch.bfloat16, 8, False),
        (LATENT, MANY, "cuda", torch.bfloat16, 9, False),
        (replace(V3, nope=256), MANY, "cuda", torch.bfloat16, 9, False),
        (replace(V3, value=200), MANY, "cpu", torch.float64, 0, False),
    ],
)
def test_which_rows_have_their_latents_expanded(
    sizes: Latent, length: int, device: str, dtype: Any, major: int, wanted: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Where flash attention and a product of as many rows as the device says take them."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (major, 0))
    x: Any = SimpleNamespace(is_cuda=device == "cuda", dtype=dtype)
    assert expands(sizes, length, x) is wanted
