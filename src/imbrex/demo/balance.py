"""`imbrex demo --balance`: the online balancer of the demo, and what it says at the end."""

from __future__ import annotations

import argparse
from importlib.util import find_spec
from pathlib import Path

import numpy as np

from imbrex.balancer import OnlineBalancer, Pace
from imbrex.balancer.report import Story, read_journal, write_story
from imbrex.demo import folder
from imbrex.placement import contiguous
from imbrex.placement.replay import imbalance_of

PACE = Pace(threshold=0.02, max_moves=4, sure=1.0)
"""A layer a step, few experts: the demo's are small, and its layers three. Its runs are short, so a gain of
one standard error is enough to move."""


def make(args: argparse.Namespace, rank: int) -> OnlineBalancer:
    """The balancer of this rank; the first rank's writes the journal."""
    journal = Path(args.out) / folder.JOURNAL
    return OnlineBalancer(PACE, timeout=args.timeout, journal=journal if rank == 0 else None)


def closing(out: Path) -> list[str]:
    """Lines on what the balancer of the run in `out` did, if it had one; draws its report where plotly is."""
    if not (out / folder.JOURNAL).exists():
        return []
    story = read_journal(out / folder.JOURNAL)
    without = in_order(story)
    last = -max(len(story.loads_ILW) // 4, 1)
    over, would = (float(imbalance_of(of.loads_ILW[last:]).mean()) for of in (story, without))
    lines = [
        f"balance: in the last quarter of the steps the fullest rank computed {over:.1%} more than the mean; "
        f"with the experts in order, {would:.1%}; {len(story.switched)} new placements"
    ]
    if find_spec("plotly") is not None:
        write_story(out / folder.BALANCE, "Balance", story, without)
        lines.append(f"report of the balance: {out / folder.BALANCE}")
    return lines


def in_order(story: Story) -> Story:
    """A story of the same choices, had no expert moved."""
    offsets = contiguous(story.counts_ILE.shape[-1], story.loads_ILW.shape[-1]).rank_offsets
    loads_ILW = np.add.reduceat(story.counts_ILE, offsets[:-1], axis=-1)
    return Story(layers=story.layers, loads_ILW=loads_ILW, counts_ILE=story.counts_ILE, facts={})
