"""Things that kernels and their hosts share: arguments and shape of a launch, as the driver wants them;
enums."""

from __future__ import annotations

import ctypes
import functools
import struct
from collections.abc import Sequence
from enum import IntEnum
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
    slots = (ctypes.c_uint64 * len(args))()
    base = ctypes.addressof(slots)
    addresses = [base + 8 * i for i in range(len(args))]
    for i, arg in enumerate(args):
        kind = type(arg)
        if kind is int:
            assert -(2**31) <= arg < 2**31, f"{arg} does not fit an int32 argument; pass ctypes.c_int64"
            slots[i] = arg & 0xFFFFFFFF
        elif kind is ByValue:
            addresses[i] = arg.address
        elif isinstance(arg, torch.Tensor):
            slots[i] = arg.data_ptr()
        elif kind is float:
            slots[i] = int.from_bytes(struct.pack("<f", arg), "little")
        elif arg is not None:
            addresses[i] = ctypes.addressof(arg)
    return slots, (ctypes.c_void_p * len(args))(*addresses)


@functools.cache
def multiprocessors(device: int) -> int:
    """SMs of a GPU; of an H200 for tensors on the CPU, where nothing is timed."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device >= 0 else 132
