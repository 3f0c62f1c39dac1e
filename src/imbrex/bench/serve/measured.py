"""Times of steps out of the rows that `benchmarks/serve.py` writes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from imbrex.bench.serve.models import MODELS
from imbrex.bench.serve.replay import StepTimes
from imbrex.serve.attention import Latent

Row = Mapping[str, Any]


def step_times(rows: Iterable[Row], model: str, way: str, drafts: int = 0) -> StepTimes:
    """The times of a way with so many drafts a step. Raises ValueError where there are none."""
    by_room = isinstance(MODELS[model].attention, Latent)
    decode: dict[int, list[tuple[float, float]]] = {}
    prefill: list[tuple[float, float]] = []
    for row in rows:
        case = row["case"]
        if (case.get("model"), row["impl"], case.get("drafts", 0)) != (model, way, drafts):
            continue
        point = case.get("room" if by_room else "context", 0), row.get("median_us", 0) / 1e6
        if row["op"] == "decode step":
            decode.setdefault(case["B"], []).append(point)
        elif row["op"] == "chunk":
            prefill.append(point)
    if not decode or not prefill:
        raise ValueError(f"serve: no steps of {model} by {way} with {drafts} drafts were measured")
    # Chunks may have been timed more than once at the same place: the first counts.
    once = dict(reversed(prefill))
    return StepTimes(
        decode={b: sorted(of) for b, of in decode.items()}, prefill=sorted(once.items()), by_room=by_room
    )
