"""What the four fused kernels share, as threads of `counters.Machine`: tickets, flags, credit, ends.

The order of a thread's operations is that of the kernel's text (`Source.order`), and what a ticket stands
for, which counters a tile looks at and when one is full is the kernel's own arithmetic, compiled. By hand are
the shapes of loops, and what an operation does to words. Of every kind there is one warp, a tile has one row
and a piece one token; the copy engine's bytes, tensor cores and lanes are the emulator's concern.
"""

from __future__ import annotations

import ctypes
import functools
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tests.emulated.counters import Asm, Fault, Machine, Source, Thread, Words, load
from tests.emulated.kernel import built_once

ROWS, HOME, DOWN, SUMMERS, FIRST = (
    f"fused/{name}" for name in ("movers.cuh", "home.cu", "down_home.cu", "summers.cuh", "others_first.cu")
)
REDUCE, PROTOCOL = "exchange/reduce.cuh", "peers/protocol.cuh"
SPOILT = 100

ARITHMETIC = """
typedef unsigned u32;
struct Group {{ u32 ranks; }};
struct Call {{ int me; const Group* group; }};
struct Reduce {{ u32 parts; }};
struct Bag {{ u32 others, own; }};
struct Tile {{ int row, rows; }};
struct Piece {{ int source; u32 rest; }};
namespace gemm {{ int least(int a, int b) {{ return a < b ? a : b; }} }}
static Piece piece_of(Reduce, int, int source, u32 rest) {{ return {{source, rest}}; }}
extern "C" void job(u32 number, int me, u32 ranks_, u32 parts_, u32 others_, u32 own_, int* out) {{
    Group g{{ranks_}}; Call call{{me, &g}}; Reduce reduce{{parts_}}; Bag bag{{others_, own_}};
    {job}
    out[0] = home, out[1] = part, out[2] = source, out[3] = group;
}}
static Piece other(Call call, Reduce reduce, int tokens, u32 number) {{ {other} }}
extern "C" void others(u32 number, int me, u32 ranks_, int* out) {{
    Group g{{ranks_}}; Call call{{me, &g}};
    const Piece piece = other(call, {{1}}, 0, number);
    out[0] = piece.source, out[1] = piece.rest;
    {told}
    out[2] = source < ranks ? source : source - ranks, out[3] = flag;
}}
extern "C" void counters(int row, int tile_rows, int count, int kCounted, int kBlockM, int* out) {{
    Tile tile{{row, tile_rows}};
    {which}
    out[0] = first, out[1] = last;
    int rows = 0;
    auto count_rows = [&](int) {{ return count; }};
    for (int i = 0, block = first; i < 2; ++i, block = last) {{
        {due}
        out[2 + i] = due;
    }}
}}
"""


class Arithmetic:
    """The kernels' own numbers, from their text."""

    def __init__(self, source: Source) -> None:
        come = source.body(ROWS, "__device__ __forceinline__ void operator()(const gemm::Tile& tile) const")
        text = ARITHMETIC.format(
            job=source.body(SUMMERS, "void find_job(u32 number) const").partition("const Piece piece")[0],
            other=source.body(REDUCE, "__device__ __forceinline__ Piece other_piece("),
            told=source.body(REDUCE, "__device__ inline void tell_reduced(").partition("__syncwarp")[0],
            which=come.partition("if (")[0],
            due=source.body(ROWS, "bool are_there(int block) const").partition("return")[0],
        )
        self._library = built_once(text, functools.partial(_compile, text))

    def __call__(self, name: str, *numbers: int) -> tuple[int, int, int, int]:
        return _asked(self._library, name, numbers)


@functools.cache
def _asked(library: Any, name: str, numbers: tuple[int, ...]) -> tuple[int, int, int, int]:
    out = (ctypes.c_int * 4)()
    getattr(library, name)(*map(ctypes.c_int, numbers), out)
    return tuple(out)


def _compile(text: str, folder: Path) -> Path:
    (folder / "main.cpp").write_text(text)
    words = ["g++", "-std=c++17", "-shared", "-fPIC", "-w", str(folder / "main.cpp"), "-o"]
    subprocess.run([*words, str(folder / "out.so")], check=True, capture_output=True, text=True)
    return folder / "out.so"


class Kernel(Machine):
    """What the four kernels share. groups: of tokens, of every rank."""

    def __init__(self, source: Source, groups: Sequence[int], *, parts: int = 1, **how: Any) -> None:
        super().__init__(len(groups), **how)
        self.source, self.groups, self.parts = source, groups, parts
        self.arithmetic = Arithmetic(source)
        self.bounded = "stop_waiting" in source.body(PROTOCOL, "inline bool wait_flag(")
        self.ticket_back = "drawn[call.kind][0] = " in source.body(PROTOCOL, "u32 take_ticket(")

    def body(
        self, file: str, head: str, marks: dict[str, str], readers: Sequence[str] = ()
    ) -> list[tuple[str, str]]:
        """`Source.order` of a kernel that may begin before the launch before it has ended. readers: the marks
        that read what that one makes, if others do not; each stands right behind a wait for it."""
        body = self.source.order(file, head, {"launches": r"wait_for_launches\(", **marks})
        names = [mark for mark, _ in body]
        late = [mark for mark in readers if names[names.index(mark) - 1] != "launches"]
        if not readers and names[0] != "launches":
            late = names[:1]
        if late:
            raise LookupError(f"{file} says {late[0]!r} before it waits for the launch before it")
        return [one for one in body if one[0] != "launches"]

    def counting_ends(self, file: str, head: str) -> bool:
        """Whether the wait for this rank's own product, which a function calls, ends where the call fails."""
        if "wait_counted(" not in self.source.body(file, head):
            raise LookupError(f"{file}, {head!r}: the model does not know how it waits")
        return "leave_if_failed" in self.source.body(REDUCE, "void wait_counted(")

    def others(self, me: int) -> list[int]:
        return [p for p in range(self.ranks) if p != me]

    def bag(self, me: int) -> tuple[int, int]:
        most = max([self.groups[p] for p in self.others(me)], default=0)
        return most * (self.ranks - 1), self.groups[me]

    def draw(self, asm: Asm, of: str, bag: int, **how: Any) -> None:
        """A ticket of a bag into `number` or `next`."""
        at = self.word(asm.rank, "drawn", bag)

        def act(w: Words, t: Thread) -> None:
            setattr(t, of, w[at])
            w[at] += 1

        asm.add("draw", act, local=True, **how)

    def tell_started(self, asm: Asm) -> None:
        places = [self.word(p, "started", asm.rank) for p in self.others(asm.rank)]

        def act(w: Words, t: Thread) -> None:
            for at in places:
                w[at] = t.call

        asm.add("tell started", act)

    def credit(self, asm: Asm, lag: int, leave: str) -> None:
        places = [self.word(asm.rank, "started", p) for p in self.others(asm.rank)]
        self.wait(asm, "credit", lambda w, t: all(w[at] >= t.call + 1 - lag for at in places), leave)

    def wait(self, asm: Asm, name: str, ready: Callable[[Words, Thread], bool], leave: str) -> None:
        asm.add(f"wait {name}", ready=ready, leave=leave if self.bounded else None)

    def fail_early(self, asm: Asm, leave: str) -> None:
        """`failed(call)`, asked before anything."""
        if self.mortal is not None:

            def act(w: Words, t: Thread) -> int | None:
                t.bad = int(self.failed(w, asm.rank))
                return asm.labels[leave] if t.bad else None

            asm.add("failed?", act)

    def partial(self, home: int, by: int, group: int, part: int, call: int) -> int:
        return self.word(home, "partial", by, group, part, call % 2)

    def flag(self, home: int, by: int, group: int, part: int) -> int:
        return self.word(home, "flag", by, group, part)

    def flags_are_there(self, me: int, piece: tuple[int, int], w: Words, t: Thread) -> bool:
        return all(w[self.flag(me, p, *piece)] >= t.call for p in self.others(me))

    def add_own(self, me: int, piece: tuple[int, int], w: Words, t: Thread) -> None:
        for p in self.others(me):
            load(w, t, self.partial(me, p, *piece, t.call), f"rank {p}'s sum {piece}")
        at = self.word(me, "out", *piece)
        w[at] += 1
        if w[at] % SPOILT > 1:
            raise Fault(f"own piece {piece} is summed twice")

    def spoil(self, asm: Asm) -> None:
        """Unless all was fine."""
        me = asm.rank

        def act(w: Words, t: Thread) -> None:
            self.give_up(w, me)
            for group in range(self.groups[me]):
                for part in range(self.parts):
                    w[self.word(me, "out", group, part)] += SPOILT

        past = asm.fresh("not spoilt")
        asm.go(past, lambda w, t: not t.bad)
        asm.add("spoil", act)
        asm.label(past)

    def whole(self, w: Words, me: int, failed: bool) -> str | None:
        """What is wrong with a rank's result when its call ends."""
        for group in range(self.groups[me]):
            for part in range(self.parts):
                sums = w[self.word(me, "out", group, part)]
                if sums != 1 and not (failed and sums >= SPOILT):
                    return f"own piece {group, part} is summed {sums % SPOILT} times at the end"
        return None

    def reset(self, me: int) -> Callable[[Words], None]:
        names = ("out", "tile", "written", *(["drawn"] if self.ticket_back else []))

        def act(w: Words) -> None:
            for name, at in self.places.items():
                if name[0] == me and name[1] in names:
                    w[at] = 0

        return act


def tell_piece(
    machine: Kernel, asm: Asm, file: str, head: str, tell: Callable[[Words, Thread], None]
) -> None:
    for mark, _ in machine.source.order(
        file, head, {"fence": r"fence_sys\(", "flag": r"store_relaxed_sys\("}
    ):
        if mark == "fence":
            asm.fence(machine.places)
        else:
            asm.add("tell the piece's home", tell)
