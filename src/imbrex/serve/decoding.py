"""The two steps that the serving loop repeats, both entirely on the device: prefill of a chunk of prompts,
and decoding, in which drafts are verified and new ones made.

The progress of requests is in `State`, on the device. A step reads and writes it, so a decoding step has no
inputs, and a graph of it can be replayed. A row whose `remaining` is 0 is a dummy: it is computed, its
choices are dropped, and its state does not change.

Example of a step with two drafts [5, 6] after token 4 at position 9: the model sees 4, 5, 6 at 9, 10, 11 and
answers 5, 7, 8. The first draft was right, so 5 and 7 are delivered, the length becomes 11, and the next step
begins with 7 at position 11. It overwrites what the cache holds of 6.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from imbrex.serve.attention import Span
from imbrex.serve.model import Decoder


@dataclass(frozen=True, kw_only=True, slots=True)
class Drafting:
    """How many tokens a step drafts. forced: the mean number of drafts that are accepted, whatever was
    drafted, for timings with random weights; `None`: those that are right are accepted."""

    length: int = 0
    forced: float | None = None

    def __post_init__(self) -> None:
        if self.length < 0 or (self.forced is not None and not 0 <= self.forced <= self.length):
            raise ValueError(
                f"serve: {self.length} drafts, of which {self.forced} are forced; give 0 or more drafts, and "
                "force at most as many"
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class State:
    """The progress of a rank's requests, by slot, on the device. length_Z: tokens in the cache. last_Z: the
    newest token, which is not in the cache yet. remaining_Z: tokens still to generate. drafts_ZX: the
    drafts after `last_Z`.

    ring_NZX, taken_NZ: the tokens of the last N steps, and how many of them were accepted. step_1: the number
    of steps so far.
    """

    length_Z: Tensor
    last_Z: Tensor
    remaining_Z: Tensor
    drafts_ZX: Tensor
    ring_NZX: Tensor
    taken_NZ: Tensor
    step_1: Tensor


def make_state(slots: int, drafts: int, interval: int, device: torch.device) -> State:
    """A state of empty slots on `device`. interval: steps between two deliveries."""

    def zeros(*shape: int) -> Tensor:
        return torch.zeros(shape, dtype=torch.int64, device=device)

    return State(
        length_Z=zeros(slots),
        last_Z=zeros(slots),
        remaining_Z=zeros(slots),
        drafts_ZX=zeros(slots, drafts),
        ring_NZX=zeros(interval, slots, drafts + 1),
        taken_NZ=zeros(interval, slots),
        step_1=zeros(1),
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class Chunk:
    """Pieces of prompts, one per row. tokens_BS: padded with any tokens. slot_B: the slot of the row's cache.
    start_B: the tokens in it already. count_B: the tokens of the row that count, 0 for a dummy. next_B:
    the prompt's token after them. wanted_B: the number of tokens to generate if the prompt ends here,
    otherwise 0.

    numbers: all of these joined, so that one copy brings them to the device.
    """

    numbers: Tensor
    tokens_BS: Tensor
    slot_B: Tensor
    start_B: Tensor
    count_B: Tensor
    next_B: Tensor
    wanted_B: Tensor


def chunk_of(numbers: Tensor, rows: int) -> Chunk:
    """The parts of `numbers`, int64 [B * (S + 5)]."""
    tokens, *of_row = numbers.split([len(numbers) - 5 * rows, *[rows] * 5])
    names = ("slot_B", "start_B", "count_B", "next_B", "wanted_B")
    return Chunk(numbers=numbers, tokens_BS=tokens.view(rows, -1), **dict(zip(names, of_row, strict=True)))


class Steps:
    """The steps of a model with `slots` slots. capacity: the tokens that a slot has room for, including
    padding of a chunk and drafts that are refused. Dummy rows of a chunk use `spare` further slots."""

    def __init__(
        self,
        model: Decoder,
        *,
        slots: int,
        capacity: int,
        spare: int = 1,
        interval: int = 1,
        drafting: Drafting | None = None,
        stop: int | None = None,
    ) -> None:
        self.model, self.capacity, self.stop = model, capacity, stop
        self.drafting = drafting or Drafting()
        if self.drafting.length and model.draft is None:
            raise ValueError("serve: the model has no block to draft with; make it with drafting=True")
        self.device = model.embedding.weight.device
        self.caches = model.make_caches(slots + spare, capacity)
        self.state = make_state(slots + spare, self.drafting.length, interval, self.device)

    @torch.no_grad()
    def prefill(self, chunk: Chunk) -> Tensor:
        """Run a chunk. Returns int64 [B]: the first generated token of every row whose prompt ends in the
        chunk."""
        state, model, (rows, length) = self.state, self.model, chunk.tokens_BS.shape
        steps_S = torch.arange(length, device=self.device)
        live_T = (steps_S < chunk.count_B[:, None]).flatten()
        span = Span(chunk.start_B, length, self.capacity, live_T=live_T, slots_B=chunk.slot_B)
        hidden_TD = model(chunk.tokens_BS, span, self.caches)
        last_B = torch.arange(rows, device=self.device) * length + (chunk.count_B - 1).clamp(min=0)
        first_B = model.best(hidden_TD[last_B])
        ends_B, live_B = chunk.wanted_B > 0, chunk.count_B > 0
        after_B = torch.where(ends_B, first_B, chunk.next_B)
        drafts_BX = state.drafts_ZX[chunk.slot_B]
        if self.drafting.length:
            next_T = chunk.tokens_BS.roll(-1, 1).flatten().index_copy(0, last_B, after_B)
            row_TD = model.drafted(hidden_TD, next_T, span, self.caches[-1])
            drafts_BX = self._draft(row_TD[last_B], chunk.start_B + chunk.count_B, live_B, chunk.slot_B)
        self._put(state.length_Z, chunk.slot_B, chunk.start_B + chunk.count_B, live_B)
        self._put(state.last_Z, chunk.slot_B, after_B, live_B & ends_B)
        over_B = torch.zeros_like(ends_B) if self.stop is None else first_B == self.stop
        wanted_B = torch.where(over_B, 0, chunk.wanted_B - 1)
        self._put(state.remaining_Z, chunk.slot_B, wanted_B, live_B & ends_B)
        self._put(state.drafts_ZX, chunk.slot_B, drafts_BX, live_B & ends_B)
        return first_B

    @torch.no_grad()
    def decode(self, rows: int) -> None:
        """Run a decoding step of the slots 0 to `rows`: the model sees their newest tokens and drafts,
        accepted tokens are written to the ring, and new drafts are made."""
        state, model, length = self.state, self.model, self.drafting.length + 1
        start_B, remaining_B = state.length_Z[:rows], state.remaining_Z[:rows]
        live_B = remaining_B > 0
        tokens_BS = torch.cat((state.last_Z[:rows, None], state.drafts_ZX[:rows]), 1)
        span = Span(start_B, length, self.capacity, live_T=live_B.repeat_interleave(length))
        hidden_TD = model(tokens_BS, span, self.caches)
        best_BS = model.best(hidden_TD).view(rows, length)
        right_B = self._right(tokens_BS, best_BS)
        taken_B, ends_B = self._count_accepted(best_BS, right_B, remaining_B)
        place_B = (taken_B - 1).clamp(min=0)
        last_B = best_BS.gather(1, place_B[:, None])[:, 0]
        self._record(rows, best_BS, taken_B)
        if self.drafting.length:
            row_TD = model.drafted(hidden_TD, best_BS.flatten(), span, self.caches[-1])
            at_B = torch.arange(rows, device=self.device) * length + place_B
            drafts_BX = self._draft(row_TD[at_B], start_B + taken_B, live_B, None)
            state.drafts_ZX[:rows].copy_(drafts_BX)
        start_B.add_(taken_B)
        state.last_Z[:rows].copy_(torch.where(live_B, last_B, state.last_Z[:rows]))
        remaining_B.copy_(torch.where(ends_B, 0, remaining_B - taken_B))

    def _right(self, tokens_BS: Tensor, best_BS: Tensor) -> Tensor:
        """How many drafts of every row are right before the first wrong one."""
        forced = self.drafting.forced
        if forced is not None:
            # Forced numbers differ by one at most, and have the mean over steps.
            step = self.state.step_1.double()
            right_1 = ((step + 1) * forced).floor() - (step * forced).floor()
            return right_1.long().expand(len(tokens_BS))
        return (tokens_BS[:, 1:] == best_BS[:, :-1]).long().cumprod(1).sum(1)

    def _count_accepted(self, best_BS: Tensor, right_B: Tensor, remaining_B: Tensor) -> tuple[Tensor, Tensor]:
        """How many of the tokens leave, up to the first that stops, and whether that is the end."""
        taken_B = torch.minimum(right_B + 1, remaining_B)
        if self.stop is None:
            return taken_B, taken_B == remaining_B
        stops_BS = (best_BS == self.stop).long()
        before_B = (stops_BS.cumsum(1) == 0).sum(1) + 1
        return torch.minimum(taken_B, before_B), (before_B <= taken_B) | (taken_B == remaining_B)

    def _draft(self, row_BD: Tensor, start_B: Tensor, live_B: Tensor, slots_B: Tensor | None) -> Tensor:
        """Guesses at the next tokens, [B, X], from the drafting block's row of the newest token."""
        model, drafts = self.model, [self.model.best_drafts(row_BD)]
        for step in range(self.drafting.length - 1):
            span = Span(start_B + step, 1, self.capacity, live_T=live_B, slots_B=slots_B)
            row_BD = model.drafted(row_BD, drafts[-1], span, self.caches[-1])
            drafts.append(model.best_drafts(row_BD))
        return torch.stack(drafts, 1)

    def _record(self, rows: int, best_BS: Tensor, taken_B: Tensor) -> None:
        state = self.state
        place_1 = state.step_1 % len(state.ring_NZX)
        state.ring_NZX[:, :rows].index_copy_(0, place_1, best_BS[None])
        state.taken_NZ.index_fill_(0, place_1, 0)
        state.taken_NZ[:, :rows].index_copy_(0, place_1, taken_B[None])
        state.step_1.add_(1)

    @staticmethod
    def _put(of_slot: Tensor, slot_B: Tensor, value: Tensor, where_B: Tensor) -> None:
        """Write rows of slots where wanted. Rows of a chunk are of different slots."""
        where = where_B.view(-1, *[1] * (value.dim() - 1))
        of_slot.index_copy_(0, slot_B, torch.where(where, value, of_slot[slot_B]))


class Captured:
    """A call without arguments or result, which reads and writes tensors that keep their memory.

    graphs: whether to capture a CUDA graph after the first run, which loads kernels and makes heaps. Then a
    call is one launch. Collective if the work is.
    """

    def __init__(self, work: Callable[[], object], device: torch.device, *, graphs: bool = True) -> None:
        self.work, self.graph = work, None
        work()
        if not graphs or device.type != "cuda":
            return
        torch.cuda.synchronize(device)
        self.graph = torch.cuda.CUDAGraph()
        with torch.no_grad(), torch.cuda.graph(self.graph, capture_error_mode="thread_local"):
            work()

    def __call__(self) -> None:
        if self.graph is None:
            self.work()
        else:
            self.graph.replay()
