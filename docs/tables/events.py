"""The tables of events.md."""

from __future__ import annotations

import statistics
from collections.abc import Callable

from docs.tables.results import RESULTS, Row, Table, last_run, read, select

from imbrex.reproduce.aristos_loss import NONE, error

NOT_YET = "*Not measured on a quiet machine yet.*"
SERIAL, EVENTS, PATIENT = "serial's kernels", "events", "events, patient"
LAYER = "layer "
"""Before the name of what is timed, where it is a whole layer."""


def stragglers() -> Table | str:
    """Steps of the ranks that are not late, by schedule and patience."""
    return _newest("aristos-figure-2", _stragglers)


def training() -> Table | str:
    """Loss, wall time and dropped choices by patience."""
    return _newest("aristos-training", _training)


def losses() -> Table | str:
    """Losses of many seeds by how much is dropped, without clocks."""
    return _newest("aristos-loss", _losses)


def one_gpu() -> Table | str:
    """Kernels of events beside serial's, on virtual ranks of one GPU."""
    return _one_gpu(last_run(row for row in read("events") if not row["op"].startswith(LAYER)))


def layers() -> Table:
    """A whole layer by events beside serial, a GPU for every rank."""
    rows = [row for row in read("events") if row["op"].startswith(LAYER)]
    return _layers(last_run(rows))


def _newest(name: str, table: Callable[[list[Row]], Table]) -> Table | str:
    return table(last_run(read(name))) if (RESULTS / f"{name}.json").exists() else NOT_YET


def _stragglers(rows: list[Row]) -> Table:
    head = ["way", "median, ms", "p95, ms", "p99, ms", "p95 over nobody late", "dropped"]
    lines = [
        [
            row["impl"],
            *(f"{row[name] / 1e3:.1f}" for name in ("median_us", "p95_us", "p99_us")),
            f"{row['p95_over']:.2f}",
            f"{row['dropped_share']:.2%}",
        ]
        for row in select(rows, op="straggler")
    ]
    return Table(head=head, body=lines, rows=rows)


def _training(rows: list[Row]) -> Table:
    head = ["way", "dropped", "nats a byte held out", "minus endless, by seed", "wall, s", "step, ms"]
    endless = {row["case"]["seed"]: row["held_out_nats"] for row in select(rows, impl="endless patience")}
    lines = []
    for name in dict.fromkeys(row["impl"] for row in rows):
        mine = select(rows, impl=name)
        apart = [row["held_out_nats"] - endless[row["case"]["seed"]] for row in mine]
        lines.append(
            [
                name,
                f"{statistics.fmean(row['dropped_share'] for row in mine):.2%}",
                f"{statistics.fmean(row['held_out_nats'] for row in mine):.4f}",
                "" if name == "endless patience" else ", ".join(f"{value:+.4f}" for value in apart),
                f"{statistics.fmean(row['seconds'] for row in mine):.1f}",
                f"{statistics.fmean(row['median_us'] for row in mine) / 1e3:.1f}",
            ]
        )
    return Table(head=head, body=lines, rows=rows)


def _losses(rows: list[Row]) -> Table:
    whole = {row["case"]["seed"]: row["held_out_nats"] for row in select(rows, impl=NONE)}
    lines = []
    for name in dict.fromkeys(row["impl"] for row in rows):
        mine = select(rows, impl=name)
        apart = [row["held_out_nats"] - whole[row["case"]["seed"]] for row in mine]
        lines.append(
            [
                name,
                f"{statistics.fmean(row['dropped_share'] for row in mine):.2%}",
                f"{statistics.fmean(row['held_out_nats'] for row in mine):.4f}",
                "" if name == NONE else f"{statistics.fmean(apart):+.4f} ± {error(apart):.4f}",
                "" if name == NONE else f"{min(apart):+.4f} to {max(apart):+.4f}",
            ]
        )
    seeds = len(whole)
    head = ["dropped in", "of all", "nats a byte held out", f"minus nothing, mean of {seeds} seeds", "seeds"]
    return Table(head=head, body=lines, rows=rows)


def _one_gpu(rows: list[Row]) -> Table:
    head = ["", SERIAL, EVENTS, "over serial's", PATIENT, "over serial's", "dropped"]
    lines = []
    for op, skew, late_ms in dict.fromkeys((r["op"], r["case"]["skew"], r["case"]["late_ms"]) for r in rows):
        of = {r["impl"]: r for r in select(rows, op=op, case={"skew": skew, "late_ms": late_ms})}
        serial_us, *ours = (of[name]["median_us"] for name in (SERIAL, EVENTS, PATIENT))
        late = f", one {late_ms:g} ms late" if late_ms else ""
        cells = [cell for us in ours for cell in (f"{us:.0f}", f"{us / serial_us:.2f}")]
        cells.append(f"{of[PATIENT]['dropped_share']:.0%}")
        lines.append([f"{op}, {skew}{late}", f"{serial_us:.0f}", *cells])
    return Table(head=head, body=lines, rows=rows)


def _layers(rows: list[Row]) -> Table:
    head = ["", "serial", EVENTS, "over serial", PATIENT, "over serial", "dropped", "bits"]
    lines = []
    for op, skew in dict.fromkeys((r["op"], r["case"]["skew"]) for r in rows):
        of = {r["impl"]: r for r in select(rows, op=op, case={"skew": skew})}
        serial_us, *ours = (of[name]["median_us"] for name in ("serial", EVENTS, PATIENT))
        cells = [cell for us in ours for cell in (f"{us:.0f}", f"{us / serial_us:.3f}")]
        cells.append(f"{of[PATIENT]['dropped_share']:.2%}")
        cells.append("serial's" if all(r["bits"] for r in of.values()) else "others")
        lines.append([f"{op.removeprefix(LAYER)}, {skew}", f"{serial_us:.0f}", *cells])
    return Table(head=head, body=lines, rows=rows)
