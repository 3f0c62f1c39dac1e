"""The work of one rank's experts in a benchmark: the rows that all ranks' tokens send them.

Choices are drawn over all experts of the model, each token choosing `top_k` different ones, and those of the
first rank's experts are kept: so a token has some of its choices here, and counts differ between experts as
much as the law has it, also where a rank holds as few experts as a token chooses.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from imbrex.bench.shapes import Shape
from imbrex.bench.skew import make_routing
from imbrex.exchange.plan import count_choices

LEAST_SHARE = 1 / 64
"""The least share of an equal rank's rows that a law may give the first rank: with less, its draw would be
64 times as long, and it is refused."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Work:
    """The experts of one rank and what it received: tokens with a choice here, and their expert-major rows.

    position_TK: row of every choice, -1 where its expert is on another rank, whose weight is 0.
    """

    x_TD: Tensor
    gate_up_eGD: Tensor
    down_eDF: Tensor
    counts_e: Tensor
    ends_e: Tensor
    source_R: Tensor
    position_TK: Tensor
    weights_TK: Tensor


def make_work(shape: Shape, ranks: int, rows: int, skew: str, *, seed: int = 0, device: str = "cuda") -> Work:
    """`rows` rows for the experts of the first of `ranks` ranks, bf16, random.

    skew: as `make_routing` takes it, or `balanced`: as equal as whole rows allow. Raises ValueError for a law
    that cannot be drawn, or that leaves the first rank next to nothing.
    """
    experts = experts_of(shape, ranks)
    ids_TK = choices_received(shape, ranks, rows, skew, seed).to(device)
    order = ids_TK.flatten().argsort(stable=True)[-rows:]
    position = torch.full_like(ids_TK.flatten(), -1)
    position[order] = torch.arange(rows, device=device)
    counts_e = count_choices(ids_TK, experts)
    torch.manual_seed(seed)
    position_TK = position.view_as(ids_TK)
    return Work(
        x_TD=draw(len(ids_TK), shape.hidden_size, device=device),
        gate_up_eGD=draw(experts, 2 * shape.intermediate_size, shape.hidden_size, device=device),
        down_eDF=draw(experts, shape.hidden_size, shape.intermediate_size, device=device),
        counts_e=counts_e,
        ends_e=counts_e.cumsum(0).to(torch.int32),
        source_R=order // shape.top_k,
        position_TK=position_TK,
        weights_TK=torch.rand(position_TK.shape, device=device) * (position_TK >= 0),
    )


def experts_of(shape: Shape, ranks: int) -> int:
    if shape.num_experts % ranks:
        raise ValueError(f"--ranks {ranks} does not divide {shape.num_experts} experts; choose a divisor")
    return shape.num_experts // ranks


def choices_received(shape: Shape, ranks: int, rows: int, skew: str, seed: int = 0) -> Tensor:
    """int64 [T, K], on the CPU: `rows` choices of the first rank's experts, -1 for the others, in as many of
    all ranks' tokens as it takes; every token has one at least."""
    experts, tokens = experts_of(shape, ranks), -(-rows * ranks // shape.top_k)
    while True:
        ids_TK = _choose(shape, tokens, skew, seed)
        here_TK = ids_TK < experts
        count = int(here_TK.sum())
        if count >= rows:
            break
        if count < LEAST_SHARE * ids_TK.numel() / ranks:
            raise ValueError(f"--skew: {skew} sends rank 0 of {ranks} only {count} of {ids_TK.numel()} rows")
        tokens = max(tokens + 1, int(1.05 * tokens * rows / count))
    here_TK &= (here_TK.flatten().cumsum(0) <= rows).view_as(here_TK)
    return ids_TK.masked_fill(~here_TK, -1)[here_TK.any(1)]


def _choose(shape: Shape, tokens: int, skew: str, seed: int) -> Tensor:
    """Choices of every token. "balanced": token t's are t and as many experts on, evenly apart; so ranks
    share every token."""
    if skew != "balanced":
        return make_routing(skew, shape, tokens, seed=seed).ids_TK
    apart_K = torch.arange(shape.top_k) * (shape.num_experts // shape.top_k)
    return (torch.arange(tokens)[:, None] + apart_K) % shape.num_experts


def draw(*shape: int, device: str = "cuda") -> Tensor:
    """bf16, normal; a weight scaled so that a product over its last dimension keeps unit variance."""
    scale = shape[-1] ** -0.5 if len(shape) == 3 else 1.0
    return torch.randn(*shape, device=device, dtype=torch.bfloat16) * scale
