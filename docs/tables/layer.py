"""The layer over NVLink beside the same layer over NCCL: tables of README.md and nvlink.md."""

from __future__ import annotations

from collections.abc import Iterable

from docs.tables.results import Row, Table, read, sources

OURS, FLOOR, INDEX_ADD = "imbrex-serial", "floor", "index_add"
IMPLEMENTATIONS = {
    OURS: "imbrex",
    "imbrex-serial-torch-gemm": "imbrex, torch's GEMM",
    "imbrex-alltoall": "imbrex over NCCL, torch's GEMM",
    "nccl-a2a": "NCCL all-to-all, a row a choice",
    "nccl-agrs": "AllGather, ReduceScatter",
    INDEX_ADD: "of that `index_add_`",
    "nccl-agrs-bag": "the same with `embedding_bag`",
    FLOOR: "experts alone, torch",
}
"""Column titles; an implementation that a file lacks has no column."""
FIRST_SCREEN = ("qwen2-moe", "deepseek-v3")
Case = tuple[str, int, str]


def cases(rows: Iterable[Row]) -> dict[Case, dict[str, float]]:
    """Microseconds of every implementation by model, tokens of all ranks and operation."""
    found: dict[Case, dict[str, float]] = {}
    for row in rows:
        key = row["case"]["model"], row["case"]["M"], row["op"]
        us = found.setdefault(key, {})
        us[row["impl"]] = row["median_us"]
        if "index_add_us" in row:
            us[INDEX_ADD] = row["index_add_us"] * (1 + (row["op"] == "forward+backward"))
    return found


def rows_on(ranks: int) -> list[Row]:
    return [row for row in read("layer") if row["case"]["W"] == ranks]


def fastest_rival(us: dict[str, float]) -> float:
    """Microseconds of the fastest layer over NCCL, our own included."""
    return min(time for name, time in us.items() if name.startswith("nccl") or name == "imbrex-alltoall")


def missing() -> str:
    """A sentence about the columns that no row of the result file has."""
    measured = {name for us in cases(read("layer")).values() for name in us}
    lacking = [f"*{title}*" for name, title in IMPLEMENTATIONS.items() if name not in measured]
    return f"Not measured yet: {'; '.join(lacking)}." if lacking else "Every column is measured."


def first_screen_cases() -> dict[Case, dict[str, float]]:
    """Four GPUs, 4096 tokens each, of the models that the README shows."""
    found = cases(rows_on(4))
    return {
        (model, 16384, op): found[model, 16384, op]
        for model in FIRST_SCREEN
        for op in ("forward", "forward+backward")
    }


def shown() -> Table:
    """The README's table."""
    found = first_screen_cases()
    names = [name for name in IMPLEMENTATIONS if all(name in us for us in found.values())]
    body = [[model, op, *(f"{us[name]:.0f}" for name in names)] for (model, _, op), us in found.items()]
    rows = [row for row in rows_on(4) if row["case"]["model"] in FIRST_SCREEN and row["case"]["M"] == 16384]
    return Table(head=["model", "pass", *(IMPLEMENTATIONS[name] for name in names)], body=body, rows=rows)


def claim() -> str:
    """The README's first sentence: how much faster than the fastest layer over NCCL, by model."""
    faster = {key: f"{fastest_rival(us) / us[OURS]:.1f}" for key, us in first_screen_cases().items()}
    qwen, qwen_training, deepseek, deepseek_training = faster.values()
    return (
        f"**imbrex spreads a Mixture-of-Experts layer over GPUs or CPUs: on four H200 it runs Qwen2-MoE's "
        f"layer {qwen} times and DeepSeek-V3's {deepseek} times as fast as the same layer over NCCL "
        f"({qwen_training} and {deepseek_training} times with the backward).**"
    )


def every() -> str:
    """A table for each number of GPUs."""
    parts = []
    for ranks in sorted({row["case"]["W"] for row in read("layer")}):
        rows = rows_on(ranks)
        parts += [f"**{ranks} GPUs**", table(rows).cells(), sources(rows)]
    return "\n\n".join(parts)


def table(rows: list[Row]) -> Table:
    """A line per model, number of tokens and operation: microseconds, and ratios within a run."""
    found = cases(rows)
    names = [name for name in IMPLEMENTATIONS if any(name in us for us in found.values())]
    body = []
    for (model, tokens, op), us in sorted(found.items()):
        times = (f"{us[name]:.0f}" if name in us else "" for name in names)
        ratios = f"{us[OURS] / us[FLOOR]:.2f}", f"{fastest_rival(us) / us[OURS]:.2f}"
        body.append([model, tokens, op, *times, *ratios])
    head = ["model", "M", "pass", *(IMPLEMENTATIONS[name] for name in names)]
    return Table(head=[*head, "imbrex, times experts", "fastest NCCL, times imbrex"], body=body, rows=rows)
