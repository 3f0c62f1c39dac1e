"""Kernel 4 as threads: two lists of tiles and their counters, blocks that stop, pieces by ticket, flags."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from tests.emulated.counters import Asm, Source, Thread, Words, load, store
from tests.emulated.down_home_counters import publish
from tests.emulated.fused_counters import FIRST, Kernel
from tests.emulated.home_counters import CREDIT, PIECES, sum_others

BODY = {
    "tell_started": r"tell_started\(",
    "found": r"wait_bounds\(",
    "load barrier": r"named_barrier\(kSumBarrier, kSummers \+ 32\);\n        }",
    "produce": r"\bproduce<C>\(",
    "consume": r"\bconsume_halves<C>\(",
    "sum barrier": r"named_barrier\(kSumBarrier, kSummers \+ 32\);\n        const",
    "failed": r"!failed\(",
    "run": r"if \(!fine \|\| !summer\.run\(.*\)\) spoil\(",
    "end": r"end_call\(",
}
OWN = "fused/own_rows.cuh"
READY = r"PartMade ready\{given\.progress\[rank\], .*produce<C>\(problem, shared, order, team, ready\)"
"""What tiles wait for. The model of parts has it."""
FIND = {
    "store": r"rows\.own\[i\] = found",
    "fence": r"fence_gpu\(",
    "count": r"add_relaxed_gpu\(rows\.bounds, 1\)",
}
NEXT = {
    "stop": r"return stops && order\.product > 0 \? kNoTile : static_cast<int>\(atomicAdd\(",
    "draw": r"const int drawn = .*atomicAdd\(",
}
RUN = {
    "who sums others' first": r"if \(stopped \|\| 2 \* .* < reduce\.reducers\)",
    "credit": CREDIT,
    "written": r"!wait_written\((\d)\)",
    "pieces": PIECES,
    "own": r"tokens, home, draw_again\(call, reduce, 1\)",
    "add": r"return wait_reduced\(call, piece\.flag\)",
}


def others_first(
    source: Source,
    groups: Sequence[int],
    lists: Sequence[int],
    *,
    first: bool = True,
    every: bool = False,
    own_first: bool = False,
    blocks: int = 2,
    finds: bool = False,
    **how: Any,
) -> Kernel:
    """Kernel 4, `blocks` a rank, one or two. lists: of each tile, in the order in which they are drawn.
    first: the first block stops. every: the last one sums as well, where it is not the only one; own_first:
    it begins with own pieces. It also
    tells that the call has begun, before it multiplies: a thread of its own would be too many. finds: the
    launch before finds own rows meanwhile."""
    machine = Kernel(source, groups, **how)
    body = machine.body(FIRST, "others_first(const", BODY, readers=("run",))
    if not re.search(READY, source.body(FIRST, "others_first(const"), re.DOTALL):
        raise LookupError(f"{FIRST} says 'produce' before it waits for the launch before it")
    for rank in range(machine.ranks):
        if finds:
            _find(machine, machine.thread(rank, "finds"))
        for block in range(blocks):
            asm = machine.thread(rank, f"block {block}")
            asm.label("begin")
            for mark, _ in body:
                if mark == "tell_started":
                    if block == blocks - 1:
                        machine.tell_started(asm)
                elif mark == "found" and finds:
                    _wait_bounds(machine, asm)
                elif mark == "consume" or every or block == 0:
                    turn = {"stops": first and block == 0, "own_first": own_first and block > 0}
                    _step(machine, asm, mark, lists, **turn)
            machine.end_call(asm, machine.reset(rank))
    machine.checks.append(machine.whole)
    return machine


def _find(machine: Kernel, asm: Asm) -> None:
    own, found = (machine.word(asm.rank, name) for name in ("own", "found"))

    def count(w: Words, t: Thread) -> None:
        w[found] = t.call

    asm.label("begin")
    for mark, _ in machine.source.order(OWN, "void operator()() const", FIND):
        if mark == "store":
            asm.add("store an end of own rows", lambda w, t: store(w, t, own), local=True)
        elif mark == "fence":
            asm.fence(machine.places)
        else:
            asm.add("count it", count, local=True)
    machine.end_call(asm, machine.reset(asm.rank))


def _wait_bounds(machine: Kernel, asm: Asm) -> None:
    own, found = (machine.word(asm.rank, name) for name in ("own", "found"))
    if "while (ptx::load_acquire_gpu(known) != due" in machine.source.body(FIRST, "bool wait_bounds("):
        asm.add("wait for own rows", local=True, ready=lambda w, t: w[found] == t.call)
    asm.add("where own rows are", lambda w, t: load(w, t, own, "an end of own rows"), silent=True)


def _step(
    machine: Kernel, asm: Asm, mark: str, lists: Sequence[int], *, stops: bool, own_first: bool
) -> None:
    if mark == "consume":
        publish(machine, asm, lists, FIRST, _stop(machine, asm, lists) if stops else None)
    elif mark == "run":
        machine.fail_early(asm, "no sums")
        _Summer(machine, asm, lists).run(own_first=own_first)
        asm.label("no sums")
        machine.spoil(asm)


def _stop(machine: Kernel, asm: Asm, lists: Sequence[int]) -> Any:
    """Behind a tile of a block that draws none when it has one of the second list."""
    at = machine.word(asm.rank, "tile")

    def lose(w: Words, t: Thread) -> None:
        w[at] += lists[t.number] > 0

    def make() -> None:
        for mark, _ in machine.source.order(FIRST, "next(u32* counter, const Rounds& order) const", NEXT):
            if mark == "draw":
                asm.add("draw in vain", lose, local=True)
        asm.go("no tiles", lambda w, t: lists[t.number] > 0)

    return make


class _Summer:
    """`Summer::run`, of one warp."""

    def __init__(self, machine: Kernel, asm: Asm, lists: Sequence[int]) -> None:
        self.machine, self.asm, self.lists, self.me = machine, asm, lists, asm.rank
        self.end, self.begin = asm.fresh("no pieces"), asm.fresh("own pieces")

    def load_rows(self, w: Words, t: Thread, most: int) -> None:
        """Rows of others are in tiles of the first list alone, own ones in either."""
        for tile, its in enumerate(self.lists):
            if its <= most:
                load(w, t, self.machine.word(self.me, "row", tile, its), f"tile {tile}")

    def is_there(self, w: Words, t: Thread) -> bool:
        return self.machine.flags_are_there(self.me, (t.number, 0), w, t)

    def add(self, w: Words, t: Thread) -> None:
        self.load_rows(w, t, 1)
        self.machine.add_own(self.me, (t.number, 0), w, t)

    def run(self, *, own_first: bool) -> None:
        asm, machine, own = self.asm, self.machine, self.machine.bag(self.me)[1]
        others = False  # in what a warp leaves out that begins with own pieces
        for mark, said in machine.source.order(FIRST, "bool run(u8* memory, bool stopped) const", RUN):
            others = (others or mark == "who sums others' first") and (mark, said) != ("written", "1")
            if mark == "who sums others' first" or (others and own_first):
                continue
            if mark == "credit":
                machine.credit(asm, int(said), self.end)
            elif mark == "written":
                self._wait(int(said))
            elif mark == "pieces":
                sum_others(machine, asm, lambda w, t: self.load_rows(w, t, 0))
            elif mark == "own":
                asm.label(self.begin)
                machine.draw(asm, "number", 1)
                asm.go(self.end, lambda w, t: t.number >= own)
            else:
                machine.wait(asm, "for peers' sums", self.is_there, self.end)
                asm.add("add an own piece", self.add, silent=True)
                asm.go(self.begin)
        asm.label(self.end)

    def _wait(self, of: int) -> None:
        at, due = self.machine.word(self.me, "written", of), self.lists.count(of)
        leave = self.end if self.machine.counting_ends(FIRST, "bool wait_written(int list) const") else None
        self.asm.add(f"wait for list {of}", local=True, ready=lambda w, t: w[at] >= due, leave=leave)
