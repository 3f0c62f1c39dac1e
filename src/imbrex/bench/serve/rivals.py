"""Experts over NCCL's AllGather and ReduceScatter that a CUDA graph takes: no host knows a count.

Every token goes to every rank. Choices of others' experts are sorted behind this rank's own, where torch's
grouped product does not come; a token's rows are summed by one batched product. Or transformers computes the
experts between the two calls, as its expert parallelism has it of ids behind a rank's own. The gate is
imbrex's, as are the experts' parameters.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from imbrex.contracts import Routing
from imbrex.experts.experts import Experts
from imbrex.experts.products import run_grouped_mm
from imbrex.experts.shared import SharedExpert
from imbrex.layer import MoEConfig
from imbrex.placement import contiguous
from imbrex.router.router import Router
from imbrex.runtime.waits import all_gather_single, reduce_scatter_single


class GatherScatterMoE(nn.Module):
    """[T, D] to [T, D], equally many tokens on every rank; made without weights, on the device `meta`."""

    def __init__(self, config: MoEConfig, group: dist.ProcessGroup | None, *, dtype: torch.dtype) -> None:
        super().__init__()
        self.config, self.group = config, group
        self.routing: Routing | None = None
        self.ranks = 1 if group is None else group.size()
        slots = contiguous(config.num_experts, self.ranks).local(0 if group is None else group.rank())
        self.first, sizes = slots[0], (config.hidden_size, config.intermediate_size)
        kind = {"device": "meta", "dtype": dtype}
        self.gate = Router(
            config.hidden_size, config.num_experts, config.top_k, gate=config.gate, device="meta", dtype=dtype
        )
        self.experts = Experts(slots, *sizes, implementation="grouped", **kind)
        shared = config.shared
        self.shared_expert = (
            None if shared is None else SharedExpert(config.hidden_size, shared.intermediate_size, **kind)
        )

    def forward(self, x_TD: Tensor, *, kept_TK: Tensor | None = None) -> Tensor:
        routing = self.routing = self.gate(x_TD, kept_TK=kept_TK)
        choices = torch.cat((routing.ids_TK.float(), routing.weights_TK), 1)
        x_all, choices_all = self._gather(x_TD), self._gather(choices)
        ids, weights = choices_all.chunk(2, 1)
        y_TD = self._scatter(self.compute(x_all, ids.long() - self.first, weights))
        return y_TD if self.shared_expert is None else y_TD + self.shared_expert(x_TD)

    def compute(self, x_PD: Tensor, own_PK: Tensor, weights_PK: Tensor) -> Tensor:
        """This rank's part of every token's sum; ids outside of its experts are others', or dropped."""
        experts, (tokens, choices) = self.experts, own_PK.shape
        local = len(experts.expert_ids)
        here_PK = (own_PK >= 0) & (own_PK < local)
        expert_N = torch.where(here_PK, own_PK, local).flatten()
        order_N = torch.argsort(expert_N, stable=True)
        count_e = torch.zeros(local + 1, dtype=torch.int64, device=x_PD.device)
        count_e.scatter_add_(0, expert_N, torch.ones_like(expert_N))
        rows_ND = x_PD[order_N // choices]
        gate_NF, up_NF = run_grouped_mm(rows_ND, experts.gate_up_proj.mT, count_e[:local]).chunk(2, -1)
        out_ND = run_grouped_mm(F.silu(gate_NF) * up_NF, experts.down_proj.mT, count_e[:local])
        # Rows behind the last expert's are unset.
        here_N = torch.arange(len(out_ND), device=x_PD.device) < count_e[:local].sum()
        out_ND = torch.where(here_N[:, None], out_ND, 0)
        back_PKD = torch.empty_like(out_ND).index_copy_(0, order_N, out_ND).view(tokens, choices, -1)
        weights_PK = torch.where(here_PK, weights_PK, 0)
        return torch.bmm(weights_PK[:, None].to(x_PD.dtype), back_PKD).squeeze(1)

    def _gather(self, own: Tensor) -> Tensor:
        if self.ranks == 1:
            return own
        everybody = own.new_empty(self.ranks * len(own), *own.shape[1:])
        all_gather_single(everybody, own.contiguous(), group=self.group)
        return everybody

    def _scatter(self, y_PD: Tensor) -> Tensor:
        if self.ranks == 1:
            return y_PD
        y_TD = y_PD.new_empty(len(y_PD) // self.ranks, y_PD.shape[1])
        reduce_scatter_single(y_TD, y_PD, group=self.group)
        return y_TD


class TransformersMoE(GatherScatterMoE):
    """Transformers' own grouped experts between AllGather and ReduceScatter."""

    def compute(self, x_PD: Tensor, own_PK: Tensor, weights_PK: Tensor) -> Tensor:
        from transformers.integrations.moe import grouped_mm_experts_forward

        local = len(self.experts.expert_ids)
        here_PK = (own_PK >= 0) & (own_PK < local)
        # What its function reads of a module of experts.
        module: Any = SimpleNamespace(
            gate_up_proj=self.experts.gate_up_proj,
            down_proj=self.experts.down_proj,
            num_experts=local,
            has_gate=True,
            has_bias=False,
            is_transposed=False,
            has_post_expert_norm=False,
            _is_expert_parallel=True,
            _apply_gate=_gated,
        )
        ids_PK = torch.where(here_PK, own_PK, local)
        weights_PK = torch.where(here_PK, weights_PK, 0).to(x_PD.dtype)
        return grouped_mm_experts_forward(module, x_PD, ids_PK, weights_PK)


def _gated(both_NF: Tensor) -> Tensor:
    gate_NF, up_NF = both_NF.chunk(2, -1)
    return F.silu(gate_NF) * up_NF
