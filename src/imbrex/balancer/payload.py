"""The tensors that belong to an expert and move with it: rows of parameters, of buffers and of the
optimizer's state."""

from __future__ import annotations

import zlib
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

ALIGNMENT = 256
"""Bytes that a row in staging memory is a multiple of."""


def slot_tensors(experts: nn.Module, num_slots: int) -> dict[str, Tensor]:
    """Parameters and buffers (scales of quantised weights, say) by name, all [e, ...].

    Raises ValueError where one is not one row a slot: nobody could tell what of it to move.
    """
    tensors: dict[str, Tensor] = {name: p.data for name, p in experts.named_parameters()}
    tensors |= dict(experts.named_buffers())
    for name, tensor in tensors.items():
        if tensor.dim() < 1 or tensor.shape[0] != num_slots or not tensor.is_contiguous():
            raise ValueError(
                f"balancer: {name} of the experts has shape {list(tensor.shape)}, not one contiguous row for "
                f"each of the {num_slots} slots; this layer's experts cannot be moved"
            )
    return tensors


def optimizer_tensors(experts: nn.Module, optimizer: Optimizer) -> dict[str, Tensor]:
    """The optimizer's state of the experts, by name, each [e, ...] like its parameter.

    Single numbers (a step count) are the same for all experts and stay.
    Raises ValueError where a state is neither: it mixes experts, and could not follow one of them; and where
    another optimizer has a parameter.
    """
    tensors = {}
    known = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    for name, parameter in experts.named_parameters():
        if parameter.requires_grad and id(parameter) not in known:
            raise ValueError(
                f"balancer: {type(optimizer).__name__} does not have {name} of the experts, whose state must "
                "follow them; give the optimizer that steps it, or freeze it"
            )
        for key, value in optimizer.state.get(parameter, {}).items():
            alike = isinstance(value, Tensor) and value.shape == parameter.shape
            if not alike and (not isinstance(value, Tensor) or value.numel() == 1):
                continue
            if not alike or not value.is_contiguous():
                raise ValueError(
                    f"balancer: {type(optimizer).__name__} keeps {key} of {name} as {list(value.shape)}, not "
                    f"like the parameter {list(parameter.shape)}; it cannot follow an expert. Use an "
                    "optimizer with state per value, or balance in inference only"
                )
            tensors[f"{name}.{key}"] = value
    return tensors


def row_bytes(tensors: Sequence[Tensor]) -> int:
    """Bytes of one expert, the same on a rank that has none."""
    return sum(t.shape[1:].numel() * t.element_size() for t in tensors)


def most_staged(tensors: dict[str, Tensor], moves: int) -> int:
    """Bytes of staging memory for so many experts."""
    return moves * sum(staged_bytes(row_bytes([tensor])) for tensor in tensors.values())


def staged_bytes(size: int) -> int:
    """Bytes of a row in staging memory."""
    return -(-size // ALIGNMENT) * ALIGNMENT


def signature(tensors: dict[str, Tensor]) -> int:
    """A number that differs where ranks would move different things."""
    text = ";".join(f"{name}:{tuple(t.shape[1:])}:{t.dtype}" for name, t in sorted(tensors.items()))
    return zlib.crc32(text.encode())


def as_row(tensor: Tensor, slot: int) -> Tensor:
    """The bytes of a slot, uint8, without a copy."""
    return tensor[slot].reshape(-1).view(torch.uint8)
