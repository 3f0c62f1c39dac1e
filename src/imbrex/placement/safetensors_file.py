"""Integer arrays by name in the safetensors format: 8 bytes of length, a JSON header, the arrays. Only what
recorded loads need.

Source: github.com/huggingface/safetensors, README, "Format".
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from imbrex.runtime.checks import UNREADABLE, why

DTYPES = {"I64": "<i8", "I32": "<i4", "I16": "<i2", "U8": "|u1", "F32": "<f4", "F64": "<f8"}


def read_arrays(path: Path) -> dict[str, NDArray]:
    """All arrays of a file. Raises ValueError if it is cut off or of another format."""
    raw = path.read_bytes()
    try:
        length = int.from_bytes(raw[:8], "little")
        header = json.loads(raw[8 : 8 + length])
        header.pop("__metadata__", None)
        return {name: _array(raw[8 + length :], entry) for name, entry in header.items()}
    except UNREADABLE as error:
        raise ValueError(f"{path} is no whole safetensors file ({why(error)}); record it again") from None


def _array(body: bytes, entry: Mapping) -> NDArray:
    begin, end = entry["data_offsets"]
    if end > len(body):
        raise ValueError(f"it ends {end - len(body)} bytes early")
    if not 0 <= begin <= end:
        raise ValueError(f"its offsets are {begin} and {end}")
    return np.frombuffer(body[begin:end], dtype=DTYPES[entry["dtype"]]).reshape(entry["shape"])


def write_arrays(path: Path, arrays: Mapping[str, NDArray[np.int64]]) -> None:
    """Write int64 arrays in their order."""
    header, at = {}, 0
    for name, array in arrays.items():
        header[name] = {
            "dtype": "I64",
            "shape": list(array.shape),
            "data_offsets": [at, at + 8 * array.size],
        }
        at += 8 * array.size
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    body = b"".join(np.ascontiguousarray(array, dtype="<i8").tobytes() for array in arrays.values())
    path.write_bytes(len(text).to_bytes(8, "little") + text + body)
