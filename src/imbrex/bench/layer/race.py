"""imbrex's layer, the same layer over NCCL, and the experts alone, in turns on the GPUs of one host.

Routing is given to all of them; all know it only on the device and only for their own tokens. Times are the
GPU's, from an idle device and aligned ranks, the host queueing ahead where nothing stops it; each sample is
the slowest rank's.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor

from imbrex.bench.layer.rivals import AllToAll, Ffn, GatherScatter, GatherScatterBag, Weights
from imbrex.bench.results import write_results
from imbrex.bench.shapes import MODELS, Shape
from imbrex.bench.skew import make_routing
from imbrex.contracts import Roles, Routing, Strategy
from imbrex.exchange.exchange import Exchange
from imbrex.exchange.nvlink import NvlinkDispatcher
from imbrex.experts.experts import Experts
from imbrex.kernels.ffn.ffn import ffn
from imbrex.kernels.fused.others_first import LESS_DEPTH
from imbrex.observe.clock import device_microseconds
from imbrex.overlap.fused import Fused
from imbrex.overlap.serial import Serial
from imbrex.placement import contiguous
from imbrex.transport import Nvlink

OURS, OURS_TORCH, OURS_EXACT = "imbrex-serial", "imbrex-serial-torch-gemm", "imbrex-serial-exact-rows"
OURS_FUSED, OURS_ALONE = "imbrex-fused", "imbrex-experts-alone"
OURS_NCCL = "imbrex-alltoall"
LOCAL, FUSED_LOCAL = "imbrex-serial-local", "imbrex-fused-local"
"""A layer with as many rows of every expert, all of its rank's own tokens: nothing crosses."""
DY_BEFORE = "imbrex-fused-dy-before"
"""Rows of dy move before their product, not beside it."""
OURS_FIRST = "imbrex-fused-others-first-"
"""Down multiplies others' rows first, and as many blocks as the name ends with sum them meanwhile
(`Roles.first`)."""
VARIANTS = OURS_FUSED, OURS_ALONE, OURS_TORCH, OURS_EXACT, OURS_NCCL
FLOOR = "floor"
FLOORS = FLOOR, OURS_ALONE, LOCAL, FUSED_LOCAL
"""Calls that answer something else: of experts whose rows are there, and of other routings."""
OPS = ("forward", "forward+backward")
PAUSE_CYCLES = {"forward": 3_000_000, "forward+backward": 10_000_000}
"""The host queues a call while the GPU waits: about 1.5 and 5 ms."""
CYCLES_OF_A_MICROSECOND = 2000
CLOSE_ENOUGH = 0.02
"""Relative error between implementations: bfloat16 rounds at other places."""
Answers = list[Tensor]
Call = Callable[[], Answers]


@dataclass(frozen=True, kw_only=True, slots=True)
class Entry:
    """One model and number of tokens over all ranks; `routing` as `--skew` takes it. variants: time ours
    through torch's grouped GEMM, with exactly sized rows, and over NCCL with torch's GEMM, too. only: names
    of implementations, where not all are raced."""

    model: str
    M: int
    routing: str = "uniform"
    ops: tuple[str, ...] = OPS
    variants: bool = True
    only: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Inputs:
    x_TD: Tensor
    d_y_TD: Tensor
    routing: Routing


class Race:
    """One rank of one model."""

    def __init__(self, model: str, rank: int, world: int) -> None:
        self.model, self.shape, self.rank, self.world = model, MODELS[model], rank, world
        self.placement = contiguous(self.shape.num_experts, world)
        group = dist.group.WORLD
        size = self.placement, self.shape.hidden_size, self.shape.top_k
        self.exchange, self.exact, self.over_nccl = (
            Exchange(*size, group=group, transport=transport)
            for transport in (*(Nvlink(group, exact_rows=exact) for exact in (False, True)), "alltoall")
        )
        self.experts = self.make_experts("auto")
        self.torch_experts = self.make_experts("grouped")
        self.torch_experts.gate_up_proj = self.experts.gate_up_proj
        self.torch_experts.down_proj = self.experts.down_proj
        weights = Weights(
            gate_up_eGD=self.experts.gate_up_proj.detach(), down_eDF=self.experts.down_proj.detach()
        )
        self.floor = Ffn(weights)
        self.rivals = [
            kind(weights, self.shape.num_experts, world, rank)
            for kind in (AllToAll, GatherScatter, GatherScatterBag)
        ]

    def make_experts(self, implementation: str) -> Experts:
        """This rank's, drawn on the device; the same whatever computes them."""
        shape, slots = self.shape, self.placement.local(self.rank)
        experts = Experts(
            slots,
            shape.hidden_size,
            shape.intermediate_size,
            implementation=implementation,
            device="meta",
            dtype=torch.bfloat16,
        ).to_empty(device="cuda")
        torch.manual_seed(self.rank)
        for weight in experts.parameters():
            weight.data.normal_().mul_(weight.shape[2] ** -0.5)
        return experts

    def inputs(self, entry: Entry) -> Inputs:
        tokens = entry.M // self.world
        drawn = make_routing(entry.routing, self.shape, tokens, rank=self.rank)
        torch.manual_seed(self.rank)
        x, d_y = (
            torch.randn(tokens, self.shape.hidden_size, device="cuda", dtype=torch.bfloat16) for _ in range(2)
        )
        routing = Routing(ids_TK=drawn.ids_TK.cuda(), weights_TK=drawn.weights_TK.cuda())
        return Inputs(x_TD=x, d_y_TD=d_y, routing=routing)

    def local(self, inputs: Inputs) -> Inputs:
        """Inputs of the same tokens, of which every choice is the expert of this rank that stands in the
        place of the chosen one among its rank's, or the next that its token has not chosen yet. Uniform
        routing stays so."""
        ids_TK, count = inputs.routing.ids_TK, self.shape.num_experts // self.world
        taken_Te = torch.zeros(len(ids_TK), count, dtype=torch.bool, device=ids_TK.device)
        local_TK = torch.empty_like(ids_TK)
        for k in range(ids_TK.shape[1]):
            wanted_Te = (torch.arange(count, device=ids_TK.device) - ids_TK[:, k, None]) % count
            local_TK[:, k] = (wanted_Te + count * taken_Te).argmin(1)
            taken_Te.scatter_(1, local_TK[:, k, None], True)
        routing = replace(inputs.routing, ids_TK=local_TK + self.rank * count)
        return replace(inputs, routing=routing)

    def local_calls(self, op: str, inputs: Inputs) -> dict[str, Call]:
        """Calls without the wire; none where a rank has fewer experts than a token wants."""
        if self.shape.num_experts // self.world < self.shape.top_k:
            return {}
        layer = self.experts, self.exchange, self.local(inputs)
        training = op == "forward+backward"
        return {
            LOCAL: self._ours(*layer, training=training),
            FUSED_LOCAL: self._ours(*layer, training=training, strategy=Fused()),
        }

    def dy_before(self, op: str, inputs: Inputs) -> dict[str, Call]:
        """The fused step that moves dy before its product; a forward has none."""
        if op == "forward":
            return {}
        fused = Fused(Roles(dy=0))
        return {DY_BEFORE: self._ours(self.experts, self.exchange, inputs, training=True, strategy=fused)}

    def others_first(self, op: str, inputs: Inputs, names: Iterable[str]) -> dict[str, Call]:
        """The fused layers with others' rows first among `names`; none where experts are wide."""
        if self.shape.intermediate_size >= LESS_DEPTH:
            return {}
        layer, training = (self.experts, self.exchange, inputs), op == "forward+backward"
        return {
            name: self._ours(*layer, training=training, strategy=Fused(Roles(first=blocks_of(name))))
            for name in names
            if name.startswith(OURS_FIRST)
        }

    def calls(self, op: str, inputs: Inputs) -> dict[str, Call]:
        """The calls to time, by implementation; answers: y, then the gradients of x, weights and experts."""
        training = op == "forward+backward"
        calls: dict[str, Call] = {
            OURS: self._ours(self.experts, self.exchange, inputs, training=training),
            OURS_FUSED: self._ours(self.experts, self.exchange, inputs, training=training, strategy=Fused()),
            OURS_TORCH: self._ours(self.torch_experts, self.exchange, inputs, training=training),
            OURS_EXACT: self._ours(self.experts, self.exact, inputs, training=training),
            OURS_NCCL: self._ours(self.torch_experts, self.over_nccl, inputs, training=training),
        }
        for rival in self.rivals:
            calls[rival.name] = self._rival(rival, inputs, training=training)
        calls[FLOOR] = self._floor(inputs, training=training)
        calls[OURS_ALONE] = self._alone(inputs, training=training)
        return calls

    def _ours(
        self,
        experts: Experts,
        exchange: Exchange,
        inputs: Inputs,
        *,
        training: bool,
        strategy: Strategy | None = None,
    ) -> Call:
        x_TD = inputs.x_TD.clone().requires_grad_(training)
        weights_TK = inputs.routing.weights_TK.clone().requires_grad_(training)
        routing = Routing(ids_TK=inputs.routing.ids_TK, weights_TK=weights_TK)
        leaves = [x_TD, weights_TK, experts.gate_up_proj, experts.down_proj]

        def call() -> Answers:
            with torch.set_grad_enabled(training):
                y_TD = (strategy or Serial()).run(x_TD, routing, exchange, experts, None).y_TD
            if not training:
                return [y_TD]
            return [y_TD.detach(), *torch.autograd.grad(y_TD, leaves, inputs.d_y_TD)]

        return call

    def _rival(self, rival: AllToAll | GatherScatter, inputs: Inputs, *, training: bool) -> Call:
        ids_TK, weights_TK = inputs.routing.ids_TK, inputs.routing.weights_TK

        def call() -> Answers:
            y_TD = rival.forward(inputs.x_TD, ids_TK, weights_TK, keep=training)
            return [y_TD, *rival.backward(inputs.d_y_TD)] if training else [y_TD]

        return call

    def _floor(self, inputs: Inputs, *, training: bool) -> Call:
        """The rows that this rank's experts get, permuted beforehand."""
        rows_RD, d_out_RD, counts_e = self._rows_of_experts(inputs)
        ends_e = counts_e.cumsum(0).to(torch.int32)

        def call() -> Answers:
            out_RD = self.floor.forward(rows_RD, ends_e, keep=training)
            return [out_RD, *self.floor.backward(d_out_RD)] if training else [out_RD]

        return call

    def _rows_of_experts(self, inputs: Inputs) -> tuple[Tensor, Tensor, Tensor]:
        """Random rows and gradients, as many as this rank's experts get, and how many every expert does."""
        counts_E = torch.bincount(inputs.routing.ids_TK.flatten(), minlength=self.shape.num_experts)
        dist.all_reduce(counts_E)
        counts_e = counts_E.chunk(self.world)[self.rank]
        # host sync: once a case, outside what is timed
        size = int(counts_e.sum()), self.shape.hidden_size
        rows_RD, d_out_RD = (torch.randn(size, device="cuda", dtype=torch.bfloat16) for _ in range(2))
        return rows_RD, d_out_RD, counts_e

    def _alone(self, inputs: Inputs, *, training: bool) -> Call:
        """Our experts, on rows that are there: what no schedule can go below."""
        rows_RD, d_out_RD, counts_e = self._rows_of_experts(inputs)
        rows_RD.requires_grad_(training)
        weights = self.experts.gate_up_proj, self.experts.down_proj

        def call() -> Answers:
            with torch.set_grad_enabled(training):
                out_RD = ffn(rows_RD, *weights, counts_e)
            return (
                [out_RD, *torch.autograd.grad(out_RD, [rows_RD, *weights], d_out_RD)]
                if training
                else [out_RD]
            )

        return call

    def check(self, calls: dict[str, Call]) -> float:
        """The largest relative error between ours and the rivals', over all answers and ranks; what is fused
        has the same bits."""
        ours, worst = calls[OURS](), 0.0
        for name in (name for name in calls if name.startswith(OURS_FUSED) and name not in FLOORS):
            pairs = zip(ours, calls[name](), strict=True)
            assert all(torch.equal(a, b) for a, b in pairs), (
                f"{self.model}: {name} has other bits than serial"
            )
        for name in (name for name in calls if name not in (OURS, *FLOORS)):
            worst = max(worst, difference(ours, calls[name]()))
        errors = torch.tensor(worst, device="cuda")
        dist.all_reduce(errors, op=dist.ReduceOp.MAX)
        assert float(errors) < CLOSE_ENOUGH, f"{self.model}: implementations differ by {float(errors):.3g}"
        return float(errors)

    def index_add_microseconds(self, inputs: Inputs, repeats: int = 20) -> float:
        """The median time of one sum of the rows that a rank's experts get, by `GatherScatter`; a forward has
        one of them, and a backward another."""
        (rival,) = (rival for rival in self.rivals if type(rival) is GatherScatter)
        rival.forward(inputs.x_TD, inputs.routing.ids_TK, inputs.routing.weights_TK, keep=True)
        _, _, index, out_RD, weights_R1, _ = rival.saved
        rival.saved = ()
        pool = self.world * len(inputs.x_TD)
        calls = {"sum": lambda: rival.sum_rows(out_RD, weights_R1, pool, *index)}
        return round(
            statistics.median(time_in_turns(calls, PAUSE_CYCLES["forward"], repeats=repeats)["sum"]), 1
        )

    def close(self) -> None:
        torch.cuda.synchronize()
        dist.barrier()
        self.over_nccl.close()
        for exchange in (self.exchange, self.exact):
            exchange.transport.close()  # type: ignore[attr-defined]
            exchange.close()


def difference(result: Sequence[Tensor], truth: Sequence[Tensor]) -> float:
    """The largest relative error of a tensor of `result`, in the L2 norm."""
    pairs = zip(result, truth, strict=True)
    return max(float((a.float() - b.float()).norm() / b.float().norm()) for a, b in pairs)


def time_in_turns(
    calls: Mapping[str, Callable[[], object]], pause_cycles: int, *, repeats: int, warmup: int = 2
) -> dict[str, list[float]]:
    """Microseconds of every call, all of them once a round in another order, the slowest rank's. The GPU
    pauses so long while the host queues a call, or longer where the host does."""
    align = torch.zeros(1, device="cuda")
    pauses = {name: pause_of(call, pause_cycles) for name, call in calls.items()}
    times: dict[str, list[float]] = {name: [] for name in calls}
    order = random.Random(1)  # the same on all ranks
    for turn in range(-warmup, repeats):
        for name, call in order.sample(list(calls.items()), len(calls)):
            spent = device_microseconds(call, pauses[name], lambda: dist.all_reduce(align))
            if turn >= 0:
                times[name].append(spent)
    slowest = torch.tensor(list(times.values()), device="cuda")
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    return dict(zip(times, slowest.tolist(), strict=True))


def phases(runner: Race, entry: Entry, sms: Sequence[int], repeats: int = 5) -> dict[str, float]:
    """Microseconds of routing, rows out, experts and sums back, each from aligned ranks; those that move rows
    at every number of multiprocessors in `sms`."""
    inputs, dispatcher = runner.inputs(entry), cast("NvlinkDispatcher", runner.exchange.dispatcher)
    x_TD, ids_TK, weights_TK = inputs.x_TD, inputs.routing.ids_TK, inputs.routing.weights_TK
    with torch.no_grad():
        dispatched = runner.exchange.dispatch(x_TD, inputs.routing)
        out_RD, routed = runner.experts(dispatched), dispatcher.read_state(dispatched.handle.state)
    kernels = dispatcher.transport.exchange_of(dispatcher.size, len(x_TD))
    calls: dict[str, Callable[[], object]] = {
        "route": lambda: kernels.route(ids_TK, weights_TK),
        "experts": torch.no_grad()(lambda: runner.experts(dispatched)),
    }
    rows_1RD = torch.empty_like(out_RD)[None]
    for n in sms:
        calls[f"out {n}"] = lambda n=n: kernels.pull(x_TD, routed, num_sms=n, out=rows_1RD)
        calls[f"back {n}"] = lambda n=n: kernels.combine(
            out_RD[None], routed, weighted=False, num_sms=n, num_tokens=len(x_TD)
        )
    times_by_name = time_in_turns(calls, PAUSE_CYCLES["forward"], repeats=repeats)
    return {name: statistics.median(times) for name, times in times_by_name.items()}


def pause_of(call: Callable[[], object], least: int) -> int:
    """Cycles in which the host can queue a call twice; `least` at least, and four times as many at most,
    since a call that waits for the device would want ever more."""
    call()  # the first one compiles and allocates
    return min(4 * least, max(least, round(2 * CYCLES_OF_A_MICROSECOND * host_microseconds(call, least))))


def host_microseconds(call: Callable[[], object], pause_cycles: int, repeats: int = 5) -> float:
    """The median time that the host takes to queue a call."""
    spent = []
    for _ in range(repeats):
        torch.cuda.synchronize()
        torch.cuda._sleep(pause_cycles)
        start = time.perf_counter()
        call()
        spent.append(1e6 * (time.perf_counter() - start))
    return statistics.median(spent)


def race(
    rank: int,
    world: int,
    entries: list[Entry],
    repeats: int,
    out: str,
    run: dict[str, Any],
    name: str = "layer",
) -> list[dict[str, Any]]:
    """The rows of all entries, in the result file `out` as soon as a model's are there."""
    rows: list[dict[str, Any]] = []
    for model in dict.fromkeys(entry.model for entry in entries):
        runner = Race(model, rank, world)
        for entry in entries:
            if entry.model == model:
                rows += run_entry(runner, entry, repeats)
        if rank == 0:
            write_results(out, name, run, rows)
        runner.close()
        del runner
        torch.cuda.empty_cache()
    return rows


def run_entry(runner: Race, entry: Entry, repeats: int) -> list[dict[str, Any]]:
    inputs, rows = runner.inputs(entry), []
    for op in entry.ops:
        calls = runner.calls(op, inputs)
        if entry.only:
            calls |= runner.local_calls(op, inputs) | runner.dy_before(op, inputs)
            calls |= runner.others_first(op, inputs, entry.only)
            calls = {name: calls[name] for name in entry.only if name in calls}
        elif not entry.variants:
            calls = {name: call for name, call in calls.items() if name not in VARIANTS}
        error = runner.check(calls)
        by_name = time_in_turns(calls, PAUSE_CYCLES[op], repeats=repeats)
        table = {name: row_of(entry, runner, op, name, times, error) for name, times in by_name.items()}
        if GatherScatter.name in table:
            table[GatherScatter.name]["index_add_us"] = runner.index_add_microseconds(inputs)
        rows += table.values()
        if runner.rank == 0:
            print(line_of(entry, op, by_name), flush=True)
    return rows


def blocks_of(name: str) -> int:
    """The number that a name of `OURS_FIRST` ends with."""
    return int(name.removeprefix(OURS_FIRST))


def note_of(name: str, implementation: str) -> str:
    """Says what was timed; implementation: of our experts."""
    if name.startswith(OURS_FIRST):
        return f"schedule 'fused', others' rows first, summed by {blocks_of(name)} blocks"
    return {
        OURS: f"experts: {implementation}; rows for the worst case",
        OURS_TORCH: "torch's grouped GEMM, own SwiGLU",
        OURS_NCCL: "a token once to a rank over NCCL, torch's grouped GEMM, own SwiGLU",
        OURS_EXACT: "rows as many as there are, after asking the GPU",
        OURS_FUSED: "schedule 'fused'",
        DY_BEFORE: "schedule 'fused', rows of dy before their product",
        OURS_ALONE: "our experts, rows permuted",
        LOCAL: "every choice is an expert of the token's rank",
        FUSED_LOCAL: "schedule 'fused', every choice is an expert of the token's rank",
        FLOOR: "torch's experts, rows permuted",
    }.get(name, "torch's experts, backward by hand")


def case_of(entry: Entry, runner: Race) -> dict[str, Any]:
    shape: Shape = runner.shape
    return {
        "model": entry.model,
        "M": entry.M,
        "W": runner.world,
        "D": shape.hidden_size,
        "F": shape.intermediate_size,
        "E": shape.num_experts,
        "K": shape.top_k,
        "dtype": "bf16",
        "routing": entry.routing,
    }


def row_of(
    entry: Entry, runner: Race, op: str, name: str, times: list[float], error: float
) -> dict[str, Any]:
    row = {
        "op": op,
        "impl": name,
        "case": case_of(entry, runner),
        "full_call": name not in FLOORS,
        "median_us": round(statistics.median(times), 1),
        "min_us": round(min(times), 1),
        "max_us": round(max(times), 1),
        "n": len(times),
        "host_syncs": int(name.startswith("nccl") or name in (OURS_EXACT, OURS_NCCL)),
        "note": note_of(name, runner.experts.implementation),
    }
    return row | ({"error": error} if name == OURS else {})


def line_of(entry: Entry, op: str, times_by_name: dict[str, list[float]]) -> str:
    medians = {name: statistics.median(times) for name, times in times_by_name.items()}
    ours = medians[OURS]
    cells = [f"{entry.model:12} M={entry.M:<6} {op:17}"]
    cells += [f"{name} {us:8.0f}" for name, us in medians.items()]
    if FLOOR in medians and "nccl-a2a" in medians:
        cells += [f"over floor {ours / medians[FLOOR]:.2f}"]
        cells += [f"a2a over ours {medians['nccl-a2a'] / ours:.2f}"]
    return "  ".join(cells)
