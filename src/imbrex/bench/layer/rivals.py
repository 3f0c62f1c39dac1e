"""One MoE layer as a user would write it over NCCL, with a backward by hand, and the floor below all of them.

    layer = AllToAll(weights, num_experts, world_size, rank)
    y_TD = layer.forward(x_TD, ids_TK, weights_TK)
    d_x_TD, d_weights_TK, d_gate_up, d_down = layer.backward(d_y_TD)

Torch's grouped products and torch's elementwise operators; every index is computed once, in the forward; no
autograd. A row crosses for every choice (`nccl-a2a`, as Megatron-LM's and torchtitan's dispatchers do), or
every token goes everywhere (`nccl-agrs`; `nccl-agrs-bag` sums a token's rows in another way).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from imbrex.runtime.waits import all_gather_single, reduce_scatter_single

Gradients = tuple[Tensor, Tensor, Tensor, Tensor]
Group = dist.ProcessGroup | None


@dataclass(frozen=True, kw_only=True, slots=True)
class Weights:
    """gate_up [e, 2F, D], down [e, D, F], of the local experts."""

    gate_up_eGD: Tensor
    down_eDF: Tensor


class Ffn:
    """The experts alone, on rows that already are expert-major: the floor."""

    name = "floor"

    def __init__(self, weights: Weights) -> None:
        self.weights = weights
        self.saved: tuple[Any, ...] = ()

    def forward(self, rows_RD: Tensor, ends_e: Tensor, *, keep: bool = False) -> Tensor:
        gate_up_RG = F.grouped_mm(rows_RD, self.weights.gate_up_eGD.mT, offs=ends_e)
        gate_RF, up_RF = gate_up_RG.chunk(2, -1)
        act_RF = F.silu(gate_RF) * up_RF
        if keep:
            self.saved = rows_RD, ends_e, gate_up_RG, act_RF
        return F.grouped_mm(act_RF, self.weights.down_eDF.mT, offs=ends_e)

    def backward(self, d_out_RD: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """d_rows, d_gate_up, d_down."""
        rows_RD, ends_e, gate_up_RG, act_RF = self.saved
        self.saved = ()
        gate_RF, up_RF = gate_up_RG.chunk(2, -1)
        d_act_RF = F.grouped_mm(d_out_RD, self.weights.down_eDF, offs=ends_e)
        d_down = F.grouped_mm(d_out_RD.T, act_RF, offs=ends_e)
        d_gate_up_RG = torch.empty_like(gate_up_RG)
        d_gate_RF, d_up_RF = d_gate_up_RG.chunk(2, -1)
        torch.mul(d_act_RF, F.silu(gate_RF), out=d_up_RF)
        d_gate_RF.copy_(torch.ops.aten.silu_backward(d_act_RF * up_RF, gate_RF))
        d_gate_up = F.grouped_mm(d_gate_up_RG.T, rows_RD, offs=ends_e)
        return F.grouped_mm(d_gate_up_RG, self.weights.gate_up_eGD, offs=ends_e), d_gate_up, d_down


def _inverse(order: Tensor) -> Tensor:
    inverse = torch.empty_like(order)
    inverse[order] = torch.arange(order.numel(), device=order.device)
    return inverse


class AllToAll:
    """A row a choice: sort, counts, uneven all-to-all, sort, experts, and all the way back. One host
    synchronisation."""

    name = "nccl-a2a"

    def __init__(
        self, weights: Weights, num_experts: int, world_size: int, rank: int, group: Group = None
    ) -> None:
        self.ffn, self.num_experts, self.world_size = Ffn(weights), num_experts, world_size
        self.group = group
        self.saved: tuple[Any, ...] = ()

    def _cross(self, rows: Tensor, out_sizes: list[int], in_sizes: list[int]) -> Tensor:
        out = rows.new_empty(sum(out_sizes), rows.shape[1])
        dist.all_to_all_single(out, rows, out_sizes, in_sizes, group=self.group)
        return out

    def forward(self, x_TD: Tensor, ids_TK: Tensor, weights_TK: Tensor, *, keep: bool = False) -> Tensor:
        local, (tokens, choices) = self.num_experts // self.world_size, ids_TK.shape
        flat = ids_TK.flatten()
        order_N = torch.argsort(flat, stable=True)
        sent_WE = torch.zeros(self.num_experts, dtype=torch.int64, device=flat.device)
        sent_WE.scatter_add_(0, flat, torch.ones_like(flat))
        got_WE = torch.empty_like(sent_WE)
        dist.all_to_all_single(got_WE, sent_WE, group=self.group)
        both = torch.stack([sent_WE, got_WE]).view(2, self.world_size, local)
        # host sync: all-to-all takes its splits on the host
        leaving, got = both.sum(2).tolist()
        received_RD = self._cross(x_TD[order_N // choices], got, leaving)
        expert_R = torch.arange(local, device=flat.device).repeat(self.world_size)
        expert_R = expert_R.repeat_interleave(got_WE, output_size=sum(got))
        sort_R = torch.argsort(expert_R, stable=True)
        ends_e = got_WE.view(self.world_size, local).sum(0).cumsum(0).to(torch.int32)
        out_RD = self.ffn.forward(received_RD[sort_R], ends_e, keep=keep)
        unsort_R, unsort_N = _inverse(sort_R), _inverse(order_N)
        back_TKD = self._cross(out_RD[unsort_R], leaving, got)[unsort_N].view(tokens, choices, -1)
        if keep:
            self.saved = order_N, unsort_N, sort_R, unsort_R, leaving, got, back_TKD, weights_TK
        return torch.bmm(weights_TK[:, None].to(x_TD.dtype), back_TKD).squeeze(1)

    def backward(self, d_y_TD: Tensor) -> Gradients:
        order_N, unsort_N, sort_R, unsort_R, leaving, got, back_TKD, weights_TK = self.saved
        self.saved, (tokens, choices) = (), weights_TK.shape
        d_weights_TK = torch.bmm(back_TKD, d_y_TD[:, :, None]).squeeze(2).float()
        d_back_TKD = weights_TK[:, :, None].to(d_y_TD.dtype) * d_y_TD[:, None]
        d_out_RD = self._cross(d_back_TKD.view(tokens * choices, -1)[order_N], got, leaving)[sort_R]
        d_rows_RD, d_gate_up, d_down = self.ffn.backward(d_out_RD)
        d_x_ND = self._cross(d_rows_RD[unsort_R], leaving, got)[unsort_N]
        return d_x_ND.view(tokens, choices, -1).sum(1), d_weights_TK, d_gate_up, d_down


class GatherScatter:
    """AllGather of tokens and choices, ReduceScatter of the sums. One host synchronisation."""

    name = "nccl-agrs"

    def __init__(
        self, weights: Weights, num_experts: int, world_size: int, rank: int, group: Group = None
    ) -> None:
        self.ffn, self.world_size, self.rank, self.group = Ffn(weights), world_size, rank, group
        self.local = num_experts // world_size
        self.saved: tuple[Any, ...] = ()

    def _gather(self, x: Tensor) -> Tensor:
        out = x.new_empty(self.world_size * x.shape[0], x.shape[1])
        all_gather_single(out, x, group=self.group)
        return out

    def index_sums(self, source_R: Tensor, pool: int) -> tuple[Tensor, ...]:
        """The index that `sum_rows` takes, from the token of every row. pool: tokens of all ranks."""
        return (source_R,)

    def sum_rows(self, rows_RD: Tensor, weights_R1: Tensor | None, pool: int, *index: Tensor) -> Tensor:
        """[pool, D]: the weighted rows of every token, summed in float32."""
        weighted_RD = rows_RD if weights_R1 is None else rows_RD * weights_R1
        sums = torch.zeros(pool, rows_RD.shape[1], dtype=torch.float32, device=rows_RD.device)
        return sums.index_add_(0, index[0], weighted_RD.float()).to(rows_RD.dtype)

    def _send_home(self, sums: Tensor) -> Tensor:
        out = sums.new_empty(len(sums) // self.world_size, sums.shape[1])
        reduce_scatter_single(out, sums, group=self.group)
        return out

    def forward(self, x_TD: Tensor, ids_TK: Tensor, weights_TK: Tensor, *, keep: bool = False) -> Tensor:
        tokens, choices = ids_TK.shape
        pool, ids, weights = self._gather(x_TD), self._gather(ids_TK), self._gather(weights_TK).flatten()
        slot = ids.flatten() - self.rank * self.local
        slot = torch.where((slot < 0) | (slot >= self.local), self.local, slot)
        counts = torch.zeros(self.local + 1, dtype=torch.int64, device=slot.device)
        ends = counts.scatter_add_(0, slot, torch.ones_like(slot)).cumsum(0).to(torch.int32)[: self.local]
        # host sync: how many rows the experts get
        choice_R = torch.argsort(slot, stable=True)[: int(ends[-1])]
        source_R = choice_R // choices
        out_RD = self.ffn.forward(pool[source_R], ends, keep=keep)
        weights_R1 = weights[choice_R, None].to(out_RD.dtype)
        index = self.index_sums(source_R, len(pool))
        if keep:
            self.saved = choice_R, source_R, index, out_RD, weights_R1, (tokens, choices)
        return self._send_home(self.sum_rows(out_RD, weights_R1, len(pool), *index))

    def backward(self, d_y_TD: Tensor) -> Gradients:
        choice_R, source_R, index, out_RD, weights_R1, (tokens, choices) = self.saved
        self.saved = ()
        d_y_RD = self._gather(d_y_TD)[source_R]
        d_weights = torch.zeros(self.world_size * tokens * choices, device=d_y_TD.device)
        d_weights[choice_R] = torch.linalg.vecdot(out_RD, d_y_RD).float()
        d_weights_TK = torch.empty(tokens, choices, device=d_y_TD.device)
        reduce_scatter_single(d_weights_TK.view(-1), d_weights, group=self.group)
        d_rows_RD, d_gate_up, d_down = self.ffn.backward(d_y_RD * weights_R1)
        d_x = self._send_home(self.sum_rows(d_rows_RD, None, self.world_size * tokens, *index))
        return d_x, d_weights_TK, d_gate_up, d_down


class GatherScatterBag(GatherScatter):
    """AllGather and ReduceScatter, with a token's rows summed by torch's `embedding_bag`, which reads them
    once and has no atomics."""

    name = "nccl-agrs-bag"

    def index_sums(self, source_R: Tensor, pool: int) -> tuple[Tensor, ...]:
        order_R = torch.argsort(source_R, stable=True)
        counts = torch.zeros(pool, dtype=torch.int64, device=source_R.device)
        counts.scatter_add_(0, source_R, torch.ones_like(source_R))
        return order_R, counts.cumsum(0) - counts

    def sum_rows(self, rows_RD: Tensor, weights_R1: Tensor | None, pool: int, *index: Tensor) -> Tensor:
        order_R, starts = index
        weights_R = None if weights_R1 is None else weights_R1[:, 0][order_R]
        return F.embedding_bag(order_R, rows_RD, starts, mode="sum", per_sample_weights=weights_R)
