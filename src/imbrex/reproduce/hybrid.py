"""Hybrid-EP's figures: bandwidth over multiprocessors, in bfloat16 and fp8, and models in Megatron.

The article's curves stand in pictures; its text says how many multiprocessors fill a link. Ours come from
this machine's GPUs or, where it has none that run our kernels, from the sweep that is committed.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from imbrex.bench.exchange.clock import Clock, run_ranks
from imbrex.bench.exchange.parts import SWEEP, sweep
from imbrex.bench.exchange.rows import Rows
from imbrex.reproduce import chart
from imbrex.reproduce.frame import RESULTS, Finding, Options, count_gpus, read_committed, source_of

COMMITTED = RESULTS / "exchange.json"
"""A sweep of two and four H200, in a checkout of the repository; an installed package has none."""
PAPER = {"8 H100, NVLink": "8", "4 x 8 H100, 400 Gb/s": "about 4", "36 GB200, NVLink": "16"}
"""The multiprocessors that fill the link, as its text says, by where."""
MODELS = (
    ("DeepSeek-V3", "MXFP8", "Hybrid-EP", 943, "1.14x over DeepEP"),
    ("DeepSeek-V3, FSDP", "MXFP8", "all-to-all", 597, "1x"),
    ("DeepSeek-V3, FSDP", "MXFP8", "Hybrid-EP", 645, "1.08x"),
    ("Qwen 3 235B", "BF16", "all-to-all", 665, "1x"),
    ("Qwen 3 235B", "BF16", "Hybrid-EP", 698, "1.05x"),
    ("Qwen 3 235B", "MXFP8", "all-to-all", 728, "1x"),
    ("Qwen 3 235B", "MXFP8", "Hybrid-EP", 800, "1.10x"),
)
"""The article's table of models on GB200, TFLOP/s of a GPU. The row that its first one is compared with is
lost."""
STEPS = RESULTS / "megatron_models.json"
OURS = {
    ("deepseek-v3", "ddp"): "DeepSeek-V3",
    ("deepseek-v3", "fsdp"): "DeepSeek-V3, FSDP",
    ("qwen3-235b-a22b", "ddp"): "Qwen 3 235B",
}
"""The article's names of our models and programs."""
BASE = "all-to-all"
WAYS = {
    "alltoall": BASE,
    "allgather": "all-gather",
    "deepep": "DeepEP",
    "hybridep": "Hybrid-EP",
    "imbrex": "imbrex's layer",
    "alltoall-megatron": "all-to-all, Megatron's experts",
}
"""The article's names of our ways to move tokens."""
ENOUGH = 0.95
Curves = Mapping[tuple[int, str, str], Mapping[int, float]]
"""Logical GB/s by multiprocessors, by ranks, call and layout of rows."""


def bandwidth(options: Options) -> Finding:
    return _swept(options, "bf16", "Hybrid-EP: bandwidth over multiprocessors", PAPER)


def fp8(options: Options) -> Finding:
    return _swept(options, "fp8", "Hybrid-EP: bandwidth over multiprocessors, fp8", {})


def end_to_end(options: Options) -> Finding:
    """The article's table beside the committed steps of Megatron-Core, or beside blanks."""
    rows, source = read_committed(STEPS)
    rates = {(OURS[key], WAYS[row["impl"]]): row["tflops"] for row in rows if (key := _program(row)) in OURS}
    ours = dict(sorted(rates.items(), key=lambda pair: list(OURS.values()).index(pair[0][0])))
    table = [
        (*row[:3], str(row[3]), row[4], *(_here(ours, row[0], row[2]) if row[1] == "BF16" else ("", "")))
        for row in MODELS
    ]
    papers = {(model, way) for model, precision, way, *_ in MODELS if precision == "BF16"}
    table += [
        (model, "BF16", way, "", "", *_here(ours, model, way))
        for model, way in ours
        if (model, way) not in papers
    ]
    return Finding(
        title="Hybrid-EP: models in Megatron",
        question="What does the exchange give a whole model?",
        head=(
            "model",
            "precision",
            "exchange",
            "TFLOP/s of a GPU, the paper",
            "over",
            "here",
            "over all-to-all",
        ),
        table=tuple(table),
        differs=_differs(source, ours),
        verdict=(*_gains(ours), "The row of DeepEP, which 943 is 1.14 times of, is lost in the article."),
        rows=(),
        chart=chart.bars(
            {f"{model}, {precision}": {way: float(tera)} for model, precision, way, tera, _ in MODELS},
            "TFLOP/s",
        ),
    )


def _program(row: Mapping[str, Any]) -> tuple[str, str]:
    return row["case"]["model"], row["case"]["program"]


def _here(ours: Mapping[tuple[str, str], float], model: str, way: str) -> tuple[str, str]:
    """Our TFLOP/s and how many times those of all-to-all they are, or blanks."""
    if (model, way) not in ours:
        return "", ""
    mine, base = ours[model, way], ours.get((model, BASE))
    return f"{mine:.0f}", "" if base is None else f"{mine / base:.2f}x"


def _differs(source: str, ours: Collection[tuple[str, str]]) -> tuple[str, ...]:
    if not source:
        return (
            "Nothing of it is measured here, so its columns are blank: no run of "
            "`benchmarks/megatron_models.py` is committed, or this is no checkout.",
            "Whole models of other sizes, over NVLink: `benchmarks/models.py`; one layer: docs/layer.md.",
        )
    halved = (
        "DeepSeek-V3 under FSDP has here half of its experts, over all-to-all as well; on two GPUs an expert "
        "has no replica, so FSDP does not divide it.",
    )
    return (
        f"Ours: not this machine, but {source}. The paper has GB200s and whole models, in MXFP8 but for two "
        "rows; ours are few layers of the same widths in bfloat16, the experts over two GPUs.",
        "Hybrid-EP and DeepEP are here our `deep_ep` behind Megatron's flex dispatcher: its interfaces, over "
        "imbrex's kernels. Experts are imbrex's in every row but that which names Megatron's, attention is "
        "torch's: the machine has no Transformer Engine. So torch also permutes rows where Megatron does "
        "that, for all-to-all, all-gather and DeepEP's interface.",
        *(halved if any(model == OURS["deepseek-v3", "fsdp"] for model, _ in ours) else ()),
    )


def _gains(ours: Mapping[tuple[str, str], float]) -> tuple[str, ...]:
    """A sentence for every model of ours that has both exchanges, and one for both of DeepSeek's."""
    paper: dict[tuple[str, str], list[str]] = {}
    for model, precision, way, _, over in MODELS:
        paper.setdefault((model, way), []).append(f"{over} in {precision}")
    sentences = []
    for (model, way), rate in ours.items():
        for base in (BASE, "DeepEP"):
            theirs = [x for x in paper.get((model, way), ()) if ("DeepEP" in x) == (base == "DeepEP")]
            if way == "Hybrid-EP" and (model, base) in ours and (theirs or base == BASE):
                there = f"; the paper: {' and '.join(theirs)}" if theirs else ""
                gain = rate / ours[model, base]
                sentences.append(f"{model}: Hybrid-EP's interface {gain:.2f} times {base}{there}.")
    return tuple(sentences) or ("No claim is made.",)


def _swept(options: Options, dtype: str, title: str, paper: Mapping[str, str]) -> Finding:
    world = count_gpus()
    rows = measure(world, options.rounds or 20) if world else []
    rows = [row for row in rows if row["case"]["dtype"] == dtype]
    curves, source = curves_of(rows), f"{world} GPUs of this machine"
    if not rows:
        curves, source = sweep_of_file(dtype)
    blank = ("",) * len(SWEEP)
    lines = [("the paper", where, "", *blank, sms) for where, sms in paper.items()]
    return Finding(
        title=title,
        question="How many multiprocessors do dispatch and combine need to fill NVLink?",
        head=("where", "call", "rows", *(f"{n} SMs" for n in SWEEP), f"SMs for {ENOUGH:.0%} of the best"),
        table=(*lines, *(_line(key, curve) for key, curve in curves.items())),
        differs=(
            f"Ours: {source}. Logical GB/s of a rank, the own rows included; kernels alone.",
            "The paper's curves stand in pictures, so only the number of multiprocessors can be compared"
            + (", which its text gives for bfloat16." if paper else "; for fp8 its text gives none."),
            "4096 tokens of 8192 values a rank, two experts a rank, top-8, uniform, as in "
            "the article; on two and four GPUs those are all experts, so every token goes "
            "everywhere. Nothing crosses a network card: rows between nodes (transport `tiered`) "
            "go by NCCL, whose multiprocessors are not ours to sweep.",
        ),
        verdict=_verdict(curves, bool(rows), dtype),
        rows=rows,
        chart=_chart(curves),
    )


def measure(world: int, rounds: int) -> list[dict[str, Any]]:
    """The sweep of `imbrex bench exchange --parts sweep` on the GPUs here."""
    return run_ranks(_sweep, world, rounds)


def _sweep(rank: int, world: int, rounds: int) -> list[dict[str, Any]]:
    rows = Rows(rank, Clock(n=rounds))
    sweep(rows, world)
    return rows.entries


def sweep_of_file(dtype: str) -> tuple[Curves, str]:
    """The latest sweep of every number of GPUs in the committed file, and where it is from."""
    if not COMMITTED.exists():
        return {}, "nothing; no GPU here runs our kernels, and this is no checkout with committed results"
    content = json.loads(COMMITTED.read_text())
    rows = [row for row in content["rows"] if _is_swept(row) and row["case"]["dtype"] == dtype]
    runs = {run["id"]: run for run in content["runs"] if run["id"] in {row["run"] for row in rows}}
    where = f"not this machine, but {source_of(COMMITTED, list(runs.values()))}"
    return curves_of(rows), where


def _is_swept(row: Mapping[str, Any]) -> bool:
    case = row.get("case", {})
    kernel = row["impl"] == "imbrex" and row.get("full_call") is False and "num_sms" in row
    return kernel and case.get("D") == 8192 and case.get("E") == 2 * case.get("W", 0)


def curves_of(rows: Sequence[Mapping[str, Any]]) -> Curves:
    curves: dict[tuple[int, str, str], dict[int, float]] = {}
    for row in rows:
        key = row["case"]["W"], row["op"], row["case"]["layout"]
        curves.setdefault(key, {})[row["num_sms"]] = row["logical_gbps"]
    return dict(sorted(curves.items()))


def fills(curve: Mapping[int, float]) -> int:
    """The fewest multiprocessors that reach nearly the best."""
    best = max(curve.values())
    return min(sms for sms, rate in curve.items() if rate >= ENOUGH * best)


def _line(key: tuple[int, str, str], curve: Mapping[int, float]) -> tuple[str, ...]:
    world, op, layout = key
    rates = (f"{curve[n]:.0f}" if n in curve else "" for n in SWEEP)
    return f"{world} GPUs", op, layout, *rates, str(fills(curve))


def _verdict(curves: Curves, here: bool, dtype: str) -> tuple[str, ...]:
    if not curves:
        return ("Nothing was measured, so nothing is shown.",)
    few = sorted({fills(curve) for (_, _, layout), curve in curves.items() if layout == "compact"})
    many = sorted({fills(curve) for (_, _, layout), curve in curves.items() if layout == "expert"})
    numbers = [
        f"{' and '.join(map(str, of))} for {name}" for name, of in zip(WHAT, (few, many), strict=True) if of
    ]
    sentence = f"In {dtype} {ENOUGH:.0%} of the best rate takes {', '.join(numbers)}."
    return (
        (sentence,) if here else (sentence, "No GPU here runs our kernels: nothing of it was measured now.")
    )


WHAT = ("compact rows, as the paper's", "expert-major rows")


def _chart(curves: Curves) -> str:
    series = {
        f"{world} GPUs, {op}, {layout}": [(float(n), rate) for n, rate in curve.items()]
        for (world, op, layout), curve in curves.items()
    }
    if series:
        return chart.lines(series, "multiprocessors", "logical GB/s of a rank", logarithmic=False)
    return chart.bars({"8 H100": {"multiprocessors that fill NVLink, the paper": 8.0}}, "multiprocessors")


__all__ = ["bandwidth", "curves_of", "end_to_end", "fills", "fp8", "measure", "sweep_of_file"]
