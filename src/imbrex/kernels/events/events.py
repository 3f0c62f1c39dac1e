"""The host of `events.cu`: a call of a layer that may do without late peers.

    kernels = EventsKernels(heap_of, Room(...), timeout=60.0)     # collective, once; layers may share it
    patience = Patience(tau_s=0.05, epsilon=1, every=1, device=device)  # of one layer
    call = kernels.send(x_TD, ids_TK, weights_TK, tables, patience)
    rows_RD = kernels.take(call)                                  # of those that came; call.routed says where
    y_TD = kernels.sum(call, experts(rows_RD), weighted=True)     # call.kept_TK: the choices that count
    back = kernels.send_back(call, d_y_TD)                        # and its backward, of the same ranks
    kernels.settle(back)                                          # only where ranks share experts
    d_y_RD = kernels.take_back(back)
    d_x_TD, d_weights_TK = kernels.sum_back(back, d_rows_RD, d_weights_R)

Every rank makes the same calls in the same order. No step waits for the host, and the number of the call is
the device's, so a call may be captured in a CUDA graph. A wait without patience ends after `timeout` seconds,
as those of `NvlinkExchange`: then `check()` raises `ExchangeError` on all ranks, and `usable` is False.
"""

from __future__ import annotations

import copy
import ctypes
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from imbrex.kernels import jit
from imbrex.kernels.exchange import layout as lay
from imbrex.kernels.exchange.failures import Status
from imbrex.kernels.heap import Heap
from imbrex.kernels.routing.routed import Routed, Sizes, empty_routed
from imbrex.kernels.structs import struct

Events = struct("events/call.cuh", "Events")
Head = struct("events/call.cuh", "Head")
Words = struct("events/claims.cuh", "Words")
Memory = struct("events/claims.cuh", "Memory")
PatienceWords = struct("events/claims.cuh", "Patience")
EVENTS = jit.Variant(source="events/events.cu", entry="run_events")
EVENTS_FP8 = jit.Variant(source="events/events.cu", entry="run_events", defines=(("WIRE_FP8", 1),))
"""The kernel for calls whose sums cross as fp8."""
THREADS, BLOCKS, INDEXERS = 512, 64, 32
WORDS = 1024
"""Bytes of a block's shared memory before all else."""
STEPS = 7
SEND, EXPAND, REPLY, SUM, COMBINE, REFUSE, SETTLE = range(STEPS)
SUMMING = REPLY, SUM, COMBINE
KINDS, PHASES = ("", "events"), ("", "leave to send", "the packet", "the reply")
ENDLESS, MOST_CALLS = (1 << 64) - 1, (1 << 32) - 1
WHOLE = 100000
"""Parts that a share is given in."""


def shipped_variants() -> list[jit.Variant]:
    return [EVENTS, EVENTS_FP8]


@dataclass(frozen=True, kw_only=True, slots=True)
class Room:
    """The numbers that a heap is sized for: W ranks, most tokens of a rank, K choices, E experts, slots of
    the fullest rank, ranks that share an expert, bytes of a row. fp8: sums of some calls cross as fp8."""

    ranks: int
    tokens: int
    choices: int
    experts: int
    most_slots: int
    tensor: int
    row_bytes: int
    fp8: bool = False

    @property
    def rows(self) -> int:
        """Most expert-major rows of a rank."""
        return self.ranks * self.tokens * min(self.choices, self.most_slots)

    @property
    def slots(self) -> int:
        """Most slots of all ranks, a multiple of four."""
        return -(-(self.ranks // self.tensor * self.most_slots) // 4) * 4

    @property
    def parts(self) -> dict[str, int]:
        """Bytes of the parts of a heap behind its control words, in their order."""
        choices, rows = 4 * self.ranks * self.tokens * self.choices, (self.ranks - 1) * self.tokens
        parts = {"words_at": ctypes.sizeof(Words), "heads_at": ctypes.sizeof(Head) * self.ranks}
        parts |= {"counts_at": 4 * self.ranks * self.most_slots, "parts_at": 4 * INDEXERS * self.slots}
        parts |= {"choices_at": 2 * choices, "gates_at": choices, "values_at": choices}
        return parts | dict.fromkeys(("packets_at", "replies_at"), rows * self.row_bytes)


class Patience:
    """The time that a layer's calls wait for the last `epsilon` peers, and its memory of them.

    share, factor: where it is learnt. As long as that share of the last waits took; with a factor, until a
    call has taken that many times as long as that share of the last did. budget: share of all choices that
    may be dropped; 1: any.
    """

    def __init__(
        self,
        tau_s: float,
        epsilon: int,
        every: int,
        device: torch.device,
        *,
        share: float = 0.0,
        factor: float | None = None,
        budget: float = 1.0,
    ) -> None:
        self.tau_ns = ENDLESS if tau_s * 1e9 >= ENDLESS else round(tau_s * 1e9)
        self.epsilon, self.every = epsilon, min(every, MOST_CALLS)
        # 0 says that nothing is learnt.
        self.share, self.factor = max(round(share * WHOLE), bool(share)), factor or 0.0
        self.budget = round(budget * WHOLE)
        self.memory = torch.zeros(ctypes.sizeof(Memory) // 4, dtype=torch.int32, device=device)

    def none(self) -> Patience:
        """Patience with the memory of this one, for calls that do without nobody."""
        other = copy.copy(self)
        other.epsilon = 0
        return other

    @property
    def words(self) -> Any:
        return PatienceWords(
            tau_ns=self.tau_ns,
            memory=self.memory,
            epsilon=self.epsilon,
            every=self.every,
            budget=self.budget,
            share=self.share,
            factor=self.factor,
        )


@dataclass(kw_only=True, slots=True)
class EventsCall:
    """A call under way. tables: the slot of every expert and the first slot of every owner, int32.
    outcome_4W: int32, whose replies count, whose packets came in time, which homes count what they were sent,
    and whose replies came. known_4W: of a backward, the outcome of its forward. wanted_T: int32, the peers
    that a token is sent to, a bit each. replied: whether its replies had a launch of their own. wire: how the
    peers' sums cross, `bf16` or `fp8`."""

    x_TD: Tensor
    ids_TK: Tensor
    weights_TK: Tensor
    tables: tuple[Tensor, Tensor]
    patience: Patience
    note: int
    routed: Routed
    kept_TK: Tensor
    outcome_4W: Tensor
    wanted_T: Tensor
    known_4W: Tensor | None = None
    replied: bool = False
    wire: str = "bf16"


class EventsKernels:
    """One heap, and the kernel that runs calls over it. make_heap: from a number of bytes (collective).
    blocks, sum_blocks: of a launch, and of one that sums, all resident. load: `jit.load`, or what stands in
    for it."""

    def __init__(
        self,
        make_heap: Callable[[int], Heap],
        room: Room,
        *,
        timeout: float = 60.0,
        blocks: int = BLOCKS,
        sum_blocks: int | None = None,
        load: Callable[..., Any] = jit.load,
    ) -> None:
        if room.ranks > lay.MOST_RANKS or room.choices > 32 or room.row_bytes % 16:
            raise ValueError("events: at most 16 ranks, 32 choices, and rows of a multiple of 16 bytes")
        self.room, self.timeout = room, timeout
        at, table = lay.CONTROL_BYTES, 4 * room.most_slots * room.ranks
        stages, moving = lay.mover_shared(room.row_bytes, room.choices, besides=table)
        self._shared = {SEND: WORDS + 4 * (room.slots + room.experts), EXPAND: moving + table}
        self._fixed = {
            "room": room.tokens,
            "choices": room.choices,
            "experts": room.experts,
            "most_slots": room.most_slots,
            "tensor": room.tensor,
            "row_bytes": room.row_bytes,
            "stages": stages,
        }
        """The part of a launch's arguments that never changes: the room, and where the heap's parts begin."""
        for name, nbytes in room.parts.items():
            self._fixed[name], at = at, at + -(-nbytes // 1024) * 1024
        self.heap = make_heap(at)
        self.device = self.heap.local.device
        variants = {"bf16": EVENTS} | ({"fp8": EVENTS_FP8} if room.fp8 else {})
        self._kernels = {wire: load(variant, self.device) for wire, variant in variants.items()}
        self._status = Status(self.heap, timeout, KINDS, PHASES)
        self.sizes = Sizes(1, room.ranks, room.choices, room.most_slots)
        moving = self._status.group(ranks=room.ranks, blocks=blocks)
        summing = self._status.group(ranks=room.ranks, blocks=sum_blocks or blocks)
        self._groups = {step: summing if step in SUMMING else moving for step in range(STEPS)}

    def check(self, *, synchronize: bool = False) -> None:
        """Raises `ExchangeError` where a call has failed; see `NvlinkExchange.check`."""
        if synchronize and self.device.type == "cuda":
            # host sync: asked for
            torch.cuda.synchronize(self.device)
        self._status.check()

    @property
    def usable(self) -> bool:
        return not self._status.failed

    def close(self, *, together: bool = True) -> None:
        self.heap.close(together=together and self.usable)

    def send(
        self,
        x_TD: Tensor,
        ids_TK: Tensor,
        weights_TK: Tensor,
        tables: tuple[Tensor, Tensor],
        patience: Patience,
        *,
        layer: int = 0,
        wire: str = "bf16",
    ) -> EventsCall:
        """Packets to all peers. x_TD: bf16, at most as many tokens as there is room for. wire: of the sums
        that come back."""
        self.check()
        assert x_TD.shape[0] <= self.room.tokens
        assert x_TD.shape[1] * x_TD.element_size() == self.room.row_bytes
        self._name(layer)
        call = EventsCall(
            x_TD=x_TD.contiguous(),
            ids_TK=ids_TK.contiguous(),
            weights_TK=weights_TK.contiguous(),
            tables=tables,
            patience=patience,
            note=layer,
            routed=empty_routed(self.sizes, self.room.tokens, self.device),
            kept_TK=torch.empty(ids_TK.shape, dtype=torch.bool, device=self.device),
            outcome_4W=torch.zeros(4, self.room.ranks, dtype=torch.int32, device=self.device),
            wanted_T=torch.empty(x_TD.shape[0], dtype=torch.int32, device=self.device),
            wire=wire,
        )
        self._run(SEND, call)
        return call

    def send_back(
        self, forward: EventsCall, d_y_TD: Tensor, *, layer: int = 0, wire: str = "bf16"
    ) -> EventsCall:
        """Gradients of outputs to the hosts that counted. Every rank goes back through the same calls in the
        same order, whoever counted there."""
        self.check()
        assert d_y_TD.shape == forward.x_TD.shape
        self._name(layer)
        call = replace(
            forward,
            x_TD=d_y_TD.contiguous(),
            patience=forward.patience.none(),
            note=~forward.note,
            known_4W=forward.outcome_4W,
            replied=False,
            wire=wire,
        )
        self._run(SEND, call)
        return call

    def _name(self, layer: int) -> None:
        for group in self._groups.values():
            group.layer = 1 + layer

    def settle(self, call: EventsCall) -> None:
        """Ask the homes that were served which of them count what they were sent, before `take_back`. Where
        ranks share experts a home may have done without the rank beside this one: `call.outcome_4W[2]` knows
        it from here on. Elsewhere it knew before."""
        self._run(SETTLE, call)

    def take_back(self, call: EventsCall) -> Tensor:
        """The gradients of outputs at the rows of `call.routed`, of the homes that were served."""
        rows_RD = call.x_TD.new_empty(self.room.rows, call.x_TD.shape[1])
        self._run(EXPAND, call, rows=rows_RD)
        return rows_RD

    def take(self, call: EventsCall) -> Tensor:
        """Expert-major rows [`room.rows`, D] of the packets that came in time; those past the counts are not
        written."""
        rows_RD = call.x_TD.new_empty(self.room.rows, call.x_TD.shape[1])
        self._run(EXPAND, call, rows=rows_RD)
        return rows_RD

    def reply(
        self, call: EventsCall, rows_RD: Tensor, *, weighted: bool = False, values_R: Tensor | None = None
    ) -> None:
        """The sums of the peers' rows to where they find them, in a launch of its own, which waits for
        nobody; else `sum` and `sum_back` begin with it. weighted: times the gate weights. values_R: of a
        backward, a float32 of every row that goes home as it is."""
        call.replied = True
        self._run(REPLY, call, rows=rows_RD, weighted=weighted, values=values_R)

    def sum(
        self, call: EventsCall, rows_RD: Tensor, *, weighted: bool, addend_TD: Tensor | None = None
    ) -> Tensor:
        """Outputs [T, D]: own rows and the replies that come in time, in the order of the ranks."""
        y_TD = torch.empty_like(call.x_TD)
        step = SUM if call.replied else COMBINE
        self._run(step, call, rows=rows_RD, weighted=weighted, addend=addend_TD, out=y_TD)
        return y_TD

    def sum_back(self, call: EventsCall, rows_RD: Tensor, values_R: Tensor) -> tuple[Tensor, Tensor]:
        """Gradients of the own tokens [T, D] and of their weights [T, K], 0 where a choice does not count."""
        d_x_TD, d_weights_TK = torch.empty_like(call.x_TD), torch.empty_like(call.weights_TK)
        step = SUM if call.replied else COMBINE
        self._run(step, call, rows=rows_RD, values=values_R, out=d_x_TD, values_out=d_weights_TK)
        return d_x_TD, d_weights_TK

    def refuse(self) -> None:
        """Make the calls of all ranks fail: this one's input is wrong, and the others wait for it."""
        none = torch.empty(0, self.room.choices, dtype=torch.int64, device=self.device)
        x_TD = torch.empty(0, self.room.row_bytes // 2, dtype=torch.bfloat16, device=self.device)
        call = EventsCall(
            x_TD=x_TD,
            ids_TK=none,
            weights_TK=none.float(),
            tables=(none, none),
            patience=Patience(math.inf, 0, 1, self.device),
            note=0,
            routed=empty_routed(self.sizes, 1, self.device),
            kept_TK=none.bool(),
            outcome_4W=none.int(),
            wanted_T=none.int(),
        )
        self._run(REFUSE, call)

    def _run(
        self,
        step: int,
        call: EventsCall,
        *,
        rows: Tensor | None = None,
        addend: Tensor | None = None,
        out: Tensor | None = None,
        values: Tensor | None = None,
        values_out: Tensor | None = None,
        weighted: bool = False,
    ) -> None:
        to = call.routed.addresses
        args = Events(
            patience=call.patience.words,
            x=call.x_TD,
            ids=call.ids_TK,
            weights=call.weights_TK,
            slot_of=call.tables[0],
            offsets=call.tables[1],
            position=to.position_LWTK,
            all_weights=to.weights_LWTK,
            counts=to.counts_Le,
            totals=to.totals_L4,
            tokens_of=to.tokens_LW,
            rows=rows,
            addend=addend,
            out=out,
            kept=call.kept_TK,
            outcome=call.outcome_4W,
            known=call.known_4W,
            values=values,
            values_out=values_out,
            wanted=call.wanted_T,
            **self._fixed,
            wire_bytes=lay.wire_bytes(self.room.row_bytes, call.wire),
            step=step,
            tokens=call.x_TD.shape[0],
            weighted=weighted,
            note=call.note,
        )
        shared = self._shared.get(step, WORDS)
        if step in SUMMING:
            shared += lay.reduce_shared(self.room.row_bytes, call.wire)
        group = self._groups[step]
        self._kernels[call.wire].launch(grid=group.blocks, block=THREADS, args=[group, args], smem=shared)
