"""A dispatcher of NVLink's kernels, as what records its calls needs it."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from imbrex.contracts import Dispatcher, Routing, Wire
from imbrex.exchange.nvlink_fit import KernelPlacement, Part
from imbrex.kernels.exchange.exchange import NvlinkExchange
from imbrex.kernels.exchange.launches import Choosing
from imbrex.transport.nvlink import Nvlink, Sms


class KernelDispatcher(Dispatcher, Protocol):
    """A dispatcher of kernels: `NvlinkDispatcher`."""

    transport: Nvlink
    wire: Wire
    placed: KernelPlacement
    sms: Sms
    sms_home: Sms
    fuses: bool
    promised: bool

    @property
    def choosing(self) -> Choosing: ...

    def meet(self, x_TD: Tensor, routing: Routing) -> Part: ...

    def counts_first(self, part: Part, worst: int) -> bool: ...

    def kernels_for(self, part: Part) -> NvlinkExchange: ...

    def kernels_of(self, max_tokens: int) -> NvlinkExchange: ...
