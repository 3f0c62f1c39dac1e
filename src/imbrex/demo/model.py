"""A transformer over bytes whose feed-forward layers are anything that maps [B, S, D] to [B, S, D].

Shape letters beyond the contracts': B sequences, S bytes of a sequence, H heads, C width of a head, V bytes.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from imbrex.demo import by_sequence

VOCABULARY = 256


@dataclass(frozen=True, kw_only=True, slots=True)
class BytesLMConfig:
    """The sizes of attention. hidden_size: D, a multiple of 2 * `num_heads`. max_length: the longest S."""

    hidden_size: int = 128
    num_layers: int = 3
    num_heads: int = 4
    max_length: int = 128

    def __post_init__(self) -> None:
        if self.hidden_size % (2 * self.num_heads):
            raise ValueError(
                f"hidden_size {self.hidden_size} is no multiple of twice num_heads {self.num_heads}: "
                "rotary positions turn pairs of values of every head; change one of the two"
            )


class Attention(nn.Module):
    """Causal self-attention with rotary positions (RoFormer, section 3.4.2)."""

    def __init__(self, config: BytesLMConfig) -> None:
        super().__init__()
        self.num_heads = config.num_heads
        self.qkv = nn.Linear(config.hidden_size, 3 * config.hidden_size, bias=False)
        self.out = nn.Linear(config.hidden_size, config.hidden_size, bias=False)

    def forward(self, x_BSD: Tensor, turn_SC: Tensor) -> Tensor:
        B, S, D = x_BSD.shape
        qkv = by_sequence.linear(x_BSD, self.qkv.weight)
        q, k, v = qkv.view(B, S, 3, self.num_heads, -1).permute(2, 0, 3, 1, 4)
        y_BHSC = F.scaled_dot_product_attention(_turned(q, turn_SC), _turned(k, turn_SC), v, is_causal=True)
        return by_sequence.linear(y_BHSC.transpose(1, 2).reshape(B, S, D), self.out.weight)


def _turned(x_BHSC: Tensor, turn_SC: Tensor) -> Tensor:
    cos, sin = turn_SC[: x_BHSC.shape[2]].chunk(2, dim=-1)
    left, right = x_BHSC.chunk(2, dim=-1)
    return torch.cat((left * cos - right * sin, left * sin + right * cos), dim=-1)


class Block(nn.Module):
    """Pre-norm attention, then a pre-norm mixture of experts."""

    def __init__(self, config: BytesLMConfig, moe: nn.Module) -> None:
        super().__init__()
        self.attention_norm = by_sequence.RMSNorm(config.hidden_size)
        self.attention = Attention(config)
        self.moe_norm = by_sequence.RMSNorm(config.hidden_size)
        self.moe = moe

    def forward(self, x_BSD: Tensor, turn_SC: Tensor) -> Tensor:
        x_BSD = x_BSD + self.attention(self.attention_norm(x_BSD), turn_SC)
        return x_BSD + self.moe(self.moe_norm(x_BSD))


class BytesLM(nn.Module):
    """int64 bytes [B, S] to logits [B, S, 256] of the byte that follows each.

    make_moe: makes the feed-forward layer of every block from the block's index.
    """

    def __init__(self, config: BytesLMConfig, make_moe: Callable[[int], nn.Module]) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, config.hidden_size)
        self.blocks = nn.ModuleList(Block(config, make_moe(i)) for i in range(config.num_layers))
        self.norm = by_sequence.RMSNorm(config.hidden_size)
        # Not the embedding's weight: a gradient of two uses would depend on the number of ranks.
        self.head = nn.Linear(config.hidden_size, VOCABULARY, bias=False)
        nn.init.normal_(self.embedding.weight, std=0.2)
        nn.init.normal_(self.head.weight, std=0.02)
        for block in self.blocks:
            assert isinstance(block, Block)
            nn.init.normal_(block.attention.qkv.weight, std=1 / math.sqrt(config.hidden_size))
            nn.init.normal_(
                block.attention.out.weight, std=1 / math.sqrt(2 * config.hidden_size * config.num_layers)
            )
        self.register_buffer("turn_SC", _turns(config), persistent=False)

    def forward(self, bytes_BS: Tensor) -> Tensor:
        x_BSD = by_sequence.embed(bytes_BS, self.embedding.weight)
        for block in self.blocks:
            x_BSD = block(x_BSD, self.turn_SC)
        return by_sequence.linear(self.norm(x_BSD), self.head.weight)


def _turns(config: BytesLMConfig) -> Tensor:
    """Cosines, then sines, float32 [S, C], of position times frequency."""
    half = config.hidden_size // config.num_heads // 2
    frequency = 10_000.0 ** (-torch.arange(half, dtype=torch.float32) / half)
    angle = torch.arange(config.max_length, dtype=torch.float32)[:, None] * frequency
    return torch.cat((angle.cos(), angle.sin()), dim=-1)
