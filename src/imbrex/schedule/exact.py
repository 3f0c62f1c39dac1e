"""The scheduler `exact`: the order of tasks with the shortest time, by a search over all orders that drops
those which cannot be best.

A state says how many tasks of every chunk are done. It can be reached at different times, which are its
labels: when the processor and the network are free, and when each chunk's last task ends. A label is dropped
if another label of the state is nowhere later, or if the remaining tasks cannot end before the best order
known. Every order is a path through the states, so the best path is the best order, whatever the sizes of
chunks and the times of kinds.
"""

from __future__ import annotations

from imbrex.schedule.rules import chunks_of, optsche, stage_major
from imbrex.schedule.tasks import CHAIN, Kind, Order, Task, Times, makespan

LENGTH = len(CHAIN)
MOST_CHUNKS = 4


def exact(times: Times) -> Order:
    """The best order of up to 4 chunks. Raises ValueError for more: use `optsche` there."""
    degree = chunks_of(times)
    if degree > MOST_CHUNKS:
        raise ValueError(
            f"schedule: exact orders at most {MOST_CHUNKS} chunks, not {degree}; use optsche for more"
        )
    return _Search(times, degree).best()


class _Search:
    def __init__(self, times: Times, degree: int) -> None:
        self.times, self.degree = times, degree
        self.chains = [[Task(kind=kind, chunk=c) for kind in CHAIN] for c in range(degree)]
        self.extra = [t for t in (Task(kind=Kind.weights, chunk=c) for c in range(degree)) if t in times]
        self.seconds = [[times[task] for task in chain] for chain in self.chains]
        # What a chunk still has to do from each place on: all of it, the processor's and the network's share.
        self.left = [[self._left(c, place) for place in range(LENGTH + 1)] for c in range(degree)]
        self.limit, self.known = self._first_guess()

    def _left(self, chunk: int, place: int) -> tuple[float, float, float]:
        rest = self.chains[chunk][place:]
        moves = sum(self.times[t] for t in rest if t.is_move)
        every = sum(self.times[t] for t in rest)
        return every, every - moves, moves

    def _first_guess(self) -> tuple[float, Order]:
        guesses = [
            (makespan(order, self.times), order) for order in (optsche(self.times), stage_major(self.times))
        ]
        return min(guesses, key=lambda pair: pair[0])

    def best(self) -> Order:
        states = {(0,) * self.degree + (0,) * len(self.extra): [((0.0,) * (2 + self.degree), None)]}
        for _ in range(LENGTH * self.degree + len(self.extra)):
            states = self._advance(states)
            if not states:
                return self.known
        ended = min((entry for labels in states.values() for entry in labels), key=lambda e: max(e[0][:2]))
        if max(ended[0][:2]) >= self.limit * (1 - 1e-12):
            return self.known
        sequence, link = [], ended[1]
        while link is not None:
            sequence.append(link[0])
            link = link[1]
        return Order.of(sequence[::-1])

    def _advance(self, states: dict) -> dict:
        """All states one task on. Only orders in which no task can be moved forward into a gap are followed
        (Giffler and Thompson 1960): of the line on which a task can be over first, the tasks that begin
        before that. One of the best orders is among them."""
        reached: dict[tuple[int, ...], list] = {}
        for state, labels in states.items():
            following = list(self._next(state))
            for label, path in labels:
                ends = [self._end(label, task, seconds) for _, task, seconds in following]
                first, line = min(
                    (end, task.is_move) for end, (_, task, _) in zip(ends, following, strict=True)
                )
                for end, (place, task, seconds) in zip(ends, following, strict=True):
                    if task.is_move != line or (end - seconds >= first and end > first):
                        continue
                    after = (*state[:place], state[place] + 1, *state[place + 1 :])
                    new = self._label(after, label, task, end)
                    if self._bound(after, new) < self.limit:
                        _insert(reached.setdefault(after, []), new, (task, path))
        return reached

    def _next(self, state: tuple[int, ...]):
        for chunk in range(self.degree):
            if state[chunk] < LENGTH:
                yield chunk, self.chains[chunk][state[chunk]], self.seconds[chunk][state[chunk]]
        for index, task in enumerate(self.extra):
            if not state[self.degree + index] and state[task.chunk] > Kind.experts:
                yield self.degree + index, task, self.times[task]

    def _end(self, label: tuple[float, ...], task: Task, seconds: float) -> float:
        """Labels are (processor free, network free, every chunk's last task over)."""
        if task.kind == Kind.weights:
            # It follows `experts`, which the processor has left already.
            return label[0] + seconds
        return max(label[task.is_move], label[2 + task.chunk]) + seconds

    def _label(
        self, state: tuple[int, ...], label: tuple[float, ...], task: Task, end: float
    ) -> tuple[float, ...]:
        """The label after a task, made as comparable as can be: a chunk is not ready before its line is free,
        and a chunk that is done does not matter."""
        free = [label[0], label[1]]
        free[task.is_move] = end
        over = list(label[2:])
        if task.kind != Kind.weights:
            over[task.chunk] = end
        for chunk in range(self.degree):
            done = state[chunk] == LENGTH
            line = 0 if done else int(self.chains[chunk][state[chunk]].is_move)
            over[chunk] = 0.0 if done else max(over[chunk], free[line])
        return (*free, *over)

    def _bound(self, state: tuple[int, ...], label: tuple[float, ...]) -> float:
        """No order that goes on from here ends before."""
        lefts = [self.left[c][state[c]] for c in range(self.degree)]
        compute = sum(left[1] for left in lefts)
        compute += sum(self.times[t] for i, t in enumerate(self.extra) if not state[self.degree + i])
        moves = sum(left[2] for left in lefts)
        bound = max(label[0] + compute, label[1] + moves)
        for chunk, left in enumerate(lefts):
            if state[chunk] < LENGTH:
                line = int(self.chains[chunk][state[chunk]].is_move)
                bound = max(bound, max(label[line], label[2 + chunk]) + left[0])
        return bound


def _insert(labels: list, new: tuple[float, ...], path: tuple) -> None:
    """Keep only labels that no other is nowhere later than."""
    for label, _ in labels:
        if all(a <= b for a, b in zip(label, new, strict=True)):
            return
    labels[:] = [entry for entry in labels if not all(a >= b for a, b in zip(entry[0], new, strict=True))]
    labels.append((new, path))
