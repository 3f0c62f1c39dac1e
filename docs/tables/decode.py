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
    """Captured layers beside the time to read the weights that they need, and the rival over NCCL of the same
    run; of every case the newest."""
    lines, used = [], []
    measured = on(read("decode"), gpu)
    newest = {tuple(row["case"].items()): row for row in select(measured, impl="imbrex")}
    for row in newest.values():
        (rival,) = select(measured, impl="nccl-agrs", case=row["case"], run=row["run"])
        ours, theirs, least = row["median_us"], rival["median_us"], least_us(row, gpu)
        used += [row, rival]
        sizes = [row["case"]["model"], row["case"]["T"], row["experts_hit"]]
        times = [f"{least:.0f}", f"{ours:.0f}", f"{ours / least:.2f}", f"{theirs:.0f}"]
        lines.append([*sizes, *times, f"{theirs / ours:.2f}"])
    return Table(head=HEAD, body=lines, rows=used)


SHOWN = (1, 8, 128)
"""Tokens a rank."""
WAYS = ("one launch", "two launches", "fp8, one launch", "fp8, three launches")


def few_rows_in_fp8() -> Table:
    """Experts of few rows in bfloat16 and in fp8, in one launch and in several."""
    rows = list(read("decode_one"))
    run = last_run(select(rows, impl=WAYS[-1]))[0]["run"]
    rows = [row for row in rows if row["run"] == run and row["case"]["T"] in SHOWN]
    cases: dict[str, dict[str, Row]] = {}
    for row in rows:
        cases.setdefault(str(row["case"]), {})[row["impl"]] = row
    body = []
    for by_way in cases.values():
        ours = by_way["fp8, one launch"]
        case = ours["case"]
        times = [f"{by_way[way]['median_us']:.0f}" for way in WAYS]
        over = f"{by_way['fp8, three launches']['median_us'] / ours['median_us']:.2f}"
        body.append([case["model"], case["T"], ours["experts_hit"], f"{ours['read_us']:.0f}", *times, over])
    head = ("model", "tokens", "experts hit", "weights in fp8", "bf16, one launch", "bf16, two")
    return Table(head=(*head, "fp8, one launch", "fp8, three", "gain"), body=body, rows=rows)
