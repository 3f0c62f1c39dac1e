"""The tables of plan.md: how far predictions are from what was measured, and where ideas stop helping."""

from __future__ import annotations

import statistics

from benchmarks.simulate import clear_losses, digest, losses, unsure
from docs.tables.results import Table, read

from imbrex.cli.plan import LAYERS
from imbrex.simulate import scale
from imbrex.simulate.device import Shape
from imbrex.simulate.fabric import islands
from imbrex.simulate.loads import Spread, Stragglers
from imbrex.simulate.plans import choose, rivals
from imbrex.simulate.profile import Profile
from imbrex.simulate.request import Request, World
from imbrex.simulate.story import HEAD, rows_of

FAR, CLOSE = 0.20, 0.05
ANSWERS = 8
SHOWN = (16, 64, 256, 1024, 4096, 8192)


def validated() -> Table:
    """Held-out rows by part: errors, and what the predicted choice loses."""
    rows = list(read("simulate"))
    head = ["held out", "rows", "median error", "worst", "choices within 5 % of the best"]
    body = [
        [name, number, f"{median:.1%}", f"{worst:.0%}", chosen or "-"]
        for name, number, median, worst, chosen in digest(rows)
    ]
    return Table(head=head, body=body, rows=rows)


def cores() -> Table:
    """What the rounds of rows on two cores say of their errors."""
    rows = [row for row in read("simulate") if "two cores" in row["case"]["part"] and "min_us" in row]
    body = []
    for part in dict.fromkeys(row["case"]["part"] for row in rows):
        ours = [row for row in rows if row["case"]["part"] == part]
        spread = statistics.median((row["max_us"] - row["min_us"]) / row["median_us"] for row in ours)
        far = [row for row in ours if abs(row["error"]) > FAR]
        ours = [{**row, "again": False} for row in ours]
        lost = sum(one > CLOSE for some in losses(ours).values() for one in some)
        body.append(
            [
                part,
                f"{spread:.0%}",
                f"{sum(unsure(row) for row in ours)} of {len(ours)}",
                f"{sum(unsure(row) for row in far)} of {len(far)}",
                f"{len(clear_losses(ours))} of {lost}",
            ]
        )
    head = ["held out", "rounds of a row, slowest minus fastest", "predicted within its rounds"]
    return Table(head=[*head, "of those over 20 %", "choices lost for sure"], body=body, rows=rows)


def answer() -> str:
    """The first lines that the page's first command prints of a plan and its rivals."""
    h200 = Profile.load("h200")
    world = World(profile=h200, fabric=islands(h200, 64, 8), spread=Spread(), stragglers=Stragglers())
    deepseek = Shape(width=7168, inner=2048, experts=256, top_k=8)
    asked = Request(shape=deepseek, ranks=64, tokens=16384, mode="forward", layers=LAYERS["deepseek-v3"])
    plans = choose(asked, world)
    body = rows_of([plans[0], *rivals(plans)])[:ANSWERS]
    return f"{Table(head=HEAD, body=body, rows=[]).cells()}\n\n*Simulated with the shipped profile of H200.*"


def gains() -> str:
    """Simulated gains of every idea over ranks, and over rates at 64 ranks."""
    growth = scale.Growth(profile=Profile.load("h200"))
    by_ranks, by_rates = scale.over_ranks(growth, SHOWN), scale.over_rates(growth)
    head = ["idea", *(f"{ranks} ranks" for ranks in SHOWN), *(_rate(rate) for rate in scale.RATES[1:])]
    lines = [head, ["---"] * len(head)]
    for idea, curve in by_ranks.items():
        cells = [gain for _, gain in curve] + [gain for _, gain in by_rates[idea][1:]]
        lines.append([idea, *(f"{gain:.2f}" for gain in cells)])
    table = "\n".join(f"| {' | '.join(line)} |" for line in lines)
    return f"{table}\n\n*Simulated with the shipped profile of H200: none of these ranks was measured.*"


def _rate(bytes_s: float) -> str:
    bits = 8 * bytes_s
    return f"{bits / 1e9:g} Gb/s" if bits >= 1e9 else f"{bits / 1e6:g} Mb/s"
