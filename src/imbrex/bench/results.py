"""Result files: one per question, rows of many machines, each with its command, hardware and versions."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from imbrex.bench.machine import hardware, versions


def describe_run(
    command: str, ceilings: Mapping[str, float] | None = None, *, gpus: int | None = None
) -> dict[str, Any]:
    """A record that lets a reader repeat a run.

    ceilings: limits measured beside it (GB/s, TFLOP/s, TB/s). gpus: the GPUs of all ranks, where this one
    does not see those of the others.
    """
    here = hardware()
    return {
        "command": command,
        "commit": _commit(),
        "date": datetime.now(UTC).date().isoformat(),
        "hardware": here | {"count": gpus} if gpus and "gpu" in here else here,
        "versions": versions(),
        "ceilings": dict(ceilings or {}),
    }


def write_results(
    path: str | os.PathLike[str], question: str, run: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]
) -> None:
    """Put a run and its rows into the file at `path`.

    The rows of an earlier run of the same command on the same hardware are replaced, all others kept. The
    file is written beside its final name and renamed.
    Raises ValueError where the file holds something else.
    """
    path = Path(path)
    kept_runs, kept_rows = _read(path, question, run)
    number = max((old["id"] for old in kept_runs), default=-1) + 1
    runs = [*kept_runs, {"id": number, **run}]
    content = {
        "question": question,
        "runs": runs,
        "rows": [*kept_rows, *({"run": number, **row} for row in rows)],
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f"{path.name}.{os.getpid()}")
    try:
        draft.write_text(_layout(content), encoding="utf-8")
        draft.replace(path)
    finally:
        draft.unlink(missing_ok=True)


def check_results(path: str | os.PathLike[str], question: str) -> None:
    """Raise ValueError where `write_results` could not put a run there: to be asked before a run is made."""
    _read(Path(path), question, {"command": "", "hardware": None})


def check_file(option: str, path: str | None, **others: str | None) -> None:
    """Raise ValueError where the file that an option names cannot be written, or is that of another option,
    which reads or writes it: to be asked before the work whose results it gets. `None` is no file."""
    if path is None:
        return
    if path == "-":
        raise ValueError(f"--{option} -: a file is wanted; give its name, or /dev/stdout")
    at = Path(path)
    for other, name in others.items():
        if name and Path(name).resolve() == at.resolve() and (at.is_file() or not at.exists()):
            raise ValueError(f"--{option} {path}: --{other} is the same file; give another")
    if not path.strip() or at.is_dir() or (at.exists() and not os.access(at, os.W_OK)):
        raise ValueError(f"--{option} {path}: that is no file that can be written; give another")
    # Devices and pipes are written where they are; a file is written beside its name, and renamed.
    if (at.is_file() or not at.exists()) and not os.access(at.resolve().parent, os.W_OK):
        raise ValueError(f"--{option} {path}: its folder is missing or cannot be written; make it first")


def _read(path: Path, question: str, run: Mapping[str, Any]) -> tuple[list[dict], list[dict]]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        runs, rows, previous = content["runs"], content["rows"], content["question"]
    except FileNotFoundError:
        return [], []
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} is no result file ({error!r}); choose another name") from None
    if previous != question:
        raise ValueError(f"{path} answers {previous!r}, not {question!r}; choose another name")
    others = [r for r in runs if (r["command"], r["hardware"]) != (run["command"], run["hardware"])]
    ids = {r["id"] for r in others}
    return others, [row for row in rows if row["run"] in ids]


def _layout(content: Mapping[str, Any]) -> str:
    """JSON with a line for every run and row, so that a changed figure is a changed line."""
    parts = [f'{{"question": {json.dumps(content["question"])}']
    for name in ("runs", "rows"):
        lines = ",\n  ".join(json.dumps(entry) for entry in content[name])
        parts.append(f' "{name}": [\n  {lines}\n ]' if lines else f' "{name}": []')
    return ",\n".join(parts) + "}\n"


RESULTS = ":(top,exclude)benchmarks/results"


def _commit() -> str:
    """The revision, and whether files that git knows differ from it: results apart, which runs write. Of a
    tree that `git archive` wrote, the revision that it was."""
    try:
        revision = _git("describe", "--always")
        changed = _git("status", "--porcelain", "--untracked-files=no", "--", ":/", RESULTS)
    except (OSError, subprocess.TimeoutExpired):
        return "unknown"
    if revision:
        return revision + "-dirty" * bool(changed)
    archived = Path(__file__).with_name("revision.txt").read_text(encoding="utf-8").strip()
    return "unknown" if archived.startswith("$") else archived


def _git(*words: str) -> str:
    ran = subprocess.run(
        ["git", *words],
        cwd=Path(__file__).parent,
        capture_output=True,
        text=True,
        timeout=20,
        check=False,
    )
    return ran.stdout.strip()
