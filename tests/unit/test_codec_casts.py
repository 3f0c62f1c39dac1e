"""The codecs that every transport carries: stated bytes, stated bound, exact where they should be."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from imbrex.codec import CODECS, make, make_wire
from imbrex.codec.cast import pick_rows, wide
from imbrex.codec.int4 import round_up_bf16
from imbrex.testing import round_trip

BASIC = ["identity", "bf16", "fp16", "int8"]


@pytest.mark.parametrize("name", BASIC)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@settings(max_examples=25, deadline=None, derandomize=True)
@given(
    seed=st.integers(0, 10**6),
    rows=st.integers(0, 5),
    width=st.integers(1, 40),
    scale=st.sampled_from([1e-3, 1, 1e3]),
)
def test_bytes_and_bound(
    name: str, dtype: torch.dtype, seed: int, rows: int, width: int, scale: float
) -> None:
    codec = make(name)
    x = (torch.randn(rows, width, generator=torch.Generator().manual_seed(seed)) * scale).to(dtype)
    encoded = codec.encode(x, dtype)
    assert encoded.dtype == torch.uint8
    assert encoded.shape == (rows, codec.nbytes(width, dtype))
    assert torch.equal(encoded, codec.encode(x, dtype))
    decoded = codec.decode(encoded, width, dtype)
    assert decoded.dtype == dtype
    for row, back in zip(x, decoded, strict=True):
        bound = codec.error_bound(row.abs().max().item(), dtype)
        assert (row.double() - back.double()).abs().max().item() <= bound


def test_int8_by_hand() -> None:
    """amax 127: a scale of 1, so values are rounded to whole numbers; -127..127 only."""
    x = torch.tensor([[127.0, -126.6, 0.4, 0.6]])
    assert round_trip(x, make("int8")).tolist() == [[127.0, -127.0, 0.0, 1.0]]
    assert round_trip(torch.zeros(1, 3), make("int8")).tolist() == [[0.0, 0.0, 0.0]]
    assert round_trip(torch.tensor([[1.0, torch.inf]]), make("int8")).isnan().all()


def test_fp16_saturates() -> None:
    assert round_trip(torch.tensor([[1e6, -1e6]]), make("fp16")).tolist() == [[65504.0, -65504.0]]


def test_a_partial_sum_is_rounded_to_the_dtype_outside() -> None:
    codec = make("identity")
    partial = torch.tensor([[1.0 + 2**-10]])
    assert codec.decode(codec.encode(partial, torch.bfloat16), 1, torch.bfloat16).item() == 1.0


def test_crossings_by_name() -> None:
    wire = make_wire({"dispatch": "int8"})
    assert (wire.dispatch.name, wire.combine.name) == ("int8", "identity")
    with pytest.raises(ValueError, match="there is no crossing 'sideways'; use combine, combine_backward"):
        make_wire({"sideways": "int8"})
    with pytest.raises(ValueError, match="codec: 'zip' is not known; use one of identity"):
        make("zip")
    assert set(BASIC) <= set(CODECS)


@pytest.mark.parametrize(
    ("width", "dtype", "words"),
    [
        (32, torch.uint8, torch.int64),
        (20, torch.uint8, torch.int32),
        (7, torch.uint8, torch.uint8),
        (12, torch.bfloat16, torch.int64),
        (2, torch.bfloat16, torch.int32),
        (5, torch.float32, torch.float32),
    ],
)
def test_rows_are_copied_in_the_widest_words_they_are_made_of(
    width: int, dtype: torch.dtype, words: torch.dtype
) -> None:
    rows = torch.arange(6 * width).view(6, width).to(dtype)
    index = torch.tensor([5, 0, 0, 3])
    assert wide(rows).dtype == words
    assert torch.equal(pick_rows(rows, index), rows[index])
    assert torch.equal(pick_rows(rows[:, 1:], index), rows[index, 1:])
    assert pick_rows(rows[:0], index[:0]).shape == (0, width)


def test_int4_scales_are_rounded_up() -> None:
    """To bfloat16, which has a step of 2^-7 above 1: seven steps of a scale reach the largest value."""
    exact = torch.tensor([1.0, 1 + 2.0**-20, 1.5 + 2.0**-8, 0.0])
    assert round_up_bf16(exact).tolist() == [1.0, 1 + 2.0**-7, 1.5 + 2.0**-7, 0.0]
    row = torch.full((1, 32), 7 + 2.0**-10)
    assert make("int4").decode(make("int4").encode(row, torch.float32), 32, torch.float32).min() >= row.min()
