"""Gates: how logits become scores, which experts are chosen, and what their weights are."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from imbrex.kernels.gate.choose import Choice
from imbrex.router.capacity import Capacity

Score = Literal["softmax", "sigmoid", "sparsemixer"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Groups:
    """Limits a token's choice to the experts of the best `topk_groups` of `num_groups` groups.

    Groups are `num_experts / num_groups` consecutive experts. by: a group is worth its best score (`max`,
    DeepSeek-V2) or the sum of its two best (`top2`, DeepSeek-V3).
    """

    num_groups: int
    topk_groups: int
    by: Literal["max", "top2"] = "top2"

    def __post_init__(self):
        if self.num_groups < 1 or not 1 <= self.topk_groups <= self.num_groups:
            raise ValueError(
                f"Groups: topk_groups={self.topk_groups} of num_groups={self.num_groups}; "
                "choose 1 <= topk_groups <= num_groups"
            )
        if self.by not in ("max", "top2"):
            raise ValueError(f"Groups: by={self.by!r}; choose 'max' or 'top2'")

    def check(self, num_experts: int, top_k: int) -> None:
        """ValueError where these groups do not suit a layer of `num_experts` and `top_k`."""
        size, rest = divmod(num_experts, self.num_groups)
        if rest:
            raise ValueError(
                f"Groups: num_groups={self.num_groups} does not divide num_experts={num_experts}; "
                "choose a divisor"
            )
        if top_k > self.topk_groups * size:
            raise ValueError(
                f"Groups: {self.topk_groups} groups of {size} experts hold fewer than top_k={top_k}; "
                "raise topk_groups"
            )
        if self.by == "top2" and size < 2:
            raise ValueError(f"Groups: by='top2' needs groups of 2 experts or more, not {size}; use by='max'")


@dataclass(frozen=True, kw_only=True, slots=True)
class Gate:
    """The rule by which a token chooses its experts and weighs them.

    score: `softmax` over all experts (Switch, Mixtral, Qwen), `sigmoid` of each (DeepSeek-V3), or
        `sparsemixer` (Phi-3.5, arXiv 2409.12136), which picks one expert after another.
    normalize: divide a token's K weights by their sum, i.e. normalise after the selection. Otherwise scores
        are weights as they are: softmax normalised before it. Without effect on `sparsemixer`.
    groups: limit the choice to the best groups of experts.
    scale: factor on the weights (`routed_scaling_factor`), > 0.
    bias: add the buffer `e_score_correction_bias` to the scores for the selection only (DeepSeek-V3).
    noise: while training, standard deviation of Gaussian noise on the logits; with `sparsemixer` the factor
        of its Gumbel noise (1 samples as Phi-3.5 was trained). Replaying a mask then needs the same random
        state.
    capacity: most choices an expert takes from the global batch; `None` never drops.
    jitter: `sparsemixer` leaves out logits that lie more than 2 * jitter below the best, relatively.
    """

    score: Score = "softmax"
    normalize: bool = True
    groups: Groups | None = None
    scale: float = 1.0
    bias: bool = False
    noise: float = 0.0
    capacity: Capacity | None = None
    jitter: float = 0.01

    def __post_init__(self):
        if self.score not in ("softmax", "sigmoid", "sparsemixer"):
            raise ValueError(f"Gate: score={self.score!r}; choose 'softmax', 'sigmoid' or 'sparsemixer'")
        if self.score == "sparsemixer" and (self.groups or self.bias):
            raise ValueError("Gate: 'sparsemixer' knows neither groups nor bias; leave both out")
        for name, value in (("noise", self.noise), ("jitter", self.jitter)):
            if not 0 <= value < float("inf"):
                raise ValueError(f"Gate: {name}={value}; choose a finite number of at least 0")
        if not 0 < self.scale < float("inf"):
            raise ValueError(f"Gate: scale={self.scale}; choose a finite number above 0")

    def check(self, num_experts: int, top_k: int) -> None:
        """ValueError where this gate does not suit a layer of `num_experts` and `top_k`."""
        if not 1 <= top_k <= num_experts:
            raise ValueError(
                f"Gate: top_k={top_k} of num_experts={num_experts}; choose 1 <= top_k <= num_experts"
            )
        if self.groups is not None:
            self.groups.check(num_experts, top_k)

    def choice(self, top_k: int) -> Choice:
        """The gate as its kernels take it. They serve `softmax` and `sigmoid`."""
        groups = self.groups
        return Choice(
            top_k=top_k,
            sigmoid=self.score == "sigmoid",
            groups=0 if groups is None else groups.num_groups,
            open_groups=0 if groups is None else groups.topk_groups,
            best_two=groups is not None and groups.by == "top2",
            normalize=self.normalize,
            scale=float(self.scale),  # of a whole number kernels would read the bits
        )


def best(scores_TE: Tensor, k: int) -> Tensor:
    """Indices int64 [T, k] of the best of every row, best first, of equal ones the lowest index first.

    The same on every device: `torch.topk` leaves the order of equal scores open.
    """
    return scores_TE.sort(dim=-1, descending=True, stable=True).indices[:, :k]


def within_groups(scores_TE: Tensor, groups: Groups) -> Tensor:
    """Scores with -inf outside the best groups."""
    scores_TGg = scores_TE.unflatten(1, (groups.num_groups, -1))
    worth_TG = scores_TGg.topk(1 if groups.by == "max" else 2, dim=-1).values.sum(-1)
    best_TG = best(worth_TG, groups.topk_groups)
    open_TG = torch.zeros_like(worth_TG, dtype=torch.bool).scatter(1, best_TG, True)
    return scores_TGg.masked_fill(~open_TG.unsqueeze(-1), float("-inf")).flatten(1)


def choose(scores_TE: Tensor, bias_E: Tensor | None, gate: Gate, top_k: int) -> tuple[Tensor, Tensor]:
    """Ids int64 [T, K], best first, and their weights float32 [T, K] before `gate.scale`."""
    wanted_TE = scores_TE.detach()
    if bias_E is not None:
        wanted_TE = wanted_TE + bias_E
    if gate.groups is not None:
        wanted_TE = within_groups(wanted_TE, gate.groups)
    ids_TK = best(wanted_TE, top_k)
    weights_TK = scores_TE.gather(1, ids_TK)
    if gate.normalize:
        # 1e-20: K sigmoids may all underflow to 0; DeepSeek-V3 adds the same.
        weights_TK = weights_TK / (weights_TK.sum(-1, keepdim=True) + 1e-20)
    return ids_TK, weights_TK
