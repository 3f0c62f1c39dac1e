"""The layer over NVLink beside the same layer over NCCL: tables of README.md and nvlink.md."""

from __future__ import annotations

from collections.abc import Iterable

from docs.tables.results import Row, Table, on, read, sources

from imbrex.exchange.nvlink_fit import SPARED

OURS, OURS_EXACT, FLOOR, INDEX_ADD = "imbrex-serial", "imbrex-serial-exact-rows", "floor", "index_add"
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
FIRST_SCREEN, TOKENS = ("qwen2-moe", "deepseek-v3"), 16384
"""Models, and tokens of all ranks."""
WORDS = {2: "two", 4: "four", 8: "eight"}
Case = tuple[str, int, str]


def cases(rows: Iterable[Row]) -> dict[Case, dict[str, float]]:
    """Microseconds of every implementation by model, tokens of all ranks and operation; ours as a layer's
    defaults have it."""
    rows = list(rows)
    found: dict[Case, dict[str, float]] = {}
    for row in rows:
        key = row["case"]["model"], row["case"]["M"], row["op"]
        us = found.setdefault(key, {})
        us[row["impl"]] = row["median_us"]
        if "index_add_us" in row:
            us[INDEX_ADD] = row["index_add_us"] * (1 + (row["op"] == "forward+backward"))
    for row in rows:
        us = found[row["case"]["model"], row["case"]["M"], row["op"]]
        if takes_exact_rows(row) and OURS_EXACT in us:
            us[OURS] = us[OURS_EXACT]
    return found


def takes_exact_rows(row: Row) -> bool:
    """Whether a layer with default arguments makes room for the rows that there are alone."""
    case = row["case"]
    worst = case["M"] * min(case["K"], case["E"] // case["W"])
    spared = worst * (case["W"] - 1) // case["W"] * 2 * case["D"]
    return row["op"] == "forward+backward" and spared >= SPARED


def rows_on(ranks: int, gpu: str = "H200") -> list[Row]:
    return on(read("layer"), gpu, ranks)


def fastest_rival(us: dict[str, float]) -> float:
    """Microseconds of the fastest layer over NCCL, our own included."""
    return min(time for name, time in us.items() if name.startswith("nccl") or name == "imbrex-alltoall")


def missing() -> str:
    """A sentence a number of GPUs about the columns that its rows do not have."""
    said = []
    for ranks in sorted({row["case"]["W"] for row in read("layer")}):
        measured = {name for us in cases(rows_on(ranks)).values() for name in us}
        lacking = [f"*{title}*" for name, title in IMPLEMENTATIONS.items() if name not in measured]
        said += [f"Not measured on {ranks} GPUs: {'; '.join(lacking)}."] if lacking else []
    return " ".join(said) or "Every column is measured."


def ranks_shown() -> int:
    """The most GPUs on which every implementation was measured."""
    by_ranks = {row["case"]["W"]: cases(rows_on(row["case"]["W"])) for row in read("layer")}
    shown = [(model, TOKENS, op) for model in FIRST_SCREEN for op in ("forward", "forward+backward")]
    whole = [
        ranks
        for ranks, found in by_ranks.items()
        if all(IMPLEMENTATIONS.keys() <= found.get(case, {}).keys() for case in shown)
    ]
    return max(whole or by_ranks)


def first_screen_cases() -> dict[Case, dict[str, float]]:
    """The cases of the models that the README shows."""
    found = cases(rows_on(ranks_shown()))
    return {
        (model, TOKENS, op): found[model, TOKENS, op]
        for model in FIRST_SCREEN
        for op in ("forward", "forward+backward")
    }


def shown() -> str:
    """The README's table, and what it is of."""
    found, ranks = first_screen_cases(), ranks_shown()
    names = [name for name in IMPLEMENTATIONS if all(name in us for us in found.values())]
    body = [[model, op, *(f"{us[name]:.0f}" for name in names)] for (model, _, op), us in found.items()]
    used = [row for row in rows_on(ranks) if (row["case"]["model"], row["case"]["M"], row["op"]) in found]
    table = Table(head=["model", "pass", *(IMPLEMENTATIONS[name] for name in names)], body=body, rows=used)
    return f"{WORDS[ranks].capitalize()} H200, {TOKENS // ranks} tokens a rank:\n\n{table}"


def claim() -> str:
    """The README's first sentence: how much faster than the fastest layer over NCCL, by model; its picture,
    and how many tokens that is of."""
    faster = {key: f"{fastest_rival(us) / us[OURS]:.1f}" for key, us in first_screen_cases().items()}
    qwen, qwen_training, deepseek, deepseek_training = faster.values()
    gpus = f"{WORDS[ranks_shown()]} H200"
    return (
        f"**imbrex spreads a Mixture-of-Experts layer over GPUs or CPUs: on {gpus} it runs Qwen2-MoE's "
        f"layer {qwen} times and DeepSeek-V3's {deepseek} times as fast as the same layer over NCCL "
        f"({qwen_training} and {deepseek_training} times with the backward).**\n\n"
        f"![Time of one MoE layer on {gpus}, over the time of its experts alone](docs/layer.svg)\n\n"
        f"Each GPU has {TOKENS // ranks_shown()} tokens in bfloat16, and the gate's choices are given."
    )


def every() -> str:
    """A table for each number of GPUs."""
    parts = []
    for gpu in ("H200", "H100"):
        for ranks in sorted({row["case"]["W"] for row in on(read("layer"), gpu)}):
            rows = rows_on(ranks, gpu)
            parts += [f"**{ranks} {gpu}**", table(rows).cells(), sources(rows)]
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
