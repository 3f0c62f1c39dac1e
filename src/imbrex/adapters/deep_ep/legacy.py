"""DeepEP's first interface, `Buffer`: a token goes once to every rank that hosts one of its experts, and the
rows that come back are summed. Semantics: deepseek-ai/DeepEP, `deep_ep/buffers/legacy.py`, intranode."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from imbrex.adapters.deep_ep import absent, events
from imbrex.adapters.deep_ep.backend import (
    Labels,
    dispatch_of,
    heard_by_all,
    kind_of,
    kind_of_rows,
    pad_rows,
    why_not_whole,
)
from imbrex.adapters.deep_ep.choices import align, ids_outside, indices_to_map
from imbrex.adapters.deep_ep.config import Config, tuned
from imbrex.adapters.deep_ep.events import EventHandle, EventOverlap
from imbrex.adapters.deep_ep.low_latency import LowLatency
from imbrex.adapters.deep_ep.opening import open_backend
from imbrex.contracts import Backend
from imbrex.exchange import plan
from imbrex.transport import words

Rows = Tensor | tuple[Tensor, Tensor]
Previous = EventOverlap | EventHandle | None
AGAIN = "dispatch with a handle"
PAIR = "give rows, or values and one tensor of scales"
topk_idx_t = torch.int64
"""The dtype of ids, under the name that programs look up."""


class DispatchHandle(tuple):
    """A tuple that `combine` and a cached dispatch need: six tensors, in DeepEP's order and with one channel.

    rank_prefix_matrix int32 [W, W]: rows that ranks 0..i send to rank j. channel_prefix_matrix int32 [W, 1]:
    rows sent to every rank. recv_channel_prefix_matrix int32 [W, 1]: zeros. recv_src_idx int32 [N]: token of
    every row on its source rank. is_token_in_rank bool [T, W]. send_head int32 [T, W]: place among the rows
    for a rank, or -1.
    """

    route: Any
    num_experts = 0


def make_handle(
    wanted_TW: Tensor, sums: tuple[Tensor, Tensor, Tensor], route: Any, sources_N: Tensor, heads: Tensor
) -> DispatchHandle:
    """Makes the tuple, which begins with `sums`."""
    handle = DispatchHandle((*sums, sources_N, wanted_TW, heads))
    handle.route = route
    return handle


class Buffer(LowLatency, absent.Calls):
    """Dispatch and combine over the ranks of `group`, with DeepEP's arguments and returns.

    group: `None` is one process alone. num_nvl_bytes, num_rdma_bytes: kept, nothing of that size is
        allocated. use_fabric: accepted; torch maps the peers' memory.
    low_latency_mode: kept; every buffer has the calls of both modes.
    allow_nvlink_for_normal_mode, or allow_nvlink_for_low_latency_mode in that mode: `False` keeps `auto` from
        picking the kernels over NVLink.
    transport: a name or an object of imbrex; it decides how rows move, and on which device. `auto`: `nvlink`
        where its kernels can run, else `alltoall`.

    Calls run on the caller's stream and nothing is differentiated, as in DeepEP. Rows are received by source
    rank, then token. Raises ValueError on every rank where one rank's dispatch is wrong, RankLostError where
    a rank does not answer within `IMBREX_TIMEOUT_S`.
    """

    num_sms: int = 20

    def __init__(
        self,
        group: dist.ProcessGroup | None,
        num_nvl_bytes: int = 0,
        num_rdma_bytes: int = 0,
        low_latency_mode: bool = False,
        num_qps_per_rank: int = 24,
        allow_nvlink_for_low_latency_mode: bool = True,
        allow_mnnvl: bool = False,
        explicitly_destroy: bool = False,
        enable_shrink: bool = False,
        comm: Any = None,
        *,
        use_fabric: bool = False,
        allow_nvlink_for_normal_mode: bool = True,
        transport: str | Backend = "auto",
    ) -> None:
        if enable_shrink:
            absent.refuse("Buffer(enable_shrink=True)", absent.MASK)
        if comm is not None:
            absent.refuse(
                "Buffer(comm=...)", "ranks are those of a torch.distributed group; pass it as group"
            )
        allowed = allow_nvlink_for_low_latency_mode if low_latency_mode else allow_nvlink_for_normal_mode
        if transport == "auto" and not allowed:
            transport = "alltoall"
        self._backend = open_backend("deep_ep.Buffer", group, transport)
        self.group = group
        self.rank, self.group_size = self._backend.rank, self._backend.world_size
        self.num_nvl_bytes, self.num_rdma_bytes = num_nvl_bytes, num_rdma_bytes
        self.low_latency_mode = low_latency_mode
        self.explicitly_destroy = explicitly_destroy
        self.enable_shrink = False

    def destroy(self) -> None:
        """Let go of the heaps that buffers and layers of the group share; the last frees them. Raises
        ValueError without `explicitly_destroy=True`, as DeepEP does."""
        if not self.explicitly_destroy:
            raise ValueError("deep_ep.Buffer.destroy: construct the buffer with explicitly_destroy=True")
        self._backend.close()

    @staticmethod
    def is_sm90_compiled() -> bool:
        """Whether fp8 rows can be dispatched; here they are bytes, on any device."""
        return True

    @staticmethod
    def set_num_sms(new_num_sms: int) -> None:
        """Put `new_num_sms`, even, into the configurations made from now on."""
        if new_num_sms <= 0 or new_num_sms % 2:
            raise ValueError(f"deep_ep.Buffer.set_num_sms: {new_num_sms} SMs; give an even number above 0")
        if new_num_sms != Buffer.num_sms:
            warnings.warn(
                "deep_ep.Buffer.set_num_sms: transports over torch.distributed take no SM count", stacklevel=2
            )
        Buffer.num_sms = new_num_sms

    @staticmethod
    def capture() -> EventOverlap:
        """The point that the current stream has reached."""
        return EventOverlap(EventHandle())

    @staticmethod
    def get_dispatch_config(num_ranks: int) -> Config:
        return tuned(Buffer.num_sms, num_ranks)

    @staticmethod
    def get_combine_config(num_ranks: int) -> Config:
        return tuned(Buffer.num_sms, num_ranks)

    def get_comm_stream(self) -> torch.Stream | None:
        """The stream that calls run on, which is the caller's; `None` where the GPU is not in use."""
        return torch.cuda.current_stream() if torch.cuda.is_initialized() else None

    @torch.no_grad()
    def get_dispatch_layout(
        self,
        topk_idx: Tensor,
        num_experts: int,
        previous_event: Previous = None,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> tuple[Tensor, None, Tensor, Tensor, EventOverlap]:
        """Which ranks want which tokens. No communication, no host synchronisation.

        topk_idx: int64 [T, K]; -1 drops a choice. Rank r owns the experts r * E / W to (r + 1) * E / W.
        Returns tokens per rank int32 [W], None, choices per expert int32 [E], bool [T, W], and the event.
        """
        events.begin(previous_event)
        call = "deep_ep.Buffer.get_dispatch_layout"
        if topk_idx.dim() != 2 or topk_idx.dtype != torch.int64:
            raise ValueError(f"{call}: {topk_idx.dtype} {list(topk_idx.shape)}; give topk_idx int64 [T, K]")
        if num_experts < 1 or num_experts % self.group_size:
            raise ValueError(f"{call}: {num_experts} experts on {self.group_size} ranks; give a multiple")
        if ids_outside(topk_idx, num_experts):
            raise ValueError(f"{call}: ids outside [-1, {num_experts}); -1 drops a choice")
        ranks_TK = topk_idx.div(num_experts // self.group_size, rounding_mode="floor")
        wanted_TW, _ = indices_to_map(ranks_TK, None, len(topk_idx), self.group_size)
        per_expert = plan.count_choices(topk_idx, num_experts).int()
        return wanted_TW.sum(0).int(), None, per_expert, wanted_TW, events.end(async_finish)

    @heard_by_all
    @torch.no_grad()
    def dispatch(
        self,
        x: Rows,
        handle: tuple | None = None,
        num_tokens_per_rank: Tensor | None = None,
        num_tokens_per_rdma_rank: Tensor | None = None,
        is_token_in_rank: Tensor | None = None,
        num_tokens_per_expert: Tensor | None = None,
        topk_idx: Tensor | None = None,
        topk_weights: Tensor | None = None,
        expert_alignment: int = 1,
        num_worst_tokens: int = 0,
        config: Config | None = None,
        previous_event: Previous = None,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> tuple[Rows, Tensor | None, Tensor | None, list[int] | None, tuple | None, EventOverlap]:
        """Tokens to the ranks that want them.

        x: [T, D] of any dtype, or values and scales, both [T, ...]; they move as bytes. With `handle` of an
            earlier dispatch the same tokens go the same way. Nothing but `x` moves, and the middle of the
            return is None, unless choices are given: these move, too, and come back with their counts.
        num_tokens_per_rank, num_tokens_per_expert, is_token_in_rank: from `get_dispatch_layout`.
        topk_idx, topk_weights: int64 and float32 [T, K], or neither.
        expert_alignment: counts per expert are rounded up to a multiple of it; rows are not.
        num_worst_tokens: rows to return whatever arrives; the further ones are zero, with -1 as choices.
            Saves the exchange of counts per expert. The rows themselves still need a host synchronisation.

        Returns received x [N, D] (or the pair), local expert of every choice int64 [N, K], -1 elsewhere, its
        weight float32, 0 elsewhere, counts of the local experts (list, empty with `num_worst_tokens`),
        handle, event.
        """
        events.begin(previous_event)
        if handle is not None:
            choices = topk_idx, topk_weights
            received = self._dispatch_again(x, handle, choices, num_tokens_per_expert, expert_alignment)
            return *received, None, events.end(async_finish)
        layout = num_tokens_per_rank, is_token_in_rank, num_tokens_per_expert
        problem = self._find_problem(x, layout, topk_idx, topk_weights)
        problem = problem or why_not_whole("expert_alignment", expert_alignment, 1)
        problem = problem or why_not_whole("num_worst_tokens", num_worst_tokens, 0)
        received = self._dispatch(
            problem, x, layout, topk_idx, topk_weights, expert_alignment, num_worst_tokens
        )
        return *received, events.end(async_finish)

    def _find_problem(
        self,
        x: Rows,
        layout: tuple[Tensor | None, Tensor | None, Tensor | None],
        topk_idx: Tensor | None,
        topk_weights: Tensor | None,
    ) -> str:
        per_rank, wanted_TW, per_expert = layout
        parts = x if isinstance(x, tuple) else (x,)
        if len(parts) > 2:
            return f"x is a tuple of {len(parts)}, as NVFP4 with a global scale; {PAIR}"
        if any(part.dim() != 2 or len(part) != len(parts[0]) or not part.shape[1] for part in parts):
            return f"x is {[list(part.shape) for part in parts]}; give [T, D], or values and scales [T, S]"
        if per_rank is None or wanted_TW is None or per_expert is None:
            return "a part of the layout is missing; pass what get_dispatch_layout returned"
        tokens, world = parts[0].shape[0], self.group_size
        if wanted_TW.shape != (tokens, world) or wanted_TW.dtype != torch.bool or per_rank.shape != (world,):
            return f"a layout of {list(wanted_TW.shape)} for {tokens} tokens on {world} ranks; lay out these"
        if per_expert.dim() != 1 or per_expert.numel() % world:
            return f"counts of {list(per_expert.shape)} experts on {world} ranks; give [E] with E a multiple"
        if wrong := _why_not_choices(topk_idx, topk_weights, tokens):
            return wrong
        if wrong := self._backend.wrong_device(*parts, *layout, topk_idx, topk_weights):
            return wrong
        if topk_idx is not None and ids_outside(topk_idx, len(per_expert)):
            return f"topk_idx has ids outside [-1, {len(per_expert)}); -1 drops a choice"
        # Values cost a host synchronisation on a GPU.
        if wanted_TW.device.type == "cpu" and not torch.equal(wanted_TW.sum(0), per_rank.long()):
            return (
                "num_tokens_per_rank does not count is_token_in_rank; pass what get_dispatch_layout returned"
            )
        return ""

    def _dispatch(
        self,
        problem: str,
        x: Rows,
        layout: tuple[Tensor | None, Tensor | None, Tensor | None],
        topk_idx: Tensor | None,
        topk_weights: Tensor | None,
        alignment: int,
        worst: int,
    ) -> tuple[Rows, Tensor | None, Tensor | None, list[int], DispatchHandle]:
        _, wanted_TW, per_expert = layout
        columns = list(x) if isinstance(x, tuple) else [x]
        if problem or wanted_TW is None or per_expert is None:
            columns, topk_idx = [], None
            wanted_TW = torch.zeros(0, self.group_size, dtype=torch.bool, device="cpu")
            per_expert = words()
        settings = {
            "the number of experts": per_expert.numel(),
            "the number of choices": -1 if topk_idx is None else topk_idx.shape[1],
            **kind_of_rows(columns),
            "whether num_worst_tokens is given": worst > 0,
        }
        choices = () if topk_idx is None or topk_weights is None else (topk_idx, topk_weights)
        route, rows_WW = self._backend.plan_ranks(problem, wanted_TW, [*columns, *choices], worst, settings)
        counts = [] if worst or choices else self._ask_counts(per_expert, alignment)
        labels = None
        if choices:
            arrived, sources, labels = self._backend.carry_labelled(
                columns, *choices, route, per_expert.numel(), counted=not worst
            )
        else:
            arrived, sources = self._backend.carry_with_sources(columns, route)
        rows = _like(x, [pad_rows(part, worst) for part in arrived])
        heads, sources = self._backend.heads(route, wanted_TW), pad_rows(sources, worst, -1)
        sums = self._backend.sums_of(route, rows_WW, wanted_TW.device)
        handle = make_handle(wanted_TW, sums, route, sources, heads)
        handle.num_experts = per_expert.numel()
        if labels is None:
            return rows, None, None, counts, handle
        return rows, *self._read(labels, handle.num_experts, alignment, worst), handle

    def _read(
        self, labels: Labels, num_experts: int, alignment: int, worst: int
    ) -> tuple[Tensor, Tensor, list[int]]:
        """The choices of the rows, and the counts of the local experts, which no other rank is asked for."""
        choices = pad_rows(labels.ids_NK, worst, -1), pad_rows(labels.weights_NK, worst)
        if worst:
            return *choices, []
        counts_e = labels.counts_e
        if counts_e is None:
            counts_e = plan.count_choices(labels.ids_NK, num_experts // self.group_size)
        # host sync: programs want the counts as a list
        return *choices, align(counts_e, alignment).tolist()

    def _ask_counts(self, per_expert: Tensor, alignment: int) -> list[int]:
        """Exchange layouts to count the rows of the local experts, if no choices come with the rows."""
        counts_WE = self._backend.transport.exchange_counts(per_expert.long())
        mine = counts_WE.sum(0).view(self.group_size, -1)[self.rank]
        return align(mine, alignment).tolist()

    def _dispatch_again(
        self,
        x: Rows,
        handle: tuple,
        choices: tuple[Tensor | None, Tensor | None],
        per_expert: Tensor | None,
        alignment: int,
    ) -> tuple[Rows, Tensor | None, Tensor | None, list[int] | None]:
        columns = list(x) if isinstance(x, tuple) else [x]
        experts = getattr(handle, "num_experts", 0) if per_expert is None else per_expert.numel()
        problem = _why_not_handle(handle) or self._why_not_again(columns, handle, choices, experts)
        problem = problem or why_not_whole("expert_alignment", alignment, 1)
        settings = {}
        if not problem:
            columns_of_choices = -1 if choices[0] is None else choices[0].shape[1]
            settings = kind_of_rows(columns) | {"the number of choices": columns_of_choices}
            settings |= dispatch_of(handle.route if isinstance(handle, DispatchHandle) else None)
        self._backend.meet(AGAIN, problem, settings)
        parts = [part for part in choices if part is not None]
        route, size = self._route_of(handle, [*columns, *parts]), handle[3].shape[0]
        if not parts:
            arrived = self._backend.carry(columns, route)
            return _like(x, [pad_rows(part, size) for part in arrived]), None, None, None
        arrived, _, labels = self._backend.carry_labelled(columns, parts[0], parts[1], route, experts)
        counts = self._read(labels, experts, alignment, 0)[2]
        ids_NK, weights_NK = pad_rows(labels.ids_NK, size, -1), pad_rows(labels.weights_NK, size)
        return _like(x, [pad_rows(part, size) for part in arrived]), ids_NK, weights_NK, counts

    def _why_not_again(
        self, columns: list[Tensor], handle: tuple, choices: tuple[Tensor | None, Tensor | None], experts: int
    ) -> str:
        tokens = len(handle[4])
        if len(columns) > 2:
            return f"x is a tuple of {len(columns)}, as NVFP4 with a global scale; {PAIR}"
        if any(part.dim() != 2 or len(part) != tokens or not part.shape[1] for part in columns):
            shapes = [list(part.shape) for part in columns]
            return f"x is {shapes}, the handle is of {tokens} tokens; dispatch as many again"
        if choices[0] is not None and (experts < 1 or experts % self.group_size):
            return "choices with a handle that tells no number of experts; give num_tokens_per_expert, too"
        problem = _why_not_choices(*choices, tokens) or self._backend.wrong_device(*columns, *choices)
        if not problem and choices[0] is not None and ids_outside(choices[0], experts):
            return f"topk_idx has ids outside [-1, {experts}); -1 drops a choice"
        return problem

    def _route_of(self, handle: tuple, columns: list[Tensor]) -> Any:
        """The route of a dispatch. It is made anew if a program has kept the handle's tensors alone."""
        if isinstance(handle, DispatchHandle):
            return handle.route
        return self._backend.read_ranks(handle, columns)

    @heard_by_all
    @torch.no_grad()
    def combine(
        self,
        x: Tensor,
        handle: tuple,
        topk_weights: Tensor | None = None,
        bias: Tensor | tuple[Tensor, Tensor] | None = None,
        config: Config | None = None,
        previous_event: Previous = None,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> tuple[Tensor, Tensor | None, EventOverlap]:
        """The plain sum of a token's rows over ranks, in rank order, in float32; weights are not applied.

        x: [N, D] as received. topk_weights: float32 [N, K]; summed in the same way. bias: one or two [T, D],
        added. Returns [T, D] in x's dtype, float32 [T, K] or None, event. Raises ValueError on every rank
        where one rank's input is wrong.
        """
        events.begin(previous_event)
        columns, dtypes = [x], [x.dtype]
        if topk_weights is not None:
            columns.append(topk_weights)
            dtypes.append(torch.float32)
        terms = (bias,) if isinstance(bias, Tensor) else bias or ()
        problem = _why_not_handle(handle)
        route = None if problem else self._route_of(handle, columns)
        problem = problem or self._why_not_combine(columns, terms, handle, route)
        self._backend.meet("combine", problem, {} if problem else kind_of(x, topk_weights, route))
        summed = self._backend.bring_home(columns, dtypes, route, rounded=bias is None)
        for term in terms:
            summed[0] += term.float()
        weights = None if topk_weights is None else summed[1]
        return summed[0].to(x.dtype), weights, events.end(async_finish)

    def _why_not_combine(
        self, columns: list[Tensor], terms: Sequence[Tensor], handle: tuple, route: Any
    ) -> str:
        size, tokens, shapes = len(handle[3]), len(handle[4]), [list(column.shape) for column in columns]
        if any(column.dim() != 2 or column.shape[0] != size for column in columns):
            return f"{shapes} for {size} rows received; give a row for each"
        if problem := self._backend.why_not_sum(columns[0], route):
            return problem
        shape = [tokens, shapes[0][1]]
        if any(list(term.shape) != shape for term in terms):
            return f"bias is {[list(term.shape) for term in terms]}; give {shape}"
        return self._backend.wrong_device(*columns, *terms)


def _like(x: Rows, parts: list[Tensor]) -> Rows:
    return (parts[0], parts[1]) if isinstance(x, tuple) else parts[0]


def _why_not_handle(handle: Any) -> str:
    if isinstance(handle, tuple) and len(handle) > 4 and all(isinstance(h, Tensor) for h in handle[3:5]):
        return ""
    return f"handle is a {type(handle).__name__}; give that of a dispatch by this buffer"


def _why_not_choices(topk_idx: Tensor | None, topk_weights: Tensor | None, tokens: int) -> str:
    if topk_idx is None and topk_weights is None:
        return ""
    if topk_idx is None or topk_weights is None:
        return "topk_idx without topk_weights, or the reverse; give both or neither"
    fits = topk_idx.dim() == 2 and len(topk_idx) == tokens and topk_idx.shape[1] > 0
    if not fits or topk_idx.shape != topk_weights.shape:
        shapes = list(topk_idx.shape), list(topk_weights.shape)
        return f"topk_idx and topk_weights are {shapes[0]} and {shapes[1]}; give [{tokens}, K]"
    if topk_idx.dtype != torch.int64 or topk_weights.dtype != torch.float32:
        return f"topk_idx {topk_idx.dtype}, topk_weights {topk_weights.dtype}; give int64 and float32"
    return ""
