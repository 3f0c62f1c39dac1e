"""The planner's answer, as lines for a terminal, as JSON, and as one HTML file."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from imbrex.observe.page import empty_figure, table, write_page
from imbrex.simulate import scale
from imbrex.simulate.fabric import Fabric
from imbrex.simulate.memory import memory_of_rows
from imbrex.simulate.plans import Plan, rivals
from imbrex.simulate.profile import Profile
from imbrex.simulate.request import Request, World

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

HEAD = ("EP", "TP", "DP", "transport", "codec", "schedule", "replicas", "ms a layer", "GB a rank", "why not")
SCALED = (
    ("Gain of each idea over ranks", "ranks", scale.over_ranks, (1.0, " ranks")),
    (
        "Gain of each idea over the rate between nodes",
        "bytes a second of a rank",
        scale.over_rates,
        (1e9, " GB/s"),
    ),
)


def lines(plans: Sequence[Plan], request: Request, world: World) -> list[str]:
    """Lines for a terminal: the best plan, its predictions, what they rest on, and the reasons against other
    plans."""
    best = plans[0]
    if best.outcome is None:
        return [_nothing_fits(plans, request, world), *_as_text(rows_of([best, *rivals(plans)]))]
    words = [
        f"plan: {best.layout}",
        *(f"  {name}: {value}" for name, value in facts(best, request, world).items()),
    ]
    if best.extrapolates:
        words += ["extrapolates:", *(f"  {reason}" for reason in best.extrapolates)]
    return [
        *words,
        "why not the others, the fastest of each kind:",
        *_as_text(rows_of([best, *rivals(plans)])),
    ]


def facts(plan: Plan, request: Request, world: World) -> dict[str, str]:
    """The figures of one plan."""
    outcome = plan.outcome
    assert outcome is not None
    words = {"a layer": f"{1e3 * outcome.step:.3g} ms: forward {1e3 * outcome.forward:.3g}"}
    if request.mode == "train":
        words["a layer"] += (
            f", backward {1e3 * outcome.backward:.3g}, gradients summed {1e3 * outcome.sync:.3g}"
        )
    words["the step"] = (
        f"{1e3 * outcome.step * request.layers:.4g} ms for {request.layers} "
        f"layer{'s' * (request.layers > 1)} of experts; attention, gates and all else are not in it"
    )
    words["memory a rank"] = f"{plan.memory / 1e9:.3g} GB at most: experts, what is kept of rows, and buffers"
    tiers = zip(world.fabric.tiers, outcome.tiers, strict=True)
    words["sent by a rank, one way"] = ", ".join(
        f"{tier.name} {nbytes / 1e6:.4g} MB" for tier, nbytes in tiers
    )
    homes = ", experts where --placement puts them" if world.spread.history else ""
    words["fullest rank"] = f"{plan.imbalance:.2%} above the mean ({world.spread.kind} choices{homes})"
    parts = {name: seconds for name, seconds in outcome.tasks.items() if seconds > 0 and name != "weights"}
    words["tasks, one after the other"] = ", ".join(f"{k} {1e3 * v:.3g} ms" for k, v in parts.items())
    return words


def rows_of(plans: Sequence[Plan]) -> list[tuple[str, ...]]:
    """The plans as rows of a table, the layout's values first."""
    return [
        (
            *(str(part) for part in (p.layout.ep, p.layout.tp, p.layout.dp)),
            *(p.layout.transport, p.layout.codec, p.layout.schedule, str(p.layout.replicas)),
            "" if p.outcome is None else f"{1e3 * p.seconds:.3g}",
            f"{p.memory / 1e9:.3g}" if p.memory else "",
            p.why_not or "the plan",
        )
        for p in plans
    ]


def as_json(plans: Sequence[Plan], request: Request, world: World) -> dict[str, Any]:
    """Everything as JSON, including the figures of the profile and the fabric with their sources."""
    return {
        "request": asdict(request),
        "plan": _plain(plans[0]),
        "others": [_plain(plan) for plan in plans[1:]],
        "fabric": asdict(world.fabric),
        "stragglers": asdict(world.stragglers),
        "skew": {"kind": world.spread.kind, "amount": world.spread.amount},
        "profile": {name: asdict(world.profile.entries[name]) for name in world.profile},
        "machine": world.profile.machine,
    }


def write_story(path: str | os.PathLike[str], plans: Sequence[Plan], request: Request, world: World) -> None:
    """Write one HTML file that opens without a network."""
    best = plans[0]
    able = [plan for plan in plans if plan.outcome is not None]
    head = {"plan": str(best.layout)} | (facts(best, request, world) if best.outcome else {})
    head |= {f"extrapolates ({n})": words for n, words in enumerate(best.extrapolates, 1)}
    sections: list[tuple[str, str, Figure | str]] = []
    if able:
        about = "The fastest plan of every EP, in milliseconds a layer, by kind of task."
        sections.append(("Where the time goes", about, _bars(able)))
    why = "For everything that the plan is not: the fastest that is, and what it loses; or why it cannot run."
    sections.append(("Why not the others", why, table(HEAD, rows_of([best, *rivals(plans)]))))
    growth = scale.Growth(profile=world.profile, node=world.fabric.node)
    for heading, axis, curves, unit in SCALED:
        by_idea = curves(growth)
        where = "; ".join(f"{idea}: {words}" for idea, words in scale.ends(by_idea, *unit).items())
        about = (
            f"Simulated for DeepSeek-V3's widths, two experts a rank, with stragglers. Above 1.05: {where}."
        )
        sections.append((heading, about, _curves(by_idea, axis)))
    sections += _sources(world.profile, world.fabric)
    write_page(path, title="Plan", facts=head, sections=sections)


def _sources(profile: Profile, fabric: Fabric) -> list[tuple[str, str, Figure | str]]:
    entries = [(n, f"{e.value:.5g}", e.status, e.source) for n, e in profile.entries.items()]
    tiers = [(t.name, str(t.ranks), f"{t.bytes_s / 1e9:.4g}", t.status, t.source) for t in fabric.tiers]
    head = ("tier", "ranks", "GB/s of a rank", "status", "source")
    about = f"Every figure above comes from these, measured, fitted or assumed: {profile.machine}, SI units."
    return [
        ("The network", fabric.name, table(head, tiers)),
        ("The profile", about, table(("name", "value", "status", "source"), entries)),
    ]


def _bars(plans: Sequence[Plan]) -> Figure:
    fastest = {plan.layout.ep: plan for plan in reversed(plans)}
    figure = empty_figure("EP", "milliseconds a layer, one task after the other")
    labels = [f"EP {ep}, {fastest[ep].layout.transport}" for ep in sorted(fastest)]
    outcomes = [fastest[ep].outcome for ep in sorted(fastest)]
    for kind in (name for name in outcomes[0].tasks if outcomes[0]) if outcomes[0] else ():
        heights = [1e3 * outcome.tasks[kind] for outcome in outcomes if outcome]
        figure.add_bar(x=labels, y=heights, name=kind)
    figure.add_scatter(x=labels, y=[1e3 * o.forward for o in outcomes if o], name="forward, as scheduled")
    figure.update_layout(barmode="stack")
    return figure


def _curves(curves: Mapping[str, Sequence[tuple[float, float]]], axis: str) -> Figure:
    figure = empty_figure(axis, "times faster")
    for idea, curve in curves.items():
        figure.add_scatter(x=[x for x, _ in curve], y=[y for _, y in curve], name=idea)
    figure.add_hline(y=1.0, line={"dash": "dot", "width": 1})
    figure.update_xaxes(type="log")
    return figure


def _nothing_fits(plans: Sequence[Plan], request: Request, world: World) -> str:
    sized = [plan for plan in plans if plan.memory]
    if not sized:
        return f"nothing can run: {plans[0].why_not}"
    least = min(sized, key=lambda plan: plan.memory)
    rows = memory_of_rows(request, world, least.layout, 1 + least.imbalance)
    if rows > least.memory / 2:
        mend = f"{rows / 1e9:.0f} of them for rows: give fewer tokens a rank"
    else:
        mend = "give fewer layers (pipeline stages), or more GPUs"
    return f"nothing fits: {least.layout} {least.why_not}; {mend}"


def _plain(plan: Plan) -> dict[str, Any]:
    return asdict(plan) | {"seconds": None if plan.outcome is None else plan.seconds}


def _as_text(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(len(row[i]) for row in (HEAD, *rows)) for i in range(len(HEAD))]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in (HEAD, *rows)
    ]


__all__ = ["as_json", "facts", "lines", "rows_of", "write_story"]
