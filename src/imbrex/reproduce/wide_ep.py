"""TensorRT-LLM's slides on the size of EP, at fixed work a rank: intensity of the experts' products, kernels
beside them, AllGather and ReduceScatter against all-to-all. Small, on this machine's processor."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

import imbrex
from imbrex.experts.products import run_grouped_mm
from imbrex.placement import contiguous
from imbrex.reproduce import chart
from imbrex.reproduce.frame import Finding, Options
from imbrex.reproduce.stage import Network, on_ranks

EXPERTS, TOP_K, TOKENS, WIDTH, INNER = 64, 8, 32, 256, 512
SIZES = (1, 2, 4, 8, 16, 32)
BYTES = 4


def intensity(options: Options) -> Finding:
    """Operations a byte of a rank's grouped products over the size of EP, and how fast they are here."""
    rounds = options.rounds or (30 if options.full else 8)
    rows = [_products(ranks, rounds) for ranks in SIZES]
    gain = rows[0]["median_us"] / rows[-1]["median_us"]
    grows = rows[-1]["flop_byte"] / rows[0]["flop_byte"]
    return Finding(
        title="TensorRT-LLM, why wide EP: intensity of a rank's products",
        question="Do a rank's products become faster with more ranks, at the same tokens a rank?",
        head=("ranks", "experts of a rank", "rows of each", "operations a byte", "us", "GFLOP/s"),
        table=tuple(
            (
                str(row["case"]["W"]),
                str(EXPERTS // row["case"]["W"]),
                f"{TOKENS * TOP_K * row['case']['W'] / EXPERTS:g}",
                f"{row['flop_byte']:.1f}",
                f"{row['median_us']:.0f}",
                f"{row['gflops']:.1f}",
            )
            for row in rows
        ),
        differs=(
            f"One processor's grouped product, float32, {TOKENS} tokens a rank, E = {EXPERTS}, K = {TOP_K}, "
            f"D = {WIDTH}, F = {INNER}, even routing; the slides draw GB200s.",
        ),
        verdict=(
            f"Weights that a rank reads go down with the ranks and its operations stay: {grows:.1f} times "
            f"the operations a byte at {SIZES[-1]} ranks, and {gain:.2f} times as fast here.",
            "The slides' claim holds as far as weights are what a product waits for: few rows an expert.",
        ),
        rows=rows,
        chart=chart.lines(
            {"us": [(row["case"]["W"], row["median_us"]) for row in rows]}, "ranks", "us", logarithmic=True
        ),
    )


def _products(ranks: int, rounds: int) -> dict[str, Any]:
    local, rows = EXPERTS // ranks, TOKENS * TOP_K
    generator = torch.Generator().manual_seed(0)
    up = torch.randn(local, WIDTH, 2 * INNER, generator=generator)
    down = torch.randn(local, INNER, WIDTH, generator=generator)
    x_RD = torch.randn(rows, WIDTH, generator=generator)
    counts_e = torch.full((local,), rows // local, dtype=torch.int64)
    counts_e[: rows % local] += 1

    def work() -> Tensor:
        gate, up_RF = run_grouped_mm(x_RD, up, counts_e).chunk(2, -1)
        return run_grouped_mm(F.silu(gate) * up_RF, down, counts_e)

    timed = _timed(work, rounds)
    flop = 6 * rows * WIDTH * INNER
    moved = BYTES * (up.numel() + down.numel() + rows * (2 * WIDTH + 4 * INNER))
    case = {"W": ranks, "E": EXPERTS, "K": TOP_K, "T": TOKENS, "D": WIDTH, "F": INNER}
    speed = {"flop_byte": flop / moved, "gflops": flop / timed["median_us"] / 1e3}
    return {"op": "experts", "impl": "grouped", "case": case, "n": rounds} | timed | speed


def auxiliary(options: Options) -> Finding:
    """Expansion, activation and sums over the size of EP: of the rows that there are, or the room."""
    rounds = options.rounds or (30 if options.full else 8)
    rows = [row for ranks in SIZES for row in _glue(ranks, rounds)]
    by_way = {way: {row["case"]["W"]: row["median_us"] for row in rows if row["impl"] == way} for way in GLUE}
    valid, room = (by_way[way] for way in GLUE)
    grows = {way: times[SIZES[-1]] / times[1] for way, times in by_way.items()}
    return Finding(
        title="TensorRT-LLM, kernels beside the products over the size of EP",
        question="Does the time of the glue follow the rows that there are, or the room for all?",
        head=("ranks", "room", "rows", f"{GLUE[0]}, us", f"{GLUE[1]}, us"),
        table=tuple(
            (str(w), str(w * TOKENS * TOP_K), str(TOKENS * TOP_K), f"{valid[w]:.0f}", f"{room[w]:.0f}")
            for w in SIZES
        ),
        differs=(
            f"torch's operators on one processor, float32, {TOKENS} tokens a rank, K = {TOP_K}, D = {WIDTH}, "
            f"F = {INNER}; the slides time CUDA kernels of DeepSeek-R1. imbrex's own kernels on two and four "
            "H200: `make gpu-bench NAME=glue`, docs/exchange.md.",
        ),
        verdict=(
            f"From 1 to {SIZES[-1]} ranks, work over the room takes {grows[GLUE[1]]:.1f} times as long and "
            f"work over the rows {grows[GLUE[0]]:.1f} times: the slides' remedy, blocks for valid rows "
            "alone, is what holds it constant.",
        ),
        rows=rows,
        chart=chart.lines(
            {way: sorted(times.items()) for way, times in by_way.items()}, "ranks", "us", logarithmic=True
        ),
    )


GLUE = ("rows that there are", "all of the room")


def _glue(ranks: int, rounds: int) -> list[dict[str, Any]]:
    """One choice in `ranks` of the tokens of all ranks is this rank's; only their tokens have come."""
    rows = TOKENS * TOP_K
    generator = torch.Generator().manual_seed(ranks)
    chosen_R = torch.randperm(ranks * rows, generator=generator)[:rows] // TOP_K
    tokens_P, token_R = chosen_R.unique(return_inverse=True)
    x_PD = torch.randn(len(tokens_P), WIDTH, generator=generator)
    both_RF = torch.randn(ranks * rows, 2 * INNER, generator=generator)
    down_RD = torch.randn(ranks * rows, WIDTH, generator=generator)
    weight_R = torch.rand(ranks * rows, 1, generator=generator)
    token_of = torch.zeros(ranks * rows, dtype=torch.int64)
    token_of[:rows] = token_R
    weight_R[rows:] = 0

    def work(count: int) -> Tensor:
        rows_RD = x_PD[token_of[:count]]
        gate, up = both_RF[:count].chunk(2, -1)
        activated = F.silu(gate) * up
        y_PD = torch.zeros_like(x_PD).index_add_(0, token_of[:count], down_RD[:count] * weight_R[:count])
        assert len(rows_RD) == len(activated) == count
        return y_PD

    torch.testing.assert_close(work(rows), work(ranks * rows))
    case = {"W": ranks, "T": TOKENS, "K": TOP_K, "D": WIDTH, "F": INNER}
    counts = zip(GLUE, (rows, ranks * rows), strict=True)
    return [
        {"op": "glue", "impl": name, "case": case, "n": rounds} | _timed(lambda n=count: work(n), rounds)
        for name, count in counts
    ]


def collectives(options: Options) -> Finding:
    """AllGather and ReduceScatter against all-to-all, over the size of EP."""
    rounds = options.rounds or (20 if options.full else 5)
    rows, where = [], ""
    for ranks in (2, 4, 8) if options.full else (2, 4):
        network = Network(nodes=1, ranks_per_node=ranks, inter="none")
        measured, ran_on = on_ranks("wide_ep", {"rounds": rounds}, network)
        rows, where = rows + measured, str(ran_on)
    times = {
        name: [(row["case"]["W"], row["median_us"]) for row in rows if row["impl"] == name] for name in WAYS
    }
    ratios = {w: gather / pairs for (w, gather), (_, pairs) in zip(*times.values(), strict=True)}
    return Finding(
        title="TensorRT-LLM, AllGather and ReduceScatter against all-to-all",
        question="Which way to the experts stays cheap with more ranks, at the same tokens a rank?",
        head=("ranks", "way", "rows sent by a rank", "us out and home"),
        table=tuple(
            (str(row["case"]["W"]), row["impl"], f"{row['rows_sent']:.0f}", f"{row['median_us']:.0f}")
            for row in rows
        ),
        differs=(
            f"CPU ranks over gloo ({where}), {TOKENS} tokens a rank, E = {EXPERTS}, K = 2, D = {WIDTH}, "
            "float32, without experts; the slides profile NCCL and an NVLink kernel among 32 GB200s. Two and "
            "four H200: docs/exchange.md.",
            "K is 2, not 8: at most eight ranks would hold nearly every token's choices.",
        ),
        verdict=(
            "Tokens go to every rank, or once to each rank that has a choice of theirs. AllGather and "
            "ReduceScatter take "
            + ", ".join(f"{ratio:.2f} times as long at {w}" for w, ratio in ratios.items())
            + " ranks.",
            "Ranks share the processors of one machine here, so that its times say more of work than of "
            "wires.",
        ),
        rows=rows,
        chart=chart.lines(times, "ranks", "us", logarithmic=True),
    )


WAYS = ("allgather", "alltoall")


def on_rank(settings: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The rows of one of the ranks of `collectives`."""
    group = dist.group.WORLD
    assert group is not None
    world, timings = group.size(), []
    generator = torch.Generator().manual_seed(group.rank())
    ids_TK = torch.rand(TOKENS, EXPERTS, generator=generator).topk(2).indices
    x_TD = torch.randn(TOKENS, WIDTH, generator=generator).round()
    routing = imbrex.Routing(ids_TK=ids_TK, weights_TK=torch.ones(TOKENS, 2))
    letters = len(torch.unique(torch.arange(TOKENS)[:, None] * world + ids_TK * world // EXPERTS))
    own = len(torch.unique(torch.where(ids_TK * world // EXPERTS == group.rank(), 1, 0).amax(1).nonzero()))
    for way in WAYS:
        exchange = imbrex.Exchange(contiguous(EXPERTS, world), WIDTH, 2, group=group, transport=way)

        def work(exchange: imbrex.Exchange = exchange) -> Tensor:
            dispatched = exchange.dispatch(x_TD, routing)
            return exchange.combine(dispatched.rows_RD, dispatched.handle)

        torch.testing.assert_close(work(), 2 * x_TD)
        timed = _timed(work, settings["rounds"], together=True)
        case = {"W": world, "T": TOKENS, "E": EXPERTS, "K": 2, "D": WIDTH}
        leaving = TOKENS * (world - 1) if way == "allgather" else letters - own
        row = {"op": "exchange", "impl": way, "case": case, "n": settings["rounds"], "rows_sent": leaving}
        timings.append(row | timed)
    return timings


def _timed(work: Callable[[], object], rounds: int, *, together: bool = False) -> dict[str, float]:
    """Microseconds of calls after one for warming up, of the slowest rank where ranks work together."""
    work()
    times = []
    for _ in range(rounds):
        if together:
            dist.barrier()
        began = time.perf_counter()
        work()
        times.append(1e6 * (time.perf_counter() - began))
    if together:
        slowest = torch.tensor(times, dtype=torch.float64)
        dist.all_reduce(slowest, dist.ReduceOp.MAX)
        times = slowest.tolist()
    return {"median_us": statistics.median(times), "min_us": min(times), "max_us": max(times)}
