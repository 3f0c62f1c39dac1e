"""How a row is written on the wire.

A new codec is one file with a class that implements the `Codec` contract, and one line in `CODECS`. Users
pass their own object to `MoELayer(codec=...)`, or name it with `register`. `imbrex.testing.check_codec`
checks it against the contract.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

import torch

from imbrex.codec.cast import Cast, Identity, as_bytes, from_bytes
from imbrex.codec.fp8 import Fp8
from imbrex.codec.int4 import Int4
from imbrex.codec.int8 import Int8
from imbrex.codec.int8_truncated import Int8Truncated
from imbrex.codec.nvfp4 import Nvfp4
from imbrex.codec.zfp import Zfp
from imbrex.contracts import Codec, Wire
from imbrex.runtime import checks

CODECS: dict[str, Callable[[], Codec]] = {
    "identity": Identity,
    "bf16": Cast.bf16,
    "fp16": Cast.fp16,
    "int8": Int8,
    "int8-128": partial(Int8, 128),
    "int8-truncated": Int8Truncated,
    "fp8": Fp8.e4m3,
    "fp8-e5m2": Fp8.e5m2,
    "int4": Int4,
    "nvfp4": Nvfp4,
    **{f"zfp{dims}d-{rate}": partial(Zfp, dims, rate) for dims in (1, 2) for rate in range(4, 17)},
}
"""Makers of the codecs, by name."""


def register(name: str, codec: Callable[[], Codec]) -> None:
    """Let `codec=name` stand for `codec()`. Raises ValueError where the name is taken by something else."""
    if name == "auto" or CODECS.get(name, codec) is not codec:
        raise ValueError(f"codec: the name {name!r} is taken; choose another")
    CODECS[name] = codec


def make(codec: str | Codec) -> Codec:
    """A codec by name, or the object itself. Raises ValueError that lists the names known, or says what an
    object lacks."""
    if not isinstance(codec, str):
        return checks.piece("codec", codec)
    if codec not in CODECS:
        known = [name for name in CODECS if not name.startswith("zfp")]
        raise ValueError(
            f"codec: {codec!r} is not known; use one of {', '.join(known)}, zfp1d-4 to zfp1d-16, zfp2d-4 to "
            "zfp2d-16, or a Codec object"
        )
    return checks.piece("codec", CODECS[codec]())


def make_wire(codec: str | Codec | Wire | Mapping[str, str | Codec]) -> Wire:
    """The codecs of the four crossings.

    A name or an object serves all four. A mapping names some of `dispatch`, `combine`, `dispatch_backward`
    and `combine_backward`; the others are written as they are.
    """
    if isinstance(codec, Wire):
        return codec
    if not isinstance(codec, Mapping):
        same = make(codec)
        return Wire(dispatch=same, combine=same, dispatch_backward=same, combine_backward=same)
    known = {"dispatch", "combine", "dispatch_backward", "combine_backward"}
    wrong = sorted(set(codec) - known)
    if wrong:
        raise ValueError(f"codec: there is no crossing {wrong[0]!r}; use {', '.join(sorted(known))}")
    return Wire(**{crossing: make(codec.get(crossing, "identity")) for crossing in known})


def check_bytes(wire: Wire, width: int) -> None:
    """Encode two rows of `width` values with every codec. Raises ValueError where that fails or the bytes
    are not as many as the codec states, before anybody waits for them."""
    for codec in {id(c): c for c in (getattr(wire, crossing) for crossing in Wire.__slots__)}.values():
        for dtype in (torch.float32, torch.bfloat16):
            try:
                encoded = codec.encode(torch.ones(2, width, dtype=dtype, device="cpu"), dtype)
                stated = codec.nbytes(width, dtype)
            except Exception as error:
                raise ValueError(
                    f"codec: {codec.name} raises {error!r} on 2 rows of {width} {dtype} values"
                ) from error
            if encoded.dtype != torch.uint8 or tuple(encoded.shape) != (2, stated):
                raise ValueError(
                    f"codec: {codec.name} states {stated} bytes a row of {width} {dtype} values, but encodes "
                    f"2 of them as {encoded.dtype} {list(encoded.shape)}; mend `nbytes` or `encode`"
                )


__all__ = ["CODECS", "as_bytes", "check_bytes", "from_bytes", "make", "make_wire", "register"]
