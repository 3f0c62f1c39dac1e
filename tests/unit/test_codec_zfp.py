"""ZFP: the bytes of the zfp library, and of a scalar reference; decoding as the library decodes."""

from __future__ import annotations

import pytest
import torch

from imbrex.codec.zfp import Zfp
from tests.unit.zfp_reference import encode_row

ROW = [(i * 37 % 23 - 11) / 7 * (100 if i % 5 == 0 else 1) for i in range(20)]
WRITTEN_BY_ZFPY = {
    (1, 4): "0f290f090f110dd90189000000000000",
    (2, 4): "0fe10c0c000006a001095040000d3010",
    (1, 7): "0f2957fe90c0c20f11add2907d380189c409000000000000",
    (2, 7): "0fe10c0c000006a0ce38c1c4ce2001095040000d301000020d04400000000000",
    (1, 8): "0f29575e0f092cfc0f11ad020dd987730189c45900000000",
    (2, 8): "0fe10c0c000006a0ce38c1c4ce200ec201095040000d301000020d0440000301",
    (1, 13): "0f29575e6827fa90c0c26f357a0f11ad0210a5dd907d38c7a6690189c459d0850800000000000000",
    (1, 16): "0f29575e68277a000f092cfc56a367180f11ad0210a50dd70dd987736c9a16f80189c459d08558d0",
}
"""zfpy 1.0.1, `compress_numpy(row, rate=rate, write_header=False)` of ROW, and of ROW as [5, 4]."""


@pytest.mark.parametrize(("dimensions", "rate"), WRITTEN_BY_ZFPY)
def test_bytes_of_the_library(dimensions: int, rate: int) -> None:
    codec = Zfp(dimensions, rate)
    encoded = codec.encode(torch.tensor([ROW]), torch.float32)
    nbytes = codec.nbytes(len(ROW), torch.float32)
    assert nbytes == encoded.shape[1] == -(-len(ROW) // 4**dimensions * 4**dimensions * rate // 8)
    # The library fills its stream up to 64-bit words.
    assert (
        bytes(encoded[0].tolist())
        .ljust(nbytes + 8, b"\0")
        .startswith(bytes.fromhex(WRITTEN_BY_ZFPY[dimensions, rate])[:nbytes])
    )


@pytest.mark.parametrize("dimensions", [1, 2])
@pytest.mark.parametrize("rate", range(4, 17))
def test_bytes_of_the_scalar_reference(dimensions: int, rate: int) -> None:
    smooth = torch.randn(48).cumsum(0)
    sparse = torch.where(torch.randn(48).abs() > 1, torch.randn(48), 0)
    scaled = torch.randn(48) * torch.randn(48).mul(9).exp()
    rows_ND = torch.stack([torch.randn(48), smooth, sparse, scaled, torch.zeros(48)])
    encoded = Zfp(dimensions, rate).encode(rows_ND, torch.float32)
    for row, written in zip(rows_ND.tolist(), encoded.tolist(), strict=True):
        assert bytes(written) == encode_row(row, dimensions, rate)


DECODED_BY_ZFPY = {
    (1, 4): [-192, -64, 64, 192, 32, -160, 160, -32, -16, 80, -80, 16],
    (1, 7): [-156, 12, 20, -4, 4, -132, -12, -20, 0, 0, -128, 0],
    (2, 5): [-157.5, -0.5, 0.5, 5.5, -4.5, -133.5, 5.5, -3.5, 6.5, -4.5, -123.5, 1.5],
    (2, 7): [
        -153.625,
        1.125,
        -0.125,
        -1.375,
        0.125,
        -141.625,
        0.625,
        -1.125,
        1.375,
        -1.875,
        -129.125,
        -0.375,
    ],
}
"""What zfpy 1.0.1 reads back: the first twelve values."""


@pytest.mark.parametrize(("dimensions", "rate"), DECODED_BY_ZFPY)
def test_values_of_the_library(dimensions: int, rate: int) -> None:
    codec = Zfp(dimensions, rate)
    decoded = codec.decode(codec.encode(torch.tensor([ROW]), torch.float32), 20, torch.float32)
    assert decoded[0, :12].tolist() == DECODED_BY_ZFPY[dimensions, rate]


def test_library_beside_where_it_is_installed() -> None:
    zfpy = pytest.importorskip("zfpy")
    rows_ND = torch.randn(7, 64) * torch.randn(7, 1).mul(5).exp()
    for rate in range(4, 17):
        for dimensions in (1, 2):
            codec = Zfp(dimensions, rate)
            decoded = codec.decode(codec.encode(rows_ND, torch.float32), 64, torch.float32)
            for row, ours in zip(rows_ND, decoded, strict=True):
                field = row.numpy() if dimensions == 1 else row.view(16, 4).numpy()
                stream = zfpy.compress_numpy(field, rate=rate, write_header=False)
                kind = zfpy.dtype_to_ztype(field.dtype)
                theirs = zfpy._decompress(stream, kind, field.shape, rate=rate)
                assert torch.equal(ours, torch.from_numpy(theirs).flatten())


@pytest.mark.parametrize(
    ("dimensions", "rate", "error"), [(1, 8, 5.5e-2), (2, 4, 0.293), (2, 8, 1.81e-2), (2, 16, 7.06e-5)]
)
def test_error_on_white_noise(dimensions: int, rate: int, error: float) -> None:
    """The relative L2 errors that the zfp library has on a normal [4096, 1024]."""
    rows_ND = torch.randn(64, 1024)
    codec = Zfp(dimensions, rate)
    decoded = codec.decode(codec.encode(rows_ND, torch.float32), 1024, torch.float32)
    assert (decoded - rows_ND).norm() / rows_ND.norm() == pytest.approx(error, rel=0.02)


def test_rates_outside_are_refused() -> None:
    with pytest.raises(ValueError, match="zfp with 2 dimensions at rate 3; use 1 or 2, and 4 to 16"):
        Zfp(2, 3)
