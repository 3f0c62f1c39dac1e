"""`imbrex balance report`: one HTML file with what the balancer did, from its journal."""

from __future__ import annotations

import argparse
from pathlib import Path

from imbrex.balancer.report import read_journal, write_story


def add_report_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--journal", required=True, help="file of OnlineBalancer(journal=...), or a run's directory"
    )
    parser.add_argument("--out", required=True, help="report.html")


def report(args: argparse.Namespace) -> int:
    story = read_journal(Path(args.journal))
    write_story(Path(args.out), "Balance", story)
    print(f"{args.out}: {len(story.loads_ILW)} iterations, {len(story.switched)} new placements")
    return 0
