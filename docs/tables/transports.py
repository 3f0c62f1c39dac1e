"""The tables of transports.md."""

from __future__ import annotations

from docs.tables.results import Row, Table, read, select

SHOWN = ("copy-per-choice", "copy-per-rank", "hierarchical-dedup", "pipe", "sequential", "2dh", "1dh")
HEAD = (
    "top-k",
    "exchange",
    "dispatch + combine, ms",
    "backward, ms",
    "move out, ms",
    "predicted, ms",
    "move back, ms",
    "MB inside",
    "MB out",
    "link, GB/s",
    "algorithm, GB/s",
)


def two_cores() -> Table:
    """Two nodes of four ranks, 1 Gb/s between them."""
    return table("netlab", "1gbit between nodes")


def four_gpus() -> Table:
    """Two nodes of two GPUs, NCCL's sockets between them."""
    return table("nccl-2x2", "NVLink inside, NCCL sockets between")


def table(network: str, rates: str) -> Table:
    """A line per top-k and exchange, from the run with the most rounds."""
    rows = select(read("collectives"), case={"network": network, "rates": rates})
    lines, used = [], []
    for top_k in sorted({row["case"]["K"] for row in rows}, reverse=True):
        for impl in SHOWN:
            measured = select(rows, impl=impl, case={"K": top_k})
            if not measured:
                continue
            most = max(row["n"] for row in measured)
            by_op = {row["op"]: row for row in measured if row["n"] == most}
            lines.append([top_k, f"`{impl}`", *cells(by_op)])
            used += by_op.values()
    return Table(head=HEAD, body=lines, rows=used)


def cells(by_op: dict[str, Row]) -> list[str]:
    out = by_op["move"]
    milliseconds = [by_op[op]["median_us"] / 1e3 if op in by_op else None for op in ("exchange", "backward")]
    predicted = out["predicted_us"] / 1e3 if "predicted_us" in out else None
    times = [*milliseconds, out["median_us"] / 1e3, predicted, by_op["move_back"]["median_us"] / 1e3]
    digits = 1 if times[0] is not None and times[0] < 1000 and out["median_us"] < 1e5 else 0
    return [
        *("" if time is None else f"{time:.{digits}f}" for time in times),
        *(f"{out[name] / 1e6:.1f}" for name in ("inside_bytes", "across_bytes")),
        *(f"{out[name]:.3g}" for name in ("link_gbps", "algorithm_gbps")),
    ]
