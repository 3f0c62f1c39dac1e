"""The structs that kernels take, on the host: read from their declarations in the C++ sources.

    Pull = struct("exchange/pull.cuh", "Pull")
    kernel.launch(..., args=[Pull(x=x_TD, out=rows_RD, position=None, ..., choices=8)])

Every field is given, by its name: a tensor stands for its address, `None` for a null pointer. The emulated
kernels assert size and offsets of each as the C++ compiler has them.
"""

from __future__ import annotations

import ctypes
import functools
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from struct import Struct as Packing
from typing import Any, ClassVar

from imbrex.kernels.arguments import HEADERS

SOURCES = Path(__file__).parent
_NUMBERS: dict[str, Any] = {
    "u8": ctypes.c_uint8,
    "int": ctypes.c_int32,
    "u32": ctypes.c_uint32,
    "float": ctypes.c_float,
    "i64": ctypes.c_int64,
    "u64": ctypes.c_uint64,
}
_FORMATS = dict(zip(_NUMBERS.values(), "BiIfqQ", strict=True))
_INCLUDE = re.compile(r'^\s*#include\s+"([^"]+)"', re.MULTILINE)
_FIELD = re.compile(r"(\**)\s*(\w+)((?:\[\w+\])*)$")


class Struct(ctypes.Structure):
    """A struct of a kernel's; `source` and `qualified` name its declaration."""

    source: ClassVar[str]
    qualified: ClassVar[str]
    names: ClassVar[tuple[str, ...]]
    kinds: ClassVar[dict[str, Any]]
    """The fields' types in ctypes, by name."""


@functools.cache
def struct(source: str, name: str) -> Any:
    """The subclass of `Struct` that `source` declares as `name`: constructed with all fields, as keywords.

    Raises ValueError where there is none, or one that cannot be read.
    """
    text = (SOURCES / source).read_text(encoding="utf-8")
    body = re.search(rf"^struct {name} \{{\n(.*?)^\}};", text, re.MULTILINE | re.DOTALL)
    if body is None:
        raise ValueError(f"kernels: {source} declares no struct {name}")
    fields = tuple(_fields(source, body[1]))
    namespace = re.search(r"^namespace (\w+) \{", text, re.MULTILINE)
    kind = type(
        name,
        (Struct,),
        {
            "_fields_": fields,
            "names": tuple(field for field, _ in fields),
            "kinds": dict(fields),
            "source": source,
            "qualified": f"{namespace[1]}::{name}" if namespace else name,
        },
    )
    kind.__init__ = _constructor(kind, fields)
    return kind


def _constructor(cls: type[Struct], fields: Sequence[tuple[str, Any]]) -> Any:
    """`__init__` of a struct: one call packs all fields, since launches wait for it (routing's 30 fields: 8
    us, 17 by a loop over them)."""
    layout, at, values = "<", 0, []
    for name, kind in fields:
        field = getattr(cls, name)
        layout += f"{field.offset - at}x"
        at = field.offset + field.size
        if kind is ctypes.c_void_p:
            layout += "Q"
            values.append(
                f"0 if {name} is None else {name} if {name}.__class__ is int else {name}.data_ptr()"
            )
        elif kind in _FORMATS:
            layout += _FORMATS[kind]
            values.append(name)
        else:
            layout += f"{field.size}s"
            values.append(f"bytes({name})")
    pack = Packing(f"{layout}{ctypes.sizeof(cls) - at}x").pack_into
    names = {"pack": pack}
    exec(f"def __init__(self, *, {', '.join(cls.names)}):\n    pack(self, 0, {', '.join(values)})", names)
    return names["__init__"]


def _fields(source: str, body: str) -> Iterator[tuple[str, type[Any]]]:
    statements = re.sub(r"//[^\n]*", "", body).split(";")
    for statement in filter(None, (" ".join(part.split()) for part in statements)):
        if "(" in statement or statement.startswith(("static", "}")):
            continue
        kind, _, names = statement.removeprefix("const ").partition(" ")
        if kind.endswith("*"):
            kind, names = kind[:-1], "*" + names
        for part in names.split(","):
            declared = _FIELD.match(part.strip())
            if declared is None:
                raise ValueError(f"kernels: {source} declares '{statement}', which is not understood")
            pointer, field, counts = declared.groups()
            ctype: Any = (
                ctypes.c_void_p if pointer else _NUMBERS.get(kind) or struct(_home(source, kind), kind)
            )
            for count in reversed(re.findall(r"\w+", counts)):
                ctype = ctype * _constant(source, count)
            yield field, ctype


def sources_from(source: str) -> dict[str, str]:
    """The file and every file it includes, by name, contents as text."""
    texts: dict[str, str] = {}
    queue = [source]
    while queue:
        name = queue.pop()
        if name not in texts:
            texts[name] = HEADERS.get(name) or (SOURCES / name).read_text(encoding="utf-8")
            queue += _INCLUDE.findall(texts[name])
    return texts


def _home(source: str, name: str) -> str:
    for file, text in sources_from(source).items():
        if re.search(rf"^struct {name} \{{", text, re.MULTILINE):
            return file
    raise ValueError(f"kernels: {source} has fields of type {name}, which is not declared")


def _constant(source: str, name: str) -> int:
    if name.isdigit():
        return int(name)
    for text in sources_from(source).values():
        if value := re.search(rf"^constexpr int {name} = (\d+);", text, re.MULTILINE):
            return int(value[1])
    raise ValueError(f"kernels: {source} has an array of {name}, which is not a number")
