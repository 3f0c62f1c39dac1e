"""The command `imbrex`. A command is a module here with `add_arguments(parser)` and `run(args) -> int`."""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence
from typing import NoReturn

COMMANDS = {
    "demo": "train a small byte-level language model with expert parallelism and write a report",
    "doctor": "say what works on this machine, and why the rest does not",
    "netlab": "run a command on a two-tier network of namespaces on this machine",
    "bench": "time the layer's phases, transports side by side",
    "reproduce": "measure a table of a paper here, beside the paper's figures",
    "balance": "plan where experts live, replay policies on recorded loads",
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; its exit code. A command's module is imported only when it is called."""
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    parser = _Parser(prog="imbrex", description="Expert-parallel Mixture-of-Experts for PyTorch.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND", parser_class=_Parser)
    wanted = next((word for word in arguments if not word.startswith("-")), None)
    for name, about in COMMANDS.items():
        command = commands.add_parser(name, help=about, description=about[0].upper() + about[1:] + ".")
        if name == wanted:
            module = importlib.import_module(f"imbrex.cli.{name}")
            module.add_arguments(command)
            command.set_defaults(run=module.run)
    args = parser.parse_args(arguments)
    try:
        return args.run(args)
    except ValueError as error:
        parser.error(" ".join(str(error).split()))
    except KeyboardInterrupt:
        return 130


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        print(f"imbrex: error: {message}", file=sys.stderr)
        sys.exit(2)
