"""imbrex's exchange in torchtitan, by one option, in every model with its `RoutedExperts`.

    torchrun ... --override.imports imbrex.adapters.torchtitan.exchange --training.disable_cuda_graphs
    ... --override.imports 'imbrex.adapters.torchtitan.exchange={"codec": "fp8"}'

torchtitan imports this module by the name, and uses our dispatcher in the place of its all-to-all. Router,
experts, their sharding and the losses stay torchtitan's. A token goes once to every rank that has one of its
experts, with its scores. Rows are expert-major, and a rank sums a token's rows times their scores in float32
before they cross again. Needs torchtitan 0.3.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torchtitan.config import derive, override  # pyright: ignore[reportMissingImports]
from torchtitan.models.common.token_dispatcher import (  # pyright: ignore[reportMissingImports]
    AllToAllTokenDispatcher,
    BaseEPTokenDispatcher,
)

from imbrex import Exchange, Routing
from imbrex.contracts import Handle
from imbrex.placement import contiguous


class ImbrexTokenDispatcher(BaseEPTokenDispatcher):
    """A token dispatcher with torchtitan's contract, over an `Exchange`. The exchange is made at the first
    call, when width and dtype of tokens are known."""

    @dataclass(kw_only=True, slots=True)
    class Config(AllToAllTokenDispatcher.Config):
        """Fields of torchtitan, and settings of ours.

        transport, codec, timeout: as in `Exchange`. alignment: rows of an expert are padded to a multiple of
            it, which products of quantised rows want.
        """

        transport: str = "auto"
        codec: str = "identity"
        timeout: float | None = None
        alignment: int = 1

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.config = config
        self._exchange: Exchange | None = None

    def init_buffer(self) -> None:
        """Drop the exchange, which is of another mesh: torchtitan calls this when it has made one."""
        self._exchange = None

    def dispatch(
        self,
        x_TD: Tensor,
        topk_scores_TK: Tensor,
        topk_expert_ids_TK: Tensor,
        num_local_tokens_per_expert_E: Tensor,
    ) -> tuple[Tensor, Tensor, Handle]:
        """Return rows for the local experts, expert-major, by source rank and token; the number of each
        expert's rows, padding included; and what `combine` needs. Differentiable in the tokens and the
        scores."""
        if self._exchange is None:
            self._exchange = self._open(x_TD.shape[1], x_TD.dtype)
        routing = Routing(ids_TK=topk_expert_ids_TK.long(), weights_TK=topk_scores_TK.float())
        dispatched = self._exchange.dispatch(x_TD, routing)
        counts_e = dispatched.counts_e.to(num_local_tokens_per_expert_E.dtype)
        return dispatched.rows_RD, counts_e, dispatched.handle

    def combine(self, routed_output_RD: Tensor, metadata: Handle, x_TD: Tensor) -> Tensor:
        """Return the sum of every token's rows times their scores, [T, D], in the rows' dtype."""
        if self._exchange is None:
            raise ValueError(
                "ImbrexTokenDispatcher.combine: nothing was dispatched since meshes were wired; call dispatch"
            )
        return self._exchange.combine(routed_output_RD, metadata)

    def _open(self, hidden_size: int, dtype: torch.dtype) -> Exchange:
        group = None if self.ep_mesh is None else self.ep_mesh.get_group()
        ranks = 1 if group is None else group.size()
        return Exchange(
            contiguous(self.num_experts, ranks),
            hidden_size,
            self.top_k,
            group=group,
            transport=self.config.transport if ranks > 1 else "auto",
            codec=self.config.codec if ranks > 1 else "identity",
            alignment=self.config.alignment,
            dtype=dtype,
            timeout=self.config.timeout,
        )


@override(target=AllToAllTokenDispatcher.Config, description="imbrex moves tokens between ranks.")
def exchange(config: Any, **settings: Any) -> Any:
    """Replace torchtitan's configuration of a dispatcher by ours. settings: fields of ours, from the command
    line. If torchtitan's dispatcher pads rows for quantised products, ours pads to the same multiple."""
    padding = getattr(config, "pad_multiple", None)
    fields = settings if padding is None else {"alignment": padding, **settings}
    return derive(config, ImbrexTokenDispatcher.Config, **fields)
