"""What a layer's reasons say of `fused` and `events`, whose kernels need not serve every step."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.nn.utils.parametrize import register_parametrization

from imbrex.contracts import Roles, RowForm
from imbrex.experts.experts import Experts
from imbrex.overlap import Events, Fused
from tests.emulated import kernel
from tests.ranks.pool import Pool, Ranks
from tests.ranks.test_fused import WIDTH, Kernels, an_exchange, inputs_of

ALL_BESIDE = (
    "asked for: rows come beside gate and up, dx goes home beside the weights' gradients, "
    "dy comes beside the gradient through down; "
)
NOT_IN_GRAPHS = "; serially in a compiled graph (these experts are not imbrex's own)"


def run_reasons(ranks: Ranks) -> dict[str, list[str]]:
    """What `fused` and `events` say, before and after a first call: of experts that bring their rows, and of
    those that do not."""
    said: dict[str, list[str]] = {}
    with an_exchange(ranks) as (exchange, _):
        for forms in (Kernels.forms, (RowForm.ROWS,)):
            experts = Kernels(ranks.rank, train_down=True)
            experts.forms = forms  # pyright: ignore[reportAttributeAccessIssue]
            for strategy in (Fused(), Events()):
                before = strategy.reason(exchange, experts)
                strategy.run(*inputs_of(ranks.rank, 9), exchange, experts, None)
                after = strategy.reason(exchange, experts)
                said[f"{strategy.name} {len(forms)}"] = [before, after]
    return said


@pytest.mark.skipif(not kernel.available(), reason="the emulation needs g++")
def test_the_reason_says_what_runs_before_a_first_call(pool: Pool) -> None:
    for said in pool.run(2, run_reasons):
        for name, reasons in said.items():
            for reason in reasons:
                what = reason.removeprefix("asked for; nobody may be missing, so as fused: ")
                if name.endswith("1"):
                    assert what.startswith("runs serially: these experts cannot bring their rows")
                else:
                    assert what.removeprefix("asked for: ").startswith(ALL_BESIDE.removeprefix("asked for: "))
                    assert what.endswith(NOT_IN_GRAPHS)


@pytest.mark.parametrize(
    ("width", "change", "said"),
    [
        (64, {}, None),
        (60, {}, "runs serially: "),
        (64, {"implementation": "grouped"}, "runs serially: "),
        (64, {"implementation": "kernels-fp8"}, "runs serially: "),
        (72, {}, "(F=72 is no multiple of 64)"),
        (72, {}, "behind the weights' gradients (D=256 or F=72 is no multiple of 64)"),
        (64, {"forward": print}, "runs serially: "),
        (64, {"_forward_hooks": {0: print}}, "before its product (a hook or another forward may read the "),
        (64, {"_forward_hooks": {0: print}}, "; serially in a compiled graph (a hook or another forward "),
        (64, {"_backward_pre_hooks": {0: print}}, "before its product (a hook or another forward may read "),
        (
            64,
            {"_forward_pre_hooks": {0: print}},
            "rows come before gate and up (a hook may read them), dx goes",
        ),
        (64, {"trained": False}, "behind the weights' gradients (not both weights are trained)"),
        (64, {"parametrized": True}, "behind the weights' gradients (a weight is computed from parameters)"),
        (64, {"gradient_sums": ()}, "; serially in a compiled graph (a graph may not add to gradient_sums "),
    ],
)
def test_the_reason_says_which_steps_are_not_fused(
    width: int, change: dict[str, Any], said: str | None
) -> None:
    """As docs/fused.md has it, of imbrex's own experts."""
    experts = Experts((0, 1), WIDTH, width, dtype=torch.bfloat16)
    experts.implementation = "kernels"
    for name, value in change.items():
        if name == "trained":
            experts.down_proj.requires_grad = value
        elif name == "parametrized":
            register_parametrization(experts, "down_proj", torch.nn.Identity())
        else:
            setattr(experts, name, value)
    dispatcher = SimpleNamespace(roles=Roles(), why_not_form=lambda form: None)
    exchange: Any = type("OverNvlink", (), {"dispatcher": dispatcher})()
    reason = Fused().reason(exchange, experts)
    assert said in reason if said else reason.startswith(ALL_BESIDE) and "compiled" not in reason
    assert ", rows brought by the first 7 blocks" in Fused(Roles(rows=7)).describe(exchange, experts)
