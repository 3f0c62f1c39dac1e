"""The arithmetic of transformers' routers, for replaced blocks that must choose exactly the experts that
theirs choose.

imbrex computes logits, scores and weights in float32. For bfloat16 tokens transformers 5.23 computes:

    Mixtral              logits rounded to bfloat16; scores, choice and weights from them in float32
    Qwen2-MoE, Qwen3-MoE the same, and the weights rounded to bfloat16
    DeepSeek-V2, -V3     float32 throughout, as here
    Phi-3.5              SparseMixer itself in bfloat16: not offered

In float32 there is no difference.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from imbrex import MoELayer, Routing

ROUTERS = ("imbrex", "transformers")
ROUNDED_LOGITS = ("mixtral", "qwen2_moe", "qwen3_moe")
ROUNDED_WEIGHTS = ("qwen2_moe", "qwen3_moe")


def why_not_router(router: str, kind: str) -> str | None:
    """Why replaced blocks of models of `kind` cannot route by `router`, or `None`."""
    if router not in ROUTERS:
        return f"router={router!r} is not known; use one of {', '.join(ROUTERS)}"
    if router == "transformers" and kind == "phimoe":
        return "router='transformers': Phi-3.5's SparseMixer in bfloat16 is not offered; leave router= out"
    return None


def use_router(layer: MoELayer, router: str, kind: str) -> None:
    """Make the gate of a layer compute as `router` does."""
    if router != "transformers":
        return
    if kind in ROUNDED_LOGITS:
        members = {"project": staticmethod(_rounded_logits), "best": _best_of_rounded, "kernels": False}
        layer.gate.__class__ = type("RoundedRouter", (type(layer.gate),), members)
    if kind in ROUNDED_WEIGHTS:
        layer.gate.register_forward_hook(_round_weights)


def _rounded_logits(x_TD: Tensor, weight_ED: Tensor, _num_sequences: int) -> Tensor:
    return F.linear(x_TD, weight_ED.to(x_TD.dtype)).float()


def _best_of_rounded(gate: Any, logits_TE: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Scores [T, E], ids and weights [T, K] of a softmax gate. Rounded logits are often equal, and
    `torch.topk`, which transformers asks, decides among them."""
    scores_TE = logits_TE.softmax(-1)
    weights_TK, ids_TK = scores_TE.topk(gate.top_k, dim=-1)
    if gate.gate.normalize:
        weights_TK = weights_TK / weights_TK.sum(-1, keepdim=True)
    return scores_TE, ids_TK, weights_TK


def _round_weights(_gate: Any, inputs: tuple[Tensor, ...], routing: Routing) -> Routing:
    return replace(routing, weights_TK=routing.weights_TK.to(inputs[0].dtype).float())
