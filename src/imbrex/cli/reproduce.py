"""`imbrex reproduce NAME`: measures a paper's table on this machine, beside the paper's figures."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from imbrex.bench.results import check_file, describe_run, write_results
from imbrex.reproduce import ALIASES, TABLES, Options, find, papers


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", nargs="?", help="which; --list says what there is")
    parser.add_argument("--list", action="store_true", help="what there is")
    parser.add_argument("--full", action="store_true", help="all of it, not what takes minutes on a laptop")
    parser.add_argument("--rounds", type=int, default=0, metavar="N", help="of every timing")
    parser.add_argument("--data", nargs="+", default=[], metavar="FILE", help="text to train on, or a trace")
    parser.add_argument("--resume", action="store_true", help="keep finished parts in --out, and use those")
    parser.add_argument("--out", default="runs/reproduce", metavar="DIR", help="where the files go")
    parser.add_argument("--results", default=None, metavar="FILE", help="put the rows in this file instead")


def run(args: argparse.Namespace) -> int:
    """Exit code 0; ValueError where the name is not known or the machine lacks something."""
    if args.list or args.name is None:
        aliases = [(alias, f"the same as {name}") for alias, name in ALIASES.items()]
        listed = [*((name, about) for name, (_, about) in TABLES.items()), *aliases]
        sys.stdout.write("".join(f"{name:22} {about}\n" for name, about in listed))
        sys.stdout.write("\n" + "\n".join(papers.list_papers()) + "\n")
        return 0
    check_file("results", args.results)
    folder = _make(args.out)
    load, cores = os.getloadavg()[0], os.cpu_count() or 1
    try:
        settings = {"full": args.full, "rounds": args.rounds, "data": tuple(args.data)}
        finding = find(args.name, Options(**settings, parts=str(folder) if args.resume else None))
    except RuntimeError as error:
        print(f"imbrex: error: {error}", file=sys.stderr)
        return 1
    results, picture = Path(args.results or folder / f"{args.name}.json"), folder / f"{args.name}.svg"
    picture.write_text(finding.chart)
    text = finding.text()
    (folder / f"{args.name}.md").write_text(text)
    sys.stdout.write(f"{text}\nrows: {results}\nplot: {picture}\n")
    if load > cores / 2 and any("n" in row and "median_us" in row for row in finding.rows):
        busy = f"load {load:.1f} on {cores} cores when this began"
        print(f"imbrex: others were using the machine ({busy}): timings are of that too", file=sys.stderr)
    words = ["imbrex reproduce", args.name, *(["--full"] if args.full else [])]
    words += ["--rounds", str(args.rounds)] if args.rounds else []
    write_results(results, finding.question, describe_run(" ".join(words)), finding.rows)
    return 0


def _make(out: str) -> Path:
    """Make the folder before anything is measured, since measuring takes minutes."""
    if not out.strip():
        raise ValueError("--out is empty: give a folder")
    folder = Path(out)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(
            f"reproduce: {folder} cannot be made ({error.strerror}); give another --out"
        ) from None
    return folder
