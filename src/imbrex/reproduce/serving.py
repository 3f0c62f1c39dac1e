"""TensorRT-LLM's Pareto curves and LM head, on ranks of this machine: the same questions at a small size."""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from imbrex.bench.serve.loop import Load, serve
from imbrex.bench.serve.measured import LOADS, about, key_of, newest_steps, replayed, timed_as
from imbrex.bench.serve.models import ALONE, Way, make_model
from imbrex.bench.serve.report import curves, front, name_of
from imbrex.layer import MoELayer
from imbrex.reproduce import chart
from imbrex.reproduce.frame import RESULTS, Finding, Options, read_committed
from imbrex.reproduce.stage import Network, on_ranks
from imbrex.serve.decoding import Drafting
from imbrex.serve.engine import Engine, Settings
from imbrex.serve.heads import sharded_argmax, slice_of

FILES = ("serve.json", "serve_one.json")
"""Steps timed on several GPUs and on one, in a checkout of the repository; an installed package has none."""
LOOPS = "serve_loops.json"
"""Loops of real widths that ran on GPUs."""
PLAIN = Network(nodes=1, ranks_per_node=2, inter="none")
INPUT, OUTPUT, CHUNK = 16, 12, (2, 16)
HEAD_WIDTH, HEAD_VOCABULARY = 512, 32768


def pareto(options: Options) -> Finding:
    """EP over data parallelism, with drafts and without, over the number of users."""
    users = [2, 4, 8, 16] if options.full else [2, 8]
    rows, ran_on = on_ranks("serving", {"what": "pareto", "users": users}, PLAIN)
    by_name = curves(rows)
    points = [row for of in by_name.values() for row in of]
    best = {id(row) for row in front(points)}
    lines = {
        name: [(r["tokens_per_s_user"], r["tokens_per_s_gpu"]) for r in of] for name, of in by_name.items()
    }
    kinds = sorted({name_of(row) for row in points if id(row) in best})
    return Finding(
        title="TensorRT-LLM, Pareto curves: tokens a second of a GPU over those of a user",
        question="How much does a GPU give at what a user sees, by way to the experts and drafts?",
        head=("way", "users", "tokens/s a user", "tokens/s a rank", "nothing beats it"),
        table=tuple(
            (
                name_of(row),
                str(row["case"]["users"]),
                f"{row['tokens_per_s_user']:.1f}",
                f"{row['tokens_per_s_gpu']:.1f}",
                "*" if id(row) in best else "",
            )
            for row in points
        ),
        differs=(
            f"Two CPU ranks over gloo ({ran_on}) and the demo's model, not GB200s and DeepSeek-R1; {INPUT} "
            f"tokens in, {OUTPUT} out. `imbrex bench serve` takes real widths on GPUs.",
            "Weights are random, so every draft is forced to count as right; real acceptance: "
            "`imbrex bench serve --train`.",
        ),
        verdict=(f"On the common front: {'; '.join(kinds)}.",),
        rows=rows,
        chart=chart.lines(lines, "tokens/s a user", "tokens/s a rank", logarithmic=False),
    )


def pareto_replayed(options: Options) -> Finding:
    """TensorRT-LLM's Pareto curves at real widths, replayed from steps that were timed on GPUs; the shortest
    load, and of the others the loops that ran; with --full all."""
    ran, source = _loops()
    whole = LOADS if options.full else LOADS[:1]
    rows, where = _replayed_rows(whole, ran)
    if not rows:
        raise ValueError(
            "reproduce: no steps and chunks of serving were measured; `make gpu-bench NAME=serve`"
        )
    loads: dict[tuple[str, int], list[Mapping[str, Any]]] = {}
    for row in rows:
        loads.setdefault((_model(row), row["case"]["input"]), []).append(row)
    # Where the loops that ran are replayed alone, there is no front.
    with_front = {of: points for of, points in loads.items() if of[1] in dict(whole)}
    best = {id(row) for of in with_front.values() for row in front(of)}
    ratios = [row["tokens_per_s_gpu"] / ran[_load(row)] for row in rows if _load(row) in ran]
    rates = "tokens/s a user", "tokens/s a GPU", "in a loop that ran"
    return Finding(
        title="TensorRT-LLM, Pareto curves: loops replayed from measured steps",
        question="How much does a GPU give at what a user sees, at real widths and long answers?",
        head=("model", "in, out", "way", "users", *rates, "nothing beats it"),
        table=tuple(_replayed_line(row, ran.get(_load(row)), "*" if id(row) in best else "") for row in rows),
        differs=(
            "Replayed on a CPU, no loop on GPUs: the engine's scheduling over steps timed on "
            f"{'; '.join(where)}. Times between two lengths of caches are on a line through them, and beyond "
            "the longest too; where one length was timed, no longer prompts are replayed.",
            *((f"Loops that ran: {source}.",) if ratios else ()),
            "Qwen3-30B-A3B, and DeepSeek-V3's widths with 8 layers of experts, not DeepSeek-R1 on GB200s. "
            "Weights are random, so drafts are forced to count as right; each name says how many. On one GPU "
            "a half has half of the experts, what a rank of two reads, and nothing crosses.",
        ),
        verdict=tuple(
            f"{model}, {tokens} tokens in, on the front: "
            + "; ".join(sorted({name_of(row) for row in of if id(row) in best}))
            + "."
            for (model, tokens), of in with_front.items()
        )
        + _in_words(ratios),
        rows=rows,
        chart=_replayed_chart({model: of for (model, tokens), of in loads.items() if tokens == LOADS[0][0]}),
    )


def _replayed_rows(
    loads: Sequence[tuple[int, int]], ran: Mapping[tuple[Any, ...], float]
) -> tuple[list[dict[str, Any]], list[str]]:
    """Loops of every way in the newest run that has its steps and chunks, and what those runs were; of other
    loads the loops that ran."""
    rows, where = list[dict[str, Any]](), list[str]()
    for path in (RESULTS / name for name in FILES):
        if not path.exists():
            raise ValueError(f"reproduce: benchmarks/results/{path.name} is missing; run it in a checkout")
        for run, steps in newest_steps(json.loads(path.read_text())):
            memory_gib = run["hardware"]["memory_gib"]
            fresh = replayed(steps, memory_gib, loads)
            for load in LOADS:
                if load not in loads:
                    fresh += replayed(_steps_of_loops(steps, load, ran), memory_gib, [load])
            rows += fresh
            where += [about(run)] if fresh else []
    return rows, where


def _steps_of_loops(
    steps: Sequence[Mapping[str, Any]], load: tuple[int, int], ran: Mapping[tuple[Any, ...], float]
) -> list[Mapping[str, Any]]:
    """The steps and chunks of ways by which loops of a load ran, for as many users."""
    users: dict[tuple[Any, ...], set[int]] = {}
    for way, model, ranks, count, tokens, output, drafts, _ in ran:
        if (tokens, output) == load:
            users.setdefault((model, way, drafts, ranks), set()).add(count)
    counts = [users.get((*key_of(row), row["case"]["W"]), set()) for row in steps]
    return [
        row
        for row, of in zip(steps, counts, strict=True)
        if (row["op"] == "chunk" and of) or row["case"].get("B", 0) * row["case"]["W"] in of
    ]


def _in_words(ratios: Sequence[float]) -> tuple[str, ...]:
    """A sentence on how far replays are from loops that ran."""
    if not ratios:
        return ()
    far = f"{min(ratios):.2f} to {max(ratios):.2f}"
    return (f"Replayed over measured, where a loop ran ({len(ratios)}): {far}.",)


def _loops() -> tuple[dict[tuple[Any, ...], float], str]:
    """Tokens a second of a GPU in loops that ran, by their load, and on what they did."""
    rows, source = read_committed(RESULTS / LOOPS)
    return {_load(row): row["tokens_per_s_gpu"] for row in rows if row["tokens_per_s_gpu"]}, source


def _load(row: Mapping[str, Any]) -> tuple[Any, ...]:
    """A key that tells loops apart: the model, the ranks, the way and what users ask for."""
    names = ("model", "W", "users", "input", "output", "drafts", "interval")
    return timed_as(row), *(row["case"][name] for name in names)


def _model(row: Mapping[str, Any]) -> str:
    """The model, and on how many GPUs."""
    return f"{row['case']['model']}, {row['case']['W']} GPU{'s' * (row['case']['W'] > 1)}"


def _replayed_line(row: Mapping[str, Any], ran: float | None, starred: str) -> tuple[str, ...]:
    case = row["case"]
    rates = f"{row['tokens_per_s_user']:.1f}", f"{row['tokens_per_s_gpu']:.0f}"
    rates += ("" if ran is None else f"{ran:.0f}",)
    return (
        *(_model(row), f"{case['input']}, {case['output']}", name_of(row), str(case["users"])),
        *rates,
        starred,
    )


def _replayed_chart(by_model: Mapping[str, list[Mapping[str, Any]]]) -> str:
    """The shortest load's curves."""
    named = {
        f"{model} {name.partition(', replayed')[0]}": curve
        for model, rows in by_model.items()
        for name, curve in curves(rows).items()
    }
    points = {
        name: [(row["tokens_per_s_user"], row["tokens_per_s_gpu"]) for row in curve]
        for name, curve in named.items()
    }
    return chart.lines(points, "tokens/s a user", "tokens/s a GPU", logarithmic=True)


def lm_head(options: Options) -> Finding:
    """A head whose vocabulary is split over the ranks, against one that every rank has."""
    rounds = options.rounds or (50 if options.full else 20)
    rows, ran_on = on_ranks("serving", {"what": "lm_head", "rounds": rounds}, PLAIN)
    by_tokens = {row["case"]["T"]: row for row in rows if row["impl"] == "split"}
    whole = {row["case"]["T"]: row["median_us"] for row in rows if row["impl"] == "whole"}
    gains = {tokens: whole[tokens] / row["median_us"] for tokens, row in by_tokens.items()}
    return Finding(
        title="TensorRT-LLM, LM head: tensor parallelism of a small batch's head",
        question="From how few tokens on does it pay to split the head, with a local argmax?",
        head=("tokens a rank", "whole, us", "split, us", "gain"),
        table=tuple(
            (str(tokens), f"{whole[tokens]:.0f}", f"{row['median_us']:.0f}", f"{gains[tokens]:.2f}x")
            for tokens, row in by_tokens.items()
        ),
        differs=(
            f"Two CPU ranks over gloo ({ran_on}), D = {HEAD_WIDTH}, {HEAD_VOCABULARY} tokens of vocabulary, "
            "float32; the slides have 4 GPUs, 129280 x 7168 and MTP-3.",
            "One packed key a token and one maximum in place of the slides' two values and AllGather.",
        ),
        verdict=(
            "The split head reads half the weight and multiplies as much. Whole over split by tokens a rank: "
            + ", ".join(f"{gain:.2f}x at {tokens}" for tokens, gain in gains.items())
            + ".",
            "Both choose the same tokens, ties included.",
        ),
        rows=rows,
        chart=chart.bars(
            {str(t): {"whole": whole[t], "split": row["median_us"]} for t, row in by_tokens.items()}, "us"
        ),
    )


def on_rank(settings: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The rows of one of the two."""
    if settings["what"] == "pareto":
        return _curve(settings["users"])
    return [row for tokens in (1, 8, 32, 128) for row in _heads(tokens, settings["rounds"])]


def _curve(users: list[int]) -> list[dict[str, Any]]:
    group = dist.group.WORLD
    assert group is not None
    rows = []
    for transport in ("alltoall", ALONE):
        options: dict[str, Any] = {"device": torch.device("cpu"), "dtype": torch.float32, "drafting": True}
        model = make_model("demo", Way(transport=transport), group, positions=64, **options)
        for drafts in (0, 1):
            drafting = Drafting(length=drafts, forced=1.0 if drafts else None)
            slots = -(-max(users) // group.size())
            settings = Settings(slots=slots, room=INPUT + OUTPUT, chunk=CHUNK, drafting=drafting)
            engine = Engine(model, settings, group)
            for count in users:
                load = Load(users=count, input=INPUT, output=OUTPUT)
                case = {"users": count, "drafts": drafts, "interval": 1, "W": group.size(), "model": "demo"}
                case |= {"forced": 1.0} if drafts else {}
                point = serve(engine, load, engine.host_group)
                rows.append({"op": "serve", "impl": transport, "case": case} | point)
        for module in model.modules():
            if isinstance(module, MoELayer):
                module.close()
    return rows


def _heads(tokens: int, rounds: int) -> list[dict[str, Any]]:
    group = dist.group.WORLD
    assert group is not None
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(HEAD_VOCABULARY, HEAD_WIDTH, generator=generator)
    x_TD = torch.randn(tokens, HEAD_WIDTH, generator=generator.manual_seed(1 + group.rank()))
    begin, end = slice_of(HEAD_VOCABULARY, group.rank(), group.size())
    own = weight[begin:end].clone()
    ways: dict[str, Callable[[], Tensor]] = {
        "whole": lambda: (x_TD @ weight.T).argmax(-1),
        "split": lambda: sharded_argmax(x_TD, own, HEAD_VOCABULARY, group),
    }
    assert torch.equal(*(way() for way in ways.values()))
    case = {"T": tokens, "D": HEAD_WIDTH, "V": HEAD_VOCABULARY, "W": group.size()}
    times = {name: _slowest([_seconds(way) for _ in range(rounds)]) for name, way in ways.items()}
    return [
        {
            "op": "head",
            "impl": name,
            "case": case,
            "median_us": 1e6 * statistics.median(of),
            "min_us": 1e6 * min(of),
            "max_us": 1e6 * max(of),
            "n": rounds,
        }
        for name, of in times.items()
    ]


def _seconds(way: Callable[[], Tensor]) -> float:
    dist.barrier()
    began = time.perf_counter()
    way()
    return time.perf_counter() - began


def _slowest(own: list[float]) -> list[float]:
    times = torch.tensor(own, dtype=torch.float64)
    dist.all_reduce(times, dist.ReduceOp.MAX)
    return times.tolist()
