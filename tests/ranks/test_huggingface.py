"""Every rank loads its own experts, or its piece of them; together they compute the block."""

import pytest
import torch

import imbrex
from imbrex.adapters.huggingface import load_block, moe_config
from imbrex.placement import from_slots
from tests.ranks.pool import Ranks

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
