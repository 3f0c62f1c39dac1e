"""The effect of a codec on learning: the same small language model trained with each, rows really crossing.

A variant is trained on `RANKS` gloo ranks whose experts hold one half each, so that about half of all rows
cross, encoded, in all four crossings. Seeds fix parameters and batches alike, so variants are compared seed
by seed.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import imbrex
from imbrex.codec import make
from imbrex.contracts import Codec
from imbrex.demo import by_sequence
from imbrex.demo.corpus import Corpus
from imbrex.demo.model import BytesLM, BytesLMConfig
from imbrex.demo.training import Recipe, Shape, Trainer, make_model
from imbrex.launch.factors import Factors
from imbrex.observe import Observer

RANKS = 2
FORWARD_ONLY = {"dispatch": "int8-truncated", "combine": "int8-truncated"}
VARIANTS: dict[str, str | Mapping[str, str] | None] = {
    "dense": None,
    "none": "identity",
    "fp16": "fp16",
    "bf16": "bf16",
    "fp8": "fp8",
    "fp8-e5m2": "fp8-e5m2",
    "int8": "int8",
    "zfp2d-8": "zfp2d-8",
    "int4": "int4",
    "nvfp4": "nvfp4",
    "int8-truncated": "int8-truncated",
    "int8-truncated, forward only": FORWARD_ONLY,
}
"""Codecs of the four crossings by name; `dense` has no experts: the paper's Base."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Size:
    """The settings of one training.

    shape, recipe: of the model and its training. held_out: batches of the last loss. every: steps between
    two points of the curve. timeout_s: of a collective. encode_on: the device that ZFP runs on; its kernel
    writes the bytes of its tensor operations, ten times sooner."""

    shape: Shape = field(
        default_factory=lambda: Shape(hidden_size=64, num_layers=2, num_heads=4, expert_width=96)
    )
    recipe: Recipe = field(
        default_factory=lambda: Recipe(steps=1000, batch=16, length=64, learning_rate=3e-3)
    )
    held_out: int = 64
    every: int = 50
    timeout_s: float = 60.0
    encode_on: str = "cpu"


class OnDevice:
    """A codec that runs on another device than the rows."""

    def __init__(self, codec: Codec, device: str) -> None:
        self.inner, self.device, self.name = codec, device, codec.name

    def nbytes(self, width: int, dtype: torch.dtype) -> int:
        return self.inner.nbytes(width, dtype)

    def encode(self, rows_ND: Tensor, dtype: torch.dtype) -> Tensor:
        return self.inner.encode(rows_ND.to(self.device), dtype).to(rows_ND.device)

    def decode(self, encoded_NB: Tensor, width: int, dtype: torch.dtype) -> Tensor:
        return self.inner.decode(encoded_NB.to(self.device), width, dtype).to(encoded_NB.device)

    def error_bound(self, amax: float, dtype: torch.dtype) -> float:
        return self.inner.error_bound(amax, dtype)


class DenseLayer(nn.Module):
    """One expert that takes every token: SwiGLU of width F."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        width, inner = shape.hidden_size, shape.expert_width
        self.gate_up = nn.Linear(width, 2 * inner, bias=False)
        self.down = nn.Linear(inner, width, bias=False)

    def forward(self, x_BSD: Tensor) -> Tensor:
        gate, up = by_sequence.linear(x_BSD, self.gate_up.weight).chunk(2, -1)
        return by_sequence.linear(F.silu(gate) * up, self.down.weight)


def train(name: str, seed: int, corpus: Corpus, size: Size) -> dict[str, Any]:
    """Train one variant on the ranks of the default group. Every rank must call it.

    The result: `held_out_nats` a byte at the end, `curve` of (step, mean training nats since the point
    before), `parameters`, `seconds`.
    """
    recipe = replace(size.recipe, seed=seed)
    trainer = _trainer(name, recipe, corpus, size)
    begin, sums, curve = time.perf_counter(), [], []
    for step in range(recipe.steps):
        sums.append(trainer.step(step))
        if (step + 1) % size.every == 0 or step + 1 == recipe.steps:
            mean = _mean(torch.stack(sums).sum(), len(sums) * recipe.batch * recipe.length)
            curve.append((step + 1, round(mean, 5)))
            sums = []
    seconds = time.perf_counter() - begin
    return {
        "held_out_nats": held_out(trainer, corpus, size),
        "curve": curve,
        "parameters": _parameters(trainer.model, size.shape),
        "seconds": round(seconds, 1),
    }


def _trainer(name: str, recipe: Recipe, corpus: Corpus, size: Size) -> Trainer:
    factors = Factors(data=1, expert=dist.get_world_size(), tensor=1)
    codec = VARIANTS[name]
    if name.startswith("zfp") and size.encode_on != "cpu":
        codec = OnDevice(make(name), size.encode_on)
    if codec is None:
        torch.manual_seed(recipe.seed)
        width = BytesLMConfig(
            hidden_size=size.shape.hidden_size,
            num_layers=size.shape.num_layers,
            num_heads=size.shape.num_heads,
            max_length=recipe.length,
        )
        model = BytesLM(width, lambda _: DenseLayer(size.shape))
    else:
        model = make_model(
            size.shape,
            recipe,
            factors,
            transport="alltoall",
            codec=codec,
            timeout_s=size.timeout_s,
            observer=Observer(),
        )
    return Trainer(
        model,
        corpus,
        recipe,
        factors,
        rank=dist.get_rank(),
        timeout_s=size.timeout_s,
        observer=Observer(),
    )


@torch.no_grad()
def held_out(trainer: Trainer, corpus: Corpus, size: Size) -> float:
    """Nats a byte over windows spread over the held-out text."""
    recipe = trainer.recipe
    batches = corpus.held_out_batches(size.held_out, batch=recipe.batch, length=recipe.length)
    mine = trainer.factors.slice(trainer.rank, recipe.batch)
    total = torch.zeros((), dtype=torch.float64)
    for batch in batches:
        logits_BSV = trainer.model(batch[mine, :-1])
        nats = F.cross_entropy(logits_BSV.flatten(0, 1), batch[mine, 1:].flatten(), reduction="none")
        total += nats.double().sum()
    return _mean(total, batches[..., 1:].numel())


def _mean(sum_of_rank: Tensor, count: int) -> float:
    total = sum_of_rank.double().clone()
    dist.all_reduce(total)
    return total.item() / count


def _parameters(model: nn.Module, shape: Shape) -> int:
    """The number of parameters of the whole model, experts of other ranks included."""
    own = {id(p) for p in imbrex.expert_parameters(model)}
    dense = sum(p.numel() for p in model.parameters() if id(p) not in own)
    experts = sum(p.numel() for p in imbrex.expert_parameters(model))
    return dense + experts * dist.get_world_size()


def perplexity(nats: float) -> float:
    return math.exp(nats)
