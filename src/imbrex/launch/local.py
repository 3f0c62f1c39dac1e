"""Starts local ranks by torchrun's elastic launcher, and ends a rank that fails with a report."""

from __future__ import annotations

import errno
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from imbrex.launch.memory import check_memory
from imbrex.launch.parent import end_with_parent
from imbrex.launch.reader import unread
from imbrex.observe import death
from imbrex.observe.board import Phase, read_board

if TYPE_CHECKING:
    import torch

_LAUNCHED = "IMBREX_LAUNCHED"
"""The launcher's process id, in the environment of its ranks."""
EXIT_REFUSED, EXIT_FAILED, EXIT_INTERRUPTED = 2, 1, 130
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)


def is_worker() -> bool:
    """Whether a launcher (this package's or an outer torchrun) started this process as a rank."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def is_launched() -> bool:
    """Whether this package's launcher started this process as a rank."""
    return is_worker() and _LAUNCHED in os.environ


def meet(store: str | None) -> torch.device:
    """Join the process group of a launcher's ranks: gloo on CPUs, NCCL on GPUs. Returns this rank's device,
    the GPU with the number LOCAL_RANK.

    store: a file where the ranks meet; by default they meet at MASTER_ADDR. Raises ValueError if no launcher
    started this process.
    """
    import torch
    import torch.distributed as dist

    if "RANK" not in os.environ:
        raise ValueError("no launcher started this; use imbrex netlab run -- SCRIPT, or torchrun")
    meeting: dict[str, Any] = {}
    if store is not None:
        ranks = {"rank": int(os.environ["RANK"]), "world_size": int(os.environ["WORLD_SIZE"])}
        meeting = {"init_method": f"file://{store}", **ranks}
    if not torch.cuda.is_available():
        dist.init_process_group("gloo", **meeting)
        return torch.device("cpu")
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", **meeting)
    return device


def end_with_launcher() -> None:
    """Make this rank end when this package's launcher ends, even by SIGKILL. Nothing else would end it."""
    if is_launched():
        end_with_parent(int(os.environ[_LAUNCHED]))


def complain(sentence: str) -> None:
    """Print the sentence with which a command ends, to standard error."""
    print(f"imbrex: error: {sentence}", file=sys.stderr, flush=True)


def launch(
    arguments: Sequence[str], *, num_ranks: int, board: Path, timeout_s: float, hint: Callable[[], str]
) -> int:
    """Run `imbrex ARGUMENTS` on `num_ranks` local ranks and wait. Returns the exit code.

    If a rank dies, the run ends with a sentence that names it and says where it was, read from `board`,
    followed by `hint()`, advice what to do. Raises ValueError for more ranks than this machine can hold.
    """
    check_memory(num_ranks)
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import elastic_launch

    # torchrun's own words on a failure; ours say more. Its loggers each have a level of their own.
    logging.disable(logging.ERROR)
    death.forget(board)
    os.environ[_LAUNCHED] = str(os.getpid())
    # One thread a rank, as torchrun: with another number sums take another order, and curves part.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    reaper = _Reaper(board)
    try:
        elastic_launch(_config(num_ranks), sys.executable)("-m", "imbrex", *arguments)
    except ChildFailedError as error:
        exit_codes = {rank: failure.exitcode for rank, failure in error.failures.items()}
        return _report(exit_codes, reaper.ended, board, timeout_s, hint())
    except Exception as error:
        # torchrun's own exception for a signal that it handled, and Python's for Ctrl-C
        if type(error).__name__ != "SignalException":
            raise
        return _interrupted(hint())
    except KeyboardInterrupt:
        return _interrupted(hint())
    finally:
        reaper.close()
        logging.disable(logging.NOTSET)
        if sys.stdout.isatty():
            # A rank that ended early may have left the cursor hidden.
            print("\x1b[?25h", end="", flush=True)
    return 0


def _config(num_ranks: int):
    from torch.distributed.launcher.api import LaunchConfig

    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=num_ranks,
        run_id="imbrex",
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        local_addr="localhost",
        max_restarts=0,
        monitor_interval=0.1,
    )
    # torch 2.11 does not know it; its ranks get 30 s to end.
    if hasattr(config, "shutdown_timeout"):
        config.shutdown_timeout = 5
    return config


def _interrupted(hint: str) -> int:
    complain(f"interrupted; {hint}")
    return EXIT_INTERRUPTED


class _Reaper:
    """Ends ranks that still run two seconds after another left a note: torchrun waits 30 s for a rank that
    hangs too hard to hear SIGTERM. `ended` are the ranks it killed."""

    def __init__(self, board: Path) -> None:
        self.ended: set[int] = set()
        self._board, self._over = board, threading.Event()
        self._thread = threading.Thread(target=self._run, name="imbrex-reaper", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._over.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._over.wait(0.5):
            notes = death.read_notes(self._board)
            if not notes or time.time() - notes[0].wall_s < 2:
                continue
            for phase in read_board(self._board):
                if phase.alive:
                    self.ended.add(phase.rank)
                    with suppress(ProcessLookupError):
                        os.kill(phase.pid, signal.SIGKILL)


def _report(exit_codes: dict[int, int], reaped: set[int], board: Path, timeout_s: float, hint: str) -> int:
    notes = death.read_notes(board)
    noted = {note.rank for note in notes}
    died = {rank: -code for rank, code in exit_codes.items() if code < 0 and code != -signal.SIGTERM}
    killed = {rank: number for rank, number in died.items() if rank not in reaped}
    if not notes and EXIT_REFUSED in exit_codes.values():
        # Refused before there was room for a note: a rank has said why.
        return EXIT_REFUSED
    phases = {phase.rank: phase for phase in read_board(board)}
    dead = [phases[rank] for rank in sorted(killed) if rank in phases and rank not in noted]
    silent = [phases[rank] for rank in sorted(reaped - noted)]
    cause = death.first_cause(notes)
    if dead:
        complain(f"{death.death_sentence(dead, how=_how(dead, killed))}; {hint}")
        return EXIT_FAILED
    if killed:
        rank, number = min(killed.items())
        complain(f"rank {rank} was killed by signal {number} before it began; {hint}")
        return EXIT_FAILED
    if silent and cause is not None and cause.kind not in death.CAUSES:
        complain(f"{death.death_sentence(silent, how=death.silence(timeout_s))}; {hint}")
        return EXIT_FAILED
    if cause is not None and cause.kind == death.REFUSED:
        complain(cause.sentence)
        return EXIT_REFUSED
    if cause is not None:
        complain(f"{cause.sentence}; {hint}")
    else:
        complain(f"ranks {sorted(exit_codes)} ended early and left no note; {hint}")
    return EXIT_FAILED


def _how(dead: Sequence[Phase], killed: dict[int, int]) -> str:
    number = killed[dead[0].rank]
    return f"was killed by {signal.Signals(number).name}"


class Rank:
    """The end of a rank, in every case: it leaves a note for the launcher or, under torchrun, prints the
    sentence itself.

    hint: advice what to do after a failure. files: the option that names the folder of the command's files,
    such as "--out".
    """

    def __init__(
        self,
        board: Path,
        *,
        rank: int,
        num_ranks: int,
        timeout_s: float,
        hint: Callable[[], str],
        files: str,
    ) -> None:
        self.board, self.rank, self.num_ranks, self.timeout_s = board, rank, num_ranks, timeout_s
        self.hint, self.files = hint, files
        self.launched = is_launched()

    def run(self, work: Callable[[], None]) -> int:
        """Run `work`, then leave its process groups. Returns the exit code; if it is not 0, process groups
        still exist."""
        from imbrex.runtime.waits import leave

        watch = death.Watch(
            self.board,
            rank=self.rank,
            num_ranks=self.num_ranks,
            timeout_s=self.timeout_s,
            ended=self._lost,
        )
        try:
            work()
            leave()
        except KeyboardInterrupt:
            return EXIT_INTERRUPTED
        except ValueError as error:
            self._end(death.REFUSED, _line(error), speaks=False)
            return EXIT_REFUSED
        except OSError as error:
            if isinstance(error, BrokenPipeError) and unread():
                self._end(death.FAILED, f"nobody reads what rank {self.rank} prints", speaks=True)
                return EXIT_FAILED
            sentence = f"{_line(error)}: {_mend(error, self.files)}"
            self._end(death.REFUSED, sentence, speaks=True)
            return EXIT_REFUSED
        except Exception as error:  # noqa: BLE001 - the last stop of a rank: said in a sentence, kept in a note
            self._explain(error)
            return EXIT_FAILED
        watch.close()
        return 0

    def _explain(self, error: Exception) -> None:
        if _is_network(error):
            self._lost(None, death.LOST)
            return
        where = next((str(phase) for phase in read_board(self.board) if phase.rank == self.rank), "set-up")
        path = self.board / f"rank-{self.rank:05d}.traceback"
        sentence = f"rank {self.rank} failed in {where}: {_line(error)} (traceback in {path})"
        self._end(death.FAILED, sentence, speaks=True)

    def _lost(self, sentence: str | None, kind: str) -> None:
        own = f"rank {self.rank} lost its peers, and nothing on this host says why"
        # A full disk must not keep a rank from ending.
        with suppress(OSError):
            death.leave_note(self.board, self.rank, kind, sentence or own)
        if self.launched:
            return
        if sentence is None:
            sentence = death.find_lost(self.board, num_ranks=self.num_ranks, timeout_s=self.timeout_s) or own
            with suppress(OSError):
                death.leave_note(self.board, self.rank, kind, sentence)
        others_spoke = any(note.kind in death.CAUSES for note in death.read_notes(self.board))
        speaker = death.speaker(self.board, self.num_ranks)
        # The lowest rank alive speaks; it may be gone before another looks, and its watch may see it too.
        if not others_spoke and speaker in (self.rank, None) and death.may_speak(self.board):
            complain(f"{sentence}; {self.hint()}")

    def _end(self, kind: str, sentence: str, *, speaks: bool) -> None:
        try:
            death.leave_note(self.board, self.rank, kind, sentence)
            launcher_tells = self.launched
        except OSError:
            # No launcher will read it.
            speaks, launcher_tells = True, False
        if launcher_tells:
            return
        # What all ranks refuse is said by the first, since another may lose its peers before it comes so far.
        first = death.may_speak(self.board)
        if speaks or first:
            complain(sentence if kind == death.REFUSED else f"{sentence}; {self.hint()}")


def _is_network(error: Exception) -> bool:
    import torch.distributed as dist

    from imbrex.runtime.waits import RankLostError

    lost = (RankLostError, dist.DistBackendError, dist.DistNetworkError, dist.DistStoreError)
    words = ("gloo", "Connection", "NCCL", "Timed out", "timed out")
    return isinstance(error, lost) or (
        isinstance(error, RuntimeError) and any(word in str(error) for word in words)
    )


def _mend(error: OSError, files: str) -> str:
    """Advice for an error of the system."""
    if error.errno in _FULL:
        return f"free the disk or choose another {files}"
    if error.errno in (errno.EMFILE, errno.ENFILE):
        return "raise the limit of open files (ulimit -n)"
    if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        return f"give rights to it, or choose another {files}"
    if error.filename is not None:
        return f"see what is there, or choose another {files}"
    return "the system refused it, no file is named"


def _line(error: Exception) -> str:
    if isinstance(error, OSError) and error.strerror:
        return f"{error.strerror}: {error.filename}" if error.filename else error.strerror
    text = " ".join(str(error).split())
    return text if isinstance(error, ValueError | OSError) else f"{type(error).__name__}: {text[:300]}"
