"""The dispatcher of NVLink kernels. The host waits for the GPU only where that saves much memory.

Dispatch routes on the device and pulls tokens straight into expert-major rows. Combine sums a token's rows on
each rank, and these sums at home. The gradient of combine pulls dy over the same routing. The gradient of
dispatch is a combine of dx; the gradients of the gate weights go home with it, four bytes a choice.
Rows have the worst-case size. In large batches whose rows a backward keeps, they have the exact one
(`counts_first`). `counts_e` says how many rows there are, and nothing reads past them.

A move is one whole kernel call: nothing is written before it, and little is read after it. Serially it runs
in the caller's stream. Beside experts it runs in a stream of its own, one for all layers of a transport,
because a GPU runs one kernel at a time that waits for peers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from torch import Tensor

from imbrex.contracts import (
    Addend,
    Arrived,
    Codec,
    Crossing,
    Experts,
    Geometry,
    Listener,
    Pending,
    Roles,
    Routing,
    RowForm,
    Wire,
)
from imbrex.exchange import plan
from imbrex.exchange.dispatcher import nothing_to_move
from imbrex.exchange.nvlink_fit import FewRows, Part, is_coded, row_capacity_for
from imbrex.exchange.nvlink_meeting import NvlinkMeeting
from imbrex.exchange.recorded import Recorder
from imbrex.kernels.exchange.exchange import NvlinkExchange, Routed
from imbrex.kernels.exchange.groups import empty_groups
from imbrex.kernels.exchange.launches import Sums
from imbrex.kernels.exchange.lease import Staged
from imbrex.kernels.ffn.ffn import LeftProduct
from imbrex.kernels.ffn.glue import COUNTERS, Groups
from imbrex.kernels.fused.down_home import cut_of, down_and_sums, pieces_of, why_not_sums
from imbrex.kernels.fused.home import computed, home_beside_gradients, why_not_home
from imbrex.kernels.fused.others_first import others_first, why_not_first
from imbrex.kernels.fused.rows_out import bring_rows
from imbrex.kernels.rows.expand import expand_fp8, expand_fp8_rows
from imbrex.kernels.rows.weights import spread, weigh
from imbrex.runtime.deferred import Deferral
from imbrex.runtime.gradients import looks_for_nan
from imbrex.transport.collective import Done
from imbrex.transport.nvlink import Nvlink

_WIRES = {"fp8": "fp8"}
"""How sums cross, by the name of a codec; else as bfloat16."""


class NvlinkDispatcher(NvlinkMeeting):
    """Moves rows by kernels that read and write the peers' memory. Tokens are bfloat16.

    sms, sms_home: multiprocessors for its moves, and for those that take the tokens' gradients home. start:
    begins a move in a stream beside the caller's; `None`: moves run in the caller's stream.
    """

    def __init__(
        self, geometry: Geometry, transport: Nvlink, wire: Wire, observer: Listener, layer: int
    ) -> None:
        self._writes_fp8 = is_coded(wire.dispatch)
        self.sms = self.sms_home = transport.sms
        self.start: Callable[[Callable[[], Any]], Pending] | None = None
        self.inner, self.recorder = 0, Recorder(self)
        super().__init__(geometry, transport, wire, observer, layer)

    def relocate(self, geometry: Geometry) -> None:
        super().relocate(geometry)
        self.recorder.forget()

    def count_into(self, tally_WS: Tensor | None) -> None:
        super().count_into(tally_WS)
        self.recorder.forget()

    def beside(self, chunks: int, *, in_turn: bool = False) -> NvlinkDispatcher:
        """A dispatcher that moves rows in a stream beside the caller's, on few multiprocessors. With one
        chunk only the last move has something beside it, the gradients of weights; others keep theirs."""
        other = self._copy()
        other.start, other.sms_home = self.transport.line.start, self.transport.sms_beside
        other.sms = self.transport.sms if chunks == 1 else self.transport.sms_beside
        return other

    def fusing(self, roles: Roles | None = None, inner: int = 0) -> NvlinkDispatcher:
        other = self._copy()
        other.fuses, other.inner, other.roles = True, inner, roles or self.roles
        if other.roles.stage is not None:
            other.sms = replace(self.sms, stage=other.roles.stage)
        return other

    def _copy(self) -> NvlinkDispatcher:
        """A shallow copy, by half the calls of `copy.copy`: fused calls have one each."""
        other = object.__new__(type(self))
        vars(other).update(vars(self))
        return other

    def run_whole(
        self, x_TD: Tensor, routing: Routing, experts: Experts, addend: Callable[[], Tensor] | None
    ) -> Tensor | None:
        return self.recorder.run(self, x_TD, routing, experts, addend)

    def about_whole(self, experts: object, schedule: str) -> str:
        return self.recorder.about_one_kernel(experts, schedule)

    def why_not_form(self, form: RowForm) -> str | None:
        return None if form is RowForm.UNDER_WAY else super().why_not_form(form)

    def form_of(self, forms: Sequence[RowForm], x_TD: Tensor, weights_TK: Tensor) -> RowForm:
        if self.fuses and RowForm.UNDER_WAY in forms:
            return RowForm.UNDER_WAY
        return super().form_of(forms, x_TD, weights_TK)

    def dispatch(
        self, plan: Part, x_TD: Tensor, weights_TK: Tensor, form: RowForm = RowForm.ROWS
    ) -> Crossing[Arrived]:
        cut = plan.backward and looks_for_nan() and not self.transport.capturing
        mean_rows = plan.max_tokens * self.geometry.top_k * self.geometry.tensor_parallel

        def read(result: tuple[Any, Routed]) -> Arrived:
            arrived, routed = result
            assert routed.words_TC is not None
            groups, beside, expected, staged = None, None, 0, None
            if isinstance(arrived, FewRows):
                rows_RD, groups, expected = arrived
            elif form is RowForm.FP8:
                rows_RD, beside = arrived
            elif isinstance(arrived, Staged):
                rows_RD, staged = arrived.rows, arrived
            else:
                rows_RD = arrived
            weights_R, counts_e, plan, hits = groups or spread(routed, rows_RD.shape[0], self._slots)
            if cut:
                there = slice(self._count_rows(routed))
                rows_RD, weights_R = rows_RD[there], weights_R[there]
            if staged is not None:
                looks = self.roles.first is not None and not is_coded(self.wire.combine)
                own_e2 = plan.new_empty(self._slots, 2) if looks else None
                more = {"plan": plan, "own_e2": own_e2, "mean_rows": mean_rows}
                beside = replace(staged, movers=self.roles.rows, **more)
            elif beside is None:
                beside = Groups(plan, expected=expected, mean_rows=mean_rows, hits=hits)
            return Arrived(rows_RD, weights_R, counts_e, [routed.words_TC], beside)

        return self._crossing(partial(self._send, plan, x_TD, weights_TK, form), read)

    def _crossing(self, work: Callable[[], Any], read: Callable[[Any], Any]) -> Crossing[Any]:
        return Crossing(partial(_at_once if self.start is None else self.start, work), read)

    def _send(self, part: Part, x_TD: Tensor, weights_TK: Tensor, form: RowForm) -> tuple[Any, Routed]:
        """Run the kernels of a dispatch: the rows, for `read` of `dispatch` to take apart, and their routing.
        Rows of small batches are never `UNDER_WAY`, and where all ranks' experts take fp8 they come as they
        are: the experts write the codec's bytes themselves, in less time than it takes here. Ranks that fuse
        all stage; one on which somebody reads rows before their product brings them before."""
        kernels = self.kernels_for(part)
        if self.observer.enabled:
            load_E = plan.count_choices(part.ids_TK, self.geometry.placement.num_experts)
            self.observer.count("expert_load", load_E, layer=self.layer)
        x_TD = x_TD.contiguous()
        inputs = x_TD, self._choices(part.ids_TK), weights_TK.contiguous()
        room, few = row_capacity_for(kernels.shape, part.max_tokens), part.is_small
        stages, exact = self.fuses and not few, self.counts_first(part, room)
        if exact and not (stages or few or self._writes_fp8):
            return self._send_exactly(kernels, *inputs)
        sms, choosing = self.sms, self.choosing
        with self.observer.span("dispatch", layer=self.layer):
            if stages:
                staged, routed = self._stage(kernels, inputs, room)
                if form is RowForm.UNDER_WAY:
                    return staged, routed
                return bring_rows(staged, sms.stage, load=self.transport.load), routed
            if self._writes_fp8 and not (few and part.in_fp8):
                lease, routed = kernels.dispatch(*inputs, sms.push, quantise=True, **choosing)
                num_rows = self._count_rows(routed) if exact else room
                expand = expand_fp8_rows if form is RowForm.FP8 else expand_fp8
                return self._expand(lease.rows, x_TD, routed, num_rows, expand), routed
            if few:
                groups = empty_groups(1, room, self._slots, COUNTERS, x_TD.device)
                rows_1RD, routed = kernels.dispatch_small(*inputs, sms.small, groups=groups, **choosing)
                return FewRows(rows_1RD[0, :room], groups, kernels.shape.mean_rows(part.max_tokens)), routed
            rows_RD = x_TD.new_empty(room, x_TD.shape[1])
            return kernels.dispatch_expert(*inputs, sms.dispatch, out=rows_RD, **choosing)

    def _send_exactly(
        self, kernels: NvlinkExchange, x_TD: Tensor, ids_TK: Tensor, weights_TK: Tensor
    ) -> tuple[Tensor, Routed]:
        """Move exactly as many rows as there are; the host hears their number first."""
        with self.observer.span("plan", layer=self.layer):
            routed = kernels.route(ids_TK, weights_TK, **self.choosing)
        with self.observer.span("dispatch", layer=self.layer):
            return self._move_out(x_TD, routed, self._count_rows(routed), self.wire.dispatch), routed

    def _stage(
        self, kernels: NvlinkExchange, inputs: tuple[Tensor, Tensor, Tensor], worst: int
    ) -> tuple[Staged, Routed]:
        """Make tokens ready for the kernel that brings rows. The host waits to hear how many rows there are
        only if `exact_rows` asks for that; else there is room for `worst`."""
        (x_TD, *_), stage = inputs, self.sms.stage
        how = partial(kernels.stage, *inputs, stage, quantise=self._writes_fp8, **self.choosing)
        if not self.transport.exact_rows or self.transport.capturing:
            return how(out=x_TD.new_empty(worst, x_TD.shape[1]))
        no_memory = x_TD.new_empty(1, x_TD.shape[1]).expand(worst, -1)
        staged, routed = how(out=no_memory)
        return replace(staged, rows=x_TD.new_empty(self._count_rows(routed), x_TD.shape[1])), routed

    def _move_out(self, x_TD: Tensor, routed: Routed, num_rows: int, codec: Codec) -> Tensor:
        """Move tokens along a routing that is known: expert-major rows [num_rows, D]."""
        kernels = self.kernels_of(routed.max_tokens)
        if not is_coded(codec):
            rows_RD = x_TD.new_empty(num_rows, x_TD.shape[1])
            return kernels.pull(x_TD, routed, num_sms=self.sms.dispatch, out=rows_RD)
        lease = kernels.push(x_TD, routed, num_sms=self.sms.push, quantise=True)
        return self._expand(lease.rows, x_TD, routed, num_rows)

    def _expand(
        self,
        coded_1MB: Tensor,
        x_TD: Tensor,
        routed: Routed,
        num_rows: int,
        expand: Callable[..., Any] = expand_fp8,
    ) -> Any:
        return expand(coded_1MB, x_TD, routed, self.geometry.rank, num_rows, load=self.transport.load)

    def combine(
        self,
        rows_RD: Tensor,
        weights_R: Tensor | None,
        state: Sequence[Tensor],
        num_tokens: int,
        addend: Addend | None = None,
        out_TD: Tensor | None = None,
    ) -> Crossing[Tensor]:
        def work() -> Tensor:
            added_TD = None if addend is None else addend()
            y_TD = rows_RD.new_empty(num_tokens, rows_RD.shape[1]) if out_TD is None else out_TD
            with self.observer.span("combine", layer=self.layer):
                codec, weighted = self.wire.combine, weights_R is not None
                pieces = self._pieces(self.read_state(state)) if self.fuses else None
                more = {"addend": added_TD, "weighted": weighted, "pieces": pieces}
                self._sum(rows_RD, state, y_TD, codec, **more)
            return y_TD

        if self.start is None:  # the addend may not be there before `read`
            return Crossing(nothing_to_move, lambda _: work())
        return self._crossing(work, _as_it_is)

    def why_not_sums(self, tokens: int) -> str | None:
        """Why sums do not go home beside the experts' last product, or `None`: the same on every rank.
        tokens: those of a rank for which the kernels have room."""
        if is_coded(self.wire.combine):
            return "sums cross as fp8"
        geometry = self.geometry
        return why_not_sums(tokens, geometry.hidden_size, self.inner, geometry.top_k, self.world_size)

    def _pieces(self, routed: Routed) -> tuple[int, int, int] | None:
        """The pieces in which a fused forward sums, the same on all ranks. A rank whose experts leave no
        product, because a hook reads the result, sums in them after the product."""
        if self.why_not_sums(routed.max_tokens) is not None:
            return None
        return pieces_of(cut_of(self.geometry.hidden_size))

    def combine_beside(
        self,
        left: Sequence[Callable[[], Any]],
        rows_RD: Tensor,
        weights_R: Tensor | None,
        state: Sequence[Tensor],
        num_tokens: int,
        addend: Addend | None,
        out_TD: Tensor,
    ) -> Crossing[Tensor]:
        """`combine` and, in the same launch, the product that makes `rows_RD`, if the experts have left it in
        `left`: the same bits. In the caller's stream, so no move may be under way in another one."""
        routed = self.read_state(state)
        single = left[0] if len(left) == 1 else None
        single = single if isinstance(single, LeftProduct) and not single.is_empty else None
        in_parts = self._pieces(routed) is not None
        # Of the second way ranks need not agree.
        if single is None or not (in_parts or why_not_first(single) is None):
            for product in left:
                product()
            return self.combine(rows_RD, weights_R, state, num_tokens, addend, out_TD)

        def work() -> Tensor:
            added_TD = None if addend is None else addend()
            added_TD = None if added_TD is None else added_TD.contiguous()
            with self.observer.span("combine", layer=self.layer):
                more = {"weighted": weights_R is not None, "addend": added_TD}
                launch = down_and_sums if in_parts else partial(others_first, first=self.roles.first or 0)
                what = self.kernels_of(routed.max_tokens), rows_RD.contiguous(), routed
                launch(*what, [single], out_TD, **more)
            return out_TD

        return Crossing(nothing_to_move, lambda _: work())

    def combine_backward(
        self, d_y_TD: Tensor, rows_RD: Tensor | None, weights_R: Tensor, state: Sequence[Tensor]
    ) -> Crossing[tuple[Tensor, Tensor]]:
        def work() -> Tensor:
            with self.observer.span("combine_backward", layer=self.layer):
                inputs = d_y_TD.contiguous(), self.read_state(state), weights_R.shape[0]
                if self.fuses and is_coded(self.wire.combine_backward):  # peers may bring theirs
                    return bring_rows(self._stage_again(*inputs), self.sms.stage, load=self.transport.load)
                return self._move_out(*inputs, self.wire.combine_backward)

        return self._crossing(work, lambda d_y_RD: self._weigh(d_y_RD, rows_RD, weights_R, state))

    def why_not_dy_beside(self) -> str | None:
        """Why `combine_backward_beside` moves rows before their product starts, or `None`."""
        if not self.fuses:
            return "nothing was fused in the forward"
        if self.roles.dy == 0:
            return "the roles say so"
        return None

    def combine_backward_beside(
        self, d_y_TD: Tensor, weights_R: Tensor, state: Sequence[Tensor]
    ) -> Crossing[tuple[Tensor, Staged | None]]:
        """Gradients of rows that were weighted before, and the `Staged` by which the kernel of their product
        brings them: `None` if they are there already, for the reason that `why_not_dy_beside` gives."""
        rows = weights_R.shape[0]
        if self.why_not_dy_beside() is not None or not rows:
            moved = self.combine_backward(d_y_TD, None, weights_R, state)
            return Crossing(moved.move, lambda received: (moved.read(received)[0], None))

        def work() -> tuple[Tensor, Staged]:
            with self.observer.span("combine_backward", layer=self.layer):
                staged = self._stage_again(d_y_TD.contiguous(), self.read_state(state), rows)
            return staged.rows, replace(staged, movers=self.roles.rows)

        return Crossing(partial(_at_once, work), _as_it_is)

    def _stage_again(self, d_y_TD: Tensor, routed: Routed, rows: int) -> Staged:
        """Put dy where peers can read it, for a kernel that brings it to this many rows."""
        out, coded = d_y_TD.new_empty(rows, d_y_TD.shape[1]), is_coded(self.wire.combine_backward)
        tokens = d_y_TD, routed, self.sms.stage
        return self.kernels_of(routed.max_tokens).stage_again(*tokens, out=out, quantise=coded)

    def dispatch_backward(
        self,
        d_rows_RD: Tensor,
        d_weights_R: Tensor,
        state: Sequence[Tensor],
        num_tokens: int,
        out: tuple[Tensor, Tensor] | None = None,
    ) -> Crossing[tuple[Tensor, Tensor]]:
        def work() -> tuple[Tensor, Tensor]:
            d_x_TD, d_weights_TK = out or (
                d_rows_RD.new_empty(num_tokens, d_rows_RD.shape[1]),
                d_weights_R.new_empty(num_tokens, self.geometry.top_k),
            )
            with self.observer.span("dispatch_backward", layer=self.layer):
                values, codec = (d_weights_R.contiguous(), d_weights_TK), self.wire.dispatch_backward
                self._sum(d_rows_RD, state, d_x_TD, codec, weighted=False, values=values)
            return d_x_TD, d_weights_TK

        return self._crossing(work, _as_it_is)

    def dispatch_backward_beside(
        self,
        left: Deferral,
        d_rows_RD: Tensor,
        d_weights_R: Tensor,
        state: Sequence[Tensor],
        num_tokens: int,
        out: tuple[Tensor, Tensor],
    ) -> Crossing[tuple[Tensor, Tensor]]:
        """`dispatch_backward` and, in the same launch, the weights' gradients that the experts have left in
        `left`, which then holds the results: the same bits. If `why_not_home` gives a reason, `left` stays as
        it is. In the caller's stream, as `combine_beside`."""
        products = left.take()
        gradients: list[Any] = [gradient for _, gradient in products]
        if why_not_home(gradients) is not None:
            for product in products:
                left.add(*product)
            return self.dispatch_backward(d_rows_RD, d_weights_R, state, num_tokens, out)

        def work() -> tuple[Tensor, Tensor]:
            routed, (d_x_TD, d_weights_TK) = self.read_state(state), out
            values, wire = (d_weights_R.contiguous(), d_weights_TK), self.wire.dispatch_backward.name
            sums: Sums = {"values": values, "wire": _WIRES.get(wire, "bf16")}
            first = {} if self.roles.sums is None else {"first_blocks": self.roles.sums}
            with self.observer.span("dispatch_backward", layer=self.layer):
                rows_1RD, kernels = d_rows_RD.contiguous()[None], self.kernels_of(routed.max_tokens)
                what = kernels, rows_1RD, routed, sums, d_x_TD, [(*gradients,)]
                (results,) = home_beside_gradients(*what, **first)
            for (weight, _), gradient, result in zip(products, gradients, results, strict=True):
                left.add(weight, computed(gradient, result))
            return out

        return Crossing(partial(_at_once, work), _as_it_is)

    def redispatch(self, x_TD: Tensor, state: Sequence[Tensor], num_rows: int) -> Tensor:
        with self.observer.span("dispatch_again", layer=self.layer):
            return self._move_out(x_TD.contiguous(), self.read_state(state), num_rows, self.wire.dispatch)

    def _weigh(
        self, d_y_RD: Tensor, rows_RD: Tensor | None, weights_R: Tensor, state: Sequence[Tensor]
    ) -> tuple[Tensor, Tensor]:
        """Gradients of the rows and of their weights. rows_RD: `None` if they were weighted before."""
        if rows_RD is None:
            return d_y_RD, weights_R.new_empty(0)
        with self.observer.span("combine_backward", layer=self.layer):
            return weigh(d_y_RD, rows_RD, weights_R, self.read_state(state))

    def _sum(
        self,
        rows_RD: Tensor,
        state: Sequence[Tensor],
        out_TD: Tensor,
        codec: Codec,
        *,
        weighted: bool,
        addend: Tensor | None = None,
        values: tuple[Tensor, Tensor] | None = None,
        pieces: tuple[int, int, int] | None = None,
    ) -> None:
        """Sum the rows of every token, and the addend, into `out_TD`, which is contiguous. values: numbers of
        rows that go home with a gradient, and where to."""
        routed, sms = self.read_state(state), self.sms if values is None else self.sms_home
        self.kernels_of(routed.max_tokens).combine(
            rows_RD.contiguous(),
            routed,
            weighted=weighted,
            addend=None if addend is None else addend.contiguous(),
            num_sms=sms.combine,
            out=out_TD,
            values=values,
            wire=_WIRES.get(codec.name, "bf16"),
            pieces=pieces,
        )


def _at_once(work: Callable[[], Any]) -> Pending:
    return Done(work())


def _as_it_is(value: Any) -> Any:
    return value
