"""How a row is written on the wire.

A new codec is one file with a class that keeps the `Codec` contract, and one line in `CODECS`; users hand
their own object to `MoELayer(codec=...)` without registering it.
"""

from __future__ import annotations

from collections.abc import Mapping

from imbrex.codec.cast import Cast, Identity
from imbrex.codec.int8 import Int8
from imbrex.contracts import Codec, Wire

CODECS = {"identity": Identity, "bf16": Cast.bf16, "fp16": Cast.fp16, "int8": Int8}


def make(codec: str | Codec) -> Codec:
    """A codec by name, or the object itself. Raises ValueError that lists the names known."""
    if not isinstance(codec, str):
        return codec
    if codec not in CODECS:
        raise ValueError(f"codec: {codec!r} is not known; use one of {', '.join(CODECS)}, or a Codec object")
    return CODECS[codec]()


def make_wire(codec: str | Codec | Wire | Mapping[str, str | Codec]) -> Wire:
    """The codecs of the four crossings.

    A name or an object serves all four. A mapping names some of `dispatch`, `combine`, `dispatch_backward`
    and `combine_backward`; the others are written as they are.
    """
    if isinstance(codec, Wire):
        return codec
    if not isinstance(codec, Mapping):
        one = make(codec)
        return Wire(dispatch=one, combine=one, dispatch_backward=one, combine_backward=one)
    known = {"dispatch", "combine", "dispatch_backward", "combine_backward"}
    wrong = sorted(set(codec) - known)
    if wrong:
        raise ValueError(f"codec: there is no crossing {wrong[0]!r}; use {', '.join(sorted(known))}")
    return Wire(**{crossing: make(codec.get(crossing, "identity")) for crossing in known})


__all__ = ["CODECS", "make", "make_wire"]
