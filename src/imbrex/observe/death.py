"""The sentence with which a run ends if a rank is lost: which rank, and where it was.

Gloo's error says "connection reset", and NCCL's nothing. The phase board says where every rank was, `/proc`
which processes have ended, and notes that ranks leave tell a rank that failed by itself from one that lost a
peer.
"""

from __future__ import annotations

import json
import os
import selectors
import signal
import socket
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from imbrex.observe.board import Phase, find_dead, read_board

LOST, STOPPED, FAILED, REFUSED = "lost", "stopped", "failed", "refused"
"""Kinds of a note: a peer was lost; this rank was told to stop, first or because of another; it failed; the
input was refused, on every rank alike."""
CAUSES = FAILED, REFUSED

_SPOKEN = "spoken"
_LEFT = (".phase", ".draft", ".note", ".note-draft", ".traceback")
_NOTE_BYTES = 4096
_EXIT_TERMINATED = 128 + signal.SIGTERM


@dataclass(frozen=True, kw_only=True, slots=True)
class Note:
    """The note that a rank leaves behind when it ends early. wall_s: seconds since the epoch."""

    rank: int
    kind: str
    sentence: str
    wall_s: float


def reserve_note(directory: str | os.PathLike[str], rank: int) -> None:
    """Take the room for this rank's note, so that a rank which dies of a full disk can still say so."""
    _draft(directory, rank).write_text(" " * _NOTE_BYTES)


def leave_note(directory: str | os.PathLike[str], rank: int, kind: str, sentence: str) -> None:
    """Write this rank's note, and the traceback of the exception being handled beside it.

    Raises OSError where there is no room for the note; a traceback without room goes to stderr.
    """
    path, draft = Path(directory) / f"rank-{rank:05d}.note", _draft(directory, rank)
    note = Note(rank=rank, kind=kind, sentence=sentence[: _NOTE_BYTES // 2], wall_s=time.time())
    with draft.open("r+" if draft.exists() else "w") as file:
        file.write(json.dumps(asdict(note)).ljust(_NOTE_BYTES))
    draft.replace(path)
    try:
        path.with_suffix(".traceback").write_text(traceback.format_exc())
    except OSError:
        if kind == FAILED:
            traceback.print_exc()


def _draft(directory: str | os.PathLike[str], rank: int) -> Path:
    return Path(directory) / f"rank-{rank:05d}.note-draft"


def read_notes(directory: str | os.PathLike[str]) -> tuple[Note, ...]:
    """All notes in `directory`, the earliest first."""
    notes = (Note(**json.loads(path.read_text())) for path in Path(directory).glob("rank-*.note"))
    return tuple(sorted(notes, key=lambda note: note.wall_s))


def forget(directory: str | os.PathLike[str], rank: int | None = None) -> None:
    """Remove what an earlier run left in `directory`, of `rank` or of all. Rank 0 forgets who spoke."""
    for path in Path(directory).glob("rank-*" if rank is None else f"rank-{rank:05d}.*"):
        if path.suffix in _LEFT:
            path.unlink(missing_ok=True)
    if not rank:
        (Path(directory) / _SPOKEN).unlink(missing_ok=True)


def may_speak(directory: str | os.PathLike[str]) -> bool:
    """Whether nobody who shares `directory` has told the user yet: true for the first who asks, once, and
    for all where nobody can write there."""
    try:
        (Path(directory) / _SPOKEN).touch(exist_ok=False)
    except FileExistsError:
        return False
    except OSError:
        return True
    return True


def death_sentence(dead: Sequence[Phase], *, how: str = "died") -> str:
    """One sentence: which ranks, and the step, layer and phase of each."""
    ranks = " and ".join(f"rank {p.rank} (pid {p.pid} on {p.host}) {how} in {p}" for p in dead)
    return f"{ranks}, and the run cannot go on without it"


def silence(timeout_s: float) -> str:
    """The end of a sentence about a rank that is not known to be dead."""
    return f"did not answer for {timeout_s:g} s"


def find_lost(
    directory: str | os.PathLike[str], *, num_ranks: int, timeout_s: float, patience_s: float = 1.0
) -> str | None:
    """The sentence for a run that lost a rank, as far as this host can tell; `None` if it cannot.

    A rank of this host whose process is gone without a note is dead. A rank that was told to stop before
    anybody had lost a peer is the one that others lost. If there is none after `patience_s`, ranks that left
    no note although others say that they lost a peer did not answer.
    """
    until = time.monotonic() + patience_s
    while True:
        phases = [phase for phase in read_board(directory) if phase.rank < num_ranks]
        notes = read_notes(directory)
        noted = {note.rank for note in notes}
        unnoted = [phase for phase in phases if phase.rank not in noted and phase.name != "done"]
        if dead := find_dead(unnoted):
            return death_sentence(dead)
        if notes and notes[0].kind == STOPPED:
            return notes[0].sentence
        if time.monotonic() > until:
            break
        time.sleep(0.05)
    silent = [phase for phase in unnoted if phase.pid != os.getpid()]
    if silent and noted:
        return death_sentence(silent, how=silence(timeout_s))
    return None


def speaker(directory: str | os.PathLike[str], num_ranks: int) -> int | None:
    """The rank that tells the user: the lowest that still runs on this host."""
    alive = [phase.rank for phase in read_board(directory) if phase.rank < num_ranks and phase.alive]
    return min(alive, default=None)


class Watch:
    """A thread that ends this process when it is told to stop or a peer of this host is gone.

    The main thread may sit in a collective that no signal reaches. SIGTERM (a launcher stopping the ranks
    after a death) and a peer that has been gone for two looks both lead to `ended(sentence, kind of note)`,
    then to the end of the process with exit code 143.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        *,
        rank: int,
        num_ranks: int,
        timeout_s: float,
        ended: Callable[[str, str], None],
        look_every_s: float = 1.0,
    ) -> None:
        self._directory, self._rank, self._num_ranks = directory, rank, num_ranks
        self._timeout_s, self._ended, self._look_every_s = timeout_s, ended, look_every_s
        self._reader, self._writer = socket.socketpair()
        self._writer.setblocking(False)
        signal.set_wakeup_fd(self._writer.fileno(), warn_on_full_buffer=False)
        self._before = signal.signal(signal.SIGTERM, lambda *_: None)
        self._thread = threading.Thread(target=self._run, name="imbrex-watch", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop watching; SIGTERM does again what it did before."""
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGTERM, self._before)
        self._writer.send(b"\0")
        self._thread.join()
        self._reader.close()
        self._writer.close()

    def _run(self) -> None:
        gone_before: set[int] = set()
        with selectors.DefaultSelector() as selector:
            selector.register(self._reader, selectors.EVENT_READ)
            while True:
                received = self._reader.recv(64) if selector.select(self._look_every_s) else b""
                if b"\0" in received:
                    return
                gone = self._gone()
                if signal.SIGTERM in received:
                    self._end("was told to stop by SIGTERM", STOPPED)
                if gone & gone_before:
                    self._end("lost a peer", LOST)
                gone_before = gone

    def _gone(self) -> set[int]:
        phases = (phase for phase in read_board(self._directory) if phase.rank < self._num_ranks)
        return {phase.rank for phase in phases if phase.alive is False and phase.name != "done"}

    def _end(self, how: str, kind: str) -> None:
        patience_s = 0.2
        sentence = find_lost(
            self._directory, num_ranks=self._num_ranks, timeout_s=self._timeout_s, patience_s=patience_s
        )
        own = [phase for phase in read_board(self._directory) if phase.rank == self._rank]
        self._ended(sentence or (death_sentence(own, how=how) if own else f"rank {self._rank} {how}"), kind)
        os._exit(_EXIT_TERMINATED)


def first_cause(notes: Iterable[Note]) -> Note | None:
    """The note that tells most: of a rank that failed or refused its input, before one that lost a peer."""
    notes = tuple(notes)
    causes = [note for note in notes if note.kind in CAUSES]
    return next(iter(causes or notes), None)
