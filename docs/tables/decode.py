"""The table of a layer in a step of decoding."""

from __future__ import annotations

from docs.tables.results import Row, Table, last_run, on, read, select

HEAD = "model", "tokens a rank", "experts hit", "weights", "imbrex", "times weights", "over NCCL", "gain"


COPY = {"H200": 4.27, "H100": 2.98}
"""TB/s of a copy. Rows without `copy_tbps` are of a benchmark that took every GPU for an H200."""


def least_us(row: Row, gpu: str) -> float:
    """Microseconds to read the weights, at the rate of a copy on that GPU."""
    return row["read_us"] if "copy_tbps" in row else row["read_us"] * COPY["H200"] / COPY[gpu]


def decode(gpu: str) -> Table:
    """Captured layers beside the time to read the weights that they need, and the rival over NCCL."""
    lines, used = [], []
    measured = last_run(on(read("decode"), gpu))
    for row in select(measured, impl="imbrex"):
        (rival,) = select(measured, impl="nccl-agrs", case=row["case"])
        ours, theirs, least = row["median_us"], rival["median_us"], least_us(row, gpu)
        used += [row, rival]
        sizes = [row["case"]["model"], row["case"]["T"], row["experts_hit"]]
        times = [f"{least:.0f}", f"{ours:.0f}", f"{ours / least:.2f}", f"{theirs:.0f}"]
        lines.append([*sizes, *times, f"{theirs / ours:.2f}"])
    return Table(head=HEAD, body=lines, rows=used)
