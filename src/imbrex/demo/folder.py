"""The output folder of a run: which files are the run's, and which of them it may replace.

A run owns the names that its `run.json` lists. It begins where none of them is there, or where those that
are belong to an earlier run. Nothing else is ever written to or removed.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import os
import re
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from imbrex.balancer.report import JOURNAL, METRICS

RUN_FILE, CHECKPOINT, RANKS, BALANCE = "run.json", "checkpoint", "ranks", "balance.html"
NEEDED_BYTES = 100 << 20
_FORMAT = "imbrex demo 1"
_held: dict[Path, int] = {}
_OF_RANKS = re.compile(r"rank-\d{5}\.(phase|draft|note|note-draft|traceback)|spoken")


@dataclass(frozen=True, kw_only=True, slots=True)
class Earlier:
    """A run that wrote to the folder before. settings: its own by flag; files: the names that it owns."""

    settings: Mapping[str, Any]
    files: frozenset[str]


def files_of(args: argparse.Namespace) -> tuple[str, ...]:
    """The names that a run with these settings writes."""
    names = (METRICS, "summary.json", "trace.json", "report.html", CHECKPOINT, RANKS)
    return (*names, JOURNAL, BALANCE) if args.balance else names


def earlier(out: Path) -> Earlier | None:
    """The run that wrote to `out`, or `None`. Raises ValueError for a `run.json` of anybody else's."""
    try:
        written = json.loads((out / RUN_FILE).read_text())
        if written["wrote"] != _FORMAT:
            raise ValueError("another format")
        return Earlier(settings=dict(written["settings"]), files=frozenset(map(str, written["files"])))
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise ValueError(f"cannot read {out / RUN_FILE}: {error.strerror}: choose another --out") from None
    except (ValueError, KeyError, TypeError):
        raise ValueError(
            f"{out / RUN_FILE} is of no run of this version's demo, or damaged: choose another --out"
        ) from None


def check(out: Path, args: argparse.Namespace) -> None:
    """Raise ValueError where the run must not write to `out`. Changes nothing."""
    before = earlier(out)
    if args.resume and args.overwrite:
        raise ValueError(
            "--resume goes on with the earlier run and --overwrite replaces it: give one of them"
        )
    if args.resume and before is None:
        raise ValueError(f"there is no run to resume in {out}: leave out --resume")
    owned = frozenset() if before is None else before.files
    strange = [name for name in files_of(args) if name not in owned and _strange(out / name)]
    if strange:
        raise ValueError(
            f"--out {out} holds {' and '.join(strange)}, which no run of the demo wrote: choose another --out"
        )
    worth = [name for name in owned - {RANKS} if os.path.lexists(out / name)]
    if worth and not (args.resume or args.overwrite):
        raise ValueError(
            f"--out {out} holds an earlier run: give --resume to go on with it, --overwrite to replace it, "
            "or another --out"
        )


def _strange(path: Path) -> bool:
    if path.name != RANKS or path.is_symlink() or not path.is_dir():
        return os.path.lexists(path)
    # Ranks under an outer torchrun write here before the first of them has claimed the folder.
    return any(not _OF_RANKS.fullmatch(entry.name) for entry in path.iterdir())


def prepare(out: Path, args: argparse.Namespace, settings: Sequence[str]) -> None:
    """Make the folder and claim it for this run. An earlier run stays whole until `begin`.

    settings: the flags to write down.
    """
    try:
        out.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=out) as file:
            file.write(b"imbrex")
        free = shutil.disk_usage(out).free
        if free < NEEDED_BYTES:
            raise ValueError(
                f"--out {out} has {free >> 20} MiB left and a run needs {NEEDED_BYTES >> 20}: "
                "free some, or choose another --out"
            )
        _take(out)
        check(out, args)
        (out / RANKS).mkdir(exist_ok=True)
        if earlier(out) is None:
            _write(out, args, settings)
    except OSError as error:
        raise ValueError(f"cannot write to --out {out}: {error.strerror}: choose another --out") from None


def _take(out: Path) -> None:
    """Hold the folder until this process ends. Raises ValueError where another run holds it."""
    place = out.resolve()
    if place in _held:
        return
    folder = os.open(place, os.O_RDONLY)
    try:
        fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(folder)
        raise ValueError(
            f"--out {out} belongs to a run that has not ended: wait for it, or choose another --out"
        ) from None
    except OSError:
        # A disk that knows no locks.
        os.close(folder)
        return
    _held[place] = folder


def begin(out: Path, args: argparse.Namespace, settings: Sequence[str]) -> None:
    """Replace the earlier run's files, or its settings where this run goes on with it.

    Called when nothing is left that could refuse the new run: its model is there, its ranks have met.
    """
    from imbrex.parallel import checkpoint

    before = earlier(out)
    if before is not None and not args.resume:
        checkpoint.clear(out / CHECKPOINT)
        for name in before.files - {CHECKPOINT, RANKS}:
            (out / name).unlink(missing_ok=True)
    elif args.balance:
        # The balancer's journal is of one start of a run: a resumed one begins with the experts in order.
        (out / JOURNAL).unlink(missing_ok=True)
    _write(out, args, settings)


def _write(out: Path, args: argparse.Namespace, settings: Sequence[str]) -> None:
    before = earlier(out)
    old = before.files if before is not None and args.resume else frozenset()
    run = {
        "wrote": _FORMAT,
        "files": sorted(old | {*files_of(args)}),
        "settings": {name: getattr(args, name) for name in settings},
    }
    draft = out / f".{RUN_FILE}.draft"
    draft.write_text(json.dumps(run, indent=2) + "\n")
    draft.replace(out / RUN_FILE)


def hint(out: Path, args: argparse.Namespace) -> str:
    """Advice after a run that ended early."""
    from imbrex.parallel import checkpoint

    if args.overwrite and _is_still_there(out, args):
        return f"the earlier run in {out} is as it was"
    if checkpoint.latest(out / CHECKPOINT) is None:
        return "it ended before its first checkpoint: start anew, with --overwrite"
    return "give --resume to go on from the last complete checkpoint"


def _is_still_there(out: Path, args: argparse.Namespace) -> bool:
    """Whether the run that was to be replaced is still there."""
    try:
        before = earlier(out)
    except ValueError:
        return False
    return before is not None and any(getattr(args, name) != was for name, was in before.settings.items())
