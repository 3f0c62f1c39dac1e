"""One layer as the balancer sees it: its counts, its tensors, its placement."""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
from torch import Tensor, nn

from imbrex.balancer.migration import Change, land
from imbrex.balancer.payload import slot_tensors
from imbrex.contracts import Placement, Split
from imbrex.exchange import Exchange
from imbrex.placement.online import LoadWindow, Pace, predicted
from imbrex.placement.planner import to_held


class Layer(Protocol):
    """What of a layer the balancer needs; `imbrex.MoELayer` has it."""

    placement: Placement
    exchange: Exchange
    experts: Any
    ranks: Any
    training: bool


class Seat:
    """A layer under balance. It hears the counts of every batch by standing before the replica split."""

    def __init__(self, layer: Layer, pace: Pace, split: Split) -> None:
        self.layer, self.pace, self.split = layer, pace, split
        self.window = LoadWindow(layer.placement.num_experts, pace)
        self.counts_E = np.zeros(layer.placement.num_experts, dtype=np.int64)
        num_ranks = layer.placement.num_ranks
        self.crossings_WW = np.zeros((num_ranks, num_ranks), dtype=np.int64)
        self.last_counts_E, self.last_crossings_WW = self.counts_E, self.crossings_WW
        self.predicted = 0.0
        layer.exchange.relocate(split=self.listen)

    @property
    def number(self) -> int:
        return self.layer.exchange.layer

    def weights(self) -> dict[str, Tensor]:
        """What moves with an expert, as it is now: a model may have been moved or loaded since."""
        return slot_tensors(self.layer.experts, len(self.layer.placement.local(self.layer.ranks.expert_rank)))

    @property
    def parameters(self) -> list[nn.Parameter]:
        return [p for p in self.layer.experts.parameters() if p.requires_grad]

    def listen(self, counts_WE: Tensor, placement: Placement) -> Tensor:
        """The split of the layer; on the way, what all ranks want of every expert is added up."""
        split_WS = self.split(counts_WE, placement)
        # on the host: the exchange gathers counts there
        self.counts_E += counts_WE.sum(0).cpu().numpy()
        # on the host: as above
        ends_WS = np.pad(np.cumsum(split_WS.cpu().numpy(), 1), ((0, 0), (1, 0)))
        rows_WW = np.diff(ends_WS[:, list(placement.rank_offsets)])
        per_rank = max(len(rows_WW) // placement.num_ranks, 1)
        # Tensor ranks count for their expert rank; one row, where all ranks have the same tokens, for rank 0.
        np.add.at(self.crossings_WW, np.arange(len(rows_WW)) // per_rank, rows_WW)
        return split_WS

    def end_iteration(self) -> None:
        self.window.add(self.counts_E)
        self.last_counts_E, self.last_crossings_WW = self.counts_E, self.crossings_WW
        self.counts_E, self.crossings_WW = np.zeros_like(self.counts_E), np.zeros_like(self.crossings_WW)

    @property
    def last_loads_W(self) -> np.ndarray:
        """Choices that every rank computed in the last iteration."""
        return self.last_crossings_WW.sum(0)

    def switch(self, change: Change, arrived) -> int:
        """Write the weights that arrived and use the placement from the next forward on; bytes written."""
        layer, me = self.layer, self.layer.ranks.expert_rank
        written = land(change, arrived, me)
        for parameter in layer.experts.parameters():
            parameter.grad = None
        layer.placement = change.new
        layer.experts.expert_ids = change.new.local(me)
        layer.exchange.relocate(change.new)
        self.predicted = 1 / (1 + predicted(self.window.recent_HE(), to_held(change.new), self.pace.split))
        return written
