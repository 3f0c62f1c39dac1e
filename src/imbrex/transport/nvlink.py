"""The backend of kernels that write and read peers' memory over NVLink, on the GPUs of one host.

It is no `Transport`: its kernels route, move, expand and sum in one, without a host synchronisation.
`imbrex.exchange.nvlink` calls them. Layers that are given the same `Nvlink` object share one heap, and so do
layers that are given its name, the same group and the same time-out.

Ownership: an object that a caller made is closed by the caller. One that layers share by name belongs to
them: the last layer that is closed closes it, and it is closed when all of them have been garbage-collected.
Only weak references to it are kept, with the process group. Ranks collect garbage at different times, so no
rank acts on what it holds by itself. `Nvlink.of` is collective every time: ranks tell each other which object
they hold. If it is the same on all and works everywhere, they use it; otherwise all make another. Closing
asks no other rank: memory that peers have mapped stays until they close theirs.
"""

from __future__ import annotations

import socket
import time
import weakref
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple, Protocol, TypeVar

import torch
import torch.distributed as dist

from imbrex.contracts import Listener, Placement
from imbrex.kernels import jit, why_not_hopper
from imbrex.kernels.arguments import multiprocessors
from imbrex.kernels.exchange import layout as lay
from imbrex.kernels.exchange.exchange import NvlinkExchange
from imbrex.kernels.exchange.failures import ExchangeError
from imbrex.kernels.exchange.variants import shipped_variants
from imbrex.kernels.heap import Heap, SymmetricHeap
from imbrex.runtime import waits
from imbrex.runtime.roll import who_failed
from imbrex.runtime.streams import OrderedStream
from imbrex.runtime.words import words
from imbrex.transport.board import Board
from imbrex.transport.collective import Collective, device_of

__all__ = ["MOST_CHOICES", "ROW_MULTIPLE", "Size"]
"""The names for adapters."""

MOST_RANKS, MOST_CHOICES, ROW_MULTIPLE = 16, 32, 16
"""The most ranks; the most choices of a token; and the number of bytes of which a row must be a multiple."""
TOKENS_MULTIPLE = 64
_shared: weakref.WeakKeyDictionary[dist.ProcessGroup, weakref.WeakValueDictionary[float, Nvlink]]
_shared = weakref.WeakKeyDictionary()
"""The transports that layers share, by group and time-out."""


ON_CPUS = "the group does not communicate on GPUs; initialise it with NCCL"


def _uses_gpu() -> bool:
    return torch.cuda.is_available() and torch.cuda.is_initialized()


class Size(NamedTuple):
    """The sizes of kernels and of a heap, except tokens: the slots of every expert-parallel rank, each of
    `tensor` ranks that share them, E experts, K choices, rows of `row_bytes`. compact: whether rows are
    also received once per token. alignment: rows of a slot are padded to a multiple."""

    rank_offsets: tuple[int, ...]
    tensor: int
    experts: int
    choices: int
    row_bytes: int
    compact: bool = False
    alignment: int = 1

    @property
    def most_slots(self) -> int:
        """The number of slots of the fullest rank."""
        return max(end - begin for begin, end in pairwise(self.rank_offsets))

    def shape(self, max_tokens: int) -> lay.Shape:
        """The kernels' shape with room for any routing of `max_tokens` tokens a rank."""
        ranks, slots = (len(self.rank_offsets) - 1) * self.tensor, self.most_slots
        return lay.Shape(
            ranks=ranks,
            max_tokens=max_tokens,
            choices=self.choices,
            experts=self.experts,
            most_slots=slots,
            row_bytes=self.row_bytes,
            alignment=self.alignment,
            row_capacity=ranks * max_tokens * min(self.choices, slots) + slots * (self.alignment - 1),
            token_capacity=(ranks - 1) * max_tokens,
            tensor=self.tensor,
        )


class Kernels(Protocol):
    """Kernels over a heap of this transport's; as `NvlinkExchange`."""

    @property
    def usable(self) -> bool: ...
    def check(self, *, synchronize: bool = False) -> None: ...
    def close(self, *, together: bool = True) -> None: ...


K = TypeVar("K", bound=Kernels)


def room_for(tokens: int) -> int:
    """The tokens of a rank that a heap for a small batch has room for: a power of two, so that there are few
    heaps. 0 for a batch that is not small: all of those share one heap, as large as the largest needs."""
    return 0 if tokens > lay.SMALL_TOKENS else max(TOKENS_MULTIPLE, 1 << (tokens - 1).bit_length())


@dataclass(frozen=True, kw_only=True, slots=True)
class Sms:
    """Multiprocessors of the kernels: for rows out; for rows of a small batch and their routing; for encoded
    rows out; for sums back; and for tokens that a fused kernel moves."""

    dispatch: int
    small: int
    push: int
    combine: int
    stage: int


class NvlinkError(ValueError):
    """The kernels cannot run on this group."""

    def __init__(self, reason: str) -> None:
        super().__init__(f"transport 'nvlink' does not work here: {reason}; use transport='auto'")
        self.reason = reason


class Nvlink(Collective):
    """Exchanges rows by kernels over NVLink, among the Hopper GPUs of one host. Layers of a group share it,
    with one heap for each kind of rows.

    max_tokens: most tokens of a rank in a call; `None`: the most that any rank has in the first call of more
    than 512, rounded up to 64, and more when a call has more (a new heap, which waits for the GPUs). Smaller
    batches have heaps of their own.
    exact_rows: the experts' rows are as many as there are, for one host synchronisation a dispatch; else
        there is room for the worst case, W times their mean. `None`: where a backward keeps them and that
        spares much memory, in one layer or in all that share this object.
    dispatch_sms, small_sms, push_sms, combine_sms, stage_sms: multiprocessors, as in `Sms`. The blocks of a
        kernel wait for peers: two kernels that may meet on a GPU must both fit it, and those of a fused layer
        take all. Staging takes no more than the rank has that has fewest.
    beside_sms: those of every kernel that moves a chunk, with experts at work on the others.
    one_kernel: whether a small batch without gradients is dispatched and computed in one kernel, if the
        experts are imbrex's own and would take one launch for both products; the same bits. `None`: where
        that was faster, with at most 2 tokens a rank and 512 MiB of weights to read (`kernels.fused.few`).
        It takes all multiprocessors: `False` for layers in two streams of a GPU. Ranks need not agree.

    Raises ValueError for a number of multiprocessors below 1, NvlinkError where the kernels cannot run.
    """

    name = "nvlink"
    load = staticmethod(jit.load)

    def __init__(
        self,
        group: dist.ProcessGroup | None,
        *,
        timeout: float | None = None,
        max_tokens: int | None = None,
        dispatch_sms: int = 64,
        small_sms: int = 64,
        push_sms: int = 16,
        combine_sms: int = 96,
        stage_sms: int = 128,
        beside_sms: int = 32,
        exact_rows: bool | None = None,
        one_kernel: bool | None = None,
    ) -> None:
        sms = {"dispatch": dispatch_sms, "small": small_sms, "push": push_sms, "combine": combine_sms}
        sms |= {"stage": stage_sms}
        for name, number in (sms | {"beside": beside_sms}).items():
            if type(number) is not int or number < 1:
                raise ValueError(f"Nvlink: {name}_sms={number!r}; give a whole number of 1 or more")
        super().__init__(group, timeout=timeout)
        if group is not None and _uses_gpu() and self.may_run_on(group):
            self.device = torch.device("cuda", torch.cuda.current_device())
        self.max_tokens, self.exact_rows, self.one_kernel = max_tokens, exact_rows, one_kernel
        self.sms = Sms(**sms)
        self.sms_beside = Sms(**dict.fromkeys(Sms.__dataclass_fields__, beside_sms))
        self._exchanges: dict[tuple[Size, int], NvlinkExchange] = {}
        self._captured: set[NvlinkExchange] = set()
        self._others: dict[Any, Kernels] = {}
        self._held: tuple[Any, ...] = ()
        """All of these three, which every call asks for failures."""
        self._owners: weakref.WeakSet[Any] = weakref.WeakSet()
        self._shared = self._closed = False
        self._on_gpu = self.device.type == "cuda"
        self._failure: ExchangeError | None = None
        reason = self.why_not()
        if reason is not None:
            raise NvlinkError(reason)
        self.line = OrderedStream(self.device)
        self._board = self._open_board()

    @classmethod
    def of(cls, group: dist.ProcessGroup | None, *, timeout: float | None = None) -> Nvlink:
        """The one that layers of this group and time-out share by name. Collective. Raises ValueError on
        every rank where ranks differ in the time-out, NvlinkError where the kernels cannot run."""
        if group is None or not cls.may_run_on(group):
            return cls(group, timeout=timeout)  # which says why not
        seconds = waits.timeout_seconds(timeout)
        known = _shared.setdefault(group, weakref.WeakValueDictionary())
        old = known.get(seconds)
        number = old.number if old is not None and old.usable else 0
        answers_W = Collective(group, timeout=seconds).exchange_counts(words(number, round(1e6 * seconds)))
        (numbers, limits) = answers_W.T.tolist()
        if len(set(limits)) > 1:
            raise ValueError(
                f"transport 'nvlink': ranks disagree about timeout: {[us / 1e6 for us in limits]} s by rank; "
                "give every rank the same timeout= (or IMBREX_TIMEOUT_S)"
            )
        if old is not None and number and set(numbers) == {number}:
            return old
        fresh = known[seconds] = cls(group, timeout=seconds)
        fresh._shared = True
        return fresh

    @staticmethod
    def may_run_on(group: dist.ProcessGroup) -> bool:
        """Whether it is worth asking all ranks; the same on every rank. Collective over a group that
        communicates on CPUs: its ranks may have their rows on GPUs all the same."""
        if device_of(group).type == "cuda":
            return True
        return bool(Collective(group).exchange_counts(words(_uses_gpu())).all())

    @classmethod
    def of_or_reason(
        cls, group: dist.ProcessGroup | None, *, timeout: float | None = None, from_cpus: bool = False
    ) -> tuple[Nvlink | None, str]:
        """The one that layers of this group share, or why it cannot be had. Collective. from_cpus: also
        for a group that communicates on CPUs, whose ranks all use a GPU."""
        if group is not None and not from_cpus and device_of(group).type == "cpu":
            return None, ON_CPUS
        try:
            return cls.of(group, timeout=timeout), ""
        except NvlinkError as error:
            return None, error.reason

    def why_not(self) -> str | None:
        """Why the kernels cannot run on this group, or None. Collective: the same answer on every rank."""
        mine = self._why_not_here()
        if self.group is None or self.device.type != "cuda":
            return mine
        host = zlib.crc32(socket.gethostname().encode())
        device = torch.cuda.current_device() if mine is None else -1
        answers_W = self.exchange_counts(words(host, mine is not None, device))
        if answers_W[:, 1].any():
            return mine or f"rank {int(answers_W[:, 1].nonzero()[0])} of the group cannot run it"
        if (answers_W[:, 0] != answers_W[0, 0]).any():
            return "the ranks are on several hosts"
        peers = [device for device in answers_W[:, 2].tolist() if device != torch.cuda.current_device()]
        unreachable = [
            d for d in peers if not torch.cuda.can_device_access_peer(torch.cuda.current_device(), d)
        ]
        answers_W = self.exchange_counts(words(len(unreachable)))
        return "some GPUs cannot reach each other's memory" if answers_W.any() else None

    def _why_not_here(self) -> str | None:
        if self.group is None:
            return "there is only one rank, and nothing to move"
        if self.world_size > MOST_RANKS:
            return f"the kernels exchange between at most {MOST_RANKS} ranks, not {self.world_size}"
        if self.device.type != "cuda":
            return ON_CPUS
        return why_not_hopper(self.device.index) or self._why_not_loaded()

    def _why_not_loaded(self) -> str | None:
        """Why the kernels cannot be compiled or loaded, or None; they are loaded then, as a call would."""
        try:
            for variant in shipped_variants():
                self.load(variant, self.device)
        except jit.KernelError as error:
            return str(error)
        return None

    def _open_board(self) -> Board:
        """The board of the ranks' hosts. Where ranks have unequal GPUs, kernels whose blocks meet those of
        other ranks have as many as the smallest holds."""
        sms = multiprocessors(self.device.index if self.device.type == "cuda" else -1)
        answers_W2 = self.exchange_counts(words(time.time_ns(), sms))
        self.number = name = int(answers_W2[0, 0])
        self.least_sms = int(answers_W2[:, 1].min())
        path = Board.make_file(name, self.world_size) if self.rank == 0 else Board.path_of(name)
        self.exchange_counts(words(0))
        failed = partial(who_failed, self.group)
        board = Board(path, self.rank, self.world_size, self.timeout_s, failed)
        self.exchange_counts(words(0))
        if self.rank == 0:
            path.unlink()
        return board

    def agree_on_call(self, value: int, *, fine: bool, note: int = 0) -> tuple[list[int], int | None]:
        """The values (0 to 2^31 - 1) of all ranks in this call, and the first rank whose input is wrong.
        Every rank's host waits for the others to come to the same call; the GPUs are asked for nothing.
        note: 0 to 2^32 - 1; see `agreed`."""
        if self._closed:
            self._refuse_closed()
        words = self._board.tell(value << 1 | (not fine), note, self.check)
        values, wrong = [], None
        for rank, word in enumerate(words):
            values.append(word >> 1)
            if word & 1 and wrong is None:
                wrong = rank
        return values, wrong

    def check(self, *, synchronize: bool = False) -> None:
        """Raise `ExchangeError` if a call has failed, on any heap; see `NvlinkExchange.check`."""
        if self._failure is not None:
            raise self._failure
        for exchange in self._held:
            exchange.check(synchronize=synchronize)

    @property
    def agreed(self) -> bool:
        """Whether the notes of all ranks were the same in the last call."""
        notes_W = self._board.notes_W
        return notes_W.count(notes_W[0]) == len(notes_W)

    @property
    def capturing(self) -> bool:
        """Whether calls are being captured in a CUDA graph."""
        return self._on_gpu and torch.cuda.is_current_stream_capturing()

    def exchange_of(self, size: Size, room: int) -> NvlinkExchange:
        """The kernels and their heap that served a dispatch with room for so many tokens, or those that came
        after them."""
        if self._closed:
            self._refuse_closed()
        return self._exchanges[size, room_for(room)]

    def exchange_for(
        self, size: Size, placement: Placement, max_tokens: int, observer: Listener
    ) -> NvlinkExchange:
        """Kernels and a heap for at most `max_tokens` tokens a rank, at `placement`. If there are none,
        they are made, which is collective and synchronises the device."""
        at = size, room_for(max_tokens)
        exchange = self._exchanges.get(at)
        if exchange is None or exchange.shape.max_tokens < max_tokens:
            if self.capturing:
                raise RuntimeError(
                    f"dispatch: no heap yet for {max_tokens} tokens of a rank; make such a call before "
                    "capturing it"
                )
            observer.count("heaps", 1)
            self._retire(exchange)
            exchange = self._exchanges[at] = self._make(size, placement, max_tokens)
            self._hold_all()
        if self.capturing:
            self._captured.add(exchange)
            self._hold_all()
        return exchange

    def kernels_for(self, key: Any, make: Callable[[Callable[[int], Heap]], K]) -> K:
        """Kernels of another kind over a heap of their own, which layers with the same key share; they fail,
        and are closed, with this transport. Collective where there are none yet."""
        if self._closed:
            self._refuse_closed()
        if key not in self._others:
            self._others[key] = make(self._make_heap)
            self._hold_all()
        return self._others[key]  # pyright: ignore[reportReturnType]

    def _retire(self, old: NvlinkExchange | None) -> None:
        if old is None or old in self._captured:
            return
        if self.device.type == "cuda":
            # host sync: once a growth; no rank may still write to the heap that goes
            torch.cuda.synchronize(self.device)
        self.exchange_counts(words(0))
        old.close()

    def _make(self, size: Size, placement: Placement, max_tokens: int) -> NvlinkExchange:
        room = room_for(max_tokens) or max(max_tokens, self.max_tokens or 1)
        room = -(-room // TOKENS_MULTIPLE) * TOKENS_MULTIPLE
        exchange = NvlinkExchange(
            self._make_heap,
            placement,
            size.shape(room),
            compact=size.compact,
            timeout=self.timeout_s,
            load=self.load,
        )
        exchange.least_sms = self.least_sms
        return exchange

    def _make_heap(self, nbytes: int) -> Heap:
        assert self.group is not None
        return SymmetricHeap(self.group, nbytes, self.device)

    @property
    def usable(self) -> bool:
        """Whether calls can go on: it is open, and none has failed."""
        return not self._closed and all(exchange.usable for exchange in self._held)

    def _hold_all(self) -> None:
        self._held = (*{*self._exchanges.values(), *self._captured, *self._others.values()},)

    def _refuse_closed(self) -> None:
        if self._closed:
            self.check()
            raise RuntimeError(
                "transport 'nvlink': it was closed, by close() or by that of the last layer that shared it; "
                "make the layer anew"
            )

    @property
    def num_owners(self) -> int:
        """The number of those that move their rows by this one: layers, here until Python has collected
        them."""
        return len(self._owners)

    def join(self, owner: object) -> None:
        """`owner`, weakly held, moves its rows by this one until it leaves."""
        self._owners.add(owner)

    def leave(self, owner: object) -> None:
        """Closes what layers share when the last leaves, or the first after a failure: nobody can go on."""
        self._owners.discard(owner)
        if self._shared and not (self._owners and self.usable):
            self.close()

    def close(self) -> None:
        """Free the heaps, once this GPU has done what it was given. Asks no other rank. Layers that use them
        cannot be used afterwards, nor graphs that were captured with them be replayed."""
        try:
            self.check()
        except ExchangeError as error:
            self._failure = error
        self._closed = True
        for exchange in self._held:
            exchange.close(together=False)
        self._exchanges.clear()
        self._captured.clear()
        self._others.clear()
        self._hold_all()
