"""The first half of both dispatches of a `HybridEPBuffer`: from a routing to the compact rows that arrive."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from imbrex.adapters.deep_ep.backend import dispatch_of, kind_of_rows
from imbrex.adapters.deep_ep.choices import Choices, ids_outside, indices_to_map
from imbrex.adapters.deep_ep.hybrid_handle import Arrived, BufferConfig, HybridHandle, Inputs, Record
from imbrex.exchange import plan

if TYPE_CHECKING:
    from imbrex.adapters.deep_ep.backend import Backend


def plan_rows(backend: Backend, call: str, inputs: Inputs, config: BufferConfig, problem: str) -> Record:
    """Who sends what to whom, for a new routing."""
    problem = problem or find_problem(backend, inputs, config.num_experts)
    columns = [] if problem else inputs.columns
    weighted = inputs.probs_TE is not None if inputs.map_TE is not None else inputs.weights_TK is not None
    settings = {
        "the number of experts": config.num_experts,
        **kind_of_rows(columns),
        "whether scales are given": len(columns) == 2,
        "whether probabilities are given": weighted,
    }
    route, choices = backend.plan_choices(call, problem, inputs, config, settings)
    return Record(route=route, choices=choices, config=config)


def read_handle(backend: Backend, call: str, handle: tuple | None) -> Record:
    """The record of a dispatch. Raises ValueError on every rank where one rank's `handle` is not what one
    returned."""
    if not isinstance(handle, HybridHandle):
        backend.meet(call, problem := "pass the handle that a dispatch returned, whole", {})
        raise AssertionError(problem)
    return handle.record


def plan_again(backend: Backend, call: str, inputs: Inputs, handle: tuple, problem: str = "") -> Record:
    """Take the way of an earlier dispatch, with other probabilities where they are given: by expert, or by
    choice with the ids that they belong to. Where rows go, the handle alone says."""
    call = f"{call} with a handle"
    earlier = read_handle(backend, call, handle)
    tokens, experts = earlier.route.num_tokens, earlier.config.num_experts
    problem = problem or _why_not_again(backend, inputs, tokens, experts)
    columns = [] if problem else inputs.columns
    probs_TE, ids_given, weights_given = inputs.probs_TE, inputs.ids_TK, inputs.weights_TK
    settings = {
        **kind_of_rows(columns),
        "whether scales are given": len(columns) == 2,
        "whether probabilities are given": probs_TE is not None or weights_given is not None,
        **dispatch_of(earlier.route),
    }
    backend.meet(call, problem, settings)
    if probs_TE is None and ids_given is not None and weights_given is not None:
        probs_TE = indices_to_map(ids_given, weights_given, tokens, experts)[1]
    ids_TK, weights_TK, route = earlier.choices.ids_TK, None, earlier.route
    if probs_TE is not None:
        weights_TK = probs_TE.gather(1, ids_TK.clamp(min=0))
        route = backend.reweigh(route, weights_TK)
    return replace(earlier, route=route, choices=Choices(ids_TK=ids_TK, weights_TK=weights_TK))


def _why_not_again(backend: Backend, inputs: Inputs, tokens: int, experts: int) -> str:
    """Why these cannot go the way of a handle of so many tokens, or nothing."""
    probs_TE, ids_TK, weights_TK = inputs.probs_TE, inputs.ids_TK, inputs.weights_TK
    lost = probs_TE is None and ids_TK is None and weights_TK is not None
    if len(inputs.hidden) != tokens or (ids_TK is not None and len(ids_TK) != tokens) or lost:
        return (
            f"{len(inputs.hidden)} tokens for a handle of {tokens}; give as many again, with new "
            "probabilities as probs [T, E], or as topk_weights with topk_idx"
        )
    if any(part.dim() != 2 or len(part) != tokens or not part.shape[1] for part in inputs.columns):
        return f"hidden is {list(inputs.hidden.shape)}; give [T, D], and scales [T, S]"
    if probs_TE is not None and (probs_TE.shape != (tokens, experts) or probs_TE.dtype != torch.float32):
        return f"probs is {probs_TE.dtype} {list(probs_TE.shape)}; give float32 {[tokens, experts]}"
    if probs_TE is None and ids_TK is not None and weights_TK is not None:
        if ids_TK.dim() != 2 or ids_TK.shape != weights_TK.shape:
            return (
                f"topk_weights is {list(weights_TK.shape)}, topk_idx {list(ids_TK.shape)}; give equal shapes"
            )
        if ids_outside(ids_TK, experts):
            return f"ids of topk_idx outside [-1, {experts}); -1 drops a choice"
    return backend.wrong_device(*inputs.columns, probs_TE, ids_TK, weights_TK)


def carry_rows(backend: Backend, inputs: Inputs, record: Record) -> Arrived:
    """Rows, scales, choices and their weights to the ranks that want them, as compact rows."""
    columns = inputs.columns
    columns += [] if record.choices.weights_TK is None else [record.choices.weights_TK]
    # One higher on the way, so that rows to spare, which are zero, read -1.
    columns += [record.choices.ids_TK.int() + 1] if record.ids_NK is None else []
    arrived = backend.carry(columns, record.route)
    if record.ids_NK is None:
        record = replace(record, ids_NK=arrived.pop().long() - 1)
    weights_NK = None if record.choices.weights_TK is None else arrived.pop()
    scales_NS = None if inputs.scales is None else arrived.pop()
    return Arrived(rows_ND=arrived[0], weights_NK=weights_NK, scales_NS=scales_NS, record=record)


def find_problem(backend: Backend, inputs: Inputs, num_experts: int) -> str:
    """Says what is wrong with a new routing or the rows that it is for, or nothing."""
    hidden, scales = inputs.hidden, inputs.scales
    tokens = hidden.shape[0] if hidden.dim() else 0
    if any(part.dim() != 2 or len(part) != tokens or not part.shape[1] for part in inputs.columns):
        return f"hidden is {list(hidden.shape)}; give [T, D], and scales [T, S]"
    if num_experts < 1 or num_experts % backend.world_size:
        return f"{num_experts} experts on {backend.world_size} ranks; give a multiple"
    map_TE, probs_TE, ids_TK, weights_TK = inputs.map_TE, inputs.probs_TE, inputs.ids_TK, inputs.weights_TK
    if map_TE is not None:
        if map_TE.shape != (tokens, num_experts) or map_TE.dtype != torch.bool:
            return f"routing_map is {map_TE.dtype} {list(map_TE.shape)}; give bool {[tokens, num_experts]}"
        if probs_TE is not None and (probs_TE.shape != map_TE.shape or probs_TE.dtype != torch.float32):
            return f"probs is {probs_TE.dtype} {list(probs_TE.shape)}; give float32 {[tokens, num_experts]}"
        return backend.wrong_device(hidden, scales, map_TE, probs_TE)
    if ids_TK is None:
        return "no routing; give routing_map, topk_idx, or the handle of an earlier dispatch"
    if ids_TK.dim() != 2 or len(ids_TK) != tokens or not ids_TK.shape[1]:
        return f"topk_idx is {list(ids_TK.shape)} for {tokens} tokens; give [T, K]"
    if weights_TK is not None and weights_TK.shape != ids_TK.shape:
        return f"topk_weights is {list(weights_TK.shape)}, topk_idx {list(ids_TK.shape)}; give equal shapes"
    if ids_outside(ids_TK, num_experts):
        return f"ids of topk_idx outside [-1, {num_experts}); -1 drops a choice"
    if ids_TK.device.type == "cpu" and bool(plan.chosen_twice(ids_TK)[1].any()):
        return "a token of topk_idx wants an expert twice; an expert may stand at most once in a row"
    return backend.wrong_device(hidden, scales, ids_TK, weights_TK)
