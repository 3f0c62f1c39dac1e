"""A layer under balance: its counts, the tensors that move with its experts, and its placement."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Protocol, runtime_checkable
from weakref import WeakSet

import numpy as np
from torch import Tensor, nn
from torch.autograd.graph import increment_version

from imbrex.balancer.counts import Book, Iteration, Page, difference
from imbrex.balancer.migration import Change, land
from imbrex.balancer.payload import slot_tensors
from imbrex.contracts import Placement, Split
from imbrex.exchange.exchange import Exchange
from imbrex.placement.flow import split_near
from imbrex.placement.online import Pace
from imbrex.placement.packing import Ints


class Layer(Protocol):
    """The part of a layer that the balancer needs; `imbrex.MoELayer` has it."""

    placement: Placement
    exchange: Exchange
    experts: Any
    ranks: Any
    training: bool


@runtime_checkable
class KeepsCopies(Protocol):
    """Experts that keep something derived from their weights, such as quantised copies."""

    def weights_written(self, slots: Sequence[int]) -> None:
        """Take note that the weights of these local slots were overwritten in place."""


_TAKEN: WeakSet[Exchange] = WeakSet()
"""Exchanges whose placement a balancer renews."""


class Seat:
    """A layer that is attached to a balancer. If the layer's kernels choose replicas, they also add up the
    choices, on the device. Otherwise `listen` takes the place of the layer's split and adds them up."""

    def __init__(self, layer: Layer, pace: Pace, split: Split, book: Book | None) -> None:
        if layer.exchange in _TAKEN:
            raise ValueError(
                f"balancer: layer {layer.exchange.layer} is balanced already; two balancers would overwrite "
                "what the other moves, so give a layer to one, once"
            )
        self.layer, self.pace, self.split = layer, pace, split
        self.recent: deque[Iteration] = deque(maxlen=pace.window)
        self.latest: Iteration | None = None
        self.predicted = 0.0
        self._heard: Ints | None = None
        self._page: Page | None = None
        self._tally_WS: Tensor | None = None
        self._shape = layer.placement.num_ranks, layer.placement.num_slots
        self._came: dict[int, int] = {}
        self._hooks = [p.register_post_accumulate_grad_hook(_noting(self._came)) for p in self.parameters]
        _TAKEN.add(layer.exchange)
        layer.exchange.relocate(split=split)
        self._at = None if book is None else self._count_in(book)
        if self._at is None:
            layer.exchange.relocate(split=self.listen)

    def _count_in(self, book: Book) -> tuple[int, int] | None:
        """Where in the book the layer's kernels count; None where they do not."""
        if not self.layer.exchange.counts_on_device:
            return None
        self._tally_WS, at = book.open(*self._shape)
        self.count(on=True)
        return at

    def count(self, *, on: bool) -> None:
        """Whether the layer's kernels count."""
        if self._tally_WS is not None:
            self.layer.exchange.count_into(self._tally_WS if on else None)

    @property
    def number(self) -> int:
        return self.layer.exchange.layer

    def weights(self) -> dict[str, Tensor]:
        """Everything that moves with an expert, as it is now: a model may have been moved or loaded since."""
        return slot_tensors(self.layer.experts, len(self.layer.placement.local(self.layer.ranks.expert_rank)))

    @property
    def parameters(self) -> list[nn.Parameter]:
        return [p for p in self.layer.experts.parameters() if p.requires_grad]

    def awaits_optimizer(self) -> bool:
        """Whether gradients have come that no optimizer has taken, which changes the parameter. Those of
        experts that move would be lost."""
        return any(p.grad is not None and self._came.get(id(p)) == p._version for p in self.parameters)

    def listen(self, counts_WE: Tensor, placement: Placement) -> Tensor:
        """The split of the layer; on the way, what all ranks want of every slot is added up."""
        split_WS = split_near(self.split, counts_WE, placement, self.layer.exchange.transport.device)
        if self.layer.exchange.observer.measuring:
            return split_WS
        rows_WS = split_WS.cpu().numpy()
        self._heard = rows_WS if self._heard is None else self._heard + rows_WS
        return split_WS

    def end_iteration(self, page: Page | None) -> None:
        """Ends an iteration. page: the book's, turned after this iteration; None where no layer counts on the
        device."""
        if self._at is None:
            rows_WS = np.zeros((1, self._shape[1]), dtype=np.int64) if self._heard is None else self._heard
            self.latest = Iteration(self.layer.placement, lambda: rows_WS)
            if self._heard is not None and self._heard.any():
                self.recent.append(self.latest)
            self._heard = None
            return
        assert page is not None
        read = partial(difference, page, self._page, self._at, self._shape)
        self.latest = Iteration(self.layer.placement, read, lambda: page.mark.passed)
        self.recent.append(self.latest)
        self._page = page

    @property
    def loads_W(self) -> Ints:
        """Choices that every rank computed in the last iteration known."""
        known = next((i for i in (self.latest, *reversed(self.recent)) if i and i.known), None)
        return np.zeros(self._shape[0], dtype=np.int64) if known is None else known.loads_W

    def switch(self, change: Change, arrived, *, training: bool) -> int:
        """Write the weights that arrived and use the placement from the next forward on; bytes written."""
        layer, me = self.layer, self.layer.ranks.expert_rank
        written = land(change, arrived, me)
        experts, first = layer.experts, change.old.rank_offsets[me]
        if isinstance(experts, KeepsCopies):
            experts.weights_written([fetch.slot - first for fetch in change.fetches if fetch.target == me])
        for parameter in layer.experts.parameters():
            parameter.grad = None
            if training:
                # A backward of an earlier forward would multiply by other experts: so torch refuses it.
                increment_version(parameter)
        layer.placement = change.new
        layer.experts.expert_ids = change.new.local(me)
        layer.exchange.relocate(change.new)
        self.predicted = change.predicted
        return written

    def leave(self) -> None:
        """The layer keeps its placement and split, and nobody counts."""
        _TAKEN.discard(self.layer.exchange)
        for hook in self._hooks:
            hook.remove()
        self.layer.exchange.relocate(split=self.split)
        self.count(on=False)


def _noting(came: dict[int, int]) -> Callable[[Tensor], None]:
    """A hook that notes the version of a parameter when its gradient comes; it holds no layer."""

    def note(parameter: Tensor) -> None:
        came[id(parameter)] = parameter._version

    return note
