"""Pythons that a forked command starts are forked from it, with torch and its compiler loaded: a rank that
imports them anew takes four seconds of processor. README's demo and `imbrex doctor` start theirs as users do.
"""

from __future__ import annotations

import inspect
import logging
import os
import runpy
import signal
import subprocess
import sys
import traceback
from collections.abc import Mapping
from typing import Any

from torch.distributed.elastic.multiprocessing.subprocess_handler import subprocess_handler

from tests import tracing

HIGHEST_FD = 1024


class Branch(subprocess.Popen[Any]):
    """As `Popen`; of this Python, a fork that runs what the words say. counts: whether the lines of rank 0
    are counted."""

    counts = False

    def _execute_child(self, *given: Any) -> None:
        plain = super()._execute_child  # pyright: ignore[reportAttributeAccessIssue]
        how = inspect.signature(plain).bind(*given).arguments
        if how["args"][0] != sys.executable:
            plain(*given)
            return
        sys.stdout.flush()
        sys.stderr.flush()
        self.pid = os.fork()
        if self.pid == 0:
            _be(how)
        self._child_created = True
        names = "p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite"
        self._close_pipe_fds(*(how[name] for name in names))  # pyright: ignore[reportAttributeAccessIssue]


def grow_branches(*, counts: bool) -> None:
    """From now on, in this process and in its launchers of torch's."""
    subprocess.Popen, Branch.counts = Branch, counts
    subprocess_handler.Popen = Branch  # pyright: ignore[reportPrivateImportUsage]


def _be(how: Mapping[str, Any]) -> None:
    """The child, from its first step to its last."""
    code: Any = 1
    try:
        if not Branch.counts or (how["env"] or {}).get("RANK") != "0":
            tracing.stop()
        _forget_the_parent(how)
        _run(list(how["args"][1:]))
        code = 0
    except SystemExit as end:
        code = 0 if end.code is None else end.code
        if not isinstance(code, int):
            sys.stderr.write(f"{code}\n")
            code = 1
    except BaseException:  # noqa: BLE001 - the child ends here, whatever it was
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _forget_the_parent(how: Mapping[str, Any]) -> None:
    """Its handlers of signals, open files, environment and session, as a program that is executed does."""
    for number in signal.valid_signals():
        if callable(signal.getsignal(number)):
            signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
    logging.disable(logging.NOTSET)
    for stream, fd in enumerate((how["p2cread"], how["c2pwrite"], how["errwrite"])):
        if fd != -1:
            os.dup2(fd, stream)
    os.closerange(3, HIGHEST_FD)
    if how["env"] is not None:
        os.environ.clear()
        os.environ.update(how["env"])
    if how["cwd"] is not None:
        os.chdir(how["cwd"])
    if how["start_new_session"]:
        os.setsid()
    if how["preexec_fn"] is not None:
        how["preexec_fn"]()


def _run(words: list[str]) -> None:
    """The words behind the name of Python."""
    if words[0] == "-u":
        del words[0]
        sys.stdout.reconfigure(line_buffering=True)  # pyright: ignore[reportAttributeAccessIssue]
    if words[0] == "-m":
        sys.argv = words[1:]
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
    elif words[0] == "-c":
        sys.argv = ["-c", *words[2:]]
        exec(compile(words[1], "-c", "exec"), {"__name__": "__main__"})
    else:
        sys.argv = words
        runpy.run_path(words[0], run_name="__main__")
