"""The products for GPUs without wgmma, on this one: code for it, and code for compute capability 8.0."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from imbrex.kernels.ffn.ffn import ffn
from imbrex.kernels.ffn.tokens import ffn_in_place
from imbrex.kernels.gemm.portable import portable_products

pytestmark = pytest.mark.gpu
COUNTS = {
    "many": [130, 0, 1, 300, 64, 65, 128],
    "some": [130, 0, 1, 100, 64, 65, 63],
    "few": [1, 0, 31, 33, 2, 7, 5],
}


def error(found: Tensor, reference: Tensor) -> float:
    return float((found.double() - reference.double()).norm() / reference.double().norm())


@pytest.mark.parametrize("arch", ["sm_90a", "compute_80"])
@pytest.mark.parametrize("rows", COUNTS)
@pytest.mark.parametrize(("width", "inner"), [(512, 256), (1032, 328)])
def test_a_step_is_that_of_wgmma(arch: str, rows: str, width: int, inner: int) -> None:
    """Rows, weights, their gradients, and rows through an index; rows past the counts stay NaN."""
    torch.manual_seed(0)
    counts = torch.tensor(COUNTS[rows], device="cuda")
    total, experts = int(counts.sum()), len(counts)
    like = {"device": "cuda", "dtype": torch.bfloat16}
    gate_up, down = torch.randn(experts, 2 * inner, width, **like), torch.randn(experts, width, inner, **like)
    leaves = [torch.randn(total + 9, width, **like), gate_up / width**0.5, down / inner**0.5]
    leaves.append(torch.rand(total + 9, device="cuda"))
    leaves = [leaf.requires_grad_() for leaf in leaves]
    d_y, index = torch.randn(total + 9, width, **like), torch.randperm(total, device="cuda")

    def run() -> list[Tensor]:
        y = ffn(leaves[0], leaves[1], leaves[2], counts, weights_R=leaves[3])
        gradients = torch.autograd.grad(y, leaves, d_y)
        with torch.no_grad():
            indexed = ffn_in_place(leaves[0], index, leaves[1], leaves[2], counts, gather=True)
        ragged = [y[:total], gradients[0][:total], gradients[3][:total], indexed]
        return [result.detach() for result in (*ragged, gradients[1], gradients[2])]

    wanted = run()
    with portable_products(arch):
        found, again = run(), run()
    for one, other, twice in zip(found, wanted, again, strict=True):
        assert error(one, other) < 5e-3
        assert torch.equal(one, twice)
