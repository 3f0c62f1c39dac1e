"""How far sums that crossed the wire may be from exact ones."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from imbrex.contracts import Plan
    from tests.emulated.scenario import Case, Inputs


def check_against_float64(
    case: Case, plans: list[Plan], inputs: Inputs, rows_WRD: list[Tensor], weighted: bool, y_WTD: Tensor
) -> None:
    """Within c 2^-9 of the partial sums' sizes: half a step of bfloat16 is at most 2^-8 of a value, once for
    the partial sums and once for a result that is rounded; and a little for float32."""
    times = 4.1 if y_WTD.dtype == torch.bfloat16 else 2.1
    for home, plan in enumerate(plans):
        gates_TK = inputs.weights_WTK[home, : case.tokens[home]].cpu().double()
        exact_TD = torch.zeros(case.tokens[home], case.width, dtype=torch.float64)
        sizes_TD = torch.zeros_like(exact_TD)
        for rank in range(case.ranks):
            low, high = case.slots_of(rank)
            partial_TD = torch.zeros_like(exact_TD)
            for k in range(case.choices):
                mine = (plan.slot_TK[:, k] >= low) & (plan.slot_TK[:, k] < high)
                rows = rows_WRD[rank][plan.position_TK[mine, k]].double()
                partial_TD[mine] += (gates_TK[mine, k, None] if weighted else 1.0) * rows
            exact_TD += partial_TD
            sizes_TD += partial_TD.abs()
        error_TD = (y_WTD[home, : case.tokens[home]].double() - exact_TD).abs()
        assert bool((error_TD <= times * 2.0**-9 * sizes_TD + 1e-6).all())
