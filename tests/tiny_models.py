"""transformers' models of a few kilobytes, one of every family that `replace_blocks` knows."""

from copy import deepcopy
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    DeepseekV2Config,
    DeepseekV3Config,
    MixtralConfig,
    PhimoeConfig,
    Qwen2MoeConfig,
    Qwen3MoeConfig,
)
from transformers.models.deepseek_v2.modeling_deepseek_v2 import DeepseekV2Moe
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3MoE
from transformers.models.mixtral.modeling_mixtral import MixtralSparseMoeBlock
from transformers.models.phimoe.modeling_phimoe import PhimoeSparseMoeBlock
from transformers.models.qwen2_moe.modeling_qwen2_moe import Qwen2MoeSparseMoeBlock
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock

SMALL: dict[str, Any] = {
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "vocab_size": 32,
    "experts_implementation": "eager",
}
DEEPSEEK: dict[str, Any] = {
    "intermediate_size": 20,
    "moe_intermediate_size": 12,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "n_group": 4,
    "topk_group": 2,
    "n_shared_experts": 2,
    "first_k_dense_replace": 1,
    "q_lora_rank": 8,
    "kv_lora_rank": 8,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 4,
    "v_head_dim": 8,
}
QWEN: dict[str, Any] = {
    "moe_intermediate_size": 12,
    "num_experts": 6,
    "num_experts_per_tok": 3,
    "intermediate_size": 20,
}


def small(kind, **settings):
    """A transformers configuration of a model of a few kilobytes."""
    return kind(**(SMALL | settings))


FAMILIES = {
    "mixtral": (MixtralSparseMoeBlock, small(MixtralConfig, intermediate_size=12, num_local_experts=6)),
    "phimoe": (PhimoeSparseMoeBlock, small(PhimoeConfig, intermediate_size=12, num_local_experts=6)),
    "qwen2_moe": (
        Qwen2MoeSparseMoeBlock,
        small(Qwen2MoeConfig, **QWEN, shared_expert_intermediate_size=10),
    ),
    "qwen3_moe": (Qwen3MoeSparseMoeBlock, small(Qwen3MoeConfig, **QWEN, norm_topk_prob=True)),
    "deepseek_v2": (
        DeepseekV2Moe,
        small(DeepseekV2Config, **DEEPSEEK, topk_method="group_limited_greedy", routed_scaling_factor=2.0),
    ),
    "deepseek_v3": (DeepseekV3MoE, small(DeepseekV3Config, **DEEPSEEK)),
}


def model_of(family, dtype=torch.float32):
    """A model whose weights are all drawn anew, the same every time, with a configuration of its own: a model
    that is switched to other experts says so there."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(deepcopy(FAMILIES[family][1])).to(dtype).eval()
    for name, value in (*model.named_parameters(), *model.named_buffers()):
        if "inv_freq" not in name:
            torch.nn.init.normal_(value, std=0.05 if "router" in name else 0.3)
    return model
