"""Whether anybody reads what a process prints: of `imbrex plan | head` the reader ends first."""

from __future__ import annotations

import io
import os
import select
import signal
import sys

EXIT_UNREAD = 128 + signal.SIGPIPE
"""The exit code, that of a process that SIGPIPE ends."""


def unread() -> bool:
    """Whether standard output or error is a pipe whose reader has gone; what is printed there goes nowhere
    from then on, so that Python does not stumble over it once more at its end."""
    gone = [stream for stream in (1, 2) if _lost_its_reader(stream)]
    for stream in gone:
        print_nowhere(stream)
    return bool(gone)


def print_nowhere(stream: int) -> None:
    """Lose, in silence, what is written to this file descriptor from now on."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, stream)
    os.close(nowhere)


def print_any_name() -> None:
    """Letters that the terminal's encoding does not have, of a file's name for instance, are printed as their
    numbers: without this they would end a command that has done its work."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def _lost_its_reader(stream: int) -> bool:
    looking = select.poll()
    looking.register(stream, 0)
    return any(event & (select.POLLERR | select.POLLHUP) for _, event in looking.poll(0))
