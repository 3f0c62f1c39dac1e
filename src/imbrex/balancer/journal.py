"""The balancer's journal: one JSON line a step, from which reports and recorded loads are made."""

from __future__ import annotations

import json
import os
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from imbrex.balancer.counts import Iteration
from imbrex.balancer.seat import Seat
from imbrex.balancer.tally import Tally, balancedness


@dataclass(frozen=True, kw_only=True, slots=True)
class Entry:
    """A step, written when its counts are known."""

    line: dict[str, Any]
    iterations: Sequence[Iteration]


class Journal:
    """Lines of steps, in order, in a file; a step's counts may come from a GPU some steps later.

    The file may be a run's own `metrics.jsonl`: readers know the balancer's lines by their `crossings`.

    layers: numbers. expert_load [L, E]: choices of all ranks. loads [L, W]: choices computed.
    crossings [W, W]: choices of a rank's tokens by the rank that computed them, over all layers.
    balancedness [L]: mean over maximum of the loads. predicted [L]: what the plan in use promised of it, 0
    before the first. switched: layers that have a new placement from here on. Then the tally.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self.path.open("a", encoding="utf-8").close()  # what cannot be written says so before anything runs
        self._open: deque[Entry] = deque()

    def add(self, seats: Sequence[Seat], tally: Tally, switched: Sequence[int]) -> None:
        """The step that has just ended."""
        line = {
            "step": int(tally.values["iterations"]) - 1,
            "layers": [seat.number for seat in seats],
            "switched": list(switched),
            "predicted": [round(seat.predicted, 5) for seat in seats],
            **tally.values,
        }
        iterations = [seat.latest for seat in seats if seat.latest is not None]
        self._open.append(Entry(line=line, iterations=iterations))
        self.write(wait=False)

    def write(self, *, wait: bool) -> None:
        """Write what is known, or all of it."""
        with self.path.open("a", encoding="utf-8") as file:
            while self._open and (wait or all(iteration.known for iteration in self._open[0].iterations)):
                file.write(json.dumps(_complete(self._open.popleft())) + "\n")


def _complete(entry: Entry) -> dict[str, Any]:
    return entry.line | {
        "expert_load": [i.counts_E.tolist() for i in entry.iterations],
        "loads": [i.loads_W.tolist() for i in entry.iterations],
        "balancedness": [round(balancedness(i.loads_W.tolist()), 5) for i in entry.iterations],
        "crossings": np.sum([i.crossings_WW for i in entry.iterations], axis=0).tolist(),
    }
