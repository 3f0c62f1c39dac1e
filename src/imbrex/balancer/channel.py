"""The balancer's own gloo connections, so that its messages never meet those of the layers.

They are made beside the process group, not through `dist.new_group`: that would need ranks outside the layer,
or, with local synchronisation, the same number of groups so far on every rank.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import PrefixStore, ProcessGroupGloo, _get_default_store

from imbrex import waiting


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
        waiting.finish(f"the balancer's {what}", work, self.timeout_s, on_host=True)

    def _start(self, what: str, begin: Callable[[], dist.Work]) -> dist.Work | None:
        return waiting.start(f"the balancer's {what}", begin, self.timeout_s)


def common_number(exchange_counts: Callable[[Tensor], Tensor]) -> int:
    """A number drawn by the first rank, the same on all; collective."""
    drawn = int.from_bytes(os.urandom(7), "little")
    return int(exchange_counts(torch.tensor([drawn]))[0])
