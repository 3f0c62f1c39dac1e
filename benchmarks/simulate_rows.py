"""What fits of the simulator's profiles share: measured rows, entries of a profile, predictions, a search."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from imbrex.bench.shapes import MODELS
from imbrex.simulate.device import Shape
from imbrex.simulate.fabric import Fabric
from imbrex.simulate.profile import Entry, Profile
from imbrex.simulate.run import Case, Layout, Outcome, predict
from imbrex.simulate.traffic import FLOWS, Crowd, seconds

RESULTS = Path(__file__).parent / "results"
Row = Mapping[str, Any]


@cache
def rows(name: str, gpu: str = "") -> tuple[Row, ...]:
    """The rows of a result file; those of runs on GPUs of this name, if it is given."""
    content = json.loads((RESULTS / f"{name}.json").read_text())
    runs = {run["id"] for run in content["runs"] if gpu in run["hardware"].get("gpu", "")}
    return tuple(row for row in content["rows"] if row["run"] in runs)


def commits(name: str, runs: Iterable[int]) -> str:
    """The revisions of runs of a result file, for the source of an entry."""
    content = json.loads((RESULTS / f"{name}.json").read_text())
    found = [run["commit"] for run in content["runs"] if run["id"] in set(runs)]
    return f"benchmarks/results/{name}.json at {', '.join(found)}"


def exchange_rows(run: int, top_k: int, impl: str, op: str) -> list[Row]:
    return [
        r
        for r in rows("collectives")
        if r["run"] == run and r["case"]["K"] == top_k and r["impl"] == impl and r["op"] == op
    ]


def shape_of(case: Row) -> Shape:
    """The layer of a row that names its model, or has its sizes; a sweep has two experts a rank."""
    if "model" in case:
        known = MODELS[case["model"]]
        return Shape(
            width=known.hidden_size,
            inner=known.intermediate_size,
            experts=known.num_experts,
            top_k=known.top_k,
        )
    wide = 4 if case["dtype"] == "float32" else 2
    ranks = case.get("W") or case["nodes"] * case["ranks_per_node"]
    experts = case.get("E", 2 * ranks)
    return Shape(
        width=case["D"], inner=case.get("F", case["D"]), experts=experts, top_k=case["K"], value_bytes=wide
    )


def entries(names: Sequence[str], values: Iterable[float], source: str, status: str = "fitted") -> dict:
    rounded = (float(f"{value:.5g}") for value in values)
    return {
        name: Entry(value=v, status=status, source=source) for name, v in zip(names, rounded, strict=True)
    }


def links(kind: str, bytes_s: float, source: str, status: str, *, start: float, ports: int = 1) -> dict:
    """A tier's entries. start: assumed seconds of a message."""
    return {
        f"{kind}_bytes_s": Entry(value=bytes_s, status=status, source=source),
        f"{kind}_start_s": Entry(value=start, status="assumed", source="the order of a message's start"),
        f"{kind}_latency_s": Entry(value=0.0, status="assumed", source="within the start of a call"),
        f"{kind}_port_ranks": Entry(value=ports, status="assumed", source="how the network was built"),
    }


def of_schedule(profile: Profile, fabric: Fabric, row: Row) -> float:
    """Predicted seconds of a row of schedule.json or layer.json: a forward, a backward, or both."""
    backward = row["op"].endswith("backward") or row["op"] in ("layer", "prediction")
    return part_of(outcome_of(profile, fabric, row, backward=backward), row)


def part_of(done: Outcome, row: Row) -> float:
    """The seconds of an outcome that a row is of."""
    if row["op"] in ("layer-backward", "prediction-backward"):
        return done.backward
    return done.forward + (0.0 if row["op"].endswith("-forward") else done.backward)


def outcome_of(profile: Profile, fabric: Fabric, row: Row, *, backward: bool) -> Outcome:
    """A simulation of the layer of a row."""
    case = row["case"]
    schedule = str(row["impl"]).removeprefix("imbrex-").removesuffix("-joined")
    whole = schedule == "alltoall"
    layout = Layout(
        ep=case["W"],
        transport="alltoall" if whole else case.get("transport", "nvlink"),
        codec=case.get("codec", "identity"),
        schedule="serial" if whole else schedule,
    )
    tokens = case["M"] // case["W"] if "M" in case else case["T"]
    layer = Case(profile=profile, fabric=fabric, shape=shape_of(case), tokens=tokens)
    return predict(layer, layout, backward=backward)


def of_exchange(fabric: Fabric, row: Row) -> float:
    """Predicted seconds of a row of collectives.json: the rows on their way."""
    case = row["case"]
    impl = str(row["impl"])
    transport = {"copy-per-rank": "alltoall", "hierarchical-dedup": "hierarchical"}.get(impl, impl)
    wide = 4 if case["dtype"] == "float32" else 2
    ranks = case["nodes"] * case["ranks_per_node"]
    crowd = Crowd(
        ranks=ranks,
        tensor=1,
        experts=case["E"],
        top_k=case["K"],
        tokens=case["T"],
        row_bytes=case["D"] * wide,
    )
    return seconds(FLOWS[transport](crowd, fabric), fabric, sharing=case["ranks_per_node"])


def off(pairs: Iterable[tuple[float, float]]) -> float:
    """Mean distance of predicted from measured seconds, as a logarithm of their ratio."""
    return statistics.fmean(abs(math.log(predicted / measured)) for predicted, measured in pairs)


def minimise(loss: Callable[[np.ndarray], float], start: Sequence[float], steps: int = 300) -> np.ndarray:
    """The positive numbers of the least loss, by the simplex of Nelder and Mead in their logarithms."""
    first = np.log(np.array(start, dtype=np.float64))
    points = [first, *(first + 0.15 * unit for unit in np.eye(len(first)))]
    ranked = sorted((loss(np.exp(p)), tuple(p)) for p in points)
    for _ in range(steps):
        (best, _), (worse, _), (worst, last) = ranked[0], ranked[-2], ranked[-1]
        centre = np.mean([p for _, p in ranked[:-1]], axis=0)
        turn = 2 * centre - last
        value = loss(np.exp(turn))
        if value < best:
            further = 3 * centre - 2 * np.array(last)
            ranked[-1] = min((value, tuple(turn)), (loss(np.exp(further)), tuple(further)))
        elif value < worse:
            ranked[-1] = (value, tuple(turn))
        else:
            inner = (centre + last) / 2
            ranked[-1] = (loss(np.exp(inner)), tuple(inner))
            if ranked[-1][0] >= worst:
                near = [(np.array(p) + ranked[0][1]) / 2 for _, p in ranked]
                ranked = [(loss(np.exp(p)), tuple(p)) for p in near]
        ranked.sort()
    return np.exp(ranked[0][1])
