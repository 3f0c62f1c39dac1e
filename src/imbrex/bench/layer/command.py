"""Time one MoE layer by phase, every transport side by side with the oracle."""

from __future__ import annotations

import argparse
import math
import shlex
from functools import partial
from typing import Any

import torch.distributed as dist

from imbrex.bench.shapes import MODELS, parse_shape
from imbrex.bench.skew import make_routing
from imbrex.launch.local import is_worker
from imbrex.launch.ranks import DTYPES, join, run_on_ranks, settle, words_of

CPU_SCALE = 16
"""The divisor of a published model's widths on CPUs, unless --scale says another."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--model", default="mixtral", help=f"{', '.join(MODELS)}, or D,F,E,K (mixtral)")
    add("--tokens", default="2048", metavar="M,...", help="tokens over all ranks, one or several (2048)")
    add("--ranks", type=int, metavar="W", help="local processes (one a GPU; 2 without)")
    add("--ep", type=int, metavar="E", help="ranks that the experts are spread over (all that --tp leaves)")
    add("--tp", type=int, default=1, metavar="P", help="ranks that every expert is split over (1)")
    add("--transport", default="all", metavar="NAME,...", help="which to compare (all)")
    add("--codec", default="identity", metavar="NAME", help="how rows are written on the wire (identity)")
    add("--schedule", default="serial", metavar="NAME", help="when the steps run (serial)")
    add("--experts", default="auto", metavar="NAME", help="which implementation computes the experts (auto)")
    add("--skew", default="uniform", help="uniform, zipf:A, std:S or trace:FILE[:ARRAY[:LAYER]] (uniform)")
    add("--backward", action="store_true", help="time forward and backward together")
    add("--scale", type=int, metavar="N", help=f"divide D and F (1 on GPUs, {CPU_SCALE} on CPUs)")
    add("--dtype", choices=tuple(DTYPES), help="of the tokens (bfloat16 on GPUs, float32 on CPUs)")
    add("--device", choices=("auto", "cpu", "cuda"), default="auto")
    add("-n", "--repeats", type=int, default=20, metavar="N", help="timed calls of each (20)")
    add("--warmup", type=int, default=3, metavar="N", help="calls before them (3)")
    add("--seed", type=int, default=0)
    add("--json", metavar="FILE", help="put the rows into this result file")
    add("--timeout", type=float, metavar="SECONDS", help="until a silent rank ends the run (60)")
    add("--board", help=argparse.SUPPRESS)


def run(args: argparse.Namespace) -> int:
    """Exit code 0; 1 where a rank was lost, 2 where the input was refused."""
    worker = is_worker()
    settle(args, worker=worker)
    if args.scale is None:
        args.scale = 1 if args.device == "cuda" else CPU_SCALE
    check(args)
    work, layer_bytes = partial(_measure, args), host_bytes(args)
    return run_on_ranks(args, ("bench", "layer"), work, worker=worker, layer_bytes=layer_bytes)


def host_bytes(args: argparse.Namespace) -> int:
    """The least that the layer takes of this machine's memory, all ranks together; 0 where GPUs hold it."""
    if args.device != "cpu":
        return 0
    tokens = max(map(int, args.tokens.split(",")))
    return parse_shape(args.model, args.scale).least_bytes(tokens, DTYPES[args.dtype].itemsize)


def check(args: argparse.Namespace) -> None:
    """Raise ValueError for what can be refused before any rank starts."""
    from imbrex import overlap
    from imbrex.codec import make_wire
    from imbrex.experts.experts import pick_implementation
    from imbrex.launch.factors import factorise
    from imbrex.runtime.waits import timeout_seconds
    from imbrex.transport import pick

    for name, least in (("repeats", 1), ("warmup", 0)):
        if getattr(args, name) < least:
            raise ValueError(f"--{name} is {getattr(args, name)}: give {least} or more")
    if not 0 <= args.seed < 2**63:
        raise ValueError(f"--seed is {args.seed}: give 0 to {2**63 - 1}")
    if not all(tokens.isdecimal() and int(tokens) for tokens in args.tokens.split(",")):
        raise ValueError(f"--tokens is {args.tokens}: give numbers of 1 or more, with commas between")
    shape = parse_shape(args.model, args.scale)
    factorise(args.ranks, expert=args.ep, tensor=args.tp)
    if shape.intermediate_size % args.tp:
        raise ValueError(
            f"--tp {args.tp} does not divide the expert width {shape.intermediate_size}; choose a divisor"
        )
    make_routing(args.skew, shape, 1)
    for name in transports_of(args):
        pick(name, num_ranks=args.ranks, top_k=shape.top_k)
    make_wire(args.codec)
    overlap.make(args.schedule)
    pick_implementation(args.experts)
    args.timeout = timeout_seconds(args.timeout)
    if args.json is not None:
        from imbrex.bench.results import check_file, check_results

        check_file("json", args.json)
        check_results(args.json, "layer")


def transports_of(args: argparse.Namespace) -> list[str]:
    """The names of the transports to compare."""
    from imbrex.transport import TRANSPORTS

    return list(TRANSPORTS) if args.transport == "all" else args.transport.split(",")


def _measure(args: argparse.Namespace, rank: int, board: Any) -> None:
    from imbrex.bench.layer.phases import Bench
    from imbrex.observe import Recorder

    device = join(args)
    recorder = Recorder(rank=rank, device=device, board=board)
    bench, rows = Bench(args, transports_of(args), rank, device, recorder), []
    for tokens in map(int, args.tokens.split(",")):
        rows += bench.compare(tokens)
        if rank == 0:
            show(args, tokens, rows[-bench.num_implementations :])
    if rank == 0 and args.json:
        from imbrex.bench.results import describe_run, write_results

        words = [w for w in words_of(args) if w not in ("--board", args.board)]
        command = shlex.join(["imbrex", "bench", "layer", *words])
        write_results(args.json, "layer", describe_run(command), rows)
    recorder.phase("done")
    dist.barrier()


def show(args: argparse.Namespace, tokens: int, rows: list[dict[str, Any]]) -> None:
    """The rows as a table on the terminal; milliseconds."""
    from rich.console import Console
    from rich.table import Table

    from imbrex.bench.machine import cores, hardware

    shape, about = parse_shape(args.model, args.scale), hardware()
    where = f"{about['count']} x {about['gpu']}" if args.device == "cuda" else f"{cores()} CPU cores"
    what = "forward and backward" if args.backward else "forward"
    title = f"{args.model}{f' / {args.scale}' if args.scale > 1 else ''}: {shape}, {tokens} tokens, "
    title += f"{args.ranks} ranks, {args.dtype}, {args.skew}, {what}, on {where}"
    table = Table(caption="milliseconds, maximum over ranks", caption_justify="left")
    phases = list(rows[0]["phases_us"])
    heads = ["", "median", "10-90 %", *phases, "MB sent", "error"]
    for head in heads:
        table.add_column(head, justify="left" if not head else "right")
    for row in rows:
        low, high = row["spread_us"]
        cells = [row["impl"], _ms(row["median_us"]), f"{_ms(low)}-{_ms(high)}"]
        cells += [_ms(row["phases_us"][phase]) for phase in phases]
        megabytes = "-" if row["bytes_sent"] is None else f"{row['bytes_sent'] / 1e6:.2f}"
        table.add_row(*cells, megabytes, f"{row['error']:.1e}")
    console = Console(width=max(120, Console().width))
    console.print(title, soft_wrap=True, highlight=False)
    console.print(table)
    for row in rows:
        if row["note"]:
            console.print(f"{row['impl']}: {row['note']}", soft_wrap=True, highlight=False)


def _ms(microseconds: float) -> str:
    return "-" if math.isnan(microseconds) else f"{microseconds / 1e3:.2f}"
