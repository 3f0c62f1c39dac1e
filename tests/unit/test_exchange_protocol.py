"""The flag protocol of the exchange as programs over shared words, every interleaving explored.

racecheck sees one block's shared memory; what ranks tell each other by flags is checked here. A program is
a list of steps:

    set word value      a flag, or the start of a call
    wait word value     until the word has reached it
    write buffer call   the rows of a call
    read buffer call    fails unless exactly those rows are there

One list a thread; `explore` runs all orders, and says whether a read can meet other rows or the programs
can wait for ever.
"""

from __future__ import annotations

import pytest

Step = tuple[str, str, int]
Program = list[Step]


class WrongRows(AssertionError):
    pass


class Deadlock(AssertionError):
    pass


def explore(programs: list[Program]) -> int:
    """Run every interleaving; the number of states. Raises WrongRows or Deadlock with where the threads
    stood.
    """
    words = sorted({step[1] for program in programs for step in program})
    index = {word: i for i, word in enumerate(words)}
    steps = [[(kind, index[word], value) for kind, word, value in program] for program in programs]
    start = (tuple(0 for _ in programs), tuple(0 for _ in words))
    seen, stack = {start}, [start]
    while stack:
        places, memory = stack.pop()
        moved = False
        for thread, place in enumerate(places):
            if place == len(steps[thread]):
                continue
            kind, word, value = steps[thread][place]
            if kind == "wait" and memory[word] < value:
                continue
            if kind == "read" and memory[word] != value:
                raise WrongRows(f"{words[word]} holds call {memory[word]}, not {value}; threads at {places}")
            moved = True
            after = memory if kind in ("wait", "read") else (*memory[:word], value, *memory[word + 1 :])
            state = ((*places[:thread], place + 1, *places[thread + 1 :]), after)
            if state not in seen:
                seen.add(state)
                stack.append(state)
        if not moved and any(place < len(step) for place, step in zip(places, steps, strict=True)):
            raise Deadlock(f"threads at {places}")
    return len(seen)


def others(ranks: int, me: int) -> list[int]:
    return [p for p in range(ranks) if p != me]


def push(ranks: int, calls: int, buffers: int, lag: int, *, early_flag: bool = False) -> list[Program]:
    """`exchange/push.cu`: rows into the peers' buffers, then a flag; the rows are used until the next call
    begins.
    """
    programs = []
    for me in range(ranks):
        program: Program = []
        for call in range(1, calls + 1):
            for p in others(ranks, me):
                program.append(("set", f"started {p}<{me}", call))
            for p in others(ranks, me):
                program.append(("wait", f"started {me}<{p}", call + 1 - lag))
            for p in others(ranks, me):
                write = ("write", f"rows {p}<{me} {call % buffers}", call)
                flag = ("set", f"arrived {p}<{me}", call)
                program += [flag, write] if early_flag else [write, flag]
            for p in others(ranks, me):
                program.append(("wait", f"arrived {me}<{p}", call))
            for p in others(ranks, me):  # the experts, after the call: they read at leisure
                program += [("read", f"rows {me}<{p} {call % buffers}", call)] * 2
        programs.append(program)
    return programs


def together(me: int, call: int, threads: list[Program]) -> None:
    """The threads of a rank leave a call when all of them have done with it: the end of a kernel."""
    for i, thread in enumerate(threads):
        thread.append(("set", f"left {me} {i}", call))
    for thread in threads:
        thread += [("wait", f"left {me} {i}", call) for i in range(len(threads))]


def pull(ranks: int, calls: int, groups: int, buffers: int, lag: int) -> list[Program]:
    """`exchange/pull.cu`: one thread of a rank stages groups and sets a flag at each peer, one pulls them."""
    programs = []
    for me in range(ranks):
        stager: Program = []
        puller: Program = []
        for call in range(1, calls + 1):
            buffer = call % buffers
            puller += [("set", f"started {p}<{me}", call) for p in others(ranks, me)]
            stager += [("wait", f"started {me}<{p}", call + 1 - lag) for p in others(ranks, me)]
            for g in range(groups):
                stager.append(("write", f"staged {me} {buffer} {g}", call))
                stager += [("set", f"flag {p}<{me} {g}", call) for p in others(ranks, me)]
                puller += [("wait", f"flag {me}<{p} {g}", call) for p in others(ranks, me)]
                puller += [("read", f"staged {p} {buffer} {g}", call) for p in others(ranks, me)]
            together(me, call, [stager, puller])
        programs += [stager, puller]
    return programs


def combine(
    ranks: int, calls: int, buffers: int, lag: int, *, warps: int = 2, adding_first: bool = False
) -> list[Program]:
    """`exchange/reduce.cu`: sums written at home, a flag a piece; who has reduced adds. The first warp of
    a rank reduces, the second adds from the start; a single one does both.
    """
    programs = []
    for me in range(ranks):
        reducer: Program = []
        adder: Program = reducer if warps == 1 else []
        for call in range(1, calls + 1):
            buffer = call % buffers
            reducer += [("set", f"started {p}<{me}", call) for p in others(ranks, me)]
            reduced: Program = [("wait", f"started {me}<{p}", call + 1 - lag) for p in others(ranks, me)]
            for p in others(ranks, me):
                reduced.append(("write", f"sum {p}<{me} {buffer}", call))
                reduced.append(("set", f"flag {p}<{me}", call))
            added: Program = [("wait", f"flag {me}<{p}", call) for p in others(ranks, me)]
            added += [("read", f"sum {me}<{p} {buffer}", call) for p in others(ranks, me)]
            for part in [added, reduced] if adding_first else [reduced, added]:
                (reducer if part is reduced else adder).extend(part)
            together(me, call, [reducer, adder] if warps > 1 else [reducer])
        programs += [reducer, adder] if warps > 1 else [reducer]
    return programs


def gather(ranks: int, calls: int, buffers: int) -> list[Program]:
    """`exchange/gather.cu`: the caller writes sums before the call; they are pulled once all have begun."""
    programs = []
    for me in range(ranks):
        program: Program = []
        for call in range(1, calls + 1):
            buffer = call % buffers
            program += [("write", f"sums {me} {buffer}", call)]
            program += [("set", f"started {p}<{me}", call) for p in others(ranks, me)]
            program += [("wait", f"started {me}<{p}", call) for p in others(ranks, me)]
            program += [("read", f"sums {p} {buffer}", call) for p in others(ranks, me)]
        programs.append(program)
    return programs


@pytest.mark.parametrize(("buffers", "lag"), [(1, 1), (2, 2), (2, 1), (3, 2)])
def test_push_two_ranks(buffers: int, lag: int) -> None:
    assert explore(push(2, 5, buffers, lag)) > 100


def test_push_three_ranks() -> None:
    assert explore(push(3, 2, 2, 2)) > 1000


def test_push_without_credit_overwrites_rows_in_use() -> None:
    with pytest.raises(WrongRows):
        explore(push(2, 5, buffers=1, lag=2))


def test_a_flag_before_its_rows_is_seen() -> None:
    with pytest.raises(WrongRows):
        explore(push(2, 3, 2, 2, early_flag=True))


def test_pull_two_ranks() -> None:
    assert explore(pull(2, 2, groups=2, buffers=1, lag=1)) > 100
    assert explore(pull(2, 3, groups=1, buffers=2, lag=2)) > 100


def test_staging_without_credit_overwrites_what_a_peer_pulls() -> None:
    with pytest.raises(WrongRows):
        explore(pull(2, 3, groups=1, buffers=1, lag=2))


@pytest.mark.parametrize("warps", [1, 2])
def test_combine_two_ranks(warps: int) -> None:
    assert explore(combine(2, 4, buffers=2, lag=2, warps=warps)) > 50
    with pytest.raises(WrongRows):
        explore(combine(2, 4, buffers=1, lag=2, warps=warps))


def test_adding_before_reducing_can_wait_for_ever() -> None:
    with pytest.raises(Deadlock):
        explore(combine(2, 1, buffers=2, lag=2, warps=1, adding_first=True))


def test_gathered_sums_need_two_buffers() -> None:
    assert explore(gather(2, 5, buffers=2)) > 50
    assert explore(gather(3, 2, buffers=2)) > 100
    with pytest.raises(WrongRows):
        explore(gather(2, 3, buffers=1))


def small(ranks: int, calls: int, buffers: int) -> list[Program]:
    """`exchange/small.cuh`: no credit; nobody leaves a call before all have begun it."""
    programs = []
    for me in range(ranks):
        program: Program = []
        for call in range(1, calls + 1):
            program.append(("write", f"staged {me} {call % buffers}", call))
            program += [("set", f"given {p}<{me}", call) for p in others(ranks, me)]
            program += [("wait", f"given {me}<{p}", call) for p in others(ranks, me)]
            program += [("read", f"staged {p} {call % buffers}", call) for p in others(ranks, me)]
        programs.append(program)
    return programs


def test_small_needs_two_buffers_and_no_credit() -> None:
    assert explore(small(2, 6, buffers=2)) > 50
    assert explore(small(3, 3, buffers=2)) > 1000
    with pytest.raises(WrongRows):
        explore(small(2, 3, buffers=1))


def early(ranks: int, calls: int, buffers: int, *, meeting: bool = True) -> list[Program]:
    """`routing/early.cuh`: counts of lower ranks, each its own flag; then everybody waits for everybody's
    choices.
    """
    programs = []
    for me in range(ranks):
        program: Program = []
        for call in range(1, calls + 1):
            buffer = call % buffers
            program += [("set", f"count {p}<{me} {buffer}", call) for p in range(me + 1, ranks)]
            for p in range(me):
                program += [("wait", f"count {me}<{p} {buffer}", call)]
                program += [("read", f"count {me}<{p} {buffer}", call)]
            if meeting:
                program += [("set", f"given {p}<{me}", call) for p in others(ranks, me)]
                program += [("wait", f"given {me}<{p}", call) for p in others(ranks, me)]
        programs.append(program)
    return programs


def test_early_counts_need_the_meeting_that_follows() -> None:
    assert explore(early(2, 6, buffers=2)) > 50
    assert explore(early(3, 3, buffers=2)) > 500
    with pytest.raises(WrongRows):
        explore(early(2, 6, buffers=2, meeting=False))
