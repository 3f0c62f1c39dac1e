"""`imbrex tune --model qwen2-moe --tokens 16384,4096`: measures in advance what `schedule="auto"` measures at
a layer's first call.

Results are stored in imbrex's cache folder, where layers of the same sizes on as many ranks find them. The
command starts the ranks itself, one a GPU; or torchrun does, or `imbrex netlab run -- imbrex tune ...`.
"""

from __future__ import annotations

import argparse
from contextlib import AbstractContextManager
from dataclasses import asdict
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from imbrex.bench.layer.command import host_bytes
from imbrex.bench.shapes import MODELS, parse_shape
from imbrex.launch.local import is_worker
from imbrex.launch.ranks import DTYPES, join, run_on_ranks, settle
from imbrex.observe import Observer, PhaseBoard


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--model", required=True, help=f"{', '.join(MODELS)}, or D,F,E,K")
    add("--tokens", required=True, metavar="M,...", help="tokens over all ranks, one or several")
    add("--ranks", type=int, metavar="W", help="local processes (one a GPU; 2 without)")
    add("--tp", type=int, default=1, metavar="P", help="ranks that every expert is split over (1)")
    add("--transport", default="auto", metavar="NAME", help="how rows move (auto)")
    add("--codec", default="identity", metavar="NAME", help="how rows are written on the wire (identity)")
    add("--experts", default="auto", metavar="NAME", help="which implementation computes the experts (auto)")
    add("--scale", type=int, default=1, metavar="N", help="divide D and F (1)")
    add("--dtype", choices=tuple(DTYPES), help="of tokens and experts (bfloat16 on GPUs, float32 on CPUs)")
    add("--device", choices=("auto", "cpu", "cuda"), default="auto")
    add("--again", action="store_true", help="measure anew what is kept already")
    add("--timeout", type=float, metavar="SECONDS", help="until a silent rank ends the run (60)")
    add("--board", help=argparse.SUPPRESS)


def run(args: argparse.Namespace) -> int:
    """Exit code 0; 1 where a rank was lost, 2 where the input was refused."""
    worker = is_worker()
    settle(args, worker=worker)
    check(args)
    return run_on_ranks(args, ("tune",), partial(_tune, args), worker=worker, layer_bytes=host_bytes(args))


def check(args: argparse.Namespace) -> None:
    """Raise ValueError for what can be refused before any rank starts."""
    from imbrex.codec import make_wire
    from imbrex.experts.experts import pick_implementation
    from imbrex.launch.factors import factorise
    from imbrex.runtime.waits import timeout_seconds
    from imbrex.transport import pick

    if not all(tokens.isdecimal() and int(tokens) for tokens in args.tokens.split(",")):
        raise ValueError(f"--tokens is {args.tokens}: give numbers of 1 or more, with commas between")
    shape = parse_shape(args.model, args.scale)
    factorise(args.ranks, tensor=args.tp)
    if shape.intermediate_size % args.tp:
        raise ValueError(
            f"--tp {args.tp} does not divide the expert width {shape.intermediate_size}; choose a divisor"
        )
    pick(args.transport, num_ranks=args.ranks, top_k=shape.top_k)
    make_wire(args.codec)
    pick_implementation(args.experts)
    args.timeout = timeout_seconds(args.timeout)


class _Steps(Observer):
    """Writes the number of every run that is timed on the board, before its clock starts."""

    def __init__(self, board: PhaseBoard, phase: str) -> None:
        self.board, self.phase_name = board, phase
        board.step = -1
        board.write(phase)

    def span(self, name: str, **where: int) -> AbstractContextManager[Any]:
        if name == "measure":
            self.board.step += 1
            self.board.write(self.phase_name)
        return super().span(name, **where)


def _tune(args: argparse.Namespace, rank: int, board: PhaseBoard) -> None:
    from imbrex import MoEConfig, MoELayer
    from imbrex.overlap import Auto

    device, shape, dtype = join(args), parse_shape(args.model, args.scale), DTYPES[args.dtype]
    config = MoEConfig(**asdict(shape))
    options = {name: getattr(args, name) for name in ("transport", "codec", "experts")}
    if rank == 0:
        print(f"{shape}, {args.ranks} ranks, {args.dtype} on {args.device}", flush=True)
    for tokens in map(int, args.tokens.split(",")):
        layer = MoELayer(
            *(config, dist.group.WORLD),
            tensor_parallel=args.tp,
            schedule=Auto(renew=args.again),
            device=device,
            dtype=dtype,
            observer=_Steps(board, f"{tokens} tokens"),
            timeout=args.timeout,
            **options,
        )
        alike = layer.exchange.transport.replicated
        own = tokens if alike else tokens // args.ranks + (rank < tokens % args.ranks)
        torch.manual_seed(0 if alike else rank)
        with torch.no_grad():
            layer(torch.randn(own, shape.hidden_size, device=device, dtype=dtype))
        if rank == 0:
            for piece in ("transport", "schedule"):
                print(f"{tokens} tokens, {piece} {layer.reasons[piece]}", flush=True)
        layer.close()
        del layer
    board.write("done")
    dist.barrier()
