"""The four crossings over NVLink: `imbrex.crossings`, by kernels, without a host synchronisation.

Dispatch routes on the device and pulls tokens straight into expert-major rows; combine sums a token's rows on
each rank, and the sums at home. The gradient of combine pulls dy over the same routing, that of dispatch is a
combine of dx; the gate weights' gradients, four bytes a choice, go home in one all-to-all of equal pieces.
Rows have the worst-case size; how many there are stands in `counts_e`, and nothing reads past them.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from imbrex import ops, plan
from imbrex.contracts import Routing, Wire
from imbrex.crossings import Geometry
from imbrex.handshake import PROBLEMS, find_problem
from imbrex.kernels.exchange import NvlinkExchange, Routed
from imbrex.observe import Observer
from imbrex.placement import split_evenly
from imbrex.transport.nvlink import MOST_CHOICES, ROW_MULTIPLE, Nvlink

DTYPE = torch.bfloat16


def unfit(geometry: Geometry, wire: Wire) -> str | None:
    """None if the kernels serve this exchange, else why not."""
    codecs = wire.dispatch, wire.combine, wire.dispatch_backward, wire.combine_backward
    if geometry.tensor_parallel != 1:
        return "experts are split over tensor ranks"
    if any(codec.name != "identity" for codec in codecs):
        return "rows are encoded"
    if geometry.split is not split_evenly and geometry.placement.has_replicas:
        return "its kernels split replicas evenly, and another split was asked for"
    if geometry.rows_per_slot is not None or geometry.alignment != 1:
        return "rows are padded"
    if geometry.hidden_size * DTYPE.itemsize % ROW_MULTIPLE or geometry.top_k > MOST_CHOICES:
        return f"rows must be multiples of {ROW_MULTIPLE} bytes, choices at most {MOST_CHOICES}"
    return None


class NvlinkCrossings:
    """What the operators of an exchange do over NVLink. Tokens are bfloat16."""

    def __init__(self, geometry: Geometry, transport: Nvlink, observer: Observer, layer: int) -> None:
        self.geometry, self.transport, self.observer, self.layer = geometry, transport, observer, layer
        self.world_size = transport.world_size
        self.num_local_slots = len(geometry.local_slots)
        self.begun: dict[int, tuple] = {}
        self.tickets = itertools.count()
        self.key = ops.register(self)

    def device_type(self, x: Tensor) -> str:
        return "cuda"

    def begin(self, *started) -> int:
        ticket = next(self.tickets)
        self.begun[ticket] = started
        return ticket

    def handshake(self, x_TD: Tensor, routing: Routing) -> None:
        """ValueError where the input is wrong; at the first call on every rank. Later the other ranks'
        kernels are told by ids that none accepts, and end in `ExchangeError`: without a host synchronisation
        there is no earlier moment, and the exchange cannot be used again."""
        problem = self._problem(x_TD, routing)
        if self.transport.ready(self.geometry.placement):
            if problem:
                bad_TK = torch.full(
                    (1, self.geometry.top_k), self.geometry.placement.num_experts, device="cuda"
                )
                self.kernels(0).route(bad_TK, torch.zeros(bad_TK.shape, device="cuda"))
        else:
            told = self.transport.exchange_counts(torch.tensor([int(problem is not None)]))
            # on the host: counts are told there
            wrong = told.flatten().nonzero().flatten().tolist()
            if wrong and problem is None:
                raise ValueError(f"dispatch: rank {wrong[0]} was given tokens that cannot be dispatched")
        if problem:
            raise ValueError(f"dispatch: on rank {self.geometry.rank}, {problem}")

    def _problem(self, x_TD: Tensor, routing: Routing) -> str | None:
        geometry, most = self.geometry, self.transport.most_tokens(self.geometry.placement)
        number, *details = find_problem(
            x_TD, routing, geometry.hidden_size, geometry.top_k, geometry.placement.num_experts, "cuda"
        )
        if number:
            return PROBLEMS[number].format(*details)
        if x_TD.dtype != DTYPE:
            return (
                f"x is {x_TD.dtype}; NVLink's kernels move bfloat16: convert it, or use transport='alltoall'"
            )
        if most is not None and x_TD.shape[0] > most:
            return f"x has {x_TD.shape[0]} tokens; this exchange was made for {most}: use Nvlink(max_tokens=)"
        return None

    def kernels(self, tokens: int) -> NvlinkExchange:
        geometry = self.geometry
        row_bytes = geometry.hidden_size * DTYPE.itemsize
        return self.transport.exchange_for(geometry.placement, tokens, geometry.top_k, row_bytes)

    def start_dispatch(self, x_TD: Tensor, weights_TK: Tensor, ids_TK: Tensor) -> tuple[Tensor, Routed]:
        """Kernels run in the order of the stream, so begun is as good as done."""
        self.handshake(x_TD, Routing(ids_TK=ids_TK, weights_TK=weights_TK))
        kernels, where = self.kernels(x_TD.shape[0]), {"layer": self.layer}
        with self.observer.span("plan", **where):
            routed = kernels.route(ids_TK, weights_TK)
        with self.observer.span("dispatch", **where):
            rows_RD = kernels.pull(x_TD.contiguous(), routed, num_sms=self.transport.dispatch_sms)[0]
        if self.observer.enabled:
            load_E = plan.count_choices(ids_TK, self.geometry.placement.num_experts)
            self.observer.count("expert_load", load_E, **where)
        return rows_RD, routed

    def run_dispatch(
        self, x_TD: Tensor, weights_TK: Tensor, ids_TK: Tensor, ticket: int
    ) -> tuple[Tensor, Tensor, Tensor, list[Tensor]]:
        begun = self.begun.pop(ticket, None)
        rows_RD, routed = begun or self.start_dispatch(x_TD, weights_TK, ids_TK)
        weights_R = spread(routed.weights_LWTK, routed.position_LWTK, rows_RD.shape[0])
        counts_e = routed.counts_Le[0, : self.num_local_slots].long()
        return rows_RD, weights_R, counts_e, write_state(routed)

    def fake_state(self, ids_TK: Tensor, rows: Any, size: Callable[[], Any]) -> list[Tensor]:
        """The shapes of the state, for the compiler."""
        ranks, most, top_k = self.world_size, size(), ids_TK.shape[1]

        def number(*shape: Any, dtype: torch.dtype = torch.int32) -> Tensor:
            return ids_TK.new_empty(shape, dtype=dtype)

        return [
            number(1, ranks, most, top_k),
            number(1, ranks, most, top_k, dtype=torch.float32),
            number(1, ranks, most),
            number(1, most, ranks),
            number(1, self.num_local_slots),
            number(1, 4),
            number(1, ranks),
        ]

    def run_dispatch_backward(
        self, d_rows_RD: Tensor, d_weights_R: Tensor, state: Sequence[Tensor], num_tokens: int
    ) -> tuple[Tensor, Tensor]:
        routed = Routed(**dict(zip(STATE, state, strict=True)))
        with self.observer.span("dispatch_backward", layer=self.layer):
            d_x_TD = self._combine(d_rows_RD, routed, None, num_tokens, weighted=False)
            position_WTK = routed.position_LWTK[0].long()
            here = torch.where(position_WTK < 0, 0.0, d_weights_R[position_WTK.clamp(min=0)])
            home = torch.empty_like(here)
            work = self.transport.start(
                "dispatch_backward",
                lambda: dist.all_to_all_single(home, here, group=self.transport.group, async_op=True),
            )
            self.transport.finish("dispatch_backward", work)
            return d_x_TD, home.sum(0)[:num_tokens]

    def start_combine(
        self, rows_RD: Tensor, weights_R: Tensor | None, state: Sequence[Tensor], num_tokens: int
    ) -> tuple[None]:
        """Nothing: all of a combine is one kernel."""
        return (None,)

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
        routed = Routed(**dict(zip(STATE, state, strict=True)))
        with self.observer.span("combine", layer=self.layer):
            return self._combine(rows_RD, routed, addend_TD, num_tokens, weighted=weights_R is not None)

    def run_combine_backward(
        self, d_y_TD: Tensor, rows_RD: Tensor, weights_R: Tensor | None, state: Sequence[Tensor]
    ) -> tuple[Tensor, Tensor]:
        routed = Routed(**dict(zip(STATE, state, strict=True)))
        with self.observer.span("combine_backward", layer=self.layer):
            kernels = self.kernels(d_y_TD.shape[0])
            d_y_RD = kernels.pull(d_y_TD.contiguous(), routed, num_sms=self.transport.dispatch_sms)[0]
            if weights_R is None:
                return d_y_RD, torch.zeros(d_y_RD.shape[0], device=d_y_RD.device)
            d_weights_R = (rows_RD.float() * d_y_RD.float()).sum(1)
            return (d_y_RD.float() * weights_R[:, None]).to(DTYPE), d_weights_R

    def _combine(
        self, rows_RD: Tensor, routed: Routed, addend: Tensor | None, num_tokens: int, *, weighted: bool
    ) -> Tensor:
        sms = self.transport.combine_sms
        rows = rows_RD.contiguous()[None]
        added = None if addend is None else addend.contiguous()
        return self.kernels(num_tokens).combine(
            rows, routed, weighted=weighted, addend=added, num_sms=sms, num_tokens=num_tokens
        )


STATE = tuple(Routed.__dataclass_fields__)


def write_state(routed: Routed) -> list[Tensor]:
    """The tensors of `routed`, in the order of its fields."""
    return [getattr(routed, name) for name in STATE]


def spread(weights_LWTK: Tensor, position_LWTK: Tensor, num_rows: int) -> Tensor:
    """The gate weight of every row, float32 [num_rows], 0 where no choice has the row."""
    target = torch.where(position_LWTK < 0, num_rows, position_LWTK).flatten().long()
    weights_R = torch.zeros(num_rows + 1, device=weights_LWTK.device)
    return weights_R.scatter_(0, target, weights_LWTK.flatten())[:-1].clone()
