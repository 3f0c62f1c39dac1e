"""Replays recorded loads with a policy, a number of ranks and a number of slots: how balanced they would have
been."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from imbrex.contracts import Placement
from imbrex.placement.engines import deepseek, tensorrt_llm
from imbrex.placement.flow import spread_choices
from imbrex.placement.history import LoadHistory
from imbrex.placement.moves import fetches
from imbrex.placement.online import OnlinePlanner, Pace
from imbrex.placement.packing import Floats, Ints
from imbrex.placement.planner import capacity_of
from imbrex.placement.renewal import Target, plan_history

POLICIES = {
    "none": "experts in order, no replicas",
    "deepseek": "DeepSeek's EPLB, replicas in turn",
    "tensorrt_llm": "TensorRT-LLM's planner, replicas in turn",
    "even": "this planner, replicas in turn",
    "balanced": "this planner, replicas by the counts of the batch",
    "online": "as balanced, renewed while it runs",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Replay:
    """The result of replaying a policy.

    imbalance_IL: the load of the fullest rank over the mean, minus 1, of every iteration and layer.
    loads_ILW: choices that every rank computes. fetched_I: the experts that ranks fetched before an
    iteration.
    """

    policy: str
    imbalance_IL: Floats
    loads_ILW: Floats
    fetched_I: Ints

    @property
    def imbalance_I(self) -> Floats:
        """The imbalance of every iteration that had choices: the mean over layers that had any."""
        means_I = mean_over_layers(self.imbalance_IL, self.loads_ILW)
        return means_I[np.isfinite(means_I)]


def replay(
    train: LoadHistory,
    test: LoadHistory,
    policy: str,
    num_ranks: int,
    slots: int,
    *,
    pace: Pace | None = None,
    sources: int = 1,
) -> Replay:
    """Plan from the loads `train`, and replay every iteration of `test`.

    slots: of all ranks together. sources: this many successive iterations of `test` count as one, as the
    tokens of as many ranks.

    Raises ValueError if the policy is not known, or if an engine's policy does not allow these numbers.
    """
    if policy not in POLICIES:
        raise ValueError(f"replay: policy {policy!r}; use one of {', '.join(POLICIES)}")
    if train.layers != test.layers or train.num_experts != test.num_experts:
        raise ValueError("replay: the two histories have different layers or experts; give two of one model")
    counts_ILE = test.pool(sources).counts_ILE
    if not counts_ILE.any():
        raise ValueError("replay: what is to be scored has no choices; give another part of the statistics")
    loads_ILW = np.empty((*counts_ILE.shape[:2], num_ranks))
    fetched_I = np.zeros(len(counts_ILE), dtype=np.int64)
    if policy in ("balanced", "online"):
        planned = plan_history(train, Target(num_ranks=num_ranks, slots=slots))
        planner = OnlinePlanner(list(planned.values()), pace or Pace())
        for i, counts_LE in enumerate(counts_ILE):
            loads_ILW[i] = [balanced_loads(c, p) for c, p in zip(counts_LE, planner.placements, strict=True)]
            if policy == "online":
                before = list(planner.placements)
                of_sources = test.counts_ILE[i * sources : (i + 1) * sources]
                changed = planner.step(list(of_sources.transpose(1, 0, 2)))
                fetched_I[i] = sum(len(fetches(before[layer], new)) for layer, new in changed.items())
    else:
        shares = [_shares(load_E, policy, num_ranks, slots) for load_E in train.load()]
        for layer, share_WE in enumerate(shares):
            loads_ILW[:, layer] = counts_ILE[:, layer] @ share_WE.T
    return Replay(
        policy=policy, imbalance_IL=imbalance_of(loads_ILW), loads_ILW=loads_ILW, fetched_I=fetched_I
    )


def imbalance_of(loads_ILW: Floats) -> Floats:
    """The maximum over the mean of the last axis, minus 1; 0 where all are 0."""
    mean = loads_ILW.mean(-1)
    return np.where(mean > 0, loads_ILW.max(-1) / np.where(mean > 0, mean, 1) - 1, 0.0)


def mean_over_layers(values_IL: Floats, loads_ILW: Floats) -> Floats:
    """The mean over the layers that had choices, for every iteration; NaN for an iteration without any."""
    had_IL = loads_ILW.any(-1)
    number_I = had_IL.sum(1)
    total_I = np.where(had_IL, values_IL, 0.0).sum(1)
    return np.where(number_I > 0, total_I / np.maximum(number_I, 1), np.nan)


def balanced_loads(counts_E: Ints, placement: Placement) -> Ints:
    """Choices that every rank computes under the balanced split, int64 [W]."""
    ends = np.concatenate([[0], np.cumsum(spread_choices(counts_E[None], placement)[0])])
    return np.diff(ends[list(placement.rank_offsets)])


def _shares(load_E: Floats, policy: str, num_ranks: int, slots: int) -> Floats:
    """The part of every expert's choices that each rank computes, float64 [W, E]."""
    num_experts = len(load_E)
    if policy == "none":
        capacity = capacity_of(num_experts, num_ranks, num_experts)
        rows = np.split(np.arange(num_experts), np.cumsum(capacity)[:-1])
    elif policy == "deepseek":
        rows = deepseek(load_E, slots, 1, 1, num_ranks).reshape(num_ranks, -1)
    elif policy == "tensorrt_llm":
        rows = tensorrt_llm(load_E, slots, num_ranks).reshape(num_ranks, -1)
    else:
        history = LoadHistory(counts_ILE=np.rint(load_E).astype(np.int64)[None, None], layers=(0,))
        placement = plan_history(history, Target(num_ranks=num_ranks, slots=slots, split="even"))[0]
        rows = [np.array(placement.local(rank)) for rank in range(num_ranks)]
    number_WE = np.stack([np.bincount(row, minlength=num_experts) for row in rows])
    return number_WE / number_WE.sum(0)


def join(histories: Sequence[LoadHistory]) -> LoadHistory:
    """One history of several, one after the other. Raises ValueError if they are of different models."""
    first = histories[0]
    if any(h.layers != first.layers or h.num_experts != first.num_experts for h in histories):
        raise ValueError("replay: the histories have different layers or experts; record one model")
    return LoadHistory(
        counts_ILE=np.concatenate([h.counts_ILE for h in histories]), layers=first.layers, top_k=first.top_k
    )
