"""The NVLink exchange: routing, dispatch and combine by kernels that write and read the peers' memory.

    exchange = NvlinkExchange(heap_of, placement, shape)      # collective, once; reused by every layer
    # positions of every row; no host synchronisation
    routed = exchange.route(ids_TK, weights_TK)
    rows_RD = exchange.pull(x_TD, routed)                     # expert-major rows, normal memory
    lease = exchange.push(x_TD, routed)                       # or compact rows, in the heap: lease.rows
    # or routing and rows of either kind in one kernel
    rows_RD, routed = exchange.dispatch_expert(x_TD, ids_TK, weights_TK)
    staged, routed = exchange.stage(x_TD, ids_TK, weights_TK)  # a product's kernel brings the rows
    lease, routed = exchange.dispatch(x_TD, ids_TK, weights_TK)
    y_TD = exchange.combine(rows_RD, routed)                  # weighted, summed, home again

`layout.py` and the head of each `.cu` file say who writes what and who waits for whom. No kernels deadlock:
in each of them some blocks do work that needs no peer (choices, staging, reducing), and all blocks of a
launch are resident, one to an SM.

Every rank makes the same calls in the same order with the same number of SMs. A call without `num_sms`
chooses it by the length of a row. Waits are bounded: a rank that waits longer than `timeout` seconds records
what it missed, tells its peers and leaves the kernel. From then on `check()` and every call raise
`ExchangeError` on all ranks, and `usable` is False.

Under `IMBREX_DEBUG=1` ids, positions and sizes are checked before a kernel uses them, and memory that nobody
has written, expired leases included, reads as NaN (`failures.py`).
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from typing import Any, Unpack

import torch
from torch import Tensor

from imbrex.contracts import Placement
from imbrex.kernels import jit
from imbrex.kernels.exchange import launches as how
from imbrex.kernels.exchange import layout as lay
from imbrex.kernels.exchange import variants as kernel
from imbrex.kernels.exchange.failures import check_choices, check_rows, check_sent, poison
from imbrex.kernels.exchange.groups import RowGroups
from imbrex.kernels.exchange.launcher import Launcher
from imbrex.kernels.exchange.launches import Choosing, Sums, default_sms
from imbrex.kernels.exchange.lease import Lease, Staged, StagedMemory, staged_rows
from imbrex.kernels.ffn.both import ended_before_last
from imbrex.kernels.heap import Heap
from imbrex.kernels.routing.routed import Routed, Sizes, empty_routed, placement_tables


class NvlinkExchange(Launcher):
    """Routes, moves, expands and sums rows among the GPUs of one host, each call one kernel.

    make_heap: makes a `Heap` of a number of bytes (collective). placement: where the experts live.
    compact, expert: the layouts of rows to keep room for; with neither, only `route` can be called, among
        up to 64 ranks. timeout: seconds.
    route_blocks: SMs that route; by default 8, or as many as `pull` has if rows are expert-major only.
    load: loads a kernel, as `jit.load` does.
    layer: the number of the layer that calls, for error messages; `None`: unknown.
    """

    def __init__(
        self,
        make_heap: Callable[[int], Heap],
        placement: Placement,
        shape: lay.Shape,
        *,
        compact: bool = True,
        expert: bool = True,
        timeout: float = 60.0,
        route_blocks: int | None = None,
        load: Callable[..., Any] = jit.load,
    ) -> None:
        how.check_shape(placement, shape, moves=compact or expert)
        layout = lay.layout(shape, compact=compact, expert=expert)
        super().__init__(make_heap, shape, layout, timeout, load)
        self.placement = placement
        # slots for replicas, of this placement or of later ones
        self._room = max(placement.num_slots - placement.num_experts, 0)
        self._places: dict[tuple[int, int], tuple[int, int] | None] = {}
        """Results of `expert_shape`, by bytes of a row and multiprocessors."""
        at_least = route_blocks or (8 if compact else 24)
        self.route_blocks, self._route_shared = lay.route_blocks(shape, at_least, self._room)
        tables = placement_tables(placement, self.device)
        self._sizes = Sizes(self.local_ranks, shape.ranks, shape.choices, shape.most_slots)
        self._plan = how.RoutingPlan(shape, self.layout, placement.num_slots, self._room, tables)

    def route(
        self,
        ids: Tensor,
        weights: Tensor,
        tokens: Tensor | None = None,
        *,
        num_sms: int | None = None,
        **choosing: Unpack[Choosing],
    ) -> Routed:
        """Plan the position of every row.

        ids, weights: int64 and float32 [T, K]; with virtual ranks [L, max_tokens, K], and `tokens` int32 [L].
        num_sms: blocks; a large batch takes more.
        """
        ids, weights = ids.contiguous(), weights.contiguous()
        routed = self._empty_routed(self.shape.max_tokens)
        args = self._route_args(ids, weights, tokens, routed, choosing)
        blocks, shared = self.route_blocks, self._route_shared
        if num_sms is not None:
            blocks, shared = lay.route_blocks(self.shape, num_sms, self._room)
        few = self.shape.ranks <= lay.MOST_RANKS
        variant = kernel.ROUTE if few else kernel.ROUTE_MANY
        threads = kernel.ROUTE_THREADS if few else kernel.ROUTE_MANY_THREADS
        self._launch(variant, "route", blocks, threads, shared, args)
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
        """Push tokens to their ranks: compact rows in the heap, [L, token_capacity, D], which stay until the
        next `push` or `dispatch` begins.

        quantise: bf16 tokens cross as rows of the `fp8` codec, uint8 [L, token_capacity, D + D / 32], with
        the codec's bits. Rows begin at multiples of 128 bytes; D is a multiple of 512.
        """
        if self.debug:
            check_sent(self.shape, routed)
        self._poison_expired()
        row_bytes = how.bytes_of_row(self.shape, x)
        num_sms = num_sms or default_sms(row_bytes, compact=True)
        block = how.push_shape(row_bytes, self.shape.ranks, quantise=quantise)
        buffer = self.next_buffer("push")
        args = how.push_args(self.shape, self.layout, block, x, routed.send_row_LTW, tokens, buffer)
        self._launch(kernel.PUSH[quantise], "push", num_sms, block.threads, block.shared, args)
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
        """Do `route` and `push` in one kernel, which moves rows while it routes. Returns compact rows and
        their routing.

        Arguments are those of `route` and `push`. Two kernels run instead if experts may have replicas, or if
        shared memory has no room for routing beside rows.
        """
        row_bytes = how.bytes_of_row(self.shape, x)
        num_sms = num_sms or default_sms(row_bytes, compact=True)
        block = (
            how.dispatch_shape(self.shape, row_bytes, num_sms, quantise=quantise) if not self._room else None
        )
        if block is None:
            routed = self.route(ids, weights, tokens, num_sms=num_sms, **choosing)
            return self.push(x, routed, num_sms, tokens, quantise=quantise), routed
        self._poison_expired()
        routed = self._empty_routed(self.shape.max_tokens)
        route = self._route_args(ids, weights, tokens, routed, choosing)
        buffer = self.next_buffer("push")
        push = how.push_args(self.shape, self.layout, block, x, routed.send_row_LTW, tokens, buffer)
        args = lay.Dispatch(
            route=route,
            push=push,
            early_at=self.layout.early,
            scratch_at=block.scratch_at,
            early_from=block.early_from,
            window=block.window,
        )
        self._count_routing(num_sms)
        self._launch(kernel.DISPATCH[quantise], "push", num_sms, block.threads, block.shared, args)
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
        """Pull tokens into expert-major rows [L, row_capacity, D] in normal memory. Rows past R, and padding,
        are not written. out: memory for the rows; [rows, D] if this process has one rank.
        """
        num_sms = num_sms or default_sms(how.bytes_of_row(self.shape, x), compact=False)
        out = self._empty_rows(x) if out is None else out
        if self.debug:
            check_rows(routed, out.shape[-2])
        args, shared = how.pull_args(self.shape, self.layout, x, out, routed, self.next_buffer("pull"))
        self._launch(kernel.PULL, "pull", num_sms, kernel.PULL_THREADS, shared, args)
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
        routed: Routed | None = None,
        **choosing: Unpack[Choosing],
    ) -> tuple[Tensor, Routed]:
        """Do `route` and `pull` in one kernel, which moves the first tokens while ranks route. Returns
        expert-major rows and their routing.

        Arguments are those of `route` and `pull`. Two kernels run instead if routing does not fit shared
        memory, and for short rows on few SMs. routed: memory for the routing of `max_tokens` tokens; only the
        one kernel uses it.
        """
        row_bytes = how.bytes_of_row(self.shape, x)
        num_sms = num_sms or default_sms(row_bytes, compact=False)
        place = self.place_of_routing(row_bytes, num_sms)
        if place is None:
            routed = self.route(ids, weights, tokens, **choosing)
            return self.pull(x, routed, num_sms, out), routed
        routed = routed or self._empty_routed(self.shape.max_tokens)
        route = self._route_args(ids, weights, tokens, routed, choosing)
        out = self._empty_rows(x) if out is None else out
        early, buffer = lay.early_groups(self.shape), self.next_buffer("pull")
        pull, shared = how.pull_args(self.shape, self.layout, x, out, routed, buffer, early)
        self._count_routing(num_sms)
        args = lay.Expert(route=route, pull=pull, scratch_at=place[0], fine_at=place[1])
        self._launch(kernel.EXPERT, "pull", num_sms, kernel.EXPERT_THREADS, shared, args)
        return out, routed

    def place_of_routing(self, row_bytes: int, num_sms: int) -> tuple[int, int] | None:
        """Offsets in shared memory of the routing of a kernel that also pulls rows; `None`: two kernels do
        it."""
        at = row_bytes, num_sms
        if at not in self._places:
            self._places[at] = how.expert_shape(self.shape, row_bytes, num_sms, self._room)
        return self._places[at]

    def stage(
        self,
        x: Tensor,
        ids: Tensor,
        weights: Tensor,
        num_sms: int = how.STAGE_SMS,
        tokens: Tensor | None = None,
        *,
        out: Tensor | None = None,
        quantise: bool = False,
        memory: tuple[Routed, StagedMemory] | None = None,
        **choosing: Unpack[Choosing],
    ) -> tuple[Staged, Routed]:
        """Do `route`, and put the tokens where peers can read them, in one kernel. Returns expert-major rows
        that a later kernel brings (`kernels.fused`), and their routing.

        Arguments are those of `route` and `pull`. The kernel that brings the rows must run after this call
        and before the next dispatch. quantise: bf16 tokens cross as rows of the `fp8` codec; D is a multiple
        of 512. memory: for the routing of `max_tokens` tokens, and for what `Staged` has besides; nothing in
        this depends on the address of `x` then, of which own rows come from the staged copy; not with
        `quantise`. Raises ValueError if routing does not fit a block's shared memory.
        """
        how.bytes_of_row(self.shape, x)
        routed, to = memory or (self._empty_routed(self.shape.max_tokens), None)
        route = self._route_args(ids, weights, tokens, routed, choosing)
        num_sms = min(num_sms, self.most_blocks())
        blocks, shared = lay.route_blocks(self.shape, num_sms, self._room, fewest=num_sms)
        out = self._empty_rows(x) if out is None else out
        staged, lists = self._staged(x, out, routed, to, quantise=quantise)
        self._count_routing(blocks)
        args = lay.Stage(route=route, **lists)
        self._launch(kernel.STAGE[quantise], "pull", blocks, kernel.STAGE_THREADS, shared, args)
        return staged, routed

    def stage_again(
        self,
        x: Tensor,
        routed: Routed,
        num_sms: int = how.STAGE_SMS,
        *,
        out: Tensor,
        quantise: bool = False,
        memory: StagedMemory | None = None,
    ) -> Staged:
        """Stage other tokens over an earlier routing. Unless `quantise`, a peer may `pull` instead. memory:
        for what `Staged` has besides, as for `stage`."""
        how.bytes_of_row(self.shape, x)
        if self.debug:
            check_rows(routed, out.shape[-2])
        staged, lists = self._staged(x, out, routed, memory, quantise=quantise)
        args, threads = lay.StageAgain(**lists), kernel.STAGE_AGAIN_THREADS
        self._launch(kernel.STAGE_AGAIN[quantise], "pull", min(num_sms, self.most_blocks()), threads, 0, args)
        return staged

    def _staged(
        self,
        x: Tensor,
        out: Tensor,
        routed: Routed,
        memory: StagedMemory | None = None,
        *,
        quantise: bool = False,
    ) -> tuple[Staged, dict[str, Any]]:
        """The staged rows, and fields of the argument of the kernel that stages them."""
        if quantise:
            lay.fp8_bytes(x.shape[-1])  # refuses other widths
        pull, _ = how.pull_args(self.shape, self.layout, x, out, routed, self.next_buffer("pull"))
        where = {"group": self.group_of, "exchange": self.serial, "pitch": pull.pitch if quantise else 0}
        if memory is not None:
            assert not quantise, "own rows are not coded"
            start, size = pull.staged_at + pull.buffer * pull.buffer_bytes, x.shape[-2:]
            part = self.heap.local[:, start : start + size.numel() * x.element_size()]
            x = part.view(x.dtype).view(-1, *size)
        return staged_rows(x, out, routed, pull, memory, **where)

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
        *,
        groups: RowGroups | None = None,
        memory: tuple[Tensor, Routed] | None = None,
        **choosing: Unpack[Choosing],
    ) -> tuple[Tensor, Routed]:
        """Do `route` and `pull` for at most 512 tokens a rank in one kernel. Returns rows
        [L, row_capacity, D] and their routing.

        Arguments are those of `route` and `pull`. A captured call reads new ids and tokens at every replay.
        groups: memory that receives the groups of rows too. memory: memory for rows and routing.
        """
        small = self.small_call((x, ids, weights, tokens), num_sms, groups, memory, choosing)
        self._launch(kernel.SMALL, "small", num_sms, kernel.ROUTE_THREADS, small.shared, small.args)
        return small.rows, small.routed

    def small_call(
        self,
        inputs: tuple[Tensor, Tensor, Tensor, Tensor | None],
        num_sms: int,
        groups: RowGroups | None,
        memory: tuple[Tensor, Routed] | None,
        choosing: Choosing,
    ) -> how.SmallCall:
        """A `dispatch_small` that has yet to be launched. inputs: x, ids, weights, tokens."""
        (x, ids, weights, tokens), few = inputs, min(self.shape.max_tokens, lay.SMALL_TOKENS)
        how.bytes_of_row(self.shape, x)
        out, routed = memory or (self._empty_rows(x), self._empty_routed(few))
        route = self._route_args(ids, weights, tokens, routed, choosing, small=True)
        args = how.small_args(self.shape, self.layout, route, x, out, few, num_sms, groups)
        return how.SmallCall(args, num_sms, lay.small_shared(self.shape, few, self._room), out, routed)

    def launch_small(
        self, variant: jit.Variant, block: tuple[int, int, int], small: how.SmallCall, besides: list[Any]
    ) -> None:
        """Launch a kernel that does more than a small dispatch, and takes `besides` after its arguments.
        block: blocks a rank, threads and shared memory of a block."""
        self._launch(variant, "small", *block, small.args, besides)

    def combine(
        self,
        rows: Tensor,
        routed: Routed,
        *,
        num_sms: int | None = None,
        num_tokens: int | None = None,
        out_dtype: torch.dtype = torch.bfloat16,
        out: Tensor | None = None,
        **sums: Unpack[Sums],
    ) -> Tensor:
        """Sum expert-major bf16 rows [L, row_capacity, D], or [rows, D] of one rank, to [T, D] at home
        ([L, max_tokens, D] with virtual ranks).

        out_dtype: bfloat16 or float32. out: contiguous memory for the result. sums: see `Sums`.
        """
        width, wire = rows.shape[-1], sums.get("wire", "bf16")
        num_sms = num_sms or (lay.FP8_SMS if wire == "fp8" else default_sms(2 * width, compact=False))
        if out is None:
            tokens = routed.max_tokens if num_tokens is None else num_tokens
            out = self._unwritten(how.empty_sums(self.local_ranks, (tokens, width), out_dtype, self.device))
        sums.setdefault("weighted", True)
        args, shared = self._reduce_args(rows, out, routed, sums), lay.reduce_shared(2 * width, wire)
        args.early = sums.get("behind") or ended_before_last(self.heap.local.get_device())
        args.each = lay.most_pieces(args, self.shape.ranks) <= num_sms * lay.REDUCE_WARPS
        variant = kernel.REDUCE_BEHIND if "behind" in sums else kernel.REDUCE[wire == "fp8"]
        self._launch(variant, "combine", num_sms, kernel.REDUCE_THREADS, shared, args)
        return out

    def combine_beside(
        self,
        variant: jit.Variant,
        block: tuple[int, int, int, int],
        besides: Sequence[Any],
        rows: Tensor,
        routed: Routed,
        *,
        out: Tensor,
        **sums: Unpack[Sums],
    ) -> None:
        """Do `combine` with bf16 sums in a kernel that also does other work; ranks need not agree on that
        work. variant: the kernel, which takes `besides` after the arguments of a combine, and waits for the
        launch before. block: blocks a rank, threads a block, shared memory a block, and blocks a cluster.
        """
        blocks, threads, shared, cluster = block
        args = self._reduce_args(rows, out, routed, sums)
        self._launch(variant, "combine", blocks, threads, shared, args, besides, cluster)

    def _reduce_args(self, rows: Tensor, out: Tensor, routed: Routed, sums: Sums) -> ctypes.Structure:
        if self.debug:
            check_rows(routed, rows.shape[-2])
        self.next_buffer("combine")
        return how.reduce_args(self.shape, self.layout, rows, out, routed, sums)

    def reduced_rows(self, width: int) -> Tensor:
        """The sums of this rank that the next `combine_compact` reads: bf16 [L, token_capacity, D] in the
        heap, for the caller to write.
        """
        return self._rows(self.layout.reduced, self.next_buffer("gather", peek=True)[0], width)

    def combine_compact(
        self,
        own: Tensor,
        routed: Routed,
        *,
        addend: Tensor | None = None,
        num_sms: int | None = None,
        out_dtype: torch.dtype = torch.bfloat16,
    ) -> Tensor:
        """Add up the sums in all ranks' `reduced_rows()`: [T, D], shaped as `own`. own: bf16, the sums of
        this rank's tokens on this rank. addend: bf16, added last.
        """
        buffer, _ = self.next_buffer("gather")
        num_sms = num_sms or default_sms(2 * own.shape[-1], compact=True)
        out = self._unwritten(how.empty_sums(self.local_ranks, own.shape[-2:], out_dtype, self.device))
        args, block = how.gather_args(self.shape, self.layout, own, addend, out, routed, buffer)
        self._launch(kernel.GATHER, "gather", num_sms, block.threads, block.shared, args)
        return out

    def _route_args(
        self,
        ids: Tensor,
        weights: Tensor,
        tokens: Tensor | None,
        routed: Routed,
        choosing: Choosing,
        *,
        small: bool = False,
    ) -> ctypes.Structure:
        if self.debug:
            check_choices(self.shape, ids, tokens)
        how.check_inputs(self.shape, ids, weights, tokens, routed.max_tokens)
        return how.route_args(self._plan, ids, weights, tokens, routed, choosing, small=small)

    def _count_routing(self, blocks: int) -> None:
        """Count a routing that a kernel for rows does as well."""
        self._calls["route"] += 1
        self.last_sms["route"] = blocks

    def _empty_routed(self, max_tokens: int) -> Routed:
        routed = empty_routed(self._sizes, max_tokens, self.device)
        if self.debug and routed.words_TC is not None:
            poison(routed.words_TC)
        return routed

    def _poison_expired(self) -> None:
        """Poison the rows whose lease the next push ends; no peer writes there before that push begins."""
        s = self.shape
        call = self._calls["push"] - max(1, s.buffers - 1) + 1
        if self.debug and call > 0:
            start = self.layout.received + (call - 1) % s.buffers * self._buffer_bytes(s.token_capacity)
            poison(self.heap.local[:, start : start + self._buffer_bytes(s.token_capacity)])
