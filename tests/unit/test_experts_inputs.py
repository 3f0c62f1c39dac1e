"""Tensors that the expert kernels do not take are refused in a sentence, by every way into them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from imbrex.kernels.ffn.ffn import ffn
from imbrex.kernels.ffn.fp8 import ffn_fp8, quantise_experts
from imbrex.kernels.ffn.fp8_tokens import ffn_in_place_fp8, ffn_tokens_fp8
from imbrex.kernels.ffn.inputs import why_not_ffn, why_not_inputs
from imbrex.kernels.ffn.tokens import ffn_in_place, ffn_tokens

WIDTH, INNER, ROWS = 256, 128, 6


def zeros(*shape: int) -> Tensor:
    return torch.zeros(shape, dtype=torch.bfloat16)


def given(**others: Tensor) -> dict[str, Any]:
    fine = {
        "rows_RD": zeros(ROWS, WIDTH),
        "gate_up_eGD": zeros(2, 2 * INNER, WIDTH),
        "down_eDF": zeros(2, WIDTH, INNER),
        "counts_e": torch.tensor([4, 2]),
        "weights_R": torch.ones(ROWS),
    }
    return fine | others


WRONG = {
    "rows of another width": ("rows_RD", zeros(ROWS, 8), r"rows are \[6, 8\]; give \[R, 256\]"),
    "one row alone": ("rows_RD", zeros(WIDTH), r"rows are \[256\]"),
    "up and down apart": ("gate_up_eGD", zeros(2, INNER, WIDTH), r"before up's \[e, 2F, D\]"),
    "another number of experts": ("down_eDF", zeros(1, WIDTH, INNER), "weights are"),
    "counts in int32": ("counts_e", torch.tensor([4, 2]).int(), r"int32 \[2\]; give int64 \[2\]"),
    "counts of others": ("counts_e", torch.tensor([4, 1, 1]), r"int64 \[3\]; give int64 \[2\]"),
    "weights in bfloat16": ("weights_R", zeros(ROWS), r"bfloat16 \[6\]; give float32 \[R\]"),
    "too few weights": ("weights_R", torch.ones(2), "weights of 2 rows and 6 rows"),
    "elsewhere": ("counts_e", torch.tensor([4, 2]).to("meta"), "rows are on cpu and others on meta"),
}


@pytest.mark.parametrize("case", list(WRONG))
def test_what_does_not_fit_is_said(case: str) -> None:
    name, other, said = WRONG[case]
    with pytest.raises(ValueError, match=f"ffn: .*{said}"):
        ffn(**given(**{name: other}))


@pytest.mark.parametrize("name", ["rows_RD", "gate_up_eGD", "down_eDF"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_other_dtypes_are_said(name: str, dtype: torch.dtype) -> None:
    with pytest.raises(ValueError, match=f"{dtype}; the expert kernels compute in bfloat16"):
        ffn(**given(**{name: given()[name].to(dtype)}))


def test_what_fits() -> None:
    fine = given()
    assert why_not_inputs(**fine) is None
    fine["weights_R"] = torch.ones(9)
    index = torch.zeros(9, dtype=torch.int64)
    assert why_not_inputs(**fine, index_R=index) is None
    assert "GPU" in str(why_not_ffn(fine["rows_RD"], fine["gate_up_eGD"], fine["down_eDF"]))


def test_every_way_into_the_kernels_looks() -> None:
    fine = given()
    x, weights = fine["rows_RD"], (fine["gate_up_eGD"], fine["down_eDF"])
    experts, short = quantise_experts(*weights), torch.tensor([6])
    index, position = torch.zeros(ROWS, dtype=torch.int64), torch.zeros(ROWS, 2, dtype=torch.int64)
    calls: list[Any] = [
        lambda: ffn_in_place(x, index, *weights, short),
        lambda: ffn_tokens(x, *weights, short, index, position, torch.ones(ROWS, 2)),
        lambda: ffn_fp8(x, experts, short),
        lambda: ffn_in_place_fp8(x, index, experts, short),
        lambda: ffn_tokens_fp8(x, experts, short, index, position, torch.ones(ROWS, 2)),
    ]
    for call in calls:
        with pytest.raises(ValueError, match=r"counts are int64 \[1\]; give int64 \[2\]"):
            call()
    with pytest.raises(ValueError, match=r"index of rows is int32 \[6\]; give int64 \[R\]"):
        ffn_in_place(x, index.int(), *weights, fine["counts_e"])
    with pytest.raises(ValueError, match="float32; the expert kernels compute in bfloat16"):
        ffn_in_place_fp8(x.float(), index, experts, fine["counts_e"])
