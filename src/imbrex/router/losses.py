"""Auxiliary losses of a gate, over the global batch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from imbrex.router.global_batch import GlobalBatch

NAMES = ("load_balance", "sequence_balance", "z")


@dataclass(frozen=True, kw_only=True, slots=True)
class AuxLosses:
    """The coefficients of the auxiliary losses; a loss whose coefficient is 0 is not computed.

    load_balance: E * sum_e f_e P_e, with f_e the share of all T * K choices and P_e the mean probability of
        expert e over the batch (Switch Transformer, arXiv 2101.03961, equations 4 to 6); 1 at balance.
    sequence_balance: the same per sequence, averaged over sequences (DeepSeek-V3, arXiv 2412.19437,
        equations 17 to 20).
    z: the mean of logsumexp(logits)^2 over tokens (ST-MoE, arXiv 2202.08906, equation 5).

    Probabilities are the scores of a token divided by their sum. Choices dropped by capacity count.
    """

    load_balance: float = 0.0
    sequence_balance: float = 0.0
    z: float = 0.0
    names: tuple[str, ...] = field(init=False, repr=False, compare=False)
    """Losses that are computed."""

    def __post_init__(self):
        for name in NAMES:
            value = getattr(self, name)
            if not 0 <= value < float("inf"):
                raise ValueError(f"AuxLosses: {name}={value}; choose a finite number of at least 0")
        object.__setattr__(self, "names", tuple(name for name in NAMES if getattr(self, name) > 0))

    def total(self, losses: Mapping[str, Tensor]) -> Tensor:
        """The sum of `losses` (as in `Routing`), each times its coefficient; 0 where there is none."""
        if not losses:
            return torch.zeros((), dtype=torch.float32, device="cpu")
        (first, loss), *others = losses.items()
        total = getattr(self, first) * loss
        for name, loss in others:
            total = torch.add(total, loss, alpha=getattr(self, name))
        return total


def auxiliary_losses(
    logits_TE: Tensor,
    probability_TE: Tensor,
    ids_TK: Tensor,
    *,
    num_sequences: int,
    losses_needed: AuxLosses,
    batch: GlobalBatch,
) -> dict[str, Tensor]:
    """The unweighted losses that `losses_needed` names: float32 scalars, the same on every rank. One sum over
    ranks.

    ids_TK: choices before capacity. num_sequences: the T tokens are that many sequences of equal length.
    """
    if not losses_needed.names:
        return {}
    tokens, num_experts = logits_TE.shape
    num_sequences = num_sequences if tokens else 0
    chosen_TE = torch.zeros_like(probability_TE).scatter(1, ids_TK, 1.0)
    sequences = _sequence_sum(chosen_TE, probability_TE, num_sequences)
    z = logits_TE.logsumexp(-1).square().sum()
    # Filled on the device: a tensor made from a list would wait for a copy from the host.
    sizes = [logits_TE.new_full((), float(n)) for n in (tokens, num_sequences)]
    terms = torch.cat([chosen_TE.sum(0), probability_TE.sum(0), torch.stack([sequences, z, *sizes])])
    counts_E, mass_E, rest = batch.sum(terms).split([num_experts, num_experts, 4])
    # An empty batch has loss 0.
    tokens_all, sequences_all = rest[2].clamp(min=1), rest[3].clamp(min=1)
    choices = tokens_all * ids_TK.shape[1]
    losses = {
        "load_balance": num_experts * (counts_E.detach() / choices * mass_E / tokens_all).sum(),
        "sequence_balance": rest[0] / sequences_all,
        "z": rest[1] / tokens_all,
    }
    return {name: losses[name] for name in losses_needed.names}


def _sequence_sum(chosen_TE: Tensor, probability_TE: Tensor, num_sequences: int) -> Tensor:
    """The sum over this rank's sequences of E * sum_e f_e P_e."""
    if num_sequences == 0:
        return probability_TE.sum()
    num_experts = chosen_TE.shape[1]
    count_SE = chosen_TE.unflatten(0, (num_sequences, -1)).sum(1)
    share_SE = count_SE / count_SE.sum(1, keepdim=True)
    mean_SE = probability_TE.unflatten(0, (num_sequences, -1)).mean(1)
    return num_experts * (share_SE * mean_SE).sum()
