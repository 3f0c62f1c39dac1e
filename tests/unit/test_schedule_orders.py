"""Orders of tasks: the exact one against brute force and an independent solver; where optsche is the best."""

from __future__ import annotations

import itertools
import math
import random

import numpy as np
import pytest

from imbrex.overlap import Kind, Order, Task, Times, make, makespan
from imbrex.schedule.choice import predict
from imbrex.schedule.contention import Contention, fit
from imbrex.schedule.exact import exact
from imbrex.schedule.profile import Profile
from imbrex.schedule.rules import optsche, sequential, stage_major
from imbrex.schedule.schedulers import SCHEDULERS
from imbrex.schedule.tasks import CHAIN, MOVES, check, run, tasks


def random_times(degree: int, drawn: random.Random, *, weights: bool = False) -> dict[Task, float]:
    return {task: drawn.random() for task in tasks(degree, weights=weights)}


def alike(degree: int, encode: float, move: float, decode: float, experts: float) -> dict[Task, float]:
    """ScheMoE's assumption: equal chunks, the same out and back."""
    seconds = (encode, move, decode, experts, encode, move, decode)
    return {Task(kind=k, chunk=c): s for c in range(degree) for k, s in zip(CHAIN, seconds, strict=True)}


def by_hand(seconds: tuple[float, ...], degree: int) -> dict[Task, float]:
    return {Task(kind=k, chunk=c): s for c in range(degree) for k, s in zip(CHAIN, seconds, strict=True)}


def every_order(degree: int) -> list[Order]:
    """All orders of both lines that can run."""
    compute = [kind for kind in CHAIN if kind not in (Kind.move_out, Kind.move_back)]
    lines = []
    for kinds in (compute, [Kind.move_out, Kind.move_back]):
        merged = []
        for pattern in (
            set(itertools.permutations([c for c in range(degree) for _ in kinds]))
            if len(kinds) * degree <= 4
            else _merges(degree, len(kinds))
        ):
            seen = [0] * degree
            line = []
            for chunk in pattern:
                line.append(Task(kind=kinds[seen[chunk]], chunk=chunk))
                seen[chunk] += 1
            merged.append(tuple(line))
        lines.append(merged)
    return [Order(compute=c, moves=m) for c in lines[0] for m in lines[1]]


def _merges(degree: int, length: int) -> list[tuple[int, ...]]:
    assert degree == 2
    found = []
    for places in itertools.combinations(range(2 * length), length):
        found.append(tuple(int(place not in places) for place in range(2 * length)))
    return found


def brute_force(times: dict[Task, np.ndarray]) -> np.ndarray:
    """The best makespan of many instances of two chunks at once, over all orders that can run."""
    best = np.full_like(next(iter(times.values())), np.inf)
    for order in every_order(2):
        over, free, at = {}, [0.0, 0.0], [0, 0]
        lines = (order.compute, order.moves)
        for _ in range(28):
            for k in (0, 1):
                task = lines[k][at[k]] if at[k] < len(lines[k]) else None
                if task is not None and (task.before is None or task.before in over):
                    begin = np.maximum(free[k], over[task.before] if task.before else 0.0)
                    over[task] = free[k] = begin + times[task]
                    at[k] += 1
        if at == [10, 4]:
            best = np.minimum(best, np.maximum(free[0], free[1]))
    return best


@pytest.mark.untraced
def test_exact_is_the_best_of_all_orders_of_two_chunks() -> None:
    drawn = random.Random(0)
    instances = [random_times(2, drawn) for _ in range(1000)]
    # Chunks of other sizes, and few distinct times, so that many orders tie.
    for _ in range(1000):
        sizes = drawn.uniform(0.2, 1.8), drawn.uniform(0.2, 1.8)
        kinds = [drawn.choice([0.0, 0.5, 1.0, 2.0]) for _ in CHAIN]
        instances.append({t: kinds[t.kind] * sizes[t.chunk] for t in tasks(2)})
    best = brute_force({task: np.array([times[task] for times in instances]) for task in tasks(2)})
    found = np.array([makespan(exact(times), times) for times in instances])
    assert np.abs(found - best).max() < 1e-9
    assert (best < np.inf).all()


def can_end_by(times: Times, degree: int, end: int) -> bool:
    """Whether any order of whole seconds, all above 0, is over by `end`: what can be the case after every
    second, whether a line starts something or waits. Independent of orders and of labels. Weights' gradients,
    where they have times, begin when their chunk's experts are over, and nothing waits for them."""
    chains = [[int(times[Task(kind=k, chunk=c)]) for k in CHAIN] for c in range(degree)]
    extra = [int(times.get(Task(kind=Kind.weights, chunk=c), 0)) for c in range(degree)]
    left = [[_left(chain, place) for place in range(len(CHAIN) + 1)] for chain in chains]
    # A state: tasks that every chunk has begun, whose weights are still to be begun, and per line the chunk
    # under way (-1 for weights, which hold up no chunk) and its seconds left.
    states = {((0,) * degree, tuple(s > 0 for s in extra), (-1, 0), (-1, 0))}
    for second in range(end + 1):
        started = set()
        for begun, owed, compute, moves in states:
            if min(begun) == len(CHAIN) and not (any(owed) or compute[1] or moves[1]):
                return True
            rest = [left[c][place] for c, place in enumerate(begun)]
            weights = sum(s for s, owes in zip(extra, owed, strict=True) if owes)
            needed = compute[1] + weights + sum(r[0] for r in rest), moves[1] + sum(r[1] for r in rest)
            if second + max(*needed, *(sum(r) for r in rest)) > end:
                continue
            for first, other in itertools.product(
                [None] if compute[1] else _startable(begun, owed, compute, moves, is_move=False),
                [None] if moves[1] else _startable(begun, owed, compute, moves, is_move=True),
            ):
                after, owing, lines = list(begun), list(owed), [compute, moves]
                for line, choice in enumerate((first, other)):
                    if choice is None:
                        continue
                    chunk, of_weights = choice
                    if of_weights:
                        owing[chunk], lines[line] = False, (-1, extra[chunk])
                    else:
                        lines[line] = (chunk, chains[chunk][after[chunk]])
                        after[chunk] += 1
                lines = [(c, s - 1) if s > 1 else (-1, 0) for c, s in lines]
                started.add((tuple(after), tuple(owing), *lines))
        states = started
    return False


def _left(chain: list[int], place: int) -> tuple[int, int]:
    """Seconds of the processor and of the network from a place of a chunk's chain on."""
    moves = sum(s for kind, s in zip(CHAIN[place:], chain[place:], strict=True) if kind in MOVES)
    return sum(chain[place:]) - moves, moves


def _startable(begun, owed, compute, moves, *, is_move: bool) -> list[tuple[int, bool] | None]:
    """What a free line can start: nothing, a chunk's next task, or, of the processor, a chunk's weights."""
    busy = {chunk for chunk, left in (compute, moves) if left}
    chain = [
        (c, False)
        for c, place in enumerate(begun)
        if c not in busy and place < len(CHAIN) and (CHAIN[place] in MOVES) == is_move
    ]
    free = [] if is_move else [(c, True) for c, place in enumerate(begun) if owed[c] and place > Kind.experts]
    return [None, *chain, *free]


@pytest.mark.untraced
@pytest.mark.parametrize("weights", [False, True], ids=["forward", "backward"])
@pytest.mark.parametrize(
    ("degree", "instances", "longest", "largest"), [(1, 20, 9, 3), (2, 60, 5, 3), (3, 16, 4, 2), (4, 4, 2, 1)]
)
def test_exact_equals_an_independent_solver(
    degree: int, instances: int, longest: int, largest: int, weights: bool
) -> None:
    """In turn, every task of any time, and chunks up to `largest` times as large as others."""
    drawn = random.Random(degree)
    for number in range(instances // (1 + weights)):  # each takes four to six times as long
        kinds = [drawn.randint(1, longest) for _ in Kind]
        sizes = [drawn.randint(1, largest) for _ in range(degree)]
        every = tasks(degree, weights=weights)
        times = {t: float(kinds[t.kind] * sizes[t.chunk]) for t in every}
        if number % 2:
            times = {t: float(drawn.randint(1, longest)) for t in every}
        order = exact(times)
        check(order, degree, weights=weights)
        end = int(makespan(order, times))
        assert can_end_by(times, degree, end)
        assert not can_end_by(times, degree, end - 1)


@pytest.mark.parametrize("degree", [1, 2, 3, 4])
def test_optsche_is_the_best_under_its_assumption(degree: int) -> None:
    drawn = random.Random(degree)
    for _ in range(40 if degree < 4 else 10):
        times = alike(degree, *(drawn.choice([0.0, drawn.random(), 2 * drawn.random()]) for _ in range(4)))
        assert makespan(optsche(times), times) == pytest.approx(makespan(exact(times), times), abs=1e-9)


def test_optsche_is_not_the_best_elsewhere() -> None:
    """The smallest case: only the first move and the last decoding take time."""
    times = by_hand((0, 1, 0, 0, 0, 0, 1), 2)
    assert (makespan(optsche(times), times), makespan(exact(times), times)) == (4, 3)
    other = by_hand((4, 0, 2, 0, 0, 7, 1), 2)
    assert (makespan(optsche(other), other), makespan(exact(other), other)) == (25, 23)


@pytest.mark.untraced
def test_optsche_takes_twice_as_long_as_the_best_and_never_longer() -> None:
    seconds = {(Kind.encode_out, 0), (Kind.move_back, 0), (Kind.move_out, 1), (Kind.decode_back, 1)}
    times = {task: float((task.kind, task.chunk) in seconds) for task in tasks(2)}
    assert [makespan(scheduler(times), times) for scheduler in (optsche, exact)] == [4.0, 2.0]
    drawn = random.Random(0)
    for _ in range(60):
        times = {task: drawn.choice([0.0, 1.0, drawn.random()]) for task in tasks(2)}
        assert makespan(optsche(times), times) <= 2 * makespan(exact(times), times) + 1e-9


@pytest.mark.untraced
def test_how_much_optsche_loses_on_other_chunks() -> None:
    """Chunk sizes from 0.2 to 1.8, three chunks: it loses somewhere, on average a few percent, at most 30."""
    drawn = random.Random(5)
    loss = []
    for _ in range(60):
        sizes = [drawn.uniform(0.2, 1.8) for _ in range(3)]
        kinds = alike(1, drawn.random(), 2 * drawn.random(), drawn.random(), 2 * drawn.random())
        times = {t: kinds[Task(kind=t.kind, chunk=0)] * sizes[t.chunk] for t in tasks(3)}
        loss.append(makespan(optsche(times), times) / makespan(exact(times), times) - 1)
    assert min(loss) >= -1e-9
    assert 0.3 < np.mean(np.array(loss) > 1e-9) < 0.95
    assert 0.005 < np.mean(loss) < 0.1
    assert max(loss) < 0.3


@pytest.mark.untraced
@pytest.mark.parametrize(("degree", "mean", "most"), [(1, 1.06, 1.35), (2, 1.02, 1.3), (3, 1.007, 1.25)])
def test_weight_gradients_fill_gaps(degree: int, mean: float, most: float) -> None:
    """Over times from 0.02 to 2 by their logarithm: as a part of the experts' task they cost 10, 4 and 1.5 %
    more for 1, 2 and 3 chunks; as tasks of their own, optsche with them is within 0.1 % of the best."""
    drawn = random.Random(degree)
    ratio, near = [], []
    for _ in range(60):
        encode, decode = (math.exp(drawn.uniform(-3.9, -0.7)) for _ in range(2))
        move, experts = (math.exp(drawn.uniform(-3, 0.7)) for _ in range(2))
        fused = alike(degree, encode, move, decode, 2 * experts)
        times = alike(degree, encode, move, decode, experts)
        times |= {Task(kind=Kind.weights, chunk=c): experts for c in range(degree)}
        best = makespan(exact(times), times)
        ratio.append(makespan(optsche(fused), fused) / best)
        near.append(makespan(optsche(times), times) / best)
    assert min(ratio) >= 1 - 1e-9
    assert mean < np.mean(ratio)
    assert 1.05 < max(ratio) < most
    assert np.mean(near) < 1.002


def test_makespans_by_hand() -> None:
    """Encode 1, move 2, decode 1, experts 3, so 1+2+1+3+1+2+1 = 11 seconds a chunk alone.

    optsche of two: encodings to 2; moves 1-3 and 3-5; chunk 0 computes 3-8, moves 8-10, chunk 1 computes 8-13
    and moves 13-15; decodings 13-14 and 15-16.
    """
    times = alike(2, 1, 2, 1, 3)
    assert makespan(sequential(times), times) == 22
    assert makespan(optsche(times), times) == 16
    begins = run(optsche(times), times)[1]
    assert begins[Task(kind=Kind.decode_back, chunk=0)] == 13
    assert makespan(stage_major(times), times) == 18


def test_planning_comes_before_the_forward_alone() -> None:
    """Every task takes a second, of whatever size, planning 2 and 5 seconds for one chunk and for two."""
    points = {kind.name: [(1.0, 1.0), (9.0, 1.0)] for kind in CHAIN}
    profile = Profile(tokens=8, forward=points | {"plan": [(1, 2.0), (2, 5.0)]}, backward=points)
    for degree, planning in ((1, 2.0), (2, 5.0)):
        order = sequential(profile.even_times(degree)[0])
        assert profile.makespan(order) == 7 * degree + planning
        assert profile.makespan(order, backward=True) == 7 * degree
        seconds = predict(profile, "sequential", degree)
        assert (seconds.forward, seconds.backward) == (7 * degree + planning, 7 * degree)


@pytest.mark.parametrize("degree", [1, 2, 3, 4])
@pytest.mark.parametrize("name", SCHEDULERS)
@pytest.mark.parametrize("weights", [False, True])
def test_every_scheduler_gives_an_order_that_runs(name: str, degree: int, weights: bool) -> None:
    times = random_times(degree, random.Random(degree), weights=weights)
    check(SCHEDULERS[name](times), degree, weights=weights)


def test_orders_that_cannot_run() -> None:
    times = alike(2, 1, 1, 1, 1)
    good = optsche(times)
    with pytest.raises(ValueError, match="encode_out of chunk 0 stands twice in `compute`"):
        check(Order(compute=(good.compute[0], *good.compute), moves=good.moves), 2)
    with pytest.raises(ValueError, match="move_back of chunk 1 is missing; 1 of 14 tasks are"):
        check(Order(compute=good.compute, moves=good.moves[:-1]), 2)
    with pytest.raises(ValueError, match="move_out of chunk 0 does not belong into `compute` of 2 chunks"):
        check(Order(compute=good.compute + good.moves[:1], moves=good.moves[1:]), 2)
    with pytest.raises(ValueError, match="wait for tasks that come later: the order has a cycle"):
        check(Order(compute=good.compute[::-1], moves=good.moves), 2)
    with pytest.raises(ValueError, match="exact orders at most 4 chunks, not 5; use optsche"):
        exact(dict.fromkeys(tasks(5), 1.0))


def test_without_contention_a_makespan_is_a_makespan() -> None:
    drawn = random.Random(3)
    for degree in (1, 2, 5):
        times = random_times(degree, drawn, weights=True)
        for scheduler in (sequential, stage_major, optsche):
            order = scheduler(times)
            assert Contention().makespan(order, times) == pytest.approx(makespan(order, times))


def test_lines_that_slow_each_other_down() -> None:
    """Chunk 0 is computed for one second while chunk 1 moves for one: both at two thirds of their speed."""
    times = dict.fromkeys(tasks(2), 0.0)
    times[Task(kind=Kind.experts, chunk=0)] = times[Task(kind=Kind.move_out, chunk=1)] = 1.0
    slow = Contention(compute=1.5, moves=1.5)
    assert slow.makespan(optsche(times), times) == pytest.approx(1.5)
    assert slow.makespan(sequential(times), times) == pytest.approx(2.0)


def test_contention_is_read_from_four_times() -> None:
    found = fit(1.0, 2.0, 1.5, 2.75)
    assert (found.compute, found.moves) == (pytest.approx(1.5), pytest.approx(2.0))
    assert fit(1.0, 2.0, 1.0, 2.0) == Contention()
    assert fit(0.0, 0.0, 0.0, 0.0) == Contention()


def test_more_chunks_than_anybody_waits_for_are_refused() -> None:
    with pytest.raises(ValueError, match="1000000 chunks; use at most 256"):
        make("optsche-1000000")
