"""Trainings of several seeds to a table: means, and differences to `none` paired by seed."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from imbrex.reproduce.training import perplexity

TOLERANCE_NATS = 0.02


@dataclass(frozen=True, kw_only=True, slots=True)
class Learned:
    """A variant's trainings. nats: held-out loss a byte by seed. apart: the same minus that of `none`, for
    seeds that both have."""

    variant: str
    nats: dict[int, float]
    apart: dict[int, float]

    @property
    def mean(self) -> float:
        return statistics.fmean(self.nats.values())

    @property
    def spread(self) -> float:
        """Standard deviation over seeds; 0 of one seed."""
        return statistics.stdev(self.nats.values()) if len(self.nats) > 1 else 0.0


def learned(runs: Sequence[dict[str, Any]]) -> list[Learned]:
    """Results by variant, in the order they first appear; see `training.train` for a result."""
    by_variant: dict[str, dict[int, float]] = {}
    for run in runs:
        by_variant.setdefault(run["variant"], {})[run["seed"]] = run["held_out_nats"]
    plain = by_variant.get("none", {})
    return [
        Learned(
            variant=name,
            nats=nats,
            apart={seed: value - plain[seed] for seed, value in nats.items() if seed in plain},
        )
        for name, nats in by_variant.items()
    ]


def summary(runs: Sequence[dict[str, Any]]) -> list[str]:
    """Lines of a table in Markdown."""
    lines = [
        "| variant | nats a byte held out | perplexity | minus `none`, seed by seed |",
        "|---|---|---|---|",
    ]
    for run in learned(runs):
        apart = ", ".join(f"{value:+.4f}" for _, value in sorted(run.apart.items()))
        mean = f"{run.mean:.4f} ± {run.spread:.4f}"
        lines.append(f"| {run.variant} | {mean} | {perplexity(run.mean):.2f} | {apart} |")
    return lines
