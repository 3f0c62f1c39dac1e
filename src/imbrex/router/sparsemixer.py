"""SparseMixer, the gate of Phi-3.5-MoE (arXiv 2409.12136, section 2.2)."""

from __future__ import annotations

import torch
from torch import Tensor


def sparsemixer(logits_TE: Tensor, top_k: int, *, jitter: float, noise: float) -> tuple[Tensor, Tensor]:
    """Ids int64 [T, K] and weights float32 [T, K], one choice after another.

    Each choice is made among the experts not yet chosen whose logit lies at most 2 * jitter below the best of
    them, relative to the larger of the two magnitudes; its weight is its probability among those.
    `noise` > 0 samples the choice (Gumbel noise times `noise`) and corrects the weight of what is not the
    most probable: Heun's third-order rule, 1/3 of it three times in four, while the gradient stays that of
    the probability. `noise` = 0 takes the best.
    """
    left_TE = logits_TE
    ids, weights = [], []
    for _ in range(top_k):
        id_T1, weight_T1 = _one(logits_TE, left_TE, jitter, noise)
        ids.append(id_T1)
        weights.append(weight_T1)
        left_TE = left_TE.scatter(1, id_T1, float("-inf"))
    return torch.cat(ids, 1), torch.cat(weights, 1)


def _one(logits_TE: Tensor, left_TE: Tensor, jitter: float, noise: float) -> tuple[Tensor, Tensor]:
    top_T1, best_T1 = left_TE.detach().max(dim=-1, keepdim=True)
    magnitude_TE = logits_TE.detach().abs().maximum(top_T1)
    too_far_TE = (top_T1 - logits_TE.detach()) / magnitude_TE > 2 * jitter
    near_TE = left_TE.masked_fill(too_far_TE, float("-inf"))
    probability_TE = near_TE.softmax(-1)
    if noise == 0:
        return best_T1, probability_TE.gather(1, best_T1)
    gumbel_TE = -torch.empty_like(near_TE).exponential_().log()
    id_T1 = (near_TE.detach() + noise * gumbel_TE).argmax(-1, keepdim=True)
    weight_T1 = probability_TE.gather(1, id_T1)
    full_T1 = (id_T1 == probability_TE.argmax(-1, keepdim=True)) | (torch.rand_like(top_T1) > 0.75)
    # 0.3333 rather than 1/3: what the published weights were trained with.
    corrected_T1 = (weight_T1 * torch.where(full_T1, 1.0, 0.3333)).detach()
    return id_T1, corrected_T1 + (weight_T1 - weight_T1.detach())
