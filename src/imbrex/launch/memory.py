"""Refuses ranks that do not fit into this machine's memory, before the first one starts.

Every rank is a Python process with its own torch, and a thousand of them would make the whole machine stop. A
rank takes 160 to 235 MB that it shares with no other, measured while `imbrex tune` and `imbrex demo` ran on
the CPU, before tokens and experts. The estimate here is a lower bound, so nothing that could run is refused.
"""

from __future__ import annotations

from pathlib import Path

RANK_BYTES = 200 * 10**6
MEMINFO = Path("/proc/meminfo")


def available_bytes(meminfo: Path = MEMINFO) -> int | None:
    """The memory that new processes can have without swapping, in bytes; `None` if the system does not
    say."""
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
    """Why `num_ranks` processes with torch, and the `layer_bytes` that they hold together, do not fit into
    `available` bytes, or `None`. smaller: advice how to need less."""
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
    ranks = "1 rank needs" if num_ranks == 1 else f"{num_ranks} ranks need"
    return (
        f"{ranks} some {_gigabytes(needed)} of memory ({what}), and this machine has "
        f"{_gigabytes(available)} available: {mend}"
    )


def _gigabytes(count: int) -> str:
    """Gigabytes, by whole numbers: a count as long as a line has no float."""
    tenths = (count + 5 * 10**7) // 10**8
    return f"{tenths // 10}.{tenths % 10} GB"


def check_memory(num_ranks: int, layer_bytes: int = 0, smaller: str = SMALLER) -> None:
    """Raise ValueError if this machine's memory cannot hold `num_ranks` ranks. layer_bytes: what they hold
    together at least, besides torch. smaller: advice how to need less."""
    reason = why_not_start(num_ranks, available_bytes(), layer_bytes, smaller)
    if reason is not None:
        raise ValueError(reason)
