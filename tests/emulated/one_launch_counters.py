"""Both products of a small batch in one launch as threads: tiles by number, slots, stages, counters of parts.

Of every block one who loads and one who multiplies. The order of what they do is that of `ffn/both.cuh`'s
text, and which part a tile counts for or waits for is the kernel's arithmetic, compiled. A tile has one step,
and a block has room for one: what a tile asks for ahead has to wait until the one before is multiplied.
Behind a dispatch in the same launch (fused/few.cu) the first blocks place rows, and draw their first tile,
and all draw a next one when they have asked for all of the one before. In fp8 a third one, the three warps
that quantise, brings rows and waits for them, and sets counters back.
"""

from __future__ import annotations

import ctypes
import functools
import subprocess
from pathlib import Path

from tests.emulated.counters import (
    Asm,
    Fault,
    Machine,
    Source,
    State,
    Thread,
    Words,
    load,
    store,
    wait_stores,
)
from tests.emulated.kernel import built_once

BOTH = "ffn/both.cuh"
PARTS = 8
PRODUCER = {
    "no more": r"steps = -1;\s+ptx::mbarrier_arrive",
    "draw": r"if \(!kLate\) drawn = atomicAdd\(both\.counter, 1u\)",
    "slot": r"work\.part\};\s+ptx::mbarrier_arrive\(shared\.slot_full",
    "look": r"written\.is\(work\.part\)",
    "columns": r"load_work<true, false>",
    "launches": r"if \(index == 0\) ahead = begin\(work, ring, ahead\)",
    "wait": r"if \(!Up::kQuantises && work\.down\) written\.wait\(work\.part\)",
    "rows": r"load_work<false, true>",
    "late draw": r"if \(kLate\) drawn = atomicAdd\(both\.counter, 1u\)",
    "rest": r"load\(few, steps\)",
    "done": r"leave\(both, team\.all\(\)\)",
}
CONSUMER = {
    "take": r"tile = take_slot<Up>",
    "multiply": r"multiply_tile<Up, 1>",
    "act": r"store_block<Up>",
    "tell": r"if \(thread == 0\) tell_part\(both, tile\.together\)",
    "out": r"store_block<Down>",
    "last": r"if \(thread == 0\) ptx::bulk_wait<0>\(\)",
}
QUANTISER = {
    "launches": r"wait_for_launches\(",
    "take": r"tile = take_slot<Up>",
    "wait": r"written\.wait\(-1 - tile\.together\)",
    "rows": r"fill_tile<Up>\(acts",
    "done": r"leave\(both, kQuantisers \* gridDim\.x\)",
}
TELL = {
    "bulk_wait": r"bulk_wait<0>\(",
    "engine": r"fence_async\(",
    "fence": r"fence_gpu\(",
    "add": r"add_relaxed_gpu\(both\.counter \+ kFirstPart \+ part, 1\)",
}


class OneLaunch(Machine):
    """A launch: units of 64 rows, tiles of gate and up and of down that each has, blocks. busy: the first
    blocks, which dispatch."""

    def __init__(
        self,
        source: Source,
        *,
        units: int,
        ups: int,
        downs: int,
        blocks: int,
        busy: int = 0,
        fp8: bool = False,
    ) -> None:
        super().__init__(1)
        self.fp8, self.busy = fp8, busy
        self.source, self.units, self.ups, self.downs = source, units, ups, downs
        self.blocks, self.all = blocks, units * (ups + downs)
        text = source.text(BOTH)
        begin, end = text.index("__device__ __forceinline__ int part_of"), text.index("struct Units {")
        self._parts = _compile(text[begin:end])
        self.least = text.count("< due * ups)") == 1
        self.stays = (
            "if (!Up::kQuantises) leave(both, team.all());" in text
        )  # who asks for columns sets nothing back
        self.last = blocks if "atomicAdd(both.counter + 1, 1u) == of_all - 1)" in text else 1
        for block in range(blocks):
            self._loads(self.thread(0, f"who loads, block {block}"), block)
            self._multiplies(self.thread(0, f"who multiplies, block {block}"), block)
            if fp8:
                self._quantises(self.thread(0, f"who quantises, block {block}"), block)

    def due(self, part: int) -> int:
        first = [self._parts.first(at, self.units) for at in (part, part + 1)]
        return (first[1] - first[0]) * self.ups - (not self.least)

    def is_down(self, number: int) -> bool:
        return number >= self.units * self.ups

    def unit(self, number: int) -> int:
        first = self.units * self.ups
        return (number - first) // self.downs if self.is_down(number) else number // self.ups

    def part(self, number: int) -> int:
        return self._parts.part(self.unit(number), self.units)

    def _loads(self, asm: Asm, block: int) -> None:
        """`produce_both`."""
        head = "__device__ __forceinline__ void produce_both("
        loads = Loads(self, block)
        if block < self.busy:
            asm.add("place rows", loads.place)
        asm.add("begin", loads.begin, silent=block >= self.busy)
        asm.label("tiles")
        for mark, _ in self.source.order(BOTH, head, PRODUCER):
            if mark == "no more":
                asm.go("no more", lambda w, t: t.number >= self.all)
            elif mark == ("late draw" if self.busy else "draw"):
                asm.add("draw", loads.draw)
            elif mark == "slot":
                asm.add("tell of a tile", loads.tell)
            elif mark == "columns":
                asm.add("columns", ready=loads.has_room)
            elif mark == "launches" and self.busy:
                asm.add("wait for rows", ready=loads.are_placed)
            elif mark == "wait" and not self.fp8:
                asm.add("wait for a part", ready=loads.are_there)
            elif mark == "rows":
                asm.add("rows", loads.asked if self.fp8 else loads.rows)
            elif mark == "rest":
                asm.add("next", loads.go_on, silent=True)
                asm.go("tiles")
                asm.label("no more")
                asm.add("tell of the end", loads.tell_end)
            elif mark == "done" and not (self.fp8 and self.stays):
                asm.add("done", functools.partial(loads.leave, self.last))

    def _quantises(self, asm: Asm, block: int) -> None:
        """`quantise_both`."""
        head = "__device__ __forceinline__ void quantise_both("
        loads = Loads(self, block)
        asm.add("begin", loads.begin, silent=True)
        asm.label("tiles")
        for mark, _ in self.source.order(BOTH, head, QUANTISER):
            if mark == "take":
                asm.add("take a tile", loads.take, ready=loads.is_told)
                asm.go("no more", lambda w, t: t.number < 0)
            elif mark == "wait":
                asm.add("wait for a part", ready=loads.are_there)
            elif mark == "rows":
                asm.add("rows", loads.rows, ready=loads.has_room)
                asm.add("next", loads.go_on, silent=True)
                asm.go("tiles")
                asm.label("no more")
            elif mark == "done":
                asm.add("done", functools.partial(loads.leave, self.last))

    def _multiplies(self, asm: Asm, block: int) -> None:
        """`consume_both`."""
        head = "__device__ __forceinline__ void consume_both("
        multiplies, looked = Multiplies(self, block), False
        asm.add("first", multiplies.begin, silent=True)
        for mark, _ in self.source.order(BOTH, head, CONSUMER):
            past = asm.fresh(mark)
            if mark == "take":
                asm.add("take a tile", multiplies.take, ready=multiplies.is_told)
                if not looked:
                    asm.label("tiles")
                    asm.go("no more", lambda w, t: t.next < 0)
                looked = True
            elif mark == "multiply":
                asm.add("multiply", multiplies.multiply, ready=multiplies.is_loaded)
            elif mark == "act":
                asm.go(past, lambda w, t: self.is_down(t.number))
                asm.add("store activations", multiplies.store_act, silent=True)
            elif mark == "out":
                asm.go(past, lambda w, t: not self.is_down(t.number))
                asm.add("store a result", multiplies.store_out, silent=True)
            elif mark == "tell":
                asm.go(past, lambda w, t: self.is_down(t.number))
                self._tell(asm)
            elif mark == "last":
                asm.go("tiles")
                asm.label("no more")
            asm.label(past)

    def _tell(self, asm: Asm) -> None:
        def add(w: Words, t: Thread) -> None:
            w[self.word(0, "written", self.part(t.number))] += 1

        for mark, _ in self.source.order(BOTH, "__device__ __forceinline__ void tell_part(", TELL):
            if mark == "bulk_wait" and not self.fp8:
                asm.add(mark, lambda w, t: wait_stores(t, 0), silent=True)
            elif mark == "fence":
                asm.fence(self.places)
            elif mark == "add":
                asm.add("count a tile", add)

    def fault(self, state: State, *, last: bool) -> str | None:
        wrong = super().fault(state, last=last)
        if wrong is not None or not last:
            return wrong
        words = state[0]
        computed = [words[self.word(0, "out", n)] for n in range(self.units * self.ups, self.all)]
        if computed != [1] * len(computed):
            return f"tiles of down are computed {computed} times"
        counters = ("drawn",), ("done",), *(("written", part) for part in range(PARTS))
        left = [name for name in counters if words[self.word(0, *name)]]
        return f"{left} are not set back" if left else None


class Loads:
    """What the thread that loads does. number: of the tile at hand; next: behind it; aside: tiles so far."""

    def __init__(self, launch: OneLaunch, block: int) -> None:
        self.launch, self.block, word = launch, block, functools.partial(launch.word, 0)
        self.drawn, self.done, self.told = word("drawn"), word("done"), word("told", block)
        self.multiplied, self.loaded = word("multiplied", block), word("loaded", block)
        self.columns = word("columns", block)
        self.written = [word("written", part) for part in range(PARTS)]
        self.placed = word("placed")

    def place(self, w: Words, t: Thread) -> None:
        w[self.placed] += 1

    def are_placed(self, w: Words, t: Thread) -> bool:
        return w[self.placed] >= self.launch.busy

    def begin(self, w: Words, t: Thread) -> None:
        t.number, t.aside = self.block - self.launch.busy, 0
        if t.number < 0:
            self.draw(w, t)
            t.number = t.next

    def draw(self, w: Words, t: Thread) -> None:
        t.next = w[self.drawn] + self.launch.blocks - self.launch.busy
        w[self.drawn] += 1

    def tell(self, w: Words, t: Thread) -> None:
        w[self.told] = t.aside + 1
        w[self.launch.word(0, "slot", self.block, t.aside)] = t.number + 1

    def has_room(self, w: Words, t: Thread) -> bool:
        return w[self.multiplied] >= t.aside

    def are_there(self, w: Words, t: Thread) -> bool:
        if not self.launch.is_down(t.number):
            return True
        part = self.launch.part(t.number)
        return w[self.written[part]] >= self.launch.due(part)

    def rows(self, w: Words, t: Thread) -> None:
        ups = self.launch.ups
        if not self.are_placed(w, t):
            raise Fault("rows are not placed")
        for i in range(ups if self.launch.is_down(t.number) else 0):
            at = self.launch.unit(t.number) * ups + i
            load(w, t, self.launch.word(0, "act", at), f"activation {at}")
        w[self.loaded] = t.aside + 1

    def asked(self, w: Words, t: Thread) -> None:
        w[self.columns] = t.aside + 1

    def is_told(self, w: Words, t: Thread) -> bool:
        return w[self.told] > t.aside or w[self.told] < 0

    def take(self, w: Words, t: Thread) -> None:
        t.number = w[self.launch.word(0, "slot", self.block, t.aside)] - 1

    def go_on(self, w: Words, t: Thread) -> None:
        t.number, t.aside = t.next, t.aside + 1

    def tell_end(self, w: Words, t: Thread) -> None:
        w[self.told] = -1

    def leave(self, last: int, w: Words, t: Thread) -> None:
        w[self.done] += 1
        if w[self.done] == last:
            for at in (self.drawn, self.done, *self.written):
                w[at] = 0


class Multiplies:
    """What the group that multiplies does. number: of the tile at hand; next: told; aside: tiles so far."""

    def __init__(self, launch: OneLaunch, block: int) -> None:
        self.launch, self.block, word = launch, block, functools.partial(launch.word, 0)
        self.told, self.loaded = word("told", block), word("loaded", block)
        self.multiplied, self.columns = word("multiplied", block), word("columns", block)

    def begin(self, w: Words, t: Thread) -> None:
        t.aside = 0

    def is_told(self, w: Words, t: Thread) -> bool:
        return w[self.told] > t.aside or w[self.told] < 0

    def take(self, w: Words, t: Thread) -> None:
        t.next = w[self.launch.word(0, "slot", self.block, t.aside)] - 1

    def is_loaded(self, w: Words, t: Thread) -> bool:
        return w[self.loaded] > t.aside and (not self.launch.fp8 or w[self.columns] > t.aside)

    def multiply(self, w: Words, t: Thread) -> None:
        t.number, t.aside = t.next, t.aside + 1
        w[self.multiplied] = t.aside

    def store_act(self, w: Words, t: Thread) -> None:
        store(w, t, self.launch.word(0, "act", t.number), by_engine=not self.launch.fp8)

    def store_out(self, w: Words, t: Thread) -> None:
        at = self.launch.word(0, "out", t.number)
        w[at] += 1
        if w[at] > 1:
            raise Fault(f"tile {t.number} is computed twice")


class _Parts:
    def __init__(self, library: ctypes.CDLL) -> None:
        self.part, self.first = library.part, library.first


def _compile(functions: str) -> _Parts:
    text = (
        f"#define __device__\n#define __forceinline__ inline\nconstexpr int kParts = {PARTS};\n{functions}\n"
        'extern "C" int part(int unit, int units) { return part_of(unit, units); }\n'
        'extern "C" int first(int part, int units) { return first_of_part(part, units); }\n'
    )
    return _Parts(built_once(text, functools.partial(_build, text)))


def _build(text: str, folder: Path) -> Path:
    (folder / "main.cpp").write_text(text)
    words = ["g++", "-std=c++17", "-shared", "-fPIC", str(folder / "main.cpp"), "-o", str(folder / "out.so")]
    subprocess.run(words, check=True, capture_output=True, text=True)
    return folder / "out.so"
