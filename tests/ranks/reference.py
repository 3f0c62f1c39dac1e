"""The layer's oracle in one process: dense experts, the router on all tokens, everything in float64."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import imbrex
from imbrex.testing import dense
from tests.ranks.layer_jobs import Case, coefficients, make_layer, tokens_of


def run_reference(
    case: Case, world: int, *, replicated: bool, routing: list[dict[str, Any]]
) -> dict[str, Any]:
    """What `run_layer` must give on all ranks together. The ids and kept choices are taken from the ranks'
    results (the router has tests of its own); weights, and so the gate's gradient, are computed anew."""
    single = make_layer(Case(config=case.config, options={"experts": "loop"}), None)
    experts = single.experts.double()
    gate = single.gate.weight.detach().double().requires_grad_()
    parts, outputs, inputs = range(1 if replicated else world), [], []
    total = torch.zeros((), dtype=torch.float64)
    for rank in parts:
        x_TD = tokens_of(case, rank, replicated=replicated).double().requires_grad_()
        scores_TE = (x_TD @ gate.T).softmax(-1)
        ids_TK = routing[rank]["ids"]
        weights_TK = scores_TE.gather(1, ids_TK.clamp(min=0))
        every_TK = scores_TE.topk(case.config.top_k).values
        weights_TK = weights_TK / every_TK.sum(1, keepdim=True)
        y_TD = dense(x_TD, imbrex.Routing(ids_TK=ids_TK, weights_TK=weights_TK), experts)
        total = total + (y_TD * coefficients(y_TD)).sum()
        inputs.append(x_TD)
        outputs.append(y_TD.detach())
    total.backward()
    return {
        "y": outputs,
        "x_grad": [x.grad for x in inputs],
        "gate.weight": gate.grad,
        "experts": {name: p.grad for name, p in experts.named_parameters()},
    }


def expert_gradient(results: list[dict[str, Any]], name: str, expert: int, activation: str) -> Tensor:
    """An expert's gradient put together from all ranks: replicas summed, tensor shards side by side."""
    pieces: dict[int, Tensor] = {}
    for result in results:
        shard = result["shard"][0]
        for slot, held in enumerate(result["experts"]):
            if held == expert:
                grad = result["grads"][f"experts.{name}"][slot].double()
                pieces[shard] = grad + pieces[shard] if shard in pieces else grad
    ordered = [pieces[shard] for shard in sorted(pieces)]
    if name == "down_proj":
        return torch.cat(ordered, 1)
    if name == "down_proj_bias":
        return ordered[0]
    halves = 2 if activation == "swiglu" else 1
    return torch.cat([torch.cat([p.chunk(halves)[h] for p in ordered]) for h in range(halves)])
