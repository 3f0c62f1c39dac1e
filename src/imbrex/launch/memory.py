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


def why_not_start(num_ranks: int, available: int | None) -> str | None:
    """None, or why `num_ranks` processes with torch do not fit into `available` bytes."""
    if available is None or num_ranks * RANK_BYTES <= available:
        return None
    # In whole numbers: a count as long as a line has no float.
    tenths, here = num_ranks * RANK_BYTES // 10**8, available / 1e9
    limit = max(1, available // RANK_BYTES)
    return (
        f"{num_ranks} ranks need some {tenths // 10}.{tenths % 10} GB of memory "
        f"({RANK_BYTES // 10**6} MB each, before tokens and experts), and this machine has {here:.1f} GB "
        f"available: start at most {limit} here, or spread them over several machines with torchrun"
    )


def check_memory(num_ranks: int) -> None:
    """Raise ValueError where `num_ranks` ranks cannot be held by this machine."""
    reason = why_not_start(num_ranks, available_bytes())
    if reason is not None:
        raise ValueError(reason)
