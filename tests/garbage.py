"""How often Python looks for cycles: looking was a seventh of the tests' time."""

from __future__ import annotations

import gc


def collect_seldom() -> None:
    """Of what is there already never, and of the rest after 20,000 new objects, not 700."""
    gc.freeze()
    gc.set_threshold(20_000, 20, 50)
