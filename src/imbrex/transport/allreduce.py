"""AllReduce: the tokens are the same on every rank, each computes its experts' rows, and the outputs are
summed."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

from imbrex.contracts import Add, Pending, Traffic
from imbrex.runtime.waits import all_gather_single
from imbrex.transport.base import BytesTransport
from imbrex.transport.collective import Done


class AllReduce(BytesTransport):
    """Sums the outputs of ranks that have the same tokens, as under tensor-parallel attention. TensorRT-LLM's
    first mode (slides, "AllReduce").

    Nothing moves on the way out. The loss counts once, not once a rank: the backward sums dx and the
    gradients of the routing weights over ranks, so that every rank has complete gradients.
    """

    name = "allreduce"
    replicated = True
    sums_encoded = True

    def begin_move(self, encoded_TB: Tensor, traffic: Traffic) -> Pending:
        return Done(encoded_TB[:0])

    def begin_move_back(self, encoded_MB: Tensor, traffic: Traffic, add: Add | None = None) -> Pending:
        return Done(encoded_MB[:0])

    def all_reduce(self, partial_TD: Tensor) -> Tensor:
        if self.world_size == 1:
            return partial_TD
        summed = partial_TD.clone(memory_format=torch.contiguous_format)
        work = self.start("combine", lambda: dist.all_reduce(summed, group=self.group, async_op=True))
        self.finish("combine", work)
        return summed

    def sum_encoded(
        self, partial_TD: Tensor, encode: Callable[[Tensor], Tensor], decode: Callable[[Tensor], Tensor]
    ) -> Tensor:
        """The sum over ranks where rows cross encoded: ReduceScatter, then AllGather. Float32 [T, D], the
        same bits on every rank.

        Every rank takes an equal part of the tokens, decodes the others' partial sums, adds them in rank
        order with its own, unencoded, and encodes the result: W roundings a value, W - 1 of partial sums and
        one of their sum. A rank sends 2 T (W - 1) / W encoded rows, as in a ring AllReduce.
        """
        if self.world_size == 1:
            return partial_TD
        world, tokens = self.world_size, partial_TD.shape[0]
        sizes = [tokens // world + (rank < tokens % world) for rank in range(world)]
        mine, longest = sizes[self.rank], sizes[0]
        encoded = encode(partial_TD).contiguous()
        parts = encoded.new_empty(world * mine, encoded.shape[1])
        split = [mine] * world, sizes
        work = self.start(
            "combine",
            lambda: dist.all_to_all_single(parts, encoded, *split, group=self.group, async_op=True),
        )
        self.finish("combine", work)
        sums = torch.zeros(mine, partial_TD.shape[1], dtype=torch.float32, device=partial_TD.device)
        for rank, part in enumerate(parts.split(mine) if mine else ()):
            begin = sum(sizes[:rank])
            sums += partial_TD[begin : begin + mine] if rank == self.rank else decode(part).float()
        padded = encoded.new_zeros(longest, encoded.shape[1])
        padded[:mine] = encode(sums)
        gathered = encoded.new_empty(world * longest, encoded.shape[1])
        work = self.start("combine", lambda: all_gather_single(gathered, padded, self.group, async_op=True))
        self.finish("combine", work)
        shares = zip(gathered.split(longest) if longest else (), sizes, strict=False)
        return decode(torch.cat([gathered[:0], *(rows[:size] for rows, size in shares)])).float()
