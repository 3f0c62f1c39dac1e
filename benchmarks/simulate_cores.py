"""The simulator's shipped profile of two cores, fitted to half of a sweep and to two exchanges.

    python -m benchmarks.simulate_fit two-cores

`FITTED` says to what. `benchmarks/simulate.py` predicts the rest.
"""

from __future__ import annotations

import json
from collections.abc import Sequence

import numpy as np
from benchmarks.simulate_fit import (
    RESULTS,
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
    "schedule": "the first half of the sweep",
    "collectives": "run 3, top-8, copy-per-rank and hierarchical",
}
CORES_CODECS = ("bf16", "int8", "fp8")
OF_CORES = {
    "weights_bytes_s": (1e10, "one core's reading rate"),
    "experts_start_s": (5e-5, "a few operators' start"),
    "rows_bytes_s": (1e10, "one core's copying rate"),
    "power_slowdown": (0.0, "no limit seen"),
    "host_holds_moves": (0.0, "gloo's threads ask"),
    "reading_exponent": (50.0, "a core reads while it multiplies"),
    "tiers_chunk_s": (3e-3, "two messages, and a plan inside the node"),
    "gradients_bytes_s": (1e10, "one core's writing rate"),
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
    names = (
        "pair_bytes_s",
        *("product_flops_s", "copied_bytes_s", "plan_s", "chunk_forward_s", "chunk_backward_s"),
        *("backward_rows_factor", "bytes_slows_compute", "bytes_slows_moves"),
        *(f"{what}_values_s:{codec}" for codec in CORES_CODECS for what in ("encode", "decode")),
    )

    def fitted(x: np.ndarray) -> Profile:
        return profile.with_entries(entries(names, np.maximum(x, [0] * 7 + [1, 1] + [0] * 6), source))

    layers: dict[tuple[str, str], list[Row]] = {}
    for row in ours:
        layers.setdefault((str(row["case"]), row["impl"]), []).append(row)

    def pairs(some: Profile) -> list:
        fabric = islands(some, 2, 1, network="pair")
        done = ((outcome_of(some, fabric, of[0], backward=True), of) for of in layers.values())
        return [(part_of(each, row), 1e-6 * row["median_us"]) for each, of in done for row in of]

    start = (1.1e8, 7e10, 3e9, 1e-3, 1e-3, 1e-3, 1.2, 2.0, 1.1, *[3e8] * 6)
    return fitted(minimise(lambda x: off(pairs(fitted(x))), start, 400))


SWEPT = 10
"""Configurations of the sweep that are fitted to; the others are held out."""


def of_cores() -> tuple[list[Row], list[Row]]:
    """Schedules on two cores, those fitted to and those held out: halves of the sweep in turns, `serial`
    included; where a file has none, of the sweeps that were measured one after the other."""
    runs = json.loads((RESULTS / "schedule.json").read_text())["runs"]
    in_turns = [run["id"] for run in runs if "--in-turns" in run["command"] and "gpu" not in run["hardware"]]
    timed = [
        row
        for row in rows("schedule")
        if row["op"].endswith(("-forward", "-backward")) and row["impl"] in KNOWN_WAYS
    ]
    if not in_turns:
        return [r for r in timed if r["run"] == 5], [r for r in timed if r["run"] in (1, 6)]
    timed = [row for row in timed if row["run"] == max(in_turns)]
    cases = list(dict.fromkeys(str(row["case"]) for row in timed))
    fitted = [row for row in timed if str(row["case"]) in cases[:SWEPT]]
    return fitted, [row for row in timed if str(row["case"]) in cases[SWEPT:]]


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
