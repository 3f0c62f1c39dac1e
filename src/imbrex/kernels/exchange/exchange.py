"""The NVLink exchange: routing, dispatch and combine by kernels that write and read the peers' memory.

    exchange = NvlinkExchange(heap_of, placement, shape)      # collective, once; reused by every layer
    # positions of every row; no host synchronisation
    routed = exchange.route(ids_TK, weights_TK)
    rows_RD = exchange.pull(x_TD, routed)                     # expert-major rows, normal memory
    lease = exchange.push(x_TD, routed)                       # or compact rows, in the heap: lease.rows
    # or routing and rows of either kind in one kernel
    rows_RD, routed = exchange.dispatch_expert(x_TD, ids_TK, weights_TK)
    staged, routed = exchange.stage(x_TD, ids_TK, weights_TK)  # rows come beside a product
    lease, routed = exchange.dispatch(x_TD, ids_TK, weights_TK)
    y_TD = exchange.combine(rows_RD, routed)                  # weighted, summed, home again

Who writes what and who waits for whom stands in `exchange_layout.py` and at the head of each `.cu` file.
Nothing can wait in a circle: in every kernel somebody does what needs no peer (choices, staging, reducing),
whatever others wait for, and all blocks of a launch are resident, one to an SM.

Every rank makes the same calls in the same order with the same number of SMs, which is chosen by the length
of a row where a call does not say it. The waits are bounded: a rank
that waits longer than `timeout` seconds stores what it missed, tells its peers and leaves; then `check()`,
and every later call, raises `ExchangeError` on all of them, and `usable` is False for good.

Under `IMBREX_DEBUG=1` ids, positions and sizes are looked at before a kernel uses them, and what nobody has
written, expired leases included, reads as NaN (`exchange_debug.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Unpack

import torch
from torch import Tensor

from imbrex.kernels import jit
from imbrex.kernels.arguments import multiprocessors
from imbrex.kernels.exchange import layout as lay
from imbrex.kernels.exchange.base import ExchangeBase
from imbrex.kernels.exchange.debug import check_rows, check_sent
from imbrex.kernels.exchange.dispatch import (
    STAGE_SMS,
    default_sms,
    dispatch_shape,
    expert_shape,
    pull_args,
    push_args,
    push_shape,
    rank_stride,
)
from imbrex.kernels.exchange.error import ExchangeError as ExchangeError
from imbrex.kernels.exchange.lease import Lease as Lease
from imbrex.kernels.exchange.reduce import check_wire, reduce_args
from imbrex.kernels.exchange.route import Choosing
from imbrex.kernels.exchange.staged import COUNTED, Staged
from imbrex.kernels.exchange.variants import (
    DISPATCH,
    EXPERT,
    EXPERT_THREADS,
    GATHER,
    PULL,
    PULL_THREADS,
    PUSH,
    REDUCE,
    REDUCE_THREADS,
    ROUTE,
    ROUTE_MANY,
    ROUTE_MANY_THREADS,
    ROUTE_THREADS,
    SMALL,
    STAGE,
    STAGE_THREADS,
)
from imbrex.kernels.routing.routed import Routed


class Summed(NamedTuple):
    """How `NvlinkExchange.combine_beside` sums; the first four as of `combine`. cluster: blocks that are
    launched together."""

    values: tuple[Tensor, Tensor] | None = None
    weighted: bool = False
    addend: Tensor | None = None
    pieces: tuple[int, int, int] | None = None
    cluster: int = 1


class NvlinkExchange(ExchangeBase):
    """One exchange over the ranks of one host; constructed as `ExchangeBase` says."""

    def route(
        self,
        ids: Tensor,
        weights: Tensor,
        tokens: Tensor | None = None,
        *,
        num_sms: int | None = None,
        **choosing: Unpack[Choosing],
    ) -> Routed:
        """ids int64 [T, K], weights float32 [T, K]; with virtual ranks [L, max_tokens, K] and `tokens`
        int32 [L]. num_sms: blocks; more where a batch needs them.
        """
        ids, weights = ids.contiguous(), weights.contiguous()
        routed = self._empty_routed(self.shape.max_tokens)
        args = self._route_args(ids, weights, tokens, routed, choosing)
        blocks, shared = self.route_blocks, self._route_shared
        if num_sms is not None:
            blocks, shared = lay.route_blocks(self.shape, num_sms, self._room)
        few = self.shape.ranks <= lay.MOST_RANKS
        kernel, threads = (ROUTE, ROUTE_THREADS) if few else (ROUTE_MANY, ROUTE_MANY_THREADS)
        self._launch(kernel, "route", blocks, threads, shared, args)
        return routed

    def push(
        self,
        x: Tensor,
        routed: Routed,
        num_sms: int | None = None,
        tokens: Tensor | None = None,
        *,
        quantise: bool = False,
    ) -> Lease:
        """Tokens to compact rows, in the heap: [L, token_capacity, D], there until the next `push` or
        `dispatch` begins.

        quantise: bf16 tokens cross as rows of the `fp8` codec, uint8 [L, token_capacity, D + D / 32], to the
        bit what it encodes; rows begin at multiples of 128 bytes. D is a multiple of 512.
        """
        if self.debug:
            check_sent(self.shape, routed)
        self._poison_expired()
        row_bytes = self._row_bytes(x)
        num_sms = num_sms or default_sms(row_bytes, compact=True)
        block = push_shape(row_bytes, self.shape.ranks, quantise=quantise)
        buffer = self._next_buffer("push")
        args = push_args(self.shape, self.layout, block, x, routed.send_row_LTW, tokens, buffer)
        self._launch(PUSH[quantise], "push", num_sms, block.threads, block.shared, args)
        return self._lease(x, buffer[0], quantise=quantise)

    def dispatch(
        self,
        x: Tensor,
        ids: Tensor,
        weights: Tensor,
        num_sms: int | None = None,
        tokens: Tensor | None = None,
        *,
        quantise: bool = False,
        **choosing: Unpack[Choosing],
    ) -> tuple[Lease, Routed]:
        """`route` and `push` in one kernel, rows under way while routing goes on: compact rows and where.

        Arguments as there. Two kernels where experts may have replicas, or routing has no room beside rows.
        """
        row_bytes = self._row_bytes(x)
        num_sms = num_sms or default_sms(row_bytes, compact=True)
        block = dispatch_shape(self.shape, row_bytes, num_sms, quantise=quantise) if not self._room else None
        if block is None:
            routed = self.route(ids, weights, tokens, num_sms=num_sms, **choosing)
            return self.push(x, routed, num_sms, tokens, quantise=quantise), routed
        self._poison_expired()
        routed = self._empty_routed(self.shape.max_tokens)
        route = self._route_args(ids, weights, tokens, routed, choosing)
        buffer = self._next_buffer("push")
        push = push_args(self.shape, self.layout, block, x, routed.send_row_LTW, tokens, buffer)
        args = lay.Dispatch(
            route=route,
            push=push,
            early_at=self.layout.early,
            scratch_at=block.scratch_at,
            early_from=block.early_from,
            window=block.window,
        )
        self._count_routing(num_sms)
        self._launch(DISPATCH[quantise], "push", num_sms, block.threads, block.shared, args)
        return self._lease(x, buffer[0], quantise=quantise), routed

    def _lease(self, x: Tensor, buffer: int, *, quantise: bool) -> Lease:
        width, calls = x.shape[-1], self._calls
        if quantise:
            rows = self._rows(self.layout.received, buffer, lay.fp8_pitch(width), torch.uint8)
            rows = rows[..., : lay.fp8_bytes(width)]
        else:
            rows = self._rows(self.layout.received, buffer, width, x.dtype)
        lasts = max(1, self.shape.buffers - 1)
        return Lease(view=rows, call=calls["push"], lasts=lasts, calls=lambda: calls["push"])

    def pull(
        self, x: Tensor, routed: Routed, num_sms: int | None = None, out: Tensor | None = None
    ) -> Tensor:
        """Tokens to expert-major rows [L, row_capacity, D] in normal memory; rows past R, and padding, are
        not written. out: where they go; of one rank, [rows, D] will do.
        """
        num_sms = num_sms or default_sms(self._row_bytes(x), compact=False)
        out = self._empty_rows(x) if out is None else out
        if self.debug:
            check_rows(routed, out.shape[-2])
        args, shared = pull_args(self.shape, self.layout, x, out, routed, self._next_buffer("pull"))
        self._launch(PULL, "pull", num_sms, PULL_THREADS, shared, args)
        return out

    def dispatch_expert(
        self,
        x: Tensor,
        ids: Tensor,
        weights: Tensor,
        num_sms: int | None = None,
        tokens: Tensor | None = None,
        *,
        out: Tensor | None = None,
        **choosing: Unpack[Choosing],
    ) -> tuple[Tensor, Routed]:
        """`route` and `pull` in one kernel, first tokens under way while ranks route: expert-major rows and
        where.

        Arguments as there. Two kernels where routing does not fit their shared memory, and for short rows on
        few SMs.
        """
        row_bytes = self._row_bytes(x)
        num_sms = num_sms or default_sms(row_bytes, compact=False)
        at = row_bytes, num_sms
        if at not in self._places:
            self._places[at] = expert_shape(self.shape, row_bytes, num_sms, self._room)
        place = self._places[at]
        if place is None:
            routed = self.route(ids, weights, tokens, **choosing)
            return self.pull(x, routed, num_sms, out), routed
        routed = self._empty_routed(self.shape.max_tokens)
        route = self._route_args(ids, weights, tokens, routed, choosing)
        out = self._empty_rows(x) if out is None else out
        early, buffer = lay.early_groups(self.shape), self._next_buffer("pull")
        pull, shared = pull_args(self.shape, self.layout, x, out, routed, buffer, early)
        self._count_routing(num_sms)
        args = lay.Expert(route=route, pull=pull, scratch_at=place[0], fine_at=place[1])
        self._launch(EXPERT, "pull", num_sms, EXPERT_THREADS, shared, args)
        return out, routed

    def stage(
        self,
        x: Tensor,
        ids: Tensor,
        weights: Tensor,
        num_sms: int = STAGE_SMS,
        tokens: Tensor | None = None,
        *,
        out: Tensor | None = None,
        **choosing: Unpack[Choosing],
    ) -> tuple[Staged, Routed]:
        """`route`, and the tokens where peers find them, in one kernel: expert-major rows that a kernel
        brings later (`kernels.fused`), and where.

        Arguments as there. One kernel brings them, behind this call and before the next one
        that moves rows out. Raises ValueError where routing does not fit a block's shared memory.
        """
        self._row_bytes(x)
        routed = self._empty_routed(self.shape.max_tokens)
        route = self._route_args(ids, weights, tokens, routed, choosing)
        blocks, shared = lay.route_blocks(self.shape, num_sms, self._room, fewest=num_sms)
        out = self._empty_rows(x) if out is None else out
        pull, _ = pull_args(self.shape, self.layout, x, out, routed, self._next_buffer("pull"))
        room = out.shape[-2]
        sizes = (self.local_ranks, room), (self.local_ranks, -(-room // COUNTED))
        token_LR, there_LC = (torch.empty(size, dtype=torch.int32, device=self.device) for size in sizes)
        args = lay.Stage(
            route=route, pull=pull, token=token_LR, there=there_LC, rows=room, counters=there_LC.shape[1]
        )
        self._count_routing(blocks)
        self._launch(STAGE, "pull", blocks, STAGE_THREADS, shared, args)
        staged = Staged(
            x=x,
            rows=out,
            token_LR=token_LR,
            there_LC=there_LC,
            position_LWTK=routed.position_LWTK,
            totals_L4=routed.totals_L4,
            staged_at=pull.staged_at + pull.buffer * pull.buffer_bytes,
            group=self.group_of,
            exchange=self.serial,
        )
        return staged, routed

    def _empty_rows(self, x: Tensor) -> Tensor:
        size = (self.local_ranks, self.shape.row_capacity, x.shape[-1])
        return self._unwritten(torch.empty(size, dtype=x.dtype, device=self.device))

    def dispatch_small(
        self,
        x: Tensor,
        ids: Tensor,
        weights: Tensor,
        num_sms: int = lay.SMALL_SMS,
        tokens: Tensor | None = None,
        **choosing: Unpack[Choosing],
    ) -> tuple[Tensor, Routed]:
        """`route` and `pull` of at most 512 tokens a rank in one kernel: rows [L, row_capacity, D] and where.

        Arguments as there. A captured call follows new ids and tokens at every replay.
        """
        row_bytes, few = self._row_bytes(x), min(self.shape.max_tokens, lay.SMALL_TOKENS)
        routed = self._empty_routed(few)
        route = self._route_args(ids, weights, tokens, routed, choosing, small=True)
        out = self._empty_rows(x)
        args = lay.Small(
            route=route,
            x=x,
            out=out,
            staged_at=self.layout.small_staged,
            buffer_bytes=self.shape.ranks * few * self.shape.row_bytes,
            x_stride=rank_stride(x),
            out_stride=rank_stride(out),
            out_bytes=out.shape[-2] * row_bytes,
            row_bytes=row_bytes,
            parts=lay.SMALL_PARTS,
            pushers=lay.small_pushers(self.shape.ranks, num_sms),
        )
        if num_sms < 2:
            raise ValueError("exchange: a small dispatch needs at least 2 SMs: some push, some route")
        shared = lay.small_shared(self.shape, few, self._room)
        self._launch(SMALL, "small", num_sms, ROUTE_THREADS, shared, args)
        return out, routed

    def combine(
        self,
        rows: Tensor,
        routed: Routed,
        *,
        weighted: bool = True,
        addend: Tensor | None = None,
        num_sms: int | None = None,
        num_tokens: int | None = None,
        wire: str = "bf16",
        out_dtype: torch.dtype = torch.bfloat16,
        values: tuple[Tensor, Tensor] | None = None,
        out: Tensor | None = None,
        pieces: tuple[int, int, int] | None = None,
    ) -> Tensor:
        """Expert-major bf16 rows [L, row_capacity, D], or of one rank [rows, D], to [T, D] ([L, max_tokens,
        D] with virtual ranks).

        weighted: multiply by the gate weights. addend: bf16, shaped as the result, joins the sum last (the
        shared experts' output). wire: "bf16", or "fp8": a rank's sums cross as rows of the `fp8` codec; D is
        then a multiple of 256. out_dtype: bfloat16 or float32. values: float32 numbers of the rows, [R] (or
        [L, row_capacity]), and where those of every choice's row go, [T, K] (or [L, max_tokens, K]).
        out: where the result goes, contiguous. pieces: as of `lay.combine_pieces`, the same on all ranks.
        """
        width, most = rows.shape[-1], routed.max_tokens
        num_sms = num_sms or (lay.FP8_SMS if wire == "fp8" else default_sms(2 * width, compact=False))
        check_wire(wire, width)
        if self.debug:
            check_rows(routed, rows.shape[-2])
        self._next_buffer("combine")
        if out is None:
            out = self._empty_out(most if num_tokens is None else num_tokens, width, out_dtype)
        shared = lay.reduce_shared(2 * width, wire)
        args = reduce_args(
            *(self.shape, self.layout, rows, addend, out, routed),
            (rank_stride(rows), rank_stride(addend), rank_stride(out)),
            values,
            pieces=pieces or lay.combine_pieces(most, wire),
            wire=wire,
            weighted=weighted,
        )
        variant = REDUCE[wire == "fp8"]
        self._launch(variant, "combine", num_sms, REDUCE_THREADS, shared, args)
        return out

    def combine_beside(
        self,
        variant: jit.Variant,
        block: tuple[int, int, int],
        besides: Sequence[Any],
        rows: Tensor,
        routed: Routed,
        *,
        out: Tensor,
        how: Summed,
    ) -> None:
        """`combine` of bf16 sums by a kernel that does something else as well, on which ranks need not agree.
        variant: of the kernel, which takes `besides` behind what a combine takes. block: blocks of a rank,
        threads of one and its shared memory.
        """
        if self.debug:
            check_rows(routed, rows.shape[-2])
        self._next_buffer("combine")
        args = reduce_args(
            *(self.shape, self.layout, rows, how.addend, out, routed),
            (rank_stride(rows), rank_stride(how.addend), rank_stride(out)),
            how.values,
            pieces=how.pieces or lay.combine_pieces(routed.max_tokens),
            wire="bf16",
            weighted=how.weighted,
        )
        blocks, threads, shared = block
        self._kernel(variant)
        self._launch(variant, "combine", blocks, threads, shared, args, besides, how.cluster)

    def most_blocks(self, variant: jit.Variant, block: tuple[int, int, int]) -> int:
        """Blocks of a launch of one rank. block: of a cluster, threads of one and its shared memory."""
        cluster, threads, shared = block
        if cluster == 1:
            return min(multiprocessors(self.heap.local.get_device()), lay.MAX_BLOCKS)
        most = cluster * self._kernel(variant).clusters(cluster, threads, shared)
        return min(most, lay.MAX_BLOCKS // cluster * cluster)

    def _kernel(self, variant: jit.Variant) -> Any:
        if variant not in self._kernels:
            self._kernels[variant] = self._load(variant, self.device)
        return self._kernels[variant]

    def reduced_rows(self, width: int) -> Tensor:
        """Where the next `combine_compact` reads this rank's sums: bf16 [L, token_capacity, D] in the
        heap.
        """
        return self._rows(self.layout.reduced, self._next_buffer("gather", peek=True)[0], width)

    def combine_compact(
        self,
        own: Tensor,
        routed: Routed,
        *,
        addend: Tensor | None = None,
        num_sms: int | None = None,
        out_dtype: torch.dtype = torch.bfloat16,
    ) -> Tensor:
        """Sums that stand in `reduced_rows()` to [T, D], T of `own`. own, addend: bf16, shaped as the result;
        own: the sums of the own tokens.
        """
        s, width = self.shape, own.shape[-1]
        buffer, _ = self._next_buffer("gather")
        block = lay.gather_shape(2 * width)
        num_sms = num_sms or default_sms(2 * width, compact=True)
        out = self._empty_out(own.shape[-2], width, out_dtype)
        args = lay.Gather(
            own=own,
            addend=addend,
            out=out,
            send_row=routed.send_row_LTW,
            tokens=routed.tokens_LW,
            sums_at=self.layout.reduced + buffer * self._buffer_bytes(s.token_capacity),
            x_stride=rank_stride(own),
            out_stride=rank_stride(out),
            out_bytes=out.shape[-2] * width * out.element_size(),
            max_tokens=routed.send_row_LTW.shape[1],
            row_bytes=2 * width,
            piece_bytes=block.piece_bytes,
            crews=block.crews,
            adders=block.adders,
            slots=block.slots,
            out_float=out_dtype == torch.float32,
        )
        self._launch(GATHER, "gather", num_sms, block.threads, block.shared, args)
        return out

    def _empty_out(self, tokens: int, width: int, dtype: torch.dtype) -> Tensor:
        if dtype not in (torch.bfloat16, torch.float32):
            raise ValueError(f"exchange: combine to {dtype}; bfloat16 or float32")
        size = (self.local_ranks, tokens, width) if self.local_ranks > 1 else (tokens, width)
        return self._unwritten(torch.empty(size, dtype=dtype, device=self.device))
