"""The `MoEConfig` of every supported family of models."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

from imbrex import Gate, MoEConfig, SharedExperts
from imbrex.router import Groups

NUM_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts")
"""Published configurations say the latter two; transformers 5 writes the first for some of them."""


def moe_config(hf_config: Any) -> MoEConfig:
    """The `MoEConfig` of a model's MoE blocks.

    hf_config: a transformers configuration, or the contents of its config.json, of Mixtral, Qwen2-MoE,
        Qwen3-MoE, Phi-3.5-MoE, DeepSeek-V2 or DeepSeek-V3. Multiplicative jitter of the input while training
        is left out, with a warning; Phi-3.5's SparseMixer takes the best expert unless `Gate.noise` is set.

    Raises ValueError for another model, a missing setting or an activation other than silu.
    """
    settings = _Settings(hf_config)
    kind = settings["model_type"]
    if kind not in _CONFIGS:
        raise ValueError(f"moe_config: model_type {kind!r}; use one of {', '.join(sorted(_CONFIGS))}")
    if settings["hidden_act"] != "silu":
        raise ValueError(
            f"moe_config: hidden_act {settings['hidden_act']!r} in {kind}; only 'silu' is supported"
        )
    return _CONFIGS[kind](settings)


class _Settings:
    """The settings of a configuration, object or dict, by name; absent ones are None."""

    def __init__(self, source: Any):
        self.source = source

    def get(self, name: str) -> Any:
        return self.source.get(name) if isinstance(self.source, Mapping) else getattr(self.source, name, None)

    def __getitem__(self, name: str) -> Any:
        value = self.get(name)
        if value is None:
            raise ValueError(f"moe_config: the configuration has no {name}; pass that of an MoE model")
        return value


def _mixtral(settings: _Settings) -> MoEConfig:
    _warn_of_jitter(settings, "router_jitter_noise")
    return _config(settings, "intermediate_size", Gate())


def _phimoe(settings: _Settings) -> MoEConfig:
    _warn_of_jitter(settings, "input_jitter_noise")
    gate = Gate(score="sparsemixer", jitter=settings["router_jitter_noise"])
    return _config(settings, "intermediate_size", gate)


def _qwen2_moe(settings: _Settings) -> MoEConfig:
    shared = SharedExperts(intermediate_size=settings["shared_expert_intermediate_size"], gated=True)
    gate = Gate(normalize=bool(settings.get("norm_topk_prob")))
    return _config(settings, "moe_intermediate_size", gate, shared)


def _qwen3_moe(settings: _Settings) -> MoEConfig:
    gate = Gate(normalize=bool(settings.get("norm_topk_prob")))
    return _config(settings, "moe_intermediate_size", gate)


def _deepseek_v3(settings: _Settings) -> MoEConfig:
    groups = None
    if (settings.get("n_group") or 1) > 1:
        groups = Groups(num_groups=settings["n_group"], topk_groups=settings["topk_group"])
    gate = Gate(
        score="sigmoid",
        normalize=bool(settings["norm_topk_prob"]),
        scale=settings["routed_scaling_factor"],
        groups=groups,
        bias=True,
    )
    return _config(settings, "moe_intermediate_size", gate, _deepseek_shared(settings))


def _deepseek_v2(settings: _Settings) -> MoEConfig:
    method = settings.get("topk_method") or "greedy"
    if method not in ("greedy", "group_limited_greedy") or settings.get("mlp_bias"):
        raise ValueError(
            f"moe_config: topk_method {method!r}, mlp_bias={settings.get('mlp_bias')} in deepseek_v2; only "
            "'greedy' and 'group_limited_greedy' without bias are supported"
        )
    groups = None
    if method == "group_limited_greedy" and (settings.get("n_group") or 1) > 1:
        groups = Groups(num_groups=settings["n_group"], topk_groups=settings["topk_group"], by="max")
    # transformers leaves weights as they are, whatever norm_topk_prob says.
    gate = Gate(normalize=False, scale=settings["routed_scaling_factor"], groups=groups)
    return _config(settings, "moe_intermediate_size", gate, _deepseek_shared(settings))


def _deepseek_shared(settings: _Settings) -> SharedExperts | None:
    if not settings.get("n_shared_experts"):
        return None
    return SharedExperts(intermediate_size=settings["moe_intermediate_size"] * settings["n_shared_experts"])


_CONFIGS = {
    "mixtral": _mixtral,
    "phimoe": _phimoe,
    "qwen2_moe": _qwen2_moe,
    "qwen3_moe": _qwen3_moe,
    "deepseek_v2": _deepseek_v2,
    "deepseek_v3": _deepseek_v3,
}


def _config(settings: _Settings, width: str, gate: Gate, shared: SharedExperts | None = None) -> MoEConfig:
    return MoEConfig(
        hidden_size=settings["hidden_size"],
        intermediate_size=settings[width],
        num_experts=settings[next((n for n in NUM_EXPERTS if settings.get(n)), NUM_EXPERTS[0])],
        top_k=settings["num_experts_per_tok"],
        gate=gate,
        shared=shared,
    )


def _warn_of_jitter(settings: _Settings, name: str) -> None:
    if settings.get(name):
        warnings.warn(
            f"{name}={settings.get(name)} multiplies the input by noise while training; imbrex leaves it out",
            stacklevel=4,
        )
