"""Which of torch's attentions reads a static cache fastest, one token a row? `make gpu-bench NAME=attention`.

Qwen3-30B-A3B's heads (32 over 4 of keys and values, 128 wide) and DeepSeek-V3's latents (128 heads, 512 and
64 values), a graph of layers with caches of their own, so that none is in L2. The floor is reading the used
part of the caches once. A process a case compiles beside the others and checks every way against float32;
then they are timed one after the other.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import statistics
import time
from collections.abc import Callable
from threading import BrokenBarrierError
from typing import Any

import torch
import torch.multiprocessing as mp
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from imbrex.bench.ceilings import read_tbps
from imbrex.serve.between import latent_weights

HEADS, GROUPS, WIDTH = 32, 4, 128
LATENT, ROPE, LATENT_HEADS = 512, 64, 128
ROOM, BLOCK, ROUNDS = 8192 + 256, 128, 20
COMPILING_S = 55
ENOUGH = 600 << 20
"""Bytes of caches that a graph goes through: L2 holds 50 MiB."""

Way = Callable[[Tensor, Tensor, Tensor, "Rows"], Tensor]


class Rows:
    """How much of its slot every row uses."""

    def __init__(self, batch: int, used: int, room: int) -> None:
        self.batch, self.used, self.room, self.trimmed = batch, used, room, min(used + 256, room)
        self.used_B = torch.full((batch,), used, dtype=torch.int32, device="cuda")
        self.of_queries = torch.arange(batch + 1, dtype=torch.int32, device="cuda")
        self.of_keys = (torch.arange(batch + 1, device="cuda") * room).to(torch.int32)
        self.mask_BL = torch.arange(room, device="cuda") < self.used_B[:, None]
        blocks = -(-room // BLOCK)
        number_B11 = (-(-self.used_B // BLOCK))[:, None, None]
        index = (
            torch.arange(blocks, dtype=torch.int32, device="cuda").expand(batch, 1, 1, blocks).contiguous()
        )
        used_B = self.used_B

        def sees(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
            return k < used_B[b]

        self.blocks = BlockMask.from_kv_blocks(
            number_B11, index, BLOCK_SIZE=(BLOCK, BLOCK), mask_mod=sees, seq_lengths=(1, room)
        )


def flash(q: Tensor, k: Tensor, v: Tensor, rows: Rows) -> Tensor:
    bounds = rows.of_queries, rows.of_keys, 1, rows.room
    out, *_ = torch.ops.aten._flash_attention_forward(
        q[:, 0], k.flatten(0, 1), v.flatten(0, 1), *bounds, 0.0, True, False, seqused_k=rows.used_B
    )
    return out[:, None]


def flash_in_parts(parts: int, q: Tensor, k: Tensor, v: Tensor, rows: Rows) -> Tensor:
    """Few rows at a time: then keys are split, and tiles are of 64 queries instead of 128."""
    out = []
    for b in torch.arange(rows.batch).tensor_split(parts):
        begin, count = int(b[0]), len(b)
        part, *_ = torch.ops.aten._flash_attention_forward(
            q[begin : begin + count, 0], k.flatten(0, 1), v.flatten(0, 1), rows.of_queries[: count + 1],
            rows.of_keys[begin : begin + count + 1], 1, rows.room, 0.0, True, False,
            seqused_k=rows.used_B[begin : begin + count],
        )  # fmt: skip
        out.append(part)
    return torch.cat(out)[:, None]


def flash_paged(q: Tensor, k: Tensor, v: Tensor, rows: Rows) -> Tensor:
    """Slots as pages of 256: kernels that take pages split keys."""
    pages = rows.room // 256
    table = torch.arange(rows.batch * pages, dtype=torch.int32, device="cuda").view(rows.batch, pages)
    shape = rows.batch * pages, 256, GROUPS, WIDTH
    bounds = rows.of_queries, rows.of_keys, 1, rows.room
    more: dict[str, Any] = {"seqused_k": rows.used_B, "block_table": table}
    forward: Any = torch.ops.aten._flash_attention_forward
    return forward(q[:, 0], k.view(shape), v.view(shape), *bounds, 0.0, True, False, **more)[0][:, None]


def dotted(backend: SDPBackend, q: Tensor, k: Tensor, v: Tensor, rows: Rows) -> Tensor:
    cut = rows.trimmed
    mask = rows.mask_BL[:, None, None, :cut]
    with sdpa_kernel(backend):
        y = F.scaled_dot_product_attention(
            q.transpose(1, 2),
            k[:, :cut].transpose(1, 2),
            v[:, :cut].transpose(1, 2),
            attn_mask=mask,
            enable_gqa=True,
        )
    return y.transpose(1, 2)


def flex(options: dict[str, Any], q: Tensor, k: Tensor, v: Tensor, rows: Rows) -> Tensor:
    y = _flex(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), rows.blocks, options)
    return y.transpose(1, 2)


@functools.partial(torch.compile, dynamic=False, fullgraph=True)
def _flex(q: Tensor, k: Tensor, v: Tensor, blocks: BlockMask, options: Any) -> Tensor:
    return flex_attention(q, k, v, block_mask=blocks, enable_gqa=True, kernel_options=options)  # type: ignore[return-value]


def of(n: int, stages: int, warps: int, split: int = 0) -> dict[str, Any]:
    return {"BLOCK_N": n, "num_stages": stages, "num_warps": warps} | ({"SPLIT_KV": split} if split else {})


def grouped_ways(batch: int) -> dict[str, Way]:
    split = max(132 // (batch * GROUPS) * 2, 1)
    options: dict[str, dict[str, Any]] = {"flex": {}}
    for n, stages, warps in ((64, 3, 2), (64, 3, 4), (128, 2, 4), (128, 3, 8), (32, 4, 2)):
        options[f"flex {n} {stages} {warps}"] = of(n, stages, warps)
    for times in (2, 4):
        options[f"flex 64 3 4, {times * split} splits"] = of(64, 3, 4, times * split)
    ways: dict[str, Way] = {name: functools.partial(flex, of) for name, of in options.items()}
    ways["flash"] = flash
    parts = -(-batch // 50)
    if parts > 1:
        ways[f"flash, {parts} parts"] = functools.partial(flash_in_parts, parts)
    ways["cudnn"] = functools.partial(dotted, SDPBackend.CUDNN_ATTENTION)
    ways["efficient"] = functools.partial(dotted, SDPBackend.EFFICIENT_ATTENTION)
    ways["flash, pages"] = flash_paged
    return ways


def batched(weigh: Callable[[Tensor, Tensor], Tensor], q: Tensor, k: Tensor, v: Tensor, rows: Rows) -> Tensor:
    """Two batched products and a softmax over the whole slot."""
    kept = k[:, : rows.trimmed]
    weights = weigh(torch.bmm(q, kept.mT), ~rows.mask_BL[:, None, : rows.trimmed])
    return torch.bmm(weights, kept[..., :LATENT])


def flex_latent(options: dict[str, Any], splits: int, q: Tensor, k: Tensor, v: Tensor, rows: Rows) -> Tensor:
    """All heads share one row of keys. splits: into how many groups of heads they go."""
    kept = k[:, None].expand(-1, splits, -1, -1)
    y = _flex_scaled(q[:, :, None], kept, kept[..., :LATENT], rows.blocks, options)
    return y[:, :, 0]


@functools.partial(torch.compile, dynamic=False, fullgraph=True)
def _flex_scaled(q: Tensor, k: Tensor, v: Tensor, blocks: BlockMask, options: Any) -> Tensor:
    return flex_attention(q, k, v, block_mask=blocks, enable_gqa=True, scale=1.0, kernel_options=options)  # type: ignore[return-value]


def flex_beside(options: dict[str, Any], splits: int, q: Tensor, k: Tensor, v: Tensor, rows: Rows) -> Tensor:
    """The turned part of the scores by a product of its own, added within."""
    turned = torch.bmm(q[..., LATENT:], k[..., LATENT:].mT)
    kept = k[:, None, :, :LATENT].expand(-1, splits, -1, -1)
    return _flex_beside(q[:, :, None, :LATENT], kept, turned, rows.blocks, options)[:, :, 0]


@functools.partial(torch.compile, dynamic=False, fullgraph=True)
def _flex_beside(q: Tensor, k: Tensor, turned: Tensor, blocks: BlockMask, options: Any) -> Tensor:
    def with_turned(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return score + turned[b, h, j]

    return flex_attention(
        q, k, k, with_turned, block_mask=blocks, enable_gqa=True, scale=1.0, kernel_options=options
    )  # type: ignore[return-value]


def latent_ways(batch: int) -> dict[str, Way]:
    compiled = torch.compile(latent_weights, dynamic=False, fullgraph=True)
    ways: dict[str, Way] = {
        "products": functools.partial(batched, latent_weights),
        "products, softmax compiled": functools.partial(batched, compiled),
        "products alone": functools.partial(batched, lambda scores, hidden: scores),
    }
    for splits, n, stages, warps in ((4, 32, 2, 4), (8, 64, 2, 4)):
        options = of(n, stages, warps, 1 if batch > 32 else 8)
        ways[f"flex {splits} {n} {stages} {warps}"] = functools.partial(flex_latent, options, splits)
        ways[f"flex and a product {splits} {n} {stages} {warps}"] = functools.partial(
            flex_beside, options, splits
        )
    return ways


def exact(q: Tensor, k: Tensor, v: Tensor, rows: Rows, latent: bool) -> Tensor:
    """In float32 over the used part."""
    k, v = k[:, : rows.used].float(), v[:, : rows.used].float()
    if latent:
        return torch.bmm((q.float() @ k.mT).softmax(-1), k[..., :LATENT])
    k, v = (x.repeat_interleave(HEADS // GROUPS, 2) for x in (k, v))
    scores = torch.einsum("bqhc,blhc->bhql", q.float(), k) * WIDTH**-0.5
    return torch.einsum("bhql,blhc->bqhc", scores.softmax(-1), v)


def make(batch: int, latent: bool, layers: int, room: int) -> tuple[Tensor, list[tuple[Tensor, Tensor]]]:
    kind: dict[str, Any] = {"device": "cuda", "dtype": torch.bfloat16}
    if latent:
        kept = [torch.randn(batch, room, LATENT + ROPE, **kind) for _ in range(layers)]
        return torch.randn(batch, LATENT_HEADS, LATENT + ROPE, **kind) * 0.05, [(k, k) for k in kept]
    shape = batch, room, GROUPS, WIDTH
    q = torch.randn(batch, 1, HEADS, WIDTH, **kind)
    return q, [(torch.randn(shape, **kind), torch.randn(shape, **kind)) for _ in range(layers)]


def captured_us(work: Callable[[], object], layers: int) -> float:
    """The median replay, a layer's share."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        work()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    times = []
    for _ in range(ROUNDS + 3):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        # host sync: a measurement reads its clock
        end.synchronize()
        times.append(1e3 * begin.elapsed_time(end))
    return statistics.median(times[3:]) / layers


@torch.no_grad()
def measure(latent: bool, batch: int, compiled: Any, turn: Any) -> None:
    """One case: check all ways, wait for everybody's compiler, time those that are right."""
    torch._dynamo.config.recompile_limit = 64
    began = time.perf_counter()
    ways = latent_ways(batch) if latent else grouped_ways(batch)
    checked: dict[str, Way] = {}
    lines = [f"{'latent' if latent else 'grouped'}, {batch} rows"]
    room = 1536 if latent else ROOM
    q, caches = make(batch, latent, 1, room)
    rows = Rows(batch, 1024, room)
    wanted = exact(q, *caches[0], rows, latent).reshape(batch, -1)
    for name, way in ways.items():
        try:
            y = way(q, *caches[0], rows).float().reshape(batch, -1)
            error = float((y - wanted).norm() / wanted.norm())
        except Exception as wrong:  # noqa: BLE001
            lines.append(f"  {name:40} {type(wrong).__name__}: {str(wrong).strip().splitlines()[0][:150]}")
            continue
        if error < 0.02:
            checked[name] = way
        else:
            lines.append(f"  {name:40} is wrong by {error:.3f}")
    del q, caches, wanted
    lines.append(f"  compiled in {time.perf_counter() - began:.0f} s")
    torch.cuda.empty_cache()
    with contextlib.suppress(BrokenBarrierError):
        compiled.wait(COMPILING_S)
    with turn:
        print("\n".join(lines), flush=True)
        tbps = read_tbps()
        for used in (1024,) if latent else (1024, 4096, 8192):
            time_ways(checked, batch, latent, used, room, tbps)
        torch.cuda.empty_cache()


def time_ways(ways: dict[str, Way], batch: int, latent: bool, used: int, room: int, tbps: float) -> None:
    of_token = 2 * (LATENT + ROPE) if latent else 4 * GROUPS * WIDTH
    layers = max(2, min(16, ENOUGH // (batch * used * of_token)))
    q, caches = make(batch, latent, layers, room)
    rows = Rows(batch, used, room)
    floor = batch * used * of_token / tbps / 1e6
    print(f"  {used} tokens: {floor:.1f} us at {tbps:.2f} TB/s", flush=True)
    for name, way in ways.items():
        try:
            took = captured_us(lambda: [way(q, *c, rows) for c in caches], layers)  # noqa: B023
        except Exception as wrong:  # noqa: BLE001
            print(f"    {name:40} {type(wrong).__name__}: {str(wrong).strip().splitlines()[0][:150]}")
            continue
        print(f"    {name:40} {took:7.1f} us {took / floor:5.2f}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, nargs="*", default=[8, 32, 128], help="of grouped heads")
    parser.add_argument("--latent", type=int, nargs="*", default=[8, 128], help="rows of latents")
    args = parser.parse_args()
    print(torch.ops.aten._flash_attention_forward.default._schema)
    spawn = mp.get_context("spawn")
    cases = [(False, batch) for batch in args.rows] + [(True, batch) for batch in args.latent]
    compiled, turn = spawn.Barrier(len(cases)), spawn.Lock()
    ranks = [spawn.Process(target=measure, args=(*case, compiled, turn)) for case in cases]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join()


if __name__ == "__main__":
    main()
