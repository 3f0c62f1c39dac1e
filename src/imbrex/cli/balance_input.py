"""Statistics named on a command line: `FILE`, or `FILE:ARRAY` for a trace of several."""

from __future__ import annotations

import argparse
from pathlib import Path

from imbrex.placement import LoadHistory, read_history


def add_input(parser: argparse.ArgumentParser, flag: str, *, several: bool = False) -> None:
    parser.add_argument(
        flag,
        dest=flag.strip("-") + "_input",
        required=True,
        action="append" if several else "store",
        metavar="FILE[:ARRAY]",
        help="statistics of TensorRT-LLM, SGLang, Megatron or vLLM, or ids of a trace (.npy, .npz)"
        + ("; again for another" if several else ""),
    )
    parser.add_argument("--batch", type=int, default=512, help="tokens of an iteration, of a trace (512)")
    parser.add_argument(
        "--experts", type=int, default=0, help="experts of a trace, if not its largest id + 1"
    )


def load_input(name: str, args: argparse.Namespace) -> LoadHistory:
    """Raises ValueError where it cannot be read."""
    path, _, array = name.rpartition(":") if ":" in name and not Path(name).exists() else (name, "", "")
    return read_history(path, batch=args.batch, array=array, num_experts=args.experts)
