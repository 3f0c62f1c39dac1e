"""What does fp8 give the inference of one MoE layer over NVLink? `make gpu-bench NAME=layer_fp8`.

Forward without gradients: in bfloat16; experts in fp8 and rows that cross in bfloat16; rows that cross in
fp8, are decoded and quantised again; rows that stay as they crossed. Dispatch and experts alone, too.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from imbrex import Exchange
from imbrex.bench.exchange.clock import run_ranks
from imbrex.bench.layer.race import PAUSE_CYCLES, Entry, Race, time_in_turns
from imbrex.bench.results import describe_run, write_results
from imbrex.bench.shapes import MODELS
from imbrex.contracts import Dispatched, RowForm
from imbrex.experts.experts import Experts
from imbrex.overlap import Serial

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

    applies_weights, forms = True, (RowForm.ROWS,)

    def __init__(self, experts: Experts) -> None:
        super().__init__()
        self.experts = experts

    def forward(self, dispatched: Dispatched) -> Tensor:
        return self.experts(dispatched)


def calls_of(race: Race, tokens: int) -> dict[str, dict[str, Callable[[], Any]]]:
    """What is timed: by operation, then by implementation."""
    size = race.placement, race.shape.hidden_size, race.shape.top_k
    fp8 = Exchange(*size, group=dist.group.WORLD, transport="nvlink", codec={"dispatch": "fp8"})
    quantised = race.make_experts("kernels-fp8")
    quantised.gate_up_proj, quantised.down_proj = race.experts.gate_up_proj, race.experts.down_proj
    exchanges = {"identity": race.exchange, "fp8": fp8}
    kinds = {"kernels": race.experts, "kernels-fp8": quantised, "decoded": Decoded(quantised)}
    inputs = race.inputs(Entry(model=race.model, M=tokens))
    given = inputs.x_TD, inputs.routing
    found: dict[str, dict[str, Callable[[], Any]]] = {"forward": {}, "dispatch": {}, "experts": {}}
    for impl, (codec, kind) in IMPLS.items():
        exchange, experts = exchanges[codec], kinds[kind]
        form = RowForm.FP8 if impl.endswith("rows") else RowForm.ROWS
        dispatched = exchange.dispatch(*given, forms=(form,))
        assert dispatched.form is form
        run = partial(Serial().run, *given, exchange, experts, None)
        found["forward"][impl] = lambda run=run: run().y_TD
        found["dispatch"][impl] = partial(exchange.dispatch, *given, forms=(form,))
        found["experts"][impl] = partial(experts, dispatched)
    return found


@torch.no_grad()
def measure(
    rank: int, world: int, models: list[str], tokens: int, repeats: int, out: str, run: dict[str, Any]
) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    for model in models:
        race = Race(model, rank, world)
        assert race.experts.implementation == "kernels"
        calls = calls_of(race, tokens)
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
        race.close()
        del race, calls, whole, truth, again
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
