"""Both products of experts as threads: who notes tiles, the warp that tells of them, who waits for parts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tests.emulated.counters import Asm, Fault, Machine, Source, Thread, Words, load, store, wait_stores

PARTS, BEHIND = "gemm/parts.cuh", "gemm/behind.cu"
NOTE = {
    "bulk_wait": r"bulk_wait<kPending>\(",
    "add": r"if \(rows_sent > 0\) ptx::add_release_cta\(&done\.rows",
    "none": r"rows_sent = 0",
}
SINK = {
    "note": r"note<([^>]+)>\(",
    "part": r"part = .+, rows_sent = rows",
    "ended": r"add_release_cta\(&done\.ended",
}
TELL = {
    "ended": r"ended \+= static_cast<int>\(ptx::take_acquire_cta\(&done\.ended\)\)",
    "last": r"last = __shfl_sync\(",
    "rows": r"ptx::take_acquire_cta\(word\)",
    "engine": r"fence_async\(",
    "fence": r"fence_gpu\(",
    "add": r"add_relaxed_gpu\(progress",
}
WAIT = {"wait": r"while \(ptx::load_acquire_gpu\(progress \+ part\) != full", "engine": r"fence_async\("}
RESET = {
    "count": r"atomicAdd\(progress \+ kParts, 1u\) == (gridDim\.x - 1|0)",
    "reset": r"progress\[i\] = 0",
    "launches": r"wait_for_launches\(",
    "next": r"launch_dependents\(",
}


def parts(source: Source, tiles: Sequence[Sequence[int]], *, loads: int = 2, calls: int = 1) -> Machine:
    """A block of the first product and `loads` blocks of the second. tiles: of every group, the part of each;
    -1: one in which the group has no rows. A tile is a row."""
    machine = Products(source, tiles, loads, calls=calls)
    for group in range(len(tiles)):
        machine.notes(machine.thread(0, f"group {group}"), group)
    machine.tells(machine.thread(0, "who tells"))
    for block in range(loads):
        machine.waits(machine.thread(0, f"block {block} behind"))
    for asm in machine.asms:
        machine.end_call(asm, machine.clear)
    machine.checks.append(machine.zeros)
    return machine


class Products(Machine):
    CLEARED: tuple[str, ...] = ("noted", "handed", "ended", "blocks")

    def __init__(self, source: Source, tiles: Sequence[Sequence[int]], loads: int, *, calls: int) -> None:
        super().__init__(1, calls=calls)
        self.source, self.tiles, self.loads = source, tiles, loads
        self.due = [sum(of.count(part) for of in tiles) for part in range(1 + max(map(max, tiles)))]
        self.noted = [(g, part) for g in range(len(tiles)) for part in range(len(self.due))]

    def row(self, group: int, tile: int) -> int:
        return self.word(0, "row", group, tile)

    def rows_of(self, group: int, part: int) -> list[int]:
        return [self.row(group, i) for i, of in enumerate(self.tiles[group]) if of == part]

    def cells_of(self, group: int, part: int) -> list[int]:
        """What a group stores of a part."""
        return self.rows_of(group, part)

    def notes(self, asm: Asm, group: int) -> None:
        """`NoteTiles` of a group: thread.number is its part, thread.next the tile that was not told of."""
        asm.label("begin")
        asm.add("no tile", lambda w, t: setattr(t, "next", -1), silent=True)
        for tile, part in enumerate(self.tiles[group]):
            if part >= 0:
                self.stores(asm, group, tile)
            head = "void sent(const Slot& tile" if part >= 0 else "void passed(int thread) const"
            self._sink(asm, group, head, tile)
        self._sink(asm, group, "void ended(int thread) const", 0)

    def stores(self, asm: Asm, group: int, tile: int) -> None:
        cell = self.row(group, tile)
        asm.add("store", lambda w, t: store(w, t, cell, by_engine=True), local=True)

    def _sink(self, asm: Asm, group: int, head: str, tile: int) -> None:
        for mark, said in self.source.order(PARTS, head, SINK):
            if mark == "note":
                self._note(asm, group, {"kCommits": 1, "0": 0}.get(said, 2))
            elif mark == "part":
                asm.add(mark, lambda w, t: setattr(t, "next", tile), silent=True)
            else:
                asm.add("say that it has ended", self._more("ended"), local=True)

    def _more(self, *name: str | int) -> Any:
        at = self.word(0, *name)

        def act(w: Words, t: Thread) -> None:
            w[at] += 1

        return act

    def _note(self, asm: Asm, group: int, pending: int) -> None:
        def add(w: Words, t: Thread) -> None:
            if t.next >= 0:
                w[self.word(0, "noted", group, self.tiles[group][t.next])] += 1
                for at in t.landed:
                    w[self.word(0, "handed", at)] = 1
                t.landed = ()

        for mark, _ in self.source.order(PARTS, "void note() const", NOTE):
            if mark == "bulk_wait":
                asm.add(mark, lambda w, t: wait_stores(t, pending), silent=True)
            elif mark == "add":
                asm.add("note", add, local=True)
            else:
                asm.add(mark, lambda w, t: setattr(t, "next", -1), silent=True)

    def tells(self, asm: Asm) -> None:
        """`TellParts`: thread.next groups have ended, thread.aside: whether this turn is the last."""
        asm.label("begin")
        asm.add("none has ended", lambda w, t: setattr(t, "next", 0), silent=True)
        asm.label("turn")
        asm.add("another turn", local=True, ready=self._has_news)
        marks = [mark for mark, _ in self.source.order(PARTS, "void operator()() const", TELL)]
        lane = [mark for mark in marks if mark not in ("ended", "last")]
        for mark in marks:
            if mark == "ended":
                asm.add("who has ended?", self._take_ended, local=True)
            elif mark == "last":
                asm.add(mark, self._is_last, silent=True)
            elif mark == lane[0]:
                for group, part in self.noted:
                    self._tell(asm, lane, group, part)
        asm.go("turn", lambda w, t: not t.aside)

    def _has_news(self, w: Words, t: Thread) -> bool:
        noted = (w[self.word(0, "noted", group, part)] for group, part in self.noted)
        return w[self.word(0, "ended")] > 0 or any(noted)

    def _take_ended(self, w: Words, t: Thread) -> None:
        t.next += w[self.word(0, "ended")]
        w[self.word(0, "ended")] = 0

    def _is_last(self, w: Words, t: Thread) -> None:
        t.aside = int(t.next == len(self.tiles))

    def _tell(self, asm: Asm, lane: Sequence[str], group: int, part: int) -> None:
        """A lane's turn; thread.number: the rows that it took."""
        noted, told = self.word(0, "noted", group, part), self.word(0, "told", part)
        handed = {self.word(0, "handed", at): at for at in self.cells_of(group, part)}

        def take(w: Words, t: Thread) -> None:
            t.number, w[noted] = w[noted], 0
            if t.number == 0:
                return
            t.issued = (tuple(at for word, at in handed.items() if w[word]),)
            for word in handed:
                w[word] = 0

        def add(w: Words, t: Thread) -> None:
            w[told] += t.number

        past = asm.fresh("no rows")
        for mark in lane:
            if mark == "rows":
                asm.add("take rows", take, local=True)
                asm.go(past, lambda w, t: t.number == 0)
            elif mark == "engine":
                asm.add(mark, lambda w, t: wait_stores(t, 0), silent=True)
            elif mark == "fence":
                asm.fence(self.places)
            else:
                asm.add("add to the part's counter", add, local=True)
        asm.label(past)

    def waits(self, asm: Asm) -> None:
        """A block behind, which loads rows of every part; thread.next: whether its fence stands before."""
        asm.label("begin")
        for part in range(len(self.due)):
            self.wait(asm, part)
            self.load(asm, part)
        self.ends(asm)

    def wait(self, asm: Asm, part: int) -> None:
        """`PartMade`."""
        told, due = self.word(0, "told", part), self.due[part]
        asm.add("another part", lambda w, t: setattr(t, "next", 0), silent=True)
        for mark, _ in self.source.order(PARTS, "void operator()(const Tile& tile) const", WAIT):
            if mark == "wait":
                asm.add("wait for a part", local=True, ready=lambda w, t: w[told] == due)
            else:
                asm.add(mark, lambda w, t: setattr(t, "next", 1), silent=True)

    def load(self, asm: Asm, part: int) -> None:
        asm.add("load a part", lambda w, t: self._load(w, t, part), local=True)

    def ends(self, asm: Asm) -> None:
        order = self.source.order(BEHIND, "product_behind(const", RESET)
        if [mark for mark, _ in order if mark != "reset"] != ["count", "launches", "next"]:
            raise LookupError(f"{BEHIND}: the model does not know the order {order}")
        count, last = self.word(0, "blocks"), self.loads if order[0][1] != "0" else 1
        told = [self.word(0, "told", part) for part in range(len(self.due))] if len(order) > 3 else []

        def reset(w: Words, t: Thread) -> None:
            w[count] += 1
            if w[count] == last:
                for at in told:
                    w[at] = 0

        asm.add("count blocks", reset, local=True)

    def _load(self, w: Words, t: Thread, part: int) -> None:
        if not t.next:
            raise Fault("the copy engine may load before the wait has ended")
        for group in range(len(self.tiles)):
            for at in self.rows_of(group, part):
                load(w, t, at, f"a row of part {part}")

    def zeros(self, w: Words, rank: int, failed: bool) -> str | None:
        told = [w[self.word(0, "told", part)] for part in range(len(self.due))]
        return f"counters are {told} behind both products" if any(told) else None

    def clear(self, w: Words) -> None:
        """What lies in shared memory, and the count of blocks."""
        for name, at in self.places.items():
            if name[1] in self.CLEARED:
                w[at] = 0
