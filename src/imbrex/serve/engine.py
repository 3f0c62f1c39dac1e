"""The serving loop: requests in, tokens out, on ranks that run every step together.

Attention is data-parallel, so every rank has its own requests and caches. Experts are spread, so all ranks
must be in the same layer at the same time. Before every step the hosts agree on what to run, by the maximum
of three numbers:

    any rank has a prompt to run?   a chunk of prompts, of the same shape on all ranks
    else                            a decoding step, of the smallest size that holds every rank's rows

A rank that has nothing to do runs dummy rows, whose choices are dropped. The loop ends when no rank has work
left. A request that cannot be answered is refused by itself. If a rank dies, the loop ends: the hosts'
agreement raises RankLostError, or the layers' `check()` does.

A decoding step has no inputs (`imbrex.serve.decoding`), so on a GPU it is one replay of a graph, and the host
is a step ahead. Tokens stay on the device in a ring, and are delivered every `interval` steps. A request's
first token is delivered at once, and so are its last ones if the host can count to them: without drafts, and
without a token that stops. Otherwise a request is known to have ended at most `interval` steps later, and its
row is a dummy until then.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from heapq import heappop, heappush
from itertools import chain, islice

import torch
import torch.distributed as dist
from torch import Tensor

from imbrex.layer import MoELayer
from imbrex.runtime import waits
from imbrex.runtime.streams import StreamEvent
from imbrex.serve.decoding import Captured, Chunk, Drafting, Steps, chunk_of
from imbrex.serve.model import Decoder
from imbrex.serve.request import Answer, Request, why_not_request
from imbrex.transport.groups import hosts_of

NO_DRAFTS = Drafting()


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """The settings of an engine.

    slots: the requests that a rank serves at once. room: the most tokens of a request, prompt and answer.
    chunk: rows, and tokens per row, of a prefill step. interval: steps between two deliveries of tokens, at
    most `room`, in which every answer ends.
    stop: the token that ends an answer. graphs: whether steps are captured as CUDA graphs. sizes: the numbers
    of rows for which there are decoding steps; by default powers of two.
    """

    slots: int
    room: int
    chunk: tuple[int, int] = (1, 64)
    interval: int = 1
    drafting: Drafting = NO_DRAFTS
    stop: int | None = None
    graphs: bool = False
    sizes: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        least = {"slots": self.slots, "interval": self.interval, "chunk": min(self.chunk)}
        for name, value in (least | {"sizes": min(self.sizes, default=1)}).items():
            if value < 1:
                raise ValueError(f"serve: {name} is {value}; give 1 or more")
        # Memory for more steps than an answer takes would be copied, and never used.
        object.__setattr__(self, "interval", min(self.interval, self.room))
        if self.room < 2:
            raise ValueError(f"serve: a slot has room for {self.room} tokens; a prompt and an answer take 2")

    @property
    def capacity(self) -> int:
        """The length of a slot in tokens. Padding of the last chunk, and refused drafts, are written behind
        `room`."""
        return self.room + max(self.chunk[1], 2 * self.drafting.length + 1)

    @property
    def buckets(self) -> list[int]:
        """The numbers of rows for which there are decoding steps; the number of slots is one of them."""
        powers = self.sizes or [1 << n for n in range(self.slots.bit_length())]
        return sorted({*(n for n in powers if n <= self.slots), self.slots})


class Seat:
    """A request in a slot. filled: tokens of its prompt that are in the cache. since: the number of decoding
    steps before its first one, later before the first one whose tokens have not been copied."""

    def __init__(self, answer: Answer) -> None:
        self.answer, self.filled, self.since = answer, 0, 0


class HostTime:
    """Seconds of the host by what it did in `steps` steps. agree: agreement with the other ranks, which
    includes waiting for the slowest. model: the steps themselves, if a CPU computes them. wait: waiting
    for the device.

    row_tokens, row_steps: the tokens that decoding steps generated, and the number of rows that got some of
    them.
    """

    NAMES = ("seat", "agree", "launch", "deliver", "check", "model", "wait")
    OTHERS = ("model", "wait")
    """The names that are not the engine's own work."""

    def __init__(self) -> None:
        self.steps, self.launches = 0, 0
        self.row_steps, self.row_tokens = 0, 0
        self.seconds: dict[str, float] = dict.fromkeys(self.NAMES, 0.0)
        self._since = 0.0

    def begin(self) -> None:
        self.steps += 1
        self._since = time.perf_counter()

    def spent(self, name: str) -> None:
        """Add the time since the last call to that of `name`."""
        now = time.perf_counter()
        self.seconds[name] += now - self._since
        self._since = now

    @property
    def busy_s(self) -> float:
        return sum(seconds for name, seconds in self.seconds.items() if name not in self.OTHERS)


class Engine:
    """Answers requests with a model on the ranks of `group`. Every rank makes an engine, and calls `step` or
    `run` as the others do.

    answered: a function that is called with every answer when it ends or is refused. clock: the clock of
    arrival times.
    """

    def __init__(
        self,
        model: Decoder,
        settings: Settings,
        group: dist.ProcessGroup | None = None,
        *,
        answered: Callable[[Answer], object] | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        if model.config.positions < settings.capacity:
            raise ValueError(
                f"serve: the model has {model.config.positions} positions, and a slot takes "
                f"{settings.capacity}; make it with more, or give less room"
            )
        self.model, self.settings, self.answered, self.clock = model.eval(), settings, answered, clock
        self.group = group if group is not None and group.size() > 1 else None
        self.host_group = None if self.group is None else hosts_of(self.group)
        self.steps = Steps(
            model,
            slots=settings.slots,
            capacity=settings.capacity,
            spare=settings.chunk[0],
            interval=settings.interval,
            drafting=settings.drafting,
            stop=settings.stop,
        )
        self.device = self.steps.device
        self.counted = not settings.drafting.length and settings.stop is None
        self.waiting: deque[Answer] = deque()
        self.free = list(range(settings.slots))
        # Prompts that are not whole in the cache yet, and requests that steps of decoding go on with.
        self.filling: dict[int, Seat] = {}
        self.running: dict[int, Seat] = {}
        self._ends: dict[int, list[int]] = {}
        self.layers = [module for module in model.modules() if isinstance(module, MoELayer)]
        self.host = HostTime()
        self._landings: deque[tuple[StreamEvent, Callable[[], None]]] = deque()
        self._decoded = 0
        self._prefilled_last = False
        self.chunk = chunk_of(self._chunk(()).numbers.to(self.device), settings.chunk[0])
        model.head.use_heap(max(settings.slots * (settings.drafting.length + 1), settings.chunk[0]))
        self._first_B = torch.zeros(settings.chunk[0], dtype=torch.int64, device=self.device)
        self.programs: dict[int | str, Callable[[], None]] = {**self._capture()}

    def submit(self, request: Request) -> Answer:
        """Queue a request. Returns its answer, which is refused at once if it cannot be given. The prompt is
        copied."""
        answer = Answer(request)
        vocabulary = self.model.config.vocabulary
        answer.refused = why_not_request(request, vocabulary=vocabulary, room=self.settings.room)
        if answer.refused is None:
            # What was looked at is what is served.
            answer.request = replace(request, prompt=tuple(request.prompt))
            self.waiting.append(answer)
        else:
            self._end(answer)
        return answer

    def run(self) -> None:
        """Run steps until no rank has work left."""
        while self.step():
            pass

    def step(self) -> bool:
        """Run one step of all ranks, prefill or decoding. Returns whether any rank had work."""
        host = self.host
        host.begin()
        self._admit()
        mine = self._next_step()
        host.spent("seat")
        prefill, rows, work = self._agree(mine)
        host.spent("agree")
        if not work:
            return False
        # Prompts and decoding take turns: neither waits for all of the other.
        landed = len(self._landings)
        if not prefill and not rows:
            pass
        elif prefill and (not rows or not self._prefilled_last):
            self._prefill()
        else:
            self._decode(rows)
        host.spent("launch")
        self._land(landed)
        for part in (*self.layers, self.model.head):
            part.check()
        host.spent("check")
        return True

    def drop(self) -> None:
        """Forget this rank's requests; their answers stay as they are. The other ranks' go on."""
        if not (self.waiting or self.filling or self.running):
            return
        for of in (self.waiting, self.filling, self.running, self._ends):
            of.clear()
        self.free = list(range(self.settings.slots))
        # Behind the newest step, on its stream: the rows are dummies from here on.
        self.steps.state.remaining_Z.zero_()

    def close(self) -> None:
        self.programs.clear()
        for part in (*self.layers, self.model.head):
            part.close()

    def _admit(self) -> None:
        while self.waiting and self.free:
            self.filling[heappop(self.free)] = Seat(self.waiting.popleft())

    def _leave(self, slot: int) -> None:
        del self.running[slot]
        heappush(self.free, slot)

    def _next_step(self) -> tuple[int, int, int]:
        """Whether this rank has a prompt to run, the rows that it decodes, if it has work."""
        # Tokens that have not landed may bring new requests: users wait for them.
        work = bool(self.filling or self.running or self._landings)
        return bool(self.filling), max(self.running, default=-1) + 1, work

    def _agree(self, mine: tuple[int, int, int]) -> tuple[int, int, int]:
        """The largest of each number over the ranks."""
        if self.host_group is None:
            return mine
        numbers = torch.tensor(mine, dtype=torch.int64, device="cpu")
        waits.run(
            "agreement on the next step",
            lambda: dist.all_reduce(numbers, dist.ReduceOp.MAX, group=self.host_group, async_op=True),
            on_host=True,
            group=self.host_group,
        )
        prefill, rows, work = numbers.tolist()
        return prefill, rows, work

    def _run(self, program: int | str) -> None:
        """One of the programs; where a CPU computes it, that is no work of the engine."""
        self.host.spent("launch")
        self.programs[program]()
        self.host.spent("model" if self.device.type == "cpu" else "launch")
        self.host.launches += 1

    def _chunk(self, pieces: Sequence[tuple[int, Seat]]) -> Chunk:
        """The next tokens of prompts, on the host. A dummy row writes into a slot of its own, behind those of
        requests."""
        (rows, length), slots, tokens = self.settings.chunk, self.settings.slots, list[int]()
        of_row = [(slots + row, 0, 0, 0, 0) for row in range(rows)]
        for row, (slot, seat) in enumerate(pieces):
            prompt, begin = seat.answer.request.prompt, seat.filled
            piece = prompt[begin : begin + length]
            tokens += [*piece, *[0] * (length - len(piece))]
            seat.filled = begin + len(piece)
            whole = seat.filled == len(prompt)
            after, last = (0, seat.answer.request.max_tokens) if whole else (prompt[seat.filled], 0)
            of_row[row] = slot, begin, len(piece), after, last
        tokens += [0] * (rows * length - len(tokens))
        numbers = [*tokens, *chain.from_iterable(zip(*of_row, strict=True))]
        pinned = self.device.type == "cuda"
        return chunk_of(torch.tensor(numbers, dtype=torch.int64, device="cpu", pin_memory=pinned), rows)

    def _prefill(self) -> None:
        """Run the next piece of as many prompts as a chunk has rows; dummies where this rank has none."""
        pieces = list(islice(self.filling.items(), self.settings.chunk[0]))
        self.chunk.numbers.copy_(self._chunk(pieces).numbers, non_blocking=True)
        self.host.launches += 1
        self._run("prefill")
        self._prefilled_last = True
        whole = [
            (row, slot, seat)
            for row, (slot, seat) in enumerate(pieces)
            if seat.filled == len(seat.answer.request.prompt)
        ]
        if whole:
            self._copy([self._first_B], lambda copied: self._take_first(copied[0].tolist(), whole))
        for _, slot, seat in whole:
            del self.filling[slot]
            self.running[slot] = seat
            seat.since, later = self._decoded, seat.answer.request.max_tokens - 1
            if self.counted and later:
                self._ends.setdefault(self._decoded + later, []).append(slot)
            elif self.counted:
                self._leave(slot)

    def _decode(self, rows: int) -> None:
        self._run(next(size for size in self.settings.buckets if size >= rows))
        self._prefilled_last = False
        self._decoded += 1
        ends = self._ends.pop(self._decoded, ())
        # Those that end leave at once, and the others with every `interval`th step.
        every = self._decoded % self.settings.interval == 0
        leaving = self.running.copy() if every else {slot: self.running[slot] for slot in ends}
        if leaving:
            self._copy_tokens(leaving)
        for slot in ends:
            self._leave(slot)

    def _copy_tokens(self, leaving: dict[int, Seat]) -> None:
        """Copy the tokens that these requests have got in the steps up to now. They never wrap around the
        ring: all that run are asked where it is full."""
        state, now, first = self.steps.state, self._decoded, min(seat.since for seat in leaving.values())
        begin = first % self.settings.interval
        steps = slice(begin, begin + now - first)
        tensors = [state.ring_NZX[steps]] if self.counted else [state.ring_NZX[steps], state.taken_NZ[steps]]
        seats = [(slot, seat, seat.since - first) for slot, seat in leaving.items()]
        for seat in leaving.values():
            seat.since = now
        self._copy(tensors, lambda copied: self._take(copied, seats))

    def _copy(self, tensors: list[Tensor], take: Callable[[list[Tensor]], None]) -> None:
        """Copy to the host beside the device's work, and call `take` once it is there."""
        if self.device.type == "cpu":
            copied = [tensor.clone() for tensor in tensors]
        else:
            copied = [torch.empty_like(t, device="cpu", pin_memory=True) for t in tensors]
            for mine, theirs in zip(copied, tensors, strict=True):
                mine.copy_(theirs, non_blocking=True)
            self.host.launches += len(tensors)
        self._landings.append((StreamEvent(self.device), lambda: take(copied)))

    def _land(self, landings: int = 0, *, everything: bool = False) -> None:
        """Take what was copied before the newest step, which runs meanwhile."""
        for _ in range(len(self._landings) if everything else landings):
            mark, take = self._landings.popleft()
            self.host.spent("deliver")
            mark.wait(waits.timeout_seconds())
            self.host.spent("wait")
            take()
        self.host.spent("deliver")

    def _take_first(self, tokens: list[int], firsts: list[tuple[int, int, Seat]]) -> None:
        now = self.clock()
        for row, slot, seat in firsts:
            self._give(slot, seat, [tokens[row]], now)

    def _take(self, copied: list[Tensor], seats: list[tuple[int, Seat, int]]) -> None:
        """Deliver to each request the tokens of the copied steps, from its own first one on. Where the host
        counts, every step gave each one token."""
        now, (end, _, width) = self.clock(), copied[0].shape
        ring, *counts = (of.transpose(0, 1).flatten(1).tolist() for of in copied)
        for slot, seat, begin in seats:
            tokens = ring[slot][begin * width :]
            of_step = counts[0][slot][begin:] if counts else [1] * (end - begin)
            if counts:
                rows = (tokens[width * at : width * at + count] for at, count in enumerate(of_step))
                tokens = list(chain.from_iterable(rows))
            self.host.row_steps += sum(map(bool, of_step))
            self.host.row_tokens += len(tokens)
            if tokens and not seat.answer.done:
                self._give(slot, seat, tokens, now)

    def _give(self, slot: int, seat: Seat, tokens: list[int], now: float) -> None:
        answer = seat.answer
        answer.deliver(tokens, now)
        if len(answer.tokens) == answer.request.max_tokens or tokens[-1] == self.settings.stop:
            self._end(answer)
            if self.running.get(slot) is seat:
                self._leave(slot)

    def _end(self, answer: Answer) -> None:
        answer.done = True
        if self.answered is not None:
            self.answered(answer)

    def _capture(self) -> dict[int | str, Captured]:
        """Every step that there is, run once while all rows are dummies, and recorded on a GPU."""
        graphs, steps = self.settings.graphs and self.device.type == "cuda", self.steps

        def prefill() -> None:
            self._first_B.copy_(steps.prefill(self.chunk))

        programs: dict[int | str, Captured] = {"prefill": Captured(prefill, self.device, graphs=graphs)}
        # The compiler picks how operators of any size run by the first of them: not by few rows, whose times
        # are too short to tell.
        for rows in reversed(self.settings.buckets):
            programs[rows] = Captured(lambda rows=rows: steps.decode(rows), self.device, graphs=graphs)
        steps.state.step_1.zero_()
        return programs
