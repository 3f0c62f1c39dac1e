"""The simulator's shipped profile of two cores, fitted to half of a sweep and to two exchanges.

    python -m benchmarks.simulate_fit two-cores

`FITTED` says to what. `benchmarks/simulate.py` predicts the rest.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import chain

import numpy as np
from benchmarks.simulate_rows import (
    Row,
    commits,
    entries,
    exchange_rows,
    links,
    minimise,
    of_exchange,
    off,
    outcome_of,
    part_of,
    rows,
)

from imbrex.simulate.fabric import islands
from imbrex.simulate.profile import Entry, Profile

FITTED = {
    "schedule": "the first half of the sweep, and the seconds of a processor of its serial rows",
    "collectives": "run 3, top-8, copy-per-rank and hierarchical",
}
CORES_CODECS = ("bf16", "int8", "fp8")
OF_CORES = {
    "weights_bytes_s": (1e10, "one core's reading rate, as a product packs them"),
    "experts_start_s": (5e-5, "a few operators' start"),
    "power_slowdown": (0.0, "no limit seen"),
    "host_holds_moves": (0.0, "gloo's threads ask"),
    "reading_exponent": (1.0, "a product packs its weights before it multiplies"),
    "tiers_chunk_s": (3e-3, "two messages, and a plan inside the node"),
    "gradients_bytes_s": (1e10, "one core's rate, as gradients of chunks are added"),
    "backward_weights_factor": (1.0, "as many operations as the forward"),
    "memory_bytes": (8e9, "a share of a small machine"),
    "value_bytes": (4, "rows and weights in float32"),
}


def fit_two_cores() -> Profile:
    """The shipped profile of two cores: ranks over gloo, a link of 1 Gb/s for every node."""
    flat = ("tile_rows", "tile_columns", "multiprocessors")
    why = "a processor has no tiles: a product takes its operations"
    profile = Profile(
        machine="two cores, gloo", most_ranks=8, entries=entries(flat, (1, 1, 1), why, "assumed")
    )
    guesses = {n: Entry(value=v, status="assumed", source=s) for n, (v, s) in OF_CORES.items()}
    profile = fit_links(profile.with_entries(guesses))
    ours = of_cores()[0]
    source = commits("schedule", {row["run"] for row in ours})
    # One sender a node does not meet others on its link, so its rate is another.
    profile = profile.with_entries(links("pair", 1.1e8, source, "fitted", start=2e-4))
    codecs = [f"{what}_values_s:{codec}" for codec in CORES_CODECS for what in ("encode", "decode")]
    names = (*SCHEDULED, *codecs)

    def fitted(x: np.ndarray) -> Profile:
        # Who computes is never faster for what moves beside it.
        least = [float(name.startswith("bytes_slows")) for name in names]
        return profile.with_entries(entries(names, np.maximum(x, least), source))

    def distances(x: np.ndarray) -> np.ndarray:
        return np.array([math.log(predicted / measured) for predicted, measured in pairs(fitted(x), ours)])

    return fitted(least_squares(distances, (*SCHEDULED.values(), *[1.5e9] * len(codecs))))


SCHEDULED = {
    "pair_bytes_s": 1.1e8,
    "product_flops_s": 7e10,
    "rows_bytes_s": 3e9,
    "copied_bytes_s": 3e9,
    "plan_s": 1e-3,
    "plan_chunk_s": 5e-4,
    "chunk_forward_s": 1e-3,
    "chunk_backward_s": 1e-3,
    "backward_rows_factor": 1.2,
    "bytes_slows_compute": 1.5,
    "bytes_slows_moves": 1.1,
}
"""Figures fitted to the sweep, and where the search for them begins."""


def pairs(some: Profile, of: Sequence[Row]) -> list[tuple[float, float]]:
    """Predicted and measured seconds of rows, and of what two ranks compute in the serial ones: the layer as
    it would be over a link that takes nothing, and the seconds of a processor, where a row has them."""
    nothing = some.with_entries(links("pair", 1e15, "no link", "assumed", start=0.0))
    layers: dict[tuple[str, str], list[Row]] = {}
    for row in of:
        layers.setdefault((str(row["case"]), row["impl"]), []).append(row)
    found = []
    for same in layers.values():
        fabric = islands(some, 2, 1, network="pair")
        done = outcome_of(some, fabric, same[0], backward=True)
        found += [(part_of(done, row), 1e-6 * row["median_us"]) for row in same]
        timed = [row for row in same if row["impl"] == "serial" and "processor_us" in row]
        if timed:
            alone = outcome_of(nothing, islands(nothing, 2, 1, network="pair"), timed[0], backward=True)
            found += [(part_of(alone, row), 0.5e-6 * row["processor_us"]) for row in timed]
    return found


def least_squares(
    distances: Callable[[np.ndarray], np.ndarray], start: Sequence[float], rounds: int = 25
) -> np.ndarray:
    """The positive numbers of the least sum of squares, by Gauss and Newton's steps in their logarithms, each
    as short as it must be to lower it. What the distances do not tell stays near the start: a thousandth of
    the squared way from it counts, too."""
    first = np.log(np.array(start, dtype=np.float64))
    x, damping = first.copy(), 1e-2
    units, stay = np.eye(len(x)), np.sqrt(1e-3)

    def off(x: np.ndarray) -> np.ndarray:
        return np.concatenate([distances(np.exp(x)), stay * (x - first)])

    now = off(x)
    for _ in range(rounds):
        slopes = np.stack([(off(x + 1e-3 * unit) - now) / 1e-3 for unit in units], axis=1)
        while damping < 1e6:
            damped = np.vstack([slopes, np.sqrt(damping) * units])
            step = np.linalg.lstsq(damped, np.concatenate([-now, np.zeros(len(x))]), rcond=None)[0]
            after = off(x + np.clip(step, -1, 1))
            if after @ after < now @ now:
                break
            damping *= 4
        else:
            break
        gain = now @ now - after @ after
        x, now, damping = x + np.clip(step, -1, 1), after, damping / 4
        if gain < 1e-4:
            break
    return np.exp(x)


SWEPT = 10
"""Configurations of the sweep that are fitted to; the others are held out."""
FITTED_SWEEP, LATER_SWEEP, LONG_SWEEP = 16, 17, 18
"""Runs of schedule.json: the one whose first half the profile is fitted to, one of a later day, and one of 40
rounds where the others have 16."""


def of_cores() -> tuple[list[Row], list[Row]]:
    """Schedules on two cores, those fitted to and those held out: halves of the sweep in turns."""
    timed = [row for row in _swept() if row["run"] == FITTED_SWEEP]
    cases = list(dict.fromkeys(str(row["case"]) for row in timed))
    fitted = [row for row in timed if str(row["case"]) in cases[:SWEPT]]
    return fitted, [row for row in timed if str(row["case"]) in cases[SWEPT:]]


def of_another_day(sweep: int) -> list[Row]:
    """A whole sweep that was measured after the profile had been fitted: nothing of it was in sight."""
    return [row for row in _swept() if row["run"] == sweep]


def slowness(sweep: int) -> float:
    """How many times as many seconds of a processor the same serial layers took in that sweep."""
    fitted, later = (
        {(str(row["case"]), row["op"]): row["processor_us"] for row in some if row["impl"] == "serial"}
        for some in (chain(*of_cores()), of_another_day(sweep))
    )
    return statistics.median(later[what] / took for what, took in fitted.items() if what in later)


PROCESSOR_SECONDS = ("experts_start_s", "plan_s", "plan_chunk_s", "chunk_forward_s", "chunk_backward_s")
PROCESSOR_RATES = (
    "product_flops_s",
    "rows_bytes_s",
    "copied_bytes_s",
    "weights_bytes_s",
    "gradients_bytes_s",
)


def slowed(profile: Profile, times: float) -> Profile:
    """The profile of the same machine while everything that its processors do takes so many times as long."""
    entries = profile.entries
    codecs = [name for name in entries if "_values_s:" in name]
    rates = {n: replace(entries[n], value=entries[n].value / times) for n in (*PROCESSOR_RATES, *codecs)}
    seconds = {n: replace(entries[n], value=entries[n].value * times) for n in PROCESSOR_SECONDS}
    return profile.with_entries(rates | seconds)


def _swept() -> list[Row]:
    sweeps = (FITTED_SWEEP, LATER_SWEEP, LONG_SWEEP)
    timed = (row for row in rows("schedule") if row["run"] in sweeps)
    return [
        row for row in timed if row["op"].endswith(("-forward", "-backward")) and row["impl"] in KNOWN_WAYS
    ]


KNOWN_WAYS = ("serial", "optsche-1", "optsche-2", "optsche-4", "optsche-8")


def fit_links(profile: Profile) -> Profile:
    """The rate inside a node and of the node's link, from two exchanges at top-8."""
    points = [
        row
        for impl in ("copy-per-rank", "hierarchical-dedup")
        for op in ("move", "move_back")
        for row in exchange_rows(3, 8, impl, op)
    ]
    source = f"{commits('collectives', [3])}: copy-per-rank and hierarchical, top-8"

    def fitted(x: Sequence[float]) -> Profile:
        near = links("node", float(f"{x[0]:.5g}"), source, "fitted", start=1e-4)
        far = links("network", float(f"{x[1]:.5g}"), source, "fitted", start=2e-4, ports=8)
        return profile.with_entries(near | far)

    def pairs(some: Profile) -> list:
        return [(of_exchange(islands(some, 8, 4), row), 1e-6 * row["median_us"]) for row in points]

    return fitted(tuple(minimise(lambda x: off(pairs(fitted(tuple(x)))), (1e9, 1.1e8), 100)))
