"""The codecs' kernels, emulated on the CPU, write and read the bytes of the tensor operations."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from imbrex.codec import make
from imbrex.kernels.codec import codec as kernels
from tests.emulated import kernel

pytestmark = pytest.mark.skipif(not kernel.available(), reason="the emulation needs g++")
INFINITY, TINY = float("inf"), 1e-42


def hard_rows(width: int, dtype: torch.dtype) -> Tensor:
    """Noise, ties, every scale up to the largest value, blocks of zeros, NaN, infinities: [32, D]."""
    drawn = torch.Generator().manual_seed(width)
    noise = torch.randn(12, width, generator=drawn)
    scales = 10.0 ** torch.linspace(-44, 38, 8)[:, None]
    ties = torch.randint(-9, 9, (4, width), generator=drawn) * 0.25
    rows = torch.cat([noise, noise[:8] * scales, noise[:4].cumsum(1), ties, torch.zeros(2, width)])
    rows[0, 5], rows[1, width - 1], rows[2, ::7] = torch.nan, INFINITY, -0.0
    rows[3], rows[4, width // 2 :], rows[5, 0] = TINY, 0, 3e38
    rows[6] = 3.3e38 * noise[6].sign()
    rows[7] = 2.0 ** torch.randint(-60, 60, (width,), generator=drawn)
    rows[29] = torch.where(noise[0] > 2, noise[0], -0.0)
    largest = torch.finfo(dtype).max
    rows = torch.cat([rows, largest * noise[8:9].sign(), noise[9:10].clamp(-4, 4) / 4 * largest])
    return rows.to(dtype)


def same_bytes(name: str, ours: Tensor, theirs: Tensor) -> Tensor:
    """By byte; of 16-bit floats, whose NaN has other bits on other devices, by value."""
    if name not in kernels.SIXTEEN:
        return ours == theirs
    kind = torch.bfloat16 if name == "bf16" else torch.float16
    a, b = ours.view(kind), theirs.view(kind)
    return ((a == b) & (a.signbit() == b.signbit())) | (a.isnan() & b.isnan())


BF16, F32 = torch.bfloat16, torch.float32
# Not all of both dtypes: every pair of a codec's kernels is a compilation. tests/gpu has them all.
CASES = [
    *[("int8", BF16, width) for width in (64, 192, 1088)],
    *[("fp8", BF16, width) for width in (64, 192)],
    *[("int4", BF16, width) for width in (64, 192)],
    *[("nvfp4", F32, width) for width in (64, 192, 1088)],
    ("bf16", F32, 192),
    ("fp16", BF16, 64),
    *[(f"zfp2d-{rate}", F32, 64) for rate in (4, 5, 8, 16)],
    *[(f"zfp1d-{rate}", BF16, width) for rate, width in ((4, 64), (7, 192), (8, 64), (16, 192))],
]


@pytest.mark.parametrize(("name", "dtype", "width"), CASES, ids=str)
def test_kernels_keep_the_bytes(name: str, dtype: torch.dtype, width: int) -> None:
    codec, rows = make(name), hard_rows(width, dtype)
    wanted = codec.encode(rows, dtype)
    written = kernels.launch_encode(name, rows, codec.nbytes(width, dtype), kernel.load)
    same = same_bytes(name, written, wanted)
    assert same.all(), (~same).any(1).nonzero().flatten()
    read, back = (
        kernels.launch_decode(name, wanted, width, dtype, kernel.load),
        codec.decode(wanted, width, dtype),
    )
    same = (read == back) & (read.signbit() == back.signbit())
    assert (same | (read.isnan() & back.isnan())).all()


def test_rows_between_others_are_read_and_left_alone() -> None:
    """Rows of a wider tensor, encoded bytes with others behind them, both as the exchange hands them over."""
    rows, codec = hard_rows(256, torch.bfloat16), make("fp8")
    inner = rows[:, 64:192]
    wanted = codec.encode(inner, torch.bfloat16)
    assert torch.equal(kernels.launch_encode("fp8", inner, wanted.shape[1], kernel.load), wanted)
    behind = torch.cat([wanted, torch.full((len(rows), 3), 255, dtype=torch.uint8)], 1)[:, : wanted.shape[1]]
    read = kernels.launch_decode("fp8", behind, 128, torch.bfloat16, kernel.load)
    assert torch.equal(read.nan_to_num(), codec.decode(wanted, 128, torch.bfloat16).nan_to_num())


def test_every_block_codec_has_a_kernel_or_is_none() -> None:
    """A codec that is added must say here that it has no kernel."""
    from imbrex.codec import CODECS

    without = {name for name in CODECS if not kernels._known(name)}
    assert without == {"identity", "int8-truncated"}
