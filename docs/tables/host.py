"""The table of what a layer over NVLink costs the host."""

from __future__ import annotations

from docs.tables.results import Table, read

CALLS = {
    "forward": "a forward without gradients",
    "forward, kept": "a forward that keeps for a backward",
    "step": "forward and backward",
    "step, one thread": "forward and backward, `torch.autograd.set_multithreading_enabled(False)`",
    "step, one of 8 layers": "forward and backward, of eight layers in a row one",
    "fused forward": "a fused forward without gradients",
    "fused step": "fused forward and backward",
    "fused forward, by tasks": "a fused forward without a record",
    "fused step, by tasks": "fused forward and backward without records",
}
HEAD = (
    "tokens",
    "call",
    "host: median",
    "fastest tenth",
    "to the GPU's end: median",
    "calls of Python",
    "operators",
)


def host() -> Table:
    """Microseconds until a call returns, and until the GPU has done what it queued; of every number of tokens
    the newest run."""
    every = read("host_time")
    newest = {row["case"]["T"]: row["run"] for row in every}
    rows = [row for row in every if row["run"] == newest[row["case"]["T"]]]
    rows.sort(key=lambda row: -row["case"]["T"])
    lines = []
    for row in rows:
        times = [f"{row[name]:.0f}" for name in ("median_us", "tenth_us", "whole_median_us")]
        lines.append([row["case"]["T"], CALLS[row["op"]], *times, row["functions"], row["operators"]])
    return Table(head=HEAD, body=lines, rows=rows)
