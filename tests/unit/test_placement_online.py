"""What the online balancer decides: turns, thresholds, bounds, and that it follows a drift."""

from __future__ import annotations

import numpy as np
import pytest

from imbrex.balancer.tally import Tally, balancedness, exposition
from imbrex.placement import LoadHistory, Target, from_slots, plan_history, plan_layers
from imbrex.placement.bounds import imbalances
from imbrex.placement.moves import fetches
from imbrex.placement.online import LoadWindow, OnlinePlanner, Pace, layers_due, predicted, renew
from imbrex.placement.planner import to_held
from imbrex.placement.replay import join, replay
from imbrex.placement.stability import between, stability


def test_a_cycle_goes_through_all_layers_once() -> None:
    assert [layers_due(i, 5, 2) for i in range(4)] == [[0, 3], [1, 4], [2], [0, 3]]
    for layers, per_iteration in ((58, 2), (7, 3), (4, 9)):
        cycle = -(-layers // per_iteration)
        seen = [layer for i in range(cycle) for layer in layers_due(i, layers, per_iteration)]
        assert sorted(seen) == list(range(layers))
        assert all(len(layers_due(i, layers, per_iteration)) <= per_iteration for i in range(cycle))
    assert layers_due(3, 5, 0) == []


def drifting(seed: int = 0, iterations: int = 24) -> list[LoadHistory]:
    """Two tasks that like other experts: 3 layers, 16 experts."""
    draw = np.random.default_rng(seed)
    found = []
    for _ in range(2):
        popularity = draw.gamma(0.5, size=(3, 16)) * 60
        counts = draw.poisson(popularity, size=(iterations, 3, 16)).astype(np.int64)
        found.append(LoadHistory(counts_ILE=counts, layers=(0, 1, 2)))
    return found


@pytest.mark.parametrize("split", ["balanced", "even"])
def test_a_balanced_layer_is_left_alone_and_moves_are_bounded(split: str) -> None:
    first, second = drifting()
    placement = plan_history(first, Target(num_ranks=4, slots=20, split=split))[0]
    now, later = (h.counts_ILE[:, 0].astype(float) for h in (first, second))
    pace = Pace(split=split, max_moves=3, threshold=0.05)
    assert renew(now, placement, pace) is None
    new = renew(later, placement, pace)
    assert new is not None
    assert 1 <= len(fetches(placement, new)) <= 3
    gain = predicted(later, to_held(placement), split) - predicted(later, to_held(new), split)
    assert gain >= 0.025
    assert renew(later, placement, Pace(split=split, threshold=10.0)) is None


def test_a_layer_is_judged_by_its_split() -> None:
    """The balanced split evens out what equal shares do not."""
    placement, load_HE = from_slots([[0, 1], [0, 2]], 3), np.array([[6.0, 3.0, 9.0]] * 16)
    assert predicted(load_HE, to_held(placement), "even") == pytest.approx(1 / 3)
    assert predicted(load_HE, to_held(placement), "balanced") == pytest.approx(0)
    assert predicted(0 * load_HE, to_held(placement), "even") == 0
    placement, load_HE = from_slots([[0, 1, 3], [0, 2, 4]], 5), np.array([[8.0, 1, 5, 1, 3]] * 16)
    assert renew(load_HE, placement, Pace()) is None
    new = renew(load_HE, placement, Pace(split="even"))
    assert new is not None
    assert predicted(load_HE, to_held(new), "even") < predicted(load_HE, to_held(placement), "even")


def test_gains_need_not_be_sure_if_nobody_asks() -> None:
    """One iteration says nothing of chance; and what gains nothing is no new placement."""
    placement, load_HE = from_slots([[0, 1], [2, 3]], 4), np.array([[5.0, 5.0, 1.0, 1.0]])
    assert renew(load_HE, placement, Pace()) is None
    new = renew(load_HE, placement, Pace(sure=0.0, threshold=0.0))
    assert new is not None
    assert predicted(load_HE, to_held(new), "balanced") == 0
    assert renew(load_HE, new, Pace(sure=0.0, threshold=0.0)) is None


def test_window_forgets_and_weighs() -> None:
    window = LoadWindow(2, Pace(window=2, decay=0.5))
    for counts in ([9, 9], [0, 0], [4, 0], [0, 6]):
        window.add(np.array(counts))
    assert window.recent_HE().tolist() == [[2, 0], [0, 6]]
    for wrong in ([1, 2, 3], [1, -1]):
        with pytest.raises(ValueError, match="give 2 numbers from 0 up"):
            window.add(np.array(wrong))


@pytest.mark.parametrize("last", [[[50, 50, 0, 0], [0, 0, 50, 50]], [[50, 50, 0, 0], [20, 20, 30, 30]]])
def test_what_only_parts_of_an_iteration_would_gain_moves_nothing(last: list[list[int]]) -> None:
    """Two ranks whose tokens want other experts: apart they are uneven, together, as they are split, even;
    or even but once, which is chance."""
    placement = from_slots([[0, 1], [2, 3]], 4)
    window = LoadWindow(4, Pace())
    for counts in [[[50, 50, 0, 0], [0, 0, 50, 50]]] * 15 + [last]:
        window.add(np.array(counts))
    parts_HE, wholes_HE = window.recent_HE(), window.whole_HE()
    assert (len(parts_HE), len(wholes_HE)) == (32, 16)
    assert renew(parts_HE, placement, Pace()) is not None
    assert renew(parts_HE, placement, Pace(), whole_HE=wholes_HE) is None
    assert (predicted(wholes_HE, to_held(placement), "balanced") > 0.05) == (last[1][0] > 0)


@pytest.mark.untraced
def test_online_follows_a_drift_and_a_stale_plan_does_not() -> None:
    first, second = drifting()
    everything = join([first, second])
    pace = Pace(layer_updates_per_iter=1, max_moves=6, window=4, decay=0.5)
    stale, online = (
        replay(first.window(0, 6), everything, policy, 4, 20, pace=pace) for policy in ("balanced", "online")
    )
    settled = slice(24 + 6, 48)
    assert stale.imbalance_IL[settled].mean() > 0.15
    assert online.imbalance_IL[settled].mean() < 0.02
    assert online.fetched_I.max() <= 6
    assert stale.fetched_I.sum() == 0


def constant_load(ranks: int, iterations: int, seed: int) -> np.ndarray:
    """128 tokens with 6 choices each an iteration, of 64 experts that are always as popular: [I, W, E]."""
    draw = np.random.default_rng(seed)
    popularity = np.random.default_rng(1).dirichlet(np.full(64, 1.5))
    return draw.multinomial(128 * 6 // ranks, popularity, size=(iterations, ranks)).astype(np.int64)


def step_through(planner: OnlinePlanner, counts_IWE: np.ndarray) -> list[int]:
    """Fetches of every iteration."""
    fetched = []
    for counts_WE in counts_IWE:
        before = planner.placements[0]
        planner.step([counts_WE])
        fetched.append(len(fetches(before, planner.placements[0])))
    return fetched


@pytest.mark.parametrize(("ranks", "slots"), [(4, 68), (8, 68), (8, 72), (16, 80)])
def test_sampling_noise_moves_nothing(ranks: int, slots: int) -> None:
    """A plan made for the load that goes on: from 128 tokens every iteration looks different, and is not."""
    past = constant_load(ranks, 128, 2).sum(1)[:, None]
    history = LoadHistory(counts_ILE=past, layers=(0,))
    for split in ("balanced", "even"):
        placement = plan_history(history, Target(num_ranks=ranks, slots=slots, split=split))[0]
        planner = OnlinePlanner([placement], Pace(split=split))
        assert step_through(planner, constant_load(ranks, 12, 3)) == [0] * 12


@pytest.mark.untraced
def test_a_constant_load_is_met_and_then_left_alone() -> None:
    """8 ranks, from a placement that knows nothing: the fullest rank falls by half and more, and rests."""
    start = plan_layers(np.ones((1, 64)), 8, 72)[0]
    planner = OnlinePlanner([start], Pace())
    fetched = step_through(planner, constant_load(8, 30, 4))
    unseen = constant_load(8, 50, 5).sum(1)
    before, after = (imbalances(unseen, p, "balanced").mean() for p in (start, planner.placements[0]))
    assert after < before / 2
    assert 8 <= sum(fetched) <= 40
    assert sum(fetched[15:]) <= 8


def test_planner_is_the_same_on_every_rank() -> None:
    first, second = drifting()
    placements = plan_layers(first.load(), 4, 20)
    runs = []
    for _ in range(2):
        planner = OnlinePlanner(placements, Pace(layer_updates_per_iter=2))
        for counts_LE in second.counts_ILE[:8]:
            planner.step(counts_LE)
        runs.append(planner.placements)
    assert runs[0] == runs[1] != placements


def test_stability_knows_the_decay() -> None:
    first, second = drifting()
    steady = stability(first)
    assert steady.best_decay == 1.0
    assert steady.correlation_L.min() > 0.9
    jumps = np.stack([h.counts_ILE[i] for i in range(12) for h in (first, second)])
    assert stability(LoadHistory(counts_ILE=jumps, layers=(0, 1, 2))).correlation_L.mean() < 0.5
    table = between([first, second])
    assert table.diagonal() == pytest.approx(1)
    assert table[0, 1] < 0.5
    with pytest.raises(ValueError, match="no neighbour"):
        stability(first.window(0, 1))


def test_what_nobody_chose_says_nothing_of_stability() -> None:
    """Neither a layer without choices, as dense ones are, nor an iteration without, as of an idle server."""
    first, _ = drifting()
    counts_ILE = first.counts_ILE
    idle_ILE = np.insert(counts_ILE, 1, 0, axis=1)
    idle = stability(LoadHistory(counts_ILE=idle_ILE, layers=(0, 1, 2, 3)))
    steady = stability(first)
    assert idle.error_by_decay == steady.error_by_decay
    assert idle.correlation_L.tolist() == steady.correlation_L.tolist()
    table = between([first, LoadHistory(counts_ILE=idle_ILE[:, :3], layers=(0, 1, 2))])
    assert table.diagonal() == pytest.approx(1)
    stops_ILE = np.insert(counts_ILE, len(counts_ILE) // 2, 0, axis=0)
    stops = stability(LoadHistory(counts_ILE=stops_ILE, layers=(0, 1, 2)))
    assert stops.correlation_L.min() > 0.9
    assert stops.error_by_decay[1.0] == pytest.approx(steady.error_by_decay[1.0], rel=0.1)
    nothing = LoadHistory(counts_ILE=0 * counts_ILE, layers=(0, 1, 2))
    with pytest.raises(ValueError, match="in no layer together"):
        between([first, nothing])


def test_balancedness_is_over_ranks() -> None:
    assert balancedness([5, 5, 5, 5]) == 1
    assert balancedness([8, 0]) == 0.5
    assert balancedness([1, 2, 3]) == pytest.approx(2 / 3)
    assert balancedness([0, 0]) == 1


def test_prometheus_text() -> None:
    tally = Tally()
    tally.add(switches=3, bytes_moved=1000)
    text = exposition(tally, {3: [8, 0], 4: [1, 1]}, {3: 0.75})
    assert "imbrex_balancer_switches_total 3\n" in text
    assert 'imbrex_balancedness{layer="3"} 0.5\n' in text
    assert 'imbrex_balancedness{layer="4"} 1\n' in text
    assert 'imbrex_balancedness_predicted{layer="3"} 0.75\n' in text
    for line in text.splitlines():
        assert line.startswith(("# HELP ", "# TYPE ", "imbrex_"))


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"window": 0}, "window is 0; use 1 or more"),
        ({"decay": 0.0}, "decay 0.0"),
        ({"threshold": float("nan")}, "threshold nan"),
        ({"sure": -1.0}, "sure -1"),
        ({"split": "nearest"}, "use balanced or even"),
    ],
)
def test_a_pace_that_makes_no_sense(options: dict, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        Pace(**options)


def test_replay_refuses_other_models() -> None:
    first, _ = drifting()
    other = LoadHistory(counts_ILE=first.counts_ILE[:, :2], layers=(0, 1))
    with pytest.raises(ValueError, match="different layers or experts"):
        replay(first, other, "none", 4, 16)
    with pytest.raises(ValueError, match="different layers or experts"):
        join([first, other])
    with pytest.raises(ValueError, match="no slot"):
        from_slots([[0], [0]], 2)
