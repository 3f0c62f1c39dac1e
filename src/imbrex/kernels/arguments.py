"""Things that kernels and their hosts share: arguments and shape of a launch, as the driver wants them;
enums."""

from __future__ import annotations

import ctypes
import functools
import struct
from collections.abc import Callable, Sequence
from enum import IntEnum
from types import NoneType
from typing import Any

import torch

HEADERS: dict[str, str] = {}
"""Headers that kernels include and that no file has: their text, by name."""


def declare_enums(header: str, namespace: str, *enums: type[IntEnum]) -> None:
    """Let kernels include Python's enums: `Epilogue.SWIGLU_KEEP` is `Epilogue::kSwigluKeep` there."""
    lines = [
        f"enum class {enum.__name__} {{ {', '.join(f'{_enumerator(e.name)} = {int(e)}' for e in enum)} }};"
        for enum in enums
    ]
    HEADERS[header] = "\n".join(("#pragma once", f"namespace {namespace} {{", *lines, "}", ""))


def _enumerator(name: str) -> str:
    return "k" + "".join(word.capitalize() for word in name.split("_"))


class ByValue:
    """Bytes passed by value as a struct parameter, such as a tensor map."""

    __slots__ = ("address", "raw")

    def __init__(self, raw: bytes) -> None:
        self.raw = (ctypes.c_ubyte * len(raw)).from_buffer_copy(raw)
        self.address = ctypes.addressof(self.raw)


def configuration(
    driver: Any, grid: tuple[int, int, int], block: int, smem: int, stream: int, attributes: list[Any]
) -> Any:
    """A launch's configuration, as the driver takes it. smem: bytes a block. stream: its handle."""
    config = driver.CUlaunchConfig()
    config.gridDimX, config.gridDimY, config.gridDimZ = grid
    config.blockDimX, config.blockDimY, config.blockDimZ = block, 1, 1
    config.sharedMemBytes = smem
    config.hStream = stream
    config.attrs = attributes
    config.numAttrs = len(attributes)
    return config


@functools.cache
def attributes(driver: Any, cluster: int, cooperative: bool, dependent: bool = False) -> list[Any]:
    """A launch's attributes: blocks of a cluster; all blocks resident; beginning before the launch before has
    ended."""
    attributes = []
    if cluster > 1:
        attribute = driver.CUlaunchAttribute()
        attribute.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
        attribute.value.clusterDim.x, attribute.value.clusterDim.y, attribute.value.clusterDim.z = (
            cluster,
            1,
            1,
        )
        attributes.append(attribute)
    if cooperative:
        attribute = driver.CUlaunchAttribute()
        attribute.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_COOPERATIVE
        attribute.value.cooperative = 1
        attributes.append(attribute)
    if dependent:
        attribute = driver.CUlaunchAttribute()
        attribute.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
        attribute.value.programmaticStreamSerializationAllowed = 1
        attributes.append(attribute)
    return attributes


def pack(args: Sequence[Any]) -> tuple[Any, Any]:
    """Eight bytes an argument (to be kept alive over the launch), and the array of their addresses."""
    try:
        return _packer(*map(type, args))(*args)
    except struct.error as error:
        raise AssertionError(
            f"{error}: an int does not fit an int32 argument; pass ctypes.c_int64"
        ) from error


@functools.cache
def _packer(*kinds: type) -> Callable[..., tuple[Any, Any]]:
    """`pack` for arguments of these types: one call packs all values, since launches wait for it (of twelve
    arguments half the time of a loop over them)."""
    layout, values, addresses = "<", [], []
    for i, kind in enumerate(kinds):
        address = f"base + {8 * i}"
        if kind is int:
            layout, value = f"{layout}i4x", f"a{i}"
        elif kind is float:
            layout, value = f"{layout}f4x", f"a{i}"
        elif issubclass(kind, torch.Tensor):
            layout, value = f"{layout}Q", f"a{i}.data_ptr()"
        else:
            layout, value = f"{layout}8x", None
            if kind is not NoneType:
                address = f"a{i}.address" if kind is ByValue else f"addressof(a{i})"
        values += [] if value is None else [value]
        addresses.append(address)
    names = {
        "Slots": ctypes.c_uint64 * len(kinds),
        "Addresses": ctypes.c_void_p * len(kinds),
        "addressof": ctypes.addressof,
        "into": struct.Struct(layout).pack_into,
    }
    lines = (
        f"def pack({', '.join(f'a{i}' for i in range(len(kinds)))}):",
        "slots = Slots()",
        "base = addressof(slots)",
        f"into(slots, {', '.join(['0', *values])})",
        f"return slots, Addresses({', '.join(addresses)})",
    )
    exec("\n    ".join(lines), names)
    return names["pack"]


@functools.cache
def multiprocessors(device: int) -> int:
    """SMs of a GPU; of an H200 for tensors on the CPU, where nothing is timed."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device >= 0 else 132
