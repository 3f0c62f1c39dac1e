"""Expert parameters as torch.distributed.checkpoint sees them: one tensor [E, ...], whoever holds which part.

A rank's slots become chunks of the logical tensor, one per expert and contiguous run of its width. Replicas
are the same chunk and are written once; spares are no chunk. What was saved at one expert-parallel and
tensor-parallel size is therefore read at any other.
"""

from __future__ import annotations

import io
import pickle
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint._traverse import set_element
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import ReadItem, TensorWriteData, WriteItem, WriteItemType
from torch.nn.parallel import DistributedDataParallel

from imbrex.experts.experts import Experts
from imbrex.layer import MoELayer

WRAPPED = ("_orig_mod", "_checkpoint_wrapped_module")
SHARDED_DIM = {"gate_up_proj": 1, "gate_up_proj_bias": 1, "down_proj": 2}


@dataclass(frozen=True, kw_only=True, slots=True)
class Layout:
    """Where a rank's slots of an expert parameter lie in the logical tensor.

    shape: of the logical tensor. experts: the expert of every slot, -1 for a spare. dim: the sharded
    dimension. runs: (start here, start in the logical tensor, length) along `dim`. writes: this rank's copy
    is one to save.
    """

    shape: tuple[int, ...]
    experts: tuple[int, ...]
    dim: int
    runs: tuple[tuple[int, int, int], ...]
    writes: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class LogicalTensor:
    """A rank's part [e, ...] of a logical tensor [E, ...]; speaks the protocol of DTensor towards DCP."""

    local: Tensor
    layout: Layout

    def size(self) -> torch.Size:
        return torch.Size(self.layout.shape)

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        layout, chunks = self.layout, []
        for expert in layout.experts:
            for _, there, length in layout.runs if expert >= 0 else ():
                offsets, sizes = [0] * len(layout.shape), [1, *layout.shape[1:]]
                offsets[0], offsets[layout.dim], sizes[layout.dim] = expert, there, length
                chunks.append(ChunkStorageMetadata(offsets=torch.Size(offsets), sizes=torch.Size(sizes)))
        return chunks

    def __create_write_items__(self, fqn: str, _: Any) -> list[WriteItem]:
        properties = TensorProperties.create_from_tensor(self.local)
        return [
            WriteItem(
                index=MetadataIndex(fqn, chunk.offsets),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk=chunk, properties=properties, size=self.size()),
            )
            for chunk in (self.__create_chunk_list__() if self.layout.writes else ())
        ]

    def at(self, index: MetadataIndex) -> Tensor:
        """The chunk [1, ...] at an index, a view."""
        assert index.offset is not None
        layout = self.layout
        slot = layout.experts.index(index.offset[0])
        start = index.offset[layout.dim]
        here, length = next((h, n) for h, there, n in layout.runs if there == start)
        return self.local[slot : slot + 1].narrow(layout.dim, here, length)


class SavePlanner(DefaultSavePlanner):
    """Saves logical tensors. where: layouts of the state dict's logical tensors, by flattened name."""

    def __init__(self, where: dict[str, Layout]) -> None:
        super().__init__()
        self.where = where

    def set_up_planner(self, state_dict, storage_meta=None, is_coordinator: bool = False) -> None:
        super().set_up_planner(state_dict, storage_meta, is_coordinator)
        self.state_dict = logical(self.state_dict, self.where)

    def lookup_object(self, index: MetadataIndex) -> Any:
        value = self.state_dict[index.fqn]
        return value.at(index) if isinstance(value, LogicalTensor) else super().lookup_object(index)

    def transform_object(self, write_item: WriteItem, object: Any) -> Any:
        written = super().transform_object(write_item, object)
        if write_item.type == WriteItemType.BYTE_IO:
            _plain(write_item.index.fqn, written)
        return written


class LoadPlanner(DefaultLoadPlanner):
    """Fills logical tensors. where: as in `SavePlanner`."""

    def __init__(self, where: dict[str, Layout]) -> None:
        super().__init__()
        self.where = where

    def set_up_planner(self, state_dict, metadata=None, is_coordinator: bool = False) -> None:
        super().set_up_planner(state_dict, metadata, is_coordinator)
        self.state_dict = logical(self.state_dict, self.where)

    def lookup_tensor(self, index: MetadataIndex) -> Tensor:
        value = self.state_dict[index.fqn]
        return value.at(index) if isinstance(value, LogicalTensor) else super().lookup_tensor(index)

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        # torch's own would run what a pickle names.
        name = read_item.dest_index.fqn
        set_element(self.original_state_dict, self.mappings[name], _plain(name, value))


def _plain(name: str, written: io.BytesIO) -> Any:
    """The value in `written`, read without running anything."""
    try:
        return torch.load(io.BytesIO(written.getbuffer()), weights_only=True)
    except pickle.UnpicklingError as error:
        why = str(error).partition("Please")[0].strip().splitlines()[-1:]
        raise ValueError(
            f"{name} is no plain value, and only those can be read without running code ({' '.join(why)}); "
            "keep numbers, texts, tuples and tensors in the optimizer's groups and states"
        ) from None


def logical(flat: dict[str, Any], where: dict[str, Layout]) -> dict[str, Any]:
    """A flattened state dict with the tensors named in `where` as logical ones."""
    return {
        name: LogicalTensor(local=value, layout=where[name]) if name in where else value
        for name, value in flat.items()
    }


def layouts(model: nn.Module) -> dict[str, Layout]:
    """The layout of every expert parameter of `model`, by its name without the wrappers' parts."""
    by_name = {}
    for name, module in model.named_modules():
        if isinstance(module, MoELayer):
            prefix = _unwrapped(model, f"{name}." if name else "")
            for parameter_name, parameter in module.experts.named_parameters():
                by_name[f"{prefix}experts.{parameter_name}"] = _layout(module, parameter_name, parameter)
    return by_name


def _layout(layer: MoELayer, name: str, parameter: Tensor) -> Layout:
    experts: nn.Module = layer.experts
    if not isinstance(experts, Experts):
        return _layout_of_callers(layer, name, parameter)
    shape = [layer.config.num_experts, *parameter.shape[1:]]
    dim = SHARDED_DIM.get(name, 1)
    if name in SHARDED_DIM:
        shape[dim] *= experts.shard.size
    # Which indices of a whole expert does this rank keep? Asked of the experts, who alone know the layout.
    index = torch.arange(shape[dim], device="cpu").view([-1 if d == dim else 1 for d in range(1, len(shape))])
    columns = experts.shard_of(name, index).flatten().tolist()
    starts = [i for i in range(len(columns)) if i == 0 or columns[i] != columns[i - 1] + 1]
    runs = tuple(
        (start, columns[start], end - start)
        for start, end in zip(starts, [*starts[1:], len(columns)], strict=True)
    )
    # The bias added after the tensor ranks' sum is used, and so trained, on the first of them alone.
    writes = name in SHARDED_DIM or experts.shard.rank == 0
    return Layout(shape=tuple(shape), experts=experts.expert_ids, dim=dim, runs=runs, writes=writes)


def _layout_of_callers(layer: MoELayer, name: str, parameter: Tensor) -> Layout:
    """Experts of the caller's: one row of every parameter for each slot, all of it on this rank."""
    slots = layer.placement.local(layer.ranks.expert_rank)
    if parameter.dim() < 2 or parameter.shape[0] != len(slots) or layer.ranks.tensor_size > 1:
        raise ValueError(
            f"checkpoint: experts.{name} of {type(layer.experts).__name__} is {list(parameter.shape)} for "
            f"{len(slots)} slots and {layer.ranks.tensor_size} tensor ranks; a caller's experts can be saved "
            "if every parameter is [slots, ...] and tensor_parallel is 1"
        )
    shape = (layer.config.num_experts, *parameter.shape[1:])
    return Layout(shape=shape, experts=slots, dim=1, runs=((0, 0, shape[1]),), writes=True)


def _unwrapped(model: nn.Module, name: str) -> str:
    """A module's name without the parts that DDP, torch.compile and activation checkpointing put in."""
    parts, module = [], model
    for part in name.rstrip(".").split(".") if name else []:
        if not isinstance(module, DistributedDataParallel) and part not in WRAPPED:
            parts.append(part)
        module = getattr(module, part)
    return "".join(f"{part}." for part in parts)
