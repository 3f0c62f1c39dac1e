"""The planners of DeepSeek's EPLB and of TensorRT-LLM, written anew, with EPLB's interface.

`rebalance_experts` has the arguments and results of `eplb.rebalance_experts` of github.com/deepseek-ai/EPLB.
With `policy="deepseek"` it gives the same placements, ties included. By default it plans with
`imbrex.placement`, also starting from DeepSeek's placement. So the result is at least as balanced, wherever
DeepSeek's does not put two replicas of an expert on one GPU.
"""

from __future__ import annotations

import heapq

import numpy as np
import torch
from torch import Tensor

from imbrex.placement.packing import Floats, Held, Ints, spread
from imbrex.placement.planner import capacity_of, check_loads, check_nodes, search

POLICIES = ("imbrex", "deepseek", "tensorrt_llm")


def rebalance_experts(
    weight: Tensor,
    num_replicas: int,
    num_groups: int,
    num_nodes: int,
    num_gpus: int,
    *,
    policy: str = "imbrex",
) -> tuple[Tensor, Tensor, Tensor]:
    """Choose the replicas of every expert and the slots where they are, for every layer.

    weight: the load, [layers, E]. num_replicas: the slots of all GPUs together. num_groups, num_nodes: groups
    of experts stay inside a node if the groups divide over the nodes; otherwise nodes are ignored. policy:
    `imbrex`, `deepseek` or `tensorrt_llm`.

    Returns int64 tensors: the expert of every slot, [layers, num_replicas], rank by rank; the slots of every
    expert, [layers, E, X], padded with `-1`; and the number of replicas of every expert, [layers, E].

    Raises ValueError if the numbers do not fit, or if two replicas of an expert would be on one GPU.
    """
    load_LE = check_loads(weight)
    if policy not in POLICIES:
        raise ValueError(f"rebalance_experts: policy {policy!r}; use one of {', '.join(POLICIES)}")
    if policy == "tensorrt_llm":
        slots = [tensorrt_llm(load_E, num_replicas, num_gpus) for load_E in load_LE]
    elif policy == "deepseek":
        slots = [deepseek(load_E, num_replicas, num_groups, num_nodes, num_gpus) for load_E in load_LE]
    else:
        capacity = capacity_of(num_replicas, num_gpus, load_LE.shape[1])
        slots = [_plan(load_E, capacity, num_groups, num_nodes) for load_E in load_LE]
    return tables(np.stack(slots), load_LE.shape[1])


def tables(slots_LS: Ints, num_experts: int) -> tuple[Tensor, Tensor, Tensor]:
    """The three results of `rebalance_experts` from the expert of every slot; an expert's slots are in
    ascending order."""
    counts_LE = np.stack([np.bincount(slots, minlength=num_experts) for slots in slots_LS])
    slots_LEX = np.full((*counts_LE.shape, counts_LE.max()), -1, dtype=np.int64)
    for layer, slots in enumerate(slots_LS):
        order = np.argsort(slots, kind="stable")
        nth = np.arange(len(slots)) - (np.cumsum(counts_LE[layer]) - counts_LE[layer])[slots[order]]
        slots_LEX[layer, slots[order], nth] = order
    return torch.from_numpy(slots_LS), torch.from_numpy(slots_LEX), torch.from_numpy(counts_LE)


def _plan(load_E: Floats, capacity_W: tuple[int, ...], num_groups: int, num_nodes: int) -> Ints:
    num_slots, num_gpus = sum(capacity_W), len(capacity_W)
    hierarchical = num_nodes > 1 and num_groups % num_nodes == 0 and num_gpus % num_nodes == 0
    nodes, groups = (num_nodes, num_groups) if hierarchical else (1, 1)
    check_nodes(len(load_E), capacity_W, nodes, groups)
    starts = []
    if num_slots % num_gpus == 0 and len(load_E) % num_groups == 0:
        theirs = deepseek(load_E, num_slots, num_groups, num_nodes, num_gpus).reshape(num_gpus, -1)
        if all(len(set(row)) == len(row) for row in theirs.tolist()):
            starts.append(_held(theirs, len(load_E)))
    replicas_WE = search(load_E, capacity_W, num_nodes=nodes, num_groups=groups, others=starts)
    return np.concatenate([np.flatnonzero(row) for row in replicas_WE]).astype(np.int64)


def _held(slots_WS: Ints, num_experts: int) -> Held:
    replicas_WE = np.zeros((len(slots_WS), num_experts), dtype=bool)
    np.put_along_axis(replicas_WE, slots_WS, True, axis=1)
    return replicas_WE


def deepseek(load_E: Floats, num_slots: int, num_groups: int, num_nodes: int, num_gpus: int) -> Ints:
    """The expert of every slot by DeepSeek's EPLB. Replicas of an expert may be on one GPU. Loads are rounded
    to float32, as there, and equal ones keep their order."""
    num_experts = len(load_E)
    if num_groups % num_nodes:
        num_groups = num_nodes = 1
    for many, parts, what in (
        (num_experts, num_groups, "experts over groups"),
        (num_gpus, num_nodes, "GPUs over nodes"),
        (num_slots, num_gpus, "replicas over GPUs"),
        (num_slots, num_nodes, "replicas over nodes"),
    ):
        if many % parts:
            raise ValueError(
                f"rebalance_experts: {many} and {parts}: {what} do not divide, as policy='deepseek' needs"
            )
    if num_slots < num_experts:
        raise ValueError(
            f"rebalance_experts: {num_slots} replicas for {num_experts} experts; use at least those"
        )
    load = load_E.astype(np.float32)
    size, nodes_of_group = (
        num_experts // num_groups,
        _pack_evenly(load.reshape(num_groups, -1).sum(1), num_nodes),
    )
    slots = []
    for groups in nodes_of_group:
        experts = (np.array(groups)[:, None] * size + np.arange(size)).ravel()
        slots.append(experts[_node(load[experts], num_slots // num_nodes, num_gpus // num_nodes)])
    return np.concatenate(slots).astype(np.int64)


def _node(load_E: np.ndarray, num_slots: int, num_gpus: int) -> Ints:
    experts, counts = list(range(len(load_E))), np.ones(len(load_E), dtype=np.float32)
    for _ in range(num_slots - len(load_E)):
        heaviest = int((load_E / counts).argmax())
        experts.append(heaviest)
        counts[heaviest] += 1
    packs = _pack_evenly((load_E / counts)[experts], num_gpus)
    return np.array([experts[item] for pack in packs for item in pack], dtype=np.int64)


def _pack_evenly(load_N: np.ndarray, num_packs: int) -> list[list[int]]:
    """Pack items, equally many to a pack: the heaviest first, into the lightest pack with room."""
    room = len(load_N) // num_packs
    if room == 1:
        return [[item] for item in range(len(load_N))]
    packs: list[list[int]] = [[] for _ in range(num_packs)]
    heap = [(0.0, pack) for pack in range(num_packs)]
    for item in np.argsort(-load_N, kind="stable").tolist():
        weight, pack = heapq.heappop(heap)
        packs[pack].append(item)
        if len(packs[pack]) < room:
            heapq.heappush(heap, (float(np.float32(weight) + load_N[item]), pack))
    return packs


def tensorrt_llm(load_E: Floats, num_slots: int, num_gpus: int) -> Ints:
    """The expert of every slot by TensorRT-LLM's moeLoadBalancer. Replicas of an expert may be on one GPU. Of
    experts with equal loads the higher one is replicated first, and the lower one is placed first."""
    num_experts = len(load_E)
    if num_slots < num_experts or num_slots % num_gpus:
        raise ValueError(
            f"rebalance_experts: {num_slots} slots for {num_experts} experts on {num_gpus} GPUs; "
            "policy='tensorrt_llm' needs as many as experts, the same on every GPU"
        )
    counts, extra = [1] * num_experts, num_slots - num_experts
    if load_E.sum() == 0:
        counts = list(spread(num_slots, num_experts))
        extra = 0
    heap = [(-float(load), -expert) for expert, load in enumerate(load_E)]
    heapq.heapify(heap)
    for _ in range(extra):
        expert = -heap[0][1]
        counts[expert] += 1
        heapq.heapreplace(heap, (-float(load_E[expert]) / counts[expert], -expert))
    sized = [(-float(load_E[e]) / counts[e], e) for e in range(num_experts) for _ in range(counts[e])]
    gpus: list[list[int]] = [[] for _ in range(num_gpus)]
    loads = [(0.0, gpu) for gpu in range(num_gpus)]
    for size, expert in sorted(sized):
        load, gpu = heapq.heappop(loads)
        gpus[gpu].append(expert)
        if len(gpus[gpu]) < num_slots // num_gpus:
            heapq.heappush(loads, (load - size, gpu))
    return np.array([expert for experts in gpus for expert in experts], dtype=np.int64)
