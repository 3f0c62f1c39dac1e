"""Kernel 1 as threads: rows by ticket, the counters that gate tiles, peers' staged tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tests.emulated.counters import Asm, Fault, Source, Thread, Words, load, store
from tests.emulated.fused_counters import ROWS, Kernel

TOKENS = {2: (((0, 0), (1, 0), (0, 0), (1, 1)), ((1, 0), (0, 1), (0, 0))), 3: (((0, 0), (1, 0), (2, 0)),) * 3}
"""Of 2 or 3 ranks, of every rank: the (rank, token) of every expert-major row."""
COUNTED, TICKET, HEIGHT = 2, 2, 2
TILES = ((0, 1), (1, 2), (3, 1))
"""First row and rows of every tile; the second has rows of two counters."""


def rows_out(source: Source, ranks: int, *, movers: Sequence[int] = (2, 1), **how: Any) -> Kernel:
    """Kernel 1 behind the launch that stages: of each rank one who stages, movers, and who loads tiles."""
    machine = Kernel(source, (0,) * ranks, **how)
    marks = {
        "draw": r"atomicAdd\(&call\.own->drawn",
        "leave": r"if \(from >= count\) return",
        "staged": r"wait_staged\(call, rows, own\)",
        "bring": r"bring\(call, rows",
        "spoil": r"spoil\(rows, mine\)",
        "fence": r"fence_gpu\(",
        "count": r"add_relaxed_gpu\(rows\.there",
    }
    order = source.order(ROWS, "__device__ __forceinline__ void operator()() const", marks)
    for rank in range(ranks):
        machine.thread(rank, "who stages")
        for i in range(movers[rank]):
            machine.thread(rank, f"mover {i}")
        machine.thread(rank, "who loads")
    for asm in machine.asms:
        asm.label("begin")
        if asm.name == "who stages":
            _stage(machine, asm)
        elif asm.name == "who loads":
            _load_tiles(machine, asm)
        else:
            Bring(machine, asm).run(order)
        machine.end_call(asm, machine.reset(asm.rank))
    return machine


def _rows_of(machine: Kernel, rank: int) -> tuple[tuple[int, int], ...]:
    return TOKENS[machine.ranks][rank]


def _stage(machine: Kernel, asm: Asm) -> None:
    """`stage_groups`, a launch before: a group is a token."""
    me = asm.rank
    for token in sorted({t for p in range(machine.ranks) for s, t in _rows_of(machine, p) if s == me}):
        at = machine.word(me, "staged", token)
        asm.add("stage", lambda w, t, at=at: store(w, t, at), local=True)
        asm.fence(machine.places)

        def tell(w: Words, t: Thread, token: int = token) -> None:
            for p in machine.others(me):
                w[machine.word(p, "staged flag", me, token)] = t.call

        asm.add("tell that it is staged", tell)

    def launch(w: Words, t: Thread) -> None:
        w[machine.word(me, "launched")] = t.call

    asm.add("the launch behind", launch, local=True)


class Bring:
    """`Bring`, of one warp."""

    def __init__(self, machine: Kernel, asm: Asm) -> None:
        self.machine, self.asm, self.me, self.rows = machine, asm, asm.rank, _rows_of(machine, asm.rank)
        head = "int token_of(const Rows& rows, int from, int count)"
        self.lowest_alone = "lowest = at" in machine.source.body(ROWS, head)

    def tokens(self, t: Thread) -> list[tuple[int, int]]:
        """Those that the ticket's holder brings."""
        rows = self.rows
        at = range(t.number * TICKET, min(t.number * TICKET + TICKET, len(rows)))
        return [rows[row] for row in at if not self.lowest_alone or rows.index(rows[row]) == row]

    def places(self, t: Thread) -> list[tuple[tuple[int, int], int]]:
        """Each of those tokens with each of its rows."""
        return [(token, row) for token in self.tokens(t) for row, its in enumerate(self.rows) if its == token]

    def is_staged(self, w: Words, t: Thread) -> bool:
        flags = [
            self.machine.word(self.me, "staged flag", *one) for one in self.tokens(t) if one[0] != self.me
        ]
        return all(w[at] >= t.call for at in flags)

    def bring(self, w: Words, t: Thread) -> None:
        for token, row in self.places(t):
            if not t.bad:
                load(w, t, self.machine.word(token[0], "staged", token[1]), f"token {token}")
            store(w, t, self.machine.word(self.me, "row", row))

    def count(self, w: Words, t: Thread) -> None:
        for _, row in self.places(t):
            at = self.machine.word(self.me, "written", row // COUNTED)
            w[at] += 1
            if w[at] > min(COUNTED, len(self.rows) - row // COUNTED * COUNTED):
                raise Fault(f"row {row} is counted twice")

    def run(self, order: list[tuple[str, str]]) -> None:
        asm, launched = self.asm, self.machine.word(self.me, "launched")
        asm.add("wait for the launch before", local=True, ready=lambda w, t: w[launched] >= t.call)
        asm.label("tickets")
        for i, (mark, _) in enumerate(order):
            if mark == "draw":
                self.machine.draw(asm, "number", 0)
            elif mark == "leave":
                asm.go("no tickets", lambda w, t: t.number * TICKET >= len(self.rows))
            elif mark == "staged":
                self.machine.wait(asm, "for staged tokens", self.is_staged, "not staged")
                asm.label("not staged")
            elif mark == "bring":
                asm.add("bring or spoil", self.bring, silent=i > 0 and order[i - 1][0] == "staged")
            elif mark == "fence":
                asm.fence(self.machine.places)
            elif mark == "count":
                asm.add("count", self.count, local=True)
        asm.add("fine again", lambda w, t: setattr(t, "bad", 0), silent=True)
        asm.go("tickets")
        asm.label("no tickets")


def _load_tiles(machine: Kernel, asm: Asm) -> None:
    """`Come`, before every tile's rows are loaded."""
    me, rows, launched = asm.rank, _rows_of(machine, asm.rank), machine.word(asm.rank, "launched")
    head = "__device__ __forceinline__ void operator()(const gemm::Tile& tile) const"
    both = machine.source.body(ROWS, "bool are_there(int first, int last) const")
    looks = machine.source.body(ROWS, head).count("are_there(first, last)") == 2
    looks = looks and "return are_there(first) && are_there(last);" in both
    tiles = [(row, count) for row, count in TILES if row + count <= len(rows)]
    asm.add("wait for the launch before", local=True, ready=lambda w, t: w[launched] >= t.call)
    for row, count in tiles:
        first, last, *due = machine.arithmetic("counters", row, count, len(rows), COUNTED, HEIGHT)
        places = [machine.word(me, "written", block) for block in (first, last)]

        def come(w: Words, t: Thread, places: list[int] = places, due: list[int] = due) -> bool:
            return not looks or all(w[at] >= least for at, least in zip(places, due, strict=True))

        def read(w: Words, t: Thread, row: int = row, count: int = count) -> None:
            for one in range(row, row + count):
                load(w, t, machine.word(me, "row", one), f"row {one}")

        asm.add(f"wait for the rows of the tile at {row}", local=True, ready=come)
        asm.add("load a tile", read, local=True, silent=True)
