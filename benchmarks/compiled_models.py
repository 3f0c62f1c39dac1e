"""Does `torch.compile(model)` gain on one GPU? `make gpu-bench NAME=compiled_models`.

A few layers of Qwen3-30B-A3B's widths, by transformers' own experts (grouped products) and with replaced
blocks: the forward, the step of a training and `generate` with a static cache, as they are and compiled, in
turns. Compiling takes most of the time: processes beside each other compile everything first, into torch's
cache on disk, from which the process that measures reads it. Not with `mode="reduce-overhead"`: `generate`
so ends torch 2.11's process, with transformers' own experts as with imbrex's (docs/LOG.md, 2026-11-28).
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch._dynamo
import torch.multiprocessing
import transformers
from models import MODELS
from torch import Tensor, nn

from imbrex.adapters.huggingface import replace_blocks
from imbrex.bench.ceilings import measure_ceilings
from imbrex.bench.results import describe_run, write_results

QUESTION = "Does torch.compile(model) with its default arguments gain on one GPU?"
RESULTS = Path(__file__).parent / "results" / "compiled_models.json"
SIDES = ("imbrex", "transformers")
NEW_TOKENS = 32
LENGTH = 1024


def make(side: str, layers: int) -> Any:
    published = MODELS["qwen3-30b-a3b"]
    config = published.config(
        num_hidden_layers=layers, vocab_size=16384, use_cache=True, experts_implementation="grouped_mm"
    )
    torch.manual_seed(0)
    with torch.device("cuda"):
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    if side == "imbrex":
        replace_blocks(model)
    return model


def in_turns(ways: dict[str, Callable[[], Any]], repeats: int) -> dict[str, list[float]]:
    """Milliseconds of every way, one after the other in every round, the GPU waited for at both ends."""
    spans: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(repeats + 2):
        for name, call in ways.items():
            torch.cuda.synchronize()
            begin = time.perf_counter()
            call()
            torch.cuda.synchronize()
            if number >= 2:
                spans[name].append(1e3 * (time.perf_counter() - begin))
    return spans


def steps_of(model: nn.Module, run: Callable[..., Any], ids: Tensor) -> Callable[[], None]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)

    def step() -> None:
        run(input_ids=ids, labels=ids, use_cache=False).loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def forwards_of(run: Callable[..., Any], ids: Tensor) -> Callable[[], Any]:
    @torch.no_grad()
    def forward() -> Any:
        return run(input_ids=ids, use_cache=False).logits

    return forward


def generations_of(model: Any, ids: Tensor, **options: Any) -> Callable[[], Tensor]:
    lengths = {"max_new_tokens": NEW_TOKENS, "min_new_tokens": NEW_TOKENS, "do_sample": False}
    return lambda: model.generate(ids, cache_implementation="static", **lengths, **options)


def ways_of(side: str, op: str, layers: int, tokens: int) -> dict[str, Callable[[], Any]]:
    """The operation of one side as it is, and compiled."""
    model, length = make(side, layers), min(tokens, LENGTH)
    ids = torch.randint(16384, (tokens // length, length), device="cuda")
    compiled: Any = torch.compile(model)
    if op == "forward":
        return {"eager": forwards_of(model.eval(), ids), "compiled": forwards_of(compiled, ids)}
    if op == "step":
        return {name: steps_of(model, run, ids) for name, run in (("eager", model), ("compiled", compiled))}
    prompt, twin = ids[:1, :64].expand(4, 64), make(side, layers).eval()
    twin.compile()
    models = {"eager": model.eval(), "compiled": twin}
    return {name: generations_of(each, prompt, disable_compile=True) for name, each in models.items()}


def compile_once(op: str, side: str, layers: int, tokens: int) -> None:
    for name, call in ways_of(side, op, layers, tokens).items():
        if name != "eager":
            call()
    torch.cuda.synchronize()


def compile_all(ops: list[str], sides: list[str], layers: int, tokens: int) -> None:
    """Fills torch's cache; what fails there fails again, and is told of, where it is measured."""
    begin, context = time.perf_counter(), torch.multiprocessing.get_context("spawn")
    pairs = [(op, side, layers, tokens) for op in ops for side in sides]
    processes = [context.Process(target=compile_once, args=pair) for pair in pairs]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    print(f"compiled beside each other in {time.perf_counter() - begin:.0f} s", flush=True)


def measured(side: str, op: str, layers: int, tokens: int, repeats: int) -> list[dict[str, Any]]:
    """Rows of one side and operation, as it is and compiled."""
    torch.compiler.reset()
    torch._dynamo.utils.counters.clear()
    torch.cuda.empty_cache()
    ways = ways_of(side, op, layers, tokens)
    begin = time.perf_counter()
    equal = "" if op == "step" else f", {closeness(*(ways[name]() for name in ('eager', 'compiled')))}"
    spans = in_turns(ways, repeats)
    counters = torch._dynamo.utils.counters
    breaks = sum(counters["graph_break"].values())
    graphs = counters["stats"]["unique_graphs"]
    said = ", ".join(f"{name} {statistics.median(span):.2f} ms" for name, span in spans.items())
    gain = statistics.median(spans["eager"]) / statistics.median(spans["compiled"])
    print(f"{side} {op}: {said}, gain {gain:.2f}, {graphs} graphs, {breaks} breaks{equal}", flush=True)
    print(f"    {time.perf_counter() - begin:.0f} s, {list(counters['graph_break'])[:3]}"[:400], flush=True)
    case = {"model": "qwen3-30b-a3b", "layers": layers, "T": tokens, "dtype": "bf16"}
    return [
        {
            "impl": side if name == "eager" else f"{side}-{name}",
            "op": op,
            "case": case,
            "median_us": round(1e3 * statistics.median(span), 1),
            "min_us": round(1e3 * min(span), 1),
            "max_us": round(1e3 * max(span), 1),
            "n": len(span),
            "graphs": graphs,
            "graph_breaks": breaks,
        }
        for name, span in spans.items()
    ]


def closeness(eager: Tensor, compiled: Tensor) -> str:
    if not eager.is_floating_point():
        return f"{(eager == compiled).float().mean().item():.3f} of the tokens equal"
    error = (eager - compiled).float().norm() / eager.float().norm()
    return f"logits differ by {error.item():.1e}"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--sides", default=",".join(SIDES))
    parser.add_argument("--ops", default="forward,step,generate")
    parser.add_argument("--seconds", type=float, default=3600.0, help="begin nothing after so many")
    args = parser.parse_args()
    end = time.monotonic() + args.seconds
    transformers.logging.set_verbosity_error()
    words = [f"--{name}={value}" for name, value in vars(args).items() if value != parser.get_default(name)]
    options = " ".join(word for word in words if not word.startswith("--out"))
    command = "make gpu-bench NAME=compiled_models" + (f" ARGS='{options}'" if options else "")
    run = describe_run(command, measure_ceilings())
    run["versions"]["transformers"] = transformers.__version__
    rows: list[dict[str, Any]] = []
    ops, sides = args.ops.split(","), args.sides.split(",")
    compile_all(ops, sides, args.layers, args.tokens)
    for op in ops:
        for side in sides:
            if time.monotonic() > end:
                print(f"{side} {op}: no time left", flush=True)
                continue
            try:
                rows += measured(side, op, args.layers, args.tokens, args.repeats)
            except Exception as error:  # noqa: BLE001 (the others are measured all the same)
                print(f"{side} {op} failed: {type(error).__name__}: {str(error)[:1500]}", flush=True)
            write_results(str(args.out), QUESTION, run, rows)


if __name__ == "__main__":
    main()
