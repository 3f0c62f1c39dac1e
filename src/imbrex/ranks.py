"""Which ranks a layer is spread over, and which hold other tokens."""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from types import NoneType

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel

from imbrex.runtime import waits
from imbrex.runtime.checks import NOT_PICKLED, expect


@dataclass(frozen=True, kw_only=True, slots=True)
class Ranks:
    """The ranks of a layer.

    group: the ranks that exchange rows, expert rank major, tensor rank minor; `None` is one process alone.
    data_group: the ranks that hold the same experts in other groups, or `None`.
    """

    group: dist.ProcessGroup | None
    data_group: dist.ProcessGroup | None
    tensor_size: int

    def __reduce_ex__(self, protocol: object) -> str:
        """Refuses pickle, which asks here first of a layer."""
        raise TypeError(NOT_PICKLED)

    @staticmethod
    def of(
        group: dist.ProcessGroup | DeviceMesh | None, tensor_size: int, data_group: dist.ProcessGroup | None
    ) -> Ranks:
        """The ranks from what a user has. Raises ValueError where the group does not divide."""
        for name, ranks in (("group", group), ("data_group", data_group)):
            if ranks is dist.GroupMember.NON_GROUP_MEMBER:
                raise ValueError(
                    f"MoELayer: this rank is not in the {name} that torch.distributed.new_group made; make "
                    "the layer on the group's ranks only"
                )
        expect(
            "MoELayer: group",
            group,
            (dist.ProcessGroup, DeviceMesh, NoneType),
            "give a process group, as torch.distributed.group.WORLD, or a DeviceMesh",
        )
        expect("MoELayer: data_group", data_group, (dist.ProcessGroup, NoneType), "give a process group")
        if isinstance(group, DeviceMesh):
            group, tensor_size, data_group = _of_mesh(group, tensor_size, data_group)
        if group is None and not dist.is_initialized() and int(os.environ.get("WORLD_SIZE", "1")) > 1:
            warnings.warn(
                "MoELayer: group is None, so this process holds all experts and exchanges nothing, though a "
                "launcher started several ranks: call torch.distributed.init_process_group() first, and pass "
                "torch.distributed.group.WORLD, which is None before",
                stacklevel=3,
            )
        world = 1 if group is None else group.size()
        expect("MoELayer: tensor_parallel", tensor_size, (int,), "give a whole number")
        if tensor_size < 1 or world % tensor_size:
            raise ValueError(
                f"MoELayer: {world} ranks do not divide into tensor_parallel={tensor_size}; choose "
                f"a divisor of {world}"
            )
        return Ranks(group=group, data_group=data_group, tensor_size=tensor_size)

    @property
    def rank(self) -> int:
        return 0 if self.group is None else self.group.rank()

    @property
    def size(self) -> int:
        return 1 if self.group is None else self.group.size()

    @property
    def expert_size(self) -> int:
        return self.size // self.tensor_size

    @property
    def expert_rank(self) -> int:
        return self.rank // self.tensor_size

    @property
    def tensor_rank(self) -> int:
        return self.rank % self.tensor_size

    @property
    def data_size(self) -> int:
        return 1 if self.data_group is None else self.data_group.size()

    @property
    def data_group_name(self) -> str:
        """The name by which operators find the data group; empty where there is none."""
        return "" if self.data_group is None else self.data_group.group_name

    def token_groups(self, *, replicated: bool) -> tuple[dist.ProcessGroup, ...]:
        """The groups whose ranks hold different tokens; not `group` where its ranks all hold the same."""
        first = () if replicated or self.group is None else (self.group,)
        return first + (() if self.data_group is None else (self.data_group,))

    def agree_on_seed(self) -> int:
        """A number drawn from torch's generator on the first rank, the same on all."""
        drawn = torch.randint(2**31, (1,), device="cpu")
        self.share([drawn])
        return int(drawn)

    @torch.no_grad()
    def share(self, tensors: Sequence[Tensor]) -> None:
        """Make them, in place, what they are on the first rank: seeds may differ. All of one dtype."""
        groups = [group for group in (self.group, self.data_group) if group is not None and group.size() > 1]
        if not groups or not tensors or tensors[0].is_meta:
            return
        flat = torch.cat([tensor.flatten() for tensor in tensors]).view(torch.uint8)
        for group in groups:
            flat = flat.to("cuda" if "nccl" in str(dist.get_backend(group)) else "cpu")
            send = partial(dist.broadcast, flat, group=group, group_src=0, async_op=True)
            waits.run("set-up", send, on_host=not flat.is_cuda, group=group)
        pieces = flat.view(tensors[0].dtype).split([tensor.numel() for tensor in tensors])
        for tensor, piece in zip(tensors, pieces, strict=True):
            # host sync: once, at construction, where the layer is on the host
            tensor.copy_(piece.view_as(tensor))


def refuse_ddp(experts: nn.Module, ranks: Ranks) -> None:
    """Raise ValueError inside a DistributedDataParallel that holds the experts too: it has given all ranks
    the experts of its first rank, and would average the gradients of different experts."""
    wrapper = DistributedDataParallel._active_ddp_module
    if wrapper is None or ranks.size == 1:
        return
    wrapped = {id(parameter) for parameter in getattr(wrapper, "_module_parameters", ())}
    if any(id(parameter) in wrapped for parameter in experts.parameters()):
        raise ValueError(
            "MoELayer: DistributedDataParallel wraps the experts, which differ between ranks; make the model "
            "anew and call imbrex.ignore_in_ddp(model) before you wrap it"
        )


def refuse_sharded(experts: nn.Module, ranks: Ranks) -> None:
    """Where FSDP shards experts that differ between ranks, raise ValueError: gathered, they are made of the
    pieces of different experts."""
    if ranks.size == 1:
        return
    if any(_is_flat(tensor) for module in experts.modules() for tensor in _tensors(module)):
        raise ValueError(
            "MoELayer: FullyShardedDataParallel shards the experts, which differ between ranks; make the "
            "model anew and give it FullyShardedDataParallel(..., use_orig_params=True, "
            "ignored_states=list(imbrex.expert_parameters(model)))"
        )
    modules = set(experts.modules())
    if any(module in modules for module in _sharded_modules()) or any(
        hasattr(parameter, "full_tensor") for parameter in experts.parameters()
    ):
        raise ValueError(
            "MoELayer: FSDP shards the experts, which differ between ranks; make the model anew and give it "
            "fully_shard(..., ignored_params=set(imbrex.expert_parameters(model)))"
        )


def _tensors(module: nn.Module) -> Iterator[Tensor]:
    """The tensors of a module itself: FSDP1 may have made plain attributes of its parameters."""
    yield from module.parameters(recurse=False)
    yield from (value for value in vars(module).values() if isinstance(value, Tensor))


def _is_flat(tensor: Tensor) -> bool:
    """Whether it is a flat parameter of FSDP1, or a piece of one."""
    places, marks = (tensor, getattr(tensor, "_base", None)), ("_is_flat_param", "_fsdp_flattened")
    return any(getattr(place, mark, False) for place in places for mark in marks)


def _sharded_modules() -> Iterator[nn.Module]:
    """The modules with parameters that FSDP2 shards. In a forward these are whole again and look like any
    other, so torch's own notes are asked, where anything has made some."""
    composable = sys.modules.get("torch.distributed._composable_state")
    for reference in list(getattr(composable, "_module_state_mapping", {}).values()):
        state = reference()
        groups = getattr(state, "_fsdp_param_groups", None) or [getattr(state, "_fsdp_param_group", None)]
        for parameter in chain.from_iterable(getattr(group, "fsdp_params", ()) for group in groups):
            yield parameter._module_info.module


def refuse_meta(layer: nn.Module) -> None:
    """Raise ValueError where parameters are on the device `meta`."""
    name = next((name for name, tensor in layer.named_parameters() if tensor.is_meta), None)
    if name is not None:
        raise ValueError(
            f"MoELayer: {name} is on the meta device and has no values; call layer.to_empty(device=...), "
            "then layer.reset_parameters() or load a checkpoint, before the first forward"
        )


def _of_mesh(mesh: DeviceMesh, tensor_size: int, data_group: dist.ProcessGroup | None):
    names = mesh.mesh_dim_names or ("ep",) * (mesh.ndim == 1)
    if "ep" not in names or set(names) - {"dp", "ep", "tp"} or data_group is not None or tensor_size != 1:
        raise ValueError(
            f"MoELayer: a mesh with dimensions {names}; name them 'ep' and, where wanted, 'tp' and 'dp', and "
            "leave tensor_parallel and data_group out"
        )
    if mesh.ndim == 1:
        return mesh.get_group(), 1, None
    data = mesh["dp"].get_group() if "dp" in names else None
    if "tp" not in names:
        return mesh["ep"].get_group(), 1, data
    return mesh["ep", "tp"]._flatten().get_group(), mesh["tp"].size(), data
