"""Fused calls in one piece, from a record or step by step, on emulated kernels: the bits of their tasks."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import imbrex
from imbrex.contracts import Dispatched, Roles, RowForm
from imbrex.exchange import fused_call, recorded
from imbrex.kernels.exchange.exchange import NvlinkExchange
from imbrex.kernels.exchange.failures import ExchangeError
from imbrex.kernels.ffn import slopes
from imbrex.kernels.ffn.ffn import ffn
from imbrex.kernels.fused.rows_out import rows_out_once
from imbrex.kernels.gemm.tiling import SHARED
from imbrex.overlap import Fused, Serial
from imbrex.placement import from_slots
from tests.emulated import kernel
from tests.ranks.pool import Pool, Ranks
from tests.ranks.test_recorded import EXPERTS, WIDTH, Layer, a_layer, gradients, inputs_of
from tests.ranks.test_recorded import Own as Serving

pytestmark = pytest.mark.skipif(not kernel.available(), reason="the emulation needs g++")


class Own(Serving):
    """imbrex's experts, which bring rows as well."""

    has_own_forward = False  # type: ignore[assignment]

    def forward(self, dispatched: Dispatched) -> Tensor:
        beside: Any = dispatched.beside
        if dispatched.form is RowForm.UNDER_WAY:
            came = rows_out_once(beside)
            beside = None if came is None else came._replace(leave=dispatched.leave)
        weights, weights_R = (self.gate_up_proj, self.down_proj), dispatched.handle.weights_R
        return ffn(dispatched.rows_RD, *weights, dispatched.counts_e, weights_R=weights_R, beside=beside)


class FusedLayer(Layer):
    """As `Layer`, of a schedule that is called in one piece, or by tasks (`steps`), or serially."""

    strategy: Any = None
    serially = False

    def __call__(self, x_TD: Tensor, routing: imbrex.Routing, *, steps: bool, keep: bool = False) -> Tensor:
        self.patch.setattr(recorded, "on_gpu", lambda x_TD: not steps)
        strategy = Serial() if self.serially and steps else self.strategy
        with torch.set_grad_enabled(keep):
            return strategy.run(x_TD, routing, self.exchange, self.experts, self.addend).y_TD


@contextmanager
def a_fused_layer(
    ranks: Ranks, few: int = 0, kind: str = "", roles: Roles | None = None
) -> Iterator[FusedLayer]:
    """kind: "parts", sums of these few rows go home beside down; "first", others' rows come first; "wide",
    SwiGLU's gradient is a kernel of its own; "steps", nothing is put on record; "exact", rows are as many as
    there are; "serial", serial calls are those to compare with."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tests.ranks.test_recorded.Layer", FusedLayer)
        for file in ("kernels.fused.home", "transport.nvlink", "kernels.exchange.launcher"):
            patch.setattr(f"imbrex.{file}.multiprocessors", lambda device: 2)
        if kind == "parts":
            patch.setattr("imbrex.exchange.nvlink.why_not_sums", lambda *_: None)
        if kind == "first":
            patch.setattr("imbrex.kernels.ffn.products.choose_tiling", lambda *_, **__: SHARED)
            roles = Roles(first=1)
        if kind == "wide":
            patch.setattr(slopes, "FUSED_WIDTH", WIDTH - 1)
        if kind == "steps":
            patch.setattr(recorded, "MOST_BYTES", 0)
        with a_layer(ranks, few, 1 + (kind == "halves")) as layer:
            assert isinstance(layer, FusedLayer)
            layer.exchange.transport.exact_rows = kind == "exact" or None  # type: ignore[attr-defined]
            layer.experts = Own(layer.experts.expert_ids)  # type: ignore[assignment]
            layer.strategy, layer.serially = Fused(roles), kind == "serial"
            layer.exchange.dispatcher.roles = roles or Roles()
            yield layer


def run_again(ranks: Ranks, few: int, kind: str) -> tuple[list[bool], list[int]]:
    """Of four calls without gradients, whether y has the bits of the tasks, which come between, and the
    launches made again so far."""
    same, launches = [], []
    with a_fused_layer(ranks, few, kind) as layer:
        for call in range(4):
            x_TD, routing = inputs_of(ranks.rank, call, 7 + 3 * ranks.rank)
            ours = layer(x_TD, routing, steps=False)
            launches.append(layer.again)
            same.append(torch.equal(ours, layer(x_TD, routing, steps=True)))
        layer.exchange.check()
    return same, launches


@pytest.mark.parametrize(
    ("few", "kind", "recorded"),
    [
        (0, "", 2),
        (0, "serial", 2),
        (0, "parts", 2),
        (0, "first", 2),
        (0, "halves", 2),
        (256, "", 2),
        (0, "steps", 0),
        (0, "exact", 0),
    ],
)
def test_calls_from_a_record_have_the_bits_of_tasks(pool: Pool, few: int, kind: str, recorded: int) -> None:
    for same, launches in pool.run(2, run_again, few, kind):
        assert same == [True] * 4
        assert launches == [recorded * call for call in range(4)]


def run_trained(
    ranks: Ranks, few: int, trained: str, kind: str, roles: Roles | None
) -> tuple[list[list[bool]], int, list[bool]]:
    """Of three calls, whether y and every gradient has the bits of serial steps; launches of the exchange
    from a record; and of the backwards put on record, whether dy comes beside its product."""
    same, came = [], []
    with a_fused_layer(ranks, few, kind, roles) as layer:
        launch = fused_call.launch_back

        def noted(*what: Any) -> None:
            came.append(what[5].staged is not None)
            launch(*what)

        layer.patch.setattr(fused_call, "launch_back", noted)
        layer.serially = True  # tasks go backward once
        for call in range(3):
            inputs = inputs_of(ranks.rank, call, 7 + 3 * ranks.rank)
            pairs = zip(
                *(gradients(layer, inputs, trained, steps=steps) for steps in (False, True)), strict=True
            )
            same.append([a is b or (a is not None and b is not None and torch.equal(a, b)) for a, b in pairs])
        layer.exchange.check()
    return same, layer.again, came


@pytest.mark.parametrize(
    ("few", "trained", "kind", "roles", "again", "came"),
    [
        (0, "all", "", None, 6, [True]),
        (0, "all", "", Roles(dy=0), 6, [False]),
        (0, "all", "", Roles(stage=1, rows=1, sums=1), 6, [True]),
        (256, "all", "", None, 6, [False]),
        (0, "all", "wide", None, 6, [True]),
        (0, "all", "parts", None, 6, [True]),
        (0, "all", "halves", None, 6, [True]),
        (0, "all but down", "", None, 4, []),
        (0, "experts", "", None, 6, [True]),
        (0, "all", "steps", None, 0, []),
        (0, "all", "exact", None, 0, []),
    ],
)
def test_gradients_have_the_bits_of_those_of_serial_steps(
    pool: Pool, few: int, trained: str, kind: str, roles: Roles | None, again: int, came: list[bool]
) -> None:
    """The second backward of a call is made step by step."""
    for same, launches, kernels in pool.run(2, run_trained, few, trained, kind, roles):
        assert same == [[True] * 9] * 3
        assert launches == again
        assert kernels == came * 2


def run_differently(ranks: Ranks) -> tuple[list[bool], int, str]:
    """Rank 1 takes tasks where rank 0 makes its records and where it has them: whether y and its gradients
    have the bits of serial steps; launches from a record. Then rank 1's input is wrong, and all is well."""
    same, said = [], ""
    with a_fused_layer(ranks) as layer:
        for call, apart in enumerate((True, False, True, False)):
            x_TD, routing = inputs_of(ranks.rank, call, 8)
            pair = []
            for strategy in (layer.strategy, Serial()):
                steps = strategy is not layer.strategy or (apart and ranks.rank == 1)
                layer.patch.setattr(recorded, "on_gpu", lambda x_TD, steps=steps: not steps)
                leaf = x_TD.clone().requires_grad_()
                y_TD = strategy.run(leaf, routing, layer.exchange, layer.experts, None).y_TD
                y_TD.float().square().sum().backward()
                pair.append([y_TD, leaf.grad, layer.experts.down_proj.grad])
                layer.experts.zero_grad()
            same += [torch.equal(a, b) for a, b in zip(*pair, strict=True)]
        again, (x_TD, routing) = layer.again, inputs_of(ranks.rank, 0, 8)
        for wrong in (ranks.rank == 1, False):
            try:
                layer(x_TD.float() if wrong else x_TD, routing, steps=False)
            except ValueError as error:
                said = str(error)
        layer.exchange.check()
    return same, again, said


def test_ranks_may_differ_and_hear_of_each_other(pool: Pool) -> None:
    (same, again, said), (others, one, own) = pool.run(2, run_differently)
    assert same == others == [True] * 12
    assert again > one > 0
    assert "rank 1 was given tokens that cannot be dispatched" in said
    assert "float32" in own


def run_moved(ranks: Ranks) -> tuple[list[bool], list[int]]:
    """Of four calls, behind the second of which experts move, between its forward and its backward: whether y
    and its gradients have the bits of serial steps, and the launches from a record so far."""
    same, launches = [], []
    with a_fused_layer(ranks) as layer:
        for call in range(4):
            x_TD, routing = inputs_of(ranks.rank, call, 8)
            pair, experts = [], layer.experts
            for steps in (True, False):
                layer.serially, leaf = steps, x_TD.clone().requires_grad_()
                y_TD = layer(leaf, routing, steps=steps, keep=True)
                if call == 1 and not steps:
                    slots = [[2, 3], [0, 1]]
                    layer.exchange.relocate(from_slots(slots, EXPERTS))
                    layer.experts = Own(tuple(slots[ranks.rank]))  # type: ignore[assignment]
                y_TD.float().square().sum().backward()
                pair.append([y_TD, leaf.grad, experts.gate_up_proj.grad])
                experts.zero_grad()
            same += [torch.equal(a, b) for a, b in zip(*pair, strict=True)]
            launches.append(layer.again)
    return same, launches


def test_a_record_holds_until_experts_move(pool: Pool) -> None:
    """A backward behind that takes the places of its forward: the record of backwards is made anew."""
    for same, launches in pool.run(2, run_moved):
        assert same == [True] * 12
        assert launches == [0, 2, 2, 4]


def run_kept_elsewhere(ranks: Ranks) -> list[bool]:
    """Of two calls whose forward is made again in the backward, whether gradients have the bits of a plain
    call."""
    same: list[bool] = []
    with a_fused_layer(ranks) as layer:
        x_TD, routing = inputs_of(ranks.rank, 0, 8)

        def forward(x_TD: Tensor) -> Tensor:
            return layer(x_TD, routing, steps=False, keep=True)

        def again(x_TD: Tensor) -> Tensor:
            return checkpoint(forward, x_TD, use_reentrant=False)  # type: ignore[return-value]

        for _ in range(2):
            found = []
            for call in (forward, again):
                leaf = x_TD.clone().requires_grad_()
                call(leaf).float().square().sum().backward()
                found.append([leaf.grad, *(p.grad for p in layer.experts.parameters())])
                layer.experts.zero_grad()
            same += [torch.equal(*pair) for pair in zip(*found, strict=True)]
    return same


def test_a_forward_may_be_made_again_in_its_backward(pool: Pool) -> None:
    """By tasks, which take such a forward apart from rows that are under way."""
    assert pool.run(2, run_kept_elsewhere) == [[True] * 6] * 2


def run_left(ranks: Ranks) -> bool:
    """Whether an exchange goes with its last reference, before Python looks for circles."""
    gc.disable()
    try:
        with a_fused_layer(ranks) as layer:
            x_TD, routing = inputs_of(ranks.rank, 0, 8)
            layer(x_TD.requires_grad_(), routing, steps=False, keep=True).float().sum().backward()
            dispatcher = weakref.ref(layer.exchange.dispatcher)
            del layer.exchange
            return dispatcher() is None
    finally:
        gc.enable()


def test_a_record_holds_no_exchange(pool: Pool) -> None:
    assert pool.run(2, run_left) == [True, True]


class LeftError(Exception):
    """A rank makes no more launches."""


def run_left_alone(ranks: Ranks, serial: bool, last: int) -> tuple[bool, str]:
    """Of a rank whose peer leaves a step from a record before its launch `last`, whether what it got is NaN,
    y or the gradient of x, and what it is told, by the next launch or by `check`. Two launches are a
    forward's, two a backward's."""
    results: list[Tensor] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("IMBREX_TIMEOUT_S", "2")
        with a_fused_layer(ranks) as layer:
            layer.strategy = Serial() if serial else layer.strategy
            inputs = inputs_of(ranks.rank, 0, 8)
            for _ in range(2):
                gradients(layer, inputs, "all", steps=False)
            begun, launch = layer.again, NvlinkExchange.launch_again

            def leave(kernels: NvlinkExchange, *what: Any) -> None:
                if layer.again - begun == last - 1 and ranks.rank == 1:
                    raise LeftError
                launch(kernels, *what)

            layer.patch.setattr(NvlinkExchange, "launch_again", leave)
            x_TD, weights_TK = (t.clone().requires_grad_() for t in (inputs[0], inputs[1].weights_TK))
            routing = imbrex.Routing(ids_TK=inputs[1].ids_TK, weights_TK=weights_TK)
            try:
                y_TD = layer(x_TD, routing, steps=False, keep=True)
                if last > 2:
                    wanted = x_TD, weights_TK, layer.experts.gate_up_proj, layer.experts.down_proj
                    results.append(torch.autograd.grad(y_TD.float().square().sum(), wanted)[0])
                else:
                    results.append(y_TD)
                layer.exchange.check()
            except ExchangeError as error:
                return all(bool(result.isnan().all()) for result in results), str(error)
            except LeftError:
                return True, ""
            return False, f"{layer.again - begun} launches, and no failure was told"


@pytest.mark.parametrize(("serial", "last"), [(False, 1), (False, 2), (False, 4), (True, 4)])
def test_a_rank_lost_in_a_step_from_a_record_leaves_no_numbers(pool: Pool, serial: bool, last: int) -> None:
    (no_numbers, said), _ = pool.run(2, run_left_alone, serial, last)
    assert no_numbers, said
    assert "timed out, waiting for" in said
