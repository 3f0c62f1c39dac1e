"""Calls by events among virtual ranks out of step: each a stream of launches, in one emulated machine.

The experts of slot s multiply by s + 1, between two launches of a rank. Outputs, masks and what both sides of
a claim believe are compared with sums in the same order.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from imbrex.contracts import Placement
from imbrex.kernels.events.events import EventsCall, EventsKernels, Patience, Room, Words
from imbrex.kernels.heap import VirtualHeap
from tests.emulated.out_of_step import OutOfStep, RankHeap, Recorder
from tests.emulated.scenario import Case, Inputs, add_rows, make_inputs

STEPS = 5
_, _, EXPANDED, REPLIED, SUMMED = range(STEPS)


@dataclass
class Outcome:
    """What the ranks of one call came to. served_WW: host, then home."""

    calls: list[EventsCall]
    inputs: Inputs
    results: list[Tensor] = field(default_factory=list)
    served_WW: Tensor = field(default_factory=lambda: torch.empty(0))
    behind_W: list[int] = field(default_factory=list)


class EventsOutOfStep(OutOfStep):
    """Some calls of every rank, each written down and then run by `run_calls`."""

    def __init__(self, case: Case, epsilon: int, tau_s: float, *, blocks: int = 2, every: int = 1) -> None:
        self.case, ranks = case, case.ranks
        self.launches = [[] for _ in range(ranks)]
        self._kept = []
        loads = [partial(Recorder, launches) for launches in self.launches]
        self.exchanges: Any = make_kernels(case, "cpu", loads, timeout=20.0, blocks=blocks)
        self.heap = self.exchanges[0].heap.whole
        cpu = torch.device("cpu")
        self.patience = [Patience(tau_s, epsilon, every, cpu) for _ in range(ranks)]
        self.tables = tables_of(case.placement)
        self.rows: dict[tuple[int, int], Tensor] = {}

    def words(self, rank: int) -> Any:
        return Words.from_buffer_copy(bytes(words_of(self.exchanges[rank]).numpy()))

    def run_calls(self, count: int, seed: int) -> list[Outcome]:
        """So many calls of every rank under an adversary."""
        outcomes = []
        for number in range(count):
            inputs = make_inputs(replace(self.case, seed=number))
            outcome = Outcome([], inputs, behind_W=[0] * self.case.ranks)
            outcome.served_WW = torch.zeros(self.case.ranks, self.case.ranks, dtype=torch.bool)
            for rank, tokens in enumerate(self.case.tokens):
                self._write_down(rank, tokens, number, outcome)
            outcomes.append(outcome)
        self.run(seed, partial(self._told, outcomes))
        return outcomes

    def _write_down(self, rank: int, tokens: int, number: int, outcome: Outcome) -> None:
        kernels, inputs = self.exchanges[rank], outcome.inputs
        call = kernels.send(*inputs_of(inputs, rank, tokens), self.tables, self.patience[rank])
        rows_RD = self.rows[rank, number] = kernels.take(call)
        kernels.reply(call, rows_RD, weighted=True)
        outcome.results.append(kernels.sum(call, rows_RD, weighted=True))
        outcome.calls.append(call)

    def _told(self, outcomes: list[Outcome], rank: int, launch: int, ended: bool) -> None:
        number, step = divmod(launch, STEPS)
        outcome = outcomes[number]
        if ended and step == EXPANDED:
            self._compute(rank, number, outcome)
        if ended and step == REPLIED:
            outcome.served_WW[rank] = bits_of(self.words(rank).served, self.case.ranks)
        if ended and step == SUMMED:
            outcome.behind_W[rank] = self.words(rank).behind

    def _compute(self, rank: int, number: int, outcome: Outcome) -> None:
        """The experts of a rank; its rows are those of the packets that came, in the order of `serial`."""
        rows_RD, call = self.rows[rank, number], outcome.calls[rank]
        low, high = self.case.slots_of(rank)
        expected, at = [], 0
        for slot in range(low, high):
            before = len(expected)
            for source in range(self.case.ranks):
                if source != rank and not call.outcome_2W[1, source]:
                    continue
                ids_TK = outcome.calls[source].ids_TK
                tokens, ks = (self.slots(ids_TK) == slot).nonzero(as_tuple=True)
                for t, k in zip(tokens.tolist(), ks.tolist(), strict=True):
                    assert int(call.routed.position_LWTK[0, source, t, k]) == len(expected)
                    expected.append(outcome.calls[source].x_TD[t])
            assert int(call.routed.counts_Le[0, slot - low]) == len(expected) - before
            at = len(expected)
            assert all(torch.equal(rows_RD[i], expected[i]) for i in range(before, at))
            rows_RD[before:at] = (rows_RD[before:at].float() * (slot + 1)).bfloat16()
        assert int((call.routed.position_LWTK >= 0).sum()) == at == int(call.routed.totals_L4[0, 0])

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


def words_of(kernels: EventsKernels) -> Tensor:
    """The memory of a rank's words."""
    at = kernels._fixed["words_at"]
    return kernels.heap.local[0, at : at + ctypes.sizeof(Words)]


def inputs_of(inputs: Inputs, rank: int, tokens: int) -> tuple[Tensor, Tensor, Tensor]:
    """The tokens of a rank, their choices and weights."""
    x_TD, ids_TK, weights_TK = inputs.x_WTD[rank], inputs.ids_WTK[rank], inputs.weights_WTK[rank]
    return x_TD[:tokens].clone(), ids_TK[:tokens].clone(), weights_TK[:tokens].clone()


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
        call, tokens = outcome.calls[home], case.tokens[home]
        assert int(bits_of(outcome.behind_W[home], case.ranks).sum()) <= epsilon
        counts = call.outcome_2W[0].bool().tolist()
        for host in range(case.ranks):
            if host != home and case.tensor == 1:
                # Both sides of a claim know the same.
                assert counts[host] == bool(outcome.served_WW[host, home]), (home, host)
        slot_TK = slots_of(call.ids_TK, slot_of_E)
        owner_TK = torch.bucketize(slot_TK, torch.tensor(case.placement.rank_offsets), right=True) - 1
        counted = torch.tensor([counts[o * case.tensor] for o in range(case.placement.num_ranks)])
        kept_TK = (slot_TK < 0) | counted[owner_TK.clamp(min=0)]
        assert torch.equal(call.kept_TK, kept_TK)
        dropped += int((~kept_TK).sum())
        total_TD = torch.zeros(tokens, case.width)
        for host in range(case.ranks):
            low, high = case.slots_of(host)
            here_TK = (slot_TK >= low) & (slot_TK < high) & kept_TK
            sums_TD = total_TD if host == home else torch.zeros_like(total_TD)
            for k in range(case.choices):
                mine = here_TK[:, k]
                rows = (call.x_TD[mine].float() * (slot_TK[mine, k, None] + 1)).bfloat16()
                sums_TD[mine] = add_rows(sums_TD[mine], call.weights_TK[mine, k], rows)
            if host != home:
                total_TD += sums_TD.bfloat16().float()
        assert torch.equal(outcome.results[home], total_TD.bfloat16())
    return dropped
