"""The calls that `imbrex bench layer` times, and what it says of them.

Gate, experts and exchange are those of the layer. Only the choice of experts is given, by `--skew`: the gate
runs and is timed as `route`, then the given routing goes to the strategy. All implementations take turns,
call by call, so that what disturbs the machine disturbs all of them.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from imbrex import overlap
from imbrex.bench.shapes import parse_shape
from imbrex.bench.skew import make_routing
from imbrex.contracts import Routing
from imbrex.exchange.exchange import Exchange
from imbrex.experts.experts import Experts, Shard
from imbrex.launch.factors import factorise, make_groups
from imbrex.launch.ranks import DTYPES
from imbrex.observe import PHASES, Recorder, fold
from imbrex.placement import contiguous
from imbrex.router.router import Router

ORACLE = "oracle"


class DrawnHere(Experts):
    """Experts drawn on their own device, the same on every rank: the largest shapes take minutes on a CPU."""

    def _draw(self, generator: torch.Generator) -> dict[str, Tensor]:
        device = self.down_proj.device
        here = torch.Generator(device).manual_seed(generator.initial_seed())
        wide, width = 2 * self.intermediate_size, self.hidden_size
        up = torch.empty(wide, width, device=device).uniform_(-1, 1, generator=here) / width**0.5
        down = torch.empty(width, self.intermediate_size, device=device).uniform_(-1, 1, generator=here)
        return {"gate_up_proj": up, "down_proj": down / self.intermediate_size**0.5}


class Bench:
    """One rank's side of the comparison."""

    def __init__(
        self,
        args: argparse.Namespace,
        transports: Sequence[str],
        rank: int,
        device: torch.device,
        recorder: Recorder,
    ) -> None:
        self.args, self.transports = args, transports
        self.rank, self.device, self.recorder = rank, device, recorder
        self.shape, self.dtype = parse_shape(args.model, args.scale), DTYPES[args.dtype]
        self.factors = factorise(args.ranks, expert=args.ep, tensor=args.tp)
        self.group, _ = make_groups(self.factors, args.timeout)
        self.placement = contiguous(self.shape.num_experts, self.factors.expert)
        torch.manual_seed(args.seed)
        kind: dict[str, Any] = {"device": device, "dtype": self.dtype}
        self.gate = Router(self.shape.hidden_size, self.shape.num_experts, self.shape.top_k, **kind)
        place = rank % self.factors.sharing
        self.experts = self._make_experts(
            self.placement.local(place // args.tp), args.experts, Shard(rank=place % args.tp, size=args.tp)
        )
        self.tokens = 0
        self.calls: dict[str, Callable[[], Tensor]] = {}
        self.parts: dict[str, range] = {ORACLE: range(args.ranks)}
        self.left_out: dict[str, str] = {}
        self.exchanges: list[Exchange] = []

    def _make_experts(self, experts: tuple[int, ...], implementation: str, shard: Shard) -> DrawnHere:
        return DrawnHere(
            experts,
            self.shape.hidden_size,
            self.shape.intermediate_size,
            implementation=implementation,
            shard=shard,
            seed=self.args.seed,
            device=self.device,
            dtype=self.dtype,
        )

    @property
    def num_implementations(self) -> int:
        """The oracle and the transports that were not left out."""
        return len(self.parts)

    def compare(self, tokens: int) -> list[dict[str, Any]]:
        """A row for every implementation, complete on rank 0; the oracle's comes first.

        tokens: over all ranks.
        """
        self.tokens = tokens
        self._drop_calls()
        for name in self.transports:
            self._add_transport(name)
        if not self.calls:
            raise ValueError(f"--transport: none works here: {self.left_out}")
        if self.rank == 0:
            self._add(ORACLE, None, self._whole(), "serial")
        outputs = {name: call() for name, call in self.calls.items()}
        expected = self._oracle_output(outputs.get(ORACLE))
        names = list(self.parts)
        spans: dict[str, list[list[float]]] = {name: [] for name in names}
        traffic = dict.fromkeys(names, 0.0)
        for repeat in range(-self.args.warmup, self.args.repeats):
            for name in names:
                times, nbytes = self._time(name, repeat)
                if repeat >= 0:
                    spans[name].append(times)
                    traffic[name] = nbytes
        errors = {name: self._error(name, outputs.get(name), expected) for name in names}
        return [self._row(name, spans[name], traffic[name], errors[name]) for name in names]

    def _drop_calls(self) -> None:
        self.calls.clear()
        for exchange in self.exchanges:
            exchange.close()
        self.exchanges.clear()

    def _add_transport(self, name: str) -> None:
        try:
            exchange = Exchange(
                self.placement,
                self.shape.hidden_size,
                self.shape.top_k,
                group=self.group,
                tensor_parallel=self.args.tp,
                transport=name,
                codec=self.args.codec,
                timeout=self.args.timeout,
                observer=self.recorder,
            )
        except ValueError as error:
            # A rank's ValueError at construction is every rank's: all leave the transport out.
            if self.args.transport != "all":
                raise
            self.left_out[name] = str(error)
            return
        first = self.rank // self.factors.sharing * self.factors.sharing
        group = range(first, first + self.factors.sharing)
        self.parts[name] = group if exchange.transport.replicated else range(self.rank, self.rank + 1)
        self._add(name, exchange, self.experts, self.args.schedule)

    def _inputs(self, parts: range) -> tuple[Tensor, Routing, Tensor]:
        """x, routing and the gradient of y for the tokens of ranks `parts`."""
        x, dy, ids, weights = [], [], [], []
        for part in parts:
            num_tokens = self._tokens_before(part + 1) - self._tokens_before(part)
            generator = torch.Generator().manual_seed(77 * self.args.seed + part)
            routing = make_routing(self.args.skew, self.shape, num_tokens, rank=part, seed=self.args.seed)
            x.append(torch.randn(num_tokens, self.shape.hidden_size, generator=generator))
            dy.append(torch.randn(num_tokens, self.shape.hidden_size, generator=generator))
            ids.append(routing.ids_TK)
            weights.append(routing.weights_TK)
        x_TD = torch.cat(x).to(self.device, self.dtype).requires_grad_(self.args.backward)
        weights_TK = torch.cat(weights).to(self.device).requires_grad_(self.args.backward)
        routing = Routing(ids_TK=torch.cat(ids).to(self.device), weights_TK=weights_TK)
        return x_TD, routing, torch.cat(dy).to(self.device, self.dtype)

    def _tokens_before(self, part: int) -> int:
        return part * self.tokens // self.args.ranks

    def _whole(self) -> DrawnHere:
        return self._make_experts(tuple(range(self.shape.num_experts)), "loop", Shard())

    def _add(self, name: str, exchange: Exchange | None, experts: Experts, schedule: str) -> None:
        x_TD, routing, dy_TD = self._inputs(self.parts[name])
        if exchange is None:
            alone = contiguous(self.shape.num_experts, 1)
            exchange = Exchange(alone, self.shape.hidden_size, self.shape.top_k, observer=self.recorder)
        self.exchanges.append(exchange)
        strategy = overlap.make(schedule)

        def call() -> Tensor:
            x_TD.grad = routing.weights_TK.grad = None
            experts.zero_grad()
            with torch.set_grad_enabled(self.args.backward):
                with self.recorder.span("route"):
                    self.gate(x_TD.detach())
                y_TD = strategy.run(x_TD, routing, exchange, experts, None).y_TD
            if self.args.backward:
                y_TD.backward(dy_TD)
                assert x_TD.grad is not None
                return torch.stack([y_TD.detach(), x_TD.grad])
            return y_TD.detach()[None]

        self.calls[name] = call

    def _time(self, name: str, repeat: int) -> tuple[list[float], float]:
        """Microseconds of one call of this rank, the whole and each phase, and the bytes it sent."""
        recorder = self.recorder
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        dist.barrier()
        recorder.take_counters()
        recorder.begin_step(repeat + self.args.warmup)
        with recorder.span("call"):
            if name in self.calls:
                self.calls[name]()
        phases = recorder.end_step()
        whole_ms = next(s for s in reversed(recorder.spans) if s.name == "call").duration_ns / 1e6
        nbytes = sum(sum(v) for (what, _), v in recorder.take_counters().items() if what == "bytes_sent")
        folded = fold(phases, whole_ms)
        return [1e3 * t for t in (whole_ms, *(folded[phase] for phase in (*PHASES, "rest")))], float(nbytes)

    def _oracle_output(self, output: Tensor | None) -> Tensor:
        """The oracle's y and, with a backward, dx of all tokens, in the order of ranks, on every rank."""
        answer = output
        if answer is None:
            answers = 2 if self.args.backward else 1
            shape = answers, self.tokens, self.shape.hidden_size
            answer = torch.zeros(shape, dtype=self.dtype, device=self.device)
        dist.broadcast(answer, 0)
        return answer

    def _error(self, name: str, output: Tensor | None, expected: Tensor) -> float:
        """Largest difference from the oracle's y or dx over its largest value there, over all ranks."""
        difference = torch.zeros((), device=self.device)
        if output is not None:
            begin = self._tokens_before(self.parts[name].start)
            own = expected[:, begin : begin + output.shape[1]]
            if output.shape[1]:
                largest = expected.float().abs().amax((1, 2))
                difference = ((output.float() - own.float()).abs().amax((1, 2)) / largest).max()
        dist.all_reduce(difference, dist.ReduceOp.MAX)
        return float(difference)

    def _row(self, name: str, times_S: list[list[float]], nbytes: float, error: float) -> dict[str, Any]:
        """Every figure is the maximum over ranks; the whole's is taken call by call."""
        times = torch.tensor(times_S, device=self.device)
        dist.all_reduce(times, dist.ReduceOp.MAX)
        total = torch.tensor(nbytes, dtype=torch.float64, device=self.device)
        dist.all_reduce(total, dist.ReduceOp.MAX)
        whole, *phases = times.double().round(decimals=1).T.tolist()
        return {
            "op": "layer forward+backward" if self.args.backward else "layer forward",
            "impl": name if name == ORACLE else f"imbrex {name}",
            "case": self._case(),
            "full_call": True,
            "median_us": statistics.median(whole),
            "min_us": min(whole),
            "max_us": max(whole),
            "spread_us": _tenths(whole),
            "phases_us": dict(zip((*PHASES, "rest"), map(statistics.median, phases), strict=True)),
            "n": len(whole),
            # The bytes of an AllReduce are the back end's own affair.
            "bytes_sent": None if len(self.parts[name]) > 1 and name != ORACLE else float(total),
            "error": error,
            "note": self._note(name),
        }

    def _note(self, name: str) -> str:
        if name == ORACLE:
            left = "".join(f"; {other} was left out: {why}" for other, why in self.left_out.items())
            return f"all tokens on one rank, one expert after the other{left}"
        return "the tokens of the whole group on every rank" if len(self.parts[name]) > 1 else ""

    def _case(self) -> dict[str, Any]:
        args, shape = self.args, self.shape
        return {
            "model": args.model,
            "scale": args.scale,
            "M": self.tokens,
            "D": shape.hidden_size,
            "F": shape.intermediate_size,
            "E": shape.num_experts,
            "K": shape.top_k,
            "W": args.ranks,
            "EP": self.factors.expert,
            "TP": self.factors.tensor,
            "dtype": args.dtype,
            "routing": args.skew,
            "codec": args.codec,
            "schedule": args.schedule,
            "experts": self.experts.implementation,
        }


def _tenths(values: list[float]) -> tuple[float, float]:
    """The 10th and the 90th percentile."""
    ordered = sorted(values)
    last = len(ordered) - 1
    return ordered[round(0.1 * last)], ordered[round(0.9 * last)]
