"""Recorded loads by their names on a command line: `FILE`, or `FILE:ARRAY` for one of several traces in a
file."""

from __future__ import annotations

import argparse
from pathlib import Path

from imbrex.placement import LoadHistory, read_history


def add_input(
    parser: argparse.ArgumentParser, flag: str, *, several: bool = False, required: bool = True
) -> None:
    parser.add_argument(
        flag,
        dest=flag.strip("-") + "_input",
        required=required,
        action="append" if several else "store",
        metavar="FILE[:ARRAY]",
        help="statistics of TensorRT-LLM, SGLang, Megatron or vLLM, or ids of a trace (.npy, .npz; of it "
        "the first array whose name ends in ids, if none is named)"
        + ("; again for another" if several else ""),
    )
    parser.add_argument("--batch", type=int, default=512, help="tokens of an iteration, of a trace (512)")
    parser.add_argument(
        "--experts", type=int, default=0, help="experts of a trace, if not its largest id + 1"
    )


def load_input(name: str, args: argparse.Namespace) -> LoadHistory:
    """Raises ValueError where it cannot be read."""
    path, array = _divide_name(name)
    return read_history(path, batch=args.batch, array=array, num_experts=args.experts)


def load_sources(name: str, args: argparse.Namespace, num_ranks: int) -> tuple[LoadHistory, int]:
    """Read statistics, and say how many of their iterations make one. Where the tokens of an iteration can be
    told apart, as in a trace, every rank's share of them is an iteration of its own."""
    path, array = _divide_name(name)
    if Path(path).suffix not in (".npy", ".npz") or args.batch % num_ranks or args.batch < num_ranks:
        return load_input(name, args), 1
    batch = args.batch // num_ranks
    return read_history(path, batch=batch, array=array, num_experts=args.experts), num_ranks


def _divide_name(name: str) -> tuple[str, str]:
    path, _, array = name.rpartition(":") if ":" in name and not Path(name).exists() else (name, "", "")
    return path, array
