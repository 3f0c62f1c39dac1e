"""Launches on record: made once by the code that makes them, and again without it.

    with recording() as tape:
        kernels.dispatch_expert(...)                      # whatever launches, launches, and is on the tape
    launch = tape[0].again({(1, "route.ids"): 0, (1, "pull.x"): 1})
    launch.launch(ids_TK.data_ptr(), x_TD.data_ptr())     # the same, with other addresses in two fields

A graph's host side, so to say: shapes, grids and the memory between kernels are what they were. Who keeps a
record knows that they are. Only what is given to `note` is on a tape.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple

_tape: ContextVar[list[Any] | None] = ContextVar("imbrex_tape", default=None)
running = 0
"""Tapes that run, of all threads: who launches looks here before it makes a note, which nearly never is."""


class Noted(NamedTuple):
    """A launch as it was asked for. how: what `Kernel.launch` takes besides its arguments."""

    kernel: Any
    args: Sequence[Any]
    how: dict[str, Any]

    def again(self, blanks: Mapping[tuple[int, str], int] | None = None) -> Any:
        """Something to `launch`, with addresses in the order of the numbers of `blanks`: by the place of the
        argument, a struct, and the name of its field, nested ones behind points; or of a tensor, and no
        name."""
        if not blanks:
            return self.kernel.prepare(args=self.args, **self.how)
        places = sorted(blanks, key=lambda place: blanks[place])
        tensors = {number for number, name in places if not name}
        args = [ctypes.c_uint64() if number in tensors else arg for number, arg in enumerate(self.args)]
        words = [(number, word_of(type(args[number]), name) if name else 0) for number, name in places]
        return self.kernel.blank(args=args, words=words, **self.how)


def repeatable(tape: Sequence[Any]) -> tuple[Any, ...]:
    """Launches that stood on a tape, each to `launch` again as it was."""
    return tuple(launch.again() if isinstance(launch, Noted) else launch for launch in tape)


@contextmanager
def recording() -> Iterator[list[Any]]:
    """Launches inside, of this thread, are on the tape as well."""
    global running
    tape: list[Any] = []
    token = _tape.set(tape)
    running += 1
    try:
        yield tape
    finally:
        running -= 1
        _tape.reset(token)


def note(launch: Any) -> None:
    """Put it on the tape, if one runs: `Noted`, or what launches itself again."""
    tape = _tape.get()
    if tape is not None:
        tape.append(launch)


def launch(kernel: Any, args: Sequence[Any], how: dict[str, Any]) -> None:
    """A launch that is on a tape, too, if one runs. how: as of `Noted`."""
    kernel.launch(args=args, **how)
    if running:
        note(Noted(kernel, args, how))


def word_of(kind: Any, name: str) -> int:
    """Which of the words of eight bytes of a struct is the pointer `name`."""
    offset = 0
    for part in name.split("."):
        offset += getattr(kind, part).offset
        kind = kind.kinds[part]
    assert offset % 8 == 0
    return offset // 8
