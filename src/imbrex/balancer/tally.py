"""Counters of what the balancer has done."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

NAMES = {
    "iterations": "calls of step",
    "rounds": "migrations opened",
    "switches": "layers that got a new placement",
    "drops": "migrations not used: a rank failed or was late",
    "fetched_experts": "experts that this rank fetched",
    "bytes_moved": "bytes written into this rank's slots",
    "seconds_hidden": "planning and moving while layers computed",
    "seconds_exposed": "inside step: waiting for votes, writing slots, moving in training",
    "late": "1 while a migration is past its patience",
    "stopped": "1 where the balancer has given up",
}


class Tally:
    """Counters of one rank since the start. Names and meanings stand in `NAMES`."""

    def __init__(self) -> None:
        self.values: dict[str, float] = dict.fromkeys(NAMES, 0)

    def add(self, **amounts: float) -> None:
        for name, amount in amounts.items():
            self.values[name] += amount

    def set(self, **values: float) -> None:
        self.values.update(values)


def balancedness(loads_W: Sequence[float]) -> float:
    """Mean over maximum, over ranks: 1 is even, 1/W is all on one rank; 1 without load."""
    largest = max(loads_W, default=0)
    return sum(loads_W) / (len(loads_W) * largest) if largest else 1.0


def exposition(
    tally: Tally, loads_LW: Mapping[int, Sequence[float]], predicted_L: Mapping[int, float]
) -> str:
    """Prometheus' text format: counters, and gauges by layer.

    loads_LW: rows computed by every rank in the last iteration, by number of the layer. predicted_L: the
    balancedness that the plan in use promised.
    """
    lines = []
    for name, value in tally.values.items():
        kind = "gauge" if name in ("late", "stopped") else "counter"
        full = f"imbrex_balancer_{name}" + ("_total" if kind == "counter" else "")
        lines += [f"# HELP {full} {NAMES[name]}", f"# TYPE {full} {kind}", f"{full} {value:g}"]
    actual = {layer: balancedness(loads) for layer, loads in loads_LW.items()}
    for name, about, values in (
        ("balancedness", "mean over max of rows per rank, last iteration", actual),
        ("balancedness_predicted", "what the plan in use promised", predicted_L),
    ):
        lines += [f"# HELP imbrex_{name} {about}", f"# TYPE imbrex_{name} gauge"]
        lines += [f'imbrex_{name}{{layer="{layer}"}} {value:g}' for layer, value in values.items()]
    return "\n".join(lines) + "\n"
