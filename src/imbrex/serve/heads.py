"""The greedy choice of the next token, with the vocabulary split over ranks.

In a small batch the time of the head is that of reading its weight. So every rank reads only a slice of the
weight, for the tokens of all ranks. Then one number per token crosses between ranks: the rank's largest logit
and its index, packed into 64 bits that are ordered as `torch.argmax` orders them. Between GPUs that can
address each other's memory one kernel packs, sends and chooses (`kernels/rows/keys.cu`). Otherwise torch
packs, and an all-reduce takes the maximum.

    high half: the float32, its bits changed so that they order as integers; NaN above all, as in torch
    low half:  the complement of the index, so that of equal logits the lowest index is the maximum

Example: logits 2.0 at 5 on rank 0 and 2.0 at 7 on rank 1: the high halves are equal, ~5 > ~7, so 5 is chosen.
"""

from __future__ import annotations

from functools import partial

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from imbrex.kernels.heap import SymmetricHeap
from imbrex.kernels.rows.keys import TokenChoice
from imbrex.runtime import waits
from imbrex.transport.nvlink import Nvlink

NOT_A_NUMBER = 0x7FFFFFFF
LOW = 0xFFFFFFFF


def pack(value_T: Tensor, index_T: Tensor) -> Tensor:
    """Keys, int64 [T], that order as torch orders (value, index) in `argmax`. value_T: float32. index_T:
    below 2^32."""
    # Adding zero makes of -0.0 the 0.0 that it is equal to.
    bits_T = (value_T.float() + 0.0).view(torch.int32).long()
    ordered_T = torch.where(bits_T < 0, bits_T ^ NOT_A_NUMBER, bits_T)
    ordered_T = torch.where(value_T.isnan(), NOT_A_NUMBER, ordered_T)
    return (ordered_T << 32) | (LOW - index_T)


def unpack(key_T: Tensor) -> Tensor:
    """The index of a key."""
    return LOW - (key_T & LOW)


def best_keys(logits_TV: Tensor, first: int) -> Tensor:
    """The key of every row's largest logit, of a slice of the vocabulary that begins at `first`."""
    index_T = logits_TV.argmax(-1)
    return pack(logits_TV.gather(-1, index_T[:, None])[:, 0], index_T + first)


def slice_of(vocabulary: int, rank: int, ranks: int) -> tuple[int, int]:
    """Begin and end of a rank's slice; the last ones may be shorter, or empty."""
    each = -(-vocabulary // ranks)
    return min(rank * each, vocabulary), min((rank + 1) * each, vocabulary)


def maximum(key_T: Tensor, group: dist.ProcessGroup) -> Tensor:
    """The elementwise maximum over the ranks, in place."""
    waits.run(
        "token choice",
        lambda: dist.all_reduce(key_T, dist.ReduceOp.MAX, group=group, async_op=True),
        on_host=not key_T.is_cuda,
        group=group,
    )
    return key_T


def sharded_argmax(
    x_TD: Tensor,
    weight_VD: Tensor,
    vocabulary: int,
    group: dist.ProcessGroup,
    choice: TokenChoice | None = None,
) -> Tensor:
    """`torch.argmax` of the logits of every row over the whole vocabulary, int64 [T].

    x_TD: this rank's rows, as many on every rank. weight_VD: this rank's slice, by `slice_of`. choice: the
    kernel, where it has room for the rows. Collective.
    """
    rank, ranks = group.rank(), group.size()
    begin, end = slice_of(vocabulary, rank, ranks)
    assert weight_VD.shape[0] == end - begin
    x_all = torch.empty(ranks * len(x_TD), x_TD.shape[1], dtype=x_TD.dtype, device=x_TD.device)
    waits.run(
        "token choice",
        lambda: waits.all_gather_single(x_all, x_TD.contiguous(), group=group, async_op=True),
        on_host=not x_TD.is_cuda,
        group=group,
    )
    logits_PV = F.linear(x_all, weight_VD)
    if choice is not None and choice.why_not(logits_PV) is None:
        return choice.choose(logits_PV[None], vocabulary)[0]
    if begin == end:
        key = torch.full((len(x_all),), torch.iinfo(torch.int64).min, dtype=torch.int64, device=x_TD.device)
    else:
        key = best_keys(logits_PV, begin)
    return unpack(maximum(key, group).view(ranks, -1)[rank])


class Head(nn.Module):
    """Rows to the tokens that follow them. group: the ranks that the vocabulary is split over, or `None`:
    all of it is here. choices: kernels that choose, see `use_heap`."""

    def __init__(
        self, vocabulary: int, hidden_size: int, group: dist.ProcessGroup | None = None, **kind
    ) -> None:
        super().__init__()
        self.vocabulary, self.group = vocabulary, group if group is not None and group.size() > 1 else None
        self.choices: list[TokenChoice] = []
        begin, end = self.slice
        self.weight = nn.Parameter(torch.empty(end - begin, hidden_size, **kind))

    @property
    def slice(self) -> tuple[int, int]:
        """Begin and end of the tokens whose rows are here."""
        if self.group is None:
            return 0, self.vocabulary
        return slice_of(self.vocabulary, self.group.rank(), self.group.size())

    def forward(self, x_TD: Tensor) -> Tensor:
        """The logits of this rank's slice."""
        return F.linear(x_TD, self.weight)

    def best(self, x_TD: Tensor) -> Tensor:
        """The token of the largest logit, int64 [T]; collective where the vocabulary is split, over equally
        many rows a rank."""
        if self.group is None:
            return self(x_TD).argmax(-1)
        choice = self.choices[-1] if self.choices else None
        return sharded_argmax(x_TD, self.weight, self.vocabulary, self.group, choice)

    def use_heap(self, room: int) -> str | None:
        """Choose by the kernel for up to `room` rows a rank; `None`, or why not. Collective. Graphs that have
        captured an older one, with less room, go on with that."""
        if self.group is None:
            return "the whole vocabulary is here"
        if not self.weight.is_cuda:
            return "the head is on a CPU"
        if self.choices and self.choices[-1].room >= room:
            return None
        nvlink, reason = Nvlink.of_or_reason(self.group)
        if nvlink is None:
            return reason
        make_heap = partial(_heap, self.group, self.weight.device)
        timeout = waits.timeout_seconds()
        self.choices.append(TokenChoice(make_heap, self.group.size(), room, timeout=timeout))
        return None

    def check(self) -> None:
        """Raise `ExchangeError` where a choice among ranks has failed."""
        for choice in self.choices:
            choice.check()

    def close(self) -> None:
        """Free the heaps of `use_heap`; asks no other rank."""
        for choice in self.choices:
            choice.close()
        self.choices.clear()

    @torch.no_grad()
    def split(self, group: dist.ProcessGroup | None) -> None:
        """Keep this rank's slice of a whole head."""
        if group is None or group.size() == 1:
            return
        assert self.group is None, "a head that is split already"
        self.group = group
        begin, end = self.slice
        self.weight = nn.Parameter(self.weight[begin:end].clone())


def _heap(group: dist.ProcessGroup, device: torch.device, nbytes: int) -> SymmetricHeap:
    return SymmetricHeap(group, nbytes, device)
