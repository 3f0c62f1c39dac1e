"""Ranks out of step: every rank a stream of launches of one kernel, all streams in one emulated machine.

    ranks = OutOfStep(case, load_routing)         # one `NvlinkExchange` a rank, over one memory
    ranks.exchanges[0].push(...)                  # is only written down
    ranks.run(seed, told)                         # now all of them run, each rank its launches in their order

A launch of virtual ranks ends on all of them before the next begins, so a call never meets the call before
it. Here ranks are in different calls, as on GPUs, and wait between two of them for as long as the adversary
likes.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from imbrex.kernels import jit
from imbrex.kernels.exchange.exchange import NvlinkExchange, Routed
from imbrex.kernels.heap import VirtualHeap
from imbrex.kernels.routing.routed import Addresses
from tests.emulated.kernel import _library
from tests.emulated.scenario import Case, make_exchange

Told = Callable[[int, int, bool], None]
"""(rank, call, ended): told before a launch begins and after it has ended; the device's memory is at rest for
this rank alone."""


SET, SEEN, WRITE, READ, BEGIN, END = range(6)


class Event(ctypes.Structure):
    """What happened at byte `at` of the heaps: a flag was set, or seen, to be `value`; bytes were written, by
    whoever owns the place (`stream` is -1), or read by rank `stream`; its call number `value` began or ended.
    """

    _fields_ = (
        ("at", ctypes.c_uint64),
        ("bytes", ctypes.c_uint32),
        ("value", ctypes.c_uint32),
        ("what", ctypes.c_int),
        ("stream", ctypes.c_int),
    )


class RankHeap:
    """One rank's view of a heap of virtual ranks."""

    def __init__(self, whole: VirtualHeap, rank: int) -> None:
        self.bases, self.first, self.local = whole.bases, rank, whole.local[rank : rank + 1]
        self.whole = whole.local

    def close(self, *, together: bool = True) -> None:
        self.local = self.local[:0]


class Recorder:
    """Stands in for `jit.Kernel`, of one rank: launches are written down."""

    def __init__(self, launches: list[Any], variant: jit.Variant, device: Any = None) -> None:
        self.launches, self.variant = launches, variant

    def launch(self, *, grid: int, block: int, args: Sequence[Any], smem: int = 0, **_: Any) -> None:
        self.launches.append((self.variant, (grid, block, smem), jit._pack(args), args))


class OutOfStep:
    """The exchanges of all ranks of `case`, which is routed: `routed[rank]`."""

    _library_of: Callable[[jit.Variant], Any] = staticmethod(_library)

    def __init__(
        self,
        case: Case,
        routed: Routed,
        library_of: Callable[[jit.Variant], Any] | None = None,
        **options: Any,
    ) -> None:
        self.case, ranks = case, case.ranks
        self._library_of = library_of or self._library_of
        self.launches: list[list[Any]] = [[] for _ in range(ranks)]
        self.routed = [
            Routed(**{name: getattr(routed, name)[rank : rank + 1] for name in Addresses._fields})
            for rank in range(ranks)
        ]
        self._kept: list[torch.Tensor] = []
        heaps: list[VirtualHeap] = []
        first = make_exchange(case, load=partial(Recorder, []))

        def heap_of(rank: int, nbytes: int) -> RankHeap:
            if not heaps:
                heaps.append(VirtualHeap(ranks, nbytes, "cpu"))
            return RankHeap(heaps[0], rank)

        self.exchanges = [
            NvlinkExchange(
                partial(heap_of, rank),
                case.placement,
                first.shape,
                load=partial(Recorder, self.launches[rank]),
                timeout=20.0,
                **options,
            )
            for rank in range(ranks)
        ]
        self.heap = heaps[0].local

    def replay(self, rank: int, call: int) -> None:
        """Launch once more what was launched as `call`, as a captured graph does."""
        self.launches[rank].append(self.launches[rank][call])

    def keep(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor, which a launch reads later and has only the address of."""
        self._kept.append(tensor)
        return tensor

    def run(
        self, seed: int, told: Told = lambda rank, call, ended: None, *, traced: bool = False
    ) -> list[Event]:
        """Run what was written down, once; `traced`: what happened in the heaps, in order. Raises what `told`
        raises, and where a rank's call has failed."""
        (variant,) = {launch[0] for launches in self.launches for launch in launches}
        (calls,) = {len(launches) for launches in self.launches}
        every = [launch for launches in self.launches for launch in launches]
        sizes = torch.tensor([launch[1] for launch in every], dtype=torch.int32)
        packed = [ctypes.cast(launch[2][1], ctypes.c_void_p) for launch in every]
        errors: list[BaseException] = []

        def tell(rank: int, call: int, ended: int) -> None:
            try:
                told(rank, call, bool(ended))
            except BaseException as error:  # noqa: BLE001 (no exception may pass through the machine)
                errors.append(error)

        library, heap = self._library_of(variant), self.heap
        late = getattr(library, f"emulate_streams_{variant.entry}")(
            ctypes.c_int(len(self.launches)),
            ctypes.c_int(calls),
            ctypes.c_void_p(sizes.data_ptr()),
            (ctypes.c_void_p * len(packed))(*packed),
            ctypes.c_uint(seed),
            ctypes.c_double(60.0),
            ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_int, ctypes.c_int)(tell),
            ctypes.c_void_p(heap.data_ptr()),
            ctypes.c_int64(heap.numel() if traced else 0),
        )
        for launches in self.launches:
            launches.clear()
        if errors:
            raise errors[0]
        assert late == 0, f"{variant} did not end: see 'stuck' above"
        for exchange in self.exchanges:
            exchange.check()
        count = ctypes.c_int64()
        library.events.restype = ctypes.POINTER(Event)
        events = library.events(ctypes.byref(count))
        return [Event.from_buffer_copy(events[i]) for i in range(count.value if traced else 0)]
