"""NVIDIA's Hybrid-EP interface, `HybridEPBuffer`: compact rows, or expert-major rows for a grouped GEMM.

Semantics: deepseek-ai/DeepEP, branch hybrid-ep, `deep_ep/hybrid_ep_buffer.py`, one node. A routing is a map
bool [T, E] or ids [T, K]; probabilities travel with the rows, and what a combine returns of them, float32
[T, E], is how programs get their gradient.
"""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from imbrex.adapters.deep_ep.backend import heard_by_all, kind_of, pad_rows, why_not_whole
from imbrex.adapters.deep_ep.choices import indices_to_map, spread_choices
from imbrex.adapters.deep_ep.hybrid_arrival import carry_rows, plan_again, plan_rows, read_handle
from imbrex.adapters.deep_ep.hybrid_handle import (
    BufferConfig,
    HybridHandle,
    Inputs,
    Record,
    make_handle,
)
from imbrex.adapters.deep_ep.opening import open_backend
from imbrex.contracts import Backend
from imbrex.exchange import agree

__all__ = ["HybridEPBuffer", "indices_to_map"]


class HybridEPBuffer:
    """Dispatch and combine over the ranks of `group`, with Hybrid-EP's arguments and returns.

    group: `None` is one process alone. hidden_dim, num_local_experts: the same on every rank.
    max_num_of_tokens_per_rank: kept; any number of tokens is taken, and ranks may have different ones.
    The numbers of SMs and blocks, and the options of its kernels, are accepted and not used.
    transport: a name or an object of imbrex; it decides how rows move, and on which device. `auto`: `nvlink`
        where its kernels can run, else `alltoall`.

    Calls run on the caller's stream and nothing is differentiated, as in Hybrid-EP. Raises ValueError on
    every rank where one rank's dispatch is wrong, RankLostError where a rank does not answer within
    `IMBREX_TIMEOUT_S`.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | None,
        hidden_dim: int,
        max_num_of_tokens_per_rank: int,
        num_local_experts: int,
        use_fp8: bool = False,
        num_sms_dispatch_api: int | None = None,
        num_sms_combine_api: int | None = None,
        num_sms_preprocessing_api: int | None = None,
        num_blocks_permute: int | None = None,
        num_blocks_unpermute: int | None = None,
        load_cached_kernels: bool = False,
        use_shared_buffer: bool = True,
        enable_custom_allgather: bool = False,
        num_of_hybrid_ep_ranks_per_nvlink_domain: int | None = None,
        use_mnnvl: bool | None = None,
        *,
        transport: str | Backend = "auto",
    ) -> None:
        self._backend = open_backend("deep_ep.HybridEPBuffer", group, transport)
        self.group = group
        self.rank = self.local_rank = self._backend.rank
        self.group_size = self.num_of_hybrid_ep_ranks_per_nvlink_domain = self._backend.world_size
        self.node_rank, self.num_of_nodes = 0, 1
        self.runtime = self._backend.transport
        config = BufferConfig(
            hidden_dim=hidden_dim,
            max_num_of_tokens_per_rank=max_num_of_tokens_per_rank,
            num_of_experts_per_rank=num_local_experts,
            num_of_ranks_per_node=self.group_size,
            use_fp8=use_fp8,
        )
        self.configurer = SimpleNamespace(buffer_config=config)
        settings: dict[str, int | str] = {"hidden_dim": hidden_dim, "num_local_experts": num_local_experts}
        agree(self._backend.transport, settings, "deep_ep.HybridEPBuffer")

    def empty_jit_cache(self) -> None:
        """Nothing is cached on disk for this buffer."""

    def update_template_config(
        self,
        hidden_dim: int | None = None,
        num_of_tokens_per_rank: int | None = None,
        num_local_experts: int | None = None,
        pad_multiple: int | None = None,
        use_fp8: bool | None = None,
        fuse_permute_dispatch: bool = False,
        **options: Any,
    ) -> BufferConfig:
        """The configuration of a call; the buffer's own one grows with it."""
        mine = self.configurer.buffer_config
        options = {
            "hidden_dim": hidden_dim,
            "max_num_of_tokens_per_rank": num_of_tokens_per_rank,
            "num_of_experts_per_rank": num_local_experts,
        }
        grown = {name: max(getattr(mine, name), value or 0) for name, value in options.items()}
        self.configurer.buffer_config = replace(mine, **grown)
        changes = {name: value for name, value in options.items() if value is not None}
        fp8 = mine.use_fp8 if use_fp8 is None else use_fp8
        return replace(mine, **changes, use_fp8=fp8, pad_multiple=pad_multiple or 1)

    @heard_by_all
    @torch.no_grad()
    def dispatch(
        self,
        hidden: Tensor,
        scaling_factor: Tensor | None = None,
        topk_idx: Tensor | None = None,
        topk_weights: Tensor | None = None,
        num_of_experts: int | None = None,
        probs: Tensor | None = None,
        routing_map: Tensor | None = None,
        num_dispatched_tokens_tensor: Tensor | None = None,
        num_dispatched_tokens: int | None = None,
        handle: tuple | None = None,
    ) -> tuple[Tensor, Tensor | None, Tensor | None, HybridHandle]:
        """Compact rows: a token once on each rank that owns one of its experts, by source rank, then token.

        hidden: [T, D], moved as bytes. scaling_factor: [T, S], travels along.
        routing_map, probs: bool and float32 [T, E]; or topk_idx, topk_weights: int64 and float32 [T, K], -1
            drops a choice. With the `handle` of an earlier dispatch the tokens go the same way, and only new
            `probs` may be given.
        num_dispatched_tokens: rows to return where that is more than arrive; the further ones are zero.

        Returns rows [N, D], probabilities float32 [N, E] or None, scales or None, a handle of seven fields.
        """
        inputs = Inputs(
            hidden=hidden,
            scales=scaling_factor,
            map_TE=routing_map,
            probs_TE=probs,
            ids_TK=topk_idx,
            weights_TK=topk_weights,
        )
        size = num_dispatched_tokens or 0
        problem = why_not_whole("num_dispatched_tokens", size, 0)
        plan = self._plan("dispatch", inputs, num_of_experts, handle, problem=problem)
        plan = replace(plan, route=self._backend.resize(plan.route, size))
        arrived = carry_rows(self._backend, inputs, plan)
        plan = arrived.record
        probs_NE = None if arrived.weights_NK is None else pad_rows(plan.spread(arrived.weights_NK), size)
        scales_NS = None if arrived.scales_NS is None else pad_rows(arrived.scales_NS, size)
        return pad_rows(arrived.rows_ND, size), probs_NE, scales_NS, self._handle(plan)

    @heard_by_all
    @torch.no_grad()
    def combine(
        self, hidden: Tensor, probs: Tensor | None = None, handle: tuple | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """Sums of a token's compact rows over ranks, in rank order, in float32; weights are not applied.

        hidden: [N, D]. probs: float32 [N, E], summed in the same way. Returns [T, D] in hidden's dtype, and
        float32 [T, E] or None. Raises ValueError on every rank where one rank's input is wrong.
        """
        route = read_handle(self._backend, "combine", handle).route
        columns, problem = [hidden] if probs is None else [hidden, probs], ""
        for column in columns:
            if column.dim() != 2 or route.num_rows is None or len(column) < route.num_rows:
                problem = f"{list(column.shape)} for {route.num_rows} rows received; give a row for each"
        self._meet_to_sum("combine", problem, hidden, probs, route)
        dtypes = [hidden.dtype, torch.float32][: len(columns)]
        summed = self._backend.bring_home(columns, dtypes, route, rounded=True)
        return summed[0], None if probs is None else summed[1]

    @heard_by_all
    @torch.no_grad()
    def dispatch_with_permute(
        self,
        *,
        hidden: Tensor,
        topk_idx: Tensor | None = None,
        topk_weights: Tensor | None = None,
        num_of_experts_per_rank: int | None = None,
        num_of_experts: int | None = None,
        use_fp8: bool | None = None,
        routing_map: Tensor | None = None,
        probs: Tensor | None = None,
        scaling_factor: Tensor | None = None,
        num_permuted_tokens: int | Tensor | None = None,
        pad_multiple: int | None = None,
        handle: tuple | None = None,
        non_blocking: bool = False,
        fuse_permute_dispatch: bool = False,
        num_dispatched_tokens: int | None = None,
        use_host_meta: bool | None = None,
    ) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor, HybridHandle]:
        """Expert-major rows: a row for every choice, by local expert, then source rank, then token.

        hidden, scaling_factor, routing, handle: as for `dispatch`.
        pad_multiple: the rows of an expert are padded to a multiple, with zeros. A handle keeps its own.
        num_permuted_tokens: rows to return whatever arrives: rows past it are dropped, further ones are zero.
        non_blocking: the counts stay on the device, nothing of the permutation is read by the host; needs
            `num_permuted_tokens`, a multiple of `pad_multiple`. use_host_meta: its older name, negated.

        Returns rows [P, D], probabilities float32 [P] or None, scales [P, S] or None, rows of every local
        expert (int64, padding included, none past P; on the host, unless the routing came with
        `non_blocking`), and a handle of eleven fields.
        """
        if num_of_experts is None and num_of_experts_per_rank is not None:
            num_of_experts = num_of_experts_per_rank * self.group_size
        non_blocking = non_blocking if use_host_meta is None else not use_host_meta
        # host sync: only for a count that a program keeps on the device
        budget = None if num_permuted_tokens is None else int(num_permuted_tokens)
        problem = _find_budget_problem(budget, pad_multiple or 1, non_blocking)
        inputs = Inputs(
            hidden=hidden,
            scales=scaling_factor,
            map_TE=routing_map,
            probs_TE=probs,
            ids_TK=topk_idx,
            weights_TK=topk_weights,
        )
        plan = self._plan("dispatch_with_permute", inputs, num_of_experts, handle, pad_multiple or 1, problem)
        permutation = plan.permutation
        if permutation is not None and budget not in (None, permutation.num_rows):
            permutation = permutation.resize(budget)
        results = self._backend.expand(inputs, plan, permutation, budget, on_host=not non_blocking)
        permutation = results.permutation
        counts_e = permutation.counts_e if permutation.on_host_e is None else permutation.on_host_e
        handle = self._handle(replace(results.record, permutation=permutation))
        return results.rows_RD, results.probs_R, results.scales_RS, counts_e, handle

    def _handle(self, record: Record) -> HybridHandle:
        device = record.choices.ids_TK.device
        return make_handle(record, self.rank, self._backend.received(record.route, device))

    @heard_by_all
    @torch.no_grad()
    def combine_with_unpermute(
        self,
        *,
        hidden: Tensor,
        probs: Tensor | None = None,
        handle: tuple | None = None,
        pad_multiple: int | None = None,
        fuse_unpermute_combine: bool = False,
        num_dispatched_tokens: int | None = None,
        non_blocking: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """Sums of a token's expert-major rows, in float32, in the order of rows on a rank, then of ranks.

        hidden: [P, D]. probs: float32 [P]. Padding is not read, dropped rows count as zero.
        Returns [T, D] in hidden's dtype, and float32 [T, E] or None: the value of every choice where the
        routing has it. Raises ValueError on every rank where one rank's input is wrong.
        """
        call = "combine_with_unpermute"
        plan = read_handle(self._backend, call, handle)
        permutation = plan.permutation
        problem = ""
        if permutation is None or hidden.dim() != 2 or len(hidden) != permutation.num_rows:
            problem = (
                f"hidden is {list(hidden.shape)}; give [P, D] with the P rows of the dispatch_with_permute "
                "whose handle this is"
            )
        elif probs is not None and (probs.shape != hidden.shape[:1] or not probs.is_floating_point()):
            problem = f"probs is {probs.dtype} {list(probs.shape)}; give float32 {[len(hidden)]}"
        self._meet_to_sum(call, problem, hidden, probs, plan.route)
        assert permutation is not None
        y_TD, weights_TK = self._backend.reduce(hidden, probs, plan, permutation)
        if weights_TK is None:
            return y_TD, None
        return y_TD, spread_choices(replace(plan.choices, weights_TK=weights_TK), plan.config.num_experts)

    def _meet_to_sum(self, call: str, problem: str, hidden: Tensor, probs: Tensor | None, route: Any) -> None:
        problem = problem or self._backend.why_not_sum(hidden, route)
        problem = problem or self._backend.wrong_device(hidden, probs)
        self._backend.meet(call, problem, {} if problem else kind_of(hidden, probs, route))

    def _plan(
        self,
        call: str,
        inputs: Inputs,
        num_experts: int | None,
        handle: tuple | None,
        pad_multiple: int = 1,
        problem: str = "",
    ) -> Record:
        if handle is not None:
            return plan_again(self._backend, call, inputs, handle, problem)
        local = None
        if num_experts is not None:
            local = num_experts // self.group_size
            if not problem and num_experts % self.group_size:
                problem = f"{num_experts} experts on {self.group_size} ranks; give a multiple"
        tokens, width = inputs.hidden.shape if inputs.hidden.dim() == 2 else (None, None)
        config = self.update_template_config(width, tokens, local, pad_multiple)
        return plan_rows(self._backend, call, inputs, config, problem)


def _find_budget_problem(budget: int | None, pad_multiple: int, non_blocking: bool) -> str:
    problem = why_not_whole("pad_multiple", pad_multiple, 1)
    problem = problem or why_not_whole("num_permuted_tokens", budget or 0, 0)
    if problem:
        return problem
    if non_blocking and budget is None:
        return "non_blocking without num_permuted_tokens; say how many rows to return"
    if non_blocking and budget is not None and budget % pad_multiple:
        return f"num_permuted_tokens {budget} is not a multiple of pad_multiple {pad_multiple}"
    return ""
