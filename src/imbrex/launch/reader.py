"""Handles a reader that stops reading what a process prints, as `head` in `imbrex plan | head`."""

from __future__ import annotations

import io
import os
import select
import signal
import sys

EXIT_UNREAD = 128 + signal.SIGPIPE
"""The exit code of a process that SIGPIPE ends."""


def unread() -> bool:
    """Whether standard output or error is a pipe whose reader has ended. From then on output is dropped, so
    that Python's last flush does not fail."""
    gone = [stream for stream in (1, 2) if _lost_its_reader(stream)]
    for stream in gone:
        print_nowhere(stream)
    return bool(gone)


def print_nowhere(stream: int) -> None:
    """Drop what is written to this file descriptor from now on."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, stream)
    os.close(nowhere)


def print_any_name() -> None:
    """Print letters that the terminal's encoding lacks, such as those of a file's name, as numbers. Otherwise
    they would end a command that has done its work."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def _lost_its_reader(stream: int) -> bool:
    looking = select.poll()
    looking.register(stream, 0)
    return any(event & (select.POLLERR | select.POLLHUP) for _, event in looking.poll(0))
