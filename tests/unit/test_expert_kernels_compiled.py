"""The experts' operators as torch sees them: schema, fakes, gradients, compiled whole. Kernels by g++."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.library import _scoped_library, opcheck

from imbrex.kernels.ffn.ffn import ffn, run_ffn, run_ffn_backward
from imbrex.kernels.ffn.fp8 import ffn_fp8, quantise_experts, run_ffn_fp8
from tests.emulated.gemm import emulate
from tests.emulated.ragged import draw
from tests.poison import real_empty

pytestmark = [
    pytest.mark.skipif(shutil.which("g++") is None, reason="compiles the kernel with g++"),
    pytest.mark.filterwarnings("ignore:.*script_method. is deprecated:DeprecationWarning"),  # torch's own
]


@pytest.fixture(autouse=True)
def on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    emulate(monkeypatch, blocks=1)
    here = _scoped_library("imbrex_experts_v4", "IMPL"), _scoped_library("imbrex_experts_fp8", "IMPL")
    with here[0] as bf16, here[1] as fp8:
        bf16.impl("ffn", run_ffn, "CPU")
        bf16.impl("ffn_backward", run_ffn_backward, "CPU")
        fp8.impl("ffn", run_ffn_fp8, "CPU")
        yield


def leaves(trained: str = "rows gate_up down weights", width: int = 64, inner: int = 64) -> dict[str, Tensor]:
    torch.manual_seed(0)
    made = {
        "rows": draw(13, width),
        "gate_up": draw(3, 2 * inner, width) / width**0.5,
        "down": draw(3, width, inner) / inner**0.5,
        "weights": torch.rand(13),
    }
    return {name: one.requires_grad_(name in trained.split()) for name, one in made.items()}


COUNTS = [9, 0, 4]


@pytest.mark.parametrize("trained", ["rows gate_up down weights", "rows", "gate_up", "down weights"])
def test_operators_obey_torchs_rules(trained: str) -> None:
    given = leaves(trained)
    weights = given.pop("weights")
    opcheck(torch.ops.imbrex_experts_v4.ffn.default, (*given.values(), torch.tensor(COUNTS), weights, True))


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.parametrize("trained", ["rows gate_up down weights", "down", ""])
def test_compiled_whole_it_gives_the_same_bits(trained: str, backend: str) -> None:
    given, counts = leaves(trained), torch.tensor(COUNTS)
    wanted = [given[name] for name in trained.split()]

    def step(rows: Tensor, gate_up: Tensor, down: Tensor, weights: Tensor) -> Tensor:
        return ffn(rows, gate_up, down, counts, weights_R=weights)

    def results(call: Any) -> list[Tensor]:
        y = call(*given.values())
        return [y, *(torch.autograd.grad(y, wanted, torch.ones_like(y)) if wanted else ())]

    with real_empty():
        found = results(torch.compile(step, fullgraph=True, backend=backend))
    assert all(torch.equal(a, b) for a, b in zip(found, results(step), strict=True))


def test_gradients_cannot_be_added_where_it_is_compiled() -> None:
    given = leaves()
    sums = torch.zeros(3, 128, 64), torch.zeros(3, 64, 64)

    def step(rows: Tensor) -> Tensor:
        return ffn(rows, given["gate_up"], given["down"], torch.tensor(COUNTS), gradients=sums)

    with pytest.raises(Exception, match=r"under torch\.compile gradients cannot be added"):
        torch.compile(step, fullgraph=True, backend="eager")(given["rows"])


def test_fp8_compiled_whole_gives_the_same_bits() -> None:
    given, counts = leaves("", width=128, inner=128), torch.tensor(COUNTS)
    experts = quantise_experts(given["gate_up"], given["down"])
    with real_empty(), torch.no_grad():
        step = torch.compile(lambda rows: ffn_fp8(rows, experts, counts), fullgraph=True, backend="aot_eager")
        assert torch.equal(step(given["rows"]), ffn_fp8(given["rows"], experts, counts))


@torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True)  # pytest's own would leave it deleted
def test_rows_whose_number_is_not_known_when_compiled() -> None:
    given = leaves("", width=128, inner=128)
    weights = given["gate_up"], given["down"]
    experts = quantise_experts(*weights)

    def step(rows: Tensor, taken: Tensor, weights_R: Tensor, counts: Tensor) -> Tensor:
        here = taken.nonzero()[:, 0]
        y = ffn(rows[here], *weights, counts, weights_R=weights_R[here])
        return y + ffn_fp8(rows[here], experts, counts, weights_R=weights_R[here])

    with real_empty(), torch.no_grad():
        compiled = torch.compile(step, fullgraph=True, backend="aot_eager", dynamic=True)
        for rows in (9, 13):
            case = draw(rows, 128), torch.arange(rows) != 2, torch.rand(rows), torch.tensor([rows - 5, 0, 4])
            assert torch.equal(compiled(*case), step(*case))
