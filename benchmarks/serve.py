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
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from imbrex.bench.exchange.clock import run_ranks
from imbrex.bench.results import describe_run, write_results
from imbrex.bench.serve.loop import Load, serve
from imbrex.bench.serve.models import ALONE, GATHER, Way, make_model
from imbrex.serve.decoding import Captured, Drafting
from imbrex.serve.engine import Engine, Settings
from imbrex.serve.heads import best_keys, maximum, unpack
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
ROUNDS, CHOICES = 20, 20
KERNELS = 34


def step_bytes(model: Decoder, rows: int, experts: int) -> int:
    """Bytes that a step must read on a rank: dense weights, the `experts` of all layers that its tokens want,
    and the cache of every row."""
    config, itemsize = model.config, model.embedding.weight.element_size()
    own = [p for n, p in model.named_parameters() if ".experts." in n]
    one = sum(p[0].numel() for p in own) // (config.num_layers + config.drafting)
    dense = sum(p.numel() for p in model.parameters()) - sum(p.numel() for p in own)
    dense -= model.embedding.weight.numel()
    return (dense + experts * one) * itemsize + rows * CONTEXT * config.cache_bytes(itemsize)


def experts_hit(engine: Engine, rows: int, *, alone: bool) -> int:
    """Experts of this rank that a step's tokens want, of all layers; the most of any rank."""
    ready(engine, rows)
    engine.steps.decode(rows)
    hit = 0
    draft = engine.model.draft
    for block in [*engine.model.blocks, *([] if draft is None else [draft.block])]:
        moe: Any = block.moe
        ids = moe.routing.ids_TK.contiguous()
        everybody = ids.new_empty(dist.get_world_size() * len(ids), ids.shape[1])
        dist.all_gather_into_tensor(everybody, ids)
        own = torch.tensor(moe.experts.expert_ids, device="cuda")
        hit += int(torch.isin(own, ids if alone else everybody).sum())
    fullest = torch.tensor(hit, device="cuda")
    dist.all_reduce(fullest, dist.ReduceOp.MAX)
    return int(fullest)


def ready(engine: Engine, rows: int) -> None:
    """Random tokens over random caches, other ones in every slot and rank: so routing is spread."""
    state = engine.steps.state
    generator = torch.Generator("cuda").manual_seed(dist.get_rank())
    state.last_Z.random_(engine.model.config.vocabulary, generator=generator)
    state.length_Z.fill_(CONTEXT)
    state.remaining_Z.fill_(0)
    state.remaining_Z[:rows] = 1 << 20


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
        ready(engine, rows)
        dist.all_reduce(align)
        times.append(_seconds(engine.programs[rows]))
    taken = torch.tensor(statistics.median(times[3:]), device="cuda")
    dist.all_reduce(taken, dist.ReduceOp.MAX)
    state.remaining_Z.fill_(0)
    return float(taken)


def kernels(engine: Engine, rows: int) -> list[str]:
    """The kernels of a replayed step by their time, a line each."""
    activity = torch.profiler.ProfilerActivity.CUDA
    ready(engine, rows)
    with torch.profiler.profile(activities=[activity]) as profiler:
        engine.programs[rows]()
        torch.cuda.synchronize()
    of_name: dict[str, list[float]] = {}
    for event in profiler.events() or ():
        if "Memset" not in event.name:
            of_name.setdefault(event.name, []).append(event.device_time)
    longest = sorted(of_name.items(), key=lambda one: -sum(one[1]))
    total = sum(sum(times) for times in of_name.values())
    lines = [f"{rows} rows: {total:.0f} us of kernels a step"]
    return lines + [
        f"{sum(times):9.1f} us {len(times):5} x {statistics.median(times):7.2f} us  {name[:90]}"
        for name, times in longest[:KERNELS]
    ]


def settings_of(args: argparse.Namespace, way: Way) -> Settings:
    return Settings(
        slots=SLOTS,
        room=CONTEXT + 256,
        chunk=CHUNK,
        graphs=way.captured,
        interval=4,
        sizes=BATCHES,
        drafting=Drafting(length=args.drafts, forced=args.forced if args.drafts else None),
    )


def loop_row(engine: Engine, name: str, transport: str) -> dict[str, Any]:
    """A closed loop of 32 users a rank."""
    load = Load(users=32 * dist.get_world_size(), input=128, output=32, rounds=3)
    point = serve(engine, load, engine.host_group)
    case = {"model": name, "users": load.users, "W": dist.get_world_size(), "input": 128, "output": 32}
    return {"op": "serve", "impl": transport, "case": case | {"interval": 4}} | point


def measure(rank: int, world: int, args: argparse.Namespace, name: str, transport: str) -> None:
    """The rows of a way, on ranks of its own: two models do not fit."""
    group, device, began = dist.group.WORLD, torch.device("cuda", rank), time.perf_counter()
    way = Way(transport=transport, experts="grouped" if transport == "alltoall" else "auto")
    settings = settings_of(args, way)
    options = {"device": device, "dtype": torch.bfloat16, "drafting": args.drafts > 0}
    model = make_model(name, way, group, positions=settings.capacity, **options)
    model.compiled = False if args.as_written else None
    engine = Engine(model, settings, group)
    torch.cuda.synchronize()
    ready_s, tbps = time.perf_counter() - began, read_tbps()
    for cache in engine.steps.caches:
        for of_layer in cache:
            of_layer.normal_()
    rows = [decode_row(engine, name, transport, batch, tbps) for batch in BATCHES]
    whole = transport == "nvlink" and not args.drafts
    if whole and name == next(iter(WAYS)):
        rows += choice_rows(engine)
    if rank == 0:
        print(f"{name} {transport}: ready in {ready_s:.0f} s, {torch.cuda.max_memory_allocated() >> 30} GiB")
        for row in rows:
            print({key: value for key, value in row.items() if key not in ("op", "n")}, flush=True)
    if args.kernels:
        for batch in BATCHES[::2]:
            lines = kernels(engine, batch)
            if rank == 0:
                print("\n".join(lines), flush=True)
    elif whole:
        rows.append(loop_row(engine, name, transport))
        if rank == 0:
            print(rows[-1], flush=True)
    if rank == 0:
        drafts = f" --drafts {args.drafts} --forced {args.forced}" if args.drafts else ""
        command = f'make gpu-bench NAME=serve ARGS="--model {name} --way {transport}{drafts}"'
        write_results(args.out, QUESTION, describe_run(command), rows)
    close(engine)


def choice_rows(engine: Engine) -> list[dict[str, Any]]:
    """From logits to tokens with the vocabulary split, by the kernel and by an all-reduce, and the argmax
    that both begin with; a graph of `CHOICES` calls each."""
    head, group, rows = engine.model.head, engine.group, []
    assert group is not None
    choice = head.choices[-1]
    begin, end = head.slice
    for tokens in (1, 8, 32, 128):
        logits = torch.randn(group.size() * tokens, end - begin, device="cuda").bfloat16()
        ways = {
            "heap": lambda: choice.choose(logits[None], head.vocabulary)[0],  # noqa: B023
            "all-reduce": lambda: unpack(maximum(best_keys(logits, begin), group)),  # noqa: B023
            "argmax": lambda: logits.argmax(-1),  # noqa: B023
        }
        mine = ways["all-reduce"]().view(-1, tokens)[group.rank()]
        assert torch.equal(ways["heap"](), mine)
        case = {"T": tokens, "V": head.vocabulary, "W": group.size(), "dtype": "bf16"}
        for name, way in ways.items():
            taken = graph_seconds(way)
            timed = {"median_us": round(1e6 * taken / CHOICES, 2), "n": ROUNDS}
            rows.append({"op": "token choice", "impl": name, "case": case} | timed)
    return rows


def graph_seconds(way: Callable[[], object]) -> float:
    """The median replay of `CHOICES` calls in one graph, the slowest rank's."""
    align, times = torch.zeros(1, device="cuda"), []
    program = Captured(lambda: [way() for _ in range(CHOICES)], torch.device("cuda"))
    for _ in range(ROUNDS + 3):
        dist.all_reduce(align)
        times.append(_seconds(program))
    taken = torch.tensor(statistics.median(times[3:]), device="cuda")
    dist.all_reduce(taken, dist.ReduceOp.MAX)
    return float(taken)


def decode_row(engine: Engine, name: str, transport: str, batch: int, tbps: float) -> dict[str, Any]:
    """A step of decoding beside the time to read what it must."""
    ranks = dist.get_world_size()
    hit = experts_hit(engine, batch, alone=transport == ALONE)
    taken = step_seconds(engine, batch)
    floor = step_bytes(engine.model, batch, hit) / tbps / 1e12
    case = {"model": name, "B": batch, "W": ranks, "context": CONTEXT, "dtype": "bf16"}
    drafting, leaving = engine.settings.drafting, 1.0
    if drafting.length:
        case |= {"drafts": drafting.length, "forced": drafting.forced}
        leaving += drafting.forced or 0.0
    return {
        "op": "decode step",
        "impl": transport,
        "case": case,
        "median_us": round(1e6 * taken, 1),
        "tokens_per_s_gpu": round(leaving * batch / taken),
        "floor_us": round(1e6 * floor, 1),
        "times_floor": round(taken / floor, 3),
        "experts_hit": hit,
        "read_tbps": round(tbps, 2),
        "n": ROUNDS,
    }


def close(engine: Engine) -> None:
    """Let go of graphs before what they use."""
    torch.cuda.synchronize()
    dist.barrier()
    engine.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", nargs="+", default=list(WAYS), choices=list(WAYS))
    parser.add_argument("--way", nargs="*", default=[], help="ways to the experts, where not all")
    parser.add_argument("--drafts", type=int, default=0, help="tokens that a step drafts (0)")
    parser.add_argument("--forced", type=float, default=0.7, help="drafts that count as right, in the mean")
    parser.add_argument("--kernels", action="store_true", help="print the kernels of a step, too")
    parser.add_argument("--as-written", action="store_true", help="what stands between products, uncompiled")
    parser.add_argument("--out", default=str(RESULTS))
    args = parser.parse_args()
    for name in args.model:
        for transport in args.way or WAYS[name]:
            run_ranks(measure, torch.cuda.device_count(), args, name, transport)


if __name__ == "__main__":
    main()
