"""The serving loop: requests in, tokens out, on ranks that run every step together.

Attention is data-parallel, so a rank has requests and caches of its own; experts are spread, so all ranks
must be in the same layer at the same time. Before every step the hosts agree, by a maximum of three numbers:

    any rank has a prompt to run?   a chunk of prompts, of the same shape on all ranks
    else                            a step of decoding, of the smallest bucket that holds every rank's rows

A rank that has nothing to do runs dummies, whose choices are dropped. The loop is over where no rank has
anything left. A request that cannot be answered is refused alone. A rank that dies ends the loop: on the host
the agreement raises RankLostError, on the device the layers' `check()`.

A step of decoding takes no input (`imbrex.serve.decoding`), so on a GPU it is one replay of a graph, and the
host is a step ahead. Tokens stay on the device in a ring and leave every `interval` steps; a request's first
token leaves at once, and its last too where the host can count up to it, which is without drafts and without
a token that stops. Else a request is known to have ended `interval` steps later at most, and its row is a
dummy meanwhile.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from imbrex.layer import MoELayer
from imbrex.runtime import waits
from imbrex.runtime.streams import Mark
from imbrex.serve.decoding import Captured, Chunk, Drafting, Steps
from imbrex.serve.model import Decoder
from imbrex.serve.request import Answer, Request, why_not_request
from imbrex.transport.groups import hosts_of

NO_DRAFTS = Drafting()


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """The settings of an engine. slots: requests at once on a rank. room: tokens of a request, prompt and
    answer. chunk: rows and tokens a row of a step of prompts. interval: steps between two deliveries.
    stop: the token that ends an answer. graphs: steps are replayed from CUDA graphs. sizes: rows of the steps
    of decoding that there are, where not powers of two."""

    slots: int
    room: int
    chunk: tuple[int, int] = (1, 64)
    interval: int = 1
    drafting: Drafting = NO_DRAFTS
    stop: int | None = None
    graphs: bool = False
    sizes: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        for name, value in (("slots", self.slots), ("interval", self.interval), ("chunk", min(self.chunk))):
            if value < 1:
                raise ValueError(f"serve: {name} is {value}; give 1 or more")
        if self.room < 2:
            raise ValueError(f"serve: a slot has room for {self.room} tokens; a prompt and an answer take 2")

    @property
    def capacity(self) -> int:
        """Tokens that a slot is as long as: what fills up the last chunk, or is drafted in vain, is written
        behind the room."""
        return self.room + max(self.chunk[1], 2 * self.drafting.length + 1)

    @property
    def buckets(self) -> list[int]:
        """Rows of the steps of decoding that there are; all slots are one of them."""
        powers = self.sizes or [1 << n for n in range(self.slots.bit_length())]
        return sorted({*(n for n in powers if n <= self.slots), self.slots})


class Seat:
    """A request in a slot. filled: tokens of its prompt that are in the cache. left: tokens that are to come,
    as far as the host has counted."""

    def __init__(self, answer: Answer) -> None:
        self.answer, self.filled, self.left = answer, 0, answer.request.max_tokens


class HostTime:
    """Seconds of the host by what it did, over `steps` steps. wait: for the device, which is no work.

    row_tokens, row_steps: tokens that steps of decoding gave, and the rows that they gave some of them to."""

    NAMES = ("agree", "launch", "deliver", "check", "wait")

    def __init__(self) -> None:
        self.steps, self.launches = 0, 0
        self.row_steps, self.row_tokens = 0, 0
        self.seconds: dict[str, float] = dict.fromkeys(self.NAMES, 0.0)
        self._since = 0.0

    def begin(self) -> None:
        self.steps += 1
        self._since = time.perf_counter()

    def spent(self, name: str) -> None:
        """Count the time since the last word under `name`."""
        now = time.perf_counter()
        self.seconds[name] += now - self._since
        self._since = now

    @property
    def busy_s(self) -> float:
        return sum(seconds for name, seconds in self.seconds.items() if name != "wait")


class Engine:
    """Answers requests with a model on the ranks of `group`; every rank makes one and steps it alike.

    answered: called with every answer as it ends or is refused. clock: whose seconds arrivals are in.
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
        self.seats: dict[int, Seat] = {}
        self.layers = [module for module in model.modules() if isinstance(module, MoELayer)]
        self.host = HostTime()
        self._landings: deque[tuple[Mark, Callable[[], None]]] = deque()
        self._decoded = 0
        self._undelivered = 0
        self._prefilled_last = False
        self.chunk = self._empty_chunk(self.device)
        model.head.use_heap(max(settings.slots * (settings.drafting.length + 1), settings.chunk[0]))
        self._first_B = torch.zeros(settings.chunk[0], dtype=torch.int64, device=self.device)
        self.programs: dict[int | str, Callable[[], None]] = {**self._capture()}

    def submit(self, request: Request) -> Answer:
        """Queue a request; its answer, which is refused at once where it cannot be given."""
        answer = Answer(request)
        vocabulary = self.model.config.vocabulary
        answer.refused = why_not_request(request, vocabulary=vocabulary, room=self.settings.room)
        if answer.refused is None:
            self.waiting.append(answer)
        else:
            self._end(answer)
        return answer

    def run(self) -> None:
        """Step until no rank has anything left."""
        while self.step():
            pass

    def step(self) -> bool:
        """One step of all ranks, a chunk of prompts or one of decoding; False where no rank had work."""
        host = self.host
        host.begin()
        self._admit()
        prefill, rows, work = self._agree()
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

    def close(self) -> None:
        self.programs.clear()
        for part in (*self.layers, self.model.head):
            part.close()

    def _admit(self) -> None:
        free = (slot for slot in range(self.settings.slots) if slot not in self.seats)
        for slot in free:
            if not self.waiting:
                break
            self.seats[slot] = Seat(self.waiting.popleft())

    def _agree(self) -> tuple[bool, int, bool]:
        """Whether a rank has a prompt to run, the rows that the fullest rank decodes, if there is work."""
        begun = [slot for slot, seat in self.seats.items() if self._is_filled(seat)]
        # Tokens that have not landed may bring new requests: users wait for them.
        work = bool(self.seats) or bool(self._landings)
        mine = [len(self.seats) > len(begun), max(begun, default=-1) + 1, work]
        if self.host_group is None:
            return mine[0], mine[1], mine[2]  # type: ignore[return-value]
        numbers = torch.tensor([int(number) for number in mine], dtype=torch.int64, device="cpu")
        waits.run(
            "agreement on the next step",
            lambda: dist.all_reduce(numbers, dist.ReduceOp.MAX, group=self.host_group, async_op=True),
            on_host=True,
            group=self.host_group,
        )
        prefill, rows, work = numbers.tolist()
        return bool(prefill), rows, bool(work)

    @staticmethod
    def _is_filled(seat: Seat) -> bool:
        return seat.filled == len(seat.answer.request.prompt)

    def _empty_chunk(self, device: torch.device | str) -> Chunk:
        (rows, length), slots = self.settings.chunk, self.settings.slots
        pinned = torch.device(device).type == "cpu" and self.device.type == "cuda"

        def zeros(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=torch.int64, device=device, pin_memory=pinned)

        # A dummy row writes into a slot of its own, behind those of requests.
        chunk = Chunk(
            tokens_BS=zeros(rows, length),
            slot_B=zeros(rows),
            start_B=zeros(rows),
            count_B=zeros(rows),
            next_B=zeros(rows),
            wanted_B=zeros(rows),
        )
        chunk.slot_B.copy_(torch.arange(slots, slots + rows, device=device))
        return chunk

    def _prefill(self) -> None:
        """Run the next piece of as many prompts as a chunk has rows; dummies where this rank has none."""
        rows, length = self.settings.chunk
        waiting = [(s, seat) for s, seat in self.seats.items() if not self._is_filled(seat)][:rows]
        chunk = self._empty_chunk("cpu")
        firsts: list[tuple[int, int, Seat]] = []
        for row, (slot, seat) in enumerate(waiting):
            request = seat.answer.request
            piece = list(request.prompt[seat.filled : seat.filled + length])
            begun, seat.filled = seat.filled, seat.filled + len(piece)
            chunk.tokens_BS[row, : len(piece)] = torch.tensor(piece, dtype=torch.int64, device="cpu")
            chunk.slot_B[row], chunk.start_B[row], chunk.count_B[row] = slot, begun, len(piece)
            if self._is_filled(seat):
                chunk.wanted_B[row] = request.max_tokens
                firsts.append((row, slot, seat))
            else:
                chunk.next_B[row] = request.prompt[seat.filled]
        self.chunk.fill(chunk)
        self.programs["prefill"]()
        self.host.launches += 1 + len(Chunk.__dataclass_fields__)
        self._prefilled_last = True
        if firsts:
            self._copy([self._first_B], lambda copied: self._take_first(copied[0].tolist(), firsts))
        for _, slot, seat in firsts:
            self._count(slot, seat)

    def _decode(self, rows: int) -> None:
        bucket = next(size for size in self.settings.buckets if size >= rows)
        self.programs[bucket]()
        self.host.launches += 1
        self._prefilled_last = False
        self._decoded += 1
        self._undelivered += 1
        running = {slot: seat for slot, seat in self.seats.items() if self._is_filled(seat)}
        ends = [slot for slot, seat in running.items() if self.counted and seat.left == 1]
        if ends or self._undelivered == self.settings.interval:
            state, steps = self.steps.state, range(self._decoded - self._undelivered, self._decoded)
            self._copy(
                [state.ring_NZX, state.taken_NZ],
                lambda copied: self._take(copied[0].tolist(), copied[1].tolist(), steps, running),
            )
            self._undelivered = 0
        for slot, seat in running.items():
            self._count(slot, seat)

    def _count(self, slot: int, seat: Seat) -> None:
        """A token of a request more is on its way; where the host can count, its slot is free after the
        last."""
        if self.counted:
            seat.left -= 1
            if not seat.left:
                del self.seats[slot]

    def _copy(self, tensors: list[Tensor], take: Callable[[list[Tensor]], None]) -> None:
        """Copy to the host beside the device's work, and call `take` once it is there."""
        if self.device.type == "cpu":
            copied = [tensor.clone() for tensor in tensors]
        else:
            copied = [torch.empty_like(t, device="cpu", pin_memory=True) for t in tensors]
            for mine, theirs in zip(copied, tensors, strict=True):
                mine.copy_(theirs, non_blocking=True)
            self.host.launches += len(tensors)
        self._landings.append((Mark(self.device), lambda: take(copied)))

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

    def _take(self, ring: list, taken: list, steps: range, running: dict[int, Seat]) -> None:
        now, interval = self.clock(), self.settings.interval
        for slot, seat in running.items():
            tokens: list[int] = []
            for step in steps:
                count = taken[step % interval][slot]
                self.host.row_steps += count > 0
                self.host.row_tokens += count
                tokens += ring[step % interval][slot][:count]
            if tokens and not seat.answer.done:
                self._give(slot, seat, tokens, now)

    def _give(self, slot: int, seat: Seat, tokens: list[int], now: float) -> None:
        answer = seat.answer
        answer.deliver(tokens, now)
        if len(answer.tokens) == answer.request.max_tokens or tokens[-1] == self.settings.stop:
            self._end(answer)
            if self.seats.get(slot) is seat:
                del self.seats[slot]

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
