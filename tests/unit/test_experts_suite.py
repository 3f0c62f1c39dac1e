"""Our experts keep the contract, and the conformity suite finds the ones that do not."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import imbrex
from imbrex.contracts import RowForm
from imbrex.experts.experts import Experts
from imbrex.testing import ConformityError, check_experts


@pytest.mark.parametrize("implementation", ["loop", "grouped"])
@pytest.mark.parametrize("activation", ["swiglu", "gelu"])
@pytest.mark.parametrize("bias", [False, True])
def test_contract(implementation: str, activation, bias: bool) -> None:
    check_experts(
        Experts((3, 1, 2), 11, 16, activation=activation, bias=bias, implementation=implementation), 11, 3
    )


class Scale(nn.Module):
    """A vector a slot; one method breaks the contract in every subclass."""

    applies_weights = False
    forms = (RowForm.ROWS,)

    def __init__(self) -> None:
        super().__init__()
        self.vector = nn.Parameter(torch.randn(3, 8))

    def slots(self, dispatched: imbrex.Dispatched) -> Tensor:
        slot = torch.repeat_interleave(torch.arange(3), dispatched.counts_e)
        return nn.functional.pad(slot, [0, dispatched.rows_RD.shape[0] - len(slot)])

    def forward(self, dispatched: imbrex.Dispatched) -> Tensor:
        return dispatched.rows_RD * self.vector[self.slots(dispatched)]


class Weighs(Scale):
    applies_weights = True
    forms = (RowForm.ROWS,)

    def forward(self, dispatched: imbrex.Dispatched) -> Tensor:
        return super().forward(dispatched) * dispatched.handle.weights_R[:, None]


class Normalises(Scale):
    def forward(self, dispatched: imbrex.Dispatched) -> Tensor:
        out = super().forward(dispatched)
        return out - out.mean(0) if len(out) else out


class InPlace(Scale):
    def forward(self, dispatched: imbrex.Dispatched) -> Tensor:
        with torch.no_grad():
            dispatched.rows_RD.mul_(2)
        return super().forward(dispatched)


class Forgets(Scale):
    """Says that it weighs, and does not."""

    applies_weights = True
    forms = (RowForm.ROWS,)


class Detaches(Scale):
    def forward(self, dispatched: imbrex.Dispatched) -> Tensor:
        return dispatched.rows_RD * self.vector.detach()[self.slots(dispatched)]


class WrongSlope(Scale):
    """Forward as `Scale`, and a gradient of the rows that is one too large."""

    def forward(self, dispatched: imbrex.Dispatched) -> Tensor:
        rows_RD = dispatched.rows_RD
        return super().forward(dispatched) + rows_RD - rows_RD.detach()


class Short(Scale):
    """Leaves out the rows behind the counts."""

    def forward(self, dispatched: imbrex.Dispatched) -> Tensor:
        return super().forward(dispatched)[: int(dispatched.counts_e.sum())]


class Raises(Scale):
    def forward(self, dispatched: imbrex.Dispatched) -> Tensor:
        return dispatched.rows_RD.view(7, 8)


class Wide(Scale):
    def forward(self, dispatched: imbrex.Dispatched) -> Tensor:
        return super().forward(dispatched).double()


@pytest.mark.parametrize("experts", [Scale, Weighs])
def test_other_experts_pass(experts) -> None:
    check_experts(experts(), 8, 3)


@pytest.mark.parametrize(
    ("experts", "says"),
    [
        (Normalises, "rows behind the counts are read|depends on more than itself"),
        (InPlace, "other bits a second time|were changed"),
        (Forgets, "depends on more than itself"),
        (Wide, "come out as torch.float64"),
        (Detaches, r"ragged .*: the gradient of `vector` is wrong: 0 along a direction"),
        (WrongSlope, "the gradient of the rows is wrong"),
        (Short, r"rows, some not counted, leave as"),
        (Raises, r"no rows \(counts \[0, 0, 0\]\): RuntimeError: shape '\[7, 8\]' is invalid"),
    ],
)
def test_experts_that_break_the_contract_are_found(experts, says: str) -> None:
    with pytest.raises(ConformityError, match=says):
        check_experts(experts(), 8, 3)


def test_a_layer_takes_the_callers_experts() -> None:
    config = imbrex.MoEConfig(hidden_size=8, intermediate_size=4, num_experts=3, top_k=2)
    experts = Scale()
    layer = imbrex.MoELayer(config, experts=experts)
    x_TD = torch.randn(5, 8)
    y_TD = layer(x_TD)
    assert layer.routing is not None
    weights_TE = torch.zeros(5, 3).scatter(1, layer.routing.ids_TK, layer.routing.weights_TK)
    assert torch.allclose(y_TD, x_TD * (weights_TE @ experts.vector), atol=1e-6)
    y_TD.sum().backward()
    assert experts.vector.grad is not None
    assert layer.reasons["experts"] == "Scale: given by the caller"
