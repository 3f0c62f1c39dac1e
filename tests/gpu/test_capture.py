"""`imbrex.capture` on GPUs: a replayed step has the bits of one that runs as it is written, alone, and over
NVLink beside ranks that have other prompts, or none."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import imbrex
from imbrex.adapters.huggingface import replace_blocks
from tests.gpu.gpus import RANKS
from tests.ranks.pool import Pool, Ranks

transformers = pytest.importorskip("transformers", minversion="5.23")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(300),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]
BATCH, LENGTH, STEPS = 2, 32, 6
SIZES = {
    "vocab_size": 512,
    "hidden_size": 128,
    "intermediate_size": 64,
    "moe_intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "norm_topk_prob": True,
}


def make(ranks: Ranks) -> Any:
    """A model over all ranks, the same on every one."""
    torch.manual_seed(0)
    config = transformers.Qwen3MoeConfig(**SIZES, attn_implementation="sdpa")
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).to("cuda").eval()
    model.generation_config.eos_token_id = None
    layers: list[Any] = replace_blocks(model, ranks.group if ranks.world_size > 1 else None)
    assert ranks.world_size == 1 or {layer.exchange.transport.name for layer in layers} == {"nvlink"}
    return model


def prompts_of(rank: int, length: int) -> Tensor:
    return torch.randint(512, (BATCH, length), generator=torch.Generator().manual_seed(rank)).cuda()


def logits_of(decoding: Any, ids_BS: Tensor) -> list[Tensor]:
    """Logits of the prompts and of the greedy steps behind them."""
    logits = [decoding.start(ids_BS).clone()]
    for _ in range(STEPS):
        logits.append(decoding.step(logits[-1].argmax(-1)).clone())
    return logits


def compare(ranks: Ranks) -> tuple[bool, bool]:
    """Whether replays have the bits of steps as they are written, and the same answers to other prompts on
    every rank, of other lengths."""
    model = make(ranks)
    plain, replayed = (
        imbrex.capture(model, batch=BATCH, length=LENGTH, graphs=graphs) for graphs in (False, True)
    )
    ids_BS = prompts_of(ranks.rank, 5)
    pairs = zip(logits_of(plain, ids_BS), logits_of(replayed, ids_BS), strict=True)
    same_bits = all(torch.equal(*pair) for pair in pairs)
    own, size = prompts_of(7 + ranks.rank, 3 + 2 * ranks.rank), 9 - 4 * ranks.rank
    answers = [decoding.generate(own, max_new_tokens=size) for decoding in (plain, replayed)]
    return same_bits, torch.equal(*answers)


@pytest.mark.parametrize("world", [world for world in (1, 2) if world <= RANKS])
def test_a_replayed_step_has_the_bits_of_a_plain_one(nccl: Pool, world: int) -> None:
    assert nccl.run(world, compare) == [(True, True)] * world


def one_without(ranks: Ranks) -> tuple[bool, str]:
    """Logits of rank 0 beside a rank that has prompts, and beside one that gives `None` or what cannot be;
    what that one is told."""
    decoding = imbrex.capture(make(ranks), batch=BATCH, length=LENGTH)
    ids_BS = prompts_of(ranks.rank, 5)
    first = logits_of(decoding, ids_BS)
    if ranks.rank == 0:
        second = logits_of(decoding, ids_BS)
        answer = decoding.generate(ids_BS, max_new_tokens=4)
        steps = torch.stack([logits.argmax(-1) for logits in first[:4]], 1)
        return all(map(torch.equal, first, second)) and torch.equal(answer, steps), ""
    decoding.start(None)
    for _ in range(STEPS - 1):
        decoding.step(None)
    try:
        decoding.step(torch.zeros(BATCH + 1, dtype=torch.int64, device="cuda"))
        told = "nothing"
    except ValueError as error:
        told = str(error).split(" behind")[0]
    return decoding.generate(None, max_new_tokens=4).shape == (BATCH, 0), told


@pytest.mark.skipif(RANKS < 2, reason="NVLink needs two GPUs")
def test_a_rank_without_prompts_and_one_that_is_refused(nccl: Pool) -> None:
    told = f"capture: {BATCH + 1} tokens"
    assert nccl.run(2, one_without) == [(True, ""), (True, told)]
