"""Commands in processes forked from a server with torch loaded: each is there at once, not after seconds of
imports. So are the ranks that they start."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from torch._C._distributed_c10d import TCPStore

from imbrex.cli import main
from tests import tracing
from tests.garbage import collect_seldom
from tests.ranks.branches import grow_branches
from tests.ranks.pool import TRACED, threads, warm

LIMIT_S = 240.0


class Forked:
    """A call in a process and a process group of its own; what it and its children write is in two files.
    branches: whether the first of the ranks that it starts counts its lines, too."""

    def __init__(
        self,
        call: Callable[..., Any],
        *arguments: Any,
        folder: Path,
        name: str = "",
        hidden: str = "",
        traced: bool = True,
        branches: bool = False,
        **environment: str,
    ) -> None:
        self.paths = folder / f"stdout{name}", folder / f"stderr{name}"
        for path in self.paths:
            path.write_text("")
        traced = traced and tracing.wanted()
        ours = call, arguments, environment, self.paths, hidden, traced, traced and branches
        self._process = warm().Process(target=_run, args=ours)
        self._process.start()
        self.pid = self._process.pid or 0

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self, timeout_s: float = LIMIT_S) -> int:
        self._process.join(timeout_s)
        code = self.poll()
        assert code is not None, f"still running after {timeout_s} s: {self.stderr}"
        return code

    @property
    def stdout(self) -> str:
        return self.paths[0].read_text()

    @property
    def stderr(self) -> str:
        return self.paths[1].read_text()


def gloo_threads(wait_s: float = 0.0) -> list[str]:
    """Those of gloo, waiting until there are none: one that was joined is seen for a moment longer."""
    until = time.monotonic() + wait_s
    while (names := [name for name in threads().values() if "gloo" in name]) and time.monotonic() < until:
        time.sleep(0.01)
    return names


def _execute(code: str, words: list[str]) -> None:
    sys.argv = ["-c", *words]
    exec(compile(code, "-c", "exec"), {"__name__": "__main__"})


def start_code(code: str, *words: str, folder: Path) -> Forked:
    return Forked(_execute, code, list(words), folder=folder, traced=False)


def run_code(code: str, *words: str, folder: Path) -> str:
    """What `code` prints, given these words, where torch is loaded and most of imbrex."""
    ran = start_code(code, *words, folder=folder)
    assert ran.wait() == 0, ran.stderr
    return ran.stdout


def _run_and_look(words: list[str]) -> int:
    code = main(words)
    names = gloo_threads(wait_s=5.0)
    assert not names, f"threads that may end the process: {names}"
    return code


def run_ranks(words: Sequence[str], *, ranks: int, folder: Path, hidden: str = "", **more: str) -> str:
    """`imbrex WORDS` on every rank, as an outer torchrun starts them; what they printed. No rank may end
    with a thread of its groups. more: of the environment."""
    ended = call_ranks(_run_and_look, list(words), ranks=ranks, folder=folder, hidden=hidden, **more)
    assert [one.poll() for one in ended] == [0] * ranks, "\n".join(one.stderr for one in ended)
    return "".join(one.stdout for one in ended)


def call_ranks(
    call: Callable[..., Any], *arguments: Any, ranks: int, folder: Path, hidden: str = "", **more: str
) -> list[Forked]:
    """The same call on every rank, in the environment of an outer torchrun: all have ended."""
    # A port that is looked for and let go of may be another's when the first rank comes for it.
    store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    everywhere = more | {
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": str(store.port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }
    started = []
    for rank in range(ranks):
        environment = {**everywhere, "RANK": rank, "LOCAL_RANK": rank}
        told = {name: str(value) for name, value in environment.items()}
        started.append(
            Forked(
                call,
                *arguments,
                folder=folder,
                name=f"-{rank}",
                hidden=hidden,
                traced=rank < TRACED,
                branches=False,
                **told,
            )
        )
    for one in started:
        one.wait()
    return started


def _run(
    call: Callable[..., Any],
    arguments: tuple[Any, ...],
    environment: dict[str, str],
    paths: Any,
    hidden: str,
    traced: bool,
    branches: bool,
) -> None:
    os.setsid()
    if not traced:
        tracing.stop()
    # Ranks that a launcher starts run the lines of those that no launcher did.
    for name in tracing.IN_PROCESSES:
        os.environ.pop(name, None)
    os.environ.update(environment)
    for stream, path in zip((sys.stdout, sys.stderr), paths, strict=True):
        stream.flush()
        os.dup2(os.open(path, os.O_WRONLY | os.O_APPEND), stream.fileno())
    for name in [name for name in sys.modules if hidden and name.split(".")[0] == hidden]:
        del sys.modules[name]
    if hidden:
        sys.modules[hidden] = None  # pyright: ignore[reportArgumentType]
    import torch

    torch.set_num_threads(1)
    collect_seldom()
    grow_branches(counts=branches)
    sys.exit(call(*arguments))
