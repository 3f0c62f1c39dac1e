"""`imbrex.capture`: a Hugging Face model's decoding with a static cache gives the tokens of `generate`."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

import imbrex
from imbrex.adapters.huggingface import replace_blocks
from tests.tiny_models import FAMILIES


def make(family: str):
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(FAMILIES[family][1], attn_implementation="sdpa").eval()
    model.generation_config.eos_token_id = None
    return model


@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v3"])
def test_tokens_are_those_of_generate(family: str) -> None:
    model = make(family)
    replace_blocks(model, None)
    decoding = imbrex.capture(model, batch=2, length=20)
    for length in (7, 3):
        ids = torch.randint(32, (2, length))
        truth = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=9, do_sample=False)
        assert torch.equal(decoding.generate(ids, max_new_tokens=9), truth[:, length:])


def test_a_token_can_be_taken_back() -> None:
    model = make("qwen3_moe")
    decoding = imbrex.capture(model, batch=1, length=12)
    decoding.start(torch.tensor([[3, 4, 5]]))
    truth = decoding.step(torch.tensor([6])).clone()
    decoding.rewind()
    other = decoding.step(torch.tensor([9])).clone()
    decoding.rewind()
    assert torch.equal(decoding.step(torch.tensor([6])), truth)
    assert not torch.equal(other, truth)


@pytest.mark.parametrize(
    ("ids", "wanted", "said"),
    [
        ([[1, 32]], 2, "tokens from 1 to 32; give whole numbers from 0 to 31"),
        ([[-1, 3]], 2, "tokens from -1 to 3"),
        ([[1.0, 2.0]], 2, r"prompts are tokens \[1, S\]: torch.float32 came"),
        ([1, 2], 2, r"prompts of shape \(2,\)"),
        ([[]], 2, "torch.float32 came; give int64"),
        ([[1, 2]], 0, "0 tokens behind 2"),
        ([[1, 2]], 1.5, "1.5 tokens behind 2"),
        ([[1, 2]], None, "None tokens behind 2"),
        (None, 2, "a list came; give a tensor"),
    ],
)
def test_wrong_prompts_are_refused_and_the_next_are_answered(ids: Any, wanted: Any, said: str) -> None:
    decoding = imbrex.capture(make("qwen3_moe"), batch=1, length=6)
    truth = decoding.generate(torch.tensor([[3, 4]]), max_new_tokens=3)
    prompts: Any = [[1, 2]] if ids is None else torch.tensor(ids)
    with pytest.raises(ValueError, match=said):
        decoding.generate(prompts, max_new_tokens=wanted)
    assert torch.equal(decoding.generate(torch.tensor([[3, 4]]), max_new_tokens=3), truth)


def test_what_cannot_be_captured_is_refused_with_a_reason() -> None:
    with pytest.raises(ValueError, match="capture: Linear is no model of transformers"):
        imbrex.capture(torch.nn.Linear(2, 2), batch=1, length=4)
    model = make("qwen3_moe")
    decoding = imbrex.capture(model, batch=1, length=4)
    with pytest.raises(ValueError, match=r"prompts of shape \(2, 3\)"):
        decoding.start(torch.zeros(2, 3, dtype=torch.int64))
    with pytest.raises(ValueError, match="2 tokens behind 3, with room for 4"):
        decoding.generate(torch.zeros(1, 3, dtype=torch.int64), max_new_tokens=2)
    with pytest.raises(ValueError, match="0 sequences"):
        imbrex.capture(model, batch=0, length=4)
    half: Any = 2.5
    for size in ({"batch": half, "length": 4}, {"batch": 1, "length": half}):
        with pytest.raises(ValueError, match=r"2\.5"):
            imbrex.capture(model, **size)
    decoding.start(torch.zeros(1, 3, dtype=torch.int64))
    with pytest.raises(ValueError, match="2 tokens behind 3 of a sequence; give 1"):
        decoding.step(torch.tensor([1, 2]))
    for token in (torch.tensor([1.5]), [1]):
        with pytest.raises(ValueError, match=r"a step takes the tokens that follow as int64 \[1\]"):
            decoding.step(token)  # type: ignore[arg-type]
    decoding.step(torch.tensor([1]))
    with pytest.raises(ValueError, match="1 tokens behind 4 of a sequence; give 1, and start anew where 4"):
        decoding.step(torch.tensor([1]))
    model.config._attn_implementation = "eager"
    with pytest.raises(ValueError, match="attn_implementation='sdpa'"):
        imbrex.capture(model, batch=1, length=4)


def test_a_capture_made_in_inference_mode_serves_outside_of_it() -> None:
    model = make("qwen3_moe")
    prompts = torch.tensor([[3, 4]])
    truth = imbrex.capture(model, batch=1, length=6).generate(prompts, max_new_tokens=3)
    with torch.inference_mode():
        decoding = imbrex.capture(model, batch=1, length=6)
        inside = decoding.generate(prompts, max_new_tokens=3)
    assert torch.equal(inside, truth)
    assert torch.equal(decoding.generate(prompts, max_new_tokens=3), truth)


def test_a_capture_under_another_default_device_is_on_the_models() -> None:
    model, prompts = make("qwen3_moe"), torch.tensor([[3, 4]])
    truth = imbrex.capture(model, batch=1, length=6).generate(prompts, max_new_tokens=3)
    with torch.device("meta"):
        answer = imbrex.capture(model, batch=1, length=6).generate(prompts, max_new_tokens=3)
    assert torch.equal(answer, truth)
