"""Comet's figure 8: a fused kernel's time over the blocks that communicate, for ways to divide the ranks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from imbrex.bench.exchange.clock import run_ranks
from imbrex.bench.layer.race import PAUSE_CYCLES, time_in_turns
from imbrex.bench.shapes import MODELS, Shape
from imbrex.bench.skew import make_routing
from imbrex.contracts import Roles, Routing
from imbrex.exchange.exchange import Exchange
from imbrex.experts.experts import Experts, Shard
from imbrex.overlap import Fused
from imbrex.placement import contiguous
from imbrex.reproduce import chart
from imbrex.reproduce.frame import RESULTS, Finding, Options, count_gpus, or_committed, spread_of

BLOCKS = tuple(range(4, 57, 4))
SHOWN = (4, *BLOCKS[1::2])
"""Numbers of blocks that the table shows; the picture has all."""
PAPER = {(8, 4096): "18", (8, 16384): "26", (4, 16384): "46"}
"""The best number of blocks that its text gives, by TP and M; its curves stand in a picture only."""
MODEL = "mixtral"
KINDS = {"rows": "forward", "sums": "forward+backward"}
"""The role that is fixed, and what is timed: gate and up whose rows come; dx that goes home."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Sweep:
    """A model, ranks and how many share an expert, M, and the median microseconds by kind and number of
    blocks; -1: as it is when nothing is fixed."""

    model: str
    world: int
    tensor: int
    tokens: int
    times: dict[str, dict[int, float]]

    def best(self, kind: str) -> int:
        times = self.times[kind]
        return min((n for n in times if n > 0), key=times.__getitem__)

    def over_free(self, kind: str) -> dict[int, float]:
        """Times over that of when nothing is fixed, by number of blocks."""
        times = self.times[kind]
        return {n: us / times[-1] for n, us in times.items() if n > 0}


def find(options: Options) -> Finding:
    """Measure the figure, with blanks where there are fewer GPUs than a way to divide them wants."""
    here = count_gpus()
    models = (MODEL, "qwen2-moe") if options.full else (MODEL,)
    rows = [row for model in models for row in measure(model, here, options.rounds or 20)] if here else []
    results, where = or_committed(rows, f"{here} GPUs of this machine", RESULTS / "comet-figure-8.json")
    sweeps = sweeps_of(results)
    return Finding(
        title="Comet, figure 8: time over the blocks that communicate",
        question="How many blocks of a fused kernel should communicate, for which way to divide the ranks?",
        head=("blocks for", "model", "EP x TP", "M", "best n", *(f"n = {n}" for n in SHOWN)),
        table=(*_paper(), *(_line(sweep, kind) for kind in KINDS for sweep in sweeps)),
        differs=(
            f"Ours: {where}; the paper has 8 H800, and its ways to divide 8 are blank.",
            "The paper times layer 1 alone, whose blocks communicate or multiply for the whole launch. Ours: "
            "the first n blocks bring rows beside gate and up, with warps that have nothing else to do, in a "
            "forward; and the first n begin with sums of dx beside the weights' gradients, in a forward and "
            "backward. Blocks multiply as well, whatever n is.",
            "Ours are times over those of free roles: rows brought by all blocks, sums begun by 16. A number "
            "above 1 is what a fixed split costs. The paper's curves stand in a picture only.",
        ),
        verdict=_verdict(sweeps),
        rows=rows,
        chart=_chart(sweeps),
    )


def measure(model: str, world: int, rounds: int) -> list[dict[str, Any]]:
    """Rows of every way to divide the GPUs of this machine, at 4096 and 16384 tokens."""
    ways = [tensor for tensor in (1, 2, 4, 8) if world % tensor == 0 and tensor <= world]
    return run_ranks(_sweep, world, model, ways, rounds)


def _sweep(rank: int, world: int, model: str, ways: Sequence[int], rounds: int) -> list[dict[str, Any]]:
    shape, rows = MODELS[model], []
    for tensor in ways:
        placement = contiguous(shape.num_experts, world // tensor)
        sizes = placement, shape.hidden_size, shape.top_k
        exchange = Exchange(*sizes, group=dist.group.WORLD, transport="nvlink", tensor_parallel=tensor)
        experts = draw_experts(shape, placement.local(rank // tensor), Shard(rank=rank % tensor, size=tensor))
        for tokens in (4096, 16384):
            case = {"model": model, "M": tokens, "W": world, "TP": tensor}
            for kind, calls in calls_of(exchange, experts, shape, tokens // world, rank).items():
                times = time_in_turns(calls, PAUSE_CYCLES[KINDS[kind]], repeats=rounds)
                rows += [
                    {"op": KINDS[kind], "impl": impl_of(kind, int(n)), "case": case, **spread_of(of)}
                    for n, of in times.items()
                ]
        torch.cuda.synchronize()
        exchange.transport.close()  # type: ignore[attr-defined]
        exchange.close()
        del experts
        torch.cuda.empty_cache()
    return rows


def impl_of(kind: str, blocks: int) -> str:
    """The name of a row."""
    return f"{blocks} blocks for {kind}" if blocks > 0 else f"free {kind}"


def sweeps_of(rows: Sequence[Mapping[str, Any]]) -> list[Sweep]:
    """The sweeps whose rows these are."""
    sweeps: dict[str, Sweep] = {}
    names = {impl_of(kind, n): (kind, n) for kind in KINDS for n in (-1, *BLOCKS)}
    for row in rows:
        case = row["case"]
        sizes = {"model": case["model"], "world": case["W"], "tensor": case["TP"], "tokens": case["M"]}
        sweep = sweeps.setdefault(str(case), Sweep(**sizes, times={kind: {} for kind in KINDS}))
        kind, blocks = names[row["impl"]]
        sweep.times[kind][blocks] = row["median_us"]
    return list(sweeps.values())


def draw_experts(
    shape: Shape, slots: tuple[int, ...], shard: Shard, implementation: str = "kernels"
) -> Experts:
    """A rank's experts in bfloat16, drawn on its GPU."""
    sizes = shape.hidden_size, shape.intermediate_size
    experts = Experts(
        slots, *sizes, shard=shard, implementation=implementation, device="meta", dtype=torch.bfloat16
    )
    experts = experts.to_empty(device="cuda")
    for weight in experts.parameters():
        weight.data.normal_().mul_(weight.shape[2] ** -0.5)
    return experts


def calls_of(
    exchange: Exchange, experts: Experts, shape: Shape, tokens: int, rank: int
) -> dict[str, dict[str, Callable[[], None]]]:
    """The calls to time, by kind and number of blocks, on the experts' device."""
    drawn, device = make_routing("uniform", shape, tokens, rank=rank), experts.down_proj.device
    routing = Routing(ids_TK=drawn.ids_TK.to(device), weights_TK=drawn.weights_TK.to(device))
    size = tokens, shape.hidden_size
    x_TD, d_y_TD = (torch.randn(size, device=device, dtype=torch.bfloat16) for _ in range(2))
    leaves = [x_TD.requires_grad_(), experts.gate_up_proj, experts.down_proj]

    def forward(strategy: Fused) -> None:
        with torch.no_grad():
            strategy.run(x_TD, routing, exchange, experts, None)

    def step(strategy: Fused) -> None:
        y_TD = strategy.run(x_TD, routing, exchange, experts, None).y_TD
        torch.autograd.grad(y_TD, leaves, d_y_TD)

    calls: Any = {kind: {} for kind in KINDS}
    for n in (-1, *BLOCKS):
        # One object for all calls: ranks compare its roles in the first.
        rows, sums = (Fused(Roles(**{kind: n if n > 0 else None})) for kind in KINDS)
        calls["rows"][f"{n}"], calls["sums"][f"{n}"] = partial(forward, rows), partial(step, sums)
    return calls


def _paper() -> list[tuple[str, ...]]:
    blank = [""] * len(SHOWN)
    return [
        ("Comet's layer 1", "(not said)", f"{8 // tensor} x {tensor}", str(tokens), best, *blank)
        for (tensor, tokens), best in PAPER.items()
    ]


def _line(sweep: Sweep, kind: str) -> tuple[str, ...]:
    way, over = f"{sweep.world // sweep.tensor} x {sweep.tensor}", sweep.over_free(kind)
    cells = (f"{over[n]:.3f}" if n in over else "" for n in SHOWN)
    return kind, sweep.model, way, str(sweep.tokens), str(sweep.best(kind)), *cells


def _verdict(sweeps: Sequence[Sweep]) -> tuple[str, ...]:
    claim = "Comet's best number moves from 18 to 26 and 46 with M and TP: it has a kernel for each."
    if not sweeps:
        return (claim, "Nothing of it was measured.")
    spans = [[min(sweep.over_free(kind).values()) for sweep in sweeps] for kind in KINDS]
    rows, sums = (f"{min(span):.3f} to {max(span):.3f}" for span in spans)
    return (
        claim,
        f"Ours: the best fixed number takes {rows} times as long as letting all blocks bring rows, and {sums}"
        " times as long as the default of 16 for sums. n is an argument of the launch, not a kernel.",
    )


def _chart(sweeps: Sequence[Sweep]) -> str:
    curves = {
        f"{kind}, {sweep.model} TP {sweep.tensor}, M {sweep.tokens}": [
            (float(n), over) for n, over in sweep.over_free(kind).items()
        ]
        for kind in KINDS
        for sweep in sweeps
    }
    if not curves:
        return chart.bars(
            {f"TP {tp}, M {m}": {"Comet's best": float(n)} for (tp, m), n in PAPER.items()}, "blocks"
        )
    return chart.lines(curves, "blocks that communicate", "time over that of free roles", logarithmic=False)
