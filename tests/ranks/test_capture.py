"""`imbrex.capture` over several ranks."""

from __future__ import annotations

import time
from collections.abc import Callable
from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

import imbrex
from imbrex.adapters.huggingface import replace_blocks
from tests.ranks.pool import PRELOADED, Pool, Ranks
from tests.tiny_models import FAMILIES

# Loaded once, before the ranks are forked, not by each of them.
PRELOADED.append("tests.tiny_models")


def captured(ranks: Ranks) -> bool:
    """Ranks with prompts and answers of other lengths, over shared experts."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(FAMILIES["qwen3_moe"][1], attn_implementation="sdpa").eval()
    model.generation_config.eos_token_id = None
    ids = torch.randint(32, (1, 3 + 2 * ranks.rank))
    size = 7 - 4 * ranks.rank
    truth = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=size, do_sample=False)
    replace_blocks(model, ranks.group)
    decoding = imbrex.capture(model, batch=1, length=3 + 2 * ranks.rank + size)
    return torch.equal(decoding.generate(ids, max_new_tokens=size), truth[:, ids.shape[1] :])


def test_captured_models_step_together_until_the_last_is_done(pool: Pool) -> None:
    assert pool.run(2, captured) == [True, True]


def make(ranks: Ranks):
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(FAMILIES["qwen3_moe"][1], attn_implementation="sdpa").eval()
    alone = imbrex.capture(deepcopy(model), batch=1, length=6)
    replace_blocks(model, ranks.group)
    return alone, imbrex.capture(model, batch=1, length=6)


def said_by(call: Callable[[], Tensor]) -> str | Tensor:
    try:
        return call().clone()
    except ValueError as error:
        return str(error)


NONE = torch.zeros(1, 0, dtype=torch.int64, device="cpu")
PROMPTS: list[Any] = [[[3, 99]], [[3, -1]], [3, 4], [[1, 2, 3, 4, 5, 6]], [[1.0]], [[1], [2]]]
BAD_PROMPTS = [*map(torch.tensor, PROMPTS), NONE, None]
TOKENS: list[Any] = [[5, 5], [32], [-1], [1.5]]
BAD_TOKENS = [*map(torch.tensor, TOKENS), NONE, None]


def refused(ranks: Ranks) -> tuple[list[str], float]:
    """What the last rank is told where it alone starts and steps with what cannot be; the others' logits, and
    its own before and behind, are those of a rank alone. And the longest that a call took."""
    alone, decoding = make(ranks)
    last = ranks.rank == ranks.world_size - 1
    prompts, token, longest = torch.tensor([[3, 4 + ranks.rank]]), torch.tensor([5]), 0.0
    truth, *behind = [alone.start(prompts).clone(), *[alone.step(token).clone() for _ in range(4)]]
    told: list[str] = []

    def same(logits: Tensor, call: Callable[[], Tensor], own: Callable[[], Tensor] | None = None) -> None:
        nonlocal longest
        begin, helps = time.monotonic(), last and own is not None
        answer = said_by(own if last and own is not None else call)
        longest = max(longest, time.monotonic() - begin)
        if isinstance(answer, str):
            told.append(answer)
        elif not helps:
            torch.testing.assert_close(answer, logits, rtol=0, atol=1e-6)

    same(truth, lambda: decoding.start(prompts))
    for bad in BAD_PROMPTS:
        same(truth, lambda: decoding.start(prompts), lambda bad=bad: decoding.start(bad))
    for bad in BAD_TOKENS:
        # The last rank is where it was, and the others go back there.
        same(behind[0], lambda: decoding.step(token), lambda bad=bad: decoding.step(bad))
        decoding.rewind() if not last else None
    for logits in behind:
        same(logits, lambda: decoding.step(token))
    # All are full: the last one asks for more all the same, then takes its newest token back.
    decoding.rewind() if not last else None
    same(behind[-1], lambda: decoding.step(token), lambda: decoding.step(token))
    decoding.rewind()
    same(behind[-1], lambda: decoding.step(token))
    same(truth, lambda: decoding.start(prompts))
    return told, longest


@pytest.mark.parametrize("world", [2, 4])
def test_what_one_rank_refuses_stops_nobody(pool: Pool, world: int) -> None:
    *others, (told, longest) = pool.run(world, refused)
    assert [told for told, _ in others] == [[]] * (world - 1)
    assert max(longest, *(longest for _, longest in others)) < 20  # not by a time-out, of 60 s and more
    assert [text.removeprefix("capture: ").split(";")[0] for text in told] == [
        "tokens from 3 to 99",
        "tokens from -1 to 3",
        "prompts of shape (2,)",
        "prompts of shape (1, 6)",
        "prompts are tokens [1, S]: torch.float32 came",
        "prompts of shape (2, 1)",
        "prompts of shape (1, 0)",
        "2 tokens behind 2 of a sequence",
        "tokens from 32 to 32",
        "tokens from -1 to -1",
        "a step takes the tokens that follow as int64 [1]: torch.float32 came",
        "0 tokens behind 2 of a sequence",
        "1 tokens behind 6 of a sequence",
    ]


def refused_answers(ranks: Ranks) -> tuple[list[Any], float]:
    """Answers of ranks of which the first one asks for what cannot be, or for nothing."""
    alone, decoding = make(ranks)
    prompts = torch.tensor([[3, 4 + ranks.rank]])
    truth = alone.generate(prompts, max_new_tokens=3)
    begin = time.monotonic()
    calls = [(prompts + 99, 3), (prompts, 1.5), (prompts, 5), (None, 3), (prompts, 3)]
    answers: list[Any] = []
    for ids, size in calls if ranks.rank == 0 else [(prompts, 3)] * len(calls):
        answer = said_by(lambda ids=ids, size=size: decoding.generate(ids, max_new_tokens=size))  # type: ignore[arg-type]
        answers.append(
            answer if isinstance(answer, str) else (tuple(answer.shape), torch.equal(answer, truth))
        )
    return answers, time.monotonic() - begin


def test_an_answer_that_one_rank_refuses_is_refused_alone(pool: Pool) -> None:
    (own, soon), (other, _) = pool.run(2, refused_answers)
    assert soon < 20
    assert other == [((1, 3), True)] * 5
    assert [text.split(";")[0] for text in own[:3]] == [
        "capture: tokens from 102 to 103",
        "capture: 1.5 tokens behind 2, with room for 6",
        "capture: 5 tokens behind 2, with room for 6",
    ]
    assert own[3:] == [((1, 0), False), ((1, 3), True)]


def not_captured(ranks: Ranks) -> str:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(FAMILIES["qwen3_moe"][1], attn_implementation="sdpa").eval()
    replace_blocks(model, ranks.group)
    try:
        imbrex.capture(model, batch=1 - ranks.rank, length=6)
    except ValueError as error:
        return str(error)
    return "nothing"


def test_what_one_rank_cannot_capture_nobody_waits_for(pool: Pool) -> None:
    assert pool.run(2, not_captured) == [
        "capture: another rank cannot capture its model, and says why",
        "capture: 0 sequences of 6 tokens; give 1 or more, of 2 tokens or more",
    ]
