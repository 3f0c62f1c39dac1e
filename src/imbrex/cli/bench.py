"""`imbrex bench NAME`: runs a benchmark. Each is a folder of `imbrex.bench` whose `command.py` has
`add_arguments` and `run`."""

from __future__ import annotations

import argparse
import importlib
import pkgutil

from imbrex import bench


def benches() -> dict[str, str]:
    """Module by name of the measurement: every folder of `imbrex.bench`."""
    return {m.name: f"imbrex.bench.{m.name}.command" for m in pkgutil.iter_modules(bench.__path__) if m.ispkg}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    whats = parser.add_subparsers(dest="what", required=True, metavar="WHAT", parser_class=type(parser))
    for name, module_name in sorted(benches().items()):
        module = importlib.import_module(module_name)
        about = (module.__doc__ or name).strip().splitlines()[0]
        measurement = whats.add_parser(name, help=about, description=about)
        module.add_arguments(measurement)
        measurement.set_defaults(bench=module.run)


def run(args: argparse.Namespace) -> int:
    return args.bench(args)
