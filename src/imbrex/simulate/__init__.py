"""Predicts the time of a layer on ranks that need not exist: costs come from measured profiles, and events
are simulated.

    Profile (seconds and rates, with their source) ───┐
    Fabric (tiers of links) ─ traffic ─ bytes a tier ─┼─▶ seconds of every task and rank ─ engine ─▶ ends
    loads (skew, placement), stragglers ──────────────┘

Four invariants. Simulated time is a pure function of a layout, a profile, a fabric, loads and a seed: no
clock is read. Every figure comes from entries of the profile and the fabric, each marked `measured`, `fitted`
or `assumed`, with its source. Tasks and orders are those of `imbrex.schedule`, which the layer itself runs. A
prediction for ranks or links outside of what was measured says so.
"""

from imbrex.simulate.device import Shape
from imbrex.simulate.engine import Arrival, Timeline, simulate
from imbrex.simulate.fabric import Fabric, Tier, islands
from imbrex.simulate.loads import Spread, Stragglers
from imbrex.simulate.plans import Plan, choose
from imbrex.simulate.profile import Entry, Profile
from imbrex.simulate.request import Request, World
from imbrex.simulate.run import Case, Layout, Outcome, predict

__all__ = [
    "Arrival",
    "Case",
    "Entry",
    "Fabric",
    "Layout",
    "Outcome",
    "Plan",
    "Profile",
    "Request",
    "Shape",
    "Spread",
    "Stragglers",
    "Tier",
    "Timeline",
    "World",
    "choose",
    "islands",
    "predict",
    "simulate",
]
