"""Threads of several ranks over shared words, for the counters of the fused kernels; every interleaving.

    Source   a kernel's text: a function's operations in the order in which they stand there
    Asm      makes a thread's steps of them
    Machine  the threads, explored by `imbrex.reproduce.interleavings.explore`

Memory is as late as fences allow: what a thread stores is `under way`, and a fault to read, until that thread
has waited for it (the copy engine's stores) and fenced. A step that touches its rank's words alone commutes
with all that other ranks do; where every thread of a rank is at one, only that rank goes on.

A wait for a flag and what follows it are one step: a flag only grows, so it may as well be looked at late.
With `mortal` that rank may die between any two steps of others' concern. Then, and only then, a wait may run
out of patience, and ends as the kernel's does.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import imbrex.kernels.jit

State = tuple[Any, ...]
Words = list[int]
Edits = Sequence[tuple[str, str, str]]
"""Faults: a file of the kernels, what it says once, and what it says instead."""

TALK = re.compile(
    r"\b(wait_\w+|tell\w*|fence_\w+|add_rel\w+|take_acquire_\w+|add_acq_rel_\w+|store_relaxed_sys|load_acquire_\w+"
    r"|named_barrier|atomicAdd|draw\w*|bulk_wait|leave_if_failed|give_up|spoil|end_call)(?=[<(])"
)
"""Whatever threads say to each other. A function that says more than its marks know has no model."""


ROOM = 160
"""Words of a machine, the most; they get their places where they are first met."""


class Source:
    """The text of the kernels, with faults put in."""

    def __init__(self, edits: Edits = ()) -> None:
        self.root, self.edits = Path(imbrex.kernels.jit.__file__).parent, edits

    def text(self, name: str) -> str:
        text = (self.root / name).read_text()
        for file, old, new in self.edits:
            if file == name:
                if text.count(old) != 1:
                    raise LookupError(f"{name} says {old!r} {text.count(old)} times, not once")
                text = text.replace(old, new)
        return re.sub(r"//[^\n]*", "", text)

    def body(self, name: str, head: str) -> str:
        """What stands in the braces behind `head`, which is said once."""
        text = self.text(name)
        if text.count(head) != 1:
            raise LookupError(f"{name} says {head!r} {text.count(head)} times, not once")
        at = begin = text.index("{", text.index(head)) + 1
        depth = 1
        while depth:
            depth += {"{": 1, "}": -1}.get(text[at], 0)
            at += 1
        return text[begin : at - 1]

    def order(self, name: str, head: str, marks: dict[str, str]) -> list[tuple[str, str]]:
        """The marks of a function in the order of its text, each with what its group says: a mark's name and
        the expression that is looked for. What nobody marked raises."""
        body, places, spans = self.body(name, head), [], []
        for mark, pattern in marks.items():
            for one in re.finditer(pattern, body):
                places.append((one.start(), mark, one.group(1) if one.groups() else ""))
                spans.append(one.span())
        for one in TALK.finditer(body):
            if not any(first <= one.start() < last for first, last in spans):
                raise LookupError(f"{name}, {head!r}: the model does not know {one.group()}")
        return [(mark, said) for _, mark, said in sorted(places)]


class Fault(Exception):
    """What must not happen."""


@dataclass(slots=True)
class Thread:
    """What a step may change: its place, the piece at hand, the next one, the call, cells it has stored."""

    pc: int
    number: int = -1
    next: int = -1
    aside: int = -1
    call: int = 1
    bad: int = 0
    issued: tuple[tuple[int, ...], ...] = ()
    landed: tuple[int, ...] = ()

    def packed(self) -> State:
        return (self.pc, self.number, self.next, self.aside, self.call, self.bad, self.issued, self.landed)


Act = Callable[[Words, Thread], "int | None"]
"""Changes words and thread; gives the place to go on at, or None for the next. Raises `Fault`."""


@dataclass(frozen=True, slots=True)
class Step:
    """silent: part of the step before. ready: what it waits for. leave: where it goes when it may wait no
    longer; None without an end. local: touches words of its rank alone."""

    name: str
    act: Act
    local: bool = False
    silent: bool = False
    ready: Callable[[Words, Thread], bool] | None = None
    leave: Any = None


@dataclass(slots=True)
class Asm:
    """The steps of a thread of a rank; labels are names until `steps`."""

    rank: int
    name: str
    made: list[Step] = field(default_factory=list)
    labels: dict[str, int] = field(default_factory=dict)
    unique: int = 0

    def label(self, name: str) -> None:
        self.labels[name] = len(self.made)

    def fresh(self, name: str) -> str:
        self.unique += 1
        return f"{name} {self.unique}"

    def add(self, name: str, act: Act = lambda w, t: None, **how: Any) -> None:
        self.made.append(Step(name, act, **how))

    def go(self, to: str, when: Callable[[Words, Thread], bool] = lambda w, t: True) -> None:
        self.add(f"go {to}", lambda w, t: self.labels[to] if when(w, t) else None, silent=True)

    def fence(self, words: dict[Any, int]) -> None:
        """What this thread has stored, and waited for, is there."""

        def act(w: Words, t: Thread) -> None:
            for at in t.landed:
                w[at] |= 1
            t.landed = ()

        self.add("fence", act, silent=True)

    def steps(self) -> list[Step]:
        return [
            step if step.leave is None else replace(step, leave=self.labels[step.leave]) for step in self.made
        ]


def store(w: Words, t: Thread, at: int, *, by_engine: bool = False) -> None:
    """A cell holds the call that wrote it last: twice the call, and 1 once that is there."""
    w[at] = 2 * t.call
    if by_engine:
        t.issued = (*t.issued, (at,))
    else:
        t.landed = (*t.landed, at)


def wait_stores(t: Thread, but: int) -> None:
    """All stores of the copy engine but the last ones have landed."""
    keep = len(t.issued) - but
    for cells in t.issued[: max(keep, 0)]:
        t.landed = (*t.landed, *cells)
    t.issued = t.issued[max(keep, 0) :]


def load(w: Words, t: Thread, at: int, what: str) -> None:
    if w[at] != 2 * t.call + 1:
        state = "is under way" if not w[at] % 2 and w[at] else f"is of call {w[at] // 2}"
        raise Fault(f"{what} {state}, in call {t.call}")


class Machine:
    """Threads and words. `words` gives every name a place; those of a rank have it first in their name."""

    def __init__(self, ranks: int, *, calls: int = 1, mortal: int | None = None) -> None:
        self.ranks, self.calls, self.mortal = ranks, calls, mortal
        self.places: dict[Any, int] = {}
        self.asms: list[Asm] = []
        self.programs: list[list[Step]] = []
        self.checks: list[Callable[[Words, int, bool], str | None]] = []
        for rank in range(ranks):
            for name in ("status", "gave", "dead", "epoch", "left"):
                self.word(rank, name)

    def word(self, *name: Any) -> int:
        return self.places.setdefault(name, len(self.places))

    def thread(self, rank: int, name: str) -> Asm:
        self.asms.append(Asm(rank, name))
        return self.asms[-1]

    def give_up(self, w: Words, rank: int) -> None:
        """`give_up` of peers/protocol.cuh: the first failure, and a word to every peer."""
        if w[self.word(rank, "status")]:
            return
        w[self.word(rank, "status")] = 1
        for p in range(self.ranks):
            if p != rank:
                w[self.word(p, "gave")] = 1

    def failed(self, w: Words, rank: int) -> bool:
        return bool(w[self.word(rank, "status")] or w[self.word(rank, "gave")])

    def end_call(self, asm: Asm, reset: Callable[[Words], None]) -> None:
        """All threads of a rank; the last one checks and closes the call. The next starts at `begin`."""
        left, epoch, rank = self.word(asm.rank, "left"), self.word(asm.rank, "epoch"), asm.rank

        def leave(w: Words, t: Thread) -> None:
            w[left] += 1
            if w[left] < sum(a.rank == rank for a in self.asms):
                return
            for check in self.checks:
                wrong = check(w, rank, self.failed(w, rank))
                if wrong:
                    raise Fault(wrong)
            w[left] = 0
            w[epoch] += 1
            reset(w)

        def again(w: Words, t: Thread) -> int | None:
            if t.call == self.calls:
                return None
            t.call += 1
            t.number = t.next = t.aside = -1
            t.bad = 0
            return asm.labels["begin"]

        asm.add("end", leave, local=self.mortal is None)
        asm.add("next call", again, local=True, ready=lambda w, t: w[epoch] >= t.call)

    def first(self) -> State:
        self.programs = [asm.steps() for asm in self.asms]
        words = [0] * ROOM
        threads = [Thread(0) for _ in self.asms]
        for i in range(len(threads)):
            self._run_silent(words, threads[i], i)
        return tuple(words), tuple(t.packed() for t in threads), None

    def alike(self, state: State) -> State:
        return state

    def fault(self, state: State, *, last: bool) -> str | None:
        words, threads, fault = state
        if fault is not None or not last:
            return fault
        stuck = [
            f"{self.asms[i].name} of rank {self.asms[i].rank} at {self.programs[i][t[0]].name}"
            for i, t in enumerate(threads)
            if t[0] < len(self.programs[i]) and not words[self.word(self.asms[i].rank, "dead")]
        ]
        return f"for ever: {', '.join(stuck)}" if stuck else None

    def moves(self, state: State) -> Iterator[State]:
        words, threads, fault = state
        if fault is not None:
            return
        alone = self._rank_alone(words, threads)
        for i, asm in enumerate(self.asms):
            if words[self.word(asm.rank, "dead")] or (alone is not None and asm.rank != alone):
                continue
            yield from self._step(state, i)
        if alone is None and self.mortal is not None and not words[self.word(self.mortal, "dead")]:
            after = list(words)
            after[self.word(self.mortal, "dead")] = 1
            yield tuple(after), threads, None

    def _rank_alone(self, words: Any, threads: Any) -> int | None:
        """A rank all of whose threads are at steps of its own, one of which can be taken."""
        for rank in range(self.ranks):
            if words[self.word(rank, "dead")]:
                continue
            can = False
            for i, asm in enumerate(self.asms):
                if asm.rank != rank or threads[i][0] == len(self.programs[i]):
                    continue
                step = self.programs[i][threads[i][0]]
                ready = step.ready is None or step.ready(words, Thread(*threads[i]))
                if not step.local or (not ready and self.mortal is not None):
                    break
                can |= ready
            else:
                if can:
                    return rank
        return None

    def _step(self, state: State, i: int) -> Iterator[State]:
        words, threads, _ = state
        place, rank = threads[i][0], self.asms[i].rank
        if place == len(self.programs[i]):
            return
        step = self.programs[i][place]
        if step.ready is not None and not step.ready(words, Thread(*threads[i])):
            if step.leave is None or not (
                self.failed(words, rank) or any(words[self.word(p, "dead")] for p in range(self.ranks))
            ):
                return
            after, thread = list(words), Thread(*threads[i])
            self.give_up(after, rank)
            thread.pc, thread.bad = step.leave, 1
            yield self._after(after, threads, thread, i)
            return
        yield self._after(list(words), threads, Thread(*threads[i]), i, step)

    def _after(self, words: Words, threads: Any, thread: Thread, i: int, step: Step | None = None) -> State:
        try:
            if step is not None:
                self._take(step, words, thread)
            self._run_silent(words, thread, i)
        except Fault as fault:
            return tuple(words), threads, f"rank {self.asms[i].rank}, {self.asms[i].name}: {fault}"
        return tuple(words), (*threads[:i], thread.packed(), *threads[i + 1 :]), None

    @staticmethod
    def _take(step: Step, words: Words, thread: Thread) -> None:
        to = step.act(words, thread)
        thread.pc = thread.pc + 1 if to is None else to

    def _run_silent(self, words: Words, thread: Thread, i: int) -> None:
        program = self.programs[i]
        while thread.pc < len(program):
            step = program[thread.pc]
            if not step.silent or (step.ready is not None and not step.ready(words, thread)):
                return
            self._take(step, words, thread)
