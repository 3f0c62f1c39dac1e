"""Does a transport keep its contract?"""

from __future__ import annotations

import warnings
from functools import partial
from typing import cast

import torch
import torch.distributed as dist
from torch import Tensor

from imbrex import transport as transports
from imbrex.codec.cast import as_bytes, from_bytes
from imbrex.contracts import Traffic, Transport
from imbrex.runtime.waits import all_gather_single
from imbrex.testing.conformity import FLOATS, ConformityError, on, require

TOKENS = (5, 0, 17, 1)
"""Tokens of every rank in turn."""
KINDS = ("nothing", "everything", "random", "to the last rank", "one row")


def check_transport(
    transport: str | Transport,
    group: dist.ProcessGroup | None,
    *,
    widths: tuple[int, ...] = (1, 7, 64),
    device: torch.device | str = "cpu",
    seed: int = 0,
) -> None:
    """Check a transport of `group`, by name or the object. Call it on every rank of the group.

    Counts reach every rank; every row arrives, byte for byte, at the ranks that want it, by source rank, then
    token, and comes back in the order it was sent; for rows of odd widths, ranks without tokens, traffic to
    one rank only and none at all; twice the same; with two moves under way at once; and nothing that it is
    given changes. A replicated transport sums and moves nothing.

    Raises ConformityError on every rank, with what does not hold on the first rank that found it.
    """
    if _size(group) == 1:
        warnings.warn("check_transport: nothing moves on one rank; call it on several", stacklevel=2)
    moving, _ = transports.make(transport, group, num_ranks=_size(group), top_k=1)
    check = _Check(cast("Transport", moving), group, torch.device(device), seed)
    check.together("counts", check.counts)
    if moving.replicated:
        check.together("sums", check.sums)
        return
    for kind in KINDS:
        for width in widths:
            for way, rows in (("out", check.rows_out), ("back", check.rows_back)):
                check.together(f"{kind}, rows of {width} bytes {way}", partial(rows, kind, width))


def _size(group: dist.ProcessGroup | None) -> int:
    return 1 if group is None else dist.get_world_size(group)


class _Check:
    def __init__(
        self, transport: Transport, group: dist.ProcessGroup | None, device: torch.device, seed: int
    ) -> None:
        self.transport, self.group, self.device, self.seed = transport, group, device, seed
        self.world, self.rank = _size(group), 0 if group is None else dist.get_rank(group)
        self.planned: dict[str, Traffic] = {}

    def together(self, what: str, check) -> None:
        """Run a check, then tell every rank, so that no rank waits for one that has left."""
        problem = None
        try:
            with on("it raises"):
                check()
        except ConformityError as error:
            problem = f"{self.transport.name}: {what}: {error}"
        problems = [problem]
        if self.group is not None and self._any(problem is not None):
            problems = [None] * self.world
            dist.all_gather_object(problems, problem, group=self.group)
        for rank, text in enumerate(problems):
            require(text is None, f"rank {rank}: {text}")

    def _any(self, mine: bool) -> bool:
        """Whether it is so on any rank. Texts cross only then: objects take two collectives."""
        all_W = torch.empty(self.world, dtype=torch.uint8, device=self.device)
        mine_1 = torch.full((1,), mine, dtype=torch.uint8, device=self.device)
        all_gather_single(all_W, mine_1, group=self.group)
        return bool(all_W.any())

    def counts(self) -> None:
        for length in (1, 5):
            mine = torch.arange(length, device=self.device) - 3 * self.rank + (1 << 40)
            gathered = self.transport.exchange_counts(mine)
            others = mine.cpu() + 3 * (self.rank - torch.arange(self.world, device="cpu")[:, None])
            require(gathered.device.type == "cpu", "the counts of all ranks are not on the host")
            require(torch.equal(gathered, others), f"counts {gathered.tolist()} instead of {others.tolist()}")

    def sums(self) -> None:
        partial_TD = torch.full((3, 5), self.rank + 1.0, dtype=torch.float32, device=self.device)
        summed = self.transport.all_reduce(partial_TD)
        require(bool((partial_TD == self.rank + 1).all()), "summing changed what it was given")
        require(bool((summed == self.world * (self.world + 1) / 2).all()), f"summed to {summed[0, 0].item()}")

    def rows_out(self, kind: str, width: int) -> None:
        masks = [self._mask(kind, rank) for rank in range(self.world)]
        sent_TB = self._content(self.rank, torch.arange(len(masks[self.rank]), device="cpu"), 0, width)
        expected = [
            self._content(source, masks[source][:, self.rank].nonzero()[:, 0], 0, width)
            for source in range(self.world)
        ]
        self._move(self.transport.begin_move, sent_TB, self._traffic(kind, masks), torch.cat(expected))

    def rows_back(self, kind: str, width: int) -> None:
        masks = [self._mask(kind, rank) for rank in range(self.world)]

        def written(reader: int, source: int) -> Tensor:
            """The rows that `reader` sends back for the tokens it had from `source`."""
            return self._content(reader, masks[source][:, reader].nonzero()[:, 0], source + 1, width)

        if self.transport.sums_on_the_way:
            self._sums_back(kind, masks, width)
            return
        returned_MB = torch.cat([written(self.rank, source) for source in range(self.world)])
        expected = torch.cat([written(reader, self.rank) for reader in range(self.world)])
        traffic = self._traffic(kind, masks)
        self._move(self.transport.begin_move_back, returned_MB, traffic, expected)

    def _sums_back(self, kind: str, masks: list[Tensor], width: int) -> None:
        """Check the sums of each token's rows, of whole numbers so that they are exact. Where rows may be
        added on the way, nothing else is known."""

        def written(reader: int, source: int) -> Tensor:
            tokens = masks[source][:, reader].nonzero()[:, 0]
            return (tokens[:, None] * 7 + reader * 3 + torch.arange(width, device="cpu")).float()

        returned = torch.cat([written(self.rank, source) for source in range(self.world)])
        traffic = self._traffic(kind, masks)
        moved = self.transport.begin_move_back(as_bytes(returned.to(self.device)), traffic).finish().cpu()
        tokens_N = self.transport.home(traffic)[0].cpu()
        require(len(moved) == len(tokens_N), f"{len(moved)} rows come back for {len(tokens_N)} sent")
        shape = len(masks[self.rank]), width
        sums = torch.zeros(shape, **FLOATS).index_add_(0, tokens_N, from_bytes(moved, width, torch.float32))
        expected = torch.zeros(shape, **FLOATS)
        for reader in range(self.world):
            rows = written(reader, self.rank)
            expected.index_add_(0, masks[self.rank][:, reader].nonzero()[:, 0], rows)
        wrong = (sums != expected).any(1).nonzero().flatten().tolist()
        require(not wrong, f"the sum of what came back for token {wrong[:1]} is not that of what was sent")

    def _traffic(self, kind: str, masks: list[Tensor]) -> Traffic:
        """Planned once for rows of all widths and both ways, as a layer does."""
        if kind not in self.planned:
            rows = [torch.stack([w.sum(0) for w in masks])]
            (self.planned[kind],) = self.transport.plan([masks[self.rank].to(self.device)], rows)
        return self.planned[kind]

    def _move(self, begin, encoded: Tensor, traffic: Traffic, expected: Tensor) -> None:
        encoded = encoded.to(self.device)
        before = encoded.clone()
        under_way = begin(encoded, traffic), begin(encoded, traffic)
        arrived = [pending.finish().cpu() for pending in under_way]
        for number, moved in enumerate(arrived):
            shape, target = list(moved.shape), list(expected.shape)
            require(moved.dtype == torch.uint8, f"they arrive as {moved.dtype}")
            require(shape == target, f"they arrive as {shape} instead of {target}")
            wrong = (moved != expected).any(1).nonzero().flatten().tolist()
            require(not wrong, f"row {wrong[:1]} is not what was sent (move {number + 1} of 2)")
        require(torch.equal(before, encoded), "the move changed what it was given")

    def _mask(self, kind: str, rank: int) -> Tensor:
        """Which tokens of `rank` go to which other ranks, bool [T, W]."""
        tokens = TOKENS[rank % len(TOKENS)]
        drawn = torch.Generator().manual_seed(self.seed + rank)
        mask_TW = torch.rand(tokens, self.world, generator=drawn, **FLOATS) < 0.4
        if kind == "nothing":
            mask_TW[:] = False
        elif kind == "everything" or self.transport.broadcasts:
            mask_TW[:] = True
        elif kind == "to the last rank":
            mask_TW[:] = torch.arange(self.world, device="cpu") == self.world - 1
        elif kind == "one row":
            mask_TW[:] = False
            mask_TW[:1, 0] = rank == self.world - 1 or rank == 2
        if self.transport.broadcasts:
            mask_TW[:] = True
        mask_TW[:, rank] = False
        return mask_TW

    def _content(self, source: int, tokens: Tensor, way: int, width: int) -> Tensor:
        """Bytes that say where a row comes from: uint8 [tokens, width]."""
        column = torch.arange(width, device="cpu")
        values = (tokens[:, None] + 1) * 31 + source * 57 + way * 101 + column * (7 + source + way)
        return (values % 251).to(torch.uint8)
