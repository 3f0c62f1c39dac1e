"""The events of many ranks: by hand, against the schedule's own clock, and against a queue of events."""

from __future__ import annotations

import heapq
import time

import numpy as np
import pytest

from imbrex.schedule.contention import Contention
from imbrex.schedule.schedulers import SCHEDULERS
from imbrex.schedule.tasks import Kind, Order, Task, makespan, tasks
from imbrex.simulate.engine import Arrival, simulate


def random_seconds(degree: int, ranks: int, seed: int, *, weights: bool = False) -> dict[Task, np.ndarray]:
    random = np.random.default_rng(seed)
    return {task: random.uniform(0.1, 2.0, ranks) for task in tasks(degree, weights=weights)}


def on_rank(seconds: dict[Task, np.ndarray], rank: int) -> dict[Task, float]:
    return {task: float(one[rank]) for task, one in seconds.items()}


def test_the_faster_rank_waits_for_rows() -> None:
    seconds = {task: np.zeros(2) for task in tasks(1)}
    seconds[Task(kind=Kind.experts, chunk=0)] = np.array([1.0, 3.0])
    seconds[Task(kind=Kind.decode_back, chunk=0)] = np.array([0.5, 0.25])
    done = simulate(SCHEDULERS["sequential"](on_rank(seconds, 0)), seconds)
    assert done.over.tolist() == [3.5, 3.25]
    assert done.begins[Task(kind=Kind.move_back, chunk=0)].tolist() == [1.0, 3.0]
    assert done.ends[Task(kind=Kind.move_back, chunk=0)].tolist() == [3.0, 3.0]


@pytest.mark.parametrize("name", sorted(SCHEDULERS))
@pytest.mark.parametrize("weights", [False, True])
def test_one_rank_is_the_schedules_own_clock(name: str, weights: bool) -> None:
    for seed in range(20):
        seconds = random_seconds(1 + seed % 3, 1, seed, weights=weights)
        times = on_rank(seconds, 0)
        order = SCHEDULERS[name](times)
        assert simulate(order, seconds).seconds == pytest.approx(makespan(order, times))
        slow = Contention(compute=1.3, moves=1.7)
        assert simulate(order, seconds, contention=slow).seconds == pytest.approx(slow.makespan(order, times))


def test_equal_ranks_are_one_rank() -> None:
    seconds = {task: one.repeat(64) for task, one in random_seconds(4, 1, 7).items()}
    order = SCHEDULERS["optsche"](on_rank(seconds, 0))
    slow = Contention(compute=1.2, moves=1.5)
    alone = slow.makespan(order, on_rank(seconds, 0))
    assert simulate(order, seconds, contention=slow).over == pytest.approx(np.full(64, alone))


@pytest.mark.parametrize("arrival", Arrival)
@pytest.mark.parametrize("seed", range(12))
def test_unequal_ranks_are_as_in_a_queue_of_events(arrival: Arrival, seed: int) -> None:
    seconds = random_seconds(1 + seed % 4, 6, seed, weights=seed % 2 == 1)
    order = SCHEDULERS["stage-major" if seed % 3 == 0 else "optsche"](on_rank(seconds, 0))
    slow = Contention(compute=1.4, moves=1.6)
    done = simulate(order, seconds, contention=slow, arrival=arrival)
    assert done.over == pytest.approx(Queue(order, seconds, slow, arrival).run())


class Queue:
    """The same by one event after the other, in the order of time."""

    def __init__(self, order: Order, seconds, slow: Contention, arrival: Arrival) -> None:
        self.order, self.seconds, self.slow, self.arrival = order, seconds, slow, arrival
        self.ranks = len(next(iter(seconds.values())))
        self.lines = (order.compute, order.moves)
        self.at = [[0, 0] for _ in range(self.ranks)]
        self.left = [[float(seconds[line[0]][r]) for line in self.lines] for r in range(self.ranks)]
        self.clock = [0.0] * self.ranks
        self.sent: dict[Task, dict[int, float]] = {task: {} for task in order.moves}
        self.there: dict[tuple[Task, int], float] = {}
        self.done: list[set[Task]] = [set() for _ in range(self.ranks)]

    def run(self) -> list[float]:
        queue = [(0.0, rank) for rank in range(self.ranks)]
        while queue:
            now, rank = heapq.heappop(queue)
            self.advance(rank, now)
            for woken in self.settle(rank, now):
                heapq.heappush(queue, (now, woken))
            if (after := self.next(rank, now)) is not None:
                heapq.heappush(queue, (after, rank))
        assert all(at == [len(line) for line in self.lines] for at in self.at)
        arrivals = [[self.there[task, r] for task in self.order.moves] for r in range(self.ranks)]
        return [max(clock, *of) for clock, of in zip(self.clock, arrivals, strict=True)]

    def busy(self, rank: int, now: float) -> list[bool]:
        found = []
        for k, line in enumerate(self.lines):
            at = self.at[rank][k]
            if at == len(line):
                found.append(False)
                continue
            before = line[at].before
            ready = before is None or before in self.done[rank]
            if before is not None and before.is_move:
                ready = self.there.get((before, rank), np.inf) <= now + 1e-12
            if k == 1 and at and self.arrival is Arrival.COLLECTIVE:
                ready = ready and self.there.get((line[at - 1], rank), np.inf) <= now + 1e-12
            found.append(ready)
        return found

    def speeds(self, rank: int, now: float) -> list[float]:
        busy = self.busy(rank, now)
        slow = (self.slow.compute, self.slow.moves) if all(busy) else (1.0, 1.0)
        return [1 / slow[k] if busy[k] else 0.0 for k in (0, 1)]

    def advance(self, rank: int, now: float) -> None:
        for k, speed in enumerate(self.speeds(rank, self.clock[rank])):
            self.left[rank][k] -= speed * (now - self.clock[rank])
        self.clock[rank] = max(self.clock[rank], now) if self.running(rank) else self.clock[rank]

    def running(self, rank: int) -> bool:
        return any(self.at[rank][k] < len(line) for k, line in enumerate(self.lines))

    def settle(self, rank: int, now: float) -> list[int]:
        woken: list[int] = []
        busy = self.busy(rank, now)
        for k, line in enumerate(self.lines):
            if busy[k] and self.left[rank][k] <= 1e-12:
                task = line[self.at[rank][k]]
                self.done[rank].add(task)
                self.at[rank][k] += 1
                if self.at[rank][k] < len(line):
                    self.left[rank][k] = float(self.seconds[line[self.at[rank][k]]][rank])
                if task.is_move:
                    woken += self.arrive(task, rank, now)
                return [*woken, rank]
        return woken

    def arrive(self, task: Task, rank: int, now: float) -> list[int]:
        self.sent[task][rank] = now
        degree = self.order.degree
        share = 1.0 if self.arrival is Arrival.COLLECTIVE else (task.chunk + 1) / degree
        needed = int(np.ceil(share * self.ranks))
        times = sorted(self.sent[task].values())
        woken = []
        if len(times) >= needed:
            for r in range(self.ranks):
                every = self.arrival is Arrival.COLLECTIVE
                if (every or r in self.sent[task]) and (task, r) not in self.there:
                    self.there[task, r] = max(times[needed - 1], self.sent[task][r])
                    woken.append(r)
        return woken

    def next(self, rank: int, now: float) -> float | None:
        ends = [self.left[rank][k] / speed for k, speed in enumerate(self.speeds(rank, now)) if speed]
        return now + min(ends) if ends else None


def test_an_order_with_a_cycle_is_refused() -> None:
    seconds = random_seconds(1, 3, 0)
    order = SCHEDULERS["sequential"](on_rank(seconds, 0))
    first, *rest = order.compute
    turned = Order(compute=(*rest, first), moves=order.moves)
    with pytest.raises(ValueError, match="the order has a cycle"):
        simulate(turned, seconds)


def test_rows_that_come_one_sided_wait_less() -> None:
    random = np.random.default_rng(0)
    seconds = {task: random.lognormal(0, 0.5, 256) for task in tasks(8)}
    order = SCHEDULERS["optsche"](on_rank(seconds, 0))
    together = simulate(order, seconds).seconds
    assert simulate(order, seconds, arrival=Arrival.ONE_SIDED).seconds < 0.8 * together


def test_4096_ranks_take_seconds() -> None:
    random = np.random.default_rng(0)
    seconds = {task: random.lognormal(0, 0.3, 4096) for task in tasks(8, weights=True)}
    order = SCHEDULERS["optsche"](on_rank(seconds, 0))
    begin = time.process_time()
    simulate(order, seconds, contention=Contention(compute=1.2, moves=1.4))
    assert time.process_time() - begin < 5
