"""Whether anybody reads what a process prints: of `imbrex plan | head` the reader ends first."""

from __future__ import annotations

import os
import select
import signal

EXIT_UNREAD = 128 + signal.SIGPIPE
"""The exit code, that of a process that SIGPIPE ends."""


def unread() -> bool:
    """Whether standard output or error is a pipe whose reader has gone; what is printed there goes nowhere
    from then on, so that Python does not stumble over it once more at its end."""
    gone = [stream for stream in (1, 2) if _lost_its_reader(stream)]
    for stream in gone:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, stream)
        os.close(nowhere)
    return bool(gone)


def _lost_its_reader(stream: int) -> bool:
    looking = select.poll()
    looking.register(stream, 0)
    return any(event & (select.POLLERR | select.POLLHUP) for _, event in looking.poll(0))
