"""The fp8 experts' kernels, run on the CPU: scales, ragged ends and quantised SwiGLU, against fp64."""

from __future__ import annotations

import shutil

import pytest
import torch

from imbrex.codec.fp8 import Fp8
from imbrex.kernels.ffn import fp8
from imbrex.kernels.ffn.fp8 import (
    ffn_fp8,
    quantise_experts,
    quantise_rows,
    quantise_weight,
    run_ffn_fp8,
    run_fp8_rows,
)
from imbrex.kernels.ffn.fp8_tokens import ffn_tokens_fp8
from imbrex.kernels.ffn.glue import COUNTERS, sum_rows
from imbrex.kernels.gemm.gemm import Epilogue, Layout
from imbrex.kernels.gemm.tiling import LOW, PAIRED_STAGED, STAGED, Tiling, override_tilings
from tests.emulated.gemm import EmulatedKernel, emulate
from tests.emulated.ragged import dequantise, draw, error, fp8_ffn

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="compiles the kernel with g++")
TAIL = 3
COUNTS = [70, 0, 1, 130]


def test_weights_keep_three_bits() -> None:
    weight = draw(2, 256, 384)
    weight[0, :128, :128] = 0
    weight[1, 128:, 128:256] *= 1000
    values, scales = quantise_weight(weight)
    assert scales.shape == (2, 2, 3)
    assert (scales[0, 0, 0], values.float().abs().max()) == (0, 448)
    exact = weight.double()
    assert ((dequantise(values, scales, 128) - exact).abs() <= exact.abs() / 16 + scales.max() * 2e-3).all()


def test_rows_are_quantised_where_they_lie(monkeypatch: pytest.MonkeyPatch) -> None:
    """Row 2 r of x becomes row r: exact scales, and values within half a step."""
    torch.manual_seed(0)
    x, index = draw(20, 384), torch.arange(10) * 2 * 4 + 3
    x[4] = 0
    emulate(monkeypatch, blocks=2)
    groups, values, scales = quantise_rows(x, torch.tensor([4, 5]), index, 4)
    assert groups.plan.tolist() == [0] * COUNTERS + [4, 9]
    wanted = x[::2][:9].double()
    assert torch.equal(scales[:9], x[::2][:9].float().view(9, 3, 128).abs().amax(2) / 448)
    assert ((dequantise(values[:9], scales[:9], 1) - wanted).abs() <= wanted.abs() / 16 + 1e-4).all()
    assert (values[2].float() == 0).all()


@pytest.mark.parametrize("down", [LOW, STAGED, PAIRED_STAGED], ids=["low", "staged", "pairs"])
def test_both_products(monkeypatch: pytest.MonkeyPatch, down: Tiling) -> None:
    """Against fp64 on the quantised numbers; a value next to a rounding boundary may fall on either side."""
    torch.manual_seed(1)
    width, inner = 256, 384
    monkeypatch.setattr(EmulatedKernel, "unrest", down == STAGED)  # lanes drift apart
    emulate(monkeypatch, blocks=down.cluster, seed=1)
    experts = quantise_experts(draw(4, 2 * inner, width) / 16, draw(4, width, inner) / 20)
    x, weights = draw(sum(COUNTS) + TAIL, width), torch.rand(sum(COUNTS) + TAIL)
    x[::7] *= 100
    x[sum(COUNTS) :] = float("nan")
    groups, values, scales = quantise_rows(x, torch.tensor(COUNTS))
    with override_tilings({(Layout.FORWARD, Epilogue.WEIGHTED): down}):
        found = run_fp8_rows(values, scales, experts, groups, weights)[:-TAIL]
    assert not groups.plan[:COUNTERS].any()  # down begins beside gate and up, and leaves zeros
    exact = fp8_ffn(
        COUNTS,
        dequantise(values[:-TAIL], scales[:-TAIL], 1),
        dequantise(experts.gate_up_eGD, experts.gate_up_scales, 128),
        dequantise(experts.down_eDF, experts.down_scales, 128),
    )
    assert error(found, exact * weights[:-TAIL, None].double()) < 4e-3


def test_near_the_exact_network(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(2)
    emulate(monkeypatch, blocks=1)
    gate_up, down, x = draw(4, 256, 128) / 11, draw(4, 128, 128) / 11, draw(sum(COUNTS), 128)
    experts = quantise_experts(gate_up, down)
    found = run_ffn_fp8(x, None, *experts.tensors(), torch.tensor(COUNTS), None)
    assert 2e-2 < error(found, fp8_ffn(COUNTS, x.double(), gate_up.double(), down.double())) < 8e-2


@pytest.mark.parametrize("width", [256, 512])
def test_rows_that_come_as_fp8(monkeypatch: pytest.MonkeyPatch, width: int) -> None:
    """As the codec writes them, bytes and scales in one row (of 256 values at no multiple of 16 bytes): the
    bits of rows that are quantised here, as they were or decoded, which gives the same bytes."""
    torch.manual_seed(3)
    emulate(monkeypatch, blocks=2)
    counts, rows = [9, 0, 8], 17
    x = draw(rows + TAIL, width) * 10.0 ** torch.linspace(-25, 25, rows + TAIL).bfloat16()[:, None]
    x[2, :128] = 0
    experts = quantise_experts(draw(3, 256, width) / 16, draw(3, width, 128) / 20)
    coded = Fp8.e4m3().encode(x, torch.bfloat16)
    values, scales = coded[:, :width].view(torch.float8_e4m3fn), coded[:, width:].view(torch.float32)
    decoded = Fp8.e4m3().decode(coded, width, torch.bfloat16)
    for whole in (x, decoded):
        _, values_again, scales_again = quantise_rows(whole, torch.tensor(counts))
        assert torch.equal(values_again[:rows].view(torch.uint8), coded[:rows, :width])
        assert torch.equal(scales_again[:rows].view(torch.int32), scales[:rows].view(torch.int32))
    straight = run_ffn_fp8(values, scales, *experts.tensors(), torch.tensor(counts), None)
    again = run_ffn_fp8(decoded, None, *experts.tensors(), torch.tensor(counts), None)
    assert straight.dtype == torch.bfloat16
    assert torch.equal(straight[:rows], again[:rows])


def test_tokens_to_weighted_sums(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tokens quantised once and gathered, and rows quantised for each choice, against `ffn_fp8` of copied
    rows, summed. Experts with 1, 0, 70 and 131 rows; tokens that go to one expert alone, and to none."""
    torch.manual_seed(4)
    counts, width, inner = [1, 0, 70, 131], 256, 128
    tokens = 140
    emulate(monkeypatch, blocks=3)
    monkeypatch.setattr(fp8, "choose_tiling", lambda *_, **__: LOW)
    experts = quantise_experts(draw(4, 2 * inner, width) / 16, draw(4, width, inner) / 12)
    x, weights, counts_e = draw(tokens, width), torch.rand(tokens, 2), torch.tensor(counts)
    source = torch.cat([torch.randperm(tokens - 1)[:count] for count in counts])
    position = torch.full((tokens, 2), -1)
    for row, token in enumerate(source.tolist()):
        if position[token, 0] < 0 or position[token, 1] < 0:
            position[token, int(position[token, 0] >= 0)] = row
    rows_RD = run_ffn_fp8(x[source], None, *experts.tensors(), counts_e, None)
    wanted = sum_rows(rows_RD, position, weights)
    for gather in (True, False):
        found = ffn_tokens_fp8(x, experts, counts_e, source, position, weights, gather=gather)
        assert found.shape == (tokens, width)
        assert error(found, wanted.double()) < 2e-2  # a reciprocal is to an ulp: other roundings now and then


def test_rows_and_scales_that_do_not_fit_are_said() -> None:
    experts = quantise_experts(draw(1, 256, 256), draw(1, 256, 128))
    rows, counts = draw(4, 256), torch.tensor([4])
    coded, scales = rows.to(torch.float8_e4m3fn), torch.ones(4, 2)
    for given, more, said in (
        (coded, {}, "float8_e4m3fn; give bfloat16, or float8_e4m3fn with scales_RB"),
        (rows, {"scales_RB": scales}, "rows with scales are torch.bfloat16"),
        (coded, {"scales_RB": scales[:, :1]}, r"float32 \[4, 1\]; give float32 \[4, 2\]"),
        (coded, {"scales_RB": scales.double()}, "float64"),
    ):
        with pytest.raises(ValueError, match=f"ffn_fp8: .*{said}"):
            ffn_fp8(given, experts, counts, scales_RB=more.get("scales_RB"))


def test_widths_that_do_not_fit_are_said() -> None:
    with pytest.raises(ValueError, match="multiples of 128"):
        quantise_experts(draw(1, 128, 72), draw(1, 72, 64))
