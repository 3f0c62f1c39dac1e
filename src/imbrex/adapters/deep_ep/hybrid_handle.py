"""Values that pass between the calls of a `HybridEPBuffer`: configuration, handle, rows on arrival."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from imbrex.adapters.deep_ep.choices import Choices, spread_choices
from imbrex.adapters.deep_ep.permuted import Permutation


@dataclass(frozen=True, kw_only=True, slots=True)
class BufferConfig:
    """The configuration that a program reads back of a buffer. Nothing is sized by it."""

    hidden_dim: int
    max_num_of_tokens_per_rank: int
    num_of_experts_per_rank: int
    num_of_ranks_per_node: int
    num_of_nodes: int = 1
    use_fp8: bool = False
    pad_multiple: int = 1

    @property
    def num_experts(self) -> int:
        return self.num_of_experts_per_rank * self.num_of_ranks_per_node

    def local(self, rank: int) -> range:
        """Experts of a rank."""
        first = rank * self.num_of_experts_per_rank
        return range(first, first + self.num_of_experts_per_rank)


@dataclass(frozen=True, kw_only=True, slots=True)
class Inputs:
    """The inputs of a dispatch, as a program gave them. Of the routing, the map is looked at first.

    hidden: [T, D]. scales: [T, S]. map_TE: bool. probs_TE: float32. ids_TK: int64. weights_TK: float32.
    """

    hidden: Tensor
    scales: Tensor | None
    map_TE: Tensor | None
    probs_TE: Tensor | None
    ids_TK: Tensor | None
    weights_TK: Tensor | None

    @property
    def columns(self) -> list[Tensor]:
        """The columns that move as bytes."""
        return [self.hidden] if self.scales is None else [self.hidden, self.scales]


@dataclass(frozen=True, kw_only=True, slots=True)
class Record:
    """Everything that a dispatch leaves for the calls that follow it.

    route: who sends what to whom, as the backend knows it. choices: of the own tokens. ids_NK: int64; experts
    of the compact rows received, `None` until they are.
    permutation: of a permuted dispatch.
    """

    route: Any
    choices: Choices
    config: BufferConfig
    ids_NK: Tensor | None = None
    permutation: Permutation | None = None

    def spread(self, weights_NK: Tensor) -> Tensor:
        """Weights of the choices of the rows received, where their experts stand: float32 [N, E]."""
        assert self.ids_NK is not None
        received = Choices(ids_TK=self.ids_NK, weights_TK=weights_NK)
        return spread_choices(received, self.config.num_experts)


class HybridHandle(tuple):
    """A tuple that `combine` and a cached dispatch need: seven fields, or eleven of a permuted dispatch,
    where Hybrid-EP has them: [3] rows received int32 [1], [4] bool [N, e], [5] or [8] tokens, [6] or [9] the
    configuration, [7] counts of the local experts, [10] = [-1] the overflow flag int32 [1]. Those that only
    its kernels read are None, and so is [4] of rows that were never compact."""

    record: Record


@dataclass(frozen=True, kw_only=True, slots=True)
class Arrived:
    """Rows received, compact: values, weights of their choices, scales, and what the handle keeps."""

    rows_ND: Tensor
    weights_NK: Tensor | None
    scales_NS: Tensor | None
    record: Record


@dataclass(frozen=True, kw_only=True, slots=True)
class Expanded:
    """Expert-major rows, their probabilities and scales; what the handle keeps, and where the rows are."""

    rows_RD: Tensor
    probs_R: Tensor | None
    scales_RS: Tensor | None
    record: Record
    permutation: Permutation


def make_handle(record: Record, rank: int, received: Tensor) -> HybridHandle:
    """The handle of a dispatch. received: compact rows that there are, int32 [1]."""
    route, local_map_NE = record.route, None
    if record.ids_NK is not None:
        local = record.config.local(rank)
        local_map_NE = record.spread((record.ids_NK >= 0).float())[:, local.start : local.stop].bool()
    fields: tuple[Any, ...] = (None, None, None, received, local_map_NE)
    if record.permutation is None:
        fields = (*fields, route.num_tokens, record.config)
    else:
        counts_e, flag = record.permutation.counts_e, record.permutation.overflow
        fields = (*fields, None, None, counts_e, route.num_tokens, record.config, flag)
    handle = HybridHandle(fields)
    handle.record = record
    return handle
