"""`imbrex bench WHAT`: one measurement a module, `bench_WHAT.py`, with `add_arguments` and `run`."""

from __future__ import annotations

import argparse
import importlib
import pkgutil
from pathlib import Path

PREFIX = "bench_"


def benches() -> dict[str, str]:
    """Module by name of the measurement: whatever `bench_*.py` stands beside this file."""
    beside = pkgutil.iter_modules([str(Path(__file__).parent)])
    return {m.name.removeprefix(PREFIX): f"imbrex.cli.{m.name}" for m in beside if m.name.startswith(PREFIX)}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    whats = parser.add_subparsers(dest="what", required=True, metavar="WHAT", parser_class=type(parser))
    for name, module_name in sorted(benches().items()):
        module = importlib.import_module(module_name)
        about = (module.__doc__ or name).strip().splitlines()[0]
        bench = whats.add_parser(name, help=about, description=about)
        module.add_arguments(bench)
        bench.set_defaults(bench=module.run)


def run(args: argparse.Namespace) -> int:
    return args.bench(args)
