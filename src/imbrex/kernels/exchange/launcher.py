"""The launcher of an exchange's kernels: a heap and its buffers, the number of every call, the struct that
tells a kernel about the ranks, and what its failures leave on the host. `exchange.py` says what kernels do.
"""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from imbrex.kernels import jit, records
from imbrex.kernels.arguments import multiprocessors
from imbrex.kernels.exchange import layout as lay
from imbrex.kernels.exchange import variants as kernel
from imbrex.kernels.exchange.failures import Status, poison
from imbrex.kernels.heap import Heap
from imbrex.kernels.structs import Struct
from imbrex.runtime.checks import debug_is_on

_serials = itertools.count()


class Launcher:
    """Launches kernels over a heap, for all ranks of this process at once, and counts their calls. Arguments
    are those of `NvlinkExchange`, which it serves."""

    def __init__(
        self,
        make_heap: Callable[[int], Heap],
        shape: lay.Shape,
        layout: lay.Layout,
        timeout: float,
        load: Callable[..., Any],
    ) -> None:
        self.shape, self.layout = shape, layout
        self.heap = make_heap(layout.nbytes)
        self.device = self.heap.local.device
        self.local_ranks = self.heap.local.shape[0]
        self._layer = self.least_sms = 0  # the SMs of the rank that has fewest, where all were asked
        self.debug = debug_is_on()
        self.last_sms: dict[str, int] = {}
        self._calls: dict[str, int] = dict.fromkeys(lay.KINDS, 0)
        self._captured = False
        self._groups: dict[Any, Struct] = {}
        self.serial = next(_serials)
        variants = kernel.shipped_variants() if shape.ranks <= lay.MOST_RANKS else [kernel.ROUTE_MANY]
        self._load = load
        self._kernels = {variant: load(variant, self.device) for variant in variants}
        self._status = Status(self.heap, timeout)

    @property
    def layer(self) -> int | None:
        return self._layer - 1 if self._layer else None

    @layer.setter
    def layer(self, layer: int | None) -> None:
        self._layer = 0 if layer is None else 1 + layer
        for group in self._groups.values():
            group.layer = self._layer

    def check(self, *, synchronize: bool = False) -> None:
        """Raise `ExchangeError` if a call has failed. Without `synchronize`, calls that are still running on
        the device are not known to have failed."""
        if synchronize and self.device.type == "cuda":
            # host sync: asked for
            torch.cuda.synchronize(self.device)
        self._status.check()

    @property
    def usable(self) -> bool:
        """Whether calls can go on. A failed exchange stays failed on every rank: `close()` it, and make
        another if all ranks are alive."""
        return not self._status.failed

    def overflows(self) -> list[int]:
        """The number of routings of each local rank that did not fit `row_capacity` or `token_capacity`. The
        `totals_L4` of a routing says whether it fitted."""
        at = lay.OVERFLOWS_AT
        # host sync: asked for
        return self.heap.local[:, at : at + 4].clone().view(torch.int32)[:, 0].tolist()

    def close(self, *, together: bool = True) -> None:
        """Free the heap. Collective if `together` and the exchange has not failed; after a failure peers may
        be gone."""
        self.heap.close(together=together and self.usable)

    def most_blocks(self, variant: Any = None, block: tuple[int, int, int] = (1, 0, 0)) -> int:
        """The most blocks that one rank's launch can have. variant: of clusters. block: blocks a cluster,
        threads a block and shared memory a block."""
        cluster, threads, shared = block
        sms = min(self.least_sms or multiprocessors(self.heap.local.get_device()), lay.MAX_BLOCKS)
        if cluster == 1:
            return sms
        fitting = cluster * self._kernel(variant).clusters(cluster, threads, shared)
        return min(fitting, sms // cluster * cluster)

    def _kernel(self, variant: jit.Variant) -> Any:
        if variant not in self._kernels:
            self._kernels[variant] = self._load(variant, self.device)
        return self._kernels[variant]

    def _launch(
        self,
        variant: jit.Variant,
        kind: str,
        blocks: int,
        threads: int,
        shared: int,
        args: ctypes.Structure,
        besides: Sequence[Any] = (),
        cluster: int = 1,
    ) -> None:
        """Launch a kernel over the local ranks. besides: its arguments after the group and `args`, of a
        kernel that begins before the one before it has ended."""
        self.check()
        if not 1 <= blocks <= lay.MAX_BLOCKS:
            raise ValueError(f"exchange: num_sms is {blocks}; it must be 1 to {lay.MAX_BLOCKS}")
        self._calls[kind] += 1
        self.last_sms[kind] = blocks
        shape = {"grid": blocks * self.local_ranks, "block": threads, "smem": shared, "cluster": cluster}
        how = {**shape, "dependent": bool(besides) or variant in kernel.DEPENDENT}
        records.launch(self._kernel(variant), [self._group(blocks), args, *besides], how)

    def launch_again(self, launch: Any, kinds: Sequence[str], *addresses: int) -> None:
        """Make a recorded launch again. kinds: the calls that it stands for."""
        self._status.check()
        for kind in kinds:
            self._calls[kind] += 1
        launch.launch(*addresses)

    def _group(self, blocks: int) -> Struct:
        """The struct that tells a kernel of `blocks` blocks about the ranks; made once."""
        group = self._groups.get(blocks)
        if group is None:
            group = self._groups[blocks] = self._status.group(
                ranks=self.shape.ranks, blocks=blocks, layer=self._layer, layout=self.layout
            )
        return group

    def group_of(self, local: int, blocks: int) -> Struct:
        """The struct that tells a launch of one rank, number `local` of this process, about the ranks."""
        group = self._groups.get((local, blocks))
        if group is None:
            whole = self._group(blocks)
            group = self._groups[local, blocks] = type(whole).from_buffer_copy(whole)
            group.first = self.heap.first + local
            group.host_status = self._status.words_L8[local].data_ptr()
        return group

    def next_buffer(self, kind: str, *, peek: bool = False) -> tuple[int, int]:
        """The buffer of the next call, and how many calls ago it was last used. A captured call keeps its
        buffer, so after the first capture that may be one call ago."""
        if not peek and self.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            self._captured = True
        buffers = self.shape.buffers
        return self._calls[kind] % buffers, 1 if self._captured else buffers

    def _unwritten(self, tensor: Tensor) -> Tensor:
        return poison(tensor) if self.debug else tensor

    def _buffer_bytes(self, rows: int) -> int:
        return rows * self.shape.row_bytes

    def _rows(self, offset: int, buffer: int, width: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        rows = self.shape.token_capacity
        start = offset + buffer * self._buffer_bytes(rows)
        part = self.heap.local[:, start : start + rows * width * dtype.itemsize]
        return part.view(dtype).view(self.local_ranks, rows, width)
