"""Replaces the Mixture-of-Experts blocks of a transformers model by layers, and puts them back."""

from __future__ import annotations

import warnings
import zlib
from collections.abc import Mapping
from functools import partial
from types import MethodType
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from imbrex import MoEConfig, MoELayer, ignore_in_ddp
from imbrex.adapters.huggingface.arithmetic import use_router, why_not_router
from imbrex.adapters.huggingface.families import moe_config
from imbrex.adapters.huggingface.gathering import Team, gather_experts, why_not_gathered, wire_device
from imbrex.adapters.huggingface.replaced import (
    Origin,
    ReplacedBlock,
    is_sharded,
    own_name,
    replaced_blocks,
    skeleton_of,
)
from imbrex.adapters.huggingface.saving import save_pretrained
from imbrex.adapters.huggingface.weights import BLOCK_NAMES, block_prefix, load_block
from imbrex.runtime import waits

LOGITS_HOOK = "refusal_of_router_logits"


def replace_blocks(
    model: nn.Module,
    group: dist.ProcessGroup | DeviceMesh | None = None,
    *,
    weights: Mapping[str, Tensor] | None = None,
    router: str = "imbrex",
    **options: Any,
) -> list[MoELayer]:
    """Put a `MoELayer` with the same weights in the place of every MoE block of `model`; the layers.

    model: of transformers, with the same weights on every rank of `group`; each keeps its own experts only.
        Blocks are replaced one by one, on their device and in their dtype; what is frozen stays so. Its
        `save_pretrained` becomes the one of this module, which every rank must call; its `generate` goes on
        until all ranks have ended, where `group` is all ranks.
    weights: the blocks' tensors by a checkpoint's names, read instead of the blocks, which may be on the
        device `meta` then; give `device=`. See `from_pretrained`.
    router: whose arithmetic the gates have: `imbrex` (float32) or `transformers`; see
        `imbrex.adapters.huggingface.arithmetic`.
    options: of `MoELayer`. `output_router_logits` is turned off: blocks that told transformers their logits
        are gone, and `losses=AuxLosses(...)` with `imbrex.aux_loss(model)` take their place.

    Raises ValueError for a model without such blocks, and where `moe_config` or `load_block` does.
    """
    config, paths = _look_together(model, router, (group, options.get("data_group")))
    settings: Any = model.config
    router_logits = bool(getattr(settings, "output_router_logits", False))
    layers: list[MoELayer] = []
    for number, path in enumerate(paths):
        block = model.get_submodule(path)
        parent, name = model.get_submodule(path.rpartition(".")[0]), path.rpartition(".")[2]
        layer = _layer_of(block, config, group, {"layer": number, **options})
        _fill(layer, block, options.get("device"), weights, int(path.split(".")[-2]))
        use_router(layer, router, settings.model_type)
        layer.origin = Origin(skeleton=skeleton_of(block), router_logits=router_logits)
        setattr(parent, name, layer)
        layers.append(layer)
    if router_logits:
        warnings.warn(
            "replace_blocks: output_router_logits is turned off; give losses=AuxLosses(load_balance=...) and "
            "add imbrex.aux_loss(model) to the loss",
            stacklevel=2,
        )
        settings.output_router_logits = False
    _tell_of_unequal(layers)
    _bind(model, layers[0])
    return layers


def _look_together(model: nn.Module, router: str, groups: tuple[Any, Any]) -> tuple[MoEConfig, list[str]]:
    """The configuration of the layers and the names of the blocks. Raises on all ranks what one finds, since
    they make the first layer together."""

    def look() -> tuple[MoEConfig, list[str]]:
        config = moe_config(getattr(model, "config", {}))
        # A list of blocks would keep their weights to the end.
        paths = [path for path, _ in moe_blocks(model)]
        kind, settings = type(model).__name__, cast("Any", model.config)
        reason = why_not_router(router, settings.model_type)
        if not paths:
            reason = f"a {kind} has no MoE blocks; give the whole model"
        if reason is not None:
            raise ValueError(f"replace_blocks: {reason}")
        return config, paths

    team = Team(groups, "replace_blocks")
    team.meet()
    config, paths = team.attempt(look)
    routers = team.hear(router)
    if len(set(routers.values())) > 1:
        raise ValueError(f"replace_blocks: ranks disagree about router: {routers}; give every rank the same")
    return config, paths


def moe_blocks(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """The name and the block of every MoE block of transformers in a model."""
    return [
        (path, child)
        for path, child in model.named_modules()
        if path.rpartition(".")[2] in BLOCK_NAMES
        and isinstance(getattr(child, "experts", None), nn.Module)
        and not isinstance(child, MoELayer)
    ]


def _tell_of_unequal(layers: list[MoELayer]) -> None:
    """Warn on every rank where one has other gates than the first: then its other weights differ too, and
    stay so. Gates are small, and were drawn or read before the experts."""
    gates = [layer.gate.weight.detach() for layer in layers]
    if any(gate.is_meta for gate in gates):
        return
    checksum = 0
    for gate in gates:
        # host sync: once, as the model is made
        checksum = zlib.crc32(gate.cpu().contiguous().view(torch.uint8).numpy().tobytes(), checksum)
    heard = Team(layers, "replace_blocks").hear(checksum)
    other = next((rank for rank, sum_ in sorted(heard.items()) if sum_ != heard[min(heard)]), None)
    if other is not None:
        warnings.warn(
            f"replace_blocks: rank {other} has other weights than rank {min(heard)}, so ranks would train "
            "different models: begin with the same on all, by from_pretrained or by torch.manual_seed before "
            "the model is made",
            stacklevel=3,
        )


def restore_blocks(model: nn.Module) -> list[nn.Module]:
    """Put transformers' blocks back in the place of the layers that replaced them. Returns the blocks. Every
    rank gets all experts, with the layers' present weights, bit for bit. Collective over the ranks of the
    layers.

    Raises ValueError, on every rank, if `model` has no replaced blocks, or if experts are wrapped or sharded
    by FSDP2.
    """
    places = [
        (parent, name, child)
        for parent in model.modules()
        for name, child in parent.named_children()
        if isinstance(child, ReplacedBlock)
    ]
    if not places:
        raise ValueError(
            f"restore_blocks: a {type(model).__name__} has no replaced blocks; "
            "give the model of `replace_blocks`"
        )
    team = Team([layer for _, _, layer in places], "restore_blocks")
    team.meet()
    reason = next((r for _, _, layer in places if (r := why_not_gathered(layer)) is not None), None)
    if any(is_sharded(parameter) for _, _, layer in places for parameter in layer.parameters()):
        reason = (
            reason or "FSDP2 would go on with the replaced ones; save_pretrained(folder) writes them whole"
        )
    team.agree(None if reason is None else ValueError(f"restore_blocks: {reason}"))
    for parent, name, layer in places:
        setattr(parent, name, _block_of(layer, team))
    for module in model.modules():
        for method in ("save_pretrained", "generate"):
            vars(module).pop(method, None)
        if (hook := vars(module).pop(LOGITS_HOOK, None)) is not None:
            hook.remove()
    settings: Any = model.config
    if hasattr(settings, "output_router_logits"):
        settings.output_router_logits = places[0][2].origin.router_logits
    for _, _, layer in places:
        if not layer.shares_exchange:
            layer.close()
    return [getattr(parent, name) for parent, name, _ in places]


def _layer_of(
    block: nn.Module, config: MoEConfig, group: dist.ProcessGroup | DeviceMesh | None, options: dict[str, Any]
) -> ReplacedBlock:
    """A layer without memory: experts that would be drawn to be overwritten take longer than all the rest."""
    like = next(block.parameters())
    return ReplacedBlock(config, group, **{"dtype": like.dtype, **options, "device": "meta"})


def _fill(
    layer: ReplacedBlock,
    block: nn.Module,
    device: Any,
    weights: Mapping[str, Tensor] | None,
    number: int,
) -> None:
    """Give a layer memory and, by `load_block`, the values of a block, or those of layer `number` among
    weights. What is wrong on one rank is raised on all, before they make the next layer together."""

    def fill() -> None:
        layer.to_empty(device=device or next(block.parameters()).device).train(block.training)
        with torch.no_grad():
            for slot, expert in enumerate(layer.experts.expert_ids):
                if expert < 0:
                    for parameter in layer.experts.parameters():
                        parameter[slot].zero_()
        trained = {own_name(name): p.requires_grad for name, p in block.named_parameters()}
        for name, parameter in layer.named_parameters():
            parameter.requires_grad_(trained.get(name, True))
        if layer.gate.weight.is_meta:
            raise ValueError("replace_blocks: the blocks have no values; give weights= and device=")
        if weights is None:
            load_block(layer, block)
        else:
            load_block(layer, weights, block_prefix(weights, number))

    Team([layer], "replace_blocks").attempt(fill)


@torch.no_grad()
def _block_of(layer: ReplacedBlock, team: Team) -> nn.Module:
    """The block that a layer replaced, filled from it. Collective over the team, which has all its errors."""
    block, own = layer.origin.skeleton, dict(layer.named_parameters())
    experts = gather_experts(layer, team, everywhere=True)

    def fill() -> None:
        for name, value in layer.block_state(experts, layer.dense_state()).items():
            module, _, last = name.rpartition(".")
            holder = block.get_submodule(module)
            if last in holder._parameters:
                trained = own[own_name(name)].requires_grad
                holder._parameters[last] = nn.Parameter(value.clone(), requires_grad=trained)
            else:
                holder._buffers[last] = value.clone()

    team.attempt(fill)
    return block.train(layer.training)


def _bind(model: nn.Module, layer: MoELayer) -> None:
    """Give a model the methods that know of other ranks' experts."""
    methods = vars(model)
    if hasattr(model, "save_pretrained"):
        methods["save_pretrained"] = MethodType(save_pretrained, model)
    methods[LOGITS_HOOK] = model.register_forward_pre_hook(_refuse_router_logits, with_kwargs=True)
    if layer.ranks.size == 1:
        return
    ignore_in_ddp(model)
    if hasattr(model, "generate") and layer.ranks.size == dist.get_world_size():
        methods["generate"] = MethodType(_generate, model)


def _generate(model: Any, *arguments: Any, **options: Any) -> Any:
    """A rank whose sequences have ended goes on, since others still want its experts, and a cache of a fixed
    length needs room for that."""
    options = {"synced_gpus": True, **options}
    if options["synced_gpus"]:
        options |= _room(model, *arguments, **options)
    return type(model).generate(model, *arguments, **options)


def _room(
    model: Any,
    inputs: Tensor | None = None,
    generation_config: Any = None,
    *_: Any,
    **options: Any,
) -> dict[str, int]:
    """The length of a static cache that has room for the steps of the rank with the most. Collective."""
    settings: Any = generation_config or model.generation_config
    tensors = (inputs, *(options.get(name) for name in ("inputs", "input_ids", "inputs_embeds")))
    prompt = next((tensor.shape[1] for tensor in tensors if tensor is not None), 1)
    new, longest, kind = (
        options.get(name, getattr(settings, name, None))
        for name in ("max_new_tokens", "max_length", "cache_implementation")
    )
    # By itself transformers generates twenty.
    steps = new if new is not None else max((longest or 0) - prompt, 20)
    group = replaced_blocks(model)[0][1].ranks.group
    assert group is not None
    steps_1 = torch.tensor([steps], dtype=torch.int64, device=wire_device(group))
    call = partial(dist.all_reduce, steps_1, op=dist.ReduceOp.MAX, group=group, async_op=True)
    waits.run("generate", call, on_host=not steps_1.is_cuda, group=group)
    if "static" not in str(kind) or not hasattr(settings, "max_cache_len"):
        return {}
    # host sync: once a call of many steps
    return {"max_cache_len": max(prompt + int(steps_1), options.get("max_cache_len") or 0)}


def _refuse_router_logits(model: Any, _: Any, options: dict[str, Any]) -> None:
    """transformers would take what its own routers told it, and find nothing."""
    router_logits = options.get("output_router_logits")
    if router_logits or (router_logits is None and getattr(model.config, "output_router_logits", False)):
        raise ValueError(
            "output_router_logits=True after replace_blocks: nobody collects the logits; leave it out, and "
            "give replace_blocks losses=AuxLosses(load_balance=...) and the loss imbrex.aux_loss(model)"
        )
