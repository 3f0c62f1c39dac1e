"""The dispatcher of one rank alone on a GPU, in bfloat16: kernels only, and no host synchronisation.

    x_TD ──order_choices, gather_rows──▶ rows_RD ──experts──▶ rows_RD ──sum_rows──▶ y_TD

For a small batch `order_few` orders and gathers in one launch, and the experts' first product can begin
before it ends. `rows_RD` has room for T * K rows; `counts_e` says how many there are, and nothing reads past
them. A token's rows are summed in float32, in the order of its choices. T * K is a size that a compiler
knows, so compiled code can capture the crossings in a CUDA graph.

`BytesDispatcher` does the same by torch's operators, for every device, dtype and layout.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from imbrex.contracts import (
    Addend,
    Arrived,
    Crossing,
    Dispatcher,
    Experts,
    Geometry,
    Listener,
    Routing,
    RowForm,
)
from imbrex.exchange import plan, rows
from imbrex.exchange.agreement import explain, find_problem
from imbrex.exchange.alone_recorded import FewRecorder, adds, serves_few
from imbrex.exchange.dispatcher import DispatcherBase, nothing_to_move
from imbrex.exchange.layer_op import layer_alone
from imbrex.exchange.nvlink_fit import DTYPE, why_not_dtype
from imbrex.experts import weights_of_kernels
from imbrex.kernels.ffn.both import ended_before_last
from imbrex.kernels.ffn.glue import COUNTERS, Groups, gather_rows, sum_rows, weigh_rows
from imbrex.kernels.ffn.widths import MULTIPLE
from imbrex.kernels.rows.choices import (
    MOST_EXPERTS,
    MOST_FEW,
    Order,
    most_ordered,
    order_choices,
    order_few,
    why_not_ordered,
)
from imbrex.placement import SPLITS
from imbrex.runtime.gradients import looks_for_nan
from imbrex.runtime.tracing import differentiated, plain, traced

STATE = ("choice_R", "position_TK", "ends_e")
"""The tensors of a handle's state: the choice of every row, int64, an index into [T, K] flattened; the row of
every choice, int64, -1 if it was dropped; and the end of every expert's rows, int32."""


def why_not_alone(geometry: Geometry) -> str | None:
    """Why the kernels cannot serve this geometry, or `None`."""
    placement = geometry.placement
    if placement.slots != tuple(range(placement.num_experts)):
        return "experts are not in the slots of their own numbers"
    if geometry.split not in SPLITS.values():
        return "a split of the caller's reads the counts of every call"
    if geometry.alignment != 1 or geometry.rows_per_slot is not None:
        return "rows are padded"
    if placement.num_experts > MOST_EXPERTS:
        return f"they order choices of at most {MOST_EXPERTS} experts"
    return None if geometry.hidden_size % MULTIPLE == 0 else f"rows are no multiple of {MULTIPLE} values"


class AloneDispatcher(DispatcherBase):
    """Serves calls that the kernels can, and passes the others to `general`, a dispatcher of the same
    geometry. A handle's state has the tensors of `STATE`."""

    dtypes: Sequence[torch.dtype] = (DTYPE,)
    room_for_all = True

    def __init__(self, geometry: Geometry, general: Dispatcher, observer: Listener, layer: int) -> None:
        super().__init__(geometry, observer, layer)
        self.general = general
        self.few = FewRecorder()

    @property
    def family(self) -> Sequence[Any]:
        return self, self.general

    def relocate(self, geometry: Geometry) -> None:
        super().relocate(geometry)
        self.why_not_geometry = why_not_alone(geometry)

    def why_not_dtype(self, dtype: torch.dtype | None) -> str | None:
        """Why the kernels cannot serve tokens of `dtype` on the current GPU, or `None`."""
        return (
            self.why_not_geometry
            or why_not_dtype(dtype)
            or why_not_ordered(self.geometry.placement.num_experts)
        )

    def for_call(self, x_TD: Tensor, routing: Routing) -> Dispatcher:
        return self if self.serves(x_TD) else self.general

    def serves(self, x_TD: Tensor) -> bool:
        """Whether the kernels can serve a call of these tokens; not where autograd looks for NaN, since
        dropped choices leave rows that nobody writes."""
        return self.fits(x_TD) and not looks_for_nan()

    def fits(self, x_TD: Tensor) -> bool:
        """Whether there are kernels for these tokens on their device."""
        if self.why_not_geometry is not None or not x_TD.is_cuda or x_TD.dtype != DTYPE or not plain(x_TD):
            return False
        return self.geometry.placement.num_experts <= most_ordered(x_TD.get_device())

    def run_whole(
        self, x_TD: Tensor, routing: Routing, experts: Experts, addend: Callable[[], Tensor] | None
    ) -> Tensor | None:
        """Run a call without gradients whole: of few choices from a record (`FewRecorder`), and while it is
        compiled as one operator (`layer_alone`). `None` otherwise: the caller then runs the single steps."""
        compiling = torch.compiler.is_compiling()
        if torch.is_grad_enabled() if compiling else not _is_few(routing.weights_TK):
            return None
        if self.observer.enabled or not self.serves(x_TD):
            return None
        own = weights_of_kernels(experts)
        if own is None or any(weight.dtype != x_TD.dtype for weight in own[:2]):
            return None
        weights, one_launch = own[:2], own[2]
        if compiling:
            added_TD = None if addend is None else addend()
            return layer_alone(x_TD, routing, added_TD, weights, self.key, one_launch)
        tokens = x_TD, routing.ids_TK, routing.weights_TK
        if not serves_few(tokens, weights):
            return None
        self.agree([(x_TD, routing)])
        added_TD = None if addend is None else addend()
        return self.few.run(tokens, weights, one_launch, added_TD) if adds(added_TD, x_TD) else None

    def beside(self, chunks: int, *, in_turn: bool = False) -> Dispatcher:
        """The dispatcher for chunks is `general`: on one rank nothing moves, so its kernels gain nothing
        from chunks."""
        return self.general.beside(chunks)

    def why_not_form(self, form: RowForm) -> str | None:
        return None if form is RowForm.INDEXED else self.general.why_not_form(form)

    def form_of(self, forms: Sequence[RowForm], x_TD: Tensor, weights_TK: Tensor) -> RowForm:
        """Tokens with an index, if the call has no gradients and is not traced, because then no rows need to
        be written. A small batch comes as rows, which `order_few` writes in the same launch; but as tokens
        if fp8 experts want those before rows: they quantise what they get, and tokens are fewer."""
        inputs = x_TD, weights_TK
        if RowForm.INDEXED not in forms or differentiated(*inputs) or traced(*inputs):
            return RowForm.ROWS
        rows_first = RowForm.FP8 not in forms or forms.index(RowForm.ROWS) < forms.index(RowForm.INDEXED)
        return RowForm.ROWS if rows_first and _is_few(weights_TK) else RowForm.INDEXED

    def check_in(self, x_TD: Tensor, routing: Routing, *, before: int = 0) -> None:
        self.general.check_in(x_TD, routing)

    def agree(self, parts: Sequence[tuple[Tensor, Routing]], form: RowForm = RowForm.ROWS) -> list[Tensor]:
        """The plans are the ids themselves: there is no other rank to ask. Raises ValueError if an input is
        wrong."""
        for x_TD, routing in parts:
            problem = explain(find_problem(x_TD, routing, self.geometry, self.place))
            if problem is not None:
                raise ValueError(f"dispatch: on rank 0, {problem}")
        return [routing.ids_TK for _, routing in parts]

    def dispatch(
        self, plan: Tensor, x_TD: Tensor, weights_TK: Tensor, form: RowForm = RowForm.ROWS
    ) -> Crossing[Arrived]:
        few = form is RowForm.ROWS and _is_few(weights_TK)
        read = self._read_few if few else self._read_rows
        return Crossing(nothing_to_move, lambda _: read(plan, x_TD.contiguous(), weights_TK, form))

    def _read_rows(self, ids_TK: Tensor, x_TD: Tensor, weights_TK: Tensor, form: RowForm) -> Arrived:
        with self.observer.span("plan", layer=self.layer):
            order: Order = order_choices(ids_TK, weights_TK, self.geometry.placement.num_experts)
        self._count(ids_TK, order.counts_e)
        state = [order.choice_R, order.position_TK, order.ends_e]
        known = order.weights_R, order.counts_e, state
        if form is RowForm.INDEXED:
            return Arrived(x_TD, *known, order.token_R)
        with self.observer.span("dispatch", layer=self.layer):
            return Arrived(gather_rows(x_TD, order.token_R, order.ends_e), *known)

    def _read_few(self, ids_TK: Tensor, x_TD: Tensor, weights_TK: Tensor, form: RowForm) -> Arrived:
        with self.observer.span("dispatch", layer=self.layer):
            few = order_few(x_TD, ids_TK, weights_TK, self.geometry.placement.num_experts, COUNTERS)
        self._count(ids_TK, few.counts_e)
        groups = Groups(few.plan, expected=ids_TK.numel(), hits=few.hits)
        state = [few.choice_R, few.position_TK, groups.ends_e]
        return Arrived(few.rows_RD, few.weights_R, few.counts_e, state, groups)

    def _count(self, ids_TK: Tensor, counts_e: Tensor) -> None:
        where, experts = {"layer": self.layer}, self.geometry.placement.num_experts
        if self.observer.enabled:
            self.observer.count("expert_load", plan.count_choices(ids_TK, experts), **where)
            self.observer.count("rows", counts_e.sum(), **where)

    def redispatch(self, x_TD: Tensor, state: Sequence[Tensor], num_rows: int) -> Tensor:
        choice_R, position_TK, ends_e = state
        with self.observer.span("dispatch_again", layer=self.layer):
            return gather_rows(x_TD.contiguous(), choice_R, ends_e, position_TK.shape[1])

    def fake_state(self, ids_TK: Tensor, rows: Any, size: Callable[[], Any]) -> list[Tensor]:
        ends_e = ids_TK.new_empty(len(self.geometry.local_slots), dtype=torch.int32)
        return [ids_TK.new_empty(rows), torch.empty_like(ids_TK), ends_e]

    def dispatch_backward(
        self,
        d_rows_RD: Tensor,
        d_weights_R: Tensor,
        state: Sequence[Tensor],
        num_tokens: int,
        out: tuple[Tensor, Tensor] | None = None,
    ) -> Crossing[tuple[Tensor, Tensor]]:
        def read(_: object) -> tuple[Tensor, Tensor]:
            _, position_TK, _ = state
            with self.observer.span("dispatch_backward", layer=self.layer):
                d_x_TD = sum_rows(d_rows_RD.contiguous(), position_TK, None)
                return _into(out, (d_x_TD, rows.pick_scalars(d_weights_R, position_TK)))

        return Crossing(nothing_to_move, read)

    def combine(
        self,
        rows_RD: Tensor,
        weights_R: Tensor | None,
        state: Sequence[Tensor],
        num_tokens: int,
        addend: Addend | None = None,
        out_TD: Tensor | None = None,
    ) -> Crossing[Tensor]:
        def read(_: object) -> Tensor:
            _, position_TK, _ = state
            with self.observer.span("combine", layer=self.layer):
                weights_TK = None if weights_R is None else rows.pick_scalars(weights_R, position_TK)
                added_TD = None if addend is None else addend()
                added_TD = None if added_TD is None else added_TD.to(rows_RD.dtype).contiguous()
                sums = {"addend_TD": added_TD, "early": ended_before_last(rows_RD.get_device())}
                y_TD = sum_rows(rows_RD.contiguous(), position_TK, weights_TK, **sums)
                return y_TD if out_TD is None else out_TD.copy_(y_TD)

        return Crossing(nothing_to_move, read)

    def combine_backward(
        self, d_y_TD: Tensor, rows_RD: Tensor | None, weights_R: Tensor, state: Sequence[Tensor]
    ) -> Crossing[tuple[Tensor, Tensor]]:
        inputs = rows_RD, weights_R, state
        return Crossing(nothing_to_move, lambda _: self._weigh(d_y_TD.contiguous(), *inputs))

    def _weigh(
        self, d_y_TD: Tensor, rows_RD: Tensor | None, weights_R: Tensor, state: Sequence[Tensor]
    ) -> tuple[Tensor, Tensor]:
        choice_R, position_TK, ends_e = state
        choices = position_TK.shape[1]
        with self.observer.span("combine_backward", layer=self.layer):
            if rows_RD is None:
                return gather_rows(d_y_TD, choice_R, ends_e, choices), weights_R.new_empty(0)
            weights_TK = rows.pick_scalars(weights_R, position_TK)
            d_rows_RD, d_weights_TK = weigh_rows(
                d_y_TD, rows_RD.contiguous(), weights_TK, ends_e, choice_R, choices
            )
            assert d_weights_TK is not None
            # Rows after the last have no choice: any index in range will do.
            safe_R = choice_R.clamp(0, max(choice_R.shape[0] - 1, 0))
            return d_rows_RD, d_weights_TK.flatten()[safe_R]


def _is_few(weights_TK: Tensor) -> bool:
    """Whether one launch of `order_few` can order and gather these choices."""
    return 0 < weights_TK.numel() <= MOST_FEW


def _into(out: tuple[Tensor, Tensor] | None, values: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    return values if out is None else (out[0].copy_(values[0]), out[1].copy_(values[1]))
