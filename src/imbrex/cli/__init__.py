"""The command `imbrex`. Each of its commands is a module here, with `add_arguments(parser)` and `run(args) ->
int`."""

from __future__ import annotations

import argparse
import difflib
import errno
import importlib
import sys
from collections.abc import Sequence
from typing import NoReturn

from imbrex import __version__
from imbrex.launch.reader import EXIT_UNREAD, print_any_name, print_nowhere, unread

EXIT_INTERRUPTED = 130
FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EROFS}
"""Errors of writing to a file that is open, which name none."""
COMMANDS = {
    "demo": "train a small byte-level language model with expert parallelism and write a report",
    "doctor": "say what works on this machine, and why the rest does not",
    "tune": "choose a layer's schedule by measuring, and keep the choice for schedule='auto'",
    "netlab": "run a command on a two-tier network of namespaces on this machine",
    "bench": "time layers, exchanges or experts, side by side with what else there is",
    "reproduce": "measure a table of a paper here, beside the paper's figures",
    "profile": "measure this machine for the planner",
    "plan": "say which layout a model should have on a cluster, and why not the others",
    "balance": "plan where experts live, replay policies on recorded loads",
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; its exit code, that of SIGPIPE where nobody reads any more what it prints. A command's
    module is imported only when it is called."""
    print_any_name()
    try:
        try:
            return _run(sys.argv[1:] if arguments is None else list(arguments))
        except KeyboardInterrupt:  # in the seconds of imports, too
            return EXIT_INTERRUPTED
        finally:
            print(end="", flush=True)  # while somebody hears that it cannot be
    except BrokenPipeError:
        if not unread():
            raise
        return EXIT_UNREAD
    except OSError as error:
        if error.errno not in FULL:
            raise
        print_nowhere(1)  # it may be what is full
        _refuse(f"{error.strerror}: free the disk, or give another path, or another TMPDIR")


def _run(arguments: Sequence[str]) -> int:
    parser = _Parser(prog="imbrex", description="Expert-parallel Mixture-of-Experts for PyTorch.")
    parser.add_argument("--version", action="version", version=f"imbrex {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND", parser_class=_Parser)
    command_name = next((word for word in arguments if not word.startswith("-")), None)
    for name, about in COMMANDS.items():
        command = commands.add_parser(name, help=about, description=about[0].upper() + about[1:] + ".")
        if name == command_name:
            module = importlib.import_module(f"imbrex.cli.{name}")
            module.add_arguments(command)
            command.set_defaults(run=module.run)
    if not arguments:
        parser.print_help()
        return 2
    args = parser.parse_args(arguments)
    try:
        return args.run(args)
    except ValueError as error:
        _refuse(" ".join(str(error).split()))
    except OSError as error:
        if error.filename is None:
            raise
        _refuse(f"{error.filename}: {error.strerror}: give another path")


def _refuse(sentence: str) -> NoReturn:
    print(f"imbrex: error: {sentence}", file=sys.stderr)
    sys.exit(2)


class _Parser(argparse.ArgumentParser):
    """argparse in one line, which says the flag that was meant, or where all are listed."""

    def error(self, message: str) -> NoReturn:
        _refuse(f"{message}; {self.prog} --help lists what there is")

    def parse_known_args(self, args=None, namespace=None):  # pyright: ignore[reportIncompatibleMethodOverride]
        options, unknown = super().parse_known_args(args, namespace)
        for word in unknown:
            flag = word.partition("=")[0]
            near = difflib.get_close_matches(flag, self._option_string_actions, n=1)
            if flag.startswith("-") and near:
                _refuse(f"{flag} is not known to {self.prog}: use {near[0]}")
        if unknown:
            self.error(f"{' '.join(unknown)} is not known to {self.prog}")
        return options, unknown
