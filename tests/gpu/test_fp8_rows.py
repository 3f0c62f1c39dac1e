"""Rows that stay in fp8 from the wire into the expert kernels, on GPUs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import imbrex
from imbrex.codec.fp8 import Fp8
from imbrex.contracts import Dispatched, RowForm
from imbrex.kernels import jit
from imbrex.kernels.ffn.fp8 import ffn_fp8, quantise_experts
from tests.gpu.gpus import RANKS
from tests.gpu.sanitizer import check_code
from tests.poison import real_empty
from tests.ranks.pool import Pool, Ranks
from tests.ranks.test_fp8_rows import run_dispatch
from tests.ranks.test_layer import relative
from tests.unit.test_expand import check_expansion

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]
TWO = pytest.mark.skipif(RANKS < 2, reason="NVLink needs two GPUs")
COUNTS = [300, 0, 1, 129, 650]
CONFIG = imbrex.MoEConfig(hidden_size=1024, intermediate_size=256, num_experts=8, top_k=3)


@pytest.mark.parametrize("width", [384, 1024])
def test_the_bits_of_rows_decoded_and_quantised_again(width: int) -> None:
    """Rows of 396 and 1056 bytes, the first at no multiple of 16."""
    torch.manual_seed(0)
    kind: dict[str, Any] = {"device": "cuda", "dtype": torch.bfloat16}
    rows = sum(COUNTS)
    x = torch.randn(rows + 3, width, **kind)
    x *= 10.0 ** torch.linspace(-25, 8, rows + 3, device="cuda")[:, None]
    x[2, :128] = 0
    shapes = (len(COUNTS), 512, width), (len(COUNTS), width, 256)
    experts = quantise_experts(*(torch.randn(*shape, **kind) / 16 for shape in shapes))
    counts, weights = torch.tensor(COUNTS, device="cuda"), torch.rand(rows + 3, device="cuda")
    coded = Fp8.e4m3().encode(x, torch.bfloat16)
    parts = coded[:, :width].view(torch.float8_e4m3fn), coded[:, width:].view(torch.float32)
    straight = ffn_fp8(parts[0], experts, counts, scales_RB=parts[1], weights_R=weights)
    decoded = Fp8.e4m3().decode(coded, width, torch.bfloat16)
    again = ffn_fp8(decoded, experts, counts, weights_R=weights)
    assert straight.dtype == torch.bfloat16
    assert torch.equal(straight[:rows], again[:rows])


@TWO
@pytest.mark.parametrize("tensor", [1, 2])
@pytest.mark.parametrize(("transport", "answers"), [("nvlink", 4), ("nvlink-many", 12)])
def test_rows_are_what_the_codec_writes(nccl: Pool, transport: str, answers: int, tensor: int) -> None:
    """As in `tests/ranks/test_fp8_rows.py`."""
    for same in nccl.run(2, run_dispatch, transport, tensor):
        assert same == [True] * answers


class Decoding(torch.nn.Module):
    """Experts that want rows decoded."""

    applies_weights, forms = True, (RowForm.ROWS,)

    def __init__(self, experts: torch.nn.Module) -> None:
        super().__init__()
        self.experts = experts

    def forward(self, dispatched: Dispatched) -> Tensor:
        return self.experts(dispatched)


def run_layers(ranks: Ranks, tokens: int) -> tuple[float, float, bool]:
    """Relative difference to the same layer that decodes and quantises again, and to bfloat16; whether a
    captured call that is replayed gives the bits of one that is not."""
    kind: dict[str, Any] = {"transport": "nvlink", "dtype": torch.bfloat16}
    torch.manual_seed(1)
    layer = imbrex.MoELayer(
        CONFIG, ranks.group, codec={"dispatch": "fp8"}, experts="kernels-fp8", **kind
    ).cuda()
    assert layer.reasons["experts"] == "kernels-fp8: asked for; rows come in fp8"
    decoding = imbrex.MoELayer(
        CONFIG, ranks.group, codec={"dispatch": "fp8"}, experts=Decoding(layer.experts), **kind
    ).cuda()
    plain = imbrex.MoELayer(CONFIG, ranks.group, experts="kernels", **kind).cuda()
    for other in (decoding, plain):
        other.gate.load_state_dict(layer.gate.state_dict())
    plain.experts.load_state_dict(layer.experts.state_dict())
    torch.manual_seed(ranks.rank)
    x_TD = torch.randn(tokens, 1024, device="cuda", dtype=torch.bfloat16)
    with torch.no_grad():
        y_TD, other, truth = layer(x_TD), decoding(x_TD), plain(x_TD)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            captured = layer(x_TD)
        graph.replay()
        torch.cuda.synchronize()
    return relative(y_TD, other), relative(y_TD, truth), torch.equal(captured, y_TD)


@TWO
@pytest.mark.parametrize("tokens", [40, 700])
def test_a_layer_keeps_rows_in_fp8(nccl: Pool, tokens: int) -> None:
    """The bits of rows that are decoded and quantised again; off bfloat16: 6.4e-2."""
    for apart, off, same in nccl.run(2, run_layers, tokens):
        assert apart == 0.0
        assert 4e-2 < off < 8e-2
        assert same


def run_compiled(ranks: Ranks) -> float:
    layer = imbrex.MoELayer(
        CONFIG,
        ranks.group,
        transport="nvlink",
        codec={"dispatch": "fp8"},
        experts="kernels-fp8",
        dtype=torch.bfloat16,
    ).cuda()
    layer.experts.quantised()
    x_TD = torch.randn(70, 1024, device="cuda", dtype=torch.bfloat16)
    with real_empty(), torch.no_grad():
        y_TD = layer(x_TD)
        compiled = torch.compile(layer, fullgraph=True, backend="aot_eager", dynamic=True)
        return relative(compiled(x_TD), y_TD)


@TWO
def test_one_compiled_graph(nccl: Pool) -> None:
    """In which rows are decoded, and quantised again."""
    assert max(nccl.run(2, run_compiled)) < 2e-2


@pytest.mark.parametrize("width", [512, 1536, 7168])
def test_expansion(width: int) -> None:
    check_expansion(width, "cuda", jit.load)


@pytest.mark.parametrize("tool", ["memcheck", "racecheck"])
def test_sanitizers_find_nothing(tool: str) -> None:
    step = "from tests.unit.test_expand import *; from imbrex.kernels import jit\n"
    check_code(tool, step + "check_expansion(1536, 'cuda', jit.load)")
