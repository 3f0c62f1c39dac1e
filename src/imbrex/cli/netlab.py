"""`imbrex netlab run --nodes 2 --ranks-per-node 4 --inter 1gbit -- train.py`: see `imbrex.launch.netlab`."""

from __future__ import annotations

import argparse

from imbrex.launch.netlab import run


def add_arguments(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    run_parser = actions.add_parser("run", help="start a command as every rank, with torchrun's environment")
    run_parser.add_argument("--nodes", type=int, default=2, metavar="N", help="namespaces, each a node (2)")
    run_parser.add_argument("--ranks-per-node", type=int, default=2, metavar="N", help="ranks of each (2)")
    run_parser.add_argument("--inter", metavar="RATE", help="between nodes, as tc writes it (1gbit)")
    run_parser.add_argument("--intra", metavar="RATE", help="inside a node; none, the default, is no limit")
    run_parser.add_argument("--gpus", action="store_true", help="nodes of GPUs, NCCL's sockets between them")
    run_parser.add_argument(
        "--timeout", type=float, default=600.0, metavar="S", help="end everything after (600)"
    )
    run_parser.add_argument(
        "command", nargs=argparse.REMAINDER, metavar="-- COMMAND", help="what every rank runs"
    )


__all__ = ["add_arguments", "run"]
