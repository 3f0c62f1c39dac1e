"""`imbrex.capture` over several ranks."""

from __future__ import annotations

import time

import torch
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


def refused(ranks: Ranks) -> tuple[str, float, bool]:
    """What is said where rank 1 alone asks for what cannot be, after how many seconds, and whether the next
    answer is that of before."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(FAMILIES["qwen3_moe"][1], attn_implementation="sdpa").eval()
    replace_blocks(model, ranks.group)
    decoding, prompts = imbrex.capture(model, batch=1, length=6), torch.tensor([[3, 4]])
    truth = decoding.generate(prompts, max_new_tokens=2)
    begin, said = time.monotonic(), "nothing"
    try:
        decoding.generate(prompts + 99 * ranks.rank, max_new_tokens=2)
    except ValueError as error:
        said = str(error)
    seconds = time.monotonic() - begin
    return said, seconds, torch.equal(decoding.generate(prompts, max_new_tokens=2), truth)


def test_what_one_rank_refuses_ends_the_call_on_all(pool: Pool) -> None:
    (other, soon, same), (own, _, alike) = pool.run(2, refused)
    assert other == "capture: another rank was asked for what cannot be, and says what"
    assert own.startswith("capture: tokens from 102 to 103")
    assert soon < 20  # not by a time-out, which is 60 s and more
    assert same
    assert alike
