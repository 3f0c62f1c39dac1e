"""The expert layers of published models, by name, whole or scaled down."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Shape:
    """Model width D, expert width F, experts E, choices a token K."""

    hidden_size: int
    intermediate_size: int
    num_experts: int
    top_k: int

    def least_bytes(self, tokens: int, itemsize: int) -> int:
        """Bytes of weights and tokens over all ranks, the least that a layer takes."""
        weights = 3 * self.num_experts * self.hidden_size * self.intermediate_size
        return itemsize * (weights + tokens * self.hidden_size)

    def __str__(self) -> str:
        return f"D={self.hidden_size} F={self.intermediate_size} E={self.num_experts} K={self.top_k}"


MODELS = {
    "mixtral": Shape(hidden_size=4096, intermediate_size=14336, num_experts=8, top_k=2),
    "qwen2-moe": Shape(hidden_size=2048, intermediate_size=1408, num_experts=64, top_k=4),
    "phi3.5-moe": Shape(hidden_size=4096, intermediate_size=6400, num_experts=16, top_k=2),
    "deepseek-v3": Shape(hidden_size=7168, intermediate_size=2048, num_experts=256, top_k=8),
    "qwen3-30b-a3b": Shape(hidden_size=2048, intermediate_size=768, num_experts=128, top_k=8),
}
"""Routed experts of Mixtral-8x7B, Qwen2-MoE-2.7B (the 64 that Comet's table gives, 4 of them), Phi-3.5-MoE,
DeepSeek-V3 and Qwen3-30B-A3B, from their published configurations."""

MULTIPLE = 8


def parse_shape(text: str, scale: int = 1) -> Shape:
    """`mixtral`, or `D,F,E,K`; D and F divided by `scale`, rounded to a multiple of 8, at least 8.

    Raises ValueError for an unknown name, numbers that make no layer, or a scale below 1.
    """
    if scale < 1:
        raise ValueError(f"--scale: {scale} does not scale down; use 1 or more")
    shape = MODELS[text] if text in MODELS else _numbers(text)
    if scale == 1:
        return shape
    return Shape(
        hidden_size=_divide(shape.hidden_size, scale),
        intermediate_size=_divide(shape.intermediate_size, scale),
        num_experts=shape.num_experts,
        top_k=shape.top_k,
    )


def _divide(width: int, scale: int) -> int:
    return max(MULTIPLE, round(width / scale / MULTIPLE) * MULTIPLE)


def _numbers(text: str) -> Shape:
    try:
        hidden, intermediate, experts, top_k = (int(part) for part in text.split(","))
    except ValueError:
        known = ", ".join(MODELS)
        raise ValueError(f"--model: {text!r} is not known; use {known}, or four numbers D,F,E,K") from None
    if min(hidden, intermediate, experts, top_k) < 1 or top_k > experts:
        raise ValueError(f"--model: {text!r} makes no layer; all of D,F,E,K are at least 1, and K at most E")
    return Shape(hidden_size=hidden, intermediate_size=intermediate, num_experts=experts, top_k=top_k)
