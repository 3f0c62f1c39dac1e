"""How far is the simulator from what was measured? Profiles are fitted to some results, others predicted.

    python -m benchmarks.simulate_fit   # writes src/imbrex/simulate/profiles/*.json
    python -m benchmarks.simulate       # predicts what was held out, writes results/simulate.json

`benchmarks/simulate_fit.py` and `simulate_cores.py` say what is fitted to. Held out: every whole layer over
NVLink at 2 and 4 GPUs (`layer.json`), serial and fused layers on 2 and 4 H200 and, by the same profile, on 2
and 4 H100 (`fused.json`) but those named there; every schedule over NVLink and over sockets, every other
exchange, two tiers in one stream in other numbers of chunks and with their backward (`tiers.json`), the
sweep's second half on two cores. A row that was fitted to is never validated on.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import permutations
from typing import Any

from benchmarks.simulate_cores import (
    KNOWN_WAYS,
    LATER_SWEEP,
    LONG_SWEEP,
    of_another_day,
    of_cores,
    slowed,
    slowness,
)
from benchmarks.simulate_fit import (
    is_bytes_fitted,
    is_fused_fitted,
    is_pair_fitted,
    is_piece_fitted,
    is_tiers_fitted,
    of_tiers,
    one_node,
    with_older_host,
)
from benchmarks.simulate_rows import RESULTS, Row, of_exchange, of_schedule, rows

from imbrex.bench.results import describe_run, write_results
from imbrex.simulate.fabric import Fabric, islands
from imbrex.simulate.plans import CLOSE
from imbrex.simulate.profile import Profile

QUESTION = "How far is the simulator from what was measured?"


@dataclass(frozen=True, slots=True)
class Part:
    """Rows that were held out, and how each is predicted. again: another part has the same cases in more
    rounds, and choices are counted there."""

    name: str
    file: str
    rows: tuple[Row, ...]
    fabric: Callable[[Row], Fabric]
    predicted: Callable[[Fabric, Row], float]
    again: bool = False


SCHEDULED = ("layer-forward", "layer-backward", "layer", "prediction-forward", "prediction-backward")
EXCHANGES = ("copy-per-choice", "copy-per-rank", "hierarchical-dedup", "pipe", "sequential", "2dh")
FITTED_MOVES = {
    (7, 8, "copy-per-rank", "move"),
    *((3, 8, impl, op) for impl in ("copy-per-rank", "hierarchical-dedup") for op in ("move", "move_back")),
}


def parts() -> list[Part]:
    """Everything that was measured and not fitted to."""
    return [*_gpu_parts(Profile.load("h200")), *_core_parts(Profile.load("two-cores"))]


def _ways(*runs: int) -> tuple[Row, ...]:
    """Rows of schedules in these runs, but those fitted to."""
    fitted = (row for row in rows("schedule") if is_pair_fitted(row))
    left = [id(row) for row in fitted]
    return tuple(
        row
        for row in rows("schedule")
        if row["run"] in runs and row["op"] in SCHEDULED and row["impl"] in KNOWN_WAYS and id(row) not in left
    )


def _moves(*runs: int) -> tuple[Row, ...]:
    """Rows of exchanges in these runs, but those fitted to."""
    return tuple(
        row
        for row in rows("collectives")
        if row["run"] in runs
        and row["op"] in ("move", "move_back")
        and row["impl"] in EXCHANGES
        and (row["run"], row["case"]["K"], row["impl"], row["op"]) not in FITTED_MOVES
    )


def _gpu_parts(profile: Profile) -> list[Part]:
    def nvlink(row: Row) -> Fabric:
        return one_node(profile, row["case"]["W"])

    def sockets(row: Row) -> Fabric:
        ranks, pair = row["case"].get("W", 4), row["case"].get("W") == 2
        return islands(profile, ranks, 1 if pair else 2, network="sockets-pair" if pair else "sockets")

    predicted = partial(of_schedule, profile)
    layers = tuple(row for row in rows("layer", "H200") if row["impl"] == "imbrex-serial")
    both = [row for row in rows("fused") if row["impl"] in ("imbrex-serial", "imbrex-fused")]
    left = [row for row in both if not is_piece_fitted(row) and not is_fused_fitted(row)]
    fused = tuple(row for row in left if row["run"] == 0)
    other_card = tuple(row for row in left if row["run"] in (1, 2))
    newer = tuple(row for row in left if row["run"] in (3, 4))
    four = tuple(row for row in left if row["run"] in (6, 7))

    over_sockets = partial(of_schedule, with_older_host(profile))
    tiers = tuple(
        row
        for row in rows("tiers")
        if row["impl"].startswith(("tiered", "hierarchical")) and not is_tiers_fitted(row)
    )
    bytewise = tuple(
        r for r in rows("layer", "H200") if r["impl"] == "imbrex-alltoall" and not is_bytes_fitted(r)
    )
    apart = tuple(row for row in _ways(7, 8, 11) if row["op"] != "layer")
    return [
        Part("whole layer, NVLink, 2 and 4 GPUs", "layer", layers, nvlink, predicted),
        Part("serial and fused layer, 2 GPUs", "fused", fused, nvlink, predicted),
        Part("serial and fused layer, 2 GPUs, later", "fused", newer, nvlink, predicted),
        Part("serial and fused layer, 4 GPUs", "fused", four, nvlink, predicted),
        Part("serial and fused layer, 2 and 4 GPUs (H100)", "fused", other_card, nvlink, predicted),
        Part("schedules, NVLink, 2 and 4 GPUs", "schedule", _ways(9, 13), nvlink, predicted),
        Part("whole layer, NCCL over NVLink, 2 GPUs", "layer", bytewise, nvlink, predicted),
        Part("schedules, sockets, 2 and 4 GPUs", "schedule", apart, sockets, over_sockets),
        Part("exchanges, sockets, 4 GPUs", "collectives", _moves(7), sockets, of_exchange),
        Part("two tiers, sockets, 2 GPUs", "tiers", tiers, sockets, lambda _, row: of_tiers(profile, row)),
    ]


def _core_parts(profile: Profile) -> list[Part]:
    def predicted(fabric: Fabric, row: Row) -> float:
        return of_schedule(profile, fabric, row)

    def pair(row: Row) -> Fabric:
        return islands(profile, 2, 1, network="pair")

    def later(name: str, sweep: int, *, again: bool) -> Part:
        that_day = partial(of_schedule, slowed(profile, slowness(sweep)))
        return Part(name, "schedule", tuple(of_another_day(sweep)), pair, that_day, again)

    def nodes(row: Row) -> Fabric:
        return islands(profile, 8, 4)

    held_out = tuple(of_cores()[1])
    return [
        Part("schedules, two cores, 1 Gb/s", "schedule", held_out, pair, predicted, again=True),
        later("schedules, two cores, another day", LATER_SWEEP, again=True),
        later("schedules, two cores, 40 rounds", LONG_SWEEP, again=False),
        Part("exchanges, two cores, 1 Gb/s", "collectives", _moves(3, 6), nodes, of_exchange),
    ]


def validated() -> list[dict[str, Any]]:
    """Every held-out row with what is predicted of it."""
    found = []
    for part in parts():
        for row in part.rows:
            predicted = 1e6 * part.predicted(part.fabric(row), row)
            found.append(
                {
                    "op": "validated",
                    "impl": row["impl"],
                    "case": row["case"] | {"part": part.name, "what": row["op"], "of_run": row["run"]},
                    "median_us": row["median_us"],
                    **{name: row[name] for name in ("min_us", "max_us") if name in row},
                    "predicted_us": round(predicted, 1),
                    "error": round(predicted / row["median_us"] - 1, 4),
                    **({"again": True} if part.again else {}),
                }
            )
    return found


def choices(found: Sequence[Row]) -> list[list[Row]]:
    """Rows that say which way is the fastest of one case: forwards, and steps. Nobody chooses a way for a
    backward alone: its rows count together with the forward's, by the sums of both."""
    ways: dict[str, list[Row]] = {}
    for row in found:
        if row.get("again"):
            continue
        case = dict(row["case"])
        what = case.pop("what")
        key = json.dumps(case, sort_keys=True)
        ways.setdefault(f"{what} {key}", []).append(row)
    for key in [key for key in ways if key.split(" ")[0].endswith("-backward")]:
        forwards = {row["impl"]: row for row in ways[key.replace("-backward", "-forward", 1)]}
        ways[key] = [_step(forwards[row["impl"]], row) for row in ways[key] if row["impl"] in forwards]
    return [several for several in ways.values() if len({row["impl"] for row in several}) > 1]


def _step(forward: Row, backward: Row) -> Row:
    names = ("median_us", "predicted_us", "min_us", "max_us")
    return {**backward, **{name: forward[name] + backward[name] for name in names if name in forward}}


def choose(several: Sequence[Row], close: float = CLOSE) -> Row:
    """The way that `imbrex plan` takes: of predictions within `close` of the lowest the fewest chunks."""
    least = min(row["predicted_us"] for row in several)
    near = [row for row in several if row["predicted_us"] <= close * least]
    return min(near, key=lambda row: (_chunks(row["impl"]), row["predicted_us"]))


def losses(found: Sequence[Row], close: float = CLOSE) -> dict[str, list[float]]:
    """By part: how much slower than the best measured way the chosen one is, wherever several were."""
    lost: dict[str, list[float]] = {}
    for several in choices(found):
        best = min(row["median_us"] for row in several)
        loss = choose(several, close)["median_us"] / best - 1
        lost.setdefault(several[0]["case"]["part"], []).append(loss)
    return lost


def _chunks(impl: str) -> float:
    """Chunks of a schedule, and a half more where its kernels are fused; nothing of other ways."""
    if impl.endswith(("serial", "fused")):
        return 1 + 0.5 * impl.endswith("fused")
    number = impl.rpartition("-")[2]
    return int(number) if number.isdecimal() else 0


def unsure(row: Row) -> bool:
    """Whether a prediction lies between the fastest and the slowest round of its row."""
    return row.get("min_us", row["median_us"]) <= row["predicted_us"] <= row["max_us"]


def clear_losses(found: Sequence[Row]) -> list[float]:
    """Losses of more than 5 % that the measurement is sure of: no call of the best way took as long as the
    chosen one's median."""
    sure = []
    for several in choices(found):
        choice = choose(several)
        best = min(several, key=lambda row: row["median_us"])
        if choice["median_us"] > max(1.05 * best["median_us"], best["max_us"]):
            sure.append(choice["median_us"] / best["median_us"] - 1)
    return sure


def by_another_day() -> list[float]:
    """What the best measured way of one sweep of two cores loses in another, over all pairs of the three:
    what choices by measurement lose there."""
    fitted, held_out = of_cores()
    several = [[*fitted, *held_out], of_another_day(LATER_SWEEP), of_another_day(LONG_SWEEP)]
    sweeps = [{_named(ways): ways for ways in choices(_as_found(some))} for some in several]
    lost = []
    for here, there in permutations(sweeps, 2):
        for case, ways in here.items():
            took = {row["impl"]: row["median_us"] for row in there[case]}
            choice = min((row for row in ways if row["impl"] in took), key=lambda row: row["median_us"])
            lost.append(took[choice["impl"]] / min(took.values()) - 1)
    return lost


def _as_found(some: Sequence[Row]) -> list[Row]:
    return [{**row, "case": row["case"] | {"what": row["op"]}, "predicted_us": 0.0} for row in some]


def _named(ways: Sequence[Row]) -> str:
    return json.dumps(ways[0]["case"], sort_keys=True)


def _within(lost: dict[str, list[float]]) -> str:
    every = [one for some in lost.values() for one in some]
    return f"{sum(one <= 0.05 for one in every)} of {len(every)}, at most {max(every):.0%}" if every else ""


def digest(found: Sequence[Row]) -> list[tuple[str, int, float, float, str]]:
    """By part and over all: number of rows, median and worst error, and what choices lose."""
    lines, lost = [], losses(found)
    names = list(dict.fromkeys(row["case"]["part"] for row in found))
    for name in [*names, "all"]:
        errors = [abs(row["error"]) for row in found if name in ("all", row["case"]["part"])]
        said = _within({part: some for part, some in lost.items() if name in ("all", part)})
        lines.append((name, len(errors), statistics.median(errors), max(errors), said))
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=QUESTION)
    parser.add_argument("--out", default=str(RESULTS / "simulate.json"))
    args = parser.parse_args()
    predictions = validated()
    for name, number, median, worst, chosen in digest(predictions):
        print(f"{name:36} {number:4}  median {median:.1%}  worst {worst:.1%}  choices within 5 %: {chosen}")
    print(f"by the lowest prediction alone: {_within(losses(predictions, 1.0))}")
    shorter = [{**row, "again": False} for row in predictions if "again" in row]
    print(f"two cores, sweeps of 16 rounds: {_within(losses(shorter))}")
    print(f"two cores, the best measured of one sweep in another: {_within({'': by_another_day()})}")
    write_results(args.out, QUESTION, describe_run("python -m benchmarks.simulate"), predictions)


if __name__ == "__main__":
    main()
