"""Traces in Chrome's trace event format, for Perfetto and chrome://tracing."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from imbrex.observe.recorder import Span


def trace_events(spans: Iterable[Span], rank: int) -> list[dict[str, Any]]:
    """Complete events (`ph` X) of one rank; `pid` is the rank, times are microseconds since the epoch."""
    events: list[dict[str, Any]] = [
        {"ph": "M", "name": "process_name", "pid": rank, "tid": 0, "args": {"name": f"rank {rank}"}},
        {"ph": "M", "name": "process_sort_index", "pid": rank, "tid": 0, "args": {"sort_index": rank}},
    ]
    events += [
        {
            "ph": "X",
            "name": span.name,
            "cat": "backward" if span.name.endswith("_backward") else "forward",
            "pid": rank,
            "tid": 0,
            "ts": span.begin_ns / 1e3,
            "dur": span.duration_ns / 1e3,
            "args": {"step": span.step, **dict(span.where)},
        }
        for span in spans
    ]
    return events


def merge_traces(ranks: Iterable[list[dict[str, Any]]], path: str | os.PathLike[str]) -> None:
    """Write the events of all ranks to one file, the earliest at time 0."""
    events = [event for rank in ranks for event in rank]
    start = min((event["ts"] for event in events if event["ph"] == "X"), default=0.0)
    moved: list[Mapping[str, Any]] = [
        {**event, "ts": round(event["ts"] - start, 3)} if event["ph"] == "X" else event for event in events
    ]
    Path(path).write_text(json.dumps({"traceEvents": moved, "displayTimeUnit": "ms"}))
