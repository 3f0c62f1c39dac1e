"""Calls by events, one launch after the other in one stream, in an order of ours: no launch waits for one
behind it. So who is late is decided here and by no clock, and a tool may hold up every kernel."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from imbrex.kernels.events.events import EventsCall, Patience, Words
from imbrex.kernels.routing.routed import Routed
from imbrex.placement import contiguous
from tests.emulated.events import (
    Back,
    Outcome,
    doubled,
    inputs_of,
    make_kernels,
    tables_of,
    value_of,
    words_of,
)
from tests.emulated.scenario import Case, make_inputs

CASES = {
    "three ranks": Case(placement=contiguous(12, 3), tokens=(37, 0, 21), choices=4, width=264),
    "shared experts": Case(placement=contiguous(8, 2), tokens=(17, 9, 0, 11), choices=3, width=256, tensor=2),
}
FORWARD, TAKEN = 4, 2
"""Steps of a rank's forward, and how many of them come before its experts."""


class InOrder:
    """Ranks that do without one of them at most, which is the last."""

    def __init__(self, case: Case, device: str, load: Any, timeout: float = 20.0) -> None:
        self.case, self.device = case, torch.device(device)
        self.kernels = make_kernels(
            case, device, [load] * case.ranks, timeout=timeout, blocks=3, sum_blocks=2
        )
        self.patience = [Patience(1e-4, 1, 1, self.device) for _ in range(case.ranks)]
        slot_of_E, offsets = tables_of(case.placement)
        self.tables = slot_of_E.to(device), offsets.to(device)

    def run(self, seed: int, late: str) -> Outcome:
        """A forward of all ranks and its backward. late: the last rank comes when the others are done, either
        `before` its forward or in its `experts`; or "", not at all."""
        outcome = Outcome([], make_inputs(replace(self.case, seed=seed), self.device))
        ranks = self.begin(outcome)
        together = {"": FORWARD, "before": 0, "experts": TAKEN}[late]
        take_turns(ranks, together)
        take_turns(ranks[:-1], FORWARD - together)
        take_turns(ranks[-1:], FORWARD - together)
        take_turns(ranks, None)
        for kernels in self.kernels:
            kernels.check(synchronize=True)
        return on_host(outcome)

    def begin(self, outcome: Outcome) -> list[Iterator[None]]:
        """Every rank's steps, at whose end it is in the outcome."""
        return [self._steps(rank, outcome) for rank in range(self.case.ranks)]

    def _steps(self, rank: int, outcome: Outcome) -> Iterator[None]:
        kernels = self.kernels[rank]
        given = inputs_of(outcome.inputs, rank, self.case.tokens[rank])
        call = kernels.send(*given, self.tables, self.patience[rank])
        yield
        rows_RD, _ = self._computed(rank, call.routed, kernels.take(call))
        yield
        kernels.reply(call, rows_RD, weighted=True)
        yield
        y_TD = kernels.sum(call, rows_RD, weighted=True)
        behind = Words.from_buffer_copy(bytes(words_of(kernels).cpu().numpy())).behind
        yield
        back = kernels.send_back(call, doubled(call.x_TD))
        yield
        if self.case.tensor > 1:
            kernels.settle(back)
        yield
        back.routed, _ = call.routed.without(call.outcome_4W[2].bool(), kernels.room.rows)
        rows_RD, values_R = self._computed(rank, back.routed, kernels.take_back(back))
        yield
        kernels.reply(back, rows_RD, values_R=values_R)
        yield
        sums = kernels.sum_back(back, rows_RD, values_R)
        outcome.calls.append(call)
        outcome.results.append(y_TD)
        outcome.behind_W.append(behind)
        outcome.backs.append(Back(back, rows_RD, values_R, *sums))
        yield

    def _computed(self, rank: int, routed: Routed, rows_RD: Tensor) -> tuple[Tensor, Tensor]:
        """The rows times one more than their slots, and the numbers that go home; those that are there."""
        low, high = self.case.slots_of(rank)
        counts_e = routed.counts_Le[0, : high - low]
        slot_R = torch.repeat_interleave(torch.arange(low, high, device=self.device), counts_e)
        given_RD = rows_RD[: len(slot_R)]
        values_R = value_of(given_RD, slot_R)
        given_RD.copy_((given_RD.float() * (slot_R[:, None] + 1)).bfloat16())
        return rows_RD, values_R


def take_turns(ranks: Sequence[Iterator[None]], count: int | None) -> None:
    """So many steps of these ranks, each rank's first one before anybody's second; `None`: all that are
    left."""
    left = list(ranks)
    while left and count != 0:
        left = [steps for steps in left if next(steps, ranks) is None]
        count = None if count is None else count - 1


def on_host(outcome: Outcome) -> Outcome:
    """The same with all that is compared on the host."""
    backs = [
        replace(
            back, call=call_on_host(back.call), d_x_TD=back.d_x_TD.cpu(), d_weights_TK=back.d_weights_TK.cpu()
        )
        for back in outcome.backs
    ]
    calls, results = map(call_on_host, outcome.calls), [y_TD.cpu() for y_TD in outcome.results]
    return replace(outcome, calls=list(calls), results=results, backs=backs)


def call_on_host(call: EventsCall) -> EventsCall:
    names = "x_TD", "ids_TK", "kept_TK", "weights_TK", "outcome_4W"
    return replace(call, **{name: getattr(call, name).cpu() for name in names})
