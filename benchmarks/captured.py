"""How long does a token of a Hugging Face model take, as it is and as one graph?
`make gpu-bench NAME=captured`.

Qwen3-30B-A3B with all its layers and random weights on all GPUs of this machine, the same prompts' lengths on
every rank: `generate` of transformers as it is, whole on every GPU and by its own expert parallelism; with
blocks that imbrex replaced; and `imbrex.capture` of that model, whose step is one CUDA graph. A token's time
is what more tokens take over what few take, so a prompt is no part of it. Wants transformers 5.23.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import transformers
from models import MODELS, Side, agreed, as_launched
from torch import Tensor

import imbrex
from imbrex.bench.ceilings import measure_ceilings
from imbrex.bench.exchange.clock import run_ranks
from imbrex.bench.results import describe_run, write_results

QUESTION = "How long does a token of a Hugging Face model take, as it is and as one graph?"
RESULTS = Path(__file__).parent / "results" / "captured.json"
SIDES = {"transformers": "transformers-ddp", "transformers-ep": "transformers-ep", "imbrex": "imbrex"}
"""Ways to spread the model, by what `models.Side` calls them; the last one is captured as well."""
PROMPT, FEW, MANY = 64, 4, 12
"""Tokens of a prompt, and of the two answers whose times are compared."""

Answer = Callable[[Tensor, int], Tensor]


def answers_of(model: Any) -> Answer:
    """Greedy answers by the model's own `generate`."""
    model.generation_config.eos_token_id = None

    def answer(ids_BS: Tensor, size: int) -> Tensor:
        sizes = {"max_new_tokens": size, "min_new_tokens": size}
        mask_BS = torch.ones_like(ids_BS)
        return model.generate(ids_BS, attention_mask=mask_BS, do_sample=False, **sizes)[:, ids_BS.shape[1] :]

    return answer


def captured(model: Any, rows: int) -> Answer:
    """The same by `imbrex.capture`."""
    decoding = imbrex.capture(model, batch=rows, length=PROMPT + MANY)
    return lambda ids_BS, size: decoding.generate(ids_BS, max_new_tokens=size)


def seconds(answer: Answer, ids_BS: Tensor, size: int) -> float:
    """The time of one answer, the slowest rank's."""
    torch.cuda.synchronize()
    dist.barrier()
    begin = time.perf_counter()
    answer(ids_BS, size)
    torch.cuda.synchronize()
    span = torch.tensor(time.perf_counter() - begin, device="cuda", dtype=torch.float64)
    dist.all_reduce(span, op=dist.ReduceOp.MAX)
    return span.item()


def microseconds_a_token(answer: Answer, ids_BS: Tensor, repeats: int) -> list[float]:
    for size in (FEW, FEW, MANY):
        seconds(answer, ids_BS, size)
    pairs = [(seconds(answer, ids_BS, FEW), seconds(answer, ids_BS, MANY)) for _ in range(repeats)]
    return [1e6 * (many - few) / (MANY - FEW) for few, many in pairs]


def spread_of(spans: list[float]) -> dict[str, Any]:
    numbers = {"median_us": statistics.median(spans), "min_us": min(spans), "max_us": max(spans)}
    return {name: round(value, 1) for name, value in numbers.items()} | {"n": len(spans)}


def contest(rank: int, world: int, plan: dict[str, Any]) -> list[dict[str, Any]]:
    """Rows of every side and number of sequences; rank 0 writes the file after each side."""
    as_launched(rank, world)
    rows: list[dict[str, Any]] = []
    dist.all_reduce(torch.zeros(1, device="cuda"))
    for name in plan["sides"]:
        if not agreed(time.monotonic() < plan["end"]):
            continue
        try:
            one_side(name, world, plan, rows)
        except Exception as error:  # noqa: BLE001 (a side that fails is told of, and the others are raced)
            print(name, f"failed: {type(error).__name__}: {str(error)[:600]}", flush=True)
        gc.collect()
        torch.cuda.empty_cache()
        if rank == 0:
            write_results(plan["out"], QUESTION, plan["run"], rows)
    return rows


def one_side(name: str, world: int, plan: dict[str, Any], rows: list[dict[str, Any]]) -> None:
    published = replace(MODELS[plan["model"]].whole(), layers=plan["layers"] or MODELS[plan["model"]].of)
    config, rank = published.config(use_cache=True, attn_implementation="sdpa"), dist.get_rank()
    side = Side(SIDES[name], config, torch.device("cuda", rank), world, trains=False)
    try:
        for batch in plan["rows"]:
            torch.manual_seed(1 + rank)
            ids_BS = torch.randint(config.vocab_size, (batch, PROMPT), device="cuda")
            ways = {name: answers_of(side.net)}
            if name == "imbrex":
                ways["imbrex-captured"] = captured(side.net, batch)
            texts = [answer(ids_BS, MANY) for answer in ways.values()]
            for impl, answer in ways.items():
                spans = microseconds_a_token(answer, ids_BS, plan["repeats"])
                case = {"model": plan["model"], "layers": published.layers, "B": batch, "W": world}
                case = {"model": plan["model"], "layers": published.layers, "B": batch, "W": world}
                rows.append({"impl": impl, "op": "token", "case": case | {"prompt": PROMPT, "dtype": "bf16"}})
                rows[-1] |= spread_of(spans)
                if impl != name:
                    rows[-1]["tokens_equal"] = round((texts[0] == texts[1]).float().mean().item(), 3)
                if rank == 0:
                    print(impl, f"{batch} sequences a rank: {rows[-1]['median_us'] / 1e3:.2f} ms", flush=True)
    finally:
        side.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--model", default="qwen3-30b-a3b", choices=sorted(MODELS))
    parser.add_argument("--layers", type=int, help="so many, in the place of all")
    parser.add_argument("--sides", default=",".join(SIDES))
    parser.add_argument("--rows", default="1,8,32", help="sequences of a rank")
    parser.add_argument("--seconds", type=float, default=3600.0, help="begin no side after so many")
    args = parser.parse_args()
    words = [f"--{name}={value}" for name, value in vars(args).items() if value != parser.get_default(name)]
    options = " ".join(word for word in words if not word.startswith("--out"))
    command = "make gpu-bench NAME=captured" + (f" ARGS='{options}'" if options else "")
    run = describe_run(command, measure_ceilings())
    run["versions"]["transformers"] = transformers.__version__
    plan = {"model": args.model, "layers": args.layers, "repeats": args.repeats, "out": str(args.out)}
    plan |= {"sides": args.sides.split(","), "rows": [int(count) for count in args.rows.split(",")]}
    plan |= {"run": run, "end": time.monotonic() + args.seconds}
    rows = run_ranks(contest, torch.cuda.device_count(), plan)
    print(f"{len(rows)} rows in {args.out}")


if __name__ == "__main__":
    main()
