"""DeepEP V2's interface, `ElasticBuffer`, in its compact mode: a token goes once to every rank that hosts one
of its experts, as in the legacy buffer, whose rows and handles these are. Semantics: deepseek-ai/DeepEP,
`deep_ep/buffers/elastic.py` of July 2026; its calls for caches, pipelines and gathers are refused."""

from __future__ import annotations

from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor

from imbrex.adapters.deep_ep import absent, events
from imbrex.adapters.deep_ep.backend import heard_by_all, why_not_stats, why_not_whole
from imbrex.adapters.deep_ep.choices import align, ids_outside
from imbrex.adapters.deep_ep.events import EventHandle, EventOverlap
from imbrex.adapters.deep_ep.legacy import Buffer, DispatchHandle, Previous, Rows
from imbrex.contracts import Backend
from imbrex.exchange import plan

SCALES_ALIGNED = 4
"""Scales of 4 bytes in the 16 that a column of them is a multiple of, column-major."""


class EPHandle:
    """A handle that a dispatch leaves for its combine, and for dispatches of the same tokens' other values.

    topk_idx: int64 [T, K], as it was dispatched. num_recv_tokens: rows that were returned, with those to
        spare where the host was not to wait. num_recv_tokens_per_expert_list: aligned counts of the local
        experts, empty where the host was not to wait. psum_num_recv_tokens_per_scaleup_rank int32 [W]: rows
        of ranks 0..i. psum_num_recv_tokens_per_expert int32 [e]: aligned counts of experts 0..i.
    recv_src_metadata int32 [N, K + 2]: source rank * `num_max_tokens_per_rank` + token; its row among that
        rank's * K + its first choice here; -1 elsewhere, and in rows to spare. The fields that DeepEP's
        kernels alone read are `None`.
    """

    do_expand = False
    num_unaligned_recv_tokens_per_expert = dst_buffer_slot_idx = None
    token_metadata_at_forward = channel_linked_list = None

    def __init__(
        self,
        rows: DispatchHandle,
        ids_TK: Tensor,
        ids_NK: Tensor,
        sizes: tuple[int, int, int],
        *,
        rank: int,
        world: int,
    ) -> None:
        self.rows, self.topk_idx, self.ids_NK = rows, ids_TK, ids_NK
        self.num_experts, self.expert_alignment, self.num_max_tokens_per_rank = sizes
        self.num_sms = Buffer.num_sms
        self.num_recv_tokens = self.num_expanded_tokens = len(ids_NK)
        self.num_recv_tokens_per_expert_list: list[int] = []
        self.counts_e = plan.count_choices(self.ids_NK, self.num_experts // world)
        self.psum_num_recv_tokens_per_expert = align(self.counts_e, self.expert_alignment).cumsum(0).int()
        self.psum_num_recv_tokens_per_scaleup_rank = rows[0][:, rank].contiguous().int()
        self.recv_src_metadata = self._sources(world)

    def _sources(self, world: int) -> Tensor:
        ends_W = self.psum_num_recv_tokens_per_scaleup_rank
        number_N = torch.arange(len(self.ids_NK), dtype=torch.int32, device=ends_W.device)
        source_N = torch.searchsorted(ends_W, number_N, right=True).clamp(max=world - 1)
        begins_W = torch.cat((ends_W.new_zeros(1), ends_W[:-1]))
        here_NK = self.ids_NK >= 0
        choices = self.topk_idx.shape[1]
        place_N = (number_N - begins_W[source_N]) * choices + here_NK.int().argmax(1)
        token_N = source_N * self.num_max_tokens_per_rank + self.rows[3]
        columns = torch.stack((token_N, place_N), 1).int()
        columns = torch.where((number_N < ends_W[-1])[:, None], columns, -1)
        return torch.cat((columns, columns.new_full((len(columns), choices), -1)), 1)


class _Compact(Buffer):
    """The legacy buffer, for a caller who may know already what is wrong with a dispatch (`problem`)."""

    def send(
        self, problem: str, x: Rows, choices: tuple[Tensor, Tensor], experts: int, alignment: int, worst: int
    ) -> tuple[Rows, Tensor, Tensor, list[int], DispatchHandle]:
        layout: Any = (None, None, None)
        if not problem:
            per_rank, _, per_expert, wanted_TW, _ = self.get_dispatch_layout(choices[0], experts)
            layout = per_rank, wanted_TW, per_expert
            problem = self._find_problem(x, layout, *choices)
        result: Any = self._dispatch(problem, x, layout, *choices, alignment, worst)
        return result

    def wait_for_all(self) -> None:
        self._backend.meet("barrier", "", {})


class ElasticBuffer:
    """Dispatch and combine over the ranks of `group`, with DeepEP V2's arguments and returns.

    num_max_tokens_per_rank: of a dispatch that gives none itself; the same on every rank. hidden, num_topk,
        num_bytes, num_cpu_bytes, use_fp8_dispatch, num_allocated_qps and the rest are kept or have nothing to
        do: nothing of that size is allocated, any dtype is moved, the same input gives the same bits.
    transport: as in `Buffer`.

    Calls run on the caller's stream and nothing is differentiated. Rows are received by source rank, then
    token. Raises ValueError on every rank where one rank's dispatch is wrong, RankLostError where a rank does
    not answer within `IMBREX_TIMEOUT_S`.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | None,
        num_bytes: int | None = None,
        num_cpu_bytes: int = 0,
        num_max_tokens_per_rank: int = 0,
        hidden: int = 0,
        num_topk: int = 0,
        use_fp8_dispatch: bool = False,
        deterministic: bool = False,
        allow_hybrid_mode: bool = True,
        allow_multiple_reduction: bool = True,
        prefer_overlap_with_compute: bool = True,
        sl_idx: int = 3,
        num_allocated_qps: int = 0,
        num_cpu_timeout_secs: int = 300,
        num_gpu_timeout_secs: int = 100,
        explicitly_destroy: bool = False,
        *,
        transport: str | Backend = "auto",
    ) -> None:
        self._rows = _Compact(group, explicitly_destroy=explicitly_destroy, transport=transport)
        self._backend = self._rows._backend
        self.group, self.explicitly_destroy = group, explicitly_destroy
        self.rank_idx, self.num_ranks = self._rows.rank, self._rows.group_size
        # Programs compare it with a hint, to see whether a buffer will do.
        hint = self.get_buffer_size_hint(group, num_max_tokens_per_rank, hidden, num_topk)
        self.num_bytes, self.num_cpu_bytes = hint if num_bytes is None else num_bytes, num_cpu_bytes
        self.num_scaleout_ranks, self.num_scaleup_ranks = self.get_logical_domain_size()
        self.scaleout_rank_idx, self.scaleup_rank_idx = 0, self.rank_idx
        self.num_max_tokens_per_rank, self.hidden, self.num_topk = num_max_tokens_per_rank, hidden, num_topk
        self.use_fp8_dispatch, self.deterministic = use_fp8_dispatch, deterministic
        self.num_allocated_qps = num_allocated_qps

    def destroy(self) -> None:
        """Let go of the heaps, as `Buffer.destroy` does."""
        self._rows.destroy()

    @staticmethod
    def get_buffer_size_hint(
        group: dist.ProcessGroup | None,
        num_max_tokens_per_rank: int,
        hidden: int,
        num_topk: int = 0,
        use_fp8_dispatch: bool = False,
        allow_hybrid_mode: bool = True,
        allow_multiple_reduction: bool = True,
    ) -> int:
        """Bytes of the rows that a rank may receive, in bfloat16, with their choices; nothing is allocated by
        it."""
        ranks = 1 if group is None else group.size()
        return ranks * num_max_tokens_per_rank * (2 * hidden + 12 * num_topk)

    @staticmethod
    def capture() -> EventHandle:
        """The point that the current stream has reached."""
        return EventHandle()

    def get_comm_stream(self) -> torch.Stream | None:
        """The stream that calls run on, as of `Buffer`."""
        return self._rows.get_comm_stream()

    def get_physical_domain_size(self) -> tuple[int, int]:
        """(1, W): rows go straight to their rank."""
        return 1, self.num_ranks

    def get_logical_domain_size(self) -> tuple[int, int]:
        """(1, W): rows go straight to their rank."""
        return 1, self.num_ranks

    def get_theoretical_num_sms(self, num_experts: int, num_topk: int, *more: Any, **others: Any) -> int:
        """The number of `Buffer.set_num_sms`, for programs that ask; calls take what they need."""
        return Buffer.num_sms

    def get_theoretical_num_qps(self, num_sms: int) -> int:
        """0: there are no queue pairs."""
        return 0

    def barrier(
        self, use_comm_stream: bool = True, with_cpu_sync: bool = False, sequential: bool = True
    ) -> None:
        """Hosts of all ranks wait for each other; with_cpu_sync: and each for its GPU before that."""
        if with_cpu_sync and torch.cuda.is_initialized():
            # host sync: asked for
            torch.cuda.synchronize()
        self._rows.wait_for_all()

    @heard_by_all
    @torch.no_grad()
    def dispatch(
        self,
        x: Rows,
        topk_idx: Tensor | None = None,
        topk_weights: Tensor | None = None,
        cumulative_local_expert_recv_stats: Tensor | None = None,
        num_experts: int | None = None,
        num_max_tokens_per_rank: int | None = None,
        expert_alignment: int | None = None,
        num_sms: int = 0,
        num_qps: int = 0,
        previous_event: Previous = None,
        previous_event_before_epilogue: Previous = None,
        async_with_compute_stream: bool = False,
        allocate_on_comm_stream: bool = False,
        handle: EPHandle | None = None,
        do_handle_copy: bool = True,
        do_cpu_sync: bool | None = None,
        do_expand: bool = False,
        do_zero_padding: bool = False,
        use_tma_aligned_col_major_sf: bool = False,
    ) -> tuple[Rows, Tensor, Tensor | None, EPHandle, EventOverlap]:
        """Tokens to the ranks that want them.

        x: [T, D], or values and scales; they move as bytes. topk_idx: int64 [T, K], -1 drops a choice;
            topk_weights: float32 [T, K] or None. cumulative_local_expert_recv_stats: int32 [e]; choices of
            the local experts are added to it.
        num_max_tokens_per_rank: at least every rank's T; the constructor's if it is not given.
        expert_alignment: counts are rounded up to a multiple of it; rows are not.
        do_cpu_sync: whether as many rows come as there are, and a list of counts (the default), or room for
            all that could come, without a wait of the host; the further rows are zero, their choices -1.
        handle: of an earlier dispatch; other values of the same tokens go the same way, with `topk_weights`
            these, too, and the same handle comes back.

        Returns received x [N, D] (or the pair), local expert of every choice int64 [N, K], -1 elsewhere, its
        weight float32, 0 elsewhere (None without `topk_weights`), handle, event.
        """
        stats = cumulative_local_expert_recv_stats
        events.begin(previous_event)
        events.begin(previous_event_before_epilogue)
        if do_expand or do_zero_padding:
            absent.refuse("ElasticBuffer.dispatch(do_expand=True)", absent.EXPAND)
        if handle is None:
            limit = (
                self.num_max_tokens_per_rank if num_max_tokens_per_rank is None else num_max_tokens_per_rank
            )
            sizes = num_experts or 0, expert_alignment or 1, limit
            _refuse(why_not_whole("num_experts", sizes[0], 0))
            _refuse(why_not_whole("expert_alignment", sizes[1], 1))
            _refuse(why_not_whole("num_max_tokens_per_rank", limit, 0))
            _refuse(why_not_stats(stats, sizes[0] // self.num_ranks))
            worst = 0 if do_cpu_sync in (None, True) else limit * self.num_ranks
            choices = topk_idx, topk_weights
            rows, weights_NK, handle = self._dispatch(x, choices, sizes, worst, do_handle_copy)
        else:
            if not isinstance(handle, EPHandle):
                raise ValueError(f"handle is a {type(handle).__name__}; give that of a dispatch")
            if do_cpu_sync or topk_idx is not None:
                raise ValueError(
                    "topk_idx or do_cpu_sync=True with a handle, which has both already; leave them out"
                )
            _refuse(why_not_stats(stats, handle.num_experts // self.num_ranks))
            rows, weights_NK = self._dispatch_again(x, handle, topk_weights)
        if stats is not None:
            stats += handle.counts_e.to(stats.dtype)
        if use_tma_aligned_col_major_sf and isinstance(rows, tuple):
            rows = rows[0], _by_columns(rows[1])
        return rows, handle.ids_NK, weights_NK, handle, events.end(async_with_compute_stream)

    def _dispatch(
        self,
        x: Rows,
        choices: tuple[Tensor | None, Tensor | None],
        sizes: tuple[int, int, int],
        worst: int,
        copied: bool,
    ) -> tuple[Rows, Tensor | None, EPHandle]:
        (experts, alignment, _), (ids_TK, weights_TK) = sizes, choices
        problem = self._why_not(x, ids_TK, sizes)
        if ids_TK is None:
            ids_TK = torch.zeros(0, 1, dtype=torch.int64, device="cpu")
        sent_TK = torch.zeros_like(ids_TK, dtype=torch.float32) if weights_TK is None else weights_TK
        arrived = self._rows.send(problem, x, (ids_TK, sent_TK), experts, alignment, worst)
        rows, ids_NK, weights_NK, counts, rows_handle = arrived
        of = ids_TK.clone() if copied else ids_TK, ids_NK, sizes
        handle = EPHandle(rows_handle, *of, rank=self.rank_idx, world=self.num_ranks)
        handle.num_recv_tokens_per_expert_list = counts
        handle.num_expanded_tokens = len(ids_NK) * ids_TK.shape[1] if worst else sum(counts)
        return rows, None if weights_TK is None else weights_NK, handle

    def _why_not(self, x: Rows, ids_TK: Tensor | None, sizes: tuple[int, int, int]) -> str:
        """Why this dispatch is refused, or an empty string."""
        experts, alignment, limit = sizes
        tokens = len(x[0] if isinstance(x, tuple) else x)
        if ids_TK is None or ids_TK.dim() != 2 or ids_TK.dtype != torch.int64:
            return "topk_idx is missing or of another kind; give int64 [T, K], or a handle"
        if experts < 1 or experts % self.num_ranks:
            return f"{experts} experts on {self.num_ranks} ranks; give num_experts, a multiple"
        if alignment < 1 or tokens > limit:
            return (
                f"{tokens} tokens, num_max_tokens_per_rank={limit}, expert_alignment={alignment}; give a "
                "limit of at least every rank's tokens, here or to the constructor, and an alignment above 0"
            )
        if ids_outside(ids_TK, experts):
            return f"ids outside [-1, {experts}); -1 drops a choice"
        return ""

    def _dispatch_again(
        self, x: Rows, handle: EPHandle, weights_TK: Tensor | None
    ) -> tuple[Rows, Tensor | None]:
        choices: dict[str, Any] = {}
        if weights_TK is not None:
            choices = {"topk_idx": handle.topk_idx, "topk_weights": weights_TK}
        rows, _, weights_NK, *_ = self._rows.dispatch(x, handle.rows, **choices)
        return rows, weights_NK

    @heard_by_all
    @torch.no_grad()
    def combine(
        self,
        x: Tensor,
        handle: EPHandle,
        topk_weights: Tensor | None = None,
        bias: Tensor | tuple[Tensor, Tensor] | None = None,
        num_sms: int = 0,
        num_qps: int = 0,
        previous_event: Previous = None,
        previous_event_before_epilogue: Previous = None,
        async_with_compute_stream: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> tuple[Tensor, Tensor | None, EventOverlap]:
        """The plain sum of a token's rows over ranks, as `Buffer.combine` computes it; weights are not
        applied, but summed in the same way. Returns [T, D], float32 [T, K] or None, event."""
        events.begin(previous_event_before_epilogue)
        return self._rows.combine(
            x,
            handle.rows if isinstance(handle, EPHandle) else handle,
            topk_weights,
            bias,
            previous_event=previous_event,
            async_finish=async_with_compute_stream,
        )

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith(absent.ELASTIC_PARTS):
            absent.refuse(f"ElasticBuffer.{name}", absent.ELASTIC)
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")


def _refuse(problem: str) -> None:
    """Raise ValueError where there is a problem, before the ranks meet: `heard_by_all` tells it to all."""
    if problem:
        raise ValueError(problem)


def _by_columns(scales_NS: Tensor) -> Tensor:
    """Copy scales so that each column begins at a multiple of 16 bytes: the same [N, S], by columns."""
    rows, columns = scales_NS.shape
    stride = -(-rows // SCALES_ALIGNED) * SCALES_ALIGNED
    lying = scales_NS.new_empty(columns, stride)[:, :rows].t()
    return lying.copy_(scales_NS)
