"""The products of `parts_counters` in fp8: who stores scales of rows, and consumers that ask for them."""

from __future__ import annotations

from collections.abc import Sequence

from tests.emulated.counters import Asm, Machine, Source, Thread, Words, load, store
from tests.emulated.parts_counters import Products

FP8, STORE, CONSUME = "gemm/fp8.cuh", "gemm/store.cuh", "gemm/run.cuh"
LOAD = "gemm/load.cuh"
TILE = {"scale": r"scales\.d\[", "begin": r"stores\.begin\(\)", "finish": r"stores\.finish\("}
FINISH = {"engine": r"fence_async_shared\(", "barrier": r"named_barrier\(", "store": r"store\(\)"}
SINGLE = {
    "count": r"atomicAdd\(counter",
    "waits": r"if constexpr \(Ready::kWaits\)",
    "ready": r"ready\(tile\)",
    "slot": r"shared\.slots\[slot\] = told",
    "rows": r"load_step<C, false, true>\(",
}
ASK = {"begin": r"next\.begin\("}


def scales(source: Source, tiles: Sequence[Sequence[int]], *, calls: int = 1) -> Machine:
    """As `parts`, with one block behind."""
    machine = InFp8(source, tiles, 1, calls=calls)
    for group in range(len(tiles)):
        machine.notes(machine.thread(0, f"group {group}"), group)
        machine.stores_scales(machine.thread(0, f"another thread of group {group}"), group)
    machine.tells(machine.thread(0, "who tells"))
    machine.waits(machine.thread(0, "who loads"))
    machine.asks(machine.thread(0, "who multiplies"))
    for asm in machine.asms:
        machine.end_call(asm, machine.clear)
    machine.checks.append(machine.zeros)
    return machine


class InFp8(Products):
    CLEARED = (*Products.CLEARED, "met", "passed on", "slot")

    def scale(self, group: int, tile: int) -> int:
        return self.word(0, "scale", group, tile)

    def scales_of(self, group: int, part: int) -> list[int]:
        return [self.scale(group, i) for i, of in enumerate(self.tiles[group]) if of == part]

    def cells_of(self, group: int, part: int) -> list[int]:
        return [*self.rows_of(group, part), *self.scales_of(group, part)]

    def stores(self, asm: Asm, group: int, tile: int) -> None:
        """`store_block_fp8` of the thread that sends rows."""
        self._tile(asm, group, tile, sends=True)

    def stores_scales(self, asm: Asm, group: int) -> None:
        asm.label("begin")
        for tile, part in enumerate(self.tiles[group]):
            if part >= 0:
                self._tile(asm, group, tile, sends=False)

    def _tile(self, asm: Asm, group: int, tile: int, *, sends: bool) -> None:
        order = self.source.order(FP8, "void store_block_fp8(", TILE)
        for number, (mark, _) in enumerate(order):
            if mark == "begin":
                self._meet(asm, group, len(order) * tile + number + 1, sends)
            elif mark == "finish":
                for what, _ in self.source.order(STORE, "void finish(Store store)", FINISH):
                    if what == "barrier":
                        self._meet(asm, group, len(order) * tile + number + 1, sends)
                    elif what == "store" and sends:
                        super().stores(asm, group, tile)
            elif not sends:
                cell = self.scale(group, tile)
                asm.add("store a scale", lambda w, t, at=cell: store(w, t, at), local=True)

    def _meet(self, asm: Asm, group: int, number: int, sends: bool) -> None:
        """The group's barrier, behind which the thread that sends vouches for what the other has stored."""
        mine, other = self.word(0, "met", group, int(sends)), self.word(0, "met", group, int(not sends))
        passed = {self.word(0, "passed on", at): at for at in self._scales(group)}

        def arrive(w: Words, t: Thread) -> None:
            w[mine] = number
            if not sends:
                for word, at in passed.items():
                    w[word] |= int(at in t.landed)
                t.landed = ()

        def go_on(w: Words, t: Thread) -> None:
            if sends:
                t.landed = (*t.landed, *(at for word, at in passed.items() if w[word]))
                for word in passed:
                    w[word] = 0

        asm.add("meet", arrive, local=True)
        asm.add("all have met", go_on, local=True, ready=lambda w, t: w[other] >= number)

    def _scales(self, group: int) -> list[int]:
        return [self.scale(group, i) for i, part in enumerate(self.tiles[group]) if part >= 0]

    def waits(self, asm: Asm) -> None:
        """`produce`, with a tile of every part."""
        order = [mark for mark, _ in self.source.order(LOAD, "void produce(", SINGLE) if mark != "count"]
        order = order[order.index("waits") + 1 :]
        asm.label("begin")
        for part in range(len(self.due)):
            for mark in order:
                if mark == "ready":
                    self.wait(asm, part)
                elif mark == "rows":
                    self.load(asm, part)
                else:
                    self._say(asm, mark, part)
        self.ends(asm)

    def _say(self, asm: Asm, what: str, part: int) -> None:
        at = self.word(0, what, part)

        def act(w: Words, t: Thread) -> None:
            w[at] = 1

        asm.add(f"say: {what}", act, local=True)

    def asks(self, asm: Asm) -> None:
        """`consume`, with a tile of every part."""
        asm.label("begin")
        for part in range(len(self.due)):
            slot = self.word(0, "slot", part)
            asm.add("take the slot", local=True, ready=lambda w, t, at=slot: bool(w[at]))
            for _ in self.source.order(CONSUME, "const auto ask_for_scales", ASK):
                asm.add("ask for scales", lambda w, t, part=part: self._ask(w, t, part), local=True)

    def _ask(self, w: Words, t: Thread, part: int) -> None:
        for group in range(len(self.tiles)):
            for at in self.scales_of(group, part):
                load(w, t, at, f"a scale of part {part}")
