"""What a fault is."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Fault:
    """file: below `src/imbrex`. old: what stands there, once; new: what stands there instead.
    tests: below `tests`, the fewest that should catch it. gpu: only a GPU can show it."""

    name: str
    file: str
    what: str
    old: str
    new: str
    tests: tuple[str, ...]
    gpu: bool = False
