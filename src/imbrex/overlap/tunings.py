"""Results of tuning that outlive a process: one small JSON file a result, in imbrex's cache folder.

    tunings = Tunings()                                         # ~/.cache/imbrex/tuned
    tunings.write("fused", subject, {"stage": 64, "sums": 16})  # None, or why it could not be kept
    tunings.read("fused", subject, parse).value                 # or None; `complaint`: what was ignored

A subject is all that a result depends on: the layer, its ranks, the bucket of tokens, and `machine`. A
file's name is a digest of decision and subject, and the file repeats both, so that what lies there under
another's name is not taken for a result. A file is written beside its place and renamed: of several writers
the last one's stays, whole. Whatever is wrong with a file, nothing fails: it is ignored with a sentence, and
measured anew.
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
"""Rooms that a call runs through: of their source its time depends."""
NETLAB = "IMBREX_NETLAB_COMMAND"
"""Names the network of `imbrex netlab`, which is not this machine's."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Reading:
    """A kept result, its file and its day. complaint: why what the file holds is ignored."""

    path: Path
    value: dict[str, Any] | None = None
    date: str = ""
    complaint: str | None = None


class Tunings:
    """A folder of results."""

    def __init__(self, folder: Path | str | None = None) -> None:
        self.folder = cache_directory().parent / "tuned" if folder is None else Path(folder)

    def path_of(self, decision: str, subject: Mapping[str, Any]) -> Path:
        text = json.dumps([FORMAT, decision, subject], sort_keys=True)
        return self.folder / f"{decision}-{hashlib.sha256(text.encode()).hexdigest()[:24]}.json"

    def read(
        self, decision: str, subject: Mapping[str, Any], parse: Callable[[dict[str, Any]], object]
    ) -> Reading:
        """The result of a decision. parse: raises ValueError, TypeError or KeyError for what is none."""
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
            return Reading(path=path, complaint=f"{path} was ignored: it cannot be read ({error.strerror})")
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            why = " ".join(f"{type(error).__name__}: {error}".split())
            return Reading(path=path, complaint=f"{path} was ignored: it holds no result of this ({why})")
        return Reading(path=path, value=value, date=date)

    def write(self, decision: str, subject: Mapping[str, Any], value: Mapping[str, Any]) -> str | None:
        """Keep a result. None, or why it could not be kept."""
        path = self.path_of(decision, subject)
        content = {"decision": decision, "subject": subject, "value": value}
        content |= {"date": time.strftime("%Y-%m-%d")}
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:
                file.write((json.dumps(content, indent=1) + "\n").encode())
            os.replace(file.name, path)
        except OSError as error:
            return f"{path} could not be written ({error.strerror})"
        # Such files are private to begin with; a folder may be several users'.
        with suppress(OSError):
            path.chmod(0o644)
        return None


def machine(device: torch.device) -> dict[str, str]:
    """Describes what a time depends on besides the layer and its ranks."""
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
    else:
        name = f"{processor()}, {os.cpu_count()} cores, {torch.get_num_threads()} threads"
    network = os.environ.get(NETLAB, "")
    return {"device": name, "network": network, "torch": torch.__version__, "source": source_digest()}


def processor() -> str:
    """The name of this machine's processor."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


@functools.cache
def source_digest() -> str:
    """Digests the source that a call runs through: of changed code nothing that was kept counts."""
    package, digest = Path(__file__).parent.parent, hashlib.sha256()
    for room in ROOMS:
        for path in sorted((package / room).rglob("*")):
            if path.suffix in (".py", ".cu", ".cuh"):
                digest.update(f"{path.relative_to(package)}\0".encode() + path.read_bytes())
    return digest.hexdigest()[:16]


__all__ = ["Reading", "Tunings", "machine", "processor", "source_digest"]
