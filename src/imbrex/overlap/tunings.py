"""A folder of tuning results that outlive a process: a small JSON file for each, in imbrex's cache folder.

    tunings = Tunings()                                         # ~/.cache/imbrex/tuned
    tunings.write("fused", subject, {"stage": 64, "sums": 16})  # None, or why it could not be written
    tunings.read("fused", subject, parse).value                 # None if there is none; `problem` says why

A subject is all that a result depends on: the layer, its ranks, the size class of its tokens, and `machine`.
The name of a file is a hash of the decision and the subject, and the file repeats both, so that a renamed or
copied file is not taken for another result. A file is written under another name and then renamed, so if
several processes write it, one of them wins, and the file is whole. Nothing fails because of a bad file: it
is ignored, with a sentence that says why, and the result is measured again.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import platform
import tempfile
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from imbrex.kernels.jit import cache_directory

FORMAT = 1
ROOMS = ("codec", "exchange", "experts", "kernels", "overlap", "runtime", "schedule", "transport")
"""Folders of the package whose source code a call runs, so that its time depends on them."""
NETLAB = "IMBREX_NETLAB_COMMAND"
"""The variable that names the emulated network of `imbrex netlab`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Reading:
    """The result in a file, `None` if there is none, and the date on which it was written. problem: why the
    file was ignored, if it was."""

    path: Path
    value: dict[str, Any] | None = None
    date: str = ""
    problem: str | None = None


class Tunings:
    """A folder of results."""

    def __init__(self, folder: Path | str | None = None) -> None:
        self.folder = cache_directory().parent / "tuned" if folder is None else Path(folder)

    def path_of(self, decision: str, subject: Mapping[str, Any]) -> Path:
        """The file of a result, whether or not it exists."""
        text = json.dumps([FORMAT, decision, subject], sort_keys=True)
        return self.folder / f"{decision}-{hashlib.sha256(text.encode()).hexdigest()[:24]}.json"

    def read(
        self, decision: str, subject: Mapping[str, Any], parse: Callable[[dict[str, Any]], object]
    ) -> Reading:
        """The result for a decision. parse: raises ValueError, TypeError or KeyError if the JSON is no such
        result."""
        path = self.path_of(decision, subject)
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
            if (content["decision"], content["subject"]) != (decision, subject):
                raise ValueError("it is of another decision, layer, machine or version")
            value, date = content["value"], str(content["date"])
            parse(value)
        except FileNotFoundError:
            return Reading(path=path)
        except OSError as error:
            return Reading(path=path, problem=f"{path} was ignored: it cannot be read ({error.strerror})")
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            why = " ".join(f"{type(error).__name__}: {error}".split())
            return Reading(path=path, problem=f"{path} was ignored: it holds no result of this ({why})")
        return Reading(path=path, value=value, date=date)

    def write(self, decision: str, subject: Mapping[str, Any], value: Mapping[str, Any]) -> str | None:
        """Write a result. Returns `None`, or why it could not be written."""
        path = self.path_of(decision, subject)
        content = {"decision": decision, "subject": subject, "value": value}
        content |= {"date": time.strftime("%Y-%m-%d")}
        draft = None
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as draft:
                draft.write((json.dumps(content, indent=1) + "\n").encode())
            os.replace(draft.name, path)
        except OSError as error:
            if draft is not None:
                Path(draft.name).unlink(missing_ok=True)
            return f"{path} could not be written ({error.strerror})"
        # A temporary file can be read by its owner alone, and several users may share the folder.
        with suppress(OSError):
            path.chmod(0o644)
        return None


def machine(device: torch.device) -> dict[str, str]:
    """All that a time depends on besides the layer and its ranks: the processor or GPU, the emulated
    network, and the versions of torch and of imbrex's source."""
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
    else:
        name = f"{processor()}, {os.cpu_count()} cores, {torch.get_num_threads()} threads"
    network = os.environ.get(NETLAB, "")
    return {"device": name, "network": network, "torch": torch.__version__, "source": source_digest()}


def processor() -> str:
    """The name of this machine's processor, such as "Intel(R) Xeon(R) Platinum 8480+"."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


@functools.cache
def source_digest() -> str:
    """A hash of the source code in `ROOMS`. Results of other code are not used."""
    package, digest = Path(__file__).parent.parent, hashlib.sha256()
    for room in ROOMS:
        for path in sorted((package / room).rglob("*")):
            if path.suffix in (".py", ".cu", ".cuh"):
                digest.update(f"{path.relative_to(package)}\0".encode() + path.read_bytes())
    return digest.hexdigest()[:16]


__all__ = ["Reading", "Tunings", "machine", "processor", "source_digest"]
