"""The current phase of every rank, in a small mapped file per rank that outlives the rank.

A process that is killed by SIGKILL cannot report anything. But pages that it has mapped as shared belong to
the kernel. So what it wrote last can be read by the launcher, by other ranks, or by anyone who can read the
directory.
"""

from __future__ import annotations

import mmap
import os
import socket
import struct
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

_RECORD = struct.Struct("<8sqqqqqq32s64s")
_MAGIC = b"imbrex01"
_WHERE = struct.Struct("<qqq32s")
_WHERE_AT = struct.calcsize("<8sqqq")


@dataclass(frozen=True, kw_only=True, slots=True)
class Phase:
    """The last phase that a rank wrote. step, layer: -1 if there is none. wall_s: seconds since the epoch."""

    rank: int
    pid: int
    host: str
    started_s: float
    step: int
    layer: int
    wall_s: float
    name: str

    @property
    def alive(self) -> bool | None:
        """Whether the process still runs; `None` for a process of another host, which cannot be asked."""
        if self.host != socket.gethostname():
            return None
        try:
            stat = Path(f"/proc/{self.pid}/stat").read_text()
        except FileNotFoundError:
            return _answers(self.pid)
        except OSError:
            return False
        return stat.rpartition(")")[2].split()[0] not in "ZX"

    def __str__(self) -> str:
        place = f"step {self.step}" if self.step >= 0 else "set-up"
        if self.layer >= 0:
            place += f", layer {self.layer}"
        return f"{place}, phase {self.name}"


def _answers(pid: int) -> bool:
    if Path("/proc/self/stat").exists():
        return False
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


class PhaseBoard:
    """This rank's record in `directory`. Writing costs about a microsecond and no system call.

    One writer; a reader may see a record half-written, which mixes the fields of two neighbouring phases.
    """

    def __init__(self, directory: str | os.PathLike[str], rank: int) -> None:
        path = _path(directory, rank)
        path.parent.mkdir(parents=True, exist_ok=True)
        self.step = -1
        host = socket.gethostname().encode()[:64]
        record = (_MAGIC, rank, os.getpid(), time.time_ns(), -1, -1, time.time_ns(), b"start", host)
        draft = path.with_suffix(".draft")
        draft.write_bytes(_RECORD.pack(*record))
        draft.replace(path)
        with path.open("r+b") as file:
            self._map = mmap.mmap(file.fileno(), _RECORD.size)

    def write(self, name: str, layer: int = -1) -> None:
        """Record that this rank is now in phase `name` (at most 32 bytes) of `layer`."""
        _WHERE.pack_into(self._map, _WHERE_AT, self.step, layer, time.time_ns(), name.encode())

    def close(self) -> None:
        self._map.close()


def _path(directory: str | os.PathLike[str], rank: int) -> Path:
    return Path(directory) / f"rank-{rank:05d}.phase"


def read_board(directory: str | os.PathLike[str]) -> tuple[Phase, ...]:
    """The records of all ranks that wrote to `directory`, by rank."""
    phases = []
    for path in sorted(Path(directory).glob("rank-*.phase")):
        record = path.read_bytes()
        if len(record) != _RECORD.size or not record.startswith(_MAGIC):
            continue
        _, rank, pid, started_ns, step, layer, wall_ns, name, host = _RECORD.unpack(record)
        phases.append(
            Phase(
                rank=rank,
                pid=pid,
                host=host.rstrip(b"\0").decode(errors="replace"),
                started_s=started_ns / 1e9,
                step=step,
                layer=layer,
                wall_s=wall_ns / 1e9,
                name=name.rstrip(b"\0").decode(errors="replace"),  # cut off, or half-written
            )
        )
    return tuple(phases)


def find_dead(phases: Iterable[Phase]) -> tuple[Phase, ...]:
    """The ranks of this host whose process has ended without writing that it was done. The age of a record is
    not considered: mapped pages reach other hosts late, and a rank may compute for long."""
    return tuple(phase for phase in phases if phase.name != "done" and phase.alive is False)
