"""Ranks that do not fit into this machine's memory are refused before the first one starts.

A thousand ranks take a machine down with everything else on it: each is a Python with torch of its own. What
one takes of memory that no other shares, measured while `imbrex tune` and `imbrex demo` ran on the CPU: 160
to 235 MB, before tokens and experts. So an estimate that is too low refuses what cannot work, and nothing
that could.
"""

from __future__ import annotations

from pathlib import Path

RANK_BYTES = 200 * 10**6
MEMINFO = Path("/proc/meminfo")


def available_bytes(meminfo: Path = MEMINFO) -> int | None:
    """Memory that new processes can have without swapping; None where the system does not say it there."""
    try:
        lines = meminfo.read_text().splitlines()
    except OSError:
        return None
    kib = next((line.split()[1] for line in lines if line.startswith("MemAvailable:")), None)
    return None if kib is None else 1024 * int(kib)


SMALLER = "give fewer --tokens, or a smaller layer with --scale"


def why_not_start(
    num_ranks: int, available: int | None, layer_bytes: int = 0, smaller: str = SMALLER
) -> str | None:
    """Why `num_ranks` processes with torch, and what they hold together, do not fit into `available` bytes,
    or `None`. smaller: how to make the latter less."""
    needed = num_ranks * RANK_BYTES + layer_bytes
    if available is None or needed <= available:
        return None
    each = f"{RANK_BYTES // 10**6} MB each"
    if layer_bytes > needed - layer_bytes:
        what = f"{each}, and {_gigabytes(layer_bytes)} for weights and tokens"
        mend = smaller
    else:
        limit = max(1, available // RANK_BYTES)
        what = f"{each}, before tokens and experts"
        mend = f"start at most {limit} here, or spread them over several machines with torchrun"
    return (
        f"{num_ranks} ranks need some {_gigabytes(needed)} of memory ({what}), and this machine has "
        f"{_gigabytes(available)} available: {mend}"
    )


def _gigabytes(count: int) -> str:
    """Gigabytes, by whole numbers: a count as long as a line has no float."""
    tenths = (count + 5 * 10**7) // 10**8
    return f"{tenths // 10}.{tenths % 10} GB"


def check_memory(num_ranks: int, layer_bytes: int = 0, smaller: str = SMALLER) -> None:
    """Raise ValueError where `num_ranks` ranks cannot be held by this machine. layer_bytes: what they hold
    together, at least, beside what each takes; smaller: how to make that less."""
    reason = why_not_start(num_ranks, available_bytes(), layer_bytes, smaller)
    if reason is not None:
        raise ValueError(reason)
