"""Gains of the levers of the engine: the same load without one of them at a time, loops in turns."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from imbrex.serve.engine import NO_DRAFTS, HostTime, Settings

TURNS = 3
"""Loops of every setting, unless the user says otherwise."""
NONE_ON = "no lever is on: give --interval 4, a --chunk shorter than prompts, or more --users than ranks"


def _whole_prompts(settings: Settings, prompt: int) -> Settings:
    rows, length = settings.chunk
    return replace(settings, chunk=(rows, max(length, prompt)))


def _one_bucket(settings: Settings, prompt: int) -> Settings:
    return replace(settings, sizes=(settings.slots,)) if len(settings.buckets) > 1 else settings


LEVERS: dict[str, tuple[str, Callable[[Settings, int], Settings]]] = {
    "interval": ("tokens leave after every step", lambda settings, _: replace(settings, interval=1)),
    "chunk": ("a prompt runs whole", _whole_prompts),
    "buckets": ("a step takes all slots, however few are used", _one_bucket),
    "graphs": ("every step is launched by the host", lambda settings, _: replace(settings, graphs=False)),
    "drafts": ("a step gives one token", lambda settings, _: replace(settings, drafting=NO_DRAFTS)),
}
"""Levers by name: what happens without each, and the settings without it; given the tokens of a prompt."""


def without(settings: Settings, prompt: int) -> dict[str, Settings]:
    """The settings without each lever that is on in `settings`. prompt: tokens of a prompt."""
    off = {name: take(settings, prompt) for name, (_, take) in LEVERS.items()}
    return {name: changed for name, changed in off.items() if changed != settings}


def middle(points: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The loop whose steps took the median time; of two in the middle the faster."""
    return sorted(points, key=lambda point: point["step_ms"])[(len(points) - 1) // 2]


def gains(on: Sequence[dict[str, Any]], off: Sequence[dict[str, Any]]) -> dict[str, float] | None:
    """Ratios of tokens a second with a lever to those without: the median, least and most of pairs of loops;
    `None` where a loop was too short to tell."""
    name = "tokens_per_s_gpu"
    pairs = [(with_it[name], bare[name]) for with_it, bare in zip(on, off, strict=True)]
    if not all(fast and slow for fast, slow in pairs):
        return None
    ratios = [fast / slow for fast, slow in pairs]
    gain = {"median": statistics.median(ratios), "min": min(ratios), "max": max(ratios)}
    return {of: round(ratio, 3) for of, ratio in gain.items()}


def own_us(row: Mapping[str, Any], *others: str) -> float:
    """Microseconds a step of the engine's own work on the host. others: names that do not count either."""
    return sum(us for name, us in row["host_us"].items() if name not in (*HostTime.OTHERS, *others))


HEADS = ("", "users", "in", "without", "tokens/s a rank", "without it", "gain", "least, most")
HEADS += ("host us a step", "without it", "launches", "without it")


def cells_of(rows: Sequence[dict[str, Any]]) -> list[list[str]]:
    """A line for every row of a load without a lever, beside the row with all of them."""
    lines, whole = [], {}
    for row in rows:
        case = dict(row["case"])
        off, key = case.pop("off", None), (row["impl"], *sorted(case.items()))
        if off is None:
            whole[key] = row
            continue
        on, gain = whole[key], row["gain"]
        rates = [side["tokens_per_s_gpu"] for side in (on, row)]
        lines.append(
            [row["impl"], str(case["users"]), str(case["input"]), off]
            + ["-" if rate is None else f"{rate:.1f}" for rate in rates]
            + ([f"{gain['median']:.2f}", f"{gain['min']:.2f}, {gain['max']:.2f}"] if gain else ["-", "-"])
            + [f"{own_us(side, 'agree'):.0f}" for side in (on, row)]
            + [f"{side['launches']:.1f}" for side in (on, row)]
        )
    return lines


def captions(rows: Sequence[dict[str, Any]]) -> list[str]:
    """A sentence for each lever that was turned off."""
    off = {row["case"].get("off") for row in rows}
    return [f"without {name}: {about}" for name, (about, _) in LEVERS.items() if name in off]
