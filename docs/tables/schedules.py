"""The tables of schedules.md."""

from __future__ import annotations

from docs.tables.results import Row, Table, read, select

TITLES = {"qwen2-moe": "Qwen2-MoE", "deepseek-v3": "DeepSeek-V3"}
CHUNKS = ("serial", "optsche-1", "optsche-2", "optsche-4")


def order_loss() -> Table:
    """How much longer than the best order `optsche` takes on random times."""
    rows = select(read("schedule"), op="order-loss")
    sizes = sorted({row["case"]["chunks"] for row in rows})
    lines = []
    for family in dict.fromkeys(row["case"]["family"] for row in rows):
        by_size = {row["case"]["chunks"]: row for row in select(rows, case={"family": family})}
        lines.append([family, *(loss(by_size[size]) for size in sizes)])
    return Table(head=["times", *(f"{size} chunks" for size in sizes)], body=lines, rows=rows)


def loss(row: Row) -> str:
    if not row["worse_share"]:
        return "0"
    return f"{row['mean_percent']:.1f} %, {row['max_percent']:.0f} % ({row['worse_share']:.0%})"


def us_of(rows: list[Row], impl: str, op: str) -> float:
    (row,) = select(rows, impl=impl, op=op)
    return row["median_us"]


def nvlink() -> Table:
    """Chunks over the kernels: milliseconds, and times `serial`."""
    rows, lines = select(read("schedule"), case={"network": "nvlink", "transport": "nvlink"}), []
    cases = dict.fromkeys((row["case"]["W"], row["case"]["model"], row["case"]["M"]) for row in rows)
    for ranks, model, tokens in sorted(cases, key=lambda case: case[0]):
        mine = select(rows, case={"W": ranks, "model": model, "M": tokens})
        for op, title in (("layer-forward", "forward"), ("layer", "and backward")):
            serial = us_of(mine, "serial", op)
            times = [us_of(mine, name, op) for name in CHUNKS]
            cells = (f"{us / 1e3:.2f} ({us / serial:.2f})" for us in times[1:])
            lines.append([ranks, f"{TITLES[model]}, {tokens}", title, f"{serial / 1e3:.2f}", *cells])
    head = ["GPUs", "layer, tokens", "pass", *(f"`{name}`" for name in CHUNKS)]
    return Table(head=head, body=lines, rows=rows)
