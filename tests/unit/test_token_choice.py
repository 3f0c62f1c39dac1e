"""Greedy tokens over a split vocabulary: `rows/keys.cu` by emulation among virtual ranks."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from imbrex.kernels.exchange.failures import ExchangeError
from imbrex.kernels.heap import VirtualHeap
from imbrex.kernels.rows.keys import TokenChoice
from tests.emulated import kernel

pytestmark = pytest.mark.skipif(not kernel.available(), reason="compiles the kernel with g++")


def make(ranks: int, room: int, timeout: float = 60.0) -> TokenChoice:
    def make_heap(nbytes: int) -> VirtualHeap:
        return VirtualHeap(ranks, nbytes, "cpu")

    return TokenChoice(make_heap, ranks, room, timeout=timeout, load=kernel.load)


def planted(rows: int, vocabulary: int, dtype: torch.dtype) -> Tensor:
    """Logits with ties within slices and across, zeros of both signs, infinities and NaN of both signs."""
    logits = torch.randn(rows, vocabulary).round()
    for row, values in enumerate(([0.0, -0.0], [torch.nan], [-torch.nan, torch.nan], [torch.inf] * 2)):
        if row < rows:
            logits[row, torch.randperm(vocabulary)[: len(values)]] = torch.tensor(values)
    logits[-1] = -torch.inf
    return logits.to(dtype)


def by_slices(logits: Tensor, ranks: int) -> Tensor:
    """The slices of the ranks, the last ones filled up with minus infinity."""
    each = -(-logits.shape[1] // ranks)
    padded = torch.full((len(logits), each * ranks), -torch.inf, dtype=logits.dtype)
    padded[:, : logits.shape[1]] = logits
    return padded.view(len(logits), ranks, each).transpose(0, 1).contiguous()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("ranks", "vocabulary"), [(2, 13), (3, 7), (4, 5), (8, 64)])
def test_tokens_are_those_of_argmax(ranks: int, vocabulary: int, dtype: torch.dtype) -> None:
    """Calls of different rows behind one another, so that mailboxes are written again; of 5 tokens over 4
    ranks the last has none."""
    torch.manual_seed(ranks)
    choice = make(ranks, room=70)
    for tokens in (1, 5, 70, 3, 9):
        logits = planted(ranks * tokens, vocabulary, dtype)
        chosen = choice.choose(by_slices(logits, ranks), vocabulary)
        assert torch.equal(chosen.flatten(), logits.argmax(-1))


def test_any_interleaving(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel.EmulatedKernel, "unrest", True)
    choice = make(3, room=4)
    for call in range(20):
        logits = planted(12, 11, torch.float32)
        assert torch.equal(choice.choose(by_slices(logits, 3), 11).flatten(), logits.argmax(-1)), call


def test_a_rank_that_does_not_come_ends_the_wait() -> None:
    """One of two is launched: its tokens are of its own slice, and it says who was missing."""
    choice = make(2, room=4, timeout=0.2)
    logits = by_slices(planted(8, 10, torch.float32), 2)
    token = choice.choose(logits[:1], 10)
    assert torch.equal(token[0], logits[0, :4].argmax(-1))
    said = "rank 0 in token choice call 1.*timed out, waiting for keys of rank 1"
    with pytest.raises(ExchangeError, match=said):
        choice.choose(logits[:1], 10)


def test_what_there_is_no_room_for() -> None:
    choice = make(2, room=4)
    assert choice.why_not(torch.zeros(8, 5)) is None
    assert "5 rows of a rank; there is room for 4" in str(choice.why_not(torch.zeros(10, 5)))
    assert "float16" in str(choice.why_not(torch.zeros(2, 5, dtype=torch.float16)))
