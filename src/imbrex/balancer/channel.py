"""The balancer's own gloo connections, so that its messages never meet those of the layers.

They are made beside the process group, not through `dist.new_group`: that would need ranks outside the layer,
or, with local synchronisation, the same number of groups so far on every rank.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import PrefixStore, ProcessGroupGloo, _get_default_store

from imbrex.router import collectives
from imbrex.runtime import waits
from imbrex.runtime.words import words


class Channel:
    """Ranks 0 to size - 1 that talk among themselves. name: the same on all of them, used by nothing else."""

    def __init__(self, name: str, rank: int, size: int, timeout_s: float) -> None:
        self.rank, self.size, self.timeout_s = rank, size, timeout_s
        store = PrefixStore(f"imbrex-balancer/{name}/", _get_default_store())
        self._gloo: Any = ProcessGroupGloo(store, rank, size, timedelta(seconds=timeout_s))

    def gather(self, mine: Tensor) -> tuple[Tensor, dist.Work | None]:
        """Begin to gather equally long tensors [n] of the host: [size, n], filled when the work is done."""
        pieces = mine.new_empty(self.size, *mine.shape)
        return pieces, self._start("votes", lambda: self._gloo.allgather([list(pieces)], [mine]))

    def send(self, row: Tensor, to: int, tag: int) -> dist.Work | None:
        return self._start("migration", lambda: self._gloo.send([row], to, tag))

    def receive(self, row: Tensor, source: int, tag: int) -> dist.Work | None:
        return self._start("migration", lambda: self._gloo.recv([row], source, tag))

    def finish(self, what: str, work: dist.Work | None) -> None:
        """Wait. Raises RankLostError where a peer does not answer in time."""
        waits.finish(f"the balancer's {what}", work, self.timeout_s, on_host=True)

    def meet(self, what: str, mine: Tensor) -> Tensor:
        """Gather and wait."""
        gathered, work = self.gather(mine)
        self.finish(what, work)
        return gathered

    def _start(self, what: str, begin: Callable[[], dist.Work]) -> dist.Work | None:
        return waits.start(f"the balancer's {what}", begin, self.timeout_s)


@dataclass(frozen=True, kw_only=True, slots=True)
class Lines:
    """The connections of a balancer. votes: of all ranks of all data groups. weights: of the layer's group.
    counts: of this rank's data group, whose ranks have other tokens for the same experts; None where there is
    none."""

    votes: Channel
    weights: Channel
    counts: Channel | None


def connect(ranks: Any, exchange_counts: Callable[[Tensor], Tensor], timeout_s: float) -> Lines:
    """The connections of a balancer; collective over a layer's group and data group.

    ranks: the layer's `Ranks`. exchange_counts: gathers int64 [n] over its group.
    """
    number = int(exchange_counts(words(int.from_bytes(os.urandom(7), "little")))[0])
    data = ranks.data_group if ranks.data_size > 1 else None
    column, rows = 0, 1
    if data is not None:
        column, rows = data.rank(), data.size()
        device = "cuda" if "nccl" in str(dist.get_backend(data)) else "cpu"
        drawn = words(number).to(device)
        # host sync: once, at construction
        number = int(collectives.gather_over_ranks(drawn, data.group_name, rows)[0])
    return Lines(
        votes=Channel(f"{number}/votes", column * ranks.size + ranks.rank, rows * ranks.size, timeout_s),
        weights=Channel(f"{number}/weights/{column}", ranks.rank, ranks.size, timeout_s),
        counts=None if data is None else Channel(f"{number}/counts/{ranks.rank}", column, rows, timeout_s),
    )
