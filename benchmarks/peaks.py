"""Does the step of a training ever take more memory than transformers' expert parallelism?

`make gpu-bench NAME=peaks`: the models and sides of `models.py`, two ranks, peaks only, so that the ranks may
share one GPU (`tests/gpu/gpus.py`): each is a process with its own memory. Wants transformers 5.23.
"""

from __future__ import annotations

import argparse
import gc
import os
import sys
import tempfile
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import transformers
from models import GIB, MODELS, SEQUENCE, Published, Side, agreed
from torch.multiprocessing.spawn import spawn

from imbrex.bench.exchange.clock import ENVIRONMENT
from imbrex.bench.results import describe_run, write_results

QUESTION = "Does the step of a training ever take more memory than transformers' expert parallelism?"
RESULTS = Path(__file__).parent / "results" / "peaks.json"
FITTING = [name for name in MODELS if name != "deepseek-v3"]
"""Those of which two ranks fit into one GPU of 139 GiB."""
SIDES = ("transformers-ep", "imbrex-ep", "imbrex")
RANKS = 2


def foreign_bytes() -> float:
    """Bytes of the GPU in use that the allocators of the ranks on it did not take, in equal parts: heaps,
    communicators, contexts."""
    torch.cuda.synchronize()
    dist.barrier()
    free, total = torch.cuda.mem_get_info()
    sharing = RANKS if torch.cuda.device_count() < RANKS else 1
    reserved = torch.tensor(torch.cuda.memory_reserved(), device="cuda", dtype=torch.float64)
    if sharing > 1:
        dist.all_reduce(reserved)
    return (total - free - reserved.item()) / sharing


def peak_of(published: Published, name: str, count: int) -> tuple[float, float]:
    """GiB of a rank at the peak of a step, the most of all ranks: all, and of torch's allocator."""
    device = torch.device("cuda", torch.cuda.current_device())
    config, foreign = published.config(), foreign_bytes()
    side = Side(name, config, device, RANKS)
    optimizer = torch.optim.AdamW(side.net.parameters(), lr=1e-5, fused=True)
    torch.manual_seed(1 + dist.get_rank())
    length = min(count, SEQUENCE)
    ids = torch.randint(config.vocab_size, (count // length, length), device=device)
    try:
        for number in range(3):
            loss = side.gradients(ids)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            assert loss.isfinite(), "a loss that is not a number"
            if number == 0:
                torch.cuda.synchronize()
                torch.cuda.reset_peak_memory_stats()
        taken = torch.cuda.max_memory_allocated()
        both = torch.tensor([taken + max(foreign_bytes() - foreign, 0), taken], device="cuda")
        dist.all_reduce(both, op=dist.ReduceOp.MAX)
        everything, allocated = both.tolist()
        return everything / GIB, allocated / GIB
    finally:
        side.close()


def contest(rank: int, plan: dict[str, Any], store: str) -> None:
    """Rows of every model, side and batch; rank 0 writes the file after each."""
    shared = torch.cuda.device_count() < RANKS
    local = 0 if shared else rank
    os.environ |= ENVIRONMENT | {"RANK": str(rank), "LOCAL_RANK": str(local), "WORLD_SIZE": str(RANKS)}
    os.environ |= {"LOCAL_WORLD_SIZE": str(RANKS), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29401"}
    if shared:  # NCCL refuses two ranks of a host that share a GPU
        os.environ |= {"NCCL_HOSTID": f"rank{rank}", "NCCL_P2P_DISABLE": "1", "NCCL_SHM_DISABLE": "1"}
        os.environ["TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"] = "1"
    torch.cuda.set_device(local)
    dist.init_process_group(
        "nccl", init_method=f"file://{store}", rank=rank, world_size=RANKS, timeout=timedelta(seconds=60)
    )
    transformers.logging.set_verbosity_error()
    rows: list[dict[str, Any]] = []
    for model, name, count in plan["cases"]:
        if not agreed(time.monotonic() < plan["end"]):
            continue
        begin = time.monotonic()
        everything, allocated = peak_of(MODELS[model], name, count)
        case = {"model": model, "layers": MODELS[model].layers, "T": count, "W": RANKS, "dtype": "bf16"}
        peaks = {"peak_gib": round(everything, 2), "allocated_gib": round(allocated, 2)}
        rows.append({"impl": name, "op": "step", "case": case, **peaks})
        gc.collect()
        torch.cuda.empty_cache()
        if rank == 0:
            print(model, name, count, peaks, f"{time.monotonic() - begin:.0f} s", flush=True)
            write_results(plan["out"], QUESTION, plan["run"], rows)
    dist.barrier()
    torch.cuda.synchronize()
    sys.stdout.flush()
    os._exit(0)  # as in run_ranks: the end of symmetric memory may wait for peers that are gone


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--models", default=",".join(FITTING))
    parser.add_argument("--sides", default=",".join(SIDES))
    parser.add_argument("--tokens", default="4096")
    parser.add_argument("--seconds", type=float, default=3600.0, help="begin nothing after so many")
    args = parser.parse_args()
    words = [f"--{name}={value}" for name, value in vars(args).items() if value != parser.get_default(name)]
    options = " ".join(word for word in words if not word.startswith("--out"))
    run = describe_run("make gpu-bench NAME=peaks" + (f" ARGS='{options}'" if options else ""))
    run["versions"]["transformers"] = transformers.__version__
    cases = [
        (model, side, int(count))
        for count in args.tokens.split(",")
        for model in args.models.split(",")
        for side in args.sides.split(",")
    ]
    plan = {"cases": cases, "run": run, "out": str(args.out), "end": time.monotonic() + args.seconds}
    with tempfile.TemporaryDirectory() as folder:
        spawn(contest, (plan, f"{folder}/store"), nprocs=RANKS, join=True)


if __name__ == "__main__":
    main()
