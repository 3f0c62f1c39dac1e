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
    """`exchange_push.cu`: rows into the peers' buffers, then a flag; the rows are used until the next call
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


def pull(
    ranks: int, calls: int, groups: int, lead: int, buffers: int, lag: int, *, flush: bool = True
) -> list[Program]:
    """`exchange_pull.cu`, and `exchange_combine.cu` with reducing for staging: a lister and a storer a rank.

    The lister lists the staging of group g, then waits for the peers' group g - lead and lists the pulling.
    The storer
    publishes a staged group when it takes the next segment or, with `flush`, when there is none to take.
    """
    programs = []
    for me in range(ranks):
        lister: Program = []
        storer: Program = []
        publisher: Program = []
        segment = 0
        for call in range(1, calls + 1):
            buffer = call % buffers
            lister += [("set", f"started {p}<{me}", call) for p in others(ranks, me)]
            lister += [("wait", f"started {me}<{p}", call + 1 - lag) for p in others(ranks, me)]
            for g in range(groups + lead):
                if g < groups:
                    segment += 1
                    lister.append(("set", f"listed {me}", segment))
                    storer.append(("wait", f"listed {me}", segment))
                    storer.append(("write", f"staged {me} {buffer} {g}", call))
                    storer.append(("set", f"complete {me}", segment))
                    if flush:
                        publisher.append(("wait", f"complete {me}", segment))
                    else:
                        publisher.append(("wait", f"listed {me}", segment + 1))
                        publisher.append(("wait", f"complete {me}", segment))
                    publisher += [("set", f"flag {p}<{me} {g}", call) for p in others(ranks, me)]
                if g >= lead:
                    lister += [("wait", f"flag {me}<{p} {g - lead}", call) for p in others(ranks, me)]
                    segment += 1
                    lister.append(("set", f"listed {me}", segment))
                    storer.append(("wait", f"listed {me}", segment))
                    storer += [("read", f"staged {p} {buffer} {g - lead}", call) for p in others(ranks, me)]
            storer.append(("set", f"done {me}", call))
            lister.append(("wait", f"done {me}", call))
        programs += [lister, storer, publisher]
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


@pytest.mark.parametrize("lead", [0, 1])
def test_pull_two_ranks(lead: int) -> None:
    assert explore(pull(2, 2, groups=2, lead=lead, buffers=1, lag=1)) > 100
    assert explore(pull(2, 3, groups=1, lead=lead, buffers=2, lag=2)) > 100


def test_staging_without_credit_overwrites_what_a_peer_pulls() -> None:
    with pytest.raises(WrongRows):
        explore(pull(2, 3, groups=1, lead=0, buffers=1, lag=2))


def test_publishing_only_with_the_next_segment_can_wait_for_ever() -> None:
    with pytest.raises(Deadlock):
        explore(pull(2, 1, groups=2, lead=0, buffers=1, lag=1, flush=False))


def small(ranks: int, calls: int, buffers: int) -> list[Program]:
    """`exchange_small.cu`: no credit; nobody leaves a call before all have begun it."""
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
