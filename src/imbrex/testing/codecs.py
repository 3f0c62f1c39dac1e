"""Does a codec keep its contract?"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from imbrex.codec import make
from imbrex.contracts import Codec
from imbrex.testing.conformity import FLOATS, on, require
from imbrex.testing.oracle import round_trip

WIDTHS = (1, 2, 3, 5, 16, 31, 64, 130, 257)
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


@dataclass(frozen=True, kw_only=True, slots=True)
class CodecReport:
    """The figures of a codec that keeps its contract.

    bytes_per_value: of rows of the widest width. relative_error: L2, on white noise of that width.
    share_of_bound: the largest error seen as a share of the stated bound.
    """

    name: str
    bytes_per_value: float
    relative_error: float
    share_of_bound: float


def check_codec(
    codec: str | Codec,
    *,
    widths: Sequence[int] = WIDTHS,
    dtypes: Sequence[torch.dtype] = DTYPES,
    device: torch.device | str = "cpu",
    seed: int = 0,
) -> CodecReport:
    """Check a codec, by name or the object: the bytes it states, its error bound, that it is deterministic,
    encodes every row on its own, takes empty, odd and strided rows, changes nothing it is given, keeps
    gradients away, and lets no NaN or infinity pass for a number.

    Rows go up to the largest value of their dtype. A NaN must decode to NaN; an infinity to NaN, an infinity,
    or a magnitude of 60,000 and more. What else of such a row is lost is the codec's to state; other rows
    must not suffer.

    Raises ConformityError that says what does not hold, and on what input.
    """
    codec = make(codec)
    require(isinstance(codec.name, str) and codec.name, "the codec has no name")
    drawn = torch.Generator().manual_seed(seed)
    share, error = 0.0, 0.0
    for dtype in dtypes:
        for width in widths:
            for kind, rows_ND in _kinds(width, dtype, drawn):
                rows_ND = rows_ND.to(device)
                where = f"{codec.name} on {kind} rows of {width} {dtype} values"
                with on(where):
                    decoded_ND = _check_bytes(codec, rows_ND, dtype, where)
                    share = max(share, _check_bound(codec, rows_ND, decoded_ND, dtype, where))
                if kind == "normal" and dtype == torch.float32:
                    norm = rows_ND.double().norm().item()
                    error = (decoded_ND.double() - rows_ND.double()).norm().item() / norm
            with on(f"{codec.name} on rows of {width} {dtype} values with NaN and infinity"):
                _check_not_finite(codec, width, dtype, device)
    width = widths[-1]
    nbytes = codec.nbytes(width, torch.float32)
    return CodecReport(
        name=codec.name, bytes_per_value=nbytes / width, relative_error=error, share_of_bound=share
    )


def _kinds(width: int, dtype: torch.dtype, drawn: torch.Generator) -> Iterator[tuple[str, Tensor]]:
    """Rows of every kind: [N, width] of `dtype`."""
    noise = torch.randn(6, width, generator=drawn, **FLOATS)
    yield "no", noise[:0].to(dtype)
    yield "normal", noise.to(dtype)
    yield "zero", torch.zeros(3, width, dtype=dtype, device="cpu")
    yield "constant", torch.full((2, width), -1.7, dtype=dtype, device="cpu")
    scales = 10.0 ** torch.linspace(-8, 3, 6, **FLOATS)[:, None]
    yield "small and large", (noise.clamp(-4, 4) * scales).to(dtype)
    outlier = noise.clone()
    outlier[:, width // 2] *= 50
    yield "outlying", outlier.to(dtype)
    yield "smooth", noise.cumsum(1).to(dtype)
    sparse = torch.where(noise.abs() > 1, noise, 0)
    yield "sparse", sparse.to(dtype)
    limit = min(torch.finfo(dtype).max, torch.finfo(torch.float32).max)
    largest = torch.cat([limit * noise[:3].sign(), limit / 4 * noise[3:].clamp(-4, 4)])
    yield "largest", largest.to(dtype)
    tiny = noise[:5].clamp(-4, 4).double() * 2.0 ** torch.arange(-148, -120, 6, **FLOATS)[:, None]
    yield "tiny", tiny.to(dtype)
    yield "strided", noise.T.contiguous().T.to(dtype)
    if dtype != torch.float32:
        yield "float32 (partial sums)", noise


def _check_bytes(codec: Codec, rows_ND: Tensor, dtype: torch.dtype, where: str) -> Tensor:
    """Bytes, shapes, determinism and independence of rows; returns the decoded rows."""
    num_rows, width = rows_ND.shape
    before = rows_ND.clone()
    encoded = codec.encode(rows_ND.requires_grad_(), dtype)
    rows_ND.requires_grad_(False)
    stated = codec.nbytes(width, dtype)
    require(encoded.dtype == torch.uint8, f"{where}: encoded as {encoded.dtype}, not uint8")
    shape = list(encoded.shape)
    require(shape == [num_rows, stated], f"{where}: {stated} bytes a row stated, encoded as {shape}")
    require(torch.equal(before, rows_ND), f"{where}: encoding changed the rows it was given")
    require(torch.equal(encoded, codec.encode(rows_ND, dtype)), f"{where}: encoded differently a second time")
    alone = torch.cat([codec.encode(rows_ND[1:].flip(0), dtype).flip(0), codec.encode(rows_ND[:1], dtype)])
    require(
        torch.equal(alone, encoded.roll(-1, 0)),
        f"{where}: how a row is written depends on the rows beside it",
    )
    copied = encoded.clone()
    decoded = codec.decode(encoded, width, dtype)
    require(decoded.dtype == dtype, f"{where}: decoded as {decoded.dtype}")
    require(decoded.shape == rows_ND.shape, f"{where}: decoded as {list(decoded.shape)}")
    require(not decoded.requires_grad, f"{where}: decoding keeps a graph; gradients pass straight through")
    require(torch.equal(copied, encoded), f"{where}: decoding changed the bytes it was given")
    again = codec.decode(encoded[:, :].clone(), width, dtype)
    require(torch.equal(again, decoded), f"{where}: decoded differently a second time")
    behind = torch.cat([encoded, torch.full((num_rows, 3), 255, dtype=torch.uint8, device=encoded.device)], 1)
    with on(f"{where}: a strided view of the bytes"):
        sliced = codec.decode(behind[:, :stated], width, dtype)
    require(torch.equal(sliced, decoded), f"{where}: bytes with others behind them decode differently")
    return decoded


def _check_bound(codec: Codec, rows_ND: Tensor, decoded_ND: Tensor, dtype: torch.dtype, where: str) -> float:
    """The largest error as a share of the bound of its row."""
    largest = 0.0
    for row, decoded in zip(rows_ND.double(), decoded_ND.double(), strict=True):
        amax = row.abs().max().item()
        bound, error = codec.error_bound(amax, dtype), (row - decoded).abs().max().item()
        require(error <= bound, f"{where}: an error of {error:g}, over the bound of {bound:g}")
        largest = max(largest, error / bound if bound else 0.0)
    return largest


def _check_not_finite(codec: Codec, width: int, dtype: torch.dtype, device: torch.device | str) -> None:
    rows_ND = torch.linspace(-2, 2, 4 * width, dtype=torch.float32, device=device).view(4, width).to(dtype)
    clean = round_trip(rows_ND, codec)
    place = width // 2
    rows_ND[1, place], rows_ND[2, place] = torch.nan, -torch.inf
    decoded = round_trip(rows_ND, codec)
    where = f"{codec.name} on rows of {width} {dtype} values"
    require(decoded[1, place].isnan(), f"{where}: NaN decoded as {decoded[1, place].item():g}")
    infinite = decoded[2, place].double()
    is_large = bool(infinite.isnan()) or infinite.item() <= -60_000
    require(is_large, f"{where}: minus infinity decoded as {infinite.item():g}")
    for row in (0, 3):
        require(torch.equal(decoded[row], clean[row]), f"{where}: a NaN in another row changed row {row}")
