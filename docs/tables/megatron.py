"""The table of megatron.md: steps of Megatron-Core's own models, by what moves their tokens."""

from __future__ import annotations

from docs.tables.results import RESULTS, Row, Table, read

FILE = "megatron_models"
NONE_YET = (
    "No run on two GPUs is committed yet; at a tiny size all ways and both programs train with the same "
    "losses on two gloo ranks (`tests/ranks/test_megatron_models.py`)."
)
WAYS = {
    "alltoall": "all-to-all",
    "allgather": "all-gather",
    "deepep": "flex, DeepEP's interface",
    "hybridep": "flex, Hybrid-EP's interface",
    "imbrex": "imbrex's layer",
    "alltoall-megatron": "all-to-all, Megatron's `GroupedMLP`",
}
PROGRAMS = {"ddp": "DistributedDataParallel", "fsdp": "Megatron-FSDP"}


def steps() -> Table | str:
    """A line for every way of every model and program; a sentence as long as there is no run."""
    if not (RESULTS / f"{FILE}.json").exists():
        return NONE_YET
    rows = latest(read(FILE))
    lines = []
    for (model, program, way), row in rows.items():
        base, case = rows.get((model, program, "alltoall")), row["case"]
        step, gradients = (f"{row[name] / 1e3:.1f}" for name in ("median_us", "gradients_us"))
        over = f"{base['median_us'] / row['median_us']:.2f}" if base else "-"
        figures = step, gradients, row["tokens_per_s"], f"{row['tflops']:.0f}", over, f"{row['peak_gib']:.1f}"
        lines.append([f"{model}, {case['layers']}, {case['E']}", PROGRAMS[program], WAYS[way], *figures])
    head = (
        "model, layers, experts",
        "program",
        "tokens move by, experts imbrex's",
        "step, ms",
        "of it gradients",
    )
    more = ("tokens/s of a GPU", "TFLOP/s of a GPU", "over all-to-all", "GiB")
    return Table(head=(*head, *more), body=lines, rows=list(rows.values()))


def latest(rows: tuple[Row, ...]) -> dict[tuple[str, str, str], Row]:
    """The newest row of every model, program and way, in the order in which the ways stand here."""
    newest = {(row["case"]["model"], row["case"]["program"], row["impl"]): row for row in rows}
    order = list(WAYS)
    return dict(sorted(newest.items(), key=lambda pair: (*pair[0][:2], order.index(pair[0][2]))))
