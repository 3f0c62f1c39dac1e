"""Copies a block's weights, from a module or a checkpoint, into this rank's layer."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from imbrex import MoELayer
from imbrex.experts import Experts

FP8_BLOCK = 128
"""Rows and columns that share a scale in DeepSeek-V3's checkpoint."""

GATE_UP_DOWN = (("gate_proj", "up_proj", "down_proj"), ("w1", "w3", "w2"))
BLOCK_NAMES = ("mlp", "block_sparse_moe")


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
    """The prefix of the names of the MoE block of layer `layer`. Raises ValueError if that layer has none."""
    prefixes = (f"model.layers.{layer}.{block}." for block in BLOCK_NAMES)
    routers = ("gate.weight", "router.weight")
    for prefix in prefixes:
        if any(prefix + router in weights for router in routers):
            return prefix
    raise ValueError(
        f"layer {layer} has no MoE block among these weights; pass the number of a sparse layer (the first "
        "ones of DeepSeek-V3 are dense)"
    )


class SafetensorsFolder(Mapping[str, Tensor]):
    """The tensors of a folder's *.safetensors files by name; each is read when it is looked up. Of the files
    it takes those that transformers would: `model.safetensors`, or what the index names, or else all."""

    def __init__(self, folder: str | Path):
        files = _files_of(Path(folder))
        if not files:
            raise ValueError(f"{folder} holds no *.safetensors; pass the folder of a downloaded checkpoint")
        self._open = [_opened(file) for file in files]
        self._file = {name: file for file in self._open for name in file.keys()}  # noqa: SIM118

    def __getitem__(self, name: str) -> Tensor:
        return self._file[name].get_tensor(name)

    def __contains__(self, name: object) -> bool:
        # A mapping's own would read the tensor to see whether it is there.
        return name in self._file

    def part(self, name: str, number: int) -> Tensor:
        """`self[name][number]`, without reading the rest."""
        return self._file[name].get_slice(name)[number : number + 1][0]

    def __iter__(self) -> Iterator[str]:
        return iter(self._file)

    def __len__(self) -> int:
        return len(self._file)


def _files_of(folder: Path) -> list[Path]:
    """A checkpoint's files: others beside them may be an older one's, of the same names."""
    whole, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
    if whole.is_file():
        return [whole]
    if not index.is_file():
        return sorted(folder.glob("*.safetensors"))
    try:
        names = set(json.loads(index.read_text())["weight_map"].values())
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{index} is no index of tensors ({error!r}); download it again") from None
    return sorted(file for name in names if (file := folder / name).is_file())


def _opened(file: Path) -> Any:
    from safetensors import SafetensorError, safe_open

    try:
        return safe_open(file, framework="pt")
    except SafetensorError as error:
        raise ValueError(f"{file} is no whole safetensors file ({error}); download it again") from None


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


def _fused(block: _Block) -> Callable[[int], tuple[Tensor, ...]]:
    names = "experts.gate_up_proj", "experts.down_proj"
    weights = block.weights
    if isinstance(weights, SafetensorsFolder):
        return lambda expert: tuple(weights.part(block.prefix + name, expert) for name in names)
    gate_up, down = (block.first(name) for name in names)
    return lambda expert: (gate_up[expert], down[expert])


def _one_by_one(block: _Block) -> Callable[[int], tuple[Tensor, ...]]:
    def read(expert: int) -> tuple[Tensor, ...]:
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
