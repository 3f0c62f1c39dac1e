"""Figures that need other clusters than can be had, run on the simulator and labelled so.

Rates are those of the shipped H200 profile unless a figure names its own: none of these lines is a
measurement of the paper's systems. Megatron, Tutel and FasterMoE stand for their
orders and exchanges made of our parts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from imbrex.reproduce import chart
from imbrex.reproduce.frame import Finding, Options
from imbrex.simulate import (
    Case,
    Entry,
    Fabric,
    Layout,
    Outcome,
    Profile,
    Shape,
    Spread,
    Tier,
    islands,
    predict,
    traffic,
)
from imbrex.simulate.loads import homes, of_homes, of_ranks

WAYS: Mapping[str, Layout] = {
    "megatron": Layout(transport="copy-per-choice"),
    "fastermoe": Layout(transport="copy-per-choice", schedule="stage-major-2"),
    "tutel": Layout(transport="alltoall", schedule="stage-major-2"),
    "imbrex, nvlink": Layout(transport="nvlink"),
    "fused": Layout(transport="nvlink", schedule="fused"),
    "one kernel, as designed": Layout(transport="nvlink", schedule="one-kernel"),
}
MIXTRAL = Shape(width=4096, inner=14336, experts=8, top_k=2)
LABEL = "Simulated: no line is a measurement. Costs are the H200 profile's, measured on at most 4 GPUs."


def comet(options: Options) -> Finding:
    """Comet's figures 10 to 14: one layer over tokens, ways to divide 8 GPUs, experts and skew."""
    rows, table = [], []
    for figure, what, case, (ep, tp) in _comet_cases():
        done = {name: _run(case, way, ep, tp) for name, way in WAYS.items()}
        table.append((figure, what, *(f"{1e3 * each.forward:.2f}" for each in done.values()), _gain(done)))
        rows += [_row(f"comet figure {figure}", name, what, each) for name, each in done.items()]
    hidden = _hidden(_case(Profile.load("h200"), MIXTRAL, 16384))
    return Finding(
        title="Comet, figures 10 to 14: one layer on 8 GPUs, simulated",
        question="How long does one layer take in different ways, at other sizes?",
        head=("figure", "case", *WAYS, "megatron / imbrex"),
        table=tuple(table),
        differs=(
            LABEL,
            "Milliseconds of a forward without the host's time; 8 H200 in place of 8 H800, 25 GB/s links "
            "for the L20's.",
            "The paper's values stand in pictures only; its text has ratios.",
        ),
        verdict=(
            "Paper, figure 10: Comet 1.28 to 2.37 times faster on average; here imbrex over NVLink is "
            f"{_span(table, '10')} times faster than rows by choice without overlap.",
            f"Figure 11: the paper's Comet hides 86.5 % of the moves, Tutel 68.6; simulated, our fused "
            f"kernels hide {hidden['fused']:.0%}, one kernel as designed "
            f"{hidden['one kernel, as designed']:.0%}, two chunks by stages {hidden['tutel']:.0%}.",
            "Figure 12: time grows with TP in every way, as rows go to all ranks of a tensor group; the "
            "paper says so of all but Comet.",
            f"Figure 13, the paper's 1.16 to 1.83: {_span(table, '13')}. Figure 14, its 1.19 to 1.46 on slow "
            f"links: {_span(table, '14, right')}.",
        ),
        rows=rows,
        chart=chart.bars(
            {row[1]: dict(zip(WAYS, map(float, row[2:-1]), strict=True)) for row in table[:5]}, "ms"
        ),
    )


def _comet_cases() -> list[tuple[str, str, Case, tuple[int, int]]]:
    """Figure, case, layer, and EP and TP."""
    profile = Profile.load("h200")
    slow = profile.with_entries(
        {"node_bytes_s": Entry(value=25e9, status="assumed", source="the paper's L20")}
    )
    return [
        *(("10", f"M {m}", _case(profile, MIXTRAL, m), (8, 1)) for m in (2048, 4096, 8192, 16384, 32768)),
        ("11", "M 16384", _case(profile, MIXTRAL, 16384), (8, 1)),
        *(
            ("12", f"EP {8 // tp} x TP {tp}", _case(profile, MIXTRAL, 8192), (8 // tp, tp))
            for tp in (1, 2, 4, 8)
        ),
        *(
            ("13", f"E {e}, top-{k}", _case(profile, replace(MIXTRAL, experts=e, top_k=k), 16384), (8, 1))
            for e, k in ((8, 2), (8, 4), (16, 2), (16, 4), (32, 4))
        ),
        *(
            ("14, left", f"std {s}", _skewed(_case(profile, MIXTRAL, 8192), s), (8, 1))
            for s in (0.0, 0.032, 0.05)
        ),
        *(
            (
                "14, right",
                f"EP {8 // tp} x TP {tp}",
                _case(slow, replace(MIXTRAL, top_k=4), 8192),
                (8 // tp, tp),
            )
            for tp in (1, 2, 4)
        ),
    ]


def hybrid_ep(options: Options) -> Finding:
    """Hybrid-EP's bandwidths at 8, 4 x 8 and 36 GPUs."""
    profile = Profile.load("h200")
    places = {
        "8 GPUs, NVLink": (8, islands(profile, 8, 8)),
        "4 x 8 GPUs, 400 Gb/s": (32, islands(profile, 32, 8)),
        "36 GPUs, one NVLink domain": (36, islands(profile, 36, 36)),
    }
    table, rows = [], []
    for name, (ranks, fabric) in places.items():
        for transport in ("hierarchical", "alltoall")[len(fabric.tiers) == 1 :]:
            line, row = _dispatch(ranks, fabric, transport)
            table.append((name, transport, *line))
            rows.append(row)
    return Finding(
        title="Hybrid-EP: bandwidth of dispatch on larger groups, simulated",
        question="What would rows on their way reach on groups that are not here?",
        head=("where", "exchange", "us", "farthest tier, GB/s of a rank", "algorithm, GB/s of a rank"),
        table=tuple(table),
        differs=(
            LABEL,
            "The rows alone: 4096 tokens of 8192 bfloat16 values a rank, two experts a rank, top-8, uniform, "
            "as in the article. Its NVL36 has faster links than an H200.",
        ),
        verdict=(
            "Once to a node makes the algorithm's bandwidth a multiple of the network card's, as the article "
            "says of its hybrid network; its figures stand in pictures, so no number can be compared.",
            "Measured here are 2 and 4 GPUs of one host, over multiprocessors: docs/exchange.md.",
        ),
        rows=rows,
        chart=chart.bars(
            {f"{row[0]}, {row[1]}": {"algorithm": float(row[4])} for row in table}, "GB/s of a rank"
        ),
    )


def _dispatch(ranks: int, fabric: Fabric, transport: str) -> tuple[tuple[str, str, str], dict[str, Any]]:
    """Microseconds and rates of the rows' way out, as shown and as a row."""
    crowd = traffic.Crowd(ranks=ranks, tensor=1, experts=2 * ranks, top_k=8, tokens=4096, row_bytes=2 * 8192)
    flow = traffic.FLOWS[transport](crowd, fabric)
    seconds = traffic.seconds(flow, fabric)
    logical = 4096 * ranks * traffic.share_reached(crowd, 1) * crowd.row_bytes
    case = {"ranks": ranks, "T": 4096, "D": 8192, "K": 8, "E": 2 * ranks}
    row = {"op": "simulated dispatch", "impl": transport, "case": case, "median_us": 1e6 * seconds}
    port = flow.nbytes[-1] / seconds / 1e9
    return (f"{1e6 * seconds:.0f}", f"{port:.0f}", f"{logical / seconds / 1e9:.0f}"), row


def wide_ep(options: Options) -> Finding:
    """TensorRT-LLM's scaling of EP: decode of DeepSeek-V3 from 4 to 72 ranks of one NVLink domain."""
    profile, shape = Profile.load("h200"), Shape(width=7168, inner=2048, experts=256, top_k=8)
    table, rows = [], []
    for ranks in (4, 8, 16, 32, 64):
        fabric = islands(profile, ranks, ranks)
        case = Case(profile=profile, fabric=fabric, shape=shape, tokens=64, decode=True)
        law = Spread(kind="zipf", amount=0.6)
        load_LE = law.draw(256, 64 * ranks * 8, 0, top_k=8)
        planned = of_homes(load_LE, homes(law.record(256, 64 * ranks * 8, 0, top_k=8), ranks, 256 + 32))
        ways = {
            "alltoall": case,
            "allgather": case,
            "alltoall, experts in order": replace(case, loads_W=of_ranks(load_LE, ranks)[0]),
            "alltoall, planned, 32 replicas": replace(case, loads_W=planned[0]),
        }
        done = {
            n: predict(c, Layout(ep=ranks, transport=n.partition(",")[0]), backward=False)
            for n, c in ways.items()
        }
        table.append((f"{ranks}", *(f"{1e6 * each.forward:.0f}" for each in done.values()), _experts(done)))
        rows += [_row("simulated decode", name, f"EP {ranks}", each) for name, each in done.items()]
    return Finding(
        title="TensorRT-LLM, slides: decode over the size of EP, simulated",
        question="Does a layer of decode gain from a larger group?",
        head=("EP", *ways, "experts alone"),
        table=tuple(table),
        differs=(
            LABEL,
            "Microseconds of a layer, 64 tokens a rank, zipf:0.6 choices where they are not even; the "
            "slides have GB200 and fp4. Attention and the Pareto curves are not in it.",
        ),
        verdict=(
            "The experts' time falls as fewer weights are read by a rank, what AllGather moves grows with "
            "the ranks, and what the all-to-all moves does not: the slides' three findings.",
        ),
        rows=rows,
        chart=chart.bars(
            {f"EP {row[0]}": dict(zip(ways, map(float, row[1:-1]), strict=True)) for row in table}, "us"
        ),
    )


def schemoe(options: Options) -> Finding:
    """ScheMoE's cluster, 8 nodes of 4 slow GPUs, by its own rates, and other networks under them."""
    table, rows = [], []
    shape = Shape(width=8192, inner=8192 * 2 // 3, experts=32, top_k=1, value_bytes=4)
    for name, rate in (("25 Gb/s", 0.42e9), ("100 Gb/s, the paper's", 1.67e9), ("400 Gb/s", 6.7e9)):
        fabric = Fabric(
            name=name,
            tiers=(Tier(name="pcie", ranks=4, bytes_s=5e9), Tier(name="network", ranks=32, bytes_s=rate)),
        )
        case = Case(profile=_testbed(), fabric=fabric, shape=shape, tokens=19661)
        ways = {
            "naive": Layout(ep=32, transport="sequential"),
            "+ codec": Layout(ep=32, transport="sequential", codec="zfp1d-8"),
            "+ pipe": Layout(ep=32, transport="pipe", codec="zfp1d-8"),
            "+ order": Layout(ep=32, transport="pipe", codec="zfp1d-8", schedule="optsche-2"),
        }
        done = {key: predict(case, way).step for key, way in ways.items()}
        gains = (f"{done['naive'] / seconds:.2f}x" for seconds in done.values())
        table.append((name, f"{1e3 * done['naive']:.0f}", *gains))
        rows += [
            {"op": "simulated layer", "impl": key, "case": {"network": name}, "median_us": 1e6 * seconds}
            for key, seconds in done.items()
        ]
    return Finding(
        title="ScheMoE, table 10 on its cluster and two others, simulated",
        question="Where do codec, Pipe-A2A and order help?",
        head=("network", "naive, ms", *ways),
        table=tuple(table),
        differs=(
            LABEL.partition(":")[0]
            + " on rates that the paper's own tables 1 and 10 imply (testbed.py), its "
            "network's and a quarter and four times of it.",
        ),
        verdict=(
            f"The paper: 2401 ms, then 1.9, 2.2 and 2.4 times faster; here {', '.join(table[1][1:])}.",
            "What is gained falls with the network's rate, the codec's share first.",
        ),
        rows=rows,
        chart=chart.bars(
            {row[0]: {k: float(v[:-1]) for k, v in zip(ways, row[2:], strict=True)} for row in table}, "x"
        ),
    )


def _testbed() -> Profile:
    """The paper's GPU: operations and codec as its tables imply, no start of anything."""
    rates = {
        "product_flops_s": 17.9e12,
        "weights_bytes_s": 6e11,
        "rows_bytes_s": 1e13,
        "copied_bytes_s": 1e13,
    }
    rates |= {"gradients_bytes_s": 6e11, "backward_rows_factor": 1.0, "backward_weights_factor": 1.0}
    rates |= dict.fromkeys(("experts_start_s", "power_slowdown", "plan_s", "plan_chunk_s"), 0.0)
    rates |= dict.fromkeys(("chunk_forward_s", "chunk_backward_s"), 0.0)
    rates |= dict.fromkeys(("tile_rows", "tile_columns", "multiprocessors"), 1.0)
    rates |= {"bytes_slows_compute": 1.0, "bytes_slows_moves": 1.0}
    rates |= {"host_holds_moves": 0.0, "reading_exponent": 50.0}
    # 130 GB/s of rows that are four bytes a value.
    rates |= {f"{what}_values_s:zfp1d-8": 130e9 / 4 for what in ("encode", "decode")}
    source = "ScheMoE's tables 1, 9 and 10, as in reproduce/testbed.py"
    entries = {name: Entry(value=value, status="assumed", source=source) for name, value in rates.items()}
    return Profile(machine="RTX 2080 Ti", most_ranks=32, entries=entries)


def _case(profile: Profile, shape: Shape, tokens: int) -> Case:
    """A layer of `tokens` on 8 ranks of one node. The host's time is left out: ours over bytes is no other
    system's."""
    return Case(profile=profile, fabric=islands(profile, 8, 8), shape=shape, tokens=tokens / 8, decode=True)


def _skewed(case: Case, deviation: float) -> Case:
    """Loads whose shares over 8 experts, one on a rank, have a standard deviation."""
    if not deviation:
        return case
    draw = Spread(kind="lognormal", amount=8 * deviation).draw(8, 8e5, 0, layers=64)
    shares_LE = draw / draw.sum(1, keepdims=True)
    nearest = abs(shares_LE.std(1) - deviation).argmin()
    return replace(case, loads_W=8 * shares_LE[nearest])


def _run(case: Case, way: Layout, ep: int, tp: int) -> Outcome:
    return predict(case, replace(way, ep=ep, tp=tp), backward=False)


def _hidden(case: Case) -> dict[str, float]:
    """The share of its moves that each way hides: what it takes less than its tasks one after another."""
    shares = {}
    for name, way in WAYS.items():
        done = _run(case, way, 8, 1)
        moves = done.tasks["move_out"] + done.tasks["move_back"]
        shares[name] = max(0.0, min(1.0, (sum(done.tasks.values()) - done.forward) / moves))
    return shares


def _gain(done: Mapping[str, Outcome]) -> str:
    return f"{done['megatron'].forward / done['imbrex, nvlink'].forward:.2f}"


def _experts(done: Mapping[str, Outcome]) -> str:
    return f"{1e6 * next(iter(done.values())).tasks['experts']:.0f}"


def _span(table: Sequence[Sequence[str]], figure: str) -> str:
    gains = [float(row[-1]) for row in table if row[0] == figure]
    return f"{min(gains):.2f} to {max(gains):.2f}"


def _row(op: str, impl: str, what: str, outcome: Outcome) -> dict[str, Any]:
    return {"op": f"simulated {op}", "impl": impl, "case": {"what": what}, "median_us": 1e6 * outcome.forward}


__all__ = ["comet", "hybrid_ep", "schemoe", "wide_ep"]
