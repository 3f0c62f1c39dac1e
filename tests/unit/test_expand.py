"""Rows of the fp8 codec to expert-major rows, the kernel emulated on the CPU, against the codec itself."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from imbrex.codec.fp8 import Fp8
from imbrex.kernels.routing.routed import Routed
from imbrex.kernels.rows.expand import expand_fp8, expand_fp8_rows
from tests.emulated import kernel

CHOICES, MOST = 3, 50


def check_expansion(width: int, device: str, load: Callable[..., Any]) -> None:
    """Of three ranks, on the one in the middle: tokens that nobody wants here, others that several experts
    want, more of them than warps; received rows lie apart and in another order than their tokens."""
    torch.manual_seed(width)
    tokens = torch.tensor([50, 33, 0], dtype=torch.int32)
    position = torch.full((3, MOST, CHOICES), -1)
    wanted = torch.rand(3, MOST, CHOICES) < 0.5
    wanted &= (torch.arange(MOST) < tokens[:, None])[:, :, None]
    num_rows = int(wanted.sum())
    position[wanted] = torch.randperm(num_rows)
    foreign = wanted.any(2)
    foreign[1] = False
    received = int(foreign.sum())
    recv_row = torch.full((3, MOST), -1)
    recv_row[foreign] = torch.randperm(received)
    x_WTD = torch.randn(3, MOST, width).bfloat16() * torch.logspace(-20, 8, MOST)[:, None].bfloat16()
    x_WTD[:, ::7, :128] = 0
    nbytes, codec = width + width // 32, Fp8.e4m3()
    encoded = codec.encode(x_WTD.flatten(0, 1), torch.bfloat16).view(3, MOST, nbytes)
    rows_1MB = torch.full((1, received, nbytes + 48), 255, dtype=torch.uint8)
    rows_1MB[0, recv_row[foreign], :nbytes] = encoded[foreign]
    at = {"dtype": torch.int32, "device": device}
    routed = Routed(
        position_LWTK=position[None].to(**at),
        weights_LWTK=torch.empty(0),
        recv_row_LWT=recv_row[None].to(**at),
        send_row_LTW=torch.empty(0),
        counts_Le=torch.empty(0),
        totals_L4=torch.empty(0),
        tokens_LW=tokens[None].to(device),
    )
    given = rows_1MB.to(device)[..., :nbytes], x_WTD[1].to(device), routed, 1, num_rows + 2
    source = torch.empty(num_rows, dtype=torch.int64)
    source[position[wanted]] = wanted.nonzero() @ torch.tensor([MOST, 1, 0])
    values, scales = (part.cpu() for part in expand_fp8_rows(*given, load=load))
    found = torch.cat([values.view(torch.uint8), scales.view(torch.uint8)], 1)[:num_rows]
    assert torch.equal(found, encoded.flatten(0, 1)[source])
    decoded = codec.decode(encoded.flatten(0, 1), width, torch.bfloat16).view_as(x_WTD)
    decoded[1] = x_WTD[1]
    found = expand_fp8(*given, load=load).cpu()[:num_rows]
    assert torch.equal(found, decoded.flatten(0, 1)[source])


@pytest.mark.skipif(not kernel.available(), reason="the emulation needs g++")
@pytest.mark.parametrize("width", [512, 1536, 7168])
def test_expansion(width: int) -> None:
    check_expansion(width, "cpu", kernel.load)
