"""Time-outs for waits of streams: a collective that does not complete on a GPU within its time-out is
aborted.

NCCL's `wait` only makes the stream wait, and returns, so a time-out of the host does not bound it. Torch's
own watchdog ends the process, after minutes. Here a stream writes its progress to a word of host memory, and
a thread reads it:

    stream   writes 2n - 1 | waits for the n-th collective | writes 2n
    thread   has read 2n - 1 for the whole time-out, or for a second while the program of a rank has ended
             with an exception: notes that the group is lost, aborts its communicator, and so lets the stream
             and a host that waits for it go on, over rows that have not come
    host     is told by the next thing that it does with the group: `refuse_lost`

- The time before a stream reaches a wait does not count: a host that runs ahead loses no peer.
- The thread makes no CUDA calls, so it disturbs no capture.
- A captured wait has a counter of its own that every replay increases before the wait and after it. If it is
odd, and the same for the whole time-out, a replay is stuck in the wait, and the group is lost. The
communicator stays in memory as long as the graph, whose later replays end at once, without results.
- A wait costs two writes of a stream; a captured one two small kernels and copies. The thread sleeps while
there is no wait to watch, and keeps looking while something is captured.
"""

from __future__ import annotations

import threading
import time
import warnings
import weakref
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from imbrex.runtime.compiling import who_compiles
from imbrex.runtime.roll import ASK_S, who_failed
from imbrex.runtime.streams import ReplayCounters, Word

LONGEST_TICK_S = 0.5
TICKS = 20
"""The least number of times that the thread looks within a time-out."""


@dataclass(frozen=True, slots=True)
class Wait:
    """The `number`-th wait of a stream. error: makes the exception to raise if it does not end."""

    number: int
    group: Any
    seconds: float
    error: Callable[[], Exception]


class Watched:
    """A stream that is watched: its word, and its waits that may not have ended, in order."""

    def __init__(self, word: Any) -> None:
        self.word, self.waits, self.count = word, deque[Wait](), 0
        self._standing, self._since = 0, 0.0

    def standing(self, now: float) -> tuple[Wait, float] | None:
        """The wait in which the stream is, and the seconds for which it has been seen there, or `None`. Waits
        that have ended are forgotten."""
        reached = self.word.value
        while self.waits and 2 * self.waits[0].number <= reached:
            self.waits.popleft()
        if not self.waits or reached < 2 * self.waits[0].number - 1:
            return None
        front = self.waits[0]
        if self._standing != front.number:
            self._standing, self._since = front.number, now
        return front, now - self._since

    def wait_again(self) -> None:
        """Wait for as long once more."""
        self._standing = 0


class Replayed:
    """A captured wait, watched by the counter that its replays increase. It does not keep the group alive."""

    def __init__(self, tallies: Any, index: int, wait: Wait) -> None:
        self.tallies, self.index, self.seconds, self.error = tallies, index, wait.seconds, wait.error
        self.group = weakref.ref(wait.group)
        self._standing, self._since = 0, 0.0

    def standing(self, now: float) -> tuple[Wait, float] | None:
        """The wait, if a replay is in it, and the seconds for which it has been seen there."""
        number, group = self.tallies[self.index], self.group()
        if self._standing != number:
            self._standing, self._since = number, now
        if group is None or number % 2 == 0:
            return None
        return Wait(number, group, self.seconds, self.error), now - self._since

    def wait_again(self) -> None:
        """Wait for as long once more."""
        self._standing = 0


class Deadlines:
    """All watched waits of this process, and the thread that watches them."""

    def __init__(self) -> None:
        self._streams: dict[Any, Watched] = {}
        self._tallies: dict[int, Any] = {}
        self._replayed: list[Replayed] = []
        self._changing = threading.Lock()
        self.lost: weakref.WeakKeyDictionary[Any, Exception] = weakref.WeakKeyDictionary()
        self._work = threading.Event()
        self._thread: threading.Thread | None = None
        self._tick, self._blind, self._question_s = LONGEST_TICK_S, False, 0.0

    def bound(
        self, wait: Callable[[], object], group: Any, seconds: float, error: Callable[[], Exception]
    ) -> None:
        """Call `wait()`, which makes the current stream wait, and watch it. error: makes the exception to
        raise if it does not end."""
        watched = self._begin()
        if watched is None:
            wait()
            return
        wait()
        watched.word.write(2 * watched.count)
        watched.waits.append(Wait(watched.count, group, seconds, error))
        self._watch(seconds)

    def bound_replays(
        self, wait: Callable[[], object], group: Any, seconds: float, error: Callable[[], Exception]
    ) -> None:
        """Call `wait()`, which is being captured, and watch it at every replay, as `bound` does once."""
        tallies = self._tallies.get(Word.current()[0])
        index = None if tallies is None else tallies.take()
        if tallies is None or index is None:
            why = "make one such call before it is captured" if tallies is None else "too many are captured"
            warnings.warn(f"a captured wait over NCCL is not bounded by timeout=: {why}", stacklevel=4)
            wait()
            return
        tallies.count(index)
        wait()
        tallies.count(index)
        with self._changing:
            self._replayed.append(Replayed(tallies, index, Wait(0, group, seconds, error)))
        self._watch(seconds)

    def _watch(self, seconds: float) -> None:
        self._tick = min(self._tick, seconds / TICKS)
        if self._thread is None:
            self._thread = threading.Thread(target=self._look, name="imbrex-deadlines", daemon=True)
            self._thread.start()
        self._work.set()

    def _begin(self) -> Watched | None:
        """Note that the current stream comes to a wait; None where it cannot."""
        if self._blind:
            return None
        try:
            key = Word.current()
            watched = self._streams.get(key)
            if watched is None:
                watched = self._streams[key] = Watched(Word())
                if key[0] not in self._tallies:
                    self._tallies[key[0]] = ReplayCounters()
            watched.word.write(2 * watched.count + 1)
        except (ImportError, RuntimeError) as error:
            self._blind = True
            warnings.warn(f"waits over NCCL are not bounded by timeout= here: {error}", stacklevel=4)
            return None
        watched.count += 1
        return watched

    def refuse_lost(self, group: Any) -> None:
        """Raise the noted exception of a group whose wait did not end."""
        error = None if group is None else self.lost.get(group)
        if error is not None:
            raise type(error)(*error.args)

    def _look(self) -> None:
        while True:
            self._work.wait()
            self._work.clear()  # what is queued from here on sets it again
            while self._pending():
                time.sleep(self._tick)

    def _pending(self) -> bool:
        now = time.monotonic()
        asks = now > self._question_s + ASK_S
        if asks:
            self._question_s = now
        for record in (*self._streams.values(), *self._replayed):
            wait, seconds = record.standing(time.monotonic()) or (None, 0.0)
            if wait is None:
                continue
            if asks and seconds > ASK_S and who_failed(wait.group):
                self._give_up(wait)
            elif seconds > wait.seconds:
                if who_compiles():
                    record.wait_again()
                else:
                    self._give_up(wait)
        self._forget(None)
        return bool(self._replayed) or any(watched.waits for watched in list(self._streams.values()))

    def _forget(self, group: Any) -> None:
        """Captured waits of a group; `None`: of those that are gone."""
        with self._changing:
            self._replayed = [watched for watched in self._replayed if watched.group() is not group]

    def _give_up(self, wait: Wait) -> None:
        self.lost[wait.group] = wait.error()
        for watched in list(self._streams.values()):
            others = [other for other in watched.waits if other.group is not wait.group]
            watched.waits.clear()
            watched.waits.extend(others)
        self._forget(wait.group)
        # Beside this thread: NCCL's may wait for graphs to go.
        threading.Thread(target=wait.group.abort, name="imbrex-abort", daemon=True).start()


deadlines = Deadlines()
