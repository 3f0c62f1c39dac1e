"""What does fp8 give the inference of one MoE layer over NVLink? `make gpu-bench NAME=layer_fp8`.

Forward without gradients: in bfloat16; experts in fp8 and rows that cross in bfloat16; rows that cross in
fp8, are decoded and quantised again; rows that stay as they crossed. Dispatch and experts alone, too.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from imbrex import Exchange, Routing
from imbrex.cli.exchange_clock import run_ranks
from imbrex.cli.layer_race import PAUSE_CYCLES, time_in_turns
from imbrex.cli.results import describe_run, write_results
from imbrex.cli.shapes import MODELS
from imbrex.cli.skew import make_routing
from imbrex.contracts import Dispatched
from imbrex.experts import Experts
from imbrex.overlap import Serial
from imbrex.placement import contiguous

RESULTS = Path(__file__).parent / "results" / "layer_fp8.json"
QUESTION = "What does fp8 give the inference of one MoE layer over NVLink?"
IMPLS = {
    "imbrex-serial": ("identity", "kernels"),
    "imbrex-serial-fp8-experts": ("identity", "kernels-fp8"),
    "imbrex-serial-fp8-decoded": ("fp8", "decoded"),
    "imbrex-serial-fp8-rows": ("fp8", "kernels-fp8"),
}
"""How rows cross to the experts, and what these are; sums come home in bfloat16."""


class Decoded(torch.nn.Module):
    """fp8 experts that want rows in bfloat16."""

    applies_weights, takes_fp8_rows = True, False

    def __init__(self, experts: Experts) -> None:
        super().__init__()
        self.experts = experts

    def forward(self, dispatched: Dispatched) -> Tensor:
        return self.experts(dispatched)


class Bench:
    """One rank of one model."""

    def __init__(self, model: str, rank: int, world: int, tokens: int) -> None:
        shape, placement = MODELS[model], contiguous(MODELS[model].num_experts, world)
        self.exchanges = {
            codec: Exchange(
                placement,
                shape.hidden_size,
                shape.top_k,
                group=dist.group.WORLD,
                transport="nvlink",
                codec={"dispatch": codec},
            )
            for codec in ("identity", "fp8")
        }
        size = placement.local(rank), shape.hidden_size, shape.intermediate_size
        plain, quantised = (
            Experts(*size, implementation=name, device="meta", dtype=torch.bfloat16)
            for name in ("kernels", "kernels-fp8")
        )
        torch.manual_seed(rank)
        plain.to_empty(device="cuda")
        for weight in plain.parameters():
            weight.data.normal_().mul_(weight.shape[2] ** -0.5)
        quantised.gate_up_proj, quantised.down_proj = plain.gate_up_proj, plain.down_proj
        self.experts = {"kernels": plain, "kernels-fp8": quantised, "decoded": Decoded(quantised)}
        drawn = make_routing("uniform", shape, tokens // world, rank=rank)
        self.routing = Routing(ids_TK=drawn.ids_TK.cuda(), weights_TK=drawn.weights_TK.cuda())
        self.x_TD = torch.randn(tokens // world, shape.hidden_size, device="cuda", dtype=torch.bfloat16)

    def calls(self) -> dict[str, dict[str, Callable[[], Any]]]:
        """What is timed: by operation, then by implementation."""
        found: dict[str, dict[str, Callable[[], Any]]] = {"forward": {}, "dispatch": {}, "experts": {}}
        for impl, (codec, kind) in IMPLS.items():
            exchange, experts = self.exchanges[codec], self.experts[kind]
            given, fp8_rows = (self.x_TD, self.routing), impl.endswith("rows")
            dispatched = exchange.dispatch(*given, fp8_rows=fp8_rows)
            assert (dispatched.scales_RB is not None) == fp8_rows
            found["forward"][impl] = lambda given=given, exchange=exchange, experts=experts: Serial().run(
                *given, exchange, experts, None
            )
            found["dispatch"][impl] = lambda given=given, exchange=exchange, fp8_rows=fp8_rows: (
                exchange.dispatch(*given, fp8_rows=fp8_rows)
            )
            found["experts"][impl] = lambda dispatched=dispatched, experts=experts: experts(dispatched)
        return found

    def close(self) -> None:
        torch.cuda.synchronize()
        dist.barrier()
        for exchange in self.exchanges.values():
            exchange.close()


@torch.no_grad()
def measure(
    rank: int, world: int, models: list[str], tokens: int, repeats: int, out: str, run: dict[str, Any]
) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    for model in models:
        bench = Bench(model, rank, world, tokens)
        calls = bench.calls()
        whole = {impl: call().float() for impl, call in calls["forward"].items()}
        truth = whole["imbrex-serial"]
        errors = {impl: float((y - truth).norm() / truth.norm()) for impl, y in whole.items()}
        again = [whole[f"imbrex-serial-fp8-{name}"] for name in ("decoded", "rows")]
        differ = float((again[0] - again[1]).norm() / truth.norm())
        for op, by_impl in calls.items():
            for impl, times in time_in_turns(by_impl, PAUSE_CYCLES["forward"], repeats=repeats).items():
                rows.append(
                    {
                        "op": op,
                        "impl": impl,
                        "case": {"model": model, "M": tokens, "W": world, "routing": "uniform"},
                        "full_call": op == "forward",
                        "median_us": round(statistics.median(times), 1),
                        "min_us": round(min(times), 1),
                        "max_us": round(max(times), 1),
                        "n": len(times),
                        "host_syncs": 0,
                        "error": round(errors[impl], 5),
                    }
                )
                if rank == 0:
                    print(f"{model:12} {op:9} {impl:26} {rows[-1]['median_us']:8.1f} us", flush=True)
        if rank == 0:
            print(f"{model}: off bfloat16 {errors}, decoded and rows apart {differ:.2e}", flush=True)
            write_results(out, QUESTION, run, rows)
        bench.close()
        del bench, calls, whole, truth, again
        torch.cuda.empty_cache()
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--models", default="deepseek-v3,qwen2-moe", help=", ".join(MODELS))
    parser.add_argument("--tokens", type=int, default=16384, help="over all GPUs (16384)")
    args = parser.parse_args()
    world = torch.cuda.device_count()
    if world < 2:
        raise SystemExit("benchmarks/layer_fp8.py needs two GPUs or more")
    command = f"make gpu-bench NAME=layer_fp8 ARGS='--models={args.models} --tokens={args.tokens}'"
    models = args.models.split(",")
    run_ranks(measure, world, models, args.tokens, args.repeats, str(args.out), describe_run(command))


if __name__ == "__main__":
    main()
