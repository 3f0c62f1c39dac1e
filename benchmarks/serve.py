"""How fast is a step of decoding where it is used, and how near to reading its weights and cache?
`make gpu-bench NAME=serve`.

Random weights of real widths, drawn on the device; every way to the experts in the same engine, with the same
attention, norms and head. A step is timed by itself, with every slot at the same length: prompts are not run.
Then a closed loop of users on ours, for what the host adds.
"""

from __future__ import annotations

import argparse
import statistics
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from imbrex.bench.exchange.clock import run_ranks
from imbrex.bench.results import describe_run, write_results
from imbrex.bench.serve.loop import Load, serve
from imbrex.bench.serve.models import ALONE, GATHER, Way, make_model
from imbrex.layer import MoELayer
from imbrex.serve.engine import Engine, Settings
from imbrex.serve.model import Decoder

RESULTS = Path(__file__).parent / "results" / "serve.json"
QUESTION = "How many tokens a second does a step of decoding give, and how near is it to reading memory?"
CONTEXT, SLOTS, CHUNK = 1024, 128, (4, 256)
WAYS = {
    "qwen3-30b-a3b": ("nvlink", GATHER, ALONE, "alltoall"),
    "deepseek-v3-8": ("nvlink", GATHER, "alltoall"),
}
"""Experts of DeepSeek-V3's widths do not fit one GPU."""
BATCHES = (8, 32, 128)
ROUNDS = 20


def step_bytes(model: Decoder, rows: int, ranks: int, *, alone: bool) -> int:
    """Bytes that a step must read on a rank: weights, of the experts those that tokens of uniform routing
    want, and the cache of every row."""
    config, moe = model.config, model.config.moe
    experts = sum(p.numel() for n, p in model.named_parameters() if ".experts." in n)
    embedding = model.embedding.weight.numel()
    dense = sum(p.numel() for p in model.parameters()) - experts - embedding
    tokens = rows if alone else rows * ranks
    wanted = 1 - (1 - moe.top_k / moe.num_experts) ** tokens
    itemsize = model.embedding.weight.element_size()
    return round((dense + experts * wanted) * itemsize + rows * CONTEXT * config.cache_bytes(itemsize))


def read_tbps() -> float:
    """TB/s of reading 2 GiB of memory, by a sum."""
    values = torch.ones(1 << 30, dtype=torch.bfloat16, device="cuda")
    times = [_seconds(values.sum) for _ in range(8)]
    return values.nbytes / min(times) / 1e12


def _seconds(work: Any) -> float:
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    work()
    end.record()
    # host sync: a measurement reads its clock
    end.synchronize()
    return begin.elapsed_time(end) / 1e3


def step_seconds(engine: Engine, rows: int) -> float:
    """The median step of decoding of `rows` rows a rank, the slowest rank's."""
    state = engine.steps.state
    align, times = torch.zeros(1, device="cuda"), []
    for _ in range(ROUNDS + 3):
        state.length_Z.fill_(CONTEXT)
        state.remaining_Z.fill_(0)
        state.remaining_Z[:rows] = 1 << 20
        dist.all_reduce(align)
        times.append(_seconds(engine.programs[rows]))
    taken = torch.tensor(statistics.median(times[3:]), device="cuda")
    dist.all_reduce(taken, dist.ReduceOp.MAX)
    state.remaining_Z.fill_(0)
    return float(taken)


def measure(rank: int, world: int, name: str, out: str, run: dict[str, Any], only: list[str]) -> None:
    """The rows of a model, written as soon as a way's are there."""
    group, device = dist.group.WORLD, torch.device("cuda", rank)
    rows: list[dict[str, Any]] = []
    tbps = read_tbps()
    for transport in only or WAYS[name]:
        way = Way(transport=transport, experts="grouped" if transport == "alltoall" else "auto")
        began = time.perf_counter()
        settings = Settings(slots=SLOTS, room=CONTEXT + 256, chunk=CHUNK, graphs=way.captured, interval=4)
        options = {"device": device, "dtype": torch.bfloat16, "drafting": False}
        model = make_model(name, way, group, positions=settings.capacity, **options)
        engine = Engine(model, settings, group)
        torch.cuda.synchronize()
        ready = f"ready in {time.perf_counter() - began:.0f} s, {torch.cuda.max_memory_allocated() >> 30} GiB"
        rows += [decode_row(engine, name, transport, batch, tbps) for batch in BATCHES]
        if way.captured:
            load = Load(users=32 * world, input=128, output=32, rounds=2)
            point = serve(engine, load, engine.host_group)
            case = {"model": name, "users": load.users, "W": world, "input": 128, "output": 32, "interval": 4}
            rows.append({"op": "serve", "impl": transport, "case": case} | point)
        if rank == 0:
            write_results(out, QUESTION, run, rows)
            print(name, transport, ready, flush=True)
            for row in rows[-len(BATCHES) - way.captured :]:
                print({key: value for key, value in row.items() if key not in ("op", "n")}, flush=True)
        close(engine)
        del engine, model
        torch.cuda.empty_cache()


def decode_row(engine: Engine, name: str, transport: str, batch: int, tbps: float) -> dict[str, Any]:
    """A step of decoding beside the time to read what it must."""
    ranks = dist.get_world_size()
    taken = step_seconds(engine, batch)
    floor = step_bytes(engine.model, batch, ranks, alone=transport == ALONE) / tbps / 1e12
    return {
        "op": "decode step",
        "impl": transport,
        "case": {"model": name, "B": batch, "W": ranks, "context": CONTEXT, "dtype": "bf16"},
        "median_us": round(1e6 * taken, 1),
        "tokens_per_s_gpu": round(batch / taken),
        "floor_us": round(1e6 * floor, 1),
        "times_floor": round(taken / floor, 3),
        "read_tbps": round(tbps, 2),
        "n": ROUNDS,
    }


def close(engine: Engine) -> None:
    """Let go of graphs before what they use."""
    torch.cuda.synchronize()
    dist.barrier()
    engine.programs.clear()
    for layer in engine.model.modules():
        if isinstance(layer, MoELayer):
            layer.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", nargs="+", default=list(WAYS), choices=list(WAYS))
    parser.add_argument("--only", nargs="*", default=[], help="ways, where not all")
    parser.add_argument("--out", default=str(RESULTS))
    args = parser.parse_args()
    gpus = torch.cuda.device_count()
    words = " ".join(
        ["make gpu-bench NAME=serve", *(["--model", *args.model] if len(args.model) == 1 else [])]
    )
    for name in args.model:
        run_ranks(measure, gpus, name, args.out, describe_run(words), args.only)


if __name__ == "__main__":
    main()
