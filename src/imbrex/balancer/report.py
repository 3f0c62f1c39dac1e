"""An HTML file that shows what the balancer did, from its journal."""

from __future__ import annotations

import html
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from imbrex.placement.packing import Floats
from imbrex.placement.replay import imbalance_of, mean_over_layers
from imbrex.runtime.checks import UNREADABLE, why

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

SPAN = 0.4
"""The part of the mean that is full colour: 10 % is a quarter of the way, which the eye tells from white."""
METRICS, JOURNAL = "metrics.jsonl", "balance.jsonl"
"""Names in a run's folder of what may hold the balancer's lines: its metrics, or a journal as the demo writes
it."""
STYLE = (
    "body { font: 15px/1.5 system-ui, sans-serif; max-width: 1080px; margin: 2rem auto; padding: 0 1rem } "
    "h2 { font-size: 1.15rem; margin: 2rem 0 .2rem } p { color: #555; margin: .2rem 0 } "
    "td { padding: .1rem 1.2rem .1rem 0 }"
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Story:
    """A run, as its report tells it. layers: numbers. loads_ILW: choices computed by every rank.
    counts_ILE: choices per expert. switched: (iteration, place of the layer) of every new placement.
    predicted_IL: balancedness promised, 0 where nothing was. crossings_WW: choices of a rank's tokens
    computed by a rank. facts: the table."""

    layers: Sequence[int]
    loads_ILW: Floats
    counts_ILE: Floats
    switched: Sequence[tuple[int, int]] = ()
    predicted_IL: Floats | None = None
    crossings_WW: Floats | None = None
    facts: dict[str, str]


def read_journal(path: Path) -> Story:
    """Raises ValueError, one sentence, where the file is cut off or no journal."""
    if path.is_dir():
        path /= JOURNAL if (path / JOURNAL).exists() else METRICS
    try:
        every = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
        lines = [line for line in every if "crossings" in line]
        last = lines[-1] if lines else None
    except UNREADABLE as error:
        raise ValueError(f"report: {path} is no whole journal of a balancer ({why(error)})") from None
    if last is None:
        raise ValueError(
            f"report: {path} has no line of a balancer; run with OnlineBalancer(journal=...), or "
            "imbrex demo --balance"
        )
    try:
        place = {number: at for at, number in enumerate(last["layers"])}
        return Story(
            layers=last["layers"],
            loads_ILW=np.array([line["loads"] for line in lines], dtype=np.float64),
            counts_ILE=np.array([line["expert_load"] for line in lines], dtype=np.float64),
            switched=[(n, place[number]) for n, line in enumerate(lines) for number in line["switched"]],
            predicted_IL=np.array([line["predicted"] for line in lines]),
            crossings_WW=np.sum([line["crossings"] for line in lines], axis=0),
            facts={
                "iterations": str(len(lines)),
                "new placements": f"{last['switches']:.0f}",
                "migrations dropped": f"{last['drops']:.0f}",
                "bytes moved here": f"{last['bytes_moved']:.0f}",
                "seconds hidden": f"{last['seconds_hidden']:.3f}",
                "seconds exposed": f"{last['seconds_exposed']:.3f}",
                "stopped": "yes" if last["stopped"] else "no",
            },
        )
    except UNREADABLE as error:
        raise ValueError(f"report: {path} is no whole journal of a balancer ({why(error)})") from None


def write_story(path: Path, title: str, story: Story, before: Story | None = None) -> None:
    """Write the report. before: the same iterations without it, for comparison."""
    sections = [
        (
            "Balancedness",
            "Mean over maximum of the ranks' load, mean over layers: 1 is even. Vertical lines are updates.",
            _balancedness(story, before),
        ),
        *_before_and_after(story, before),
        (
            "Load by rank over time",
            "Load of a rank over the mean, mean over layers, in the same colours. Lines: updates.",
            _over_time(story),
        ),
        (
            "Layer and expert",
            "Choices that fell on an expert over the mean, all iterations.",
            _heat(_relative(story.counts_ILE.sum(0)), "expert", "layer", story.layers),
        ),
    ]
    if story.crossings_WW is not None:
        about = "Choices of a rank's tokens, by the rank that computed them."
        ranks = range(len(story.crossings_WW))
        sections.append(("Traffic", about, _heat(story.crossings_WW, "computed on", "tokens of", ranks)))
    rows = "".join(
        f"<tr><td>{html.escape(k)}</td><td>{html.escape(v)}</td></tr>" for k, v in story.facts.items()
    )
    body = "".join(
        f"<h2>{name}</h2><p>{about}</p>"
        + figure.to_html(full_html=False, include_plotlyjs="inline" if n == 0 else False)
        for n, (name, about, figure) in enumerate(sections)
    )
    path.write_text(
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{html.escape(title)}</title>'
        f"<style>{STYLE}</style></head><body><h1>{html.escape(title)}</h1><table>{rows}</table>{body}"
        "</body></html>",
        encoding="utf-8",
    )


def _before_and_after(story: Story, before: Story | None) -> list[tuple[str, str, Any]]:
    """Rank loads by layer, of another run and this one, or of this one's first and last quarter."""
    if before is not None:
        parts = {"without": before.loads_ILW.sum(0), "with": story.loads_ILW.sum(0)}
    else:
        quarter = max(len(story.loads_ILW) // 4, 1)
        loads = story.loads_ILW
        parts = {"first quarter": loads[:quarter].sum(0), "last quarter": loads[-quarter:].sum(0)}
    return [
        (
            f"Layer and rank, {name}",
            "Load of a rank over the mean of its layer: white is the mean, full colour 40 % away and beyond.",
            _heat(_relative(loads_LW), "rank", "layer", story.layers, middle=1.0),
        )
        for name, loads_LW in parts.items()
    ]


def _balancedness(story: Story, before: Story | None) -> Figure:
    figure = _figure("iteration", "mean / max")
    for name, of in {"actual": story, "without": before}.items():
        if of is not None:
            balanced_IL = 1 / (1 + imbalance_of(of.loads_ILW))
            figure.add_scatter(y=mean_over_layers(balanced_IL, of.loads_ILW), name=name)
    if story.predicted_IL is not None and story.predicted_IL.any():
        known_I = (story.predicted_IL > 0).sum(1)
        mean_I = story.predicted_IL.sum(1) / np.maximum(known_I, 1)
        figure.add_scatter(y=np.where(known_I > 0, mean_I, np.nan), name="predicted", line={"dash": "dot"})
    for iteration in sorted({iteration for iteration, _ in story.switched}):
        figure.add_vline(x=iteration + 0.5, line={"width": 0.5, "color": "#bbb"})
    return figure


def _over_time(story: Story) -> Figure:
    had_IL1 = story.loads_ILW.any(-1, keepdims=True)
    mean_IW = _relative(story.loads_ILW).sum(1) / np.maximum(had_IL1.sum(1), 1)
    figure = _heat(mean_IW, "rank", "iteration", range(len(mean_IW)), middle=1.0)
    for iteration in sorted({iteration for iteration, _ in story.switched}):
        figure.add_hline(y=iteration + 0.5, line={"width": 1, "color": "#d62728"})
    return figure


def _relative(loads: Floats) -> Floats:
    mean = loads.mean(-1, keepdims=True)
    return loads / np.where(mean > 0, mean, 1)


def _heat(z: Floats, x: str, y: str, rows: Sequence[int], middle: float | None = None) -> Figure:
    """A heat map. middle: the value that is white; the colours end at SPAN above and below it."""
    figure = _figure(x, y, height=180 + 14 * min(len(z), 60))
    colours: dict[str, Any] = {"colorscale": "Viridis"}
    if middle is not None:
        colours = {"colorscale": "RdBu_r", "zmin": middle - SPAN, "zmax": middle + SPAN}
    figure.add_heatmap(z=z.round(4), y=list(rows), **colours)
    figure.update_yaxes(autorange="reversed")
    return figure


def _figure(x: str, y: str, *, height: int = 320) -> Figure:
    import plotly.graph_objects as go

    figure = go.Figure(layout={"xaxis": {"title": x}, "yaxis": {"title": y}, "height": height})
    figure.update_layout(template="plotly_white", margin={"l": 60, "r": 20, "t": 20, "b": 50})
    return figure
