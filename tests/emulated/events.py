"""Calls by events among virtual ranks out of step: each a stream of launches, in one emulated machine.

The experts of slot s multiply by s + 1, between two launches of a rank. Outputs, masks and what both sides of
a claim believe are compared with sums in the same order; so are, of backwards, whose experts multiply too,
the gradients of tokens, and the numbers that go home for every row.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from imbrex.contracts import Placement
from imbrex.kernels.events.events import (
    ENDLESS,
    WHOLE,
    EventsCall,
    EventsKernels,
    Memory,
    Patience,
    Room,
    Words,
)
from imbrex.kernels.heap import VirtualHeap
from imbrex.kernels.routing.routed import Routed
from imbrex.overlap.events import budget, seat
from imbrex.overlap.events.seat import Stage
from tests.emulated.out_of_step import OutOfStep, RankHeap, Recorder
from tests.emulated.scenario import Case, Inputs, add_rows, make_inputs

STEPS, BACK_STEPS = 3, 3
EXPANDED, SUMMED = 1, 2


@dataclass
class Back:
    """A rank's backward: its rows and numbers, and the gradients of its tokens and weights."""

    call: EventsCall
    rows_RD: Tensor
    values_R: Tensor
    d_x_TD: Tensor
    d_weights_TK: Tensor


@dataclass
class Outcome:
    """What the ranks of one call came to."""

    calls: list[EventsCall]
    inputs: Inputs
    results: list[Tensor] = field(default_factory=list)
    behind_W: list[int] = field(default_factory=list)
    backs: list[Back] = field(default_factory=list)


class EventsOutOfStep(OutOfStep):
    """Some calls of every rank, each written down and then run by `run_calls`; with `backward`, behind them
    their backwards, the last call's first."""

    def __init__(self, case: Case, epsilon: int, tau_s: float, *, blocks: int = 2, every: int = 1) -> None:
        self.case, ranks = case, case.ranks
        self.launches = [[] for _ in range(ranks)]
        self._kept = []
        loads = [partial(Recorder, launches) for launches in self.launches]
        self.exchanges: Any = make_kernels(
            case, "cpu", loads, timeout=20.0, blocks=blocks, sum_blocks=blocks + 1
        )
        self.heap = self.exchanges[0].heap.whole
        cpu = torch.device("cpu")
        self.patience = [Patience(tau_s, epsilon, every, cpu) for _ in range(ranks)]
        self.tables = tables_of(case.placement)
        self.settles = case.tensor > 1
        self.rows: dict[tuple[int, int], Tensor] = {}
        self.learnt: set[tuple[Stage, bool]] = set()
        self.before: dict[int, tuple[Any, int]] = {}

    def words(self, rank: int) -> Any:
        return Words.from_buffer_copy(bytes(words_of(self.exchanges[rank]).numpy()))

    def run_calls(self, count: int, seed: int, *, backward: bool = False) -> list[Outcome]:
        """So many calls of every rank under an adversary."""
        outcomes = []
        for number in range(count):
            inputs = make_inputs(replace(self.case, seed=number))
            outcome = Outcome([], inputs, behind_W=[0] * self.case.ranks)
            for rank, tokens in enumerate(self.case.tokens):
                self._write_down(rank, tokens, number, outcome)
            outcomes.append(outcome)
        for outcome in reversed(outcomes if backward else []):
            for rank in range(self.case.ranks):
                self._write_down_backward(rank, outcome)
        self.run(seed, partial(self._told, outcomes))
        return outcomes

    def run_refusal(self, seed: int) -> None:
        """A call of every rank, in the midst of which the last one makes all fail."""
        inputs = make_inputs(self.case)
        outcome = Outcome([], inputs)
        for rank, tokens in enumerate(self.case.tokens):
            self._write_down(rank, tokens, 0, outcome)
        last = self.launches[-1]
        del last[1 + seed % (STEPS - 1) :]
        while len(last) < STEPS:
            self.exchanges[-1].refuse()
        self.run(seed)

    def _write_down(self, rank: int, tokens: int, number: int, outcome: Outcome) -> None:
        kernels, inputs = self.exchanges[rank], outcome.inputs
        call = kernels.send(*inputs_of(inputs, rank, tokens), self.tables, self.patience[rank])
        rows_RD = self.rows[rank, number] = kernels.take(call)
        outcome.results.append(kernels.sum(call, rows_RD, weighted=True))
        outcome.calls.append(call)

    def _write_down_backward(self, rank: int, outcome: Outcome) -> None:
        kernels, call = self.exchanges[rank], outcome.calls[rank]
        back = kernels.send_back(call, doubled(call.x_TD))
        if self.settles:
            kernels.settle(back)
        rows_RD = kernels.take_back(back)
        values_R = torch.zeros(len(rows_RD))
        sums = kernels.sum_back(back, rows_RD, values_R)
        outcome.backs.append(Back(back, rows_RD, values_R, *sums))

    def _told(self, outcomes: list[Outcome], rank: int, launch: int, ended: bool) -> None:
        number, step = divmod(launch, STEPS)
        if number >= len(outcomes):
            number, step = divmod(launch - STEPS * len(outcomes), BACK_STEPS + self.settles)
            if step == 1 + self.settles:
                self._go_back(rank, outcomes[-1 - number], ended)
            return
        outcome = outcomes[number]
        self._check_budget(rank, outcome, step, ended=ended)
        if ended and step == EXPANDED:
            self._check_learnt(rank)
            call = outcome.calls[rank]
            x_WTD = [one.x_TD for one in outcome.calls]
            rows_RD = self.rows[rank, number]
            for at, slot in self._rows(rank, outcome, call.outcome_4W[1], rows_RD, x_WTD):
                rows_RD[at] = (rows_RD[at].float() * (slot + 1)).bfloat16()
        if ended and step == SUMMED:
            outcome.behind_W[rank] = self.words(rank).behind

    def memory(self, rank: int) -> Any:
        return Memory.from_buffer_copy(bytes(self.patience[rank].memory.numpy()))

    def _check_budget(self, rank: int, outcome: Outcome, step: int, *, ended: bool) -> None:
        """Allowances are what a budget on the host comes to, and nobody is given up beyond them."""
        patience, memory, ranks = self.patience[rank], self.memory(rank), self.case.ranks
        if patience.budget == WHOLE:
            return
        behind = self.words(rank).behind
        if not ended:
            self.before[rank] = memory, 0 if step == 0 else behind
            return
        before, behind_before = self.before[rank]
        on_host = budget.Budget(patience.budget / WHOLE, ranks)
        on_host.left, on_host.loads = left_of(before), list(before.loads[:ranks])
        given_W = [now - then for now, then in zip(memory.given[:ranks], before.given, strict=False)]
        got_W = [now - then for now, then in zip(memory.got[:ranks], before.got, strict=False)]
        if step == 0:
            on_host.charge(before.dropped)
            on_host.earn(outcome.calls[rank].ids_TK.numel())
        for peer, got in enumerate(got_W):
            if got or memory.loads[peer] != before.loads[peer]:
                on_host.receive(peer, got, memory.loads[peer])
        if behind and not behind_before:
            assert on_host.covers(behind.bit_count() * (1 if step == SUMMED else 2))
        words = self.words(rank)
        for peer, given in enumerate(given_W):
            if step == EXPANDED and words.packet[peer] == 2 * words.decided[1]:
                on_host.refuse(peer)
                assert given == on_host.owed[peer] > 0
            elif given:
                assert (step, given) == (0, on_host.give(peer))
        assert left_of(memory) == on_host.left

    def _check_learnt(self, rank: int) -> None:
        """Limits are what a patience on the host learns of the same waits."""
        patience = self.patience[rank]
        if not patience.share:
            return
        memory = self.memory(rank)
        factor = f"{patience.factor:g} " if patience.factor else ""
        for which, stage in enumerate(Stage):
            on_host = seat.Patience(f"{factor}p{100 * patience.share / WHOLE:g}")
            waits = memory.waits[which][: min(memory.seen[which], seat.MEMORY)]
            on_host.waits[stage].extend(math.inf if wait == 0xFFFFFFFF else 64e-9 * wait for wait in waits)
            expected_s, limit = on_host.seconds(0, stage), memory.limit[which]
            limit_s = math.inf if limit in (0, ENDLESS) else 1e-9 * limit
            assert limit_s == pytest.approx(expected_s, rel=1e-5, abs=2e-9)
            self.learnt.add((stage, math.isfinite(limit_s)))

    def _go_back(self, rank: int, outcome: Outcome, ended: bool) -> None:
        """Before rows come: those that were computed in vain have no place. Then the experts' backward."""
        call, back = outcome.calls[rank], outcome.backs[rank]
        if not ended:
            left, before_R = call.routed.without(call.outcome_4W[2].bool(), len(back.rows_RD))
            self._check_left(call, left, before_R)
            before_TC, after_TC = call.routed.words_TC, left.words_TC
            assert before_TC is not None
            assert after_TC is not None
            before_TC.copy_(after_TC)
            return
        d_y_WTD = [one.call.x_TD for one in outcome.backs]
        for at, slot in self._rows(rank, outcome, call.outcome_4W[2], back.rows_RD, d_y_WTD):
            back.values_R[at] = value_of(back.rows_RD[at], slot)
            back.rows_RD[at] = (back.rows_RD[at].float() * (slot + 1)).bfloat16()

    def _check_left(self, call: EventsCall, left: Routed, before_R: Tensor) -> None:
        """Every row is what it was, at its new place."""
        rows = int(left.totals_L4[0, 0])
        assert int(left.counts_Le.sum()) == rows == int((left.position_LWTK >= 0).sum())
        stays = left.position_LWTK >= 0
        places = left.position_LWTK[stays].long()
        assert torch.equal(before_R[places], call.routed.position_LWTK[stays].long())
        assert torch.equal(places.sort().values, torch.arange(rows))

    def _rows(
        self, rank: int, outcome: Outcome, sources: Tensor, rows_RD: Tensor, tokens_WTD: list[Tensor]
    ) -> Iterator[tuple[int, int]]:
        """The rows of a rank and their slots: those of its own tokens and of the sources', in the order of
        `serial`. Compares them."""
        routed, at = outcome.calls[rank].routed, 0
        low, high = self.case.slots_of(rank)
        for slot in range(low, high):
            before = at
            for source in range(self.case.ranks):
                if not sources[source]:
                    continue
                slot_TK = self.slots(outcome.calls[source].ids_TK)
                for t, k in (slot_TK == slot).nonzero().tolist():
                    assert int(routed.position_LWTK[0, source, t, k]) == at
                    assert torch.equal(rows_RD[at], tokens_WTD[source][t])
                    yield at, slot
                    at += 1
            assert int(routed.counts_Le[0, slot - low]) == at - before
        assert int((routed.position_LWTK >= 0).sum()) == at == int(routed.totals_L4[0, 0])

    def slots(self, ids_TK: Tensor) -> Tensor:
        return slots_of(ids_TK, self.tables[0])


def make_kernels(case: Case, device: str, loads: Sequence[Any], **options: Any) -> list[EventsKernels]:
    """The kernels of every rank, over one memory. loads: of every rank."""
    sizes = torch.tensor(case.placement.rank_offsets).diff().tolist()
    room = Room(
        ranks=case.ranks,
        tokens=max(case.tokens),
        choices=case.choices,
        experts=case.placement.num_experts,
        most_slots=max(1, *sizes),
        tensor=case.tensor,
        row_bytes=2 * case.width,
    )
    heaps: list[VirtualHeap] = []

    def heap_of(rank: int, nbytes: int) -> RankHeap:
        if not heaps:
            heaps.append(VirtualHeap(case.ranks, nbytes, device))
        return RankHeap(heaps[0], rank)

    return [
        EventsKernels(partial(heap_of, rank), room, load=load, **options) for rank, load in enumerate(loads)
    ]


def left_of(memory: Any) -> int:
    """A rank's allowance."""
    return memory.earned + sum(memory.got) - sum(memory.given)


def words_of(kernels: EventsKernels) -> Tensor:
    """The memory of a rank's words."""
    at = kernels._fixed["words_at"]
    return kernels.heap.local[0, at : at + ctypes.sizeof(Words)]


def inputs_of(inputs: Inputs, rank: int, tokens: int) -> tuple[Tensor, Tensor, Tensor]:
    """The tokens of a rank, their choices and weights."""
    x_TD, ids_TK, weights_TK = inputs.x_WTD[rank], inputs.ids_WTK[rank], inputs.weights_WTK[rank]
    return x_TD[:tokens].clone(), ids_TK[:tokens].clone(), weights_TK[:tokens].clone()


def doubled(x_TD: Tensor) -> Tensor:
    """Some gradient of outputs, of the tokens."""
    return (2 * x_TD.float() + 1).bfloat16()


def value_of(row_D: Tensor, slot: int | Tensor) -> Tensor:
    """The number of a row that goes home."""
    return row_D[..., 0].float() * 0.5 + slot


def bits_of(word: int, ranks: int) -> Tensor:
    return torch.tensor([word >> p & 1 for p in range(ranks)]).bool()


def slots_of(ids_TK: Tensor, slot_of_E: Tensor) -> Tensor:
    return torch.where(ids_TK < 0, -1, slot_of_E[ids_TK.clamp(min=0)].long())


def tables_of(placement: Placement) -> tuple[Tensor, Tensor]:
    slots = [placement.slots.index(expert) for expert in range(placement.num_experts)]
    return torch.tensor(slots, dtype=torch.int32), torch.tensor(placement.rank_offsets, dtype=torch.int32)


def check_outcome(case: Case, outcome: Outcome, epsilon: int) -> int:
    """Outputs and masks of a call, to the bit; how many choices were dropped."""
    dropped, (slot_of_E, _) = 0, tables_of(case.placement)
    for home in range(case.ranks):
        call = outcome.calls[home]
        assert int(bits_of(outcome.behind_W[home], case.ranks).sum()) <= epsilon
        counts = call.outcome_4W[0].bool().tolist()
        for host in range(case.ranks):
            if host != home and (case.tensor == 1 or outcome.backs):
                # Both sides of a claim know the same; of what ranks share, in the backward.
                assert counts[host] == bool(outcome.calls[host].outcome_4W[2, home]), (home, host)
        slot_TK = slots_of(call.ids_TK, slot_of_E)
        owner_TK = torch.bucketize(slot_TK, torch.tensor(case.placement.rank_offsets), right=True) - 1
        counted = torch.tensor([counts[o * case.tensor] for o in range(case.placement.num_ranks)])
        kept_TK = (slot_TK < 0) | counted[owner_TK.clamp(min=0)]
        assert torch.equal(call.kept_TK, kept_TK)
        dropped += int((~kept_TK).sum())
        y_TD = summed(case, home, call, slot_TK, call.x_TD, call.weights_TK)
        assert torch.equal(outcome.results[home], y_TD)
        for back in outcome.backs[home : home + 1]:
            d_y_TD = back.call.x_TD
            values_TK = value_of(d_y_TD[:, None], slot_TK) * kept_TK * (slot_TK >= 0)
            assert torch.equal(back.d_weights_TK, values_TK * case.tensor)
            d_x_TD = summed(case, home, call, slot_TK, d_y_TD, torch.ones_like(call.weights_TK))
            assert torch.equal(back.d_x_TD, d_x_TD)
    return dropped


def summed(
    case: Case, home: int, call: EventsCall, slot_TK: Tensor, x_TD: Tensor, weights_TK: Tensor
) -> Tensor:
    """The sums of a home's kept choices, in the kernels' order."""
    total_TD = torch.zeros(len(x_TD), case.width)
    for host in range(case.ranks):
        low, high = case.slots_of(host)
        here_TK = (slot_TK >= low) & (slot_TK < high) & call.kept_TK
        sums_TD = total_TD if host == home else torch.zeros_like(total_TD)
        for k in range(case.choices):
            mine = here_TK[:, k]
            rows = (x_TD[mine].float() * (slot_TK[mine, k, None] + 1)).bfloat16()
            sums_TD[mine] = add_rows(sums_TD[mine], weights_TK[mine, k], rows)
        if host != home:
            total_TD += sums_TD.bfloat16().float()
    return total_TD.bfloat16()
