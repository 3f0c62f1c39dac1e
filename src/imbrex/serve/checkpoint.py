"""Loads a downloaded checkpoint of Qwen3-MoE or Mixtral as a model to serve: its sizes and its weights.

Every rank reads the dense part, its own experts and its slice of the head. Rotary positions turn halves of a
head in these models as in ours, so weights are copied as they are, with queries, keys and values joined.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from imbrex.adapters.huggingface import SafetensorsFolder, block_prefix, load_block, moe_config
from imbrex.serve.attention import Grouped
from imbrex.serve.model import Decoder, ModelConfig

KINDS = ("qwen3_moe", "mixtral")
SIZES = ("hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size")
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"


def why_not_served(config: Mapping[str, Any]) -> str | None:
    """Why a model with this config.json is not served, or `None`."""
    kind = config.get("model_type")
    if kind not in KINDS:
        return f"model_type {kind!r} is not among {', '.join(KINDS)}"
    if config.get("quantization_config") or config.get("compression_config"):
        return "its weights are quantised; give one in bfloat16 (--experts kernels-fp8 quantises experts)"
    if config.get("mlp_only_layers") or config.get("decoder_sparse_step", 1) != 1:
        return "some of its layers have no experts"
    if config.get("attention_bias"):
        return "its attention has biases"
    if config.get("sliding_window") and config.get("use_sliding_window", kind == "mixtral"):
        return "its attention slides"
    scaling = config.get("rope_scaling") or config.get("rope_parameters") or {}
    if scaling.get("rope_type", "default") != "default":
        return f"its rotary positions are scaled ({scaling['rope_type']})"
    return None


def served_config(folder: str | Path) -> ModelConfig:
    """The sizes of the model in a folder; `positions` are those that it was trained for, 0 where it does not
    say.

    Raises ValueError where there is none, or one that is not served.
    """
    path = Path(folder) / "config.json"
    try:
        config = json.loads(path.read_text())
        if not isinstance(config, dict):
            raise ValueError("it holds no settings by name")
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"serve: {path} cannot be read: {error}; give a checkpoint's folder") from None
    reason = why_not_served(config)
    if reason is not None:
        raise ValueError(f"serve: the model in {folder} is not served: {reason}")
    wrong = [name for name in SIZES if not isinstance(config.get(name), int) or config[name] < 1]
    if wrong or not isinstance(config.get("rms_norm_eps"), float):
        name = [*wrong, "rms_norm_eps"][0]
        raise ValueError(f"serve: {path} says {name} is {config.get(name)!r}; give a checkpoint's folder")
    heads, rotary = config["num_attention_heads"], config.get("rope_parameters") or {}
    positions = config.get("max_position_embeddings")
    return ModelConfig(
        moe=moe_config(config),
        attention=Grouped(
            num_heads=heads,
            num_kv_heads=config.get("num_key_value_heads") or heads,
            head_size=config.get("head_dim") or config["hidden_size"] // heads,
            theta=float(rotary.get("rope_theta") or config.get("rope_theta") or 1e4),
            qk_norm=config["model_type"] == "qwen3_moe",
        ),
        num_layers=config["num_hidden_layers"],
        vocabulary=config["vocab_size"],
        positions=positions if isinstance(positions, int) else 0,
        eps=config["rms_norm_eps"],
    )


@torch.no_grad()
def load_weights(model: Decoder, folder: str | Path) -> None:
    """Fill a model of `served_config` in place, in its dtype. Raises ValueError where a tensor is missing or
    has another shape."""
    weights = SafetensorsFolder(folder)
    _fill(model.embedding.weight, weights, EMBEDDING)
    _fill(model.norm.weight, weights, "model.norm.weight")
    begin, end = model.head.slice
    head = _read(weights, HEAD if HEAD in weights else EMBEDDING)
    _put(model.head.weight, head[begin:end], HEAD)
    for index, block in enumerate(model.blocks):
        at, attention = f"model.layers.{index}.", block.attention
        joined = [_read(weights, f"{at}self_attn.{name}_proj.weight") for name in "qkv"]
        _put(attention.qkv.weight, torch.cat(joined), f"{at}self_attn.qkv")  # type: ignore[union-attr]
        _fill(attention.out.weight, weights, f"{at}self_attn.o_proj.weight")  # type: ignore[union-attr]
        for name in ("q_norm", "k_norm"):
            norm = getattr(attention, name, None)
            if norm is not None:
                _fill(norm.weight, weights, f"{at}self_attn.{name}.weight")
        _fill(block.attention_norm.weight, weights, f"{at}input_layernorm.weight")  # type: ignore[union-attr]
        _fill(block.moe_norm.weight, weights, f"{at}post_attention_layernorm.weight")  # type: ignore[union-attr]
        load_block(block.moe, weights, block_prefix(weights, index))  # type: ignore[arg-type]


def _read(weights: SafetensorsFolder, name: str) -> Tensor:
    if name not in weights:
        raise ValueError(f"serve: the checkpoint has no {name}; give the whole of a downloaded model")
    return weights[name]


def _fill(parameter: Any, weights: SafetensorsFolder, name: str) -> None:
    _put(parameter, _read(weights, name), name)


def _put(parameter: Any, value: Tensor, name: str) -> None:
    if parameter.shape != value.shape:
        raise ValueError(f"serve: {name} has shape {tuple(value.shape)}, not {tuple(parameter.shape)}")
    parameter.copy_(value)
