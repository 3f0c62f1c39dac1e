"""The offline planner: against exact optima, DeepSeek's and TensorRT-LLM's algorithms, and its own rules."""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import pytest
import torch

from imbrex.placement import imbalance, plan_layers, rebalance_experts, refine
from imbrex.placement.engines import deepseek, tensorrt_llm
from imbrex.placement.packing import MOST_PLACEMENTS, num_placements, rank_loads, replicate
from imbrex.placement.planner import search, to_held
from tests.ranks.forked import run_code

README_WEIGHT = torch.tensor(
    [
        [90, 132, 40, 61, 104, 165, 39, 4, 73, 56, 183, 86],
        [20, 107, 104, 64, 19, 197, 187, 157, 172, 86, 16, 27],
    ]
)
README_ANSWER = [
    [5, 6, 5, 7, 8, 4, 3, 4, 10, 9, 10, 2, 0, 1, 11, 1],
    [7, 10, 6, 8, 6, 11, 8, 9, 2, 4, 5, 1, 5, 0, 3, 1],
]


def imbalance_of_slots(load, slots, num_gpus: int) -> float:
    """Of replicas that may share a GPU."""
    counts = np.bincount(slots, minlength=len(load))
    loads = (np.asarray(load) / counts)[slots].reshape(num_gpus, -1).sum(1)
    return loads.max() / loads.mean() - 1


def shares_a_gpu(slots, num_gpus: int) -> bool:
    return any(len(set(row)) < len(row) for row in np.asarray(slots).reshape(num_gpus, -1).tolist())


def test_deepseek_policy_reproduces_its_readme() -> None:
    slots, slots_of, counts = rebalance_experts(README_WEIGHT, 16, 4, 2, 8, policy="deepseek")
    assert slots.tolist() == README_ANSWER
    assert counts.sum(1).tolist() == [16, 16]
    for layer in range(2):
        for expert in range(12):
            found = [s for s in slots_of[layer, expert].tolist() if s >= 0]
            assert len(found) == counts[layer, expert]
            assert all(slots[layer, s] == expert for s in found)


def test_readme_example_is_planned_better() -> None:
    placements = plan_layers(README_WEIGHT, 8, 16)
    found = [imbalance(load, placement) for load, placement in zip(README_WEIGHT, placements, strict=True)]
    assert found[0] <= 0.05325
    assert found[1] <= 0.19032


def test_compatible_call_keeps_replicas_on_their_node_and_is_no_worse() -> None:
    slots, _, _ = rebalance_experts(README_WEIGHT, 16, 4, 2, 8)
    for load, ours, theirs in zip(README_WEIGHT, slots.tolist(), README_ANSWER, strict=True):
        assert not shares_a_gpu(ours, 8)
        assert imbalance_of_slots(load, ours, 8) <= imbalance_of_slots(load, theirs, 8) + 1e-9
        assert set(ours[:8]).isdisjoint(ours[8:])


def test_flashlb_example() -> None:
    load = [600, 560, 120, 120, 20, 10, 10, 10]
    placement = plan_layers([load], 8, 16)[0]
    assert rank_loads(np.array(load, dtype=float), to_held(placement)).max() <= 196.67


def optimum(load: np.ndarray, capacity: list[int]) -> float:
    """Fullest rank of the best placement, by looking at all."""
    num_experts = len(load)
    rows = []
    for slots in capacity:
        chosen = list(itertools.combinations(range(num_experts), slots))
        rows.append(np.array([[e in experts for e in range(num_experts)] for experts in chosen]))
    index = np.array(list(itertools.product(*(range(len(held)) for held in rows))))
    picked = np.stack([held[index[:, rank]] for rank, held in enumerate(rows)])
    counts = picked.sum(0)
    legal = (counts > 0).all(1)
    share = load / np.maximum(counts, 1)
    return float((picked * share).sum(2).max(0)[legal].min())


@pytest.mark.parametrize(("num_experts", "capacity"), [(5, [3, 3, 3]), (5, [3, 2, 2]), (5, [4, 1, 2])])
def test_tiny_layers_are_exact(num_experts: int, capacity: list[int]) -> None:
    draw = np.random.default_rng(sum(capacity))
    for _ in range(6):
        load = draw.gamma(0.7, size=num_experts) * 100
        assert rank_loads(load, search(load, capacity)).max() == pytest.approx(optimum(load, capacity))


@pytest.mark.untraced
@pytest.mark.parametrize(("num_experts", "capacity"), [(7, [3, 3, 3]), (6, [2, 2, 2, 2]), (9, [4, 3, 2])])
def test_small_layers_are_within_two_percent_of_the_optimum(num_experts: int, capacity: list[int]) -> None:
    """Just above what is searched exactly."""
    assert num_placements(num_experts, capacity) > MOST_PLACEMENTS
    draw = np.random.default_rng(sum(capacity))
    ratios = []
    for _ in range(4):
        load = draw.gamma(0.7, size=num_experts) * 100
        ours = rank_loads(load, search(load, capacity)).max()
        ratios.append(ours / optimum(load, capacity))
    assert min(ratios) >= 1 - 1e-9
    assert np.mean(ratios) <= 1.02


@pytest.mark.parametrize(
    ("num_experts", "slots", "gpus"), [(8, 8, 4), (12, 16, 8), (16, 20, 4), (32, 48, 16)]
)
def test_never_worse_than_the_engines(num_experts: int, slots: int, gpus: int) -> None:
    draw = np.random.default_rng(slots)
    for _ in range(8):
        load = draw.gamma(0.5, size=num_experts) * 1000
        placement = plan_layers([load], gpus, slots)[0]
        for rank in range(gpus):
            assert len(set(placement.local(rank))) == slots // gpus
        for theirs in (deepseek(load, slots, 1, 1, gpus), tensorrt_llm(load, slots, gpus)):
            if not shares_a_gpu(theirs, gpus):
                assert imbalance(load, placement) <= imbalance_of_slots(load, theirs, gpus) + 1e-9
        ours = rebalance_experts(torch.tensor(load)[None], slots, 1, 1, gpus)[0][0].numpy()
        assert not shares_a_gpu(ours, gpus)


def test_slots_go_to_the_experts_with_most_load_a_replica() -> None:
    load = np.array([6.0, 3.0, 2.0])
    assert [replicate(load, slots, 4).tolist() for slots in (4, 5, 6)] == [[2, 1, 1], [3, 1, 1], [3, 2, 1]]
    assert replicate(load, 5, 2).tolist() == [2, 2, 1]


def test_tensorrt_llm_breaks_ties_to_the_higher_expert() -> None:
    slots = tensorrt_llm(np.array([4.0, 4.0, 2.0]), 4, 2)
    assert sorted(slots.tolist()) == [0, 1, 1, 2]
    slots = tensorrt_llm(np.zeros(3), 4, 2)
    assert sorted(slots.tolist()) == [0, 0, 1, 2]


WHOLE_MODEL = """
import time
import numpy as np
from imbrex.placement import LoadHistory, Target, plan_history
draw = np.random.default_rng(0)
counts = draw.poisson(draw.gamma(0.6, size=(58, 256)) * 200, size=(16, 58, 256)).astype(np.int64)
history = LoadHistory(counts_ILE=counts, layers=tuple(range(58)))
target = Target(num_ranks=32, slots=288)
plan_history(LoadHistory(counts_ILE=counts[:1, :2], layers=(0, 1)), target)

def seconds(work):
    begin = time.process_time()
    work()
    return time.process_time() - begin

def relative():
    pace = max(1.0, seconds(lambda: sum(number for number in range(1_000_000))) / 0.03)
    return seconds(lambda: plan_history(history, target)) / pace

found = []
while len(found) < 3 and min(found, default=1.0) >= 1.0:
    found.append(relative())
print(min(found))
"""


def test_a_whole_model_in_a_second(tmp_path: Path) -> None:
    """From 16 iterations, for the balanced split, where Python adds a million numbers in 0.03 s; on a slower
    or busier processor in as much more."""
    assert float(run_code(WHOLE_MODEL, folder=tmp_path)) < 1.0


def test_a_whole_model_is_level_and_always_planned_alike() -> None:
    draw = np.random.default_rng(0)
    load = draw.gamma(0.6, size=(58, 256)) * 1000
    placements = plan_layers(load, 32, 288)
    assert np.mean([imbalance(row, p) for row, p in zip(load, placements, strict=True)]) < 0.001
    assert placements == plan_layers(load, 32, 288)


def test_a_fullest_rank_that_gains_what_it_loses_ends_the_search() -> None:
    """The fullest rank may hold both the expert that gets a replica and the one that loses it."""
    loads = [
        [168, 0, 370, 160, 113, 351, 422, 228, 475, 38, 0, 208, 152, 186, 185, 1],
        [97, 96, 116, 141, 55, 21, 3, 302, 486, 46, 81, 20, 51, 1, 38, 12],
        [139, 61, 88, 164, 253, 95, 48, 208, 4, 807, 0, 1625, 8, 562, 81, 319],
    ]
    placements = plan_layers(loads, 4, 20)
    assert max(imbalance(load, p) for load, p in zip(loads, placements, strict=True)) < 0.05


def test_slots_need_not_divide() -> None:
    draw = np.random.default_rng(3)
    load = draw.gamma(0.6, size=13) * 100
    placement = plan_layers([load], 4, 18)[0]
    assert placement.rank_offsets == (0, 5, 10, 14, 18)
    assert imbalance(load, placement) < 0.02
    assert plan_layers([load], 3, [13, 1, 2])[0].rank_offsets == (0, 13, 14, 16)


def test_tight_uneven_slots_still_make_a_placement() -> None:
    """Greedy counts [3, 3, 2, 1] do not fit two full ranks: one expert's replica goes to another expert."""
    placement = plan_layers([[100, 90, 20, 1]], 3, [4, 4, 1])[0]
    assert placement.local(0) == placement.local(1) == (0, 1, 2, 3)


def test_hierarchical_keeps_groups_and_replicas_on_their_node() -> None:
    draw = np.random.default_rng(5)
    load = draw.gamma(0.6, size=32) * 100
    placement = plan_layers([load], 8, 40, num_nodes=2, num_groups=8)[0]
    nodes = [{e for r in range(4) for e in placement.local(4 * n + r)} for n in range(2)]
    assert nodes[0].isdisjoint(nodes[1])
    for group in range(8):
        assert sum(set(range(4 * group, 4 * group + 4)) <= node for node in nodes) == 1


@pytest.mark.parametrize(
    ("load", "ranks", "slots", "options", "says"),
    [
        ([[1, -2]], 1, 2, {}, "load of expert 1 in layer 0 is -2"),
        ([[float("nan"), 2]], 1, 2, {}, "load of expert 0 in layer 0 is nan"),
        ([[1, 2]], 2, 1, {}, "1 slots for 2 experts"),
        ([[1, 2]], 2, 5, {}, "use at most 4 slots"),
        ([[1, 2, 3]], 2, [2, 2, 2], {}, "for 2 ranks"),
        ([[1, 2, 3]], 2, [-1, 4], {}, "one number from 0 up a rank"),
        ([[1] * 8], 4, [5, 1, 3, 3], {"num_nodes": 2, "num_groups": 2}, "node 0 has slots"),
        ([[1, 2, 3]], 2, 4, {"num_nodes": 2}, "1 groups do not divide over 2 nodes"),
        ([], 2, 4, {}, "shape"),
        ([[1, 2]], 0, 4, {}, "0 ranks"),
    ],
)
def test_bad_input_says_what_is_wrong(load, ranks, slots, options, says) -> None:
    with pytest.raises(ValueError, match=says):
        plan_layers(load, ranks, slots, **options)


def test_rebalance_takes_uneven_slots_and_refuses_what_cannot_be() -> None:
    slots, _, counts = rebalance_experts(torch.tensor([[4.0, 1.0, 1.0, 1.0]]), 5, 1, 1, 2)
    assert (slots.tolist(), counts.tolist()) == ([[0, 1, 2, 0, 3]], [[2, 1, 1, 1]])
    with pytest.raises(ValueError, match="use at most 8 slots"):
        rebalance_experts(torch.ones(1, 4), 9, 1, 1, 2)
    with pytest.raises(ValueError, match="policy 'best'"):
        rebalance_experts(torch.ones(1, 4), 4, 1, 1, 2, policy="best")
    with pytest.raises(ValueError, match="do not divide"):
        rebalance_experts(torch.ones(1, 4), 5, 1, 1, 2, policy="deepseek")


def test_no_load_at_all_makes_a_placement() -> None:
    placement = plan_layers([[0, 0, 0]], 2, 4)[0]
    assert imbalance([0, 0, 0], placement) == 0
    assert placement.num_slots == 4


@pytest.mark.parametrize("kind", ["any", "whole", "hundredths", "steep"])
def test_a_swap_found_among_few_is_that_found_among_all(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same experts and the same float, of loads among which many are equal, too."""
    draw = np.random.default_rng(0)
    for _ in range(50):
        ranks = int(draw.integers(2, 9))
        experts = int(draw.integers(2 * ranks, 120))
        held = draw.random((ranks, experts)) < 0.1
        held[draw.integers(ranks, size=experts), np.arange(experts)] = True
        load = {
            "any": draw.random(experts),
            "whole": draw.integers(0, 6, experts).astype(np.float64),
            "hundredths": draw.random(experts).round(2),
            "steep": draw.zipf(1.5, experts).astype(np.float64),
        }[kind]
        loads = rank_loads(load, held)
        moves = []
        for many in (1 << 60, 0):
            monkeypatch.setattr(refine, "MANY_PAIRS", many)
            moves.append(refine.best_swap(load, held, loads, int(loads.argmax())))
        assert moves[0] == moves[1]
