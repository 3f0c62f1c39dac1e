"""What does a layer over NVLink, or a call of DeepEP's, cost the host before the GPU has anything to do?
`python benchmarks/host_time.py`, on any machine, no GPU.

Python and torch's dispatcher run as on a GPU, with tensors that say they are one's; kernels do nothing, so
the rows mean nothing. Only the driver's call of a launch and torch's products are left out, memory is the
CPU's, and the ranks are one, which waits for nobody: times lack the launches (2 to 5 us each on a GPU), the
products and the meeting of hosts. Calls of Python functions and of torch's operators are counted exactly;
times are medians, for comparing versions on one machine. `valgrind --tool=callgrind python
benchmarks/host_time.py --steps 300`, less what it says of 100 steps, are the instructions of 200.

`--gpu` times the layer itself on a GPU, one rank, until the call returns, with nothing queued before it, and
writes results/host_time.json; with checksums of what it gives, by which versions are told to have the same
bits. `--processes 5`: medians over so many processes, one after another, since each has speeds of its own;
`medians_us` are theirs. `records`: calls that were put on record among the timed ones, 0 where memory comes
back as hoped; `device_allocations`: those that torch's allocator asked the driver for meanwhile. `python
benchmarks/host_time.py --gpu 300 16 --repeats 200 --processes 5`.
"""

from __future__ import annotations

import argparse
import contextlib
import cProfile
import ctypes
import functools
import json
import os
import pstats
import statistics
import subprocess
import sys
import tempfile
import time
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torch.profiler import ProfilerActivity
from torch.profiler import profile as listen

from imbrex import MoEConfig, MoELayer
from imbrex.adapters.deep_ep import Buffer
from imbrex.bench.results import check_results, describe_run, write_results
from imbrex.bench.shapes import MODELS
from imbrex.contracts import Dispatched, RowForm
from imbrex.exchange import agreement, recorded, recorded_launches, recorded_memory
from imbrex.exchange import nvlink as exchange_room
from imbrex.experts import experts as expert_room
from imbrex.kernels import jit
from imbrex.kernels.ffn import glue
from imbrex.kernels.gate import choose
from imbrex.kernels.gate import logits as gate_logits
from imbrex.kernels.gemm import gemm
from imbrex.kernels.rows import weights
from imbrex.overlap import fused
from imbrex.transport.nvlink import Nvlink

RESULTS = Path(__file__).parent / "results" / "host_time.json"
QUESTION = "How long does a layer over NVLink keep the host?"
ONE_THREAD = "step, one thread"
"""A step whose backward runs in the caller's thread."""
STACK = 8
IN_A_STACK = f"step, one of {STACK} layers"
"""A layer's share of a model's step, whose backward follows on the forwards of all layers: autograd's thread
has the code of the first in its caches for the others."""
WARM = 20
WIDTH = 128
"""The tokens' and the experts': little, since the CPU's own arithmetic is not the host's part."""


class Idle(jit.Kernel):
    """A kernel that is launched as a real one is, but for the driver's call, which only counts."""

    launches = 0

    def __init__(self, variant: jit.Variant, device: object) -> None:
        self.variant, self.device = variant, -1
        self._queues = {}

    def _make_queue(self, how: tuple[Any, ...], stream: int) -> Callable[[int, int], tuple[int]]:
        def queue(pointers: int, extra: int) -> tuple[int]:
            Idle.launches += 1
            return (0,)

        return queue

    def clusters(self, cluster: int, block: int, smem: int) -> int:
        return 132 // cluster

    def resident(self, block: int, smem: int) -> int:
        return 1


class Ready(dict[Any, Any]):
    """Stands in for prepared launches: on a GPU memory comes back, so that a step finds those of the last."""

    def __init__(self) -> None:
        self.prepared = Idle(jit.Variant(source="", entry=""), None).prepare(args=(), grid=1, block=1)

    def get(self, key: Any, default: Any = None) -> Any:
        hash(key)
        return self.prepared


class OnePiece:
    """Stands in for a heap among GPUs."""

    def __init__(self, nbytes: int) -> None:
        self.local = torch.zeros(1, nbytes, dtype=torch.uint8)
        self.bases, self.first = (self.local.data_ptr(),), 0

    def close(self, *, together: bool = True) -> None: ...


class IdleNvlink(Nvlink):
    """As `Nvlink`, of one rank, on a CPU."""

    load = staticmethod(Idle)

    def why_not(self) -> str | None:
        return None

    def _make_heap(self, nbytes: int) -> Any:
        return OnePiece(nbytes)


class OnGpu(expert_room.Experts):
    """Experts that take the kernels' way with tensors of a CPU."""

    unchanged = True  # type: ignore[assignment]
    forms = RowForm.ROWS, RowForm.UNDER_WAY  # type: ignore[assignment]

    def forward(self, dispatched: Dispatched) -> Tensor:
        handle, counts_e = dispatched.handle, dispatched.counts_e
        weights = self.gate_up_proj.to(torch.bfloat16), self.down_proj.to(torch.bfloat16)
        more = {"weights_R": handle.weights_R, "beside": dispatched.beside}
        return expert_room.ffn(dispatched.rows_RD, *weights, counts_e, **more)


def keep_memory() -> None:
    """Have the C library give memory again that was freed, as a GPU's allocator does, not ask the kernel."""
    c = ctypes.CDLL(None)
    for threshold in (-3, -1):  # M_MMAP_THRESHOLD, M_TRIM_THRESHOLD
        c.mallopt(threshold, 1 << 25)


def idle() -> None:
    """Let kernels do nothing, nor products of torch's, with tensors that say that they are a GPU's."""
    torch.Tensor.is_cuda, torch.Tensor.is_cpu = True, False  # type: ignore[misc,assignment]
    torch._C._cuda_getCurrentRawStream = lambda device: 0  # type: ignore[attr-defined]
    torch.mm = lambda a, b, out_dtype=None: torch.empty(a.shape[0], b.shape[1], dtype=out_dtype or a.dtype)
    jit.why_not_hopper = jit.why_not_portable = lambda device=None: None
    for room in (choose, gate_logits):
        vars(room).update(dict.fromkeys(("cached_why_not_hopper", "cached_why_not_portable"), _nothing))
    jit._load = lambda variant, device: Idle(variant, device)  # type: ignore[assignment]
    gemm.tensor_map = lambda *shape: jit.ByValue(bytes(128))  # type: ignore[assignment]
    gemm._launches = Ready()
    agreement.find_bad_value = lambda *given: (0, 0, 0, 0)  # on a GPU nobody looks at values
    expert_room.pick_implementation = lambda *names: ("kernels", "on a GPU")
    glue._blocks = lambda device: 1056  # type: ignore[assignment]
    fused.why_not_exchange = lambda exchange: None  # one rank has nothing to bring
    weights.spread = exchange_room.spread = weights.run_spread
    # On a GPU memory comes back, where calls on record look for it.
    recorded_memory.new_piece = functools.cache(lambda nbytes, device: torch.empty(nbytes, dtype=torch.uint8))
    gradient = functools.cache(torch.empty)
    recorded_memory.new_gradient = lambda weight: gradient(weight.shape, dtype=weight.dtype).detach()


def _nothing(device: int) -> None: ...


def make_layer(model: str, tokens: int, schedule: str = "serial") -> MoELayer:
    shape = MODELS[model]
    config = MoEConfig(
        hidden_size=WIDTH, intermediate_size=WIDTH, num_experts=shape.num_experts, top_k=shape.top_k
    )
    group = dist.group.WORLD
    kind = {"schedule": schedule, "experts": "loop", "dtype": torch.bfloat16}
    layer = MoELayer(config, group, transport=IdleNvlink(group, max_tokens=tokens), **kind)
    layer.experts.__class__ = OnGpu
    layer.experts.implementation = "kernels"
    return layer


def time_deep_ep(model: str, tokens: int, repeats: int, lines: int) -> None:
    """The calls of a program written for DeepEP. One number is read back by the host: how many rows there
    are, which the idle kernel writes all the same."""
    shape, group = MODELS[model], dist.group.WORLD
    launch = Idle.launch

    def place(self: Idle, *, args: list[Any], **how: Any) -> None:
        if self.variant.entry == "place_compact":
            ctypes.c_int.from_address(args[0].received).value = tokens
        launch(self, args=args, **how)

    Idle.launch = place  # type: ignore[method-assign]
    buffer: Any = Buffer(group, transport=IdleNvlink(group, max_tokens=tokens))
    x = torch.randn(tokens, WIDTH, dtype=torch.bfloat16)
    ids = torch.rand(tokens, shape.num_experts).topk(shape.top_k, dim=1).indices
    weights = torch.rand(tokens, shape.top_k)
    per_rank, _, per_expert, wanted, _ = buffer.get_dispatch_layout(ids, shape.num_experts)

    def dispatch() -> Any:
        return buffer.dispatch(x, None, per_rank, None, wanted, per_expert, ids, weights)

    rows, _, _, _, handle, _ = dispatch()
    calls: dict[str, Callable[[], Any]] = {
        "deep_ep layout": lambda: buffer.get_dispatch_layout(ids, shape.num_experts),
        "deep_ep dispatch": dispatch,
        "deep_ep again": lambda: buffer.dispatch(x, handle),
        "deep_ep combine": lambda: buffer.combine(rows, handle),
    }
    for name, call in calls.items():
        report(name, call, repeats, lines)


def report(name: str, call: Callable[[], Any], repeats: int, lines: int) -> None:
    for _ in range(20):
        call()
    spent = []
    for _ in range(repeats):
        start = time.perf_counter()
        call()
        spent.append(1e6 * (time.perf_counter() - start))
    Idle.launches = 0
    call()
    launches = Idle.launches
    stats, functions, operators = count(call)
    quick = statistics.quantiles(spent, n=10)
    print(f"{name:22} median {statistics.median(spent):7.1f} us, a tenth below {quick[0]:7.1f}")
    counts = f"{functions:.0f} calls of functions, {operators.total()} of torch's operators"
    print(f"{'':22} {counts}, {launches} launches of kernels")
    if lines:
        stats.sort_stats("tottime").print_stats(lines)
        print(dict(operators.most_common()))


def count(call: Callable[[], Any], calls: int = 50) -> tuple[pstats.Stats, float, Counter[str]]:
    """A profile of the calls, a call's functions, and its operators of torch by name."""
    profile = cProfile.Profile()
    profile.enable()
    for _ in range(calls):
        call()
    profile.disable()
    stats = pstats.Stats(profile)
    with listen(activities=[ProfilerActivity.CPU]) as heard:
        call()
    operators = Counter(event.name for event in heard.events() or () if event.cpu_parent is None)
    return stats, stats.total_calls / calls, operators  # type: ignore[attr-defined]


def make_gpu_layers(model: str, tokens: int, number: int, schedule: str = "serial") -> list[MoELayer]:
    group, draw = dist.group.WORLD, torch.Generator("cuda").manual_seed(0)
    config = MoEConfig(**asdict(MODELS[model]))
    kind = {"schedule": schedule, "experts": "kernels", "dtype": torch.bfloat16, "device": "meta"}
    transport = Nvlink(group, max_tokens=max(512, tokens))
    layers = [
        MoELayer(config, group, transport=transport, **kind).to_empty(device="cuda") for _ in range(number)
    ]
    with torch.no_grad():
        for parameter in (weight for layer in layers for weight in layer.parameters()):
            parameter.normal_(0.0, 0.02, generator=draw)
    return layers


def forward_and_step(
    layer: MoELayer, needs: Tensor, d_y: Tensor
) -> tuple[Callable[[], None], Callable[[], None]]:
    """A forward that keeps nothing, and one with its backward, of the same tokens. Gradients go as an
    optimizer's `zero_grad` lets them go, from a list: `nn.Module.zero_grad` seeks parameters each time."""
    x = needs.detach()

    def forward() -> None:
        with torch.no_grad():
            layer(x)

    def step() -> None:
        layer(needs).backward(d_y)
        for tensor in differentiated:
            tensor.grad = None

    differentiated = (needs, *layer.parameters())
    return forward, step


def checksum(tensors: list[Tensor | None]) -> str:
    """A number of the bits of each."""
    return " ".join(
        "none"
        if t is None
        else f"{zlib.crc32(t.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes()):08x}"
        for t in tensors
    )


def on_gpu(model: str, tokens: int, repeats: int, lines: int) -> list[dict[str, Any]]:
    """Rows of calls on a GPU, with autograd's own thread and with backwards in the caller's."""
    layers, (fusing,) = make_gpu_layers(model, tokens, STACK), make_gpu_layers(model, tokens, 1, "fused")
    fused.why_not_exchange = lambda exchange: None  # one rank has nothing to bring, by the same launches
    layer = layers[0]
    x = torch.randn(tokens, MODELS[model].hidden_size, device="cuda", dtype=torch.bfloat16)
    needs, d_y = x.requires_grad_(), torch.randn_like(x)
    forward, step = forward_and_step(layer, needs, d_y)

    fused_forward, fused_step = forward_and_step(fusing, needs, d_y)
    calls = {"forward": forward, "fused forward": fused_forward, "forward, kept": lambda: layer(needs)}
    calls |= {"step": step, "fused step": fused_step, ONE_THREAD: step}
    case = {"model": model, "T": tokens, "W": 1, "dtype": "bf16"}
    rows = measure(calls, case, repeats, torch.cuda.synchronize)
    stack = {IN_A_STACK: step_of(layers, needs, d_y)}
    rows += [share_of(row, STACK) for row in measure(stack, case, repeats, torch.cuda.synchronize)]
    if lines:
        print_profile(step, lines)
    with mock.patch.object(recorded.Recorder, "run", return_value=None):
        tasks = {"fused forward, by tasks": fused_forward, "fused step, by tasks": fused_step}
        rows += measure(tasks, case, repeats, torch.cuda.synchronize)
    torch.autograd.set_multithreading_enabled(True)
    for layer in (layers[0], layers[0], fusing, fusing):
        y = layer(needs)
        y.backward(d_y)
        print("bits", checksum([y, needs.grad, *(p.grad for p in layer.parameters())]))
        needs.grad = None
        layer.zero_grad()
    for layer in (*layers, fusing):
        layer.close()
    return rows


def step_of(layers: Sequence[MoELayer], needs: Tensor, d_y: Tensor) -> Callable[[], None]:
    """A forward with its backward through all of them, each beside what it is given, as a model's are."""
    differentiated = [needs, *(weight for layer in layers for weight in layer.parameters())]

    def step() -> None:
        hidden = needs
        for layer in layers:
            hidden = hidden + layer(hidden)
        hidden.backward(d_y)
        for tensor in differentiated:
            tensor.grad = None

    return step


def share_of(row: dict[str, Any], number: int) -> dict[str, Any]:
    """A row of as many layers as one of each."""
    shared = {name: value / number for name, value in row.items() if name.endswith(("_us", "functions"))}
    return row | {name: round(value, 1) for name, value in shared.items()}


def measure(
    calls: dict[str, Callable[[], Any]], case: dict[str, Any], repeats: int, wait: Callable[[], None]
) -> list[dict[str, Any]]:
    """A row for every call: the host's microseconds, those to the end of what it queued (`whole`), and what
    the host does in one."""
    rows = []
    for name, call in calls.items():
        torch.autograd.set_multithreading_enabled(name != ONE_THREAD)
        for _ in range(WARM):
            call()
        with records_made() as records:
            before = torch.cuda.memory_stats().get("num_device_alloc", 0)
            spent, whole = time_calls(call, repeats, wait)
            allocations = torch.cuda.memory_stats().get("num_device_alloc", 0) - before
        _, functions, operators = count(call)
        more = {"functions": round(functions), "operators": operators.total(), "records": len(records)}
        rows.append(
            {"op": name, "impl": "imbrex", "case": case, **spread_of(spent), "n": repeats, **more}
            | {f"whole_{key}": value for key, value in spread_of(whole).items()}
            | {"device_allocations": allocations}
        )
        print(rows[-1])
    return rows


@contextlib.contextmanager
def records_made() -> Iterator[list[Any]]:
    """Keys of the calls that are put on record inside."""
    keys, keep = [], recorded_launches.Records.keep

    def noted(records: recorded_launches.Records, key: Any, *what: Any) -> None:
        keys.append(key)
        keep(records, key, *what)

    recorded_launches.Records.keep = noted  # type: ignore[method-assign]
    try:
        yield keys
    finally:
        recorded_launches.Records.keep = keep  # type: ignore[method-assign]


def time_calls(
    call: Callable[[], Any], repeats: int, wait: Callable[[], None]
) -> tuple[list[float], list[float]]:
    """Microseconds until each call returns, and until all that it queued has ended."""
    spent, whole = [], []
    for _ in range(repeats):
        wait()
        start = time.perf_counter()
        call()
        end = time.perf_counter()
        wait()
        spent.append(1e6 * (end - start))
        whole.append(1e6 * (time.perf_counter() - start))
    return spent, whole


def spread_of(times: list[float]) -> dict[str, float]:
    ends = {"median_us": statistics.median(times), "min_us": min(times), "max_us": max(times)}
    deciles = statistics.quantiles(times, n=10)
    return {k: round(v, 1) for k, v in (ends | {"tenth_us": deciles[0], "ninth_us": deciles[-1]}).items()}


def print_profile(call: Callable[[], None], lines: int) -> None:
    profile = cProfile.Profile()
    profile.enable()
    for _ in range(100):
        call()
    profile.disable()
    torch.cuda.synchronize()
    stats = pstats.Stats(profile)
    print(f"{stats.total_calls / 100:.0f} calls of functions")  # type: ignore[attr-defined]
    stats.sort_stats("tottime").print_stats(lines)
    with listen(activities=[ProfilerActivity.CPU]) as heard:
        for _ in range(20):
            call()
    total: Counter[str] = Counter()
    number: Counter[str] = Counter()
    for event in heard.events() or ():
        if event.cpu_parent is None or event.cpu_parent.name.startswith("autograd::engine"):
            total[event.name] += event.cpu_time_total / 20
            number[event.name] += 1
    for name, us in total.most_common(lines):
        print(f"{us:8.1f} us {number[name] / 20:5.1f} {name}")


def in_processes(number: int, options: list[str]) -> list[dict[str, Any]]:
    """The rows of this benchmark run in so many processes, one after another."""
    runs = []
    for _ in range(number):
        with tempfile.TemporaryDirectory() as folder:
            out = Path(folder, "rows.json")
            subprocess.run([sys.executable, __file__, *options, "--out", str(out)], check=True)
            runs.append(json.loads(out.read_text())["rows"])
    return [median_row(rows) for rows in zip(*runs, strict=True)]


def median_row(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """One row of those of several processes: medians, but the least and the largest time of all."""
    names = [name for name, value in rows[0].items() if name.endswith("_us") and isinstance(value, float)]
    how = {"min": min, "max": max}
    times = {
        name: round(how.get(name.split("_")[-2], statistics.median)(row[name] for row in rows), 1)
        for name in names
    }
    keys = ("op", "impl", "case", "n", "functions", "operators", "records", "device_allocations")
    medians = [row["median_us"] for row in rows]
    return {**{key: rows[0][key] for key in keys}, **times, "processes": len(rows), "medians_us": medians}


def time_on_gpu(args: argparse.Namespace) -> None:
    """Rows of the layer on a GPU into the result file, of this process or of several."""
    check_results(args.out, QUESTION)
    sizes = args.gpu or [300, 16]
    options = ["--model", args.model, "--gpu", *map(str, sizes), "--repeats", str(args.repeats)]
    if args.processes > 1:
        rows = in_processes(args.processes, options)
        options += ["--processes", str(args.processes)]
    else:
        store = f"file://{Path(tempfile.mkdtemp(), 'store')}"
        where: dict[str, Any] = {"rank": 0, "world_size": 1, "device_id": torch.device("cuda", 0)}
        dist.init_process_group("nccl", init_method=store, **where)
        rows = [row for t in sizes for row in on_gpu(args.model, t, args.repeats, args.profile)]
    save(args.out, rows, options)


def save(out: Path, rows: Sequence[dict[str, Any]], options: Sequence[str]) -> None:
    """Write the rows of a run with these options."""
    command = f"python benchmarks/host_time.py {' '.join(options)}"
    write_results(out, QUESTION, describe_run(command), rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", default="qwen3-30b-a3b")
    parser.add_argument("--tokens", type=int, default=300, help="more than 256 go the long way (300)")
    parser.add_argument("--repeats", type=int, default=300)
    parser.add_argument("--profile", type=int, default=0, metavar="LINES", help="where the time goes")
    parser.add_argument("--steps", type=int, metavar="N", help="N steps alone, for who counts instructions")
    parser.add_argument("--gpu", nargs="*", type=int, metavar="TOKENS", help="on a GPU, of so many tokens")
    parser.add_argument("--processes", type=int, default=1, help="the median of so many, with --gpu")
    parser.add_argument("--out", type=Path, default=RESULTS, help="where --gpu writes its rows")
    args = parser.parse_args()
    torch.set_num_threads(1)
    if args.gpu is not None:
        time_on_gpu(args)
        os._exit(0)
    keep_memory()
    idle()
    folder = tempfile.mkdtemp()
    dist.init_process_group("gloo", init_method=f"file://{Path(folder, 'store')}", rank=0, world_size=1)
    x = torch.randn(args.tokens, WIDTH, dtype=torch.bfloat16)
    needs, d_y = x.requires_grad_(), torch.randn_like(x)
    for schedule in ("serial", "fused"):
        forward, step = forward_and_step(make_layer(args.model, args.tokens, schedule), needs, d_y)
        if args.steps:
            for _ in range(args.steps):
                step()
            os._exit(0)
        report(f"{schedule} forward", forward, args.repeats, args.profile)
        report(f"{schedule} training step", step, args.repeats, args.profile)
    time_deep_ep(args.model, args.tokens, args.repeats, args.profile)
    os._exit(0)


if __name__ == "__main__":
    main()
