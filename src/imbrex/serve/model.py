"""A decoder of a published model's widths: pre-norm attention and pre-norm mixture of experts, and optionally
a block that predicts the token after the next (DeepSeek-V3, section 2.2).

Attention, norms and products are torch's. The feed-forward part of a block is what `make_moe` makes, usually
an `imbrex.MoELayer`. Every rank has all dense weights and its own caches; experts are spread.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

from imbrex.experts.experts import Experts
from imbrex.layer import MoEConfig
from imbrex.serve.attention import (
    Cache,
    Grouped,
    GroupedAttention,
    Latent,
    LatentAttention,
    Rotary,
    Span,
)
from imbrex.serve.between import Between, between
from imbrex.serve.heads import Head

Rows = tuple[Tensor, Tensor | None]
"""Rows [T, D], and what is yet to be added to them."""
MakeMoE = Callable[[int], nn.Module]
"""The feed-forward part of a block from the block's index: [T, D] to [T, D], with `kept_TK` as MoELayer."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelConfig:
    """The sizes of a decoder. positions: the longest sequence, its drafts included. drafting: whether it has
    the block that predicts the token after the next. eps: of the norms."""

    moe: MoEConfig
    attention: Grouped | Latent
    num_layers: int
    vocabulary: int
    positions: int
    drafting: bool = False
    eps: float = 1e-6

    @property
    def rotary(self) -> int:
        """Values of a head that turn with its position."""
        return self.attention.rope if isinstance(self.attention, Latent) else self.attention.head_size

    def cache_bytes(self, itemsize: int) -> int:
        """Bytes of cache that a token takes."""
        sizes = self.attention
        latent = isinstance(sizes, Latent)
        values = sizes.kv_rank + sizes.rope if latent else 2 * sizes.num_kv_heads * sizes.head_size
        return values * itemsize * (self.num_layers + self.drafting)


class Block(nn.Module):
    """Pre-norm attention, then a pre-norm mixture of experts. What the latter adds to the rows is left to the
    next norm, which reads both anyway."""

    def __init__(self, config: ModelConfig, moe: nn.Module, **kind) -> None:
        super().__init__()
        width, eps = config.moe.hidden_size, config.eps
        self.attention_norm = nn.RMSNorm(width, eps=eps, **kind)
        sizes = config.attention
        self.attention = (
            LatentAttention(sizes, width, eps=eps, **kind)
            if isinstance(sizes, Latent)
            else GroupedAttention(sizes, width, eps=eps, **kind)
        )
        self.moe_norm = nn.RMSNorm(width, eps=eps, **kind)
        self.moe = moe

    def forward(self, rows: Rows, span: Span, cache: Cache | None, turn_TC: Tensor, between: Between) -> Rows:
        x_TD, added_TD = rows
        if added_TD is None:
            normed_TD = self.attention_norm(x_TD)
        else:
            x_TD, normed_TD = between.residual_norm(x_TD, added_TD, *_of(self.attention_norm))
        added_TD = self.attention(normed_TD, span, cache, turn_TC, between)
        x_TD, normed_TD = between.residual_norm(x_TD, added_TD, *_of(self.moe_norm))
        live_T = span.live_T
        if live_T is None:
            return x_TD, self.moe(normed_TD)
        kept_TK = live_T[:, None].expand(-1, self.moe.config.top_k)  # type: ignore[union-attr]
        return x_TD, self.moe(normed_TD, kept_TK=kept_TK)


def _of(norm: nn.RMSNorm) -> tuple[Tensor, float]:
    assert norm.eps is not None
    return norm.weight, norm.eps


class Decoder(nn.Module):
    """Tokens [B, S] to hidden rows [T, D]; `head` chooses the tokens that follow, after `norm`.

    head_group: ranks that the vocabulary is split over. `compiled`: whether `torch.compile` makes kernels of
    what stands between products; `None`, on a GPU.
    """

    def __init__(
        self, config: ModelConfig, make_moe: MakeMoE, *, head_group: dist.ProcessGroup | None = None, **kind
    ) -> None:
        super().__init__()
        self.config = config
        self.compiled: bool | None = None
        width, eps = config.moe.hidden_size, config.eps
        self.embedding = nn.Embedding(config.vocabulary, width, **kind)
        self.blocks = nn.ModuleList(Block(config, make_moe(i), **kind) for i in range(config.num_layers))
        self.norm = nn.RMSNorm(width, eps=eps, **kind)
        self.head = Head(config.vocabulary, width, head_group, **kind)
        self.draft = Draft(config, make_moe(config.num_layers), **kind) if config.drafting else None
        self.turned = Rotary(
            config.rotary,
            config.attention.theta,
            config.positions,
            dtype=self.embedding.weight.dtype,
            device=self.embedding.weight.device,
        )

    def forward(self, tokens_BS: Tensor, span: Span, caches: list[Cache] | None = None) -> Tensor:
        """Hidden rows before the last norm, [T, D]. caches: of every block, written and read."""
        turn_TC = self.turned.turn_LC[span.position_T]
        rows: Rows = self.embedding(tokens_BS.flatten()), None
        of_device = between(turn_TC.device, self.compiled)
        for index, block in enumerate(self.blocks):
            rows = block(rows, span, caches and caches[index], turn_TC, of_device)
        return rows[0] if rows[1] is None else rows[0] + rows[1]

    def drafted(self, hidden_TD: Tensor, next_T: Tensor, span: Span, cache: Cache | None) -> Tensor:
        """Hidden rows of the token after the next, [T, D], from the model's own rows and the tokens that
        follow them. To draft further it takes its own rows."""
        assert self.draft is not None
        turn_TC = self.turned.turn_LC[span.position_T]
        of_device = between(turn_TC.device, self.compiled)
        return self.draft(hidden_TD, self.embedding(next_T), span, cache, turn_TC, of_device)

    def best(self, hidden_TD: Tensor) -> Tensor:
        """The tokens that follow, int64 [T]; collective where the head is split."""
        return self.head.best(self.norm(hidden_TD))

    def best_drafts(self, hidden_TD: Tensor) -> Tensor:
        """The greedy tokens for the rows of `drafted`."""
        assert self.draft is not None
        return self.head.best(self.draft.norm(hidden_TD))

    def make_caches(self, slots: int, capacity: int) -> list[Cache]:
        """A cache for every block, the drafting one last."""
        config, weight = self.config, self.embedding.weight
        kind = {"dtype": weight.dtype, "device": weight.device}
        sizes = config.attention
        of = LatentAttention.cache if isinstance(sizes, Latent) else GroupedAttention.cache
        return [of(sizes, slots, capacity, **kind) for _ in range(config.num_layers + config.drafting)]  # type: ignore[arg-type]


class Draft(nn.Module):
    """The block that predicts the token after the next: the model's row and the embedded next token, each
    normed, joined and projected, through a block of its own. Embedding and head are the model's."""

    def __init__(self, config: ModelConfig, moe: nn.Module, **kind) -> None:
        super().__init__()
        width, eps = config.moe.hidden_size, config.eps
        self.hidden_norm = nn.RMSNorm(width, eps=eps, **kind)
        self.token_norm = nn.RMSNorm(width, eps=eps, **kind)
        self.join = nn.Linear(2 * width, width, bias=False, **kind)
        self.block = Block(config, moe, **kind)
        self.norm = nn.RMSNorm(width, eps=eps, **kind)

    def forward(
        self,
        hidden_TD: Tensor,
        token_TD: Tensor,
        span: Span,
        cache: Cache | None,
        turn_TC: Tensor,
        between: Between,
    ) -> Tensor:
        joined_TD = self.join(torch.cat((self.hidden_norm(hidden_TD), self.token_norm(token_TD)), -1))
        x_TD, added_TD = self.block((joined_TD, None), span, cache, turn_TC, between)
        return x_TD + added_TD


@torch.no_grad()
def draw(model: nn.Module, *, seed: int) -> None:
    """Random weights drawn where they stand, at the rate of the device, and the same model however it is
    spread: every expert and the whole head have a seed of their own. Rows keep their size through a layer of
    any width."""
    numbers = {name: seed + SEEDS * number for number, (name, _) in enumerate(model.named_parameters(), 1)}
    for prefix, module in model.named_modules():
        for name, weight in module.named_parameters(prefix, recurse=False):
            std = 1.0 if isinstance(module, nn.Embedding) else weight.shape[-1] ** -0.5
            if isinstance(module, nn.RMSNorm):
                weight.fill_(1.0)
            elif isinstance(module, Experts):
                for slot, expert in enumerate(module.expert_ids):
                    _normal(weight[slot], std, numbers[name] + expert)
            elif isinstance(module, Head):
                begin, end = module.slice
                whole = weight.new_empty(module.vocabulary, weight.shape[1])
                weight.copy_(_normal(whole, std, numbers[name])[begin:end])
            else:
                _normal(weight, std, numbers[name])


SEEDS = 4096
"""Seeds of a parameter: one an expert, and room."""


def _normal(weight: Tensor, std: float, seed: int) -> Tensor:
    return weight.normal_(std=std, generator=torch.Generator(weight.device).manual_seed(seed))
