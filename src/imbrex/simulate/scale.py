"""How far each idea helps: its gain over numbers of ranks, and over network rates down to that of the
internet.

The layer grows with its ranks: two experts on each, and as many tokens. A gain is the time of a forward and a
backward without the idea over the time with it, with everything else equal.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from imbrex.simulate.device import Shape
from imbrex.simulate.fabric import Fabric, islands
from imbrex.simulate.loads import Stragglers
from imbrex.simulate.profile import Entry, Profile
from imbrex.simulate.run import Case, Layout, predict

RANKS = (16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)
RATES = (45e9, 12.5e9, 3e9, 1e9, 250e6, 50e6, 12.5e6)
"""Bytes a second of a rank between nodes: 400 Gb/s less a tenth, 100, 24, 8 and 2 Gb/s, 400 and 100 Mb/s."""
STRAGGLERS = Stragglers(sigma=0.05, chance=0.001, factor=3.0)
HELPS = 1.05
"""The least gain that counts."""
IDEAS: Mapping[str, tuple[Layout, Layout]] = {
    "once to a rank": (Layout(transport="copy-per-choice"), Layout(transport="alltoall")),
    "once to a node": (Layout(transport="alltoall"), Layout(transport="hierarchical")),
    "fp8 rows": (Layout(transport="hierarchical"), Layout(transport="hierarchical", codec="fp8")),
    "chunks": (Layout(transport="hierarchical"), Layout(transport="hierarchical", schedule="optsche-4")),
    "one kernel": (Layout(transport="hierarchical"), Layout(transport="hierarchical", schedule="one-kernel")),
    "events": (
        Layout(transport="hierarchical", schedule="one-kernel"),
        Layout(transport="hierarchical", schedule="events"),
    ),
}
"""Layouts without and with each idea. One kernel for a whole layer, and events, are as their designs say:
across nodes neither is measured. The fused kernels that were, on 2 GPUs, move rows over NVLink."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Growth:
    """A layer that grows with its ranks. tokens: of a rank. node: ranks of a node. stragglers: of single
    tasks."""

    profile: Profile
    width: int = 7168
    inner: int = 2048
    top_k: int = 8
    tokens: int = 4096
    node: int = 8
    stragglers: Stragglers = STRAGGLERS
    seed: int = 0


def over_ranks(growth: Growth, ranks: Sequence[int] = RANKS) -> dict[str, list[tuple[float, float]]]:
    """Gains by idea, as (ranks, gain)."""
    return _curves((number, _case(growth, growth.profile, number), number) for number in ranks)


def over_rates(
    growth: Growth, rates: Sequence[float] = RATES, ranks: int = 64
) -> dict[str, list[tuple[float, float]]]:
    """Gains by idea, as (bytes a second between nodes, gain). From 1 Gb/s down a message waits as long as on
    the internet."""
    points = []
    for rate in rates:
        assumed = Entry(value=rate, status="assumed", source="a rate to look at")
        start = 5e-6 if rate > 1e9 else 1e-3
        waits = Entry(value=start, status="assumed", source="a message's start at such a rate")
        profile = growth.profile.with_entries({"network_bytes_s": assumed, "network_start_s": waits})
        points.append((rate, _case(growth, profile, ranks), ranks))
    return _curves(points)


def ends(
    curves: Mapping[str, Sequence[tuple[float, float]]], per: float = 1.0, unit: str = ""
) -> dict[str, str]:
    """Where each idea helps, in words, from the first place to the last where its gain is `HELPS`. Places are
    told in `unit`, of which `per` are one."""
    words = {}
    for idea, curve in curves.items():
        where = [x for x, gain in curve if gain >= HELPS]
        best = max(gain for _, gain in curve)
        span = f"from {where[0] / per:g} to {where[-1] / per:g}{unit}" if where else "nowhere"
        words[idea] = f"{span}, at most {best:.2f} times"
    return words


def fabric_of(profile: Profile, ranks: int, node: int) -> Fabric:
    """Nodes of `node` ranks on one network."""
    return islands(profile, ranks, node)


def _case(growth: Growth, profile: Profile, ranks: int) -> Case:
    shape = Shape(width=growth.width, inner=growth.inner, experts=2 * ranks, top_k=growth.top_k)
    return Case(
        profile=profile,
        fabric=fabric_of(profile, ranks, growth.node),
        shape=shape,
        tokens=growth.tokens,
        jitter=growth.stragglers,
        seed=growth.seed,
    )


def _curves(points) -> dict[str, list[tuple[float, float]]]:
    curves: dict[str, list[tuple[float, float]]] = {idea: [] for idea in IDEAS}
    for x, case, ranks in points:
        for idea, (without, within) in IDEAS.items():
            slow, fast = (predict(case, replace(layout, ep=ranks)).step for layout in (without, within))
            curves[idea].append((x, slow / fast))
    return curves


__all__ = ["HELPS", "IDEAS", "RANKS", "RATES", "Growth", "ends", "over_ranks", "over_rates"]
