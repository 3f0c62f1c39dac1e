"""`imbrex balance WHAT`: plan, replay, stability, record, report."""

from __future__ import annotations

import argparse
from pathlib import Path

from imbrex.balancer.report import read_journal, write_story
from imbrex.bench.results import check_file
from imbrex.cli import balance_plan, balance_record, balance_replay


def _add_report_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--journal", required=True, help="file of OnlineBalancer(journal=...), or a run's directory"
    )
    parser.add_argument("--out", required=True, help="report.html")


def _report(args: argparse.Namespace) -> int:
    check_file("out", args.out, journal=args.journal)
    story = read_journal(Path(args.journal))
    write_story(Path(args.out), "Balance", story)
    print(f"{args.out}: {len(story.loads_ILW)} iterations, {len(story.switched)} new placements")
    return 0


WHATS = {
    "plan": (
        balance_plan.add_plan_arguments,
        balance_plan.plan,
        "replication and placement from statistics, to a file",
    ),
    "replay": (
        balance_replay.add_replay_arguments,
        balance_replay.replay,
        "what the balance would have been, by policy",
    ),
    "stability": (
        balance_replay.add_stability_arguments,
        balance_replay.stability,
        "how well the load of one batch tells that of the next",
    ),
    "record": (
        balance_record.add_record_arguments,
        balance_record.record,
        "statistics from a run's metrics.jsonl, or from any other format",
    ),
    "report": (
        _add_report_arguments,
        _report,
        "one HTML file with what an online balancer did, from its journal",
    ),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    whats = parser.add_subparsers(dest="what", required=True, metavar="WHAT", parser_class=type(parser))
    for name, (add, call, about) in WHATS.items():
        command = whats.add_parser(name, help=about, description=about[0].upper() + about[1:] + ".")
        add(command)
        command.set_defaults(balance=call)


def run(args: argparse.Namespace) -> int:
    return args.balance(args)
