"""Kernel 3 as threads: the counters of its parts, pieces by ticket, peers' flags, credit."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from tests.emulated.counters import Asm, Source, Thread, Words, load, store, wait_stores
from tests.emulated.fused_counters import DOWN, SUMMERS, Kernel, tell_piece


def down_home(
    source: Source,
    groups: Sequence[int],
    tiles: Sequence[int],
    *,
    behind: bool = True,
    **how: Any,
) -> Kernel:
    """Kernel 3. tiles: the part of each, in the order in which they are drawn. behind: the
    multiplying warp sums as well, not only the idle one."""
    machine = Kernel(source, groups, **how)
    body = machine.body(
        DOWN,
        "down_and_sums(const",
        {
            "tell_started": r"tell_started\(",
            "few": r"if \(down.beside && !summers\.run<Few>\(\)\) spoil\(",
            "consume": r"\bconsume<C>",
            "many": r"if \(!summers\.run<Many>\(\)\) spoil\(",
            "end": r"end_call\(",
        },
    )
    for rank in range(machine.ranks):
        for name, marks in (
            ("idle warp", ("tell_started", "few")),
            ("multiplying warp", ("consume", "many")),
        ):
            asm = machine.thread(rank, name)
            asm.label("begin")
            for mark, _ in body:
                if mark == "tell_started" and mark in marks:
                    machine.tell_started(asm)
                elif mark == "consume" and mark in marks:
                    publish(machine, asm, tiles)
                elif mark in marks and (mark == "few" or behind):
                    Summers(machine, asm, tiles).run()
                    machine.spoil(asm)
                elif mark == "end":
                    machine.end_call(asm, machine.reset(rank))
    machine.checks.append(machine.whole)
    return machine


HALVES = "gemm/halves.cuh", "void consume_halves(const"
STORED = {
    "bulk_wait": r"bulk_wait<([\w:]+)>\(",
    "tell": r"\btell\(\)",
    "changes": r"if \(tile\.together != list\)",
    "part": r"\b(?:part|list) = [^,]+, rows_sent = (\w+)",
    "count": r"rows_sent \+= rows",
    "ended": r"sink\.ended",
}


def publish(
    machine: Kernel,
    asm: Asm,
    tiles: Sequence[int],
    file: str = DOWN,
    stops: Callable[[], None] | None = None,
) -> None:
    """`consume` with the sink `Publish` of a file: tiles, and the counters of their parts. stops: makes what
    stands behind a tile where a block may draw no other one."""
    source, rank = machine.source, asm.rank
    at = machine.word(rank, "tile")

    def draw(w: Words, t: Thread) -> None:
        t.number = w[at]
        w[at] += 1

    def put(w: Words, t: Thread) -> None:
        store(w, t, machine.word(rank, "row", t.number, tiles[t.number]), by_engine=True)

    def begin(w: Words, t: Thread) -> None:
        t.aside, t.next = (-1 if file == DOWN else 0), 0  # a part, and its tiles that were not told of

    asm.add("no tiles yet", begin, silent=True)
    asm.label("tiles")
    asm.add("draw a tile", draw, local=True)
    asm.go("no tiles", lambda w, t: t.number >= len(tiles))
    asm.add("store a tile", put, silent=True)
    for mark, said in source.order(file, "void sent(const Slot& tile", STORED):
        _publish_step(machine, asm, mark, said, tiles, file)
    if stops is not None:
        stops()
    asm.go("tiles")
    asm.label("no tiles")
    consume = ("gemm/run.cuh", "void consume(const") if file == DOWN else HALVES
    end = source.body(*consume).rpartition("sink.sent(")[2]
    for mark in ("bulk_wait", "ended") if end.find("bulk_wait<0>") < end.find("sink.ended") else ("ended",):
        if mark == "bulk_wait":
            _publish_step(machine, asm, mark, "0", tiles, file)
            continue
        for inner, said in source.order(file, "void ended(int thread) const", STORED):
            _publish_step(machine, asm, inner, said, tiles, file)


def _publish_step(machine: Kernel, asm: Asm, mark: str, said: str, tiles: Sequence[int], file: str) -> None:
    if mark == "bulk_wait":
        asm.add(mark, lambda w, t: wait_stores(t, 0 if said == "0" else 1), silent=True)
    elif mark == "changes":
        asm.go(f"count {asm.unique}", lambda w, t: tiles[t.number] == t.aside)
    elif mark == "count":
        asm.label(f"count {asm.unique - 1}")
        asm.add(mark, lambda w, t: setattr(t, "next", t.next + 1), silent=True)
    elif mark == "part":

        def change(w: Words, t: Thread) -> None:
            t.aside, t.next = tiles[t.number], int(said == "rows")

        asm.add(mark, change, silent=True)
    else:
        past = asm.fresh("nothing to tell")
        asm.go(past, lambda w, t: t.next == 0)
        marks = {"engine": r"fence_async\(", "fence": r"fence_gpu\(", "add": r"add_relaxed_gpu\("}

        def add(w: Words, t: Thread) -> None:
            w[machine.word(asm.rank, "written", t.aside)] += t.next

        for inner, _ in machine.source.order(file, "void tell() const", marks):
            if inner == "fence":
                asm.fence(machine.places)
            elif inner == "add":
                asm.add("add to the part's counter", add, local=True)
        asm.label(past)


RUN = {
    "failed": r"!failed\(",
    "credit": r"!wait_credit\(call, [^,]+, (\d)\)",
    "first": r"u32 number = uniform\(draw_ahead\(\)\)",
    "loop": r"while \(number < bag\.all\)",
    "next": r"const u32 next = draw_ahead\(\)",
    "find": r"find_job\(number\)",
    "written": r"!wait_written\(",
    "reduced": r"if \(job\.home && !wait_reduced\(call, job\.flag\)\)",
    "sum": r"sum_piece<F>\(",
    "tell": r"if \(!job\.home\) tell\(\)",
    "go on": r"number = uniform\(next\)",
}


class Summers:
    """`Summers::run`, of one warp."""

    def __init__(self, machine: Kernel, asm: Asm, tiles: Sequence[int]) -> None:
        self.machine, self.asm, self.tiles, self.me = machine, asm, tiles, asm.rank
        self.others, self.own = machine.bag(asm.rank)
        self.begin, self.end = asm.fresh("pieces"), asm.fresh("no pieces")

    def job(self, t: Thread) -> tuple[int, int, int, int]:
        """Whether at home, part, source, group of tokens."""
        ranks, parts = self.machine.ranks, self.machine.parts
        return self.machine.arithmetic("job", t.number, self.me, ranks, parts, self.others, self.own)

    def at_home(self, w: Words, t: Thread) -> bool:
        return bool(self.job(t)[0])

    def is_written(self, w: Words, t: Thread) -> bool:
        parts = range(self.job(t)[1] + 1)
        return all(w[self.machine.word(self.me, "written", p)] >= self.tiles.count(p) for p in parts)

    def is_reduced(self, w: Words, t: Thread) -> bool:
        _, part, _, group = self.job(t)
        return self.machine.flags_are_there(self.me, (group, part), w, t)

    def load_rows(self, w: Words, t: Thread) -> None:
        part = self.job(t)[1]
        for tile in (tile for tile, its in enumerate(self.tiles) if its == part):
            load(w, t, self.machine.word(self.me, "row", tile, part), f"tile {tile}")

    def add(self, w: Words, t: Thread) -> None:
        self.load_rows(w, t)
        _, part, _, group = self.job(t)
        self.machine.add_own(self.me, (group, part), w, t)

    def reduce(self, w: Words, t: Thread) -> None:
        self.load_rows(w, t)
        _, part, source, group = self.job(t)
        store(w, t, self.machine.partial(source, self.me, group, part, t.call))

    def tell(self, w: Words, t: Thread) -> None:
        _, part, source, group = self.job(t)
        w[self.machine.flag(source, self.me, group, part)] = t.call

    def run(self) -> None:
        order = self.machine.source.order(SUMMERS, "bool run() const", RUN)
        for i, (mark, said) in enumerate(order):
            self._begin(mark, said)
            self._piece(mark, waited=i > 0 and order[i - 1][0] == "reduced")
        self.asm.label(self.end)

    def _begin(self, mark: str, said: str) -> None:
        if mark == "failed":
            self.machine.fail_early(self.asm, self.end)
        elif mark == "credit":
            self.machine.credit(self.asm, int(said), self.end)
        elif mark == "first":
            self.machine.draw(self.asm, "number", 0)
        elif mark == "loop":
            self.asm.label(self.begin)
            every = (self.others + self.own) * self.machine.parts
            self.asm.go(self.end, lambda w, t: t.number >= every)

    def _piece(self, mark: str, *, waited: bool) -> None:
        asm, past = self.asm, self.asm.fresh("past")
        if mark == "next":
            self.machine.draw(asm, "next", 0)
        elif mark == "written":
            leaves = self.machine.counting_ends(SUMMERS, "bool wait_written(int part) const")
            leave = self.end if leaves else None
            asm.add("wait for a part", local=True, ready=self.is_written, leave=leave)
        elif mark == "reduced":
            asm.go(past, lambda w, t: not self.at_home(w, t))
            self.machine.wait(asm, "for peers' sums", self.is_reduced, self.end)
        elif mark == "sum":
            other = asm.fresh("others")
            asm.go(other, lambda w, t: not self.at_home(w, t))
            asm.add("add an own piece", self.add, silent=waited)
            asm.go(past)
            asm.label(other)
            asm.add("sum another's piece", self.reduce)
        elif mark == "tell":
            asm.go(past, self.at_home)
            tell_piece(self.machine, asm, SUMMERS, "void tell() const", self.tell)
        elif mark == "go on":
            asm.add(mark, lambda w, t: setattr(t, "number", t.next), silent=True)
            asm.go(self.begin)
        asm.label(past)
