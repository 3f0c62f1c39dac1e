"""Mixture-of-Experts blocks of Hugging Face models: their configuration and their weights in a `MoELayer`.

    layers = replace_blocks(model, torch.distributed.group.WORLD)

puts one in the place of every block of a transformers model. A layer alone, from a downloaded checkpoint:

    weights = SafetensorsFolder("Mixtral-8x7B-v0.1")
    layer = MoELayer(moe_config(json.loads(Path("Mixtral-8x7B-v0.1/config.json").read_text())), group)
    load_block(layer, weights, block_prefix(weights, 0))

Every rank reads and keeps only the experts, and the piece of their width, that live on it.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from imbrex import Gate, MoEConfig, MoELayer, SharedExperts
from imbrex.experts.experts import Experts
from imbrex.router.gates import Groups

FP8_BLOCK = 128
"""Rows and columns that share a scale in DeepSeek-V3's checkpoint."""

GATE_UP_DOWN = (("gate_proj", "up_proj", "down_proj"), ("w1", "w3", "w2"))
NUM_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts")
"""Published configurations say the latter two; transformers 5 writes the first for some of them."""
BLOCK_NAMES = ("mlp", "block_sparse_moe")


def moe_config(hf_config: Any) -> MoEConfig:
    """The `MoEConfig` of a model's MoE blocks.

    hf_config: a transformers configuration, or the contents of its config.json, of Mixtral, Qwen2-MoE,
        Qwen3-MoE, Phi-3.5-MoE or DeepSeek-V3. Multiplicative jitter of the input while training is left out,
        with a warning; Phi-3.5's SparseMixer takes the best expert unless `Gate.noise` is set.

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


def replace_blocks(
    model: nn.Module, group: dist.ProcessGroup | DeviceMesh | None = None, **options: Any
) -> list[MoELayer]:
    """Put a `MoELayer` with the same weights in the place of every MoE block of `model`; the layers.

    model: of transformers, with the same weights on every rank of `group`; each keeps its own experts only.
        Blocks are replaced one by one, on their device and in their dtype.
    options: of `MoELayer`. `output_router_logits` is turned off: blocks that told transformers their logits
        are gone, and `losses=AuxLosses(...)` with `imbrex.aux_loss(model)` take their place.

    Raises ValueError for a model without such blocks, and where `moe_config` or `load_block` does.
    """
    config = moe_config(getattr(model, "config", {}))
    places = [
        (parent, name)
        for parent in model.modules()
        for name, child in parent.named_children()
        if name in BLOCK_NAMES and hasattr(child, "experts") and not isinstance(child, MoELayer)
    ]
    if not places:
        raise ValueError(f"replace_blocks: a {type(model).__name__} has no MoE blocks; give the whole model")
    layers = []
    for number, (parent, name) in enumerate(places):
        block: nn.Module = getattr(parent, name)
        like = next(block.parameters())
        kind: dict[str, Any] = {"device": like.device, "dtype": like.dtype, "layer": number}
        layer = MoELayer(config, group, **{**kind, **options}).train(block.training)
        load_block(layer, block)
        setattr(parent, name, layer)
        layers.append(layer)
    settings: Any = model.config
    if getattr(settings, "output_router_logits", False):
        warnings.warn(
            "replace_blocks: output_router_logits is turned off; give losses=AuxLosses(load_balance=...) and "
            "add imbrex.aux_loss(model) to the loss",
            stacklevel=2,
        )
        settings.output_router_logits = False
    return layers


def load_block(layer: MoELayer, weights: Mapping[str, Tensor] | nn.Module, prefix: str = "") -> None:
    """Fill `layer` from the weights of one block, in place, in the layer's dtype.

    weights: the block itself, or tensors by name, as in a module's state dict or a checkpoint: experts one by
        one (`experts.3.w1.weight`, `experts.3.gate_proj.weight`) or fused (`experts.gate_up_proj`); float8
        tensors with a `weight_scale_inv` beside them are expanded. Only what this rank needs is looked up.
    prefix: what stands before the block's names, e.g. `model.layers.0.mlp.`; see `block_prefix`.

    Raises ValueError where a tensor is missing or has another shape, before that tensor is written.
    """
    block = _Block(weights.state_dict() if isinstance(weights, nn.Module) else weights, prefix)
    with torch.no_grad():
        _copy(layer.gate.weight, block.first("gate.weight", "router.weight"), "gate.weight")
        if layer.gate.e_score_correction_bias is not None:
            name = "gate.e_score_correction_bias"
            _copy(layer.gate.e_score_correction_bias, block.first(name), name)
        _load_experts(layer, block)
        _load_shared(layer, block)


def block_prefix(weights: Mapping[str, Tensor], layer: int) -> str:
    """What stands before the names of layer `layer`'s MoE block. ValueError where that layer has none."""
    found = (f"model.layers.{layer}.{block}." for block in BLOCK_NAMES)
    routers = ("gate.weight", "router.weight")
    for prefix in found:
        if any(prefix + router in weights for router in routers):
            return prefix
    raise ValueError(
        f"layer {layer} has no MoE block among these weights; pass the number of a sparse layer (the first "
        "ones of DeepSeek-V3 are dense)"
    )


class SafetensorsFolder(Mapping[str, Tensor]):
    """The tensors of a folder's *.safetensors files by name, each read when it is asked for."""

    def __init__(self, folder: str | Path):
        from safetensors import safe_open

        files = sorted(Path(folder).glob("*.safetensors"))
        if not files:
            raise ValueError(f"{folder} holds no *.safetensors; pass the folder of a downloaded checkpoint")
        self._open = [safe_open(file, framework="pt") for file in files]
        self._file = {name: file for file in self._open for name in file.keys()}  # noqa: SIM118

    def __getitem__(self, name: str) -> Tensor:
        return self._file[name].get_tensor(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._file)

    def __len__(self) -> int:
        return len(self._file)


def _load_experts(layer: MoELayer, block: _Block) -> None:
    experts: nn.Module = layer.experts
    if not isinstance(experts, Experts) or layer.config.bias or layer.config.activation != "swiglu":
        raise ValueError(
            "load_block: these blocks have SwiGLU experts without bias; build the layer from "
            "moe_config(hf_config), with its own experts"
        )
    read = _fused(block) if "experts.gate_up_proj" in block else _one_by_one(block)
    wide, width = layer.config.intermediate_size, layer.config.hidden_size
    for slot, expert in enumerate(experts.expert_ids):
        if expert < 0:
            continue
        gate_up, down = read(expert)
        for name, full, shape in (
            ("gate_up_proj", gate_up, (2 * wide, width)),
            ("down_proj", down, (width, wide)),
        ):
            _check_shape(f"{name} of expert {expert}", full, shape)
            _copy(getattr(experts, name)[slot], experts.shard_of(name, full), name)


def _fused(block: _Block) -> Callable[[int], tuple[Tensor, Tensor]]:
    gate_up, down = block.first("experts.gate_up_proj"), block.first("experts.down_proj")
    return lambda expert: (gate_up[expert], down[expert])


def _one_by_one(block: _Block) -> Callable[[int], tuple[Tensor, Tensor]]:
    def read(expert: int) -> tuple[Tensor, Tensor]:
        gate, up, down = (block.first(f"experts.{expert}.{name}.weight") for name in block.names)
        return torch.cat([gate, up]), down

    return read


def _load_shared(layer: MoELayer, block: _Block) -> None:
    if layer.shared_expert is None:
        if "shared_expert.up_proj.weight" in block or "shared_experts.up_proj.weight" in block:
            raise ValueError(
                "load_block: the block has a shared expert, the layer none; use moe_config(hf_config)"
            )
        return
    for name, parameter in layer.shared_expert.named_parameters():
        _copy(
            parameter, block.first(f"shared_expert.{name}", f"shared_experts.{name}"), f"shared_expert.{name}"
        )
    if layer.shared_expert_gate is not None:
        name = "shared_expert_gate.weight"
        _copy(layer.shared_expert_gate.weight, block.first(name), name)


class _Block:
    """The tensors of one block, by names without the prefix."""

    def __init__(self, weights: Mapping[str, Tensor], prefix: str):
        self.weights, self.prefix = weights, prefix
        self.names = next((n for n in GATE_UP_DOWN if f"experts.0.{n[0]}.weight" in self), GATE_UP_DOWN[0])

    def __contains__(self, name: str) -> bool:
        return self.prefix + name in self.weights

    def first(self, *names: str) -> Tensor:
        """The first of `names` that is there, expanded where it is scaled float8."""
        for name in names:
            if name in self:
                value = self.weights[self.prefix + name]
                scale = f"{name}_scale_inv"
                return _expand(value, self.weights[self.prefix + scale]) if scale in self else value
        raise ValueError(
            f"load_block: no {' or '.join(self.prefix + name for name in names)} among the weights; pass the "
            "prefix of an MoE block, see block_prefix"
        )


def _expand(value: Tensor, scale: Tensor) -> Tensor:
    """Float8 [A, B] times the scale of every block of 128 x 128, in float32."""
    whole = scale.float().repeat_interleave(FP8_BLOCK, 0).repeat_interleave(FP8_BLOCK, 1)
    return value.float() * whole[: value.shape[0], : value.shape[1]]


def _copy(parameter: Tensor, value: Tensor, name: str) -> None:
    _check_shape(name, value, tuple(parameter.shape))
    parameter.copy_(value)


def _check_shape(name: str, value: Tensor, shape: tuple[int, ...]) -> None:
    if tuple(value.shape) != shape:
        raise ValueError(
            f"load_block: {name} is {list(value.shape)} among the weights and {list(shape)} in the layer; "
            "build the layer from moe_config(hf_config)"
        )


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
    shared = None
    if settings.get("n_shared_experts"):
        width = settings["moe_intermediate_size"] * settings["n_shared_experts"]
        shared = SharedExperts(intermediate_size=width)
    return _config(settings, "moe_intermediate_size", gate, shared)


_CONFIGS = {
    "mixtral": _mixtral,
    "phimoe": _phimoe,
    "qwen2_moe": _qwen2_moe,
    "qwen3_moe": _qwen3_moe,
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
