"""From a routing to compact rows received: the first halves of both dispatches of a `HybridEPBuffer`."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from imbrex.adapters.deep_ep.choices import Choices, indices_to_map, pack_choices
from imbrex.adapters.deep_ep.courier import Carrier, Courier, make_route
from imbrex.adapters.deep_ep.couriers import carry
from imbrex.adapters.deep_ep.hybrid_handle import Arrived, BufferConfig, Kept, read_handle
from imbrex.adapters.deep_ep.nvlink_courier import Link, NvlinkCourier
from imbrex.runtime.words import words


@dataclass(frozen=True, kw_only=True, slots=True)
class Given:
    """What a program gave a dispatch. Of the routing, the map is looked at first.

    hidden: [T, D]. scales: [T, S]. map_TE: bool. probs_TE: float32. ids_TK: int64. weights_TK: float32.
    """

    hidden: Tensor
    scales: Tensor | None
    map_TE: Tensor | None
    probs_TE: Tensor | None
    ids_TK: Tensor | None
    weights_TK: Tensor | None


def plan_rows(
    courier: Courier | NvlinkCourier, call: str, given: Given, config: BufferConfig, problem: str
) -> Kept:
    """Who sends what to whom, for a new routing."""
    problem = problem or _find_problem(courier, given, config.num_experts)
    columns = [] if problem else [part for part in (given.hidden, given.scales) if part is not None]
    weighted = given.probs_TE is not None if given.map_TE is not None else given.weights_TK is not None
    settings = {
        "the number of experts": config.num_experts,
        "the bytes of a row": sum(column.shape[1] * column.dtype.itemsize for column in columns),
        "whether scales are given": len(columns) == 2,
        "whether probabilities are given": weighted,
    }
    if isinstance(courier, NvlinkCourier):
        choices = _choose(courier, given, config.num_experts, problem)
        routing = choices.ids_TK, choices.weights_TK
        link = courier.plan(
            call, problem, *routing, settings, config.num_experts, columns, config.pad_multiple
        )
        return Kept(route=link, choices=choices, config=config)
    if problem:
        map_TE, probs_TE = torch.zeros(0, courier.world_size, dtype=torch.bool, device="cpu"), None
    else:
        map_TE, probs_TE = _as_map(given, config.num_experts)
    wanted_TW = map_TE.unflatten(1, (courier.world_size, -1)).any(2)
    most = map_TE.sum(1).max() if len(map_TE) else 0
    rows_WW, most_W = courier.settle(call, problem, wanted_TW, most, settings)
    route = make_route(wanted_TW, rows_WW, courier.rank)
    return Kept(route=route, choices=pack_choices(map_TE, probs_TE, max(1, *most_W)), config=config)


def plan_again(courier: Courier | NvlinkCourier, call: str, given: Given, handle: tuple) -> Kept:
    """The same way as an earlier dispatch, with other probabilities where they are given."""
    kept = read_handle(handle, call)
    if given.ids_TK is not None or len(given.hidden) != kept.route.num_tokens:
        raise ValueError(
            f"deep_ep.HybridEPBuffer.{call}: {len(given.hidden)} tokens for a handle of "
            f"{kept.route.num_tokens}; give as many again, and new probabilities as probs [T, E]"
        )
    ids_TK, weights_TK, route = kept.choices.ids_TK, None, kept.route
    if given.probs_TE is not None:
        weights_TK = given.probs_TE.gather(1, ids_TK.clamp(min=0))
        if isinstance(courier, NvlinkCourier) and isinstance(route, Link):
            route = courier.with_weights(route, weights_TK)
    return replace(kept, route=route, choices=Choices(ids_TK=ids_TK, weights_TK=weights_TK))


def carry_rows(courier: Courier | NvlinkCourier, given: Given, kept: Kept) -> Arrived:
    """Rows, scales, choices and their weights to the ranks that want them, as compact rows."""
    columns = [given.hidden]
    columns += [] if given.scales is None else [given.scales]
    columns += [] if kept.choices.weights_TK is None else [kept.choices.weights_TK]
    # One higher on the way, so that rows to spare, which are zero, read -1.
    columns += [kept.choices.ids_TK.int() + 1] if kept.ids_NK is None else []
    arrived = carry(courier, columns, kept.route)
    if kept.ids_NK is None:
        kept = replace(kept, ids_NK=arrived.pop().long() - 1)
    weights_NK = None if kept.choices.weights_TK is None else arrived.pop()
    scales_NS = None if given.scales is None else arrived.pop()
    return Arrived(rows_ND=arrived[0], weights_NK=weights_NK, scales_NS=scales_NS, kept=kept)


def _choose(courier: NvlinkCourier, given: Given, num_experts: int, problem: str) -> Choices:
    """Choices of as many columns as the kernels are made for, which costs no host synchronisation but where a
    map of more than `ALL_EXPERTS` experts comes for the first time."""
    if problem:
        return Choices(ids_TK=words()[:, None], weights_TK=None)
    if given.map_TE is None:
        assert given.ids_TK is not None
        ids_TK = given.ids_TK.long()
        order_TK = torch.where(ids_TK < 0, num_experts, ids_TK).argsort(dim=1, stable=True)
        weights_TK = None if given.weights_TK is None else given.weights_TK.float().gather(1, order_TK)
        return Choices(ids_TK=ids_TK.gather(1, order_TK), weights_TK=weights_TK)
    chosen_T = given.map_TE.sum(1)
    most = courier.most_choices(chosen_T, num_experts)
    choices = pack_choices(given.map_TE, given.probs_TE, most)
    # More than there is room for: an id that the kernels refuse on every rank.
    ids_TK = torch.where((chosen_T > most)[:, None], num_experts, choices.ids_TK)
    return Choices(ids_TK=ids_TK, weights_TK=choices.weights_TK)


def _as_map(given: Given, num_experts: int) -> tuple[Tensor, Tensor | None]:
    if given.map_TE is not None:
        return given.map_TE, given.probs_TE
    assert given.ids_TK is not None
    return indices_to_map(given.ids_TK, given.weights_TK, len(given.ids_TK), num_experts)


def _find_problem(courier: Carrier, given: Given, num_experts: int) -> str:
    hidden, scales = given.hidden, given.scales
    tokens = hidden.shape[0] if hidden.dim() else 0
    if hidden.dim() != 2 or (scales is not None and (scales.dim() != 2 or len(scales) != tokens)):
        return f"hidden is {list(hidden.shape)}; give [T, D], and scales [T, S]"
    if num_experts < 1 or num_experts % courier.world_size:
        return f"{num_experts} experts on {courier.world_size} ranks; give a multiple"
    map_TE, probs_TE, ids_TK, weights_TK = given.map_TE, given.probs_TE, given.ids_TK, given.weights_TK
    if map_TE is not None:
        if map_TE.shape != (tokens, num_experts) or map_TE.dtype != torch.bool:
            return f"routing_map is {map_TE.dtype} {list(map_TE.shape)}; give bool {[tokens, num_experts]}"
        if probs_TE is not None and (probs_TE.shape != map_TE.shape or probs_TE.dtype != torch.float32):
            return f"probs is {probs_TE.dtype} {list(probs_TE.shape)}; give float32 {[tokens, num_experts]}"
        return courier.wrong_device(hidden, scales, map_TE, probs_TE)
    if ids_TK is None:
        return "no routing; give routing_map, topk_idx, or the handle of an earlier dispatch"
    if ids_TK.dim() != 2 or len(ids_TK) != tokens:
        return f"topk_idx is {list(ids_TK.shape)} for {tokens} tokens; give [T, K]"
    if weights_TK is not None and weights_TK.shape != ids_TK.shape:
        return f"topk_weights is {list(weights_TK.shape)}, topk_idx {list(ids_TK.shape)}; give equal shapes"
    # On a GPU a look at values would be a host synchronisation.
    if ids_TK.device.type == "cpu" and bool(((ids_TK < -1) | (ids_TK >= num_experts)).any()):
        return f"ids of topk_idx outside [-1, {num_experts}); -1 drops a choice"
    return courier.wrong_device(hidden, scales, ids_TK, weights_TK)
