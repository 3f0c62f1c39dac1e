"""The conformity suite of schedules, and the profile that `auto` decides by."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import imbrex
from imbrex.contracts import Output
from imbrex.overlap import SCHEDULERS, Auto, Kind, Order, Serial, Task, auto, profiler, tuner
from imbrex.placement import contiguous
from imbrex.schedule.choice import choose, predict
from imbrex.schedule.profile import Profile
from imbrex.testing import ConformityError, check_schedule
from tests.ranks.layer_jobs import Case, coefficients, make_layer, run_layer, tokens_of
from tests.ranks.pool import Pool, RankError, Ranks
from tests.ranks.test_layer import SMALL, relative


def run_check(ranks: Ranks, schedule: Any) -> str:
    try:
        check_schedule(schedule() if isinstance(schedule, type) else schedule, ranks.group)
    except ConformityError as error:
        return str(error)
    return ""


def weights_with_experts(times) -> Order:
    return SCHEDULERS["optsche"]({task: s for task, s in times.items() if task.kind != Kind.weights})


@pytest.mark.parametrize("schedule", [*SCHEDULERS, "serial", "fastermoe", weights_with_experts])
def test_contract(pool: Pool, schedule: Any) -> None:
    assert pool.run(4, run_check, schedule) == [""] * 4


class ForgetsTheAddend(Serial):
    name = "forgets"

    def run(self, x_TD, routing, exchange, experts, addend):
        y_TD = super().run(x_TD, routing, exchange, experts, None).y_TD
        return Output(y_TD=y_TD + (0 if addend is None else 0 * addend()))


class Detaches(Serial):
    name = "detaches"

    def run(self, x_TD, routing, exchange, experts, addend):
        plain = imbrex.Routing(ids_TK=routing.ids_TK, weights_TK=routing.weights_TK.detach())
        return super().run(x_TD, plain, exchange, experts, addend)


def moody(times) -> Order:
    found = SCHEDULERS["optsche"](times)
    first = next(iter(times))
    return found if first.chunk == 0 else Order(compute=found.compute, moves=found.moves[:-1])


def moves_first(times) -> Order:
    found = SCHEDULERS["optsche"](times)
    last = Task(kind=Kind.move_back, chunk=0)
    return Order(compute=found.compute, moves=(last, *(t for t in found.moves if t != last)))


@pytest.mark.parametrize(
    ("schedule", "says"),
    [
        (ForgetsTheAddend, "rank 0: forgets, 7 tokens: outputs differ from those of serial"),
        (Detaches, "rank 0: detaches, 7 tokens: gradients of weights differ"),
        (
            moody,
            "1 chunks: move_back of chunk 0 is missing|2 chunks: .* missing|another order for the same times",
        ),
        (moves_first, "1 chunks: schedule: .*has a cycle"),
        (repr, "comes out instead of an Order"),
    ],
)
def test_a_schedule_that_breaks_the_contract_is_found(pool: Pool, schedule: Any, says: str) -> None:
    found = pool.run(4, run_check, schedule)
    assert len(set(found)) == 1
    assert re.search(says, found[0]), found[0]


def synthetic(compute: float, move: float, start: float) -> Profile:
    """Tasks that take `start` and a share of `compute` or `move` seconds at 1000 tokens."""
    points = {
        kind.name: [(n, start + (move if "move" in kind.name else compute) * n / 1000) for n in (125, 1000)]
        for kind in Kind
        if kind != Kind.weights
    }
    return Profile(tokens=1000, forward=points | {"plan": [(1, 0.0), (8, 0.0)]}, backward=points)


def test_more_chunks_where_starting_is_cheap() -> None:
    assert choose(synthetic(1.0, 1.0, 3.0)).degree == 1
    assert choose(synthetic(1.0, 2.5, 0.001)).degree == 8
    alone = predict(synthetic(1.0, 2.5, 0.0), "sequential", 4)
    assert (alone.forward, alone.backward) == (pytest.approx(10.0), pytest.approx(10.0))
    best = choose(synthetic(1.0, 2.5, 0.0))
    # The processor is busy for 5 seconds and so is the network; the best of 8 chunks is not far above.
    assert 5.0 < best.forward < 6.5


class Told:
    """A layer whose runs take what is told by degree, in turn; the last of it again and again. The order of
    `exact` takes a tenth longer."""

    def __init__(self, *told: dict[int, float]) -> None:
        self.told = list(told)

    def time_whole(self, strategies, repeats: int) -> dict[tuple[str, int], tuple[float, float]]:
        told = self.told.pop(0) if len(self.told) > 1 else self.told[0]
        times = {(name, r): told[r] * (1.1 if name == "exact" else 1.0) for name, r in strategies}
        return {key: (seconds, seconds) for key, seconds in times.items()}


def test_what_looks_fastest_is_run_again() -> None:
    """8 chunks, once too fast, are run again, then 4 are, and 4 it is, with the time of that run."""
    made, degrees = synthetic(1.0, 2.0, 0.1), (1, 2, 4, 8)
    truth = {1: 10.0, 2: 7.0, 4: 6.0, 8: 9.0}
    layer: Any = Told(truth | {8: 5.0, 4: 5.5}, truth)
    corrected = replace(made, whole=profiler._corrections(layer, made, degrees, None, 3))
    found = choose(corrected, degrees)
    assert (found.scheduler, found.degree) == ("optsche", 4)
    assert (found.forward, found.backward) == (pytest.approx(6.0), pytest.approx(6.0))
    # Where no run says anything: as others with so many chunks, else between their numbers.
    ratio = corrected.correction("stage-major", 2)[0]
    of_both = [corrected.whole[name, 2][0] for name in ("optsche", "exact")]
    assert ratio == pytest.approx(sum(of_both) / 2)
    assert corrected.correction("optsche", 16) == corrected.whole["optsche", 8]


def run_slowest(ranks: Ranks, seconds: list[list[float]]) -> float:
    exchange: Any = imbrex.Exchange(contiguous(4, 2), 8, 2, group=ranks.group, transport="alltoall")
    nothing: Any = None
    layer = profiler._Layer(exchange=exchange, experts=nothing, x_TD=nothing, routing=nothing, parameters=())
    return layer.slowest([{(False, "whole"): s} for s in seconds[ranks.rank]])[False, "whole"]


def test_the_slowest_rank_of_every_run_counts(pool: Pool) -> None:
    """Each rank is slow in one run of three: no rank's median shows it, and the layer waits every time."""
    seconds = [[3.0, 1.0, 1.0], [1.0, 3.0, 2.0]]
    assert pool.run(2, run_slowest, seconds) == [pytest.approx(3.0)] * 2


def test_a_profile_is_kept(tmp_path: Path) -> None:
    made = replace(synthetic(1.0, 2.0, 0.1), whole={("stage-major", 2): (1.1, 0.9)})
    made.save(tmp_path / "profile.json")
    again = Profile.load(tmp_path / "profile.json")
    assert again.times([250, 250]) == made.times([250, 250])
    assert again.whole == made.whole
    (tmp_path / "profile.json").write_text('{"tokens": 3}')
    with pytest.raises(ValueError, match=r"profile\.json is not a profile \('forward'\); measure it again"):
        Profile.load(tmp_path / "profile.json")


def run_auto(ranks: Ranks, path: str) -> tuple[Any, ...]:
    case = Case(config=SMALL, tokens=(64,), options={"transport": "alltoall"})
    plain = run_layer(ranks, case)
    schedule = Auto(path, degrees=(1, 2))
    layer = make_layer(
        Case(config=SMALL, tokens=(64,), options={"transport": "alltoall", "schedule": schedule}), ranks.group
    )
    assert layer.reasons["schedule"] == "auto: looks for a kept result, or measures, at its first call"
    x_TD = tokens_of(case, ranks.rank).requires_grad_()
    y_TD = layer(x_TD)
    (y_TD * coefficients(y_TD)).sum().backward()
    assert x_TD.grad is not None
    error = max(relative(y_TD.detach(), plain["y"]), relative(x_TD.grad, plain["x_grad"]))
    for name, parameter in layer.named_parameters():
        if parameter.grad is not None:
            error = max(error, relative(parameter.grad, plain["grads"][name]))
    choice = schedule.decisions[layer.exchange].choice
    reason = layer.reasons["schedule"]
    assert reason.startswith(f"auto: {choice.scheduler}-{choice.degree}, predicted ")
    assert "no fused: 'alltoall' moves rows before their product" in reason
    return error, choice


def test_auto_measures_once_and_every_rank_decides_alike(pool: Pool, tmp_path: Path) -> None:
    path = str(tmp_path / "profile.json")
    first = pool.run(4, run_auto, path)
    stamp = Path(path).stat().st_mtime_ns
    second = pool.run(4, run_auto, path)
    assert Path(path).stat().st_mtime_ns == stamp
    with pytest.raises(RankError, match=r"profile\.json was measured of another layer \(parameters \[\["):
        pool.run(4, run_wider, path)
    with pytest.raises(RankError, match=r"another layer \(ranks 4, here 2\); give another file"):
        pool.run(2, run_wider, path)
    for error, choice in (*first, *second):
        assert error < 1e-5
        assert choice == first[0][1]
        assert choice.forward > 0 < choice.backward


def run_wider(ranks: Ranks, path: str) -> None:
    config = replace(SMALL, intermediate_size=SMALL.intermediate_size + 2)
    case = Case(config=config, options={"transport": "alltoall", "schedule": Auto(path)})
    make_layer(case, ranks.group)(tokens_of(case, ranks.rank))


def run_alike(ranks: Ranks) -> list[int]:
    """Measurements until each of four layers has decided; the first rank has forgotten before the third."""
    counted, before = [], auto.measure

    def counting(*given, **more):
        counted.append(1)
        return before(*given, **more)

    auto.measure, found = counting, []
    tuner._remembered.clear()
    try:
        for number, tokens in enumerate((12, 12, 12, 20)):
            if number == 2 and ranks.rank == 0:
                tuner._remembered.clear()
            options = {"transport": "alltoall", "schedule": Auto(degrees=(1, 3), keep=False)}
            case = Case(config=SMALL, tokens=(tokens,), options=options)
            make_layer(case, ranks.group)(tokens_of(case, ranks.rank))
            found.append(len(counted))
    finally:
        auto.measure = before
    return found


def run_kept_nowhere(ranks: Ranks, path: str) -> None:
    case = Case(config=SMALL, options={"transport": "alltoall", "schedule": Auto(path)})
    make_layer(case, ranks.group)(tokens_of(case, ranks.rank))


def test_a_measurement_that_could_not_be_kept_is_not_made(pool: Pool, tmp_path: Path) -> None:
    with pytest.raises(RankError, match=r"nowhere/times\.json is in no folder; make it, or give another"):
        pool.run(2, run_kept_nowhere, str(tmp_path / "nowhere" / "times.json"))


def test_layers_that_are_alike_are_measured_once(pool: Pool) -> None:
    assert pool.run(2, run_alike) == [[1, 1, 2, 3]] * 2


@pytest.mark.parametrize("inference", [False, True])
def test_a_measurement_leaves_no_gradients(pool: Pool, inference: bool) -> None:
    assert torch.tensor(pool.run(2, run_measurement, inference)).all()


def run_measurement(ranks: Ranks, inference: bool) -> bool:
    case = Case(
        config=SMALL,
        tokens=(16 + inference,),
        options={"transport": "alltoall", "schedule": Auto(degrees=(1, 2))},
    )
    layer = make_layer(case, ranks.group)
    with torch.inference_mode() if inference else torch.no_grad():
        layer(tokens_of(case, ranks.rank))
    return all(p.grad is None for p in layer.parameters())
