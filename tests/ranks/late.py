"""A rank that is late by what the others do, not by a clock: they leave a call, and only then it goes on.

Whoever else is slow for a moment, on a busy machine say, is no reason then that nobody does without it.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

FOR_EVER_S = 20.0
"""The end of a wait that is in vain."""


class Farewells:
    """Words in a folder by which ranks say which call they have left."""

    def __init__(self, folder: Path, rank: int, world_size: int) -> None:
        self.folder, self.rank = folder, rank
        self.others = [other for other in range(world_size) if other != rank]

    def leave(self, call: int) -> None:
        (self.folder / f"{call}-{self.rank}").touch()

    def all_left(self, call: int, at_most_s: float = FOR_EVER_S) -> bool:
        """Waits for all others to leave a call, and says whether they have."""
        words, end = [self.folder / f"{call}-{other}" for other in self.others], time.monotonic() + at_most_s
        while time.monotonic() < end:
            if all(word.exists() for word in words):
                return True
            time.sleep(0.005)
        return False


class Sleepy(torch.nn.Module):
    """Experts that compute late: their rank has its packets, its peers wait for replies. sleep: what they do
    before their first rows."""

    def __init__(self, inner: Any, sleep: Callable[[], object]) -> None:
        super().__init__()
        self.inner, self.sleep = inner, sleep
        self.applies_weights, self.forms = inner.applies_weights, inner.forms

    def forward(self, dispatched: Any) -> torch.Tensor:
        self.sleep()
        self.sleep = awake
        return self.inner(dispatched)


def awake() -> None:
    """No sleep."""
