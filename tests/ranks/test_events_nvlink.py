"""Events over NVLink without a GPU: gloo ranks, shared memory, kernels by g++. They do without a late rank;
outputs and gradients are serial's, given the mask."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import imbrex
from imbrex.kernels.exchange.failures import ExchangeError
from imbrex.observe import Recorder
from imbrex.overlap import Events
from imbrex.overlap.events import device
from imbrex.overlap.gradients import gradients_of
from tests.emulated import kernel
from tests.ranks.emulated_nvlink import EmulatedNvlink
from tests.ranks.late import Farewells, Sleepy, awake
from tests.ranks.layer_jobs import Case, make_layer, tokens_of
from tests.ranks.pool import Pool, Ranks
from tests.ranks.test_events import LONGEST_S, one_step

pytestmark = pytest.mark.skipif(not kernel.available(), reason="the emulation needs g++")
CONFIG = imbrex.MoEConfig(hidden_size=64, intermediate_size=24, num_experts=8, top_k=3)
CASE = Case(config=CONFIG, tokens=(5, 9, 3, 8), dtype=torch.bfloat16)
SUMS_FP8 = {"codec": {"combine": "fp8", "dispatch_backward": "fp8"}}
WIDE = replace(CASE, config=replace(CONFIG, hidden_size=256), options=SUMS_FP8)
LATE, TAU_S, STEPS = 3, 0.4, 2


def nap(sleep: Callable[[], object], *_: object) -> None:
    """A hook before experts, which would be given what it returns."""
    sleep()


def run_late(
    ranks: Ranks, case: Case, late: str, epsilon: int, with_grad: bool, folder: Path
) -> dict[str, Any]:
    """Some steps, of whom the last rank is late in all but the first, before them, in its experts (`experts`)
    or in a module that takes their place (`module`), until the others have left; each again by serial, given
    its mask."""
    nvlink = EmulatedNvlink(ranks.group, timeout=60.0) if ranks.device == "cpu" else "nvlink"
    torch.manual_seed(0)
    options: dict[str, Any] = case.options | {"transport": nvlink}
    recorder = Recorder(rank=ranks.rank, device=ranks.device)
    schedule = Events(TAU_S if late else math.inf, epsilon)
    patient = options | {"schedule": schedule, "observer": recorder}
    ours: Any = make_layer(replace(case, options=patient), ranks.group, ranks.device)
    torch.manual_seed(0)
    serial = make_layer(replace(case, options=options), ranks.group, ranks.device)
    differ, dropped, inner = [], [], ours.experts
    farewells = Farewells(folder, ranks.rank, ranks.world_size)

    def leave(step: int) -> None:
        if ranks.device != "cpu":
            torch.cuda.synchronize()
        farewells.leave(step)

    for step in range(STEPS):
        x_TD = tokens_of(case, ranks.rank + 10 * step).to(ranks.device)
        is_late = step and ranks.rank == ranks.world_size - 1
        sleep = partial(farewells.all_left, step, LONGEST_S) if is_late else awake
        if late == "before":
            sleep()
        if late == "module":
            ours.experts = Sleepy(inner, sleep)
        hook = inner.register_forward_pre_hook(partial(nap, sleep if late == "experts" else awake))
        mine = one_step(ours, x_TD, None, with_grad, leave=partial(leave, step))
        ours.experts = inner
        hook.remove()
        kept_TK = mine.pop("kept")
        theirs = one_step(serial, x_TD, kept_TK, with_grad)
        differ += [(step, name) for name in theirs if not torch.equal(mine[name], theirs[name])]
        dropped.append(int((~kept_TK).sum()))
    reasons = ours.reasons["schedule"]
    ours.close()
    counters = {name: value for (name, _), value in recorder.take_counters().items()}
    return {"differ": differ, "dropped": dropped, "reasons": reasons, "counters": counters}


@pytest.mark.parametrize("epsilon", [0, 1])
@pytest.mark.parametrize("tensor_ranks", [1, 2])
def test_where_nobody_is_late_the_bits_are_those_of_serial(
    pool: Pool, tmp_path: Path, tensor_ranks: int, epsilon: int
) -> None:
    for with_grad in (False, True):
        case = replace(CASE, tensor_parallel=tensor_ranks)
        for answer in pool.run(4, run_late, case, "", epsilon, with_grad, tmp_path):
            assert answer["differ"] == []
            assert answer["dropped"] == [0] * STEPS
            assert not sum(answer["counters"].get("gave_up", [0]))
            assert ("drops" in answer["counters"]) == bool(epsilon)


@pytest.mark.parametrize(
    ("late", "with_grad", "tensor_ranks"),
    [
        ("before", False, 1),
        ("before", True, 1),
        ("experts", True, 1),
        ("experts", True, 2),
        ("module", True, 1),
    ],
)
def test_a_late_rank_is_done_without_and_its_mask_replays_to_the_bit(
    pool: Pool, tmp_path: Path, late: str, with_grad: bool, tensor_ranks: int
) -> None:
    """Gradients too: also where rank 3 computed rows of homes that had left by then, and where rank 2, whose
    experts it shares, had replied in time."""
    case = replace(CASE, tensor_parallel=tensor_ranks)
    answers = pool.run(4, run_late, case, late, 1, with_grad, tmp_path)
    for rank, answer in enumerate(answers):
        assert answer["differ"] == [], rank
        assert answer["reasons"].endswith("by the GPU's clock")
        assert answer["dropped"][1] > 0 or (late != "before" and rank == LATE), (rank, answer)
        assert answer["counters"]["drops"] == sum(answer["dropped"])
        assert (sum(answer["counters"]["gave_up"]) > 0) == (sum(answer["dropped"]) > 0)


@pytest.mark.parametrize("late", ["", "before", "experts"])
def test_sums_in_fp8_have_the_bits_of_serial(pool: Pool, tmp_path: Path, late: str) -> None:
    """Outputs and all gradients, nobody late, and of the masks that a late rank leaves. With tensor ranks
    where nobody is late."""
    case = replace(WIDE, tensor_parallel=1 if late else 2)
    answers = pool.run(4, run_late, case, late, 1, True, tmp_path)
    for rank, answer in enumerate(answers):
        assert answer["differ"] == [], rank
        assert (sum(answer["dropped"]) > 0) == bool(late) or (late == "experts" and rank == LATE)


def run_wrong(ranks: Ranks, what: str, schedule: Events) -> str:
    """The error of a rank where rank 1's second input is wrong."""
    nvlink = EmulatedNvlink(ranks.group, timeout=20.0)
    layer = make_layer(replace(CASE, options={"transport": nvlink, "schedule": schedule}), ranks.group)
    x_TD = tokens_of(CASE, ranks.rank)
    wrong_TD = {"width": x_TD[:, :-1], "tokens": x_TD.repeat(99, 1)}[what]
    with torch.no_grad():
        layer(x_TD)
        try:
            layer(wrong_TD if ranks.rank == 1 else x_TD)
            layer.check()
        except (ValueError, ExchangeError) as error:
            return str(error)
    return ""


@pytest.mark.parametrize(
    ("what", "sentence"),
    [
        ("width", "x has 2 dimensions and last size 63"),
        ("tokens", "x has 891 tokens; the first call made room"),
    ],
)
def test_a_wrong_input_fails_on_all_ranks(pool: Pool, what: str, sentence: str) -> None:
    sentences = pool.run(4, run_wrong, what, Events(20.0, 1))
    assert sentences[1].startswith(f"dispatch: on rank 1, {sentence}")
    for rank in (0, 2, 3):
        # Whose first call is not over when rank 1 gives up, loses that one.
        assert re.search(r"in events call [12] .*: a peer gave up", sentences[rank])


def test_without_patience_a_wrong_input_is_every_ranks_sentence(pool: Pool) -> None:
    """And more tokens than before are none."""
    told, own, *others = pool.run(4, run_wrong, "width", Events())
    assert own.startswith("dispatch: on rank 1, x has 2 dimensions and last size 63")
    assert {told, *others} == {"dispatch: rank 1 was given tokens that cannot be dispatched"}
    assert pool.run(4, run_wrong, "tokens", Events()) == [""] * 4


def run_refused(ranks: Ranks, schedule: Any, options: dict[str, Any]) -> str:
    nvlink = EmulatedNvlink(ranks.group, timeout=20.0)
    parts = options | {"transport": nvlink, "schedule": schedule}
    case = replace(CASE, config=replace(CONFIG, hidden_size=512), options=parts)
    with torch.no_grad(), pytest.raises(ValueError, match="schedule") as caught:
        make_layer(case, ranks.group)(tokens_of(case, ranks.rank))
    return str(caught.value)


@pytest.mark.parametrize("codec", ["fp8", {"dispatch": "fp8"}, {"combine_backward": "fp8"}])
def test_what_the_kernels_do_not_serve_is_every_ranks_sentence(pool: Pool, codec: Any) -> None:
    for answer in pool.run(2, run_refused, Events(1.0, 1), {"codec": codec}):
        assert "patient events over nvlink move tokens as they are, and sums also as fp8; give an" in answer


def run_in_order(ranks: Ranks, module: bool) -> list[str]:
    """What a backward with patience did: made gradients, and asked what came of its forward."""
    nvlink = EmulatedNvlink(ranks.group, timeout=20.0)
    case = replace(CASE, options={"transport": nvlink, "schedule": Events(10.0, 1)})
    layer: Any = make_layer(case, ranks.group)
    if module:
        layer.experts = Sleepy(layer.experts, awake)
    did: list[str] = []

    def asks(forward: Any) -> bool:
        did.append("asked")
        return False

    def gradients(*inputs: Any) -> Any:
        did.append("gradients")
        return gradients_of(*inputs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(device.DeviceForward, "computed_in_vain", asks)
        patch.setattr(device, "gradients_of", gradients)
        layer(tokens_of(case, ranks.rank)).sum().backward()
    return did


def test_the_device_works_on_while_the_host_asks(pool: Pool) -> None:
    """A module of the user's may do more in its backward than return gradients, so it goes back once."""
    assert pool.run(2, run_in_order, False) == [["gradients", "asked"]] * 2
    assert pool.run(2, run_in_order, True) == [["asked", "gradients"]] * 2


def run_frugal(ranks: Ranks) -> list[bool]:
    """Whether all choices of some calls count, for whose ranks nobody has to wait but for a budget."""
    nvlink = EmulatedNvlink(ranks.group, timeout=20.0)
    parts = {"transport": nvlink, "schedule": Events(0.0, 1, budget=0.01)}
    case = replace(CASE, options=parts)
    layer: Any = make_layer(case, ranks.group)
    whole = []
    with torch.no_grad():
        for _ in range(6):
            layer(tokens_of(case, ranks.rank))
            whole.append(bool(layer.routing.kept_TK.all()))
    return whole


def test_who_has_earned_nothing_yet_waits(pool: Pool) -> None:
    assert pool.run(2, run_frugal) == [[True] * 6] * 2
