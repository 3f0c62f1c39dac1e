"""The norm of a model's gradient where experts are spread over ranks, and clipping by it."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from imbrex.layer import MoELayer
from imbrex.parallel.gradients import expert_gradients, expert_parameters, moe_layers
from imbrex.runtime import waits
from imbrex.transport.collective import device_of


@torch.no_grad()
def clip_grad_norm_(
    model: nn.Module, max_norm: float, norm_type: float = 2.0, *, error_if_nonfinite: bool = False
) -> Tensor:
    """Scale all gradients of `model` in place so that their norm over all ranks is at most `max_norm`;
    returns the norm before, float32, the same on every rank. Call it between `sync_gradients` and the
    optimizer's step.

    torch's function of this name sees on each rank its own experts only. Here every expert counts once,
    wherever its pieces and replicas are, and so does every other parameter, whether all ranks have it or
    FSDP2 shards it. Collective over the groups of the layers. On a GPU the host does not wait for it, unless
    `error_if_nonfinite` asks it to.

    Raises ValueError where `model` is no module; RuntimeError where the norm is not finite and
    `error_if_nonfinite` is set.
    """
    order, layers = float(norm_type), moe_layers(model, "clip_grad_norm_")
    experts = {id(parameter) for parameter in expert_parameters(model)}
    shared = [p.grad for p in model.parameters() if id(p) not in experts and p.grad is not None]
    ours = {id(layer): expert_gradients(layer) for layer in layers}
    total = _joined([_norm_of_shared(shared, order), *_norms_of_experts(layers, ours, order)], order).float()
    if error_if_nonfinite and not bool(torch.isfinite(total)):
        raise RuntimeError(
            f"clip_grad_norm_: the norm of order {norm_type} of the gradients is {float(total)}; look for "
            "the layer whose gradients are not finite, or pass error_if_nonfinite=False"
        )
    factor = (float(max_norm) / (total + 1e-6)).clamp(max=1.0)
    for same in _by_kind([*shared, *(g for gradients in ours.values() for g in gradients)]):
        torch._foreach_mul_(same, factor.to(same[0].device))  # pyright: ignore[reportPrivateImportUsage]
    return total


def _norms_of_experts(layers: list[MoELayer], ours: dict[int, list[Tensor]], order: float) -> list[Tensor]:
    """The norms of the gradients of all experts of a group of ranks, one a group."""
    by_group: dict[Any, list[Tensor]] = {}
    for layer in layers:
        counted = by_group.setdefault(layer.ranks.group, [])
        for gradient in ours[id(layer)]:
            counted += _counted_here(gradient, layer)
    norms = []
    for group, gradients in by_group.items():
        norm = _norm(gradients, order)
        if group is not None and group.size() > 1:
            norm = _over_ranks(norm, order, group)
        norms.append(norm)
    return norms


def _counted_here(gradient: Tensor, layer: MoELayer) -> list[Tensor]:
    """The slots of a gradient that no other rank of the group counts: of replicas the first. A bias that all
    tensor ranks have, the first of them counts."""
    ranks, placement = layer.ranks, layer.placement
    first = placement.rank_offsets[ranks.expert_rank]
    if ranks.tensor_rank > 0 and gradient is getattr(layer.experts.down_proj_bias, "grad", None):
        return []
    local = placement.local(ranks.expert_rank)
    counted = [s for s, e in enumerate(local) if e >= 0 and placement.slots.index(e) == first + s]
    return [gradient] if len(counted) == len(local) else [gradient[slot] for slot in counted]


def _norm_of_shared(gradients: list[Tensor], order: float) -> Tensor:
    """The norm of DTensors, which is a collective over their mesh, and of others."""
    # Importing DTensor's class would cost every import of imbrex 0.3 s.
    sharded = [gradient for gradient in gradients if hasattr(gradient, "full_tensor")]
    by_mesh: dict[Any, list[Tensor]] = {}
    for gradient in sharded:
        by_mesh.setdefault(gradient.device_mesh, []).append(gradient)  # pyright: ignore[reportAttributeAccessIssue]
    norms = [_norm([g for g in gradients if not hasattr(g, "full_tensor")], order)]
    for same in by_mesh.values():
        whole: Any = torch.nn.utils.get_total_norm(same, order)
        norms.append(whole.full_tensor().float())
    return _joined(norms, order)


def _norm(tensors: Sequence[Tensor], order: float) -> Tensor:
    norms: list[Tensor] = []
    for same in _by_kind(tensors):
        wide = torch.promote_types(same[0].dtype, torch.float32)
        norms += torch._foreach_norm(same, order, dtype=wide)  # pyright: ignore[reportPrivateImportUsage]
    return _joined(norms, order) if norms else torch.zeros((), dtype=torch.float64, device="cpu")


def _joined(norms: list[Tensor], order: float) -> Tensor:
    """The norm of what these are norms of, on the device of the first that is not on the CPU; float64, so
    that it does not matter which rank has how many of them."""
    device = next((norm.device for norm in norms if norm.device.type != "cpu"), norms[0].device)
    return torch.linalg.vector_norm(torch.stack([norm.to(device, torch.float64) for norm in norms]), order)


def _over_ranks(norm: Tensor, order: float, group: dist.ProcessGroup) -> Tensor:
    mine = norm.to(device_of(group))[None]
    norms_W = mine.new_empty(group.size())
    gather = partial(waits.all_gather_single, norms_W, mine, group, async_op=True)
    waits.run("the norm of gradients", gather, on_host=not mine.is_cuda, group=group)
    return torch.linalg.vector_norm(norms_W, order)


def _by_kind(tensors: Sequence[Tensor]) -> list[list[Tensor]]:
    kinds: dict[Any, list[Tensor]] = {}
    for tensor in tensors:
        kinds.setdefault((type(tensor), tensor.device, tensor.dtype), []).append(tensor)
    return list(kinds.values())
