"""The layer that takes the place of a transformers block, with what it must know of that block."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from imbrex import MoELayer
from imbrex.experts import Experts
from imbrex.guards import PartialStateWarning

WRAPPERS = ("_orig_mod.", "_checkpoint_wrapped_module.")
"""Prefixes that torch.compile and activation checkpointing put into names."""
READ_WHOLE = "replace_blocks(model, group, weights=...), of a model as it was"
"""The way to read a whole model's weights."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Origin:
    """The place of a replaced block. skeleton: the block that was replaced, its parameters on the meta
    device. router_logits: whether the model's configuration asked for `output_router_logits`."""

    skeleton: nn.Module
    router_logits: bool


class ReplacedBlock(MoELayer):
    """A `MoELayer` in the place of a transformers block. `origin` is set by `replace_blocks`."""

    origin: Origin

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.register_state_dict_post_hook(_tell_of_part)
        self.register_load_state_dict_pre_hook(_tell_of_whole)

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "experts" and not isinstance(value, Experts):
            self._lend_to(value)
        super().__setattr__(name, value)

    def _lend_to(self, wrapper: nn.Module) -> None:
        """Tell what wraps the experts, as PEFT does for LoRA on them, what a strategy asks of experts."""
        inner = next((m for m in wrapper.modules() if isinstance(m, Experts)), None)
        if inner is None:
            return
        if self.placement.has_replicas or self.ranks.tensor_size > 1:
            raise ValueError(
                f"{type(wrapper).__name__} around experts of which several ranks hold the same, or a piece "
                "of their width, would train other weights on each: leave out replicas and tensor_parallel"
            )
        wrapper.applies_weights = inner.applies_weights  # pyright: ignore[reportArgumentType]
        wrapper.forms = inner.forms  # pyright: ignore[reportArgumentType]

    def dense_state(self) -> dict[str, Tensor]:
        """Everything that is no expert's, whole. Collective where FSDP2 shards it."""
        own = dict(self.named_parameters()) | dict(self.named_buffers())
        return {name: whole(value) for name, value in own.items() if not name.startswith("experts.")}

    def block_state(self, experts: dict[str, Tensor], dense: dict[str, Tensor]) -> dict[str, Tensor]:
        """Everything the block held, by its own names there. experts: see `gather_experts`; dense: see
        `dense_state`."""
        own = dense | {f"experts.{name}": value for name, value in experts.items()}
        return {name: own[own_name(name)] for name in self.origin.skeleton.state_dict()}


def whole(value: Tensor) -> Tensor:
    """All of a parameter; of one that FSDP2 shards, on the CPU. Collective there."""
    value = value.detach()
    pieces: Any = value
    return pieces.full_tensor().cpu() if is_sharded(value) else value


def is_sharded(value: Tensor) -> bool:
    """Whether this rank holds a piece of it: importing the class of such tensors takes 0.3 s."""
    return hasattr(value, "full_tensor")


def own_name(name: str) -> str:
    """A block's parameter, by its name in transformers, as `MoELayer` calls it."""
    return name.replace("router.", "gate.", 1).replace("shared_experts.", "shared_expert.", 1)


def replaced_blocks(model: nn.Module) -> list[tuple[str, ReplacedBlock]]:
    """(name without wrappers, layer) of every replaced block."""
    return [(plain_name(n), m) for n, m in model.named_modules() if isinstance(m, ReplacedBlock)]


def plain_name(name: str) -> str:
    """A parameter's name without the prefixes of wrappers around its module."""
    for wrapper in WRAPPERS:
        name = name.replace(wrapper, "")
    return name


def skeleton_of(block: nn.Module) -> nn.Module:
    """A copy of `block` without the weights' memory."""
    memo: dict[int, Any] = {
        id(p): nn.Parameter(torch.empty_like(p, device="meta"), requires_grad=p.requires_grad)
        for p in block.parameters()
    }
    memo |= {id(config): config for config in _configurations(block)}
    return copy.deepcopy(block, memo)


def _configurations(block: nn.Module) -> Iterator[Any]:
    """The attributes that the modules of a block share with their model, and a copy must too."""
    for module in block.modules():
        if (config := vars(module).get("config")) is not None:
            yield config


def _tell_of_whole(layer: Any, state: Mapping[str, Tensor], prefix: str, *lists: Any) -> None:
    """Add to a load's errors, once, who reads weights of all experts, if these are such."""
    whole, own, errors = state.get(f"{prefix}experts.down_proj"), len(layer.experts.expert_ids), lists[-1]
    is_whole = whole is not None and own < len(whole) == layer.config.num_experts
    if is_whole and not any(READ_WHOLE in error for error in errors):
        errors.append(
            f"these are weights of all {layer.config.num_experts} experts, of which this rank holds {own}: "
            f"{READ_WHOLE}, or imbrex.adapters.huggingface.from_pretrained(folder, group) read them"
        )


def _tell_of_part(layer: ReplacedBlock, *_: Any) -> None:
    if layer.ranks.size > 1:
        warnings.warn(
            f"state_dict: of {layer.config.num_experts} experts it holds those of this rank only; to save "
            "the model, call its save_pretrained(folder), or imbrex.parallel.checkpoint.save, on every rank",
            PartialStateWarning,
            stacklevel=1,
        )
