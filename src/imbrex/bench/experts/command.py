"""Time the experts of one rank: imbrex's kernels beside torch, eager and compiled."""

from __future__ import annotations

import argparse
import gc
import itertools
import shlex
from typing import Any

import torch

from imbrex.bench.experts import timing
from imbrex.bench.experts.work import Work, make_work
from imbrex.bench.results import check_file, check_results, describe_run, write_results
from imbrex.bench.shapes import MODELS, parse_shape
from imbrex.kernels import why_not_hopper

QUESTION = "What do the experts of one rank cost?"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "--model",
        default="deepseek-v3",
        metavar="NAME,...",
        help=f"{', '.join(MODELS)}, or all (deepseek-v3)",
    )
    add("--rows", default="16384", metavar="R,...", help="rows of this rank's experts together (16384)")
    add("--skew", default="uniform", metavar="LAW,...", help="balanced, uniform, zipf:A, std:S or load:FILE")
    add("--ops", default="ffn", metavar="OP,...", help=f"{', '.join(timing.OPS)}, or all (ffn)")
    add("--impls", default=",".join(timing.IMPLS), metavar="NAME,...", help="who takes turns (all)")
    add("--ranks", type=int, default=4, metavar="W", help="ranks the experts are spread over (4)")
    add("-n", "--repeats", type=int, default=20, metavar="N", help="timed calls of each (20)")
    add("--warmup", type=int, default=3, metavar="N", help="calls before them (3)")
    add("--json", metavar="FILE", help="put the rows into this result file")


def run(args: argparse.Namespace) -> int:
    """Exit code 0; ValueError where the input or the machine is not fit."""
    check_file("json", args.json)
    if args.json:
        check_results(args.json, QUESTION)
    rows = measure(args)
    if args.json:
        command = shlex.join(["imbrex", "bench", "experts", *words_of(args)])
        write_results(args.json, QUESTION, describe_run(command, ceilings_of(rows)), rows)
    return 0


def measure(args: argparse.Namespace) -> list[dict[str, Any]]:
    """All rows, printed as they come."""
    if (reason := why_not_hopper()) is not None:
        raise ValueError(f"imbrex bench experts: {reason}")
    models = list(MODELS) if args.model == "all" else args.model.split(",")
    ops = list(timing.OPS) if args.ops == "all" else args.ops.split(",")
    for option, names, known in (("ops", ops, timing.OPS), ("impls", args.impls.split(","), timing.IMPLS)):
        if unknown := [name for name in names if name not in known]:
            raise ValueError(f"--{option}: {unknown[0]!r} is not known; use some of {', '.join(known)}")
    results: list[dict[str, Any]] = []
    for model, count, skew in itertools.product(models, args.rows.split(","), args.skew.split(",")):
        work = make_work(parse_shape(model), args.ranks, int(count), skew)
        case = {
            "model": model,
            "rows": work.source_R.numel(),
            "skew": name_of(skew),
            "ranks": args.ranks,
            "dtype": "bf16",
        }
        for op in ops:
            rows = measure_op(op, work, case, args)
            show(rows)
            results += rows
        del work
        gc.collect()
        torch.cuda.empty_cache()
    return results


def name_of(skew: str) -> str:
    """The name of a skew in result files: a trace by its file, wherever that lies."""
    kind, _, value = skew.partition(":")
    return f"{kind}:{value.rpartition('/')[2]}" if kind in ("load", "trace") else skew


def measure_op(op: str, work: Work, case: dict[str, Any], args: argparse.Namespace) -> list[dict[str, Any]]:
    """Rows of one operation, a row for every implementation (grouped_gemm: for either product)."""
    rows: list[dict[str, Any]] = []
    products = ("gate_up", "down") if op == "grouped_gemm" else (None,)
    for product in products:
        calls = timing.calls_of(op, work) if product is None else timing.gemm_calls(product, work)
        calls = {name: call for name, call in calls.items() if name in args.impls.split(",")}
        limit = timing.copy_call() if op == "decode" else timing.dense_call()
        pause = timing.STEP_PAUSE if op == "ffn_training" else timing.PAUSE_CYCLES
        times = timing.time_in_turns(
            {"limit": limit, **calls}, repeats=args.repeats, warmup=args.warmup, pause_cycles=pause
        )
        limit_us = timing.summary(times.pop("limit"))["median_us"]
        for name, measured in times.items():
            row = {"op": op, "impl": name, "case": {**case, **({"product": product} if product else {})}}
            row |= timing.summary(measured)
            value_bytes = 1 if name in timing.FP8_IMPLS else 2
            row |= rates(op, product, work, row["median_us"], limit_us, value_bytes)
            row["peak_mib"] = timing.peak_mib(calls[name])
            row["launches"] = timing.count_launches(calls[name])
            rows.append(row)
    return rows


def rates(
    op: str, product: str | None, work: Work, median_us: float, limit_us: float, value_bytes: int = 2
) -> dict[str, float]:
    """TFLOP/s and the share of the dense rate, or TB/s of weights and the share of the copy rate (decode).

    TB/s as well where a product takes less time than its bf16 weights take to read, gradients left out.
    """
    part = {"gate_up": 2 / 3, "down": 1 / 3, None: 1.0}[product]
    flops, weights = part * timing.flops_of(op, work), part * timing.weight_bytes(work, value_bytes)
    bandwidth = weights / median_us / 1e6
    if op == "decode":
        limit = 2 * timing.COPY_BYTES / limit_us / 1e6
        return {
            "tbps": round(bandwidth, 3),
            "limit_tbps": round(limit, 3),
            "share": round(bandwidth / limit, 3),
        }
    limit = 2 * timing.DENSE_SIDE**3 / limit_us / 1e6
    rate = flops / median_us / 1e6
    row = {"tflops": round(rate, 1), "limit_tflops": round(limit, 1), "share": round(rate / limit, 3)}
    if op != "ffn_training" and flops * value_bytes < timing.RIDGE * 2 * weights:
        row["tbps"] = round(bandwidth, 3)
    return row


def show(rows: list[dict[str, Any]]) -> None:
    """One line a row, with the time of torch over its own where torch took part."""
    for row in rows:
        case = row["case"]
        rivals = [r for r in rows if r["impl"] == "torch" and r["case"] == case]
        faster = f"  {rivals[0]['median_us'] / row['median_us']:5.2f}x torch" if rivals else ""
        speed = f"{row['tflops']:6.0f} TFLOP/s" if "tflops" in row else f"{row['tbps']:6.2f} TB/s   "
        name = f"{row['op']} {case.get('product', '')}".strip()
        print(
            f"{case['model']:14} {case['rows']:6} {case['skew']:9} {name:20} {row['impl']:15}"
            f" {row['median_us']:9.1f} us {speed} {100 * row['share']:5.1f} %"
            f" {row['launches']:3} launches {row['peak_mib']:8.1f} MiB{faster}",
            flush=True,
        )


def ceilings_of(rows: list[dict[str, Any]]) -> dict[str, float]:
    """The limits that the rows were measured beside: medians, since the clock follows the heat."""
    cases = {}
    for name, key in (("dense_tflops", "limit_tflops"), ("copy_tbps", "limit_tbps")):
        values = sorted(row[key] for row in rows if key in row)
        if values:
            cases[name] = values[len(values) // 2]
    return cases


def words_of(args: argparse.Namespace) -> list[str]:
    words = [f"--{name}={getattr(args, name)}" for name in ("model", "rows", "skew", "ops", "impls", "ranks")]
    return [*words, f"--repeats={args.repeats}"]
