"""The report of a training run: one HTML file that opens without a network."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from imbrex.observe.page import empty_figure, write_page
from imbrex.observe.recorder import PHASES, Span

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

COMMUNICATING = ("plan", "dispatch", "combine")
"""Phases that wait for other ranks: the exchange of counts and the two crossings."""

_COLOURS = {
    "route": "#7f7f7f",
    "plan": "#e377c2",
    "dispatch": "#d62728",
    "experts": "#2ca02c",
    "combine": "#ff7f0e",
    "rest": "#c7d5e6",
}


def communicating_share(times_ms: Mapping[str, float]) -> float:
    """Share of a step's time in the phases that wait for other ranks. times_ms: by phase, and of `step`."""
    return sum(times_ms[name] for name in COMMUNICATING) / times_ms["step"]


def write_report(
    path: str | os.PathLike[str],
    *,
    title: str,
    facts: Mapping[str, str],
    metrics: Sequence[Mapping[str, Any]],
    spans: Sequence[Sequence[Span]],
    references: Mapping[str, float] | None = None,
) -> None:
    """Write the report.

    facts: the table at its head. metrics: a record per step, as in `metrics.jsonl`. spans: of every rank.
    references: losses to draw beside the curve, by name.
    """
    sections = [
        ("Loss", "Nats a byte, of the global batch.", _loss(metrics, references or {})),
        ("Throughput", "Bytes of text trained on per second, all ranks together.", _throughput(metrics)),
        (
            "Where the time goes",
            "Share of every step, forward and backward, mean over ranks. Plan, dispatch and combine "
            "communicate; waiting for a slower rank counts as communicating.",
            _shares(metrics),
        ),
        *_timeline_section(metrics, spans),
        (
            "Rows per rank and layer",
            "Rows that the experts of a rank computed, relative to the mean rank, over all steps.",
            _rank_load(metrics),
        ),
        (
            "Load per expert over time",
            "Choices that fell on an expert, relative to the mean expert; a panel per layer.",
            _expert_load(metrics),
        ),
    ]
    write_page(path, title=title, facts=facts, sections=sections)


def _loss(metrics: Sequence[Mapping[str, Any]], references: Mapping[str, float]) -> Figure:
    figure = empty_figure("step", "nats a byte")
    figure.add_scatter(x=[m["step"] for m in metrics], y=[m["loss"] for m in metrics], name="training")
    held_out = [m for m in metrics if "held_out_loss" in m]
    figure.add_scatter(
        x=[m["step"] for m in held_out],
        y=[m["held_out_loss"] for m in held_out],
        name="held-out",
        mode="lines+markers",
    )
    for name, loss in references.items():
        figure.add_hline(y=loss, line={"dash": "dot", "width": 1}, annotation_text=f"{name} {loss:.2f}")
    return figure


def _throughput(metrics: Sequence[Mapping[str, Any]]) -> Figure:
    figure = empty_figure("step", "tokens/s")
    figure.add_scatter(
        x=[m["step"] for m in metrics], y=[m["tokens_per_s"] for m in metrics], name="tokens/s"
    )
    return figure


def _shares(metrics: Sequence[Mapping[str, Any]]) -> Figure:
    figure = empty_figure("step", "share of the step")
    steps = [m["step"] for m in metrics]
    for name in (*PHASES, "rest"):
        figure.add_scatter(
            x=steps,
            y=[m[f"{name}_ms"] / m["step_ms"] for m in metrics],
            name=name,
            stackgroup="time",
            mode="none",
            fillcolor=_COLOURS[name],
        )
    figure.add_scatter(
        x=steps,
        y=[m["communicating"] for m in metrics],
        name="communicating",
        line={"color": "black", "width": 1.5},
    )
    figure.update_yaxes(range=[0, 1], tickformat=".0%")
    return figure


def typical_step(metrics: Sequence[Mapping[str, Any]], spans: Sequence[Sequence[Span]]) -> int | None:
    """The step of median duration among the last twenty of which spans are left."""
    steps = set.intersection(*({s.step for s in of_rank} for of_rank in spans)) if spans else set()
    last = sorted((m for m in metrics if m["step"] in steps), key=lambda m: m["step"])[-20:]
    by_time = sorted(last, key=lambda m: m["step_ms"])
    return by_time[len(by_time) // 2]["step"] if by_time else None


def _timeline_section(
    metrics: Sequence[Mapping[str, Any]], spans: Sequence[Sequence[Span]]
) -> list[tuple[str, str, Figure]]:
    step = typical_step(metrics, spans)
    if step is None:
        return []
    about = (
        f"Step {step}, of median duration among the last. A lighter bar is the backward of its phase; "
        "the grey ones behind are the whole forward, the backward, the gradients and the optimiser."
    )
    return [("One step across ranks", about, _timeline(step, spans))]


def _timeline(step: int, spans: Sequence[Sequence[Span]]) -> Figure:
    chosen = [(rank, s) for rank, of_rank in enumerate(spans) for s in of_rank if s.step == step]
    start = min(s.begin_ns for _, s in chosen)
    figure = empty_figure("milliseconds", "rank", height=120 + 60 * len(spans))
    for name in sorted({s.name for _, s in chosen}, key=_drawing_order):
        bars = [(rank, s) for rank, s in chosen if s.name == name]
        phase = name.removesuffix("_backward")
        outer = phase not in PHASES
        figure.add_bar(
            orientation="h",
            name=name,
            y=[rank for rank, _ in bars],
            base=[(s.begin_ns - start) / 1e6 for _, s in bars],
            x=[s.duration_ns / 1e6 for _, s in bars],
            width=0.9 if outer else 0.6,
            marker={
                "color": "#e3e6ea" if outer else _COLOURS[phase],
                "line": {"width": 0.5, "color": "white"},
            },
            opacity=0.55 if name != phase else 1.0,
            customdata=[", ".join(f"{k} {v}" for k, v in s.where) for _, s in bars],
            hovertemplate=f"{name} %{{customdata}}<br>%{{x:.2f}} ms<extra>rank %{{y}}</extra>",
        )
    figure.update_layout(barmode="overlay")
    figure.update_yaxes(autorange="reversed", dtick=1)
    return figure


def _drawing_order(name: str) -> tuple[int, str]:
    phase = name.removesuffix("_backward")
    return (1 + PHASES.index(phase) if phase in PHASES else 0, name)


def _relative(row: Sequence[float]) -> list[float]:
    mean = sum(row) / len(row) if row else 0.0
    return [value / mean if mean else 0.0 for value in row]


def _rank_load(metrics: Sequence[Mapping[str, Any]]) -> Figure:
    # A resumed run may have had another number of ranks before.
    num_ranks = len(metrics[-1]["rank_rows"]) if metrics else 0
    same = [m["rank_rows"] for m in metrics if len(m["rank_rows"]) == num_ranks]
    totals = [[sum(values) for values in zip(*of_rank, strict=True)] for of_rank in zip(*same, strict=True)]
    by_layer = [_relative(of_layer) for of_layer in zip(*totals, strict=True)]
    z = [list(of_rank) for of_rank in zip(*by_layer, strict=True)]
    figure = empty_figure("layer", "rank", height=160 + 40 * len(z))
    figure.add_heatmap(z=z, colorscale="Viridis", texttemplate="%{z:.2f}", colorbar={"title": "x mean"})
    figure.update_xaxes(dtick=1)
    figure.update_yaxes(dtick=1, autorange="reversed")
    return figure


def _expert_load(metrics: Sequence[Mapping[str, Any]]) -> Figure:
    from plotly.subplots import make_subplots

    num_layers = len(metrics[0]["expert_load"]) if metrics else 0
    figure = make_subplots(
        rows=max(1, num_layers),
        cols=1,
        shared_xaxes=True,
        vertical_spacing=0.25 / max(1, num_layers),
        subplot_titles=[f"layer {i}" for i in range(num_layers)],
    )
    for layer in range(num_layers):
        loads = [_relative(m["expert_load"][layer]) for m in metrics]
        figure.add_heatmap(
            z=[list(of_expert) for of_expert in zip(*loads, strict=True)],
            x=[m["step"] for m in metrics],
            coloraxis="coloraxis",
            row=layer + 1,
            col=1,
        )
    figure.update_layout(
        height=120 + 190 * num_layers,
        coloraxis={"colorscale": "Viridis", "colorbar": {"title": "x mean"}, "cmin": 0},
    )
    figure.update_yaxes(title="expert")
    figure.update_xaxes(title="step", row=max(1, num_layers), col=1)
    return figure
