"""Dispatch and combine of a rank alone on a GPU, in bfloat16: kernels, and nothing asked of the device.

    x_TD ──order_choices, gather_rows──▶ rows_RD ──experts──▶ rows_RD ──sum_rows──▶ y_TD

There is room for T * K rows; how many there are stands in `counts_e`, and nothing reads past them. A token's
rows are summed in float32 in the order of its choices. `crossings` does the same by operators of torch, which
serve every device, dtype and layout, and which a compiler sees.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
from torch import Tensor

from imbrex.contracts import Routing
from imbrex.exchange import ops, plan, rows
from imbrex.exchange.agreement import explain_problem
from imbrex.exchange.geometry import Geometry
from imbrex.exchange.nvlink_fit import DTYPE, unfit_use
from imbrex.kernels import unavailable
from imbrex.kernels.ffn.glue import gather_rows, sum_rows, weigh_rows
from imbrex.kernels.ffn.widths import MULTIPLE
from imbrex.kernels.rows.choices import MOST_EXPERTS, Order, order_choices
from imbrex.observe import Observer
from imbrex.placement import SPLITS
from imbrex.runtime.tracing import traced

STATE = ("choice_R", "position_TK", "ends_e")


@functools.cache
def _unavailable(device: int | None) -> str | None:
    return unavailable(device)


def unfit(geometry: Geometry) -> str | None:
    """None if the kernels serve a rank alone with this geometry, else why not."""
    placement = geometry.placement
    if placement.slots != tuple(range(placement.num_experts)):
        return "experts do not stand in slots of their own numbers"
    if geometry.split not in SPLITS.values():
        return "somebody looks at the counts of every call"
    if geometry.alignment != 1 or geometry.rows_per_slot is not None:
        return "rows are padded"
    if placement.num_experts > MOST_EXPERTS:
        return f"they order choices of at most {MOST_EXPERTS} experts"
    return None if geometry.hidden_size % MULTIPLE == 0 else f"rows are no multiple of {MULTIPLE} values"


class AloneCrossings(ops.Owner):
    """What the operators of an exchange do for calls that `serves` takes; the state of such a call has the
    tensors of `STATE`."""

    def __init__(self, geometry: Geometry, observer: Observer, layer: int) -> None:
        super().__init__()
        self.observer, self.layer, self.geometry = observer, layer, geometry

    @property
    def geometry(self) -> Geometry:
        return self._geometry

    @geometry.setter
    def geometry(self, geometry: Geometry) -> None:
        self._geometry, self.misfit = geometry, unfit(geometry)

    def reason_against(self, dtype: torch.dtype | None) -> str | None:
        """None if tokens of `dtype` on the current GPU are served, else why not."""
        return self.misfit or unfit_use(dtype) or _unavailable(None)

    def serves(self, x_TD: Tensor, routing: Routing) -> bool:
        given = x_TD, routing.ids_TK, routing.weights_TK
        if self.misfit is not None or not x_TD.is_cuda or x_TD.dtype != DTYPE or traced(*given):
            return False
        return _unavailable(x_TD.get_device()) is None

    def run_dispatch(
        self, x_TD: Tensor, weights_TK: Tensor, ids_TK: Tensor, ticket: int
    ) -> tuple[Tensor, Tensor, Tensor, list[Tensor]]:
        (x_TD, token_R), weights_R, counts_e, state = self.dispatch_in_place(x_TD, weights_TK, ids_TK)
        with self.observer.span("dispatch", layer=self.layer):
            _, _, ends_e = state
            rows_RD = gather_rows(x_TD, token_R, ends_e)
        return rows_RD, weights_R, counts_e, state

    def dispatch_in_place(
        self, x_TD: Tensor, weights_TK: Tensor, ids_TK: Tensor
    ) -> tuple[tuple[Tensor, Tensor], Tensor, Tensor, list[Tensor]]:
        """As `run_dispatch`; instead of rows the tokens, and which of them a row is."""
        order = self._order(x_TD, weights_TK, ids_TK)
        state = [order.choice_R, order.position_TK, order.ends_e]
        return (x_TD.contiguous(), order.token_R), order.weights_R, order.counts_e, state

    def _order(self, x_TD: Tensor, weights_TK: Tensor, ids_TK: Tensor) -> Order:
        where, geometry = {"layer": self.layer}, self.geometry
        experts, routing = geometry.placement.num_experts, Routing(ids_TK=ids_TK, weights_TK=weights_TK)
        problem = explain_problem(
            x_TD, routing, geometry.hidden_size, geometry.top_k, experts, x_TD.device.type
        )
        if problem is not None:
            raise ValueError(f"dispatch: on rank 0, {problem}")
        with self.observer.span("plan", **where):
            order = order_choices(ids_TK, weights_TK, experts)
        if self.observer.enabled:
            self.observer.count("expert_load", plan.count_choices(ids_TK, experts), **where)
            self.observer.count("rows", order.counts_e.sum(), **where)
        return order

    def dispatch_again(self, x_TD: Tensor, state: Sequence[Tensor], num_rows: int) -> Tensor:
        """The rows of an earlier dispatch, copied once more."""
        choice_R, position_TK, ends_e = state
        with self.observer.span("dispatch_again", layer=self.layer):
            return gather_rows(x_TD.contiguous(), choice_R, ends_e, position_TK.shape[1])

    def run_dispatch_backward(
        self, d_rows_RD: Tensor, d_weights_R: Tensor, state: Sequence[Tensor], num_tokens: int
    ) -> tuple[Tensor, Tensor]:
        _, position_TK, _ = state
        with self.observer.span("dispatch_backward", layer=self.layer):
            d_x_TD = sum_rows(d_rows_RD.contiguous(), position_TK, None)
            return d_x_TD, rows.pick_scalars(d_weights_R, position_TK)

    def run_combine(
        self,
        rows_RD: Tensor,
        weights_R: Tensor | None,
        addend_TD: Tensor | None,
        state: Sequence[Tensor],
        num_tokens: int,
        ticket: int,
    ) -> Tensor:
        self.begun.pop(ticket, None)
        _, position_TK, _ = state
        with self.observer.span("combine", layer=self.layer):
            weights_TK = None if weights_R is None else rows.pick_scalars(weights_R, position_TK)
            addend_TD = None if addend_TD is None else addend_TD.to(rows_RD.dtype).contiguous()
            return sum_rows(rows_RD.contiguous(), position_TK, weights_TK, addend_TD=addend_TD)

    def run_combine_backward(
        self, d_y_TD: Tensor, rows_RD: Tensor | None, weights_R: Tensor, state: Sequence[Tensor]
    ) -> tuple[Tensor, Tensor]:
        choice_R, position_TK, ends_e = state
        choices, d_y_TD = position_TK.shape[1], d_y_TD.contiguous()
        with self.observer.span("combine_backward", layer=self.layer):
            if rows_RD is None:
                return gather_rows(d_y_TD, choice_R, ends_e, choices), weights_R.new_empty(0)
            weights_TK = rows.pick_scalars(weights_R, position_TK)
            d_rows_RD, d_weights_TK = weigh_rows(
                d_y_TD, rows_RD.contiguous(), weights_TK, ends_e, choice_R, choices
            )
            assert d_weights_TK is not None
            # rows past the last have no choice
            at_R = choice_R.clamp(0, max(choice_R.shape[0] - 1, 0))
            return d_rows_RD, d_weights_TK.flatten()[at_R]
