"""`imbrex balance WHAT`: plan, replay, stability, record, report."""

from __future__ import annotations

import argparse

from imbrex.cli import balance_plan, balance_record, balance_replay, balance_report

WHATS = {
    "plan": (balance_plan, "replication and placement from statistics, to a file"),
    "replay": (balance_replay, "what the balance would have been, by policy"),
    "stability": (balance_replay, "how well the load of one batch tells that of the next"),
    "record": (balance_record, "statistics from a run's metrics.jsonl, or from any other format"),
    "report": (balance_report, "one HTML file with what an online balancer did, from its journal"),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    whats = parser.add_subparsers(dest="what", required=True, metavar="WHAT", parser_class=type(parser))
    for name, (module, about) in WHATS.items():
        command = whats.add_parser(name, help=about, description=about[0].upper() + about[1:] + ".")
        getattr(module, f"add_{name}_arguments")(command)
        command.set_defaults(balance=getattr(module, name))


def run(args: argparse.Namespace) -> int:
    return args.balance(args)
