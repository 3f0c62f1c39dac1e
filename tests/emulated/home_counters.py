"""Kernel 2 as threads: sums before the tiles and behind them, a piece put aside, peers' flags, credit."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

from tests.emulated.counters import Asm, Fault, Source, Thread, Words, store
from tests.emulated.fused_counters import HOME, REDUCE, Kernel, tell_piece

HEAD = "home_beside_gradients(const"
WHERE_NOT_EARLY = r"if \(!home\.early\) ptx::wait_for_launches\(\);\s+count_call\(call\);\s+meet<C>\(\);"
"""What tiles read is older than the launch before, or that one is waited for."""


def home(
    source: Source,
    groups: Sequence[int],
    *,
    first: int = 1,
    blocks: Sequence[int] = (1, 1),
    tiles: int = 2,
    **how: Any,
) -> Kernel:
    """Kernel 2: `first` of the blocks sum before their tiles, of which there are `tiles` in all."""
    machine = Kernel(source, groups, **how)
    marks = {
        "tell_started": r"tell_started\(",
        "load barrier of who loads": r"if \(sums_first\) ptx::named_barrier\(kLoadBarrier",
        "begin": r"summer\.begin\(\)",
        "engine": r"fence_async_shared\(",
        "load barrier": r"ptx::named_barrier\(kLoadBarrier, kSummers \+ 32\);\n        }",
        "consume": r"\bconsume<C>\(",
        "produce": r"\bproduce<C>\(",
        "sum barrier": r"named_barrier\(kSumBarrier",
        "end": r"fine = fine && summer\.end\(\)",
        "failed": r"!failed\(",
        "spoil": r"if \(!fine\) spoil\(",
        "end_call": r"end_call\(",
    }
    body = machine.body(HOME, HEAD, marks, readers=("begin", "end"))
    if not re.search(WHERE_NOT_EARLY, source.body(HOME, HEAD)):
        raise LookupError(f"{HOME} says 'produce' before it waits for the launch before it, or in vain")
    for rank in range(machine.ranks):
        for name in ("tell_started", "loads", "multiplies"):
            for block in range(blocks[rank] if name != "tell_started" else 1):
                if name == "loads" and block >= first:
                    continue  # whose first sums come behind its tiles: `multiplies` takes those by itself
                asm = machine.thread(rank, f"block {block}, who {name}")
                asm.label("begin")
                for mark, _ in body:
                    _home_step(machine, asm, name, mark, (block, tiles, block < first))
                machine.end_call(asm, machine.reset(rank))
    machine.checks.append(machine.whole)
    return machine


def _home_step(machine: Kernel, asm: Asm, name: str, mark: str, about: tuple[int, int, bool]) -> None:
    block, tiles, first = about
    if name == "tell_started" and mark == "tell_started":
        machine.tell_started(asm)
    elif name == "loads":
        if mark == "load barrier of who loads":
            _barrier(machine, asm, block)
        elif mark == "produce":
            _produce(machine, asm, block, tiles)
    elif name == "multiplies":
        if mark == "failed":
            machine.fail_early(asm, "no sums first")
        elif mark == "begin" and first:
            Phase(machine, asm, "bool begin()", block).run()
        elif mark == "load barrier" and first:
            asm.label("no sums first")
            _barrier(machine, asm, block)
        elif mark == "consume":
            asm.labels.setdefault("no sums first", len(asm.made))
            _consume(machine, asm, block, tiles, loads=first)
        elif mark == "end":
            asm.go("no sums", lambda w, t: bool(t.bad))
            Phase(machine, asm, "bool end()", block).run()
            asm.label("no sums")
        elif mark == "spoil":
            machine.spoil(asm)


def _barrier(machine: Kernel, asm: Asm, block: int) -> None:
    at = machine.word(asm.rank, "barrier", block)

    def arrive(w: Words, t: Thread) -> None:
        w[at] += 1

    asm.add("arrive", arrive, local=True)
    asm.add("wait for the block", local=True, ready=lambda w, t: w[at] >= 2 * t.call)


def _produce(machine: Kernel, asm: Asm, block: int, tiles: int) -> None:
    slot, tile = machine.word(asm.rank, "slot", block), machine.word(asm.rank, "tile")

    def draw(w: Words, t: Thread) -> None:
        t.number = w[tile]
        w[tile] += 1
        w[slot] = t.number + 1  # a stage is being filled, where there is a tile

    again = asm.fresh("tiles")
    asm.label(again)
    asm.add("load a tile", draw, local=True, ready=lambda w, t: w[slot] == 0)
    asm.go(again, lambda w, t: t.number < tiles)


def _consume(machine: Kernel, asm: Asm, block: int, tiles: int, *, loads: bool) -> None:
    slot, tile = machine.word(asm.rank, "slot", block), machine.word(asm.rank, "tile")

    def take(w: Words, t: Thread) -> None:
        t.number = w[slot] - 1 if loads else w[tile]
        w[slot] = 0
        w[tile] += not loads
        if t.number < tiles:
            w[machine.word(asm.rank, "product", t.number)] = t.call

    again = asm.fresh("tiles")
    asm.label(again)
    asm.add("multiply", take, local=True, ready=lambda w, t: not loads or w[slot] > 0)
    asm.go(again, lambda w, t: t.number < tiles)


PHASE = {
    "others": r"!reduce_others\(\)",
    "aside or draw": r"aside < home \? aside : draw_again\(call, reduce, 1\)",
    "draw": r"tokens, home, draw_again\(call, reduce, 1\)",
    "look": r"return is_reduced\(piece\)",
    "wait": r"return wait_reduced\(call, piece\.flag\)",
}


class Phase:
    """`Summer::begin` or `end`, of one warp; a failure goes on behind it."""

    def __init__(self, machine: Kernel, asm: Asm, head: str, block: int) -> None:
        self.machine, self.asm, self.head, self.me = machine, asm, head, asm.rank
        self.own = machine.bag(asm.rank)[1] * machine.parts
        self.slot = machine.word(self.me, "slot", block)
        self.over, self.end = asm.fresh("no own pieces"), asm.fresh("phase over")
        self.begin = asm.fresh("own pieces")

    def piece(self, t: Thread) -> tuple[int, int]:
        return t.number // self.machine.parts, t.number % self.machine.parts

    def use(self, w: Words, t: Thread) -> None:
        if w[self.slot]:
            raise Fault("sums over a tile that is loaded")

    def is_there(self, w: Words, t: Thread) -> bool:
        return self.machine.flags_are_there(self.me, self.piece(t), w, t)

    def look(self, w: Words, t: Thread) -> int | None:
        if self.is_there(w, t):
            return None
        t.aside = t.number
        return self.asm.labels[self.end]

    def add(self, w: Words, t: Thread) -> None:
        self.use(w, t)
        self.machine.add_own(self.me, self.piece(t), w, t)

    def run(self) -> None:
        asm = self.asm
        for mark, _ in self.machine.source.order(HOME, self.head, PHASE):
            if mark == "others":
                _reduce_others(self.machine, asm, self.end, self.use)
            elif mark in ("look", "wait"):
                if mark == "look":
                    asm.add("look for peers' sums", self.look)
                else:
                    self.machine.wait(asm, "for peers' sums", self.is_there, self.end)
                asm.add("add an own piece", self.add, silent=True)
                asm.go(self.begin)
                asm.label(self.over)
            else:
                self._take(put_aside=mark == "aside or draw")
        asm.label(self.end)

    def _take(self, *, put_aside: bool) -> None:
        asm, taken = self.asm, self.asm.fresh("taken")
        if put_aside:
            asm.add("aside", lambda w, t: setattr(t, "number", t.aside), silent=True)
            asm.go(taken, lambda w, t: 0 <= t.number < self.own)
        asm.label(self.begin)
        self.machine.draw(asm, "number", 1)
        asm.label(taken)
        asm.go(self.over, lambda w, t: t.number >= self.own)


def sum_others(machine: Kernel, asm: Asm, use: Callable[[Words, Thread], None]) -> None:
    """Others' pieces, told when the next one is drawn: `reduce_pieces` lists that one's rows meanwhile."""
    me, most = asm.rank, machine.bag(asm.rank)[0] * machine.parts
    begin, over = asm.fresh("others' pieces"), asm.fresh("no others")

    def which(t: Thread) -> tuple[int, int, int, int]:
        return machine.arithmetic("others", t.number, me, machine.ranks)

    def reduce(w: Words, t: Thread) -> None:
        use(w, t)
        source, rest, *_ = which(t)
        store(w, t, machine.partial(source, me, rest // machine.parts, rest % machine.parts, t.call))

    def tell(w: Words, t: Thread) -> None:
        *_, source, flag = which(t)
        w[machine.flag(source, me, flag // machine.parts, flag % machine.parts)] = t.call

    machine.draw(asm, "number", 0)
    asm.label(begin)
    asm.go(over, lambda w, t: t.number >= most)
    asm.add("sum another's piece", reduce)
    machine.draw(asm, "next", 0)
    tell_piece(machine, asm, REDUCE, "__device__ inline void tell_reduced(", tell)
    asm.add("go on", lambda w, t: setattr(t, "number", t.next), silent=True)
    asm.go(begin)
    asm.label(over)


PIECES = r"reduce_pieces<Sums>\(.*draw_again\(call, reduce, 0\)\)"
CREDIT = r"!wait_credit\(call, .*, (\d)\)"


def _reduce_others(machine: Kernel, asm: Asm, end: str, use: Callable[[Words, Thread], None]) -> None:
    marks = {"credit": CREDIT, "pieces": PIECES}
    for mark, said in machine.source.order(HOME, "bool reduce_others()", marks):
        if mark == "credit":
            machine.credit(asm, int(said), end)
        else:
            sum_others(machine, asm, use)
