"""The values that pass between the rooms: choices, places, plans, rows and outputs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any, NamedTuple

from torch import Tensor

VERSION = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class Routing:
    """The experts that every token is sent to, and their weights.

    ids_TK: int64, global logical experts, an expert at most once per token; `-1` drops the choice.
    weights_TK: float32, differentiable; the weight of a dropped choice is ignored.
    losses: unweighted auxiliary losses by name, float32 scalars over the global batch, differentiable.
    kept_TK: bool, the choices that were not dropped on purpose; `None` means that none was dropped.
        Given this mask, the router returns the same routing to the bit.
    """

    ids_TK: Tensor
    weights_TK: Tensor
    losses: Mapping[str, Tensor] = field(default_factory=dict)
    kept_TK: Tensor | None = None

    def keep(self, kept_TK: Tensor | None) -> Routing:
        """This routing with only those of its choices that are in `kept_TK` too; `None`: all of them."""
        if kept_TK is None:
            return self
        return replace(self, kept_TK=kept_TK if self.kept_TK is None else self.kept_TK & kept_TK)


@dataclass(frozen=True, kw_only=True, slots=True)
class Placement:
    """Where experts live: slot `s` holds expert `slots[s]` (`-1`: a spare), and expert-parallel rank `r`
    owns the slots `rank_offsets[r]:rank_offsets[r + 1]`. Build one through `imbrex.placement`, which checks
    that every expert has a slot and that replicas never share a rank."""

    slots: tuple[int, ...]
    rank_offsets: tuple[int, ...]
    num_experts: int

    @property
    def num_slots(self) -> int:
        return len(self.slots)

    @property
    def num_ranks(self) -> int:
        return len(self.rank_offsets) - 1

    @property
    def has_replicas(self) -> bool:
        experts = [s for s in self.slots if s >= 0]
        return len(experts) > len(set(experts))

    def local(self, rank: int) -> tuple[int, ...]:
        """Experts in the slots of expert-parallel rank `rank`."""
        return self.slots[self.rank_offsets[rank] : self.rank_offsets[rank + 1]]


Split = Callable[[Tensor, Placement], Tensor]
"""The choice of replicas: from choices per expert, int64 [W, E], to choices per slot, int64 [W, S], which sum
to those of the expert."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Geometry:
    """The placement, this rank's part of it and the layout of rows: what all plans of an exchange share.

    rows_per_slot: given the number of tokens of the group, the rows that every slot is padded to; `None`: no
        padding beyond `alignment`.
    """

    placement: Placement
    rank: int
    tensor_parallel: int
    hidden_size: int
    top_k: int
    split: Split
    alignment: int
    rows_per_slot: Callable[[int], int] | None = None

    @property
    def local_slots(self) -> range:
        expert_rank = self.rank // self.tensor_parallel
        return range(*self.placement.rank_offsets[expert_rank : expert_rank + 2])

    @property
    def world_size(self) -> int:
        return self.placement.num_ranks * self.tensor_parallel

    @property
    def max_rows_per_token(self) -> int:
        """The most rows that one token can have on this rank."""
        return min(self.top_k, len(self.local_slots))


@dataclass(frozen=True, kw_only=True, slots=True)
class Traffic:
    """The rows that cross between ranks, seen from one rank. Rows that stay on the rank are not counted.

    sent_tokens_N: int64; the token of every row that leaves, by destination rank, then token.
    splits_2W: int64 on the host; rows sent to every rank, and rows received from every rank.
    hops: the further steps of a transport that relays rows, in its own layout.
    """

    sent_tokens_N: Tensor
    splits_2W: Tensor
    hops: tuple[Tensor, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """The position of every row before any data moves. Pure index arithmetic; see `imbrex.exchange.plan`.

    slot_TK, position_TK: int64; the slot that takes a choice and its row among the expert-major rows of the
        ranks that own the slot; `-1` where the choice was dropped.
    counts_e: int64; rows of every local slot, padding included. num_rows: R, their sum.
    """

    slot_TK: Tensor
    position_TK: Tensor
    traffic: Traffic
    counts_e: Tensor
    num_rows: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Handle:
    """Everything that `combine` and the backward need from a dispatch; a compiled graph can hold it.

    weights_R: float32; the routing weight of every row, 0 for padding. Differentiable.
    state: tensors private to the dispatcher that made the handle.
    num_tokens: T.
    maker: the key of that dispatcher; 0 for rows that no exchange brought.
    promised: all ranks promised at the dispatch to combine rows that fit it, so `combine` need not ask them.
    """

    weights_R: Tensor
    state: tuple[Tensor, ...]
    num_tokens: int
    maker: int = 0
    promised: bool = False


class RowForm(Enum):
    """The form in which rows reach the experts."""

    ROWS = "rows"
    """Expert-major, in the dtype of the tokens. Every dispatch can give these."""
    FP8 = "fp8"
    """Expert-major, as they crossed: float8_e4m3fn, with a scale for every 128 values."""
    INDEXED = "indexed"
    """The tokens themselves, and the token of every row."""
    UNDER_WAY = "under way"
    """Expert-major, in memory that the kernel of the experts' first product fills itself."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Dispatched:
    """Rows ready for the local experts.

    rows_RD: expert-major, in local slot order, within a slot by source rank and token. Padding rows are zero.
    counts_e: int64; rows of every local slot, padding included. Rows past their sum are never read.
    handle: give it to `combine`; its `weights_R` are for experts that apply the weights themselves.
    form: the form of these rows, one of those that were asked for.
    scales_RB: only with `RowForm.FP8`: float32 [R, D/128], the factor of every 128 values of `rows_RD`.
    index_R: only with `RowForm.INDEXED`: int64; `rows_RD` are the tokens [T, D], row r is token `index_R[r]`.
    beside: what kernels need with the rows: `Staged` for `UNDER_WAY`, `Groups` or `None` for `ROWS`.
    leave: experts may give it their last product to run later, before anyone reads the result.
    """

    rows_RD: Tensor
    counts_e: Tensor
    handle: Handle
    form: RowForm = RowForm.ROWS
    scales_RB: Tensor | None = None
    index_R: Tensor | None = None
    beside: Any = None
    leave: Callable[[Any], None] | None = None


class Roles(NamedTuple):
    """Blocks of the fused kernels: how many make tokens ready for peers (`stage`), begin with sums of dx
    (`sums`), bring rows (`rows`), sum others' tokens beside down (`first`). dy: 0 if rows of dy move before
    their product. `None`: the default. No bit depends on them."""

    stage: int | None = None
    sums: int | None = None
    rows: int | None = None
    dy: int | None = None
    first: int | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Output:
    """The result of a strategy: outputs [T, D] and, if it dropped choices, a mask of those that it kept, bool
    [T, K]. Given this mask, it returns the same outputs again."""

    y_TD: Tensor
    kept_TK: Tensor | None = None
