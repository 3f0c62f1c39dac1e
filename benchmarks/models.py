"""What does a whole model gain beside transformers' own ways to train it? `make gpu-bench NAME=models`.

Seven published widths of few layers on all GPUs of this machine: the step of a training and a prefill, of
transformers' model spread in its own ways (DDP, FSDP2, its expert parallelism) and by imbrex. All are the
same classes of transformers, with its attention, losses and dense layers. `--whole`: all layers and the
whole vocabulary, and a prefill alone, since beside most of them no optimizer fits; DDP is then the whole
model on every GPU. `--layers 24` trains Qwen1.5-MoE-A2.7B whole: two H200 hold its weights, gradients and
AdamW's states at once. Wants transformers 5.23 and accelerate.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import os
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import transformers
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import imbrex
from imbrex.adapters.huggingface import replace_blocks
from imbrex.adapters.transformers import register
from imbrex.bench.ceilings import measure_ceilings
from imbrex.bench.exchange.clock import run_ranks
from imbrex.bench.machine import foreign_bytes
from imbrex.bench.results import describe_run, write_results
from imbrex.parallel.backward import sync_in_backward
from imbrex.transport import Nvlink

QUESTION = "What does a whole model gain beside transformers' own ways to train it?"
RESULTS = Path(__file__).parent / "results" / "models.json"
SEQUENCE = 4096
"""Tokens of a sequence; a rank's batch is as many of them as its tokens need."""
TOKENS = (4096, 16384)
GIB = 2**30


@dataclass(frozen=True, kw_only=True, slots=True)
class Published:
    """A published model, of fewer layers. layers: those kept, all sparse. of: those it has. Its vocabulary is
    cut as its layers are, so that the head has the share of the time that it has in the whole model."""

    kind: str
    layers: int
    of: int
    vocabulary: int
    settings: dict[str, Any]

    def config(self, **changes: Any) -> Any:
        """A transformers configuration; changes win."""
        vocabulary = max(self.vocabulary * self.layers // self.of // 128, 1) * 128
        sizes = {"num_hidden_layers": self.layers, "vocab_size": vocabulary, "use_cache": False}
        kind = getattr(transformers, self.kind)
        return kind(**self.settings | sizes | {"pad_token_id": None} | changes)

    def whole(self) -> Published:
        return replace(self, layers=self.of)


DEEPSEEK_HEADS = {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128}
MODELS = {
    "qwen3-30b-a3b": Published(
        kind="Qwen3MoeConfig",
        layers=4,
        of=48,
        vocabulary=151936,
        settings={
            "hidden_size": 2048,
            "moe_intermediate_size": 768,
            "num_experts": 128,
            "num_experts_per_tok": 8,
            "norm_topk_prob": True,
            "num_attention_heads": 32,
            "num_key_value_heads": 4,
            "head_dim": 128,
        },
    ),
    "mixtral-8x7b": Published(
        kind="MixtralConfig",
        layers=2,
        of=32,
        vocabulary=32000,
        settings={
            "hidden_size": 4096,
            "intermediate_size": 14336,
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
        },
    ),
    "qwen2-57b-a14b": Published(
        kind="Qwen2MoeConfig",
        layers=2,
        of=28,
        vocabulary=151936,
        settings={
            "hidden_size": 3584,
            "moe_intermediate_size": 2560,
            "shared_expert_intermediate_size": 20480,
            "num_experts": 64,
            "num_experts_per_tok": 8,
            "norm_topk_prob": False,
            "num_attention_heads": 28,
            "num_key_value_heads": 4,
        },
    ),
    "qwen1.5-moe-a2.7b": Published(
        kind="Qwen2MoeConfig",
        layers=4,
        of=24,
        vocabulary=151936,
        settings={
            "hidden_size": 2048,
            "moe_intermediate_size": 1408,
            "shared_expert_intermediate_size": 5632,
            "num_experts": 60,
            "num_experts_per_tok": 4,
            "norm_topk_prob": False,
            "num_attention_heads": 16,
            "num_key_value_heads": 16,
        },
    ),
    "phi3.5-moe": Published(
        kind="PhimoeConfig",
        layers=2,
        of=32,
        vocabulary=32064,
        settings={
            "hidden_size": 4096,
            "intermediate_size": 6400,
            "num_local_experts": 16,
            "num_experts_per_tok": 2,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            # Noise would give every side other experts.
            "router_jitter_noise": 0.0,
            "input_jitter_noise": 0.0,
        },
    ),
    "deepseek-v3": Published(
        kind="DeepseekV3Config",
        layers=1,
        of=61,
        vocabulary=129280,
        settings=DEEPSEEK_HEADS
        | {
            "hidden_size": 7168,
            "moe_intermediate_size": 2048,
            "n_routed_experts": 256,
            "num_experts_per_tok": 8,
            "n_shared_experts": 1,
            "n_group": 8,
            "topk_group": 4,
            "num_attention_heads": 128,
            "num_key_value_heads": 128,
            "q_lora_rank": 1536,
            "first_k_dense_replace": 0,
        },
    ),
    "deepseek-v2-lite": Published(
        kind="DeepseekV2Config",
        layers=4,
        of=27,
        vocabulary=102400,
        settings=DEEPSEEK_HEADS
        | {
            "hidden_size": 2048,
            "moe_intermediate_size": 1408,
            "n_routed_experts": 64,
            "num_experts_per_tok": 6,
            "n_shared_experts": 2,
            "n_group": 1,
            "topk_group": 1,
            "topk_method": "greedy",
            "num_attention_heads": 16,
            "num_key_value_heads": 16,
            "q_lora_rank": None,
            "first_k_dense_replace": 0,
        },
    ),
}


def plain(config: Any, device: torch.device) -> nn.Module:
    """The model, whole on every rank, with the same weights."""
    torch.manual_seed(0)
    with torch.device(device):
        return transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)


def spread(config: Any, **sizes: Any) -> nn.Module:
    """The model as transformers spreads it over all ranks, with weights drawn where they live."""
    from transformers.distributed.configuration_utils import DistributedConfig

    torch.manual_seed(0)
    kind: Any = transformers.MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    return kind.from_pretrained(
        None,
        config=config,
        state_dict={},
        dtype=torch.bfloat16,
        distributed_config=DistributedConfig(**sizes),
    )


class Side:
    """One way to spread a model. `net` is what is called. trains: whether it has gradients, and DDP room for
    them."""

    def __init__(
        self, name: str, config: Any, device: torch.device, world: int, *, trains: bool = True
    ) -> None:
        self.layers: list[imbrex.MoELayer] = []
        self.dense = False
        both = {"fsdp_size": world, "ep_size": world}
        name, compiled = name.removesuffix("-compiled"), name.endswith("-compiled")
        if name == "transformers-fsdp2":
            self.net = spread(config, fsdp_size=world)
        elif name == "transformers-ep":
            self.net = spread(config, **both)
        elif name == "imbrex-ep":
            register()
            self.net = spread(config, ep_implementation="imbrex", **both)
        elif name == "transformers-ddp":
            self.net = _data_parallel(plain(config, device), compiled=compiled, trains=trains)
        elif name in REPLACED:
            model, options = plain(config, device), {}
            if name == "imbrex-worst-rows":
                options["transport"] = Nvlink(dist.group.WORLD, exact_rows=False)
            if name == "imbrex-fused":
                options["schedule"] = "fused"
            self.layers = replace_blocks(model, dist.group.WORLD, **options)
            self.dense = name == "imbrex-own-sums"
            if name == "imbrex-fsdp2":
                self.net = _sharded(model, world)
            elif self.dense:
                self.net = model
            else:
                self.net = _data_parallel(model, compiled=compiled, trains=trains)
            if trains and name != "imbrex-divided-after":
                sync_in_backward(model, dense=self.dense)
        else:
            raise ValueError(f"--sides: {name!r} is not known; use {', '.join(SIDES)}")
        self.net.train(trains)

    def gradients(self, ids: Tensor) -> Tensor:
        """Forward and backward, until every rank has the gradients of the mean of all ranks' losses."""
        loss = self.net(input_ids=ids, labels=ids).loss
        loss.backward()
        if self.layers:
            imbrex.sync_gradients(self.net, dense=self.dense)
        return loss.detach()

    def optimizer(self) -> torch.optim.Optimizer:
        """AdamW, by its fused kernels, which take no sharded and other parameters in one group."""
        experts = {id(p) for p in imbrex.expert_parameters(self.net)} if self.layers else set()
        groups: list[list[nn.Parameter]] = [[], []]
        for parameter in self.net.parameters():
            groups[id(parameter) in experts].append(parameter)
        of = [{"params": group} for group in groups if group]
        return torch.optim.AdamW(of, lr=1e-5, fused=True)

    @torch.no_grad()
    def prefill(self, ids: Tensor) -> Tensor:
        """The last token's logits of every sequence."""
        model = self.net.module if isinstance(self.net, DistributedDataParallel) else self.net
        return model(input_ids=ids, logits_to_keep=1).logits

    def close(self) -> None:
        for layer in self.layers:
            layer.close()


def _data_parallel(model: nn.Module, *, compiled: bool, trains: bool) -> nn.Module:
    if compiled:
        model.compile()
    return DistributedDataParallel(model, gradient_as_bucket_view=True) if trains else model


def _sharded(model: Any, world: int) -> nn.Module:
    """The model with all but its experts sharded by FSDP2, as transformers shards it."""
    mesh = init_device_mesh("cuda", (world,))
    experts = set(imbrex.expert_parameters(model))
    for part in (*model.model.layers, model):
        fully_shard(part, mesh=mesh, ignored_params=experts)
    return model


REPLACED = (
    "imbrex",
    "imbrex-worst-rows",
    "imbrex-fused",
    "imbrex-divided-after",
    "imbrex-own-sums",
    "imbrex-fsdp2",
)
"""Sides with replaced blocks."""
SIDES = (
    "transformers-ddp",
    "transformers-fsdp2",
    "transformers-ep",
    "imbrex-ep",
    *REPLACED,
    "transformers-ddp-compiled",
    "imbrex-compiled",
)
"""imbrex: replaced blocks, and DDP for the rest, with as many rows as it has by itself, for the worst case,
with schedule 'fused', or with experts' gradients divided by the ranks after the backward, not in it.
own-sums: `sync_in_backward` in the place of DDP; fsdp2: the rest sharded, as transformers-ep has it.
imbrex-ep: transformers' switch, and FSDP2 for the rest. compiled: by `model.compile()`, before DDP."""
OPS = ("step", "gradients", "prefill")


@dataclass(frozen=True, kw_only=True, slots=True)
class Timed:
    """Microseconds of a call among calls one after the other, each sample the slowest rank's. busy_us: those
    in which some kernel ran on this rank, by the profiler."""

    median_us: float
    min_us: float
    max_us: float
    n: int
    busy_us: float


def time_calls(call: Callable[[], Any], repeats: int) -> Timed:
    """Calls one after the other, as a training makes them, by events between them."""
    for _ in range(3):
        call()
    torch.cuda.synchronize()
    dist.barrier()
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(repeats + 1)]
    marks[0].record()
    for mark in marks[1:]:
        call()
        mark.record()
    torch.cuda.synchronize()
    spans = [a.elapsed_time(b) * 1e3 for a, b in itertools.pairwise(marks)]
    slowest = torch.tensor(spans, device="cuda", dtype=torch.float64)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    spans = slowest.tolist()
    return Timed(
        median_us=statistics.median(spans),
        min_us=min(spans),
        max_us=max(spans),
        n=repeats,
        busy_us=busy_microseconds(call),
    )


def busy_microseconds(call: Callable[[], Any], calls: int = 2) -> float:
    """Microseconds of a call in which a kernel or copy ran; a kernel that waits for a peer runs."""
    from torch._C._autograd import DeviceType
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as heard:
        for _ in range(calls):
            call()
        torch.cuda.synchronize()
    spans = sorted(
        (event.time_range.start, event.time_range.end)
        for event in heard.events() or ()
        if event.device_type == DeviceType.CUDA
    )
    busy, until = 0.0, float("-inf")
    for start, end in spans:
        busy += max(end - max(start, until), 0.0)
        until = max(until, end)
    return busy / calls


def measure(side: Side, ids: Tensor, repeats: int, foreign: int, ops: Sequence[str]) -> list[dict[str, Any]]:
    """Rows of those of `OPS` that are asked for, of one batch; complete steps always."""
    optimizer = side.optimizer()
    losses: list[Tensor] = []

    def gradients() -> None:
        losses.append(side.gradients(ids))
        optimizer.zero_grad(set_to_none=True)

    def step() -> None:
        side.gradients(ids)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    for _ in range(2):  # DDP makes its buckets anew in the second, beside those of the first
        step()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    timed = {"step": time_calls(step, repeats)}
    allocated = torch.cuda.max_memory_allocated()
    peak = allocated + max(foreign_bytes() - foreign, 0)
    optimizer.state.clear()
    torch.cuda.empty_cache()
    if "gradients" in ops:
        timed["gradients"] = time_calls(gradients, repeats)
    if "prefill" in ops:
        timed["prefill"] = time_calls(lambda: side.prefill(ids), repeats)
    assert all(loss.isfinite() for loss in losses), "a loss that is not a number"
    mine = [peak, allocated, *(clock.busy_us for clock in timed.values())]
    most = torch.tensor([mine], device="cuda", dtype=torch.float64)
    dist.all_reduce(most, op=dist.ReduceOp.MAX)
    *peaks, busy = most[0, 0].item(), most[0, 1].item(), most[0, 2:].tolist()
    names = ("peak_gib", "allocated_gib")
    memory = {name: round(peak / GIB, 2) for name, peak in zip(names, peaks, strict=True)}
    rows = []
    for (op, clock), busy_us in zip(timed.items(), busy, strict=True):
        row = {"op": op, **_spans(clock), "tokens_per_s": round(ids.numel() / clock.median_us * 1e6)}
        row["idle_share"] = round(max(1 - busy_us / clock.median_us, 0.0), 3)
        rows.append(row | (memory if op == "step" else {}))
    return rows


def measure_whole(side: Side, ids: Tensor, repeats: int, foreign: int) -> list[dict[str, Any]]:
    """The row of a prefill, with the peak of a rank's memory."""
    side.prefill(ids)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    clock = time_calls(lambda: side.prefill(ids), repeats)
    peak = torch.cuda.max_memory_allocated() + max(foreign_bytes() - foreign, 0)
    most = torch.tensor([peak, clock.busy_us], device="cuda", dtype=torch.float64)
    dist.all_reduce(most, op=dist.ReduceOp.MAX)
    peak, busy_us = most.tolist()
    row = {"op": "prefill", **_spans(clock), "tokens_per_s": round(ids.numel() / clock.median_us * 1e6)}
    row["idle_share"] = round(max(1 - busy_us / clock.median_us, 0.0), 3)
    return [row | {"peak_gib": round(peak / GIB, 2)}]


def _spans(clock: Timed) -> dict[str, Any]:
    spans = {name: round(getattr(clock, name), 1) for name in ("median_us", "min_us", "max_us")}
    return spans | {"n": clock.n}


def contest(
    rank: int, world: int, models: list[str], sides: list[str], tokens: list[int], plan: dict[str, Any]
) -> list[dict[str, Any]]:
    """Rows of every model, side and batch; rank 0 writes the file after each model."""
    as_launched(rank, world)
    rows: list[dict[str, Any]] = []
    # What a process takes once would be the first side's: NCCL's buffers, the profiler's, cuBLAS's.
    dist.all_reduce(torch.zeros(1 << 24, device="cuda"))
    square = torch.zeros(1 << 10, 1 << 10, device="cuda", dtype=torch.bfloat16)
    busy_microseconds(lambda: square @ square)
    for model in models:
        for name in sides:
            if not agreed(time.monotonic() < plan["end"]):
                continue
            try:
                published = MODELS[model].whole() if plan["whole"] else MODELS[model]
                if plan["layers"] is not None:
                    published = replace(published, layers=plan["layers"])
                for row in one_side(published, name, tokens, plan):
                    rows.append({"impl": name, **row, "case": {"model": model, **row["case"]}})
                    if rank == 0:
                        print(model, name, row["case"]["T"], _line(row), flush=True)
            except Exception as error:  # noqa: BLE001 (a side that fails is told of, and the others are raced)
                if rank == 0:
                    print(model, name, f"failed: {type(error).__name__}: {error}", flush=True)
            gc.collect()
            torch.cuda.empty_cache()
            if rank == 0:
                write_results(plan["out"], QUESTION, plan["run"], rows)
    return rows


def as_launched(rank: int, world: int) -> None:
    """Tell transformers what a launcher tells, and its logger to be quiet."""
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world)}
    os.environ |= {"LOCAL_WORLD_SIZE": str(world), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29400"}
    transformers.logging.set_verbosity_error()


def agreed(mine: bool) -> bool:
    """Whether it holds on all ranks."""
    both = torch.tensor([int(mine)], device="cuda")
    dist.all_reduce(both, op=dist.ReduceOp.MIN)
    return bool(both)


def one_side(
    model: Published, name: str, tokens: list[int], plan: dict[str, Any]
) -> Iterator[dict[str, Any]]:
    """Rows of one side of one model, by number of tokens."""
    world, device = dist.get_world_size(), torch.device("cuda", dist.get_rank())
    foreign, config = foreign_bytes(), model.config()
    side = Side(name, config, device, world, trains=not plan["whole"])
    try:
        for count in tokens:
            case = {"layers": model.layers, "T": count, "W": world, "dtype": "bf16"}
            torch.manual_seed(1 + dist.get_rank())
            length = min(count, SEQUENCE)
            ids = torch.randint(config.vocab_size, (count // length, length), device=device)
            if plan["whole"]:
                rows = measure_whole(side, ids, plan["repeats"], foreign)
            else:
                rows = measure(side, ids, plan["repeats"], foreign, plan["ops"])
            for row in rows:
                yield {"case": case, **row}
    finally:
        side.close()


def _line(row: dict[str, Any]) -> str:
    memory = f", {row['peak_gib']} GiB" if "peak_gib" in row else ""
    return f"{row['op']} {row['median_us'] / 1e3:.2f} ms, idle {row['idle_share']:.0%}{memory}"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--sides", default=",".join(SIDES))
    parser.add_argument("--tokens", default=",".join(map(str, TOKENS)))
    parser.add_argument("--ops", default=",".join(OPS), help="what is timed beside complete steps")
    parser.add_argument("--whole", action="store_true", help="all layers, a prefill alone")
    parser.add_argument("--layers", type=int, help="so many of each, in the place of the few")
    parser.add_argument("--seconds", type=float, default=3600.0, help="begin no side after so many")
    args = parser.parse_args()
    world = torch.cuda.device_count()
    if world < 2:
        raise SystemExit("benchmarks/models.py needs two GPUs or more")
    words = [f"--{name}={value}" for name, value in vars(args).items() if value != parser.get_default(name)]
    options = " ".join(word for word in words if not word.startswith("--out")).replace("=True", "")
    command = "make gpu-bench NAME=models" + (f" ARGS='{options}'" if options else "")
    run = describe_run(command, measure_ceilings())
    run["versions"]["transformers"] = transformers.__version__
    plan = {"repeats": args.repeats, "out": str(args.out), "run": run, "ops": args.ops.split(",")}
    plan |= {"end": time.monotonic() + args.seconds, "whole": args.whole, "layers": args.layers}
    tokens = [int(count) for count in args.tokens.split(",")]
    rows = run_ranks(contest, world, args.models.split(","), args.sides.split(","), tokens, plan)
    print(f"{len(rows)} rows in {args.out}")


if __name__ == "__main__":
    main()
