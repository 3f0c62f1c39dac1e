"""Comet's figures 1 a, 9, 10 and 11, as far as two and four GPUs show them: from results that are committed.

Nothing is timed here: benchmarks/models.py and benchmarks/fused.py have timed it. What is compared is of one
run, whose ways took turns on one machine.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping
from typing import Any

from imbrex.reproduce import chart
from imbrex.reproduce.frame import RESULTS, Finding, Options, read_runs, source_of

REDUCED = {"Megatron-Cutlass": 34.1, "Megatron-TE": 42.6, "FasterMoE": 44.4, "Tutel": 31.8}
"""The share of a model's latency that Comet saves, in the mean, by rival, per cent: figure 9's text."""
MODELS = {
    "mixtral-8x7b": "Mixtral",
    "qwen1.5-moe-a2.7b": "Qwen2-MoE-2.7B",
    "qwen2-57b-a14b": "Qwen2-57B",
    "phi3.5-moe": "Phi-3.5",
}
"""The three of the paper's table 2, and in the place of its Qwen2-MoE-2.7B, or beside it, a wider one."""
RIVALS = ("transformers-ep", "transformers-ddp", "transformers-fsdp2")
ALONE, SERIAL, FUSED = "imbrex-experts-alone", "imbrex-serial", "imbrex-fused"
RIVALS_OVER_NCCL, FLOOR = ("nccl-a2a", "nccl-agrs-bag"), "floor"
"""NCCL's all-to-all with a row a choice, and AllGather with ReduceScatter in its best form."""
NCCL = "the faster of both"
HIDDEN, NOISE = "hidden of the wire", 0.02
SHARE = 47
"""The share of a forward that communication takes on 8 H800, mean of models, per cent: figure 1 a's text."""
Times = dict[str, float]
"""Microseconds by implementation."""
Cell = tuple[str, str, int]
"""Machine, model and tokens."""


def whole_models() -> tuple[dict[tuple[str, int, int, int], Times], str]:
    """A prefill of every model, number of layers and number of tokens, by run, in which imbrex raced a rival;
    and where they are from."""
    path, cells, used = RESULTS / "models.json", dict[tuple[str, int, int, int], Times](), []
    for run, rows in read_runs(path):
        races: dict[tuple[str, int, int, int], Times] = {}
        for row in rows:
            case = row["case"]
            if row["op"] == "prefill" and case["model"] in MODELS:
                cell = case["model"], case["layers"], case["T"], run["id"]
                races.setdefault(cell, {})[row["impl"]] = row["median_us"]
        races = {cell: of for cell, of in races.items() if "imbrex" in of and of.keys() & set(RIVALS)}
        used += [run] * bool(races)
        cells |= races
    return dict(sorted(cells.items())), source_of(path, used) if used else ""


def table_of(rows: Iterable[Mapping[str, Any]], op: str, tokens: str) -> dict[tuple[str, int], Times]:
    """Every model and number of tokens of a run."""
    cells: dict[tuple[str, int], Times] = {}
    for row in rows:
        if row["op"] == op:
            cell = row["case"]["model"], row["case"][tokens]
            cells.setdefault(cell, {})[row["impl"]] = row["median_us"]
    return cells


def end_to_end(options: Options) -> Finding:
    """Figure 9, whole models."""
    cells, source = whole_models()
    saved = {rival: _saved(cells, rival) for rival in RIVALS}
    lines = [
        (
            MODELS[model],
            str(layers),
            str(2 * tokens),
            _ms(of, "imbrex"),
            *(_ms(of, rival) for rival in RIVALS),
        )
        for (model, layers, tokens, _), of in cells.items()
    ]
    means = [f"{each:.0f} %" if each is not None else "" for each in saved.values()]
    return Finding(
        title="Comet, figure 9: whole models",
        question="What of a model's forward does the MoE layer save?",
        head=("model", "layers", "tokens", "imbrex, ms", *(f"{rival}, ms" for rival in RIVALS)),
        table=(*lines, ("saved, mean", "", "", "", *means)),
        differs=(
            _origin(source),
            "The paper has whole models on 8 H800 within Megatron-LM (Mixtral and Phi-3.5 of 32 layers, "
            "Qwen2-MoE-2.7B of 24); here are as many layers as the table says, by transformers, on two "
            "GPUs, and its rivals are not ours: expert parallelism, data parallelism and FSDP2 as "
            "transformers has them. So its configurations of TP are blank.",
            "Forward only, which the paper times. Rivals of another run have a line of their own, with what "
            "imbrex took in that run.",
        ),
        verdict=(
            "The paper's means: " + ", ".join(f"{cent} % over {rival}" for rival, cent in REDUCED.items()),
            "Ours: "
            + ", ".join(f"{mean} over {rival}" for rival, mean in zip(RIVALS, means, strict=True) if mean),
        ),
        rows=(),
        chart=chart.bars(
            {"paper": REDUCED, "here": {r: each for r, each in saved.items() if each is not None}}, "% saved"
        ),
    )


def breakdown(options: Options) -> Finding:
    """Figure 1 a, what communication takes."""
    cells, source = _layers()
    shares = (NCCL, FLOOR), (SERIAL, ALONE), (FUSED, ALONE)
    lines = [(*cell[:2], str(cell[2]), *(_share(of, *pair) for pair in shares)) for cell, of in cells.items()]
    return Finding(
        title="Comet, figure 1 a: what communication takes of a forward",
        question="Which share of the time is not experts' work?",
        head=("GPUs", "layer", "tokens", "over NCCL", "imbrex, serial", "imbrex, fused"),
        table=(("8 H800", "models, Megatron-LM", "", f"{SHARE} %", "", ""), *lines),
        differs=(
            _origin(source),
            "The paper's share is of whole models on eight GPUs; ours of one layer without attention on two "
            "and four, of whose rows a half and a quarter stay. It counts all that a layer takes beyond the "
            "same experts alone, rows permuted: routing and staging too.",
        ),
        verdict=(
            f"The paper: {SHARE} % in the mean of models.",
            "Ours, of layers: {} over NCCL, {} over NVLink serially, {} fused.".format(
                *(_span(line[place] for line in lines) for place in (3, 4, 5))
            ),
        ),
        rows=(),
        chart=chart.bars(
            {
                f"{model} {tokens}, {gpus}": {
                    name: 100 * (1 - of[base] / of[impl])
                    for name, impl, base in (("NCCL", NCCL, FLOOR), ("fused", FUSED, ALONE))
                }
                for (gpus, model, tokens), of in cells.items()
            },
            "% of a layer's forward",
        ),
    )


def layers(options: Options) -> Finding:
    """Figures 10 and 11, one layer over tokens and what is hidden of its moves."""
    cells, source = _layers()
    lines, gains = [], []
    for (gpus, model, tokens), of in cells.items():
        gains.append(of[NCCL] / of[FUSED])
        lines.append(
            (
                *(gpus, model, str(tokens)),
                *(_ms(of, name) for name in (NCCL, SERIAL, FUSED)),
                *(f"{gains[-1]:.2f}", _hidden(of)),
            )
        )
    span = f"{min(gains):.2f} to {max(gains):.2f}" if gains else "nothing measured"
    return Finding(
        title="Comet, figures 10 and 11: one layer, measured",
        question="How long does one layer take, and what of its moves is hidden?",
        head=("GPUs", "model", "M", "NCCL, ms", "serial, ms", "fused, ms", "NCCL / fused", HIDDEN),
        table=(("8 H800", "Comet, mixtral", "2048 to 32768", "", "", "", "1.28 to 2.37", "86.5%"), *lines),
        differs=(
            _origin(source),
            "The paper has Mixtral's experts on EP 8, and libraries as rivals; here two and four GPUs, "
            "other models too, and the faster of NCCL's all-to-all and AllGather with ReduceScatter. M of "
            "2048, 8192 and 32768 and EP 8 were not measured: comet-figures-10-14 simulates them.",
            "Hidden of the wire, as the paper counts: rows that stay are compute. Blank where a rank has "
            f"fewer experts than a token wants, or the wire costs serial less than {NOISE:.0%}.",
        ),
        verdict=(
            f"Over NCCL {span}; the paper's means over its rivals are 1.28 to 2.37.",
            f"Hidden of the wire: {_span(line[-1] for line in lines if line[-1])}; the paper: 86.5 %.",
        ),
        rows=(),
        chart=chart.bars(
            {
                f"{model} {tokens}, {gpus}": {
                    name: of[impl] / 1e3 for name, impl in (("NCCL", NCCL), ("fused", FUSED))
                }
                for (gpus, model, tokens), of in cells.items()
            },
            "ms",
        ),
    )


def _layers() -> tuple[dict[Cell, Times], str]:
    """Forwards of every machine, model and number of tokens, of the newest run in which rivals ran beside
    them; and where they are from."""
    path, cells, used = RESULTS / "fused.json", dict[Cell, Times](), dict[Cell, Mapping[str, Any]]()
    every = {ALONE, SERIAL, FUSED, FLOOR, *RIVALS_OVER_NCCL}
    for run, rows in read_runs(path):
        had = run["hardware"]
        gpus = f"{had['count']} {had['gpu'].removeprefix('NVIDIA ').split()[0]}"
        for (model, tokens), of in table_of(rows, "forward", "M").items():
            if every <= of.keys():
                cell = gpus, model, tokens
                cells[cell] = of | {NCCL: min(of[name] for name in RIVALS_OVER_NCCL)}
                used[cell] = run
    return cells, source_of(path, list(used.values())) if used else ""


def _origin(source: str) -> str:
    return f"Ours: {source}." if source else "Blank: this is no checkout with committed results."


def _ms(of: Mapping[str, float], name: str) -> str:
    return f"{of[name] / 1e3:.2f}" if name in of else ""


def _saved(cells: Mapping[Any, Mapping[str, float]], rival: str) -> float | None:
    """The saving in per cent of the rival's time, in the mean."""
    savings = [100 * (1 - of["imbrex"] / of[rival]) for of in cells.values() if rival in of]
    return statistics.mean(savings) if savings else None


def _share(of: Mapping[str, float], whole: str, part: str) -> str:
    return f"{1 - of[part] / of[whole]:.0%}"


def _span(cells: Iterable[str]) -> str:
    shares = sorted(int(cell.removesuffix("%")) for cell in cells)
    return f"{shares[0]} to {shares[-1]} %" if shares else "not measured"


def _hidden(of: Mapping[str, float]) -> str:
    """The share of what the wire costs serially that fused does not take."""
    local, fused_local = of.get(f"{SERIAL}-local"), of.get(f"{FUSED}-local")
    if local is None or fused_local is None or of[SERIAL] - local < NOISE * of[SERIAL]:
        return ""
    return f"{1 - (of[FUSED] - fused_local) / (of[SERIAL] - local):.0%}"


__all__ = ["breakdown", "end_to_end", "layers", "table_of"]
