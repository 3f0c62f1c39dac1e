"""Every codec keeps the contract, and the conformity suite finds the ones that do not."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

import imbrex
from imbrex.codec import CODECS, make, register
from imbrex.codec.cast import Identity
from imbrex.codec.int8 import Int8
from imbrex.testing import ConformityError, check_codec

SLOW = {
    "zfp1d-7": torch.float32,
    "zfp1d-8": torch.float16,
    "zfp2d-4": torch.float32,
    "zfp2d-16": torch.float16,
}
"""Both dtypes meet lines and squares."""
FEW = [name for name in CODECS if not name.startswith("zfp")] + [*SLOW]

# Relative L2 error on white noise and bytes a value at width 1024, from an independent measurement.
MEASURED = {
    "bf16": (1.662e-3, 2.0),
    "fp16": (2.077e-4, 2.0),
    "int8": (7.880e-3, 1.004),
    "int8-128": (6.470e-3, 1.031),
    "int8-truncated": (1.477e-2, 1.008),
    "fp8": (2.570e-2, 1.031),
    "fp8-e5m2": (5.24e-2, 1.031),
    "int4": (9.706e-2, 0.5625),
    "nvfp4": (9.510e-2, 0.566),
    "zfp2d-8": (1.807e-2, 1.0),
}


@pytest.mark.parametrize("name", FEW)
def test_contract(name: str) -> None:
    few = {"widths": (1, 5, 130), "dtypes": (SLOW[name],)} if name in SLOW else {}
    report = check_codec(name, **few)
    assert report.name == name
    # Where the bound says nothing about what happens, the worst is far from it.
    assert (0.03 if name.startswith("zfp") else 0.9) < report.share_of_bound <= 1 or name == "identity"


@pytest.mark.parametrize("name", MEASURED)
def test_error_and_bytes(name: str) -> None:
    rows_ND = torch.randn(48, 1024)
    codec = make(name)
    encoded = codec.encode(rows_ND, torch.float32)
    decoded = codec.decode(encoded, 1024, torch.float32)
    error, nbytes = MEASURED[name]
    assert ((decoded - rows_ND).norm() / rows_ND.norm()).item() == pytest.approx(error, rel=0.03)
    assert encoded.shape[1] / 1024 == pytest.approx(nbytes, abs=6e-4)


DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


@pytest.mark.parametrize("name", [*FEW, "zfp1d-4", "zfp2d-8"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_bound_holds_at_every_exponent(name: str, dtype: torch.dtype) -> None:
    """Rows of every magnitude, the smallest subnormal ones of float32 included: even ones, and ones whose
    values lie far apart."""
    limits = torch.finfo(dtype)
    lowest = -200 if dtype == torch.float64 else round(math.log2(limits.smallest_normal * limits.eps))
    highest = min(math.frexp(limits.max)[1], 128) - 1
    noise = torch.rand(8, 64, dtype=torch.float64)
    noise[:4] += 1
    noise[4:, 1:] *= 2.0 ** -torch.randint(0, 30, (4, 63)).double()
    scales = 2.0 ** torch.arange(lowest, highest, dtype=torch.float64)
    rows_ND = (noise * scales[:, None, None]).flatten(0, 1).to(dtype)
    codec = make(name)
    decoded_ND = codec.decode(codec.encode(rows_ND, dtype), 64, dtype)
    error_N = (decoded_ND.double() - rows_ND.double()).abs().amax(1)
    bounds_N = [codec.error_bound(amax, dtype) for amax in rows_ND.double().abs().amax(1).tolist()]
    over = error_N > torch.tensor(bounds_N, dtype=torch.float64)
    assert not over.any(), rows_ND[over][0].abs().max()


def test_truncation_is_biased_and_rounding_is_not() -> None:
    rows_ND = torch.rand(64, 1024)
    for name, bias in (("int8-truncated", -0.5), ("int8", 0.0)):
        codec = make(name)
        step = rows_ND.max(1).values / (255 if name == "int8-truncated" else 127)
        error = codec.decode(codec.encode(rows_ND, torch.float32), 1024, torch.float32) - rows_ND
        assert (error.mean(1) / step).mean().item() == pytest.approx(bias, abs=0.02)


# How many of 256 values a NaN takes along.
REACH = {
    **dict.fromkeys(("identity", "bf16", "fp16"), 1),
    **dict.fromkeys(("int8", "nvfp4", "int8-truncated"), 256),
    **dict.fromkeys(("int8-128", "fp8", "fp8-e5m2"), 128),
    "int4": 32,
    "zfp1d-8": 4,
    "zfp2d-8": 16,
}


@pytest.mark.parametrize("name", REACH)
def test_what_a_nan_and_an_infinity_take_along(name: str) -> None:
    rows_ND = torch.randn(3, 256)
    rows_ND[0, 5], rows_ND[1, 5] = torch.nan, -torch.inf
    decoded_ND = make(name).decode(make(name).encode(rows_ND, torch.float32), 256, torch.float32)
    infinities = {"identity": 1, "bf16": 0, "fp16": 0}.get(name, REACH[name])
    assert (~decoded_ND.isfinite()).sum(1).tolist() == [REACH[name], infinities, 0]


def test_nvfp4_values_by_hand() -> None:
    """A row whose scales are 1: amax 6 * 448 / 448 in one block. Ties go to the even code."""
    row = torch.tensor([[6, 0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5, -0.3, 0, 2.4, -6, 1, 2, 3, 4.0]])
    codec = make("nvfp4")
    decoded = codec.decode(codec.encode(row, torch.float32), 16, torch.float32)
    assert decoded[0].tolist() == pytest.approx([6, 0, 1, 1, 2, 2, 4, 4, -0.5, 0, 2, -6, 1, 2, 3, 4])


class TooShort(Identity):
    name = "too short"

    def encode(self, rows_ND: Tensor, dtype: torch.dtype) -> Tensor:
        return super().encode(rows_ND, dtype)[:, 1:]


class OneScale(Int8):
    """A scale for all rows together, where the contract wants one row's bytes to be that row's."""

    def encode(self, rows_ND: Tensor, dtype: torch.dtype) -> Tensor:
        if not rows_ND.numel():
            return super().encode(rows_ND, dtype)
        largest = rows_ND.abs().max()
        return super().encode(torch.cat([rows_ND, largest.expand(len(rows_ND), 1)], 1), dtype)[
            :, [*range(rows_ND.shape[1]), *range(-4, 0)]
        ]


class Optimist(Int8):
    def error_bound(self, amax: float, dtype: torch.dtype) -> float:
        return super().error_bound(amax, dtype) * 0.9


class Overflows(Identity):
    """Through float16, without a thought of what is too large for it."""

    name = "overflows"

    def decode(self, encoded_NB: Tensor, width: int, dtype: torch.dtype) -> Tensor:
        return super().decode(encoded_NB, width, dtype).half().to(dtype)

    def error_bound(self, amax: float, dtype: torch.dtype) -> float:
        return max(amax, 1.0) / 1024 + max(0.0, amax - 65504)


class Drifting(Identity):
    calls = 0

    def encode(self, rows_ND: Tensor, dtype: torch.dtype) -> Tensor:
        self.calls += 1
        return super().encode(rows_ND + 1e-3 * self.calls, dtype)


class Contiguous(Identity):
    """Reads bytes as if nothing were behind them."""

    def decode(self, encoded_NB: Tensor, width: int, dtype: torch.dtype) -> Tensor:
        return encoded_NB.view(-1).view(dtype).view(-1, width)


class HidesNaN(Int8):
    def decode(self, encoded_NB: Tensor, width: int, dtype: torch.dtype) -> Tensor:
        return super().decode(encoded_NB, width, dtype).nan_to_num()


@pytest.mark.parametrize(
    ("codec", "says"),
    [
        (TooShort(), "4 bytes a row stated, encoded as \\[0, 3\\]"),
        (OneScale(), "depends on the rows beside it"),
        (Optimist(), "over the bound"),
        (Overflows(), "on largest rows of 1 torch.float32 values: an error of inf"),
        (Drifting(), "differently a second time"),
        (HidesNaN(), "NaN decoded as 0"),
        (Contiguous(), "a strided view of the bytes: RuntimeError: view size is not compatible"),
    ],
    ids=lambda v: type(v).__name__,
)
def test_a_codec_that_breaks_the_contract_is_found(codec, says: str) -> None:
    with pytest.raises(ConformityError, match=says):
        check_codec(codec)


def test_wrong_bytes_are_refused_when_the_layer_is_made() -> None:
    config = imbrex.MoEConfig(hidden_size=4, intermediate_size=4, num_experts=2, top_k=1)
    with pytest.raises(ValueError, match=r"too short states 16 bytes a row of 4 torch\.float32 values"):
        imbrex.MoELayer(config, codec=TooShort())


def give_nothing() -> Any:
    return None


def test_names() -> None:
    with pytest.raises(ValueError, match=r"'int9' is not known; use one of identity, .*zfp2d-4 to zfp2d-16"):
        make("int9")
    with pytest.raises(ValueError, match="'int8' is taken"):
        register("int8", Identity)
    try:
        register("mine", Drifting)
        register("mine", Drifting)
        assert isinstance(make("mine"), Drifting)
        register("nothing", give_nothing)
        with pytest.raises(ValueError, match="codec: None has no name, nbytes, encode, decode; give a name"):
            make("nothing")
    finally:
        CODECS.pop("mine")
        CODECS.pop("nothing", None)


def test_bf16_rows_of_float16() -> None:
    """float16 rows cannot be clamped to bfloat16's range: it does not fit into float16."""
    rows_ND = torch.tensor([[1.0, 65504.0]], dtype=torch.float16)
    codec = make("bf16")
    assert codec.decode(codec.encode(rows_ND, torch.float16), 2, torch.float32).tolist() == [[1.0, 65536.0]]
