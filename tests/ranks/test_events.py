"""Events: the numbers of `serial` to the bit while patience has no end, and of its mask where it ends."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import imbrex
from imbrex.observe import Recorder
from imbrex.overlap.events.budget import WHOLE
from imbrex.overlap.events.seat import FEWEST
from imbrex.placement.sharding import Topology, Work, placement_in
from imbrex.reproduce.dropping import kept_without
from tests.ranks.late import Farewells, Sleepy, awake
from tests.ranks.layer_jobs import Case, coefficients, make_layer, run_layer, tokens_of
from tests.ranks.pool import Pool, Ranks
from tests.ranks.test_layer import SMALL, largest_error


def assert_same_bits(ours: list[dict[str, Any]], theirs: list[dict[str, Any]]) -> None:
    for mine, other in zip(ours, theirs, strict=True):
        for name in ("y", "x_grad"):
            assert torch.equal(mine[name], other[name]), name
        for name, grad in other["grads"].items():
            assert torch.equal(mine["grads"][name], grad), name


@pytest.mark.parametrize("tensor_ranks", [1, 2])
@pytest.mark.parametrize("codec", ["identity", "int8", "zfp2d-12", {"dispatch": "fp8", "combine": "bf16"}])
def test_the_bits_are_those_of_serial(pool: Pool, codec: Any, tensor_ranks: int) -> None:
    """Nobody may be missing, or somebody may and patience has no end."""
    options = {"transport": "alltoall", "codec": codec}
    case = Case(config=SMALL, tensor_parallel=tensor_ranks, options=options)
    theirs = pool.run(4, run_layer, case)
    endless = imbrex.overlap.Events(math.inf, 2)
    schedule = "events" if tensor_ranks == 1 else endless
    ours = pool.run(4, run_layer, Case(**{**_fields(case), "options": options | {"schedule": schedule}}))
    assert_same_bits(ours, theirs)
    if codec == "identity":
        errors = largest_error(case, 4, ours)
        assert max(errors.values()) < 1e-5, errors


def test_experts_where_eq_1_puts_them(pool: Pool) -> None:
    """Unlike many on each rank: in proportion to rates."""
    none = ((0.0,) * 4,) * 4
    topology = Topology(start_DD=none, byte_DD=none, room_D=(4,) * 4, row_s_D=(1.0, 3.0, 1.0, 0.5))
    experts = SMALL.num_experts
    work = Work(num_experts=experts, tokens=8, top_k=2, row_bytes=52, expert_bytes=1 << 10, calls=1)
    placement = placement_in((0, 1, 2, 3), topology, work)
    slots = [list(placement.slots[low:high]) for low, high in pairwise(placement.rank_offsets)]
    assert len(set(map(len, slots))) > 1
    case = Case(config=SMALL, slots=slots, options={"transport": "alltoall"})
    theirs = pool.run(4, run_layer, case)
    ours = pool.run(4, run_layer, replace(case, options=case.options | {"schedule": "events"}))
    assert_same_bits(ours, theirs)
    assert max(largest_error(case, 4, ours).values()) < 1e-5


def _fields(case: Case) -> dict[str, Any]:
    return {name: getattr(case, name) for name in ("config", "tensor_parallel", "tokens", "dtype")}


LATE = 3
"""The rank that is late."""
TAU_S = 0.1
LONGEST_S = 10.0
"""The end of its lateness where others, who had patience for one peer, have spent it on another."""


class Cast(Sleepy):
    """As experts of torch's modules, whose weights are cast under autocast alone."""

    def forward(self, dispatched: Any) -> torch.Tensor:
        assert torch.is_autocast_enabled("cpu")
        return super().forward(dispatched)


def run_late(
    ranks: Ranks, case: Case, where: str, folder: Path, with_grad: bool, cast: bool = False
) -> list[dict[str, Any]]:
    """Three steps of a layer, rank 3 late in all but the first, until the others have left; and each again by
    serial, given its mask."""
    options = {name: part for name, part in case.options.items() if name != "schedule"}
    torch.manual_seed(0)
    ours: Any = make_layer(case, ranks.group)
    serial = make_layer(replace(case, options=options), ranks.group)
    found, farewells = [], Farewells(folder, ranks.rank, ranks.world_size)
    for step in range(3):
        x_TD = tokens_of(case, ranks.rank + 10 * step)
        sleepy = step > 0 and ranks.rank == LATE
        sleep = partial(farewells.all_left, step, LONGEST_S) if sleepy else awake
        if where == "before":
            sleep()
        inner = ours.experts
        if where == "experts":
            ours.experts = (Cast if cast else Sleepy)(inner, sleep)
        mine = one_step(ours, x_TD, None, with_grad, cast, partial(farewells.leave, step))
        ours.experts = inner
        kept = mine.pop("kept")
        # All ranks must have left: serial is a barrier.
        theirs = one_step(serial, x_TD, kept, with_grad, cast)
        same = [torch.equal(mine[name], theirs[name]) for name in mine]
        found.append({"same": all(same), "names": [n for n, s in zip(mine, same, strict=True) if not s]})
        found[-1]["dropped"] = 0 if kept is None else int((~kept).sum())
    return found


def one_step(
    layer: Any,
    x_TD: torch.Tensor,
    kept: Any,
    with_grad: bool,
    cast: bool = False,
    leave: Callable[[], object] = awake,
) -> dict[str, Any]:
    """Outputs of a step, and gradients, those of parameters twice as large by hooks. cast: the forward is
    under autocast. leave: called behind it."""
    layer.zero_grad()
    hooks = [p.register_hook(lambda gradient: 2 * gradient) for p in layer.parameters() if with_grad]
    x_TD = x_TD.clone().requires_grad_(with_grad)
    lower = torch.autocast(x_TD.device.type, dtype=torch.bfloat16, enabled=cast)
    with torch.set_grad_enabled(with_grad), lower:
        y_TD = layer(x_TD, kept_TK=kept)
    leave()
    out = {"y": y_TD.detach(), "kept": layer.routing.kept_TK}
    if with_grad:
        (y_TD * coefficients(y_TD)).sum().backward()
        out["x"] = x_TD.grad
        for name, parameter in layer.named_parameters():
            grad = parameter.grad
            out[name.replace("inner.", "")] = torch.zeros_like(parameter) if grad is None else grad
    for hook in hooks:
        hook.remove()
    if kept is not None:
        out.pop("kept")
    elif out["kept"] is None:
        out["kept"] = torch.ones_like(layer.routing.ids_TK, dtype=torch.bool)
    return out


@pytest.mark.parametrize(
    ("where", "with_grad", "tensor_ranks"),
    [
        ("before", True, 1),
        ("before", False, 1),
        ("experts", True, 1),
        ("experts", False, 1),
        ("experts", True, 2),
    ],
)
def test_a_late_rank_is_dropped_and_the_mask_replays_to_the_bit(
    pool: Pool, tmp_path: Path, where: str, with_grad: bool, tensor_ranks: int
) -> None:
    """Rank 3 comes after its peers have left, or computes after they have: nobody uses what another dropped,
    nor a piece of rank 2 without that of rank 3, and serial, given the masks, has the same outputs and
    gradients to the bit."""
    options = {"transport": "alltoall", "schedule": imbrex.overlap.Events(TAU_S, 1)}
    case = Case(config=SMALL, tensor_parallel=tensor_ranks, tokens=(5, 9, 3, 8), options=options)
    results = pool.run(4, run_late, case, where, tmp_path, with_grad)
    for rank, steps in enumerate(results):
        for step in steps:
            assert step["same"], (rank, step)
        # The first call meets the others, which is a barrier.
        assert sum(step["dropped"] for step in steps[1:]) > 0 or (where == "experts" and rank == LATE)


def run_done_without(ranks: Ranks, folder: Path) -> tuple[torch.Tensor, torch.Tensor]:
    """Choices and mask of a step with gradients, to which rank 3 comes when the others have left."""
    case = Case(config=SMALL, tokens=(6,) * 4, options={"transport": "alltoall"})
    patient = case.options | {"schedule": imbrex.overlap.Events(1.0, 1)}
    layer, farewells = (
        make_layer(replace(case, options=patient), ranks.group),
        Farewells(folder, ranks.rank, 4),
    )
    for step in range(2):
        if step and ranks.rank == LATE:
            farewells.all_left(step, LONGEST_S)
        layer(tokens_of(case, ranks.rank).requires_grad_())
        farewells.leave(step)
    dist.barrier(ranks.group)
    routing = layer.routing
    assert routing is not None
    assert routing.kept_TK is not None
    return routing.ids_TK, routing.kept_TK


def test_what_a_late_rank_leaves_is_what_the_study_of_losses_drops(pool: Pool, tmp_path: Path) -> None:
    """See `imbrex.reproduce.dropping`, which has no ranks and no clock."""
    ids, kept = (torch.cat(each) for each in zip(*pool.run(4, run_done_without, tmp_path), strict=True))
    assert torch.equal(kept, kept_without(LATE, ids, SMALL.num_experts))


def test_rows_in_vain_are_left_out_of_a_backward_under_autocast(pool: Pool, tmp_path: Path) -> None:
    """Experts are computed once more as they were, though the backward is not under autocast, on rows that
    came through a codec."""
    options = {"transport": "alltoall", "codec": "int8", "schedule": imbrex.overlap.Events(TAU_S, 1)}
    case = Case(config=SMALL, tokens=(5, 9, 3, 8), options=options)
    for rank, steps in enumerate(pool.run(4, run_late, case, "experts", tmp_path, True, True)):
        assert all(step["same"] for step in steps), (rank, steps)


def run_counted(ranks: Ranks, folder: Path) -> dict[str, Any]:
    """What a recorder hears of two forwards, rank 3 late in the second until the others have left."""
    recorder = Recorder(rank=ranks.rank)
    options = {"transport": "alltoall", "schedule": imbrex.overlap.Events(TAU_S, 1), "observer": recorder}
    layer: Any = make_layer(Case(config=SMALL, options=options), ranks.group)
    x_TD, farewells = torch.randn(8, SMALL.hidden_size), Farewells(folder, ranks.rank, ranks.world_size)
    with torch.no_grad():
        layer(x_TD)
        dist.barrier(ranks.group)
        recorder.take_counters()
        recorder.end_step(keep=False)
        if ranks.rank == LATE:
            farewells.all_left(0)
        layer(x_TD)
        farewells.leave(0)
    recorder.end_step()
    counters = {name: value for (name, _), value in recorder.take_counters().items()}
    marks = {dict(span.where)["peer"] for span in recorder.spans if span.name == "give_up"}
    dist.barrier(ranks.group)
    return {"kept": layer.routing.kept_TK, "counters": counters, "marks": marks}


def test_what_is_dropped_is_counted_and_marked(pool: Pool, tmp_path: Path) -> None:
    *others, late = pool.run(4, run_counted, tmp_path)
    for result in (*others, late):
        assert result["counters"]["drops"] == int((~result["kept"]).sum()) > 0
    for result in others:
        assert (result["counters"]["gave_up"], result["marks"]) == ([0, 0, 0, 1], {LATE})
    assert late["counters"]["gave_up"] == [1, 1, 1, 0]


def run_usual(ranks: Ranks, tau: str, folder: Path) -> tuple[int, bool]:
    """Choices dropped by a forward in which rank 3 is late, behind some in which it is not; and of that rank,
    whether all others left the forward without it."""
    options = {"transport": "alltoall", "schedule": imbrex.overlap.Events(tau, 1)}
    layer: Any = make_layer(Case(config=SMALL, options=options), ranks.group)
    x_TD = tokens_of(Case(config=SMALL, tokens=(8,)), ranks.rank)
    layer.experts = Sleepy(layer.experts, awake)
    for _ in range(FEWEST + 5):
        layer.experts.sleep = partial(time.sleep, 0.02)
        one_step(layer, x_TD, None, False)
    dist.barrier(ranks.group)
    farewells, left = Farewells(folder, ranks.rank, ranks.world_size), []
    if ranks.rank == LATE:
        layer.experts.sleep = lambda: left.append(farewells.all_left(0))
    kept = one_step(layer, x_TD, None, False, leave=partial(farewells.leave, 0))["kept"]
    dist.barrier(ranks.group)
    return int((~kept).sum()), left == [True]


def test_who_takes_longer_than_usual_calls_is_done_without(pool: Pool, tmp_path: Path) -> None:
    *others, (_, left) = pool.run(4, run_usual, "4 p50", tmp_path)
    assert left
    assert all(dropped > 0 for dropped, _ in others)


BUDGET, BUDGET_CALLS = 0.1, 30


def run_budget(ranks: Ranks, where: str) -> tuple[int, int, int]:
    """Choices dropped, and all, of calls in each of which rank 3 is late; and what is left of the budget."""
    schedule = imbrex.overlap.Events(0.003, 1, budget=BUDGET)
    options = {"transport": "alltoall", "schedule": schedule}
    layer: Any = make_layer(Case(config=SMALL, options=options), ranks.group)
    x_TD, dropped, choices = tokens_of(Case(config=SMALL, tokens=(32,)), ranks.rank), 0, 0
    layer.experts = Sleepy(layer.experts, awake)
    for _ in range(BUDGET_CALLS):
        late = partial(time.sleep, 0.03) if ranks.rank == LATE else awake
        if where == "before":
            late()
        else:
            layer.experts.sleep = late
        kept = one_step(layer, x_TD, None, where == "before")["kept"]
        choices += kept.numel()
        dropped += int((~kept).sum())
        dist.barrier(ranks.group)
    (seat,) = schedule._seats.values()
    while seat.pump(0.2):
        pass  # packets that came too late for the last call
    return dropped, choices, seat.budget.left + sum(seat.budget.owed)


@pytest.mark.parametrize("where", ["before", "experts"])
def test_a_budget_is_spent_and_no_more(pool: Pool, where: str) -> None:
    """What rank 3 earned, too, by those that do without it: each by itself could drop 3/4 of it. What comes
    too late, or is refused, takes nothing with it."""
    dropped, choices, left = (sum(of_ranks) for of_ranks in zip(*pool.run(4, run_budget, where), strict=True))
    assert 0.77 * BUDGET < dropped / choices < BUDGET + 1 / BUDGET_CALLS / 4
    assert left == WHOLE * (BUDGET * choices - dropped)


def _wrong(ranks: Ranks, what: str) -> list[str]:
    """Errors of a rank, of a second call in which rank 1's input is wrong, and of a call that follows."""
    case = Case(config=SMALL, options={"transport": "alltoall", "schedule": "events"})
    layer = make_layer(case, ranks.group)
    x_TD, errors = torch.randn(5, SMALL.hidden_size), []
    kept_TK = None
    calls = [1] if what.endswith("at first") else [0, 1, 0]
    for is_wrong in calls:
        given = x_TD
        if is_wrong and ranks.rank == 1 and what.startswith("width"):
            given = x_TD[:, :-1]
        if is_wrong and ranks.rank == 1 and what.startswith("mask"):
            shape = {"mask": (4, SMALL.top_k), "mask's": (5, SMALL.top_k + 1)}.get(what.split()[0])
            kept_TK = torch.ones(shape or (5, SMALL.top_k), dtype=torch.bool if shape else torch.int64)
            if what.endswith("elsewhere"):
                kept_TK = kept_TK.bool().to("meta")
            elif what.endswith("list"):
                kept_TK = kept_TK.bool().tolist()
            elif what.endswith("sparsely"):
                kept_TK = kept_TK.bool().to_sparse()
        try:
            layer(given, kept_TK=kept_TK)
            errors.append("")
        except ValueError as error:
            errors.append(str(error))
        kept_TK = None
    return errors


@pytest.mark.parametrize(
    "what",
    [
        *("width", "width at first", "mask", "mask at first"),
        *("mask's choices", "masked by ints", "masked by a list", "masked sparsely", "mask: elsewhere"),
    ],
)
def test_one_ranks_wrong_input_is_every_ranks_sentence(pool: Pool, what: str) -> None:
    sentence = {
        "width": "dispatch: on rank 1, x has 2 dimensions and last size 12; give tokens [T, 13]",
        "mask": "dispatch: on rank 1, x has 5 tokens but the routing has 4; route the same tokens that you "
        "dispatch",
        "mask's": f"dispatch: on rank 1, the routing has {SMALL.top_k + 1} choices a token; this exchange "
        f"was made for {SMALL.top_k}",
        "mask:": "dispatch: on rank 1, the mask kept_TK is not on the device of x; move it there with "
        ".to(x.device)",
        "masked": "dispatch: on rank 1, the mask kept_TK is no plain tensor of bools; pass one as recorded "
        "in Routing.kept_TK",
    }[what.split()[0]]
    wanted = [sentence] if what.endswith("at first") else ["", sentence, ""]
    assert pool.run(4, _wrong, what) == [wanted] * 4


def _wrong_everywhere(ranks: Ranks) -> list[str]:
    """Errors of a right call, of one that ranks 0 and 1 get wrong, and of right ones behind it."""
    case = Case(config=SMALL, options={"transport": "alltoall", "schedule": "events"})
    layer = make_layer(case, ranks.group)
    errors = []
    for is_wrong in (False, True, False, False):
        width = SMALL.hidden_size - (is_wrong and ranks.rank < 2)
        try:
            layer(torch.randn(5, width))
            errors.append("")
        except ValueError as error:
            errors.append(str(error).split(", ")[1])
        # What a peer says of a call comes after this rank has left it.
        dist.barrier(ranks.group)
    return errors


def test_what_several_ranks_got_wrong_is_over_with_that_call(pool: Pool) -> None:
    """A peer's word that comes after this rank's own error is no error of the next call."""
    for errors in pool.run(4, _wrong_everywhere):
        assert errors == ["", "x has 2 dimensions and last size 12; give tokens [T", "", ""]


PATIENT: dict[str, Any] = {"tau": 0.1, "epsilon": 1, "every": 1, "budget": 1.0}


def _other_epsilon(rank: int) -> dict[str, Any]:
    return {"epsilon": 1 + rank % 2}


def _other_tau(rank: int) -> dict[str, Any]:
    return {"tau": "p95" if rank == 1 else 0.1}


def _other_every(rank: int) -> dict[str, Any]:
    return {"every": 1 + rank % 2}


def _other_budget(rank: int) -> dict[str, Any]:
    return {"budget": 0.01 if rank == 1 else 0.02}


def _refused(ranks: Ranks, options: dict[str, Any]) -> str:
    options = dict(options)
    differ = options.pop("differ", None)
    if differ is not None:
        options["schedule"] = imbrex.overlap.Events(**PATIENT | differ(ranks.rank))
    with pytest.raises(ValueError, match=r"schedule|disagree") as caught:
        make_layer(Case(config=SMALL, options=options), ranks.group)(torch.randn(3, SMALL.hidden_size))
    return str(caught.value)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"transport": "pipe"}, "schedule: transport 'pipe' sends rows by way of nodes, events straight"),
        ({"transport": "allreduce"}, "schedule: transport 'allreduce' moves no rows that events could wait"),
        ({"schedule": imbrex.overlap.Events(1.0, 4)}, "schedule: epsilon is 4, but a rank has 3 peers"),
        ({"schedule": imbrex.overlap.Events(1.0, 1 << 70)}, f"schedule: epsilon is {1 << 70}, but a rank"),
        *(
            ({"differ": differ}, "MoELayer: ranks disagree about the schedule: rank 1 was given something")
            for differ in (_other_epsilon, _other_tau, _other_every, _other_budget)
        ),
    ],
)
def test_what_cannot_be_is_refused_on_every_rank(pool: Pool, options: dict[str, Any], sentence: str) -> None:
    results = pool.run(4, _refused, {"transport": "alltoall", "schedule": "events"} | options)
    assert all(text.startswith(sentence) for text in results), results


@pytest.mark.parametrize(
    "wrong",
    [
        *({"tau": tau} for tau in (-1.0, float("nan"), "p0", "p100", "soon", True)),
        *({"epsilon": epsilon} for epsilon in (-1, 1.5, True)),
        *({"every": every} for every in (0, 1.5, True)),
        *({"budget": budget} for budget in (0.0, 1e-6, 1.5, float("nan"), "1 %", True)),
    ],
)
def test_bad_patience(wrong: dict[str, Any]) -> None:
    ((name, value),) = wrong.items()
    with pytest.raises(ValueError, match=rf"schedule: {name} is {value!r}; give .*"):
        imbrex.overlap.Events(**PATIENT | wrong)
    text = ", ".join(f"{key}={value}" for key, value in (PATIENT | wrong).items())
    with pytest.raises(ValueError, match=rf"schedule: {name} is .*; give"):
        imbrex.overlap.Events.of(f"events({text})")


SILENT_S = 0.5


def _lost(ranks: Ranks, epsilon: int) -> tuple[str, float]:
    """Rank 3 stays away from the second call on, until all others have given up; after how many seconds."""
    schedule = imbrex.overlap.Events(0.02, epsilon)
    layer = make_layer(
        Case(config=SMALL, options={"transport": "alltoall", "schedule": schedule}), ranks.group
    )
    x_TD, said = torch.randn(5, SMALL.hidden_size), ""
    layer(x_TD)
    # To make the layer takes longer on a busy machine, and so may its first call.
    dist.barrier(ranks.group)
    (seat,) = schedule._seats.values()
    seat.timeout_s = SILENT_S
    began = time.monotonic()
    try:
        while ranks.rank != LATE:
            layer(x_TD)
    except imbrex.transport.RankLostError as error:
        said = str(error)
    took_s = time.monotonic() - began
    dist.barrier(ranks.group)
    return said, took_s


@pytest.mark.parametrize("epsilon", [0, 1])
def test_who_stays_silent_is_lost_however_patient_the_others_are(pool: Pool, epsilon: int) -> None:
    *others, _ = pool.run(4, _lost, epsilon)
    for rank, (text, took_s) in enumerate(others):
        assert took_s < 15
        assert text.startswith(f"rank {rank} lost its peers"), text
        assert "rank 3 was silent for 0.5 s" in text or "left, for lack of rank 3" in text
    assert any("rank 3 was silent for 0.5 s" in text for text, _ in others)
