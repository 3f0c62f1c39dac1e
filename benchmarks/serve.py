"""How fast is a step of decoding where it is used, and how near to reading its weights and cache?
`make gpu-bench NAME=serve`.

On several GPUs, into `results/serve.json`; on one, which holds Qwen3-30B-A3B whole and what a rank of two has
of either model, into `results/serve_one.json`, with the time of every part of a step.

Random weights of real widths, drawn on the device; every way to the experts in the same engine, with the same
attention, norms and head, over the same parameters where they are spread alike, so that all stand in one list
of processes. A step is timed by itself, with every slot at the same length, and so is a chunk of prompts.
Then a closed loop of users on ours, beside what `imbrex.bench.serve.replay` makes of the times before. A
step's host is ahead of it, so a timing begins behind a pause in which the host queues the step.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from imbrex.bench.ceilings import read_tbps, seconds_of
from imbrex.bench.exchange.clock import run_ranks
from imbrex.bench.results import describe_run, write_results
from imbrex.bench.serve.loop import Load, serve
from imbrex.bench.serve.measured import step_times
from imbrex.bench.serve.models import ALONE, GATHER, MODELS, TRANSFORMERS, Way, make_beside, make_model
from imbrex.bench.serve.replay import replay
from imbrex.runtime.waits import all_gather_single
from imbrex.serve.attention import Latent
from imbrex.serve.between import compiled
from imbrex.serve.decoding import Captured, Drafting
from imbrex.serve.engine import Engine, Settings
from imbrex.serve.heads import best_keys, maximum, unpack
from imbrex.serve.model import Decoder

RESULTS = Path(__file__).parent / "results"
QUESTION = "How many tokens a second does a step of decoding give, and how near is it to reading memory?"
SLOTS, CHUNK, INTERVAL = 128, (4, 256), 4
LIVE = (CHUNK[0], 1)
"""Rows of a chunk that have a prompt: in a loop often one."""
BATCHES = (8, 32, 128)
ROUNDS, CHOICES = 20, 20
PAUSE = 4_000_000
"""Cycles, 2.3 ms, in which a host queues a step."""
KERNELS = 34
KNOWN = ("op", "impl", "case", "n", "weights_gib", "model", "W", "dtype", "room")
"""What is not printed of a row."""
FP8, WHOLE_ROWS, ONE_FP8, ALONE_FP8 = "nvlink-fp8", "nvlink-fp8-experts", "auto-fp8", "alone-fp8"
"""Experts in fp8: with rows that cross in fp8, with rows as they are, on one GPU, and whole on every rank."""
UNSPREAD = (ALONE, ALONE_FP8)
FEW_SLOTS = {ALONE_FP8: 32}
"""Slots of a way that leaves room for fewer: the whole model, and its experts in fp8 beside it."""
OURS = ("nvlink", "auto")
FORCED = {1: 0.8, 3: 1.6}
"""Drafts that count as right, in the mean, by how many a step makes."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Sweep:
    """What is timed of a model. ways: the first's parameters serve the others. rooms: tokens before the step,
    by engine. drafting: ways with drafts, too. batches: rows of a step. loop: whether users are served."""

    ways: tuple[str, ...]
    rooms: tuple[tuple[int, ...], ...]
    drafting: tuple[str, ...] = ()
    batches: tuple[int, ...] = BATCHES
    loop: bool = True


SWEEPS = {
    "qwen3-30b-a3b": Sweep(
        ways=("nvlink", GATHER, "alltoall", TRANSFORMERS, FP8, WHOLE_ROWS, ALONE, ALONE_FP8),
        rooms=((1024, 4608),),
    ),
    "deepseek-v3-8": Sweep(
        ways=("nvlink", GATHER, "alltoall", TRANSFORMERS),
        rooms=((1024,), (4608,)),
        drafting=("nvlink", GATHER),
    ),
}
"""Experts of DeepSeek-V3's widths do not fit one GPU, nor do they beside what is kept of them in fp8."""
ONE_GPU = {
    "qwen3-30b-a3b": Sweep(
        ways=("auto", GATHER, TRANSFORMERS, ONE_FP8), rooms=((1024,),), batches=(8, 16, 32, 64, 128)
    ),
    "qwen3-30b-a3b-half": Sweep(ways=("auto", GATHER), rooms=((1024,),), loop=False),
    "deepseek-v3-8-half": Sweep(ways=("auto", GATHER), rooms=((1024,),), drafting=("auto",), loop=False),
}


def brief(sweep: Sweep) -> Sweep:
    """Steps and chunks alone, at the shortest length of caches."""
    return replace(sweep, rooms=((sweep.rooms[0][0],),), drafting=())


def at_contexts(name: str, sweep: Sweep, contexts: list[int]) -> Sweep:
    """Steps and chunks behind so many tokens. In steps latent attention goes through all of a slot, so an
    engine for each length."""
    by_room = isinstance(MODELS[name].attention, Latent)
    return replace(sweep, rooms=tuple((n,) for n in contexts) if by_room else (tuple(contexts),))


def engines_of(
    sweep: Sweep, way: str, rooms: tuple[tuple[int, ...], ...], drafts: list[int]
) -> list[tuple[int, tuple[int, ...]]]:
    """Drafts a step and lengths of caches of a way's engines, in the order they are timed. drafts: those to
    time, where not those of the sweep behind none."""
    if drafts:
        return list(product(drafts, rooms))
    return [(0, of) for of in rooms] + [(n, rooms[0]) for n in FORCED if way in sweep.drafting]


def way_of(name: str) -> Way:
    if name == FP8:
        return Way(transport="nvlink", codec="fp8", experts="kernels-fp8")
    if name == WHOLE_ROWS:
        return Way(transport="nvlink", experts="kernels-fp8")
    if name == ONE_FP8:
        return Way(transport="auto", experts="kernels-fp8")
    if name == ALONE_FP8:
        return Way(transport=ALONE, experts="kernels-fp8")
    return Way(transport=name, experts="grouped" if name == "alltoall" else "auto")


class Stages:
    """What took how long, on the first rank's terminal."""

    def __init__(self, rank: int) -> None:
        self.rank, self.began = rank, time.perf_counter()
        self.since = self.began

    def over(self, what: str) -> None:
        torch.cuda.synchronize()
        now = time.perf_counter()
        if self.rank == 0:
            print(f"[{now - self.began:5.1f} s] {what}: {now - self.since:.1f} s", flush=True)
        self.since = now

    def past(self, seconds: float) -> bool:
        """Whether the first rank has run for longer; the same on all."""
        late = torch.tensor([time.perf_counter() - self.began > seconds], device="cuda")
        dist.broadcast(late, 0)
        return bool(late)


def step_bytes(
    model: Decoder, rows: int, tokens: int, hit: tuple[int, int], drafts: int, *, fp8: bool
) -> float:
    """Bytes that a step must read on a rank: dense weights, the experts `hit` of all layers that its tokens
    want, and the cache of every row; the drafting block and the head once more for every draft."""
    config, itemsize = model.config, model.embedding.weight.element_size()
    sizes = {name: p.numel() for name, p in model.named_parameters() if p is not model.embedding.weight}
    experts = {name for name in sizes if ".experts." in name}
    one = sum(p[0].numel() for name, p in model.named_parameters() if name in experts)
    one //= config.num_layers + config.drafting
    drafting = sum(n for name, n in sizes.items() if name.startswith("draft.") and name not in experts)
    dense = sum(n for name, n in sizes.items() if name not in experts) - drafting
    dense += drafts * (drafting + model.head.weight.numel())
    of_layer = config.cache_bytes(itemsize) / (config.num_layers + config.drafting)
    of_expert = one * (1 + 4 / 128**2 if fp8 else itemsize)
    cache = rows * tokens * of_layer * (config.num_layers + drafts)
    return dense * itemsize + (hit[0] + drafts * hit[1]) * of_expert + cache


def weights_gib(model: Decoder, *, fp8: bool) -> float:
    """What a rank keeps of the model; in fp8 beside the experts that it is made of."""
    return sum(
        p.nbytes * (1.5 if fp8 and ".experts." in name else 1) for name, p in model.named_parameters()
    ) / (1 << 30)


def experts_hit(engine: Engine, rows: int, *, alone: bool) -> tuple[int, int]:
    """Experts of this rank that a step's tokens want, of all layers, and of the drafting block's last call;
    the most of any rank."""
    engine.steps.decode(rows)
    hit = torch.zeros(2, dtype=torch.int64, device="cuda")
    draft = engine.model.draft if engine.settings.drafting.length else None
    blocks = [(0, block) for block in engine.model.blocks] + ([(1, draft.block)] if draft else [])
    for where, block in blocks:
        moe: Any = block.moe
        ids = moe.routing.ids_TK.contiguous()
        everybody = ids.new_empty(dist.get_world_size() * len(ids), ids.shape[1])
        all_gather_single(everybody, ids)
        own = torch.tensor(moe.experts.expert_ids, device="cuda")
        hit[where] += torch.isin(own, ids if alone else everybody).sum()
    dist.all_reduce(hit, dist.ReduceOp.MAX)
    layers, drafted = hit.tolist()
    return layers, drafted


def ready(engine: Engine, rows: int, tokens: int) -> None:
    """Random tokens over random caches, other ones in every slot and rank: so routing is spread."""
    state = engine.steps.state
    generator = torch.Generator("cuda").manual_seed(dist.get_rank())
    state.last_Z.random_(engine.model.config.vocabulary, generator=generator)
    state.length_Z.fill_(tokens)
    state.remaining_Z.fill_(0)
    state.remaining_Z[:rows] = 1 << 20


def ready_chunk(engine: Engine, tokens: int, live: int) -> None:
    """A chunk of prompts of which `live` rows have `tokens` tokens before them, and go on behind it; the
    others are dummies."""
    chunk, (rows, length) = engine.chunk, CHUNK
    chunk.tokens_BS.random_(engine.model.config.vocabulary)
    chunk.slot_B.copy_(torch.arange(rows))
    chunk.slot_B[live:] += engine.settings.slots
    for numbers_B, number in ((chunk.start_B, tokens), (chunk.count_B, length)):
        numbers_B.zero_()
        numbers_B[:live] = number
    chunk.wanted_B.zero_()


def fill_prompts(engine: Engine, tokens: int) -> None:
    """Prompts of so many tokens in the slots of a chunk. Behind random caches its tokens would want twice the
    experts that those of a loop do."""
    for begin in range(0, tokens, CHUNK[1]):
        ready_chunk(engine, begin, CHUNK[0])
        engine.programs["prefill"]()


def slowest_seconds(prepare: Callable[[], None], program: Callable[[], object]) -> float:
    """The median call, the slowest rank's."""
    align, times = torch.zeros(1, device="cuda"), []
    for _ in range(ROUNDS + 3):
        prepare()
        torch.cuda._sleep(PAUSE)
        dist.all_reduce(align)
        times.append(seconds_of(program))
    taken = torch.tensor(statistics.median(times[3:]), device="cuda")
    dist.all_reduce(taken, dist.ReduceOp.MAX)
    return float(taken)


def recorded(engine: Engine, rows: int, tokens: int) -> list[tuple[str, float, float]]:
    """Name, begin and end in us of every kernel of a replayed step, as they begin."""
    activity = torch.profiler.ProfilerActivity.CUDA
    ready(engine, rows, tokens)
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[activity]) as profiler:
        engine.programs[rows]()
        torch.cuda.synchronize()
    spans = [
        (event.name, event.time_range.start, event.time_range.end)
        for event in profiler.events() or ()
        if str(event.device_type) == "DeviceType.CUDA" and not event.name.startswith("Mem")
    ]
    return sorted(spans, key=lambda span: span[1])


def kernels(spans: list[tuple[str, float, float]], rows: int) -> list[str]:
    """The kernels of a step by their time, a line each."""
    of_name: dict[str, list[float]] = {}
    for name, begin, end in spans:
        of_name.setdefault(name, []).append(end - begin)
    longest = sorted(of_name.items(), key=lambda one: -sum(one[1]))
    total = sum(sum(times) for times in of_name.values())
    lines = [f"{rows} rows: {total:.0f} us of {len(spans)} kernels a step"]
    return lines + [
        f"{sum(times):9.1f} us {len(times):5} x {statistics.median(times):7.2f} us  {name[:90]}"
        for name, times in longest[:KERNELS]
    ]


DENSE = ("nvjet", "splitK", "gemm_", "gemv", "cublas", "cutlass")
EXPERTS = ("grouped_gemm", "product_that_follows", "gate_up_and_down", "quantise", "swiglu")
ATTENTION = ("triton_tem", "flash", "softmax", "masked_fill", "MaskedFill", "SoftMax")


def parts_of(spans: list[tuple[str, float, float]]) -> dict[str, float]:
    """The us of a step by what took them: a kernel has the time from the end of those before it to its own,
    so that all parts together are the step, waits between kernels included."""
    names = [name for name, _, _ in spans]
    last = max((i for i, name in enumerate(names) if "sum_rows" in name), default=len(names))
    us: dict[str, float] = {}
    part, latest = "steps", spans[0][1]
    for index, (_, _, end) in enumerate(spans):
        part = _part(part, names, index, behind=index > last)
        us[part] = us.get(part, 0.0) + max(0.0, end - latest)
        latest = max(latest, end)
    return {name: round(time, 1) for name, time in us.items()}


def _part(before: str, names: list[str], index: int, *, behind: bool) -> str:
    """The part of a kernel behind one of the part `before`. behind: the last layer."""
    name, following = names[index], next((n for n in names[index + 1 :] if not _has(n, DENSE)), "")
    if _has(name, EXPERTS):
        return "experts"
    if _has(name, DENSE):
        return "head" if behind else "logits" if "choose_experts" in following else "projections"
    if "logits_of_few" in name:
        return "logits"
    if "sum_rows" in name:
        return "sums"
    if "choose_experts" in name or (before == "routing" and not name.startswith("triton_")):
        return "routing"
    if _has(name, ATTENTION) or (before == "attention" and name.startswith("triton_")):
        return "attention"
    if behind or before == "steps":
        return "head" if before == "head" and "reduce" in name else "steps"
    return "norms and positions"


def _has(name: str, words: tuple[str, ...]) -> bool:
    return any(word in name for word in words)


def loop_row(engine: Engine, way: str, case: dict[str, Any], rows: list[dict[str, Any]]) -> dict[str, Any]:
    """A closed loop of 32 users a rank, and the same replayed from the times in `rows`."""
    ranks = dist.get_world_size()
    load = Load(users=32 * ranks, input=1024, output=128, rounds=3)
    point = serve(engine, load, engine.host_group)
    alike = Load(users=32, input=load.input, output=load.output, rounds=load.rounds)
    again = replay(step_times(rows, case["model"], way), alike, engine.settings)
    names = ("tokens_per_s_gpu", "tokens_per_s_user")
    case = case | {"users": load.users, "input": load.input, "output": load.output, "interval": INTERVAL}
    replayed = {name: round(again[name], 1) for name in names}
    return {"op": "serve", "impl": way, "case": case} | point | {"replayed": replayed}


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
            program = Captured(lambda: [way() for _ in range(CHOICES)], torch.device("cuda"))  # noqa: B023
            taken = slowest_seconds(lambda: None, program)
            timed = {"median_us": round(1e6 * taken / CHOICES, 2), "n": ROUNDS}
            rows.append({"op": "token choice", "impl": name, "case": case} | timed)
    return rows


class Run:
    """All rows of one rank's processes, in the order they are timed."""

    def __init__(self, rank: int, world: int, args: argparse.Namespace) -> None:
        self.args, self.rank, self.world, self.rows = args, rank, world, list[dict[str, Any]]()
        self.group, self.device = dist.group.WORLD, torch.device("cuda", rank)
        assert self.group is not None
        self.stages, self.tbps = Stages(rank), read_tbps()
        self.truth: dict[tuple, torch.Tensor] = {}
        torch.manual_seed(rank)  # prompts of chunks: else they are the same on all ranks
        self.sweeps = SWEEPS if world > 1 else ONE_GPU
        if args.brief:
            self.sweeps = {name: brief(sweep) for name, sweep in self.sweeps.items()}
        if args.contexts:
            self.sweeps = {n: at_contexts(n, sweep, args.contexts) for n, sweep in self.sweeps.items()}

    def model(self, name: str) -> None:
        """Every way of a model, over the parameters of the first."""
        sweep, base, model = self.sweeps[name], None, None
        for way in self.args.way or sweep.ways:
            if self.stages.past(self.args.until):
                self.stages.over(f"{name} {way} is left out")
                continue
            if base is None or way in UNSPREAD:
                base = model = None  # one whole model and a spread one may not fit
                gc.collect()
                torch.cuda.empty_cache()
                model = self.make(name, way)
                base = None if way in UNSPREAD else model
            else:
                model = make_beside(base, way_of(way), self.group)  # type: ignore[arg-type]
            try:
                # A step that asks the host for counts takes long: one length of caches is enough.
                rooms = sweep.rooms if way_of(way).captured else sweep.rooms[:1]
                for drafts, contexts in engines_of(sweep, way, rooms, self.args.drafts):
                    self.engine(model, name, way, contexts, drafts)
            except Exception as wrong:  # noqa: BLE001  # The others are timed all the same.
                self.stages.over(f"{name} {way}: {type(wrong).__name__}: {str(wrong)[:300]}")
        # Kernels of this model's widths: another's are compiled for its own, not for both.
        torch.compiler.reset()
        compiled.cache_clear()

    def make(self, name: str, way: str) -> Decoder:
        options: dict[str, Any] = {"device": self.device, "dtype": torch.bfloat16}
        positions = max(max(of) for of in self.sweeps[name].rooms) + 1024
        model = make_model(name, way_of(way), self.group, positions=positions, **options)
        model.compiled = False if self.args.as_written else None
        self.stages.over(f"{name} {way} drawn")
        return model

    def engine(self, model: Decoder, name: str, way: str, contexts: tuple[int, ...], drafts: int) -> None:
        """Steps and chunks over all contexts of an engine."""
        gc.collect()
        drafting = Drafting(length=drafts, forced=FORCED[drafts] if drafts else None)
        slots = FEW_SLOTS.get(way, SLOTS)
        batches = tuple(rows for rows in self.sweeps[name].batches if rows <= slots)
        settings = Settings(
            slots=slots,
            room=max(contexts) + 256,
            chunk=CHUNK,
            graphs=way_of(way).captured,
            interval=INTERVAL,
            sizes=batches,
            drafting=drafting,
        )
        engine = Engine(model, settings, self.group)
        self.stages.over(f"{name} {way} {contexts} {drafts} drafts ready")
        generator = torch.Generator("cuda").manual_seed(self.rank)
        for cache in engine.steps.caches:
            for of_layer in cache:
                of_layer.normal_(generator=generator)
        case = {"model": name, "W": dist.get_world_size(), "dtype": "bf16", "room": settings.room}
        case |= {"drafts": drafts, "forced": FORCED[drafts]} if drafts else {}
        timed = contexts if settings.graphs else contexts[:1]
        own = [self.step(engine, way, case | {"B": b, "context": n}) for n in timed for b in batches]
        # With nothing before, a chunk takes as long in an engine of any room.
        before = (0, *timed) if contexts == self.sweeps[name].rooms[0] else timed
        for n in before:
            fill_prompts(engine, n)
            own += [self.chunk(engine, way, case | {"context": n}, live) for live in LIVE]
        self.rows += own
        self.show(own)
        self.stages.over(f"{name} {way} timed, {torch.cuda.max_memory_allocated() >> 30} GiB at most")
        self.write()
        if way in OURS and not drafts and not self.args.brief:
            self.more(engine, way, case, contexts)
            self.write()
        engine.programs.clear()

    def more(self, engine: Engine, way: str, case: dict[str, Any], contexts: tuple[int, ...]) -> None:
        """What is asked of our own way alone."""
        own, sweep = [], self.sweeps[case["model"]]
        if engine.group is not None and case["model"] == next(iter(SWEEPS)):
            own += choice_rows(engine)
        if self.args.kernels:
            for batch in sweep.batches[::2]:
                lines = kernels(recorded(engine, batch, contexts[0]), batch)
                if self.rank == 0:
                    print("\n".join(lines), flush=True)
        if sweep.loop and contexts == sweep.rooms[0]:
            engine.steps.state.remaining_Z.zero_()
            engine.steps.state.step_1.zero_()  # the engine counts from its own first step
            own.append(loop_row(engine, way, case, self.rows))
        self.rows += own
        self.show(own)
        self.stages.over("choices, kernels, loop")

    def step(self, engine: Engine, way: str, case: dict[str, Any]) -> dict[str, Any]:
        """A step of decoding beside the time to read what it must."""
        batch, tokens, drafts = case["B"], case["context"], case.get("drafts", 0)
        ready(engine, batch, tokens)
        hit = experts_hit(engine, batch, alone=way in UNSPREAD)
        key = case["model"], batch, tokens, drafts
        chosen = engine.steps.state.last_Z[:batch].clone()
        alike = (self.truth.setdefault(key, chosen) == chosen).double().mean()
        taken = slowest_seconds(lambda: ready(engine, batch, tokens), engine.programs[batch])
        parts = {}
        if engine.group is None and way in OURS and not drafts:
            parts = {"parts_us": parts_of(recorded(engine, batch, tokens))}
        engine.steps.state.remaining_Z.zero_()
        fp8 = way in (FP8, WHOLE_ROWS, ONE_FP8, ALONE_FP8)
        read = step_bytes(engine.model, batch, tokens, hit, drafts, fp8=fp8)
        floor = read / self.tbps / 1e12
        return {
            "op": "decode step",
            "impl": way,
            "case": case,
            "median_us": round(1e6 * taken, 1),
            "tokens_per_s_gpu": round((1 + case.get("forced", 0)) * batch / taken),
            "floor_us": round(1e6 * floor, 1),
            "times_floor": round(taken / floor, 3),
            "experts_hit": sum(hit),
            "read_gb": round(read / 1e9, 2),
            "weights_gib": round(weights_gib(engine.model, fp8=fp8), 1),
            "tokens_alike": round(float(alike), 3),
            "n": ROUNDS,
        } | parts

    def chunk(self, engine: Engine, way: str, case: dict[str, Any], live: int) -> dict[str, Any]:
        ready = partial(ready_chunk, engine, case["context"], live)
        taken = slowest_seconds(ready, engine.programs["prefill"])
        engine.steps.state.length_Z.zero_()
        case = case | {"rows": CHUNK[0], "tokens": CHUNK[1]} | ({"live": live} if live < CHUNK[0] else {})
        # The room of a slot is no part of it: attention reads what is used.
        del case["room"]
        return {"op": "chunk", "impl": way, "case": case, "median_us": round(1e6 * taken, 1), "n": ROUNDS}

    def show(self, rows: list[dict[str, Any]]) -> None:
        for row in rows if self.rank == 0 else ():
            rest = {k: v for k, v in row.items() if k not in KNOWN}
            case = {k: v for k, v in row["case"].items() if k not in KNOWN}
            print(f"  {row['op']} {row['impl']} {case} {rest}", flush=True)

    def write(self) -> None:
        if self.rank:
            return
        all_models = len(self.args.model) == len(self.sweeps)
        words = [] if all_models else [f"--model {' '.join(self.args.model)}"]
        words += [f"--way {' '.join(self.args.way)}"] if self.args.way else []
        words += ["--brief"] if self.args.brief else []
        for option in ("contexts", "drafts"):
            numbers = getattr(self.args, option)
            words += [f"--{option} {' '.join(map(str, numbers))}"] if numbers else []
        more = f' ARGS="{" ".join(words)}"' if words else ""
        run = describe_run(f"make gpu-bench NAME=serve{more}", {"read_tbps": round(self.tbps, 2)})
        out = self.args.out or RESULTS / ("serve_one.json" if self.world == 1 else "serve.json")
        write_results(out, QUESTION, run, self.rows)


def measure(rank: int, world: int, args: argparse.Namespace) -> None:
    run = Run(rank, world, args)
    args.model = args.model or list(run.sweeps)
    for name in args.model:
        run.model(name)
    torch.cuda.synchronize()
    dist.barrier()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    known = list(SWEEPS if torch.cuda.device_count() > 1 else ONE_GPU)
    parser.add_argument("--model", nargs="+", default=[], choices=known)
    parser.add_argument("--way", nargs="*", default=[], help="ways to the experts, where not all")
    parser.add_argument("--until", type=float, default=1e9, help="no way is begun after so many seconds")
    parser.add_argument("--brief", action="store_true", help="one length of caches, no drafts, no loop")
    behind = "tokens before the steps, where not those of a sweep"
    parser.add_argument("--contexts", nargs="+", type=int, default=[], metavar="N", help=behind)
    drafts = "tokens that steps draft, in the order they are timed; 0: none"
    parser.add_argument("--drafts", nargs="+", type=int, default=[], choices=[0, *FORCED], help=drafts)
    parser.add_argument("--kernels", action="store_true", help="print the kernels of a step, too")
    parser.add_argument("--as-written", action="store_true", help="what stands between products, uncompiled")
    parser.add_argument("--out", help="the result file, where not that of so many GPUs")
    args = parser.parse_args()
    run_ranks(measure, torch.cuda.device_count(), args)


if __name__ == "__main__":
    main()
