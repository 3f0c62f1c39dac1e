"""When the steps of a layer run. A strategy changes no number, only the order in time."""

from __future__ import annotations

from imbrex.contracts import Strategy
from imbrex.overlap.serial import Serial

STRATEGIES = {"serial": Serial}


def make(strategy: str | Strategy) -> Strategy:
    """A strategy by name, or the object itself. Raises ValueError that lists the names known."""
    if not isinstance(strategy, str):
        return strategy
    if strategy not in STRATEGIES:
        raise ValueError(f"schedule: {strategy!r} is not known; use one of {', '.join(STRATEGIES)}")
    return STRATEGIES[strategy]()


__all__ = ["STRATEGIES", "Serial", "make"]
