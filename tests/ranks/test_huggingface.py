"""Every rank loads its own experts, or its piece of them; together they compute the block."""

import warnings
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, ContinuousBatchingConfig, GenerationConfig

import imbrex
from imbrex.adapters.huggingface import (
    SafetensorsFolder,
    from_pretrained,
    load_block,
    moe_config,
    replace_blocks,
)
from imbrex.parallel.batches import in_step
from imbrex.placement import from_slots
from tests.ranks.pool import PRELOADED, Ranks
from tests.tiny_models import model_of

# Loaded once, before the ranks are forked, not by each of them.
PRELOADED.append("tests.tiny_models")

SETTINGS = {
    "model_type": "qwen2_moe",
    "hidden_act": "silu",
    "hidden_size": 8,
    "moe_intermediate_size": 8,
    "num_experts": 5,
    "num_experts_per_tok": 2,
    "norm_topk_prob": False,
    "shared_expert_intermediate_size": 4,
}
SHAPES = {
    "gate.weight": (5, 8),
    "experts.gate_up_proj": (5, 16, 8),
    "experts.down_proj": (5, 8, 8),
    "shared_expert.gate_proj.weight": (4, 8),
    "shared_expert.up_proj.weight": (4, 8),
    "shared_expert.down_proj.weight": (8, 4),
    "shared_expert_gate.weight": (1, 8),
}


def block_of_one(ranks: Ranks, tensor: int, slots):
    torch.manual_seed(0)
    weights = {name: torch.randn(shape) * 0.3 for name, shape in SHAPES.items()}
    x_TD = torch.randn(12, 8)
    torch.manual_seed(ranks.rank + 1)
    placement = None if slots is None else from_slots(slots, 5)
    group = ranks.group if ranks.world_size > 1 else None
    layer = imbrex.MoELayer(moe_config(SETTINGS), group, tensor_parallel=tensor, placement=placement)
    load_block(layer, weights)
    held = sum(p.numel() for name, p in layer.named_parameters() if name == "experts.down_proj")
    return layer(x_TD.chunk(ranks.world_size)[ranks.rank]).detach(), held


@pytest.mark.parametrize(
    ("world", "tensor", "slots"),
    [(4, 1, None), (4, 2, None), (4, 4, None), (2, 1, [[0, 3, 1, -1], [4, 2, 0]])],
    ids=["ep4", "ep2_tp2", "tp4", "replicas"],
)
def test_ranks_load_their_own(pool, world, tensor, slots):
    ((want, whole),) = pool.run(1, block_of_one, 1, None)
    answers = pool.run(world, block_of_one, tensor, slots)
    torch.testing.assert_close(torch.cat([y for y, _ in answers]), want, rtol=1e-5, atol=1e-5)
    held = sum(n for _, n in answers)
    assert held == (whole if slots is None else whole * 7 // 5)


def loaded(ranks: Ranks, folder: str):
    """Experts whose tensors this rank read, how far its logits are, and what it holds of the model."""
    read: list[str] = []
    plain = SafetensorsFolder.__getitem__
    patch = pytest.MonkeyPatch()
    patch.setattr(SafetensorsFolder, "__getitem__", lambda self, n: (read.append(n), plain(self, n))[1])
    whole = model_of("qwen2_moe")
    model: Any = from_pretrained(folder, ranks.group)
    patch.undo()
    ids = torch.arange(10).view(2, 5) + ranks.rank
    with torch.no_grad():
        far = float((model(ids).logits - whole(ids).logits).abs().max())
    same = torch.equal(*(m.generate(ids, do_sample=False, max_new_tokens=6) for m in (model, whole)))
    experts = sorted({int(n.split(".experts.")[1].split(".")[0]) for n in read if ".experts." in n})
    held, all_of_it = (sum(p.numel() for p in m.parameters()) for m in (model, whole))
    return experts, far, same, held, all_of_it, model.model.layers[1].mlp.experts.down_proj.numel()


def test_a_rank_reads_its_own_experts_from_a_folder_and_no_others(pool, tmp_path):
    model_of("qwen2_moe").save_pretrained(tmp_path)
    first, second = pool.run(2, loaded, str(tmp_path))
    assert (first[0], second[0]) == ([0, 1, 2], [3, 4, 5])
    for _, far, same, held, all_of_it, down in (first, second):
        assert far < 3e-7
        assert same
        # Of two layers, gate, up and down of three experts are elsewhere.
        assert all_of_it - held == 2 * 3 * down


def checkpointed(ranks: Ranks, reentrant: bool):
    """Gradients of blocks whose rows cross again in the backward, and of those that keep them."""
    found = []
    for again in (False, True):
        model = model_of("qwen3_moe").train()
        replace_blocks(model, ranks.group)
        if again:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
        torch.manual_seed(ranks.rank)
        ids = torch.randint(32, (2, 5 + ranks.rank))
        model(ids, labels=ids, use_cache=False).loss.backward()
        found.append([parameter.grad for parameter in model.parameters()])
    return [torch.equal(one, other) for one, other in zip(*found, strict=True)]


@pytest.mark.parametrize("reentrant", [False, True])
def test_gradient_checkpointing_keeps_all_bits(pool, reentrant):
    for same in pool.run(2, checkpointed, reentrant):
        assert len(same) > 20
        assert all(same)


def batched_continuously(ranks: Ranks):
    """Whether requests of other lengths that share a batch get the tokens that each gets alone."""
    prompts = [[1, 2, 3], [4, 5, 6, 7, 8], [9, 10]]
    settings = GenerationConfig(max_new_tokens=5, do_sample=False, eos_token_id=31, pad_token_id=0)
    model = model_of("qwen3_moe")
    alone = [model.generate(torch.tensor([p]), generation_config=settings)[0, len(p) :] for p in prompts]
    replace_blocks(model, ranks.group)
    sizes = ContinuousBatchingConfig(num_blocks=16, max_batch_tokens=16)
    given = {"generation_config": settings, "continuous_batching_config": sizes}
    together = model.generate_batch(prompts, **given)
    return [list(t.generated_tokens) for t in together.values()], [tokens.tolist() for tokens in alone]


def batched_apart(ranks: Ranks, numbers: tuple[int, ...]):
    """The tokens of other requests on every rank, of none on some, and those of each request alone."""
    prompts = [[1 + ranks.rank, 2, 3], [4, 5, 6, 7, 8 + ranks.rank], [9, 10]][: numbers[ranks.rank]]
    settings = GenerationConfig(
        max_new_tokens=5 + ranks.rank, do_sample=False, eos_token_id=31, pad_token_id=0
    )
    model = model_of("qwen3_moe").eval()
    alone = [model.generate(torch.tensor([p]), generation_config=settings)[0, len(p) :] for p in prompts]
    replace_blocks(model, ranks.group)
    sizes = ContinuousBatchingConfig(num_blocks=16, max_batch_tokens=16)
    with in_step(model):
        together = model.generate_batch(prompts, generation_config=settings, continuous_batching_config=sizes)
    return [list(t.generated_tokens) for t in together.values()], [tokens.tolist() for tokens in alone]


@pytest.mark.parametrize("numbers", [(3, 1), (0, 2)])
def test_continuous_batching_of_other_requests_on_every_rank(pool, numbers):
    ran = pool.run(2, batched_apart, numbers)
    assert [len(together) for together, _ in ran] == list(numbers)
    for together, alone in ran:
        assert together == alone


def test_continuous_batching_of_the_same_requests_on_every_rank(pool):
    for together, alone in pool.run(2, batched_continuously):
        assert together == alone
        assert sum(map(len, alone)) > 9


def replaced_unequally(ranks: Ranks, equal: bool):
    """What a rank is warned of whose model was drawn by the same seed, or by another."""
    config = model_of("qwen3_moe").config
    torch.manual_seed(0 if equal else ranks.rank)
    model = AutoModelForCausalLM.from_config(config)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        replace_blocks(model, ranks.group)
    return [str(one.message) for one in caught if "other weights" in str(one.message)]


@pytest.mark.parametrize("equal", [True, False])
def test_models_that_differ_between_ranks_are_named(pool, equal):
    for told in pool.run(2, replaced_unequally, equal):
        assert bool(told) != equal
        assert equal or "rank 1 has other weights than rank 0" in told[0]
