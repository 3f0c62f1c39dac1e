"""Rows that reach the experts as they crossed, in fp8: the bytes that the codec writes, on every rank."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import imbrex
from imbrex.codec.fp8 import Fp8
from imbrex.contracts import Dispatched, RowForm
from imbrex.exchange import nvlink_fit
from imbrex.placement import from_slots
from tests.emulated import kernel
from tests.ranks.emulated_nvlink import EmulatedNvlink
from tests.ranks.pool import Pool, Ranks

FEW_TOKENS = nvlink_fit.FEW_TOKENS
WIDTH, TOKENS = 1536, (5, 3, 0, 8)
FP8_FIRST = RowForm.FP8, RowForm.ROWS
SLOTS = {4: [[0, 1], [2, 3, 0], [4, 5], [1, -1]], 2: [[0, 1, 2], [3, 4, 5]], 1: [[0, 1, 2, 3, 4, 5]]}
"""By the number of expert ranks."""


def draw(rank: int, tokens: int, device: str) -> tuple[Tensor, imbrex.Routing]:
    """Tokens of all magnitudes, some blocks of zeros, infinities or NaN, and a choice dropped."""
    drawn = torch.Generator().manual_seed(rank)
    blocks = torch.randn(tokens, WIDTH // 128, 128, generator=drawn)
    blocks *= 10.0 ** torch.arange(-20, 20)[torch.arange(blocks.shape[1]) % 40, None]
    if tokens:
        blocks[0, 0], blocks[0, 1, 5], blocks[0, 2, 7] = 0, float("inf"), float("nan")
    ids_TK = torch.rand(tokens, 6, generator=drawn).argsort(1)[:, :3]
    ids_TK[:1, 1] = -1
    weights_TK = torch.rand(ids_TK.shape, generator=drawn)
    routing = imbrex.Routing(ids_TK=ids_TK.to(device), weights_TK=weights_TK.to(device))
    return blocks.flatten(1).bfloat16().to(device), routing


def make_exchange(ranks: Ranks, transport: str, codec: Any, slots: list[list[int]], **more: Any):
    """transport: `nvlink-many` serves small batches as it does large ones."""
    nvlink_fit.FEW_TOKENS = -1 if transport == "nvlink-many" else FEW_TOKENS
    transport = transport.removesuffix("-many")
    emulated = transport == "nvlink" and ranks.device == "cpu"
    moves = EmulatedNvlink(ranks.group) if emulated else transport
    placement = from_slots(slots, 6)
    return imbrex.Exchange(placement, WIDTH, 3, group=ranks.group, transport=moves, codec=codec, **more)


def bits(rows_RD: Tensor) -> Tensor:
    return rows_RD.contiguous().view(torch.int16)


def run_dispatch(ranks: Ranks, transport: str, tensor: int) -> list[bool]:
    """Rows in fp8 against the codec on rows that crossed as they are; what the rest of a layer sees is equal;
    rows of the same exchange that it decodes are what the codec decodes, or own tokens, which stay whole."""
    more = {"tensor_parallel": tensor}
    slots = SLOTS[ranks.world_size // tensor]
    plain = make_exchange(ranks, "alltoall", "identity", slots, **more)
    ours = make_exchange(ranks, transport, {"dispatch": "fp8"}, slots, **more)
    x_TD, routing = draw(ranks.rank // tensor, TOKENS[ranks.rank // tensor], ranks.device)
    same = []
    for _ in range(2):
        wanted, found = plain.dispatch(x_TD, routing), ours.dispatch(x_TD, routing, forms=FP8_FIRST)
        rows = len(wanted.rows_RD)
        encoded = Fp8.e4m3().encode(wanted.rows_RD, torch.bfloat16)
        if transport == "nvlink":  # so few rows come as they are, and experts write the codec's bytes
            assert found.scales_RB is None
            same += [
                found.form is RowForm.ROWS,
                torch.equal(bits(found.rows_RD[:rows]), bits(wanted.rows_RD)),
            ]
            continue
        assert found.scales_RB is not None
        parts = found.rows_RD[:rows], found.scales_RB[:rows]
        bytes_RB = torch.cat([part.contiguous().view(torch.uint8) for part in parts], 1)
        same += [torch.equal(bytes_RB, encoded), torch.equal(found.counts_e, wanted.counts_e)]
        same += [torch.equal(found.handle.weights_R[:rows], wanted.handle.weights_R)]
        plainly, exact = ours.dispatch(x_TD, routing).rows_RD[:rows].float(), {"rtol": 0, "atol": 0}
        decoded = Fp8.e4m3().decode(encoded, WIDTH, torch.bfloat16), wanted.rows_RD
        either = [
            torch.isclose(plainly, rows_RD.float(), **exact, equal_nan=True).all(1) for rows_RD in decoded
        ]
        same += [bool((either[0] | either[1]).all()), not rows or not bool(either[1].all())]
        y = torch.where(torch.isfinite(wanted.rows_RD), wanted.rows_RD, 1.0)
        room = torch.ones(len(found.rows_RD), WIDTH, device=x_TD.device).bfloat16()
        room[:rows] = y
        truth, sums = plain.combine(y, wanted.handle), ours.combine(room, found.handle)
        same += [torch.allclose(sums.float(), truth.float(), rtol=2**-7)]
    return same


@pytest.mark.parametrize("tensor", [1, 2])
@pytest.mark.parametrize("transport", ["nvlink", "nvlink-many", "alltoall", "allgather"])
def test_rows_are_what_the_codec_writes(pool: Pool, transport: str, tensor: int) -> None:
    if transport.startswith("nvlink") and not kernel.available():
        pytest.skip("the emulation needs g++")
    for same in pool.run(4, run_dispatch, transport, tensor):
        assert same == [True] * (4 if transport == "nvlink" else 12)


def run_apart(ranks: Ranks) -> list[bool]:
    """Few rows over NVLink where the last rank's experts take no fp8, as when it alone keeps gradients: the
    other ranks get the codec's bytes, and the last one the rows."""
    slots = SLOTS[ranks.world_size]
    plain = make_exchange(ranks, "alltoall", "identity", slots)
    ours = make_exchange(ranks, "nvlink", {"dispatch": "fp8"}, slots)
    x_TD, routing = draw(ranks.rank, TOKENS[ranks.rank], ranks.device)
    last = ranks.rank == ranks.world_size - 1
    forms = (RowForm.ROWS,) if last else FP8_FIRST
    wanted, found = plain.dispatch(x_TD, routing), ours.dispatch(x_TD, routing, forms=forms)
    rows = len(wanted.rows_RD)
    if last:
        return [found.form is RowForm.ROWS, found.scales_RB is None]
    assert found.scales_RB is not None
    parts = found.rows_RD[:rows], found.scales_RB[:rows]
    bytes_RB = torch.cat([part.contiguous().view(torch.uint8) for part in parts], 1)
    encoded = Fp8.e4m3().encode(wanted.rows_RD, torch.bfloat16)
    return [found.form is RowForm.FP8, torch.equal(bytes_RB, encoded)]


def test_a_rank_whose_experts_take_no_fp8(pool: Pool) -> None:
    if not kernel.available():
        pytest.skip("the emulation needs g++")
    assert pool.run(4, run_apart) == [[True, True]] * 4


class Noting(torch.nn.Module):
    """Experts that take rows in fp8 outside of gradients, note what they get, and return it."""

    applies_weights = False
    forms = property(lambda _: FP8_FIRST[torch.is_grad_enabled() :])

    def __init__(self) -> None:
        super().__init__()
        self.trained = torch.nn.Parameter(torch.ones(1))
        self.seen: list[str] = []

    def forward(self, dispatched: Dispatched) -> Tensor:
        rows, scales = dispatched.rows_RD, dispatched.scales_RB
        self.seen.append(f"{rows.dtype}"[6:])
        return rows if scales is None else (rows.float() * scales.repeat_interleave(128, 1)).bfloat16()


def run_layers(ranks: Ranks) -> list[Any]:
    """What experts get: gradients, another codec, another dtype, and a schedule in chunks."""
    config = imbrex.MoEConfig(hidden_size=256, intermediate_size=128, num_experts=6, top_k=3)
    x_TD = torch.randn(4, 256, generator=torch.Generator().manual_seed(ranks.rank))
    found: list[Any] = []
    for codec, schedule, dtype in (
        ("fp8", "serial", torch.bfloat16),
        ("int8", "serial", torch.bfloat16),
        ("fp8", "serial", torch.float32),
        ("fp8", "optsche-2", torch.bfloat16),
    ):
        noting = Noting()
        layer = imbrex.MoELayer(
            config,
            ranks.group,
            transport="alltoall",
            codec={"dispatch": codec},
            schedule=schedule,
            experts=noting,
            dtype=dtype,
        )
        y_TD = layer(x_TD.to(dtype)).detach()
        with torch.no_grad():
            without = layer(x_TD.to(dtype))
        close = (without - y_TD).float().norm() < 0.05 * y_TD.float().norm()
        found.append((noting.seen[0], noting.seen[-1], bool(close)))
    return found


def test_where_they_do_not_fit_rows_are_decoded(pool: Pool) -> None:
    for answer in pool.run(2, run_layers):
        assert answer == [
            ("bfloat16", "float8_e4m3fn", True),
            ("bfloat16", "bfloat16", True),
            ("float32", "float32", True),
            ("bfloat16", "float8_e4m3fn", True),
        ]


def run_chunks(ranks: Ranks, transport: str) -> list[Any]:
    """What experts get, and whether chunks have the bits of serial."""
    config = imbrex.MoEConfig(hidden_size=512, intermediate_size=128, num_experts=6, top_k=3)
    x_TD = torch.randn(5, 512, generator=torch.Generator().manual_seed(ranks.rank)).bfloat16()
    found = []
    for schedule in ("serial", "optsche-2"):
        torch.manual_seed(0)
        options: dict[str, Any] = {"codec": {"dispatch": "fp8"}, "experts": Noting(), "schedule": schedule}
        options["transport"] = EmulatedNvlink(ranks.group) if transport == "nvlink" else transport
        layer = imbrex.MoELayer(config, ranks.group, dtype=torch.bfloat16, **options)
        with torch.no_grad():
            found.append(layer(x_TD))
    return [*options["experts"].seen, torch.equal(*found)]


@pytest.mark.parametrize("transport", ["nvlink", "alltoall"])
def test_chunks_of_them(pool: Pool, transport: str) -> None:
    if transport == "nvlink" and not kernel.available():
        pytest.skip("the emulation needs g++")
    form = "bfloat16" if transport == "nvlink" else "float8_e4m3fn"  # few rows come as they are
    for answer in pool.run(2, run_chunks, transport):
        assert answer == [form, form, True]
