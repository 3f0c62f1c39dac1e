"""schedule='fused' on emulated kernels: the bits of serial, and what it says of itself."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import imbrex
from imbrex.contracts import Placement, Roles, RowForm, Strategy
from imbrex.experts.experts import Experts
from imbrex.kernels.exchange.exchange import NvlinkExchange
from imbrex.kernels.ffn.ffn import ffn
from imbrex.kernels.fused import down_home, home, others_first
from imbrex.kernels.fused.rows_out import bring_rows, rows_out, rows_out_once
from imbrex.kernels.gemm.gemm import Tiling
from imbrex.kernels.gemm.tiling import SHARED, choose_tiling
from imbrex.overlap import Auto, Fused, Serial, tuner
from imbrex.placement import contiguous
from imbrex.schedule.choice import Choice
from imbrex.schedule.profile import Profile
from imbrex.schedule.tasks import tasks
from tests.emulated import kernel
from tests.emulated.gemm import emulate
from tests.emulated.home import loader
from tests.poison import real_empty
from tests.ranks.emulated_nvlink import EmulatedNvlink
from tests.ranks.layer_jobs import coefficients
from tests.ranks.pool import Pool, Ranks

pytestmark = pytest.mark.skipif(not kernel.available(), reason="the emulation needs g++")
EXPERTS, WIDTH, INNER, CHOICES = 4, 256, 64, 2
SMS = (2,)
"""Multiprocessors of the ranks."""


class Own(Experts):
    """imbrex's experts by their kernels, on CPUs."""

    has_own_forward = False  # type: ignore[assignment]

    def __init__(self, rank: int, *, train_down: bool) -> None:
        super().__init__((2 * rank, 2 * rank + 1), WIDTH, INNER, seed=3, dtype=torch.bfloat16)
        self.implementation, self.applies_weights = "kernels", True
        self.down_proj.requires_grad_(train_down)

    def forward(self, dispatched: imbrex.Dispatched) -> Tensor:
        weights = self.gate_up_proj, self.down_proj
        return ffn(dispatched.rows_RD, *weights, dispatched.counts_e, weights_R=dispatched.handle.weights_R)


class Kernels(torch.nn.Module):
    """Experts of imbrex's kernels; down's weight may be trained or not."""

    applies_weights, forms = False, (RowForm.ROWS, RowForm.UNDER_WAY)
    brought, leaves = 0, True

    def __init__(self, rank: int, *, train_down: bool) -> None:
        super().__init__()
        make = torch.Generator().manual_seed(rank)
        shapes = (EXPERTS // 2, 2 * INNER, WIDTH), (EXPERTS // 2, WIDTH, INNER)
        gate_up, down = (torch.randn(shape, generator=make).bfloat16() / 8 for shape in shapes)
        self.gate_up = torch.nn.Parameter(gate_up)
        self.down = torch.nn.Parameter(down, requires_grad=train_down)

    def forward(self, dispatched: imbrex.Dispatched) -> Tensor:
        self.brought += dispatched.form is RowForm.UNDER_WAY
        beside = None if dispatched.form is RowForm.ROWS else rows_out_once(dispatched.beside)
        if beside is not None and self.leaves:
            beside = beside._replace(leave=dispatched.leave)
        weights_R = dispatched.handle.weights_R if self.applies_weights else None
        more = {"weights_R": weights_R, "beside": beside}
        return ffn(dispatched.rows_RD, self.gate_up, self.down, dispatched.counts_e, **more)


class Weighing(Kernels):
    """As imbrex's own, these weigh their rows. Where they leave nothing, somebody may read the gradient of
    the result."""

    applies_weights = True

    def forward(self, dispatched: imbrex.Dispatched) -> Tensor:
        y_RD = super().forward(dispatched)
        if not self.leaves and y_RD.requires_grad:
            y_RD.register_hook(lambda gradient: gradient.clone())
        return y_RD


@contextmanager
def emulating(ranks: Ranks) -> Iterator[tuple[EmulatedNvlink, list[int]]]:
    """Kernels on CPUs, on two blocks; and a list of the launches that brought dx home beside gradients."""
    launches = []

    def launch(*args, **options):
        launches.append(1)
        return home.home_beside_gradients(*args, **options)

    with pytest.MonkeyPatch.context() as patch:
        emulate(patch, blocks=2)
        sms = SMS[ranks.rank % len(SMS)]
        patch.setattr(home, "multiprocessors", lambda device: sms)
        for file in ("transport.nvlink", "kernels.exchange.launcher"):
            patch.setattr(f"imbrex.{file}.multiprocessors", lambda device: sms)
        patch.setattr("imbrex.exchange.nvlink.home_beside_gradients", launch)
        # So few tokens would come in one kernel.
        patch.setattr("imbrex.exchange.nvlink_fit.FEW_TOKENS", 0)
        nvlink = EmulatedNvlink(ranks.group)
        nvlink.load = loader()  # pyright: ignore[reportAttributeAccessIssue]
        yield nvlink, launches


@contextmanager
def an_exchange(
    ranks: Ranks, placement: Placement | None = None, split: str = "even", **codec: str
) -> Iterator[tuple[imbrex.Exchange, list[int]]]:
    """Over emulated kernels, and the launches that `emulating` notes."""
    with emulating(ranks) as (nvlink, launches):
        exchange = imbrex.Exchange(
            *(placement or contiguous(EXPERTS, ranks.world_size), WIDTH, CHOICES),
            group=ranks.group,
            transport=nvlink,
            dtype=torch.bfloat16,
            codec=codec,
            split=split,
        )
        yield exchange, launches


def inputs_of(rank: int, tokens: int) -> tuple[Tensor, imbrex.Routing]:
    make = torch.Generator().manual_seed(7 + rank)
    ids_TK = torch.rand(tokens, EXPERTS, generator=make).topk(CHOICES).indices
    ids_TK[::5, 1] = -1
    weights_TK = torch.rand(tokens, CHOICES, generator=make).requires_grad_()
    x_TD = torch.randn(tokens, WIDTH, generator=make).bfloat16().requires_grad_()
    return x_TD, imbrex.Routing(ids_TK=ids_TK, weights_TK=weights_TK)


def run_both(
    ranks: Ranks,
    codec: str,
    train_down: bool,
    tokens: int,
    roles: Roles | None = None,
    combine: str = "identity",
) -> tuple[list[bool], int, int]:
    """Whether y and all gradients are those of serial; how many launches did both ways home; how many calls
    brought their own rows."""
    brought = 0
    with an_exchange(ranks, dispatch_backward=codec, combine=combine) as (exchange, launches):
        answers = []
        for strategy in (Serial(), Fused(roles)):
            x_TD, routing = inputs_of(ranks.rank, 31 if ranks.rank else tokens)
            experts = Kernels(ranks.rank, train_down=train_down)
            experts.gate_up.register_hook(lambda gradient: 2 * gradient)

            def addend(like: Tensor = x_TD) -> Tensor:
                return 0.5 * like

            with pytest.MonkeyPatch.context() as patch:
                if isinstance(strategy, Fused):  # who staged the rows has made their plan
                    patch.setattr("imbrex.kernels.ffn.ffn.plan_groups", None)
                y_TD = strategy.run(x_TD, routing, exchange, experts, addend).y_TD
                with torch.no_grad():
                    again_TD = strategy.run(x_TD, routing, exchange, experts, addend).y_TD
            (y_TD.float() * coefficients(y_TD)).sum().backward()
            grads = [leaf.grad for leaf in (x_TD, routing.weights_TK, experts.gate_up, experts.down)]
            answers.append([y_TD, again_TD, *(grad for grad in grads if grad is not None)])
            brought += experts.brought
        exchange.check()
    return [torch.equal(a, b) for a, b in zip(*answers, strict=True)], len(launches), brought


@pytest.mark.parametrize(
    ("codec", "train_down", "tokens", "launches"),
    [("identity", True, 40, 1), ("identity", False, 40, 0), ("fp8", True, 40, 1), ("identity", True, 0, 1)],
)
def test_bits_are_those_of_serial(
    pool: Pool, codec: str, train_down: bool, tokens: int, launches: int
) -> None:
    for same, launched, brought in pool.run(2, run_both, codec, train_down, tokens):
        assert same == [True] * (5 + train_down)
        assert launched == launches
        assert brought == 2


def run_fp8(ranks: Ranks, codec: dict[str, str], leaving: int) -> tuple[list[bool], bool, list[str]]:
    """`run_dy` where rows, dy or dx cross in fp8; whether experts brought rows; and how dy came."""
    came: list[str] = []

    def note(name: str, function: Any) -> Any:
        return lambda *args, **options: came.append(name) or function(*args, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(f"{__name__}.WIDTH", 512)  # which that codec's kernels take
        patch.setattr(Weighing, "brought", 0)
        patch.setattr(Weighing, "leaves", ranks.rank < leaving)
        patch.setattr(NvlinkExchange, "stage_again", note("staged", NvlinkExchange.stage_again))
        patch.setattr("imbrex.exchange.nvlink.bring_rows", note("before", bring_rows))
        with an_exchange(ranks, None, "even", **codec) as (exchange, launches):
            answers, brought = [], 0
            for strategy in (Serial(), Fused()):
                x_TD, routing = inputs_of(ranks.rank, 31 + 9 * ranks.rank)
                experts = Weighing(ranks.rank, train_down=True)
                y_TD = strategy.run(x_TD, routing, exchange, experts, None).y_TD
                loss = (y_TD.float() * coefficients(y_TD)).sum()
                leaves = [x_TD, routing.weights_TK, *experts.parameters()]
                answers.append([y_TD, *torch.autograd.grad(loss, leaves)])
                brought = experts.brought
            exchange.check()
        came += ["home"] * len(launches)
    return [torch.equal(a, b) for a, b in zip(*answers, strict=True)], bool(brought), came


@pytest.mark.parametrize(
    ("codec", "leaving", "came"),
    [
        ({"dispatch": "fp8"}, 2, ["staged", "home"]),
        ({"combine_backward": "fp8"}, 1, ["staged", "home"]),
        ({"dispatch": "fp8", "combine_backward": "fp8", "dispatch_backward": "fp8"}, 2, ["staged", "home"]),
    ],
)
def test_rows_in_fp8_are_brought_with_the_bits_of_serial(
    pool: Pool, codec: dict[str, str], leaving: int, came: list[str]
) -> None:
    """Rank 1 may have its gradient read by somebody else: it then brings dy before the product."""
    for rank, (same, brought, how) in enumerate(pool.run(2, run_fp8, codec, leaving)):
        assert same == [True] * 5
        assert brought
        assert how == ([came[0], "before", *came[1:]] if rank >= leaving else came)


def run_dy(ranks: Ranks, train_down: bool, tokens: int, wide: bool, leaving: int) -> tuple[list[bool], int]:
    """Whether y and all gradients are those of serial, and how often dy came beside a product.

    wide: as of rows whose gradient of SwiGLU is a kernel of its own. leaving: ranks whose experts leave their
    last product.
    """
    times = []

    def stage_again(*args, **options):
        times.append(1)
        return staging(*args, **options)

    staging = NvlinkExchange.stage_again
    with an_exchange(ranks) as (exchange, _), pytest.MonkeyPatch.context() as patch:
        patch.setattr(NvlinkExchange, "stage_again", stage_again)
        patch.setattr(Weighing, "leaves", ranks.rank < leaving)
        if wide:
            patch.setattr("imbrex.kernels.ffn.slopes.FUSED_WIDTH", 0)
        answers = []
        for strategy in (Serial(), Fused()):
            x_TD, routing = inputs_of(ranks.rank, 31 if ranks.rank else tokens)
            experts = Weighing(ranks.rank, train_down=train_down)
            leaves = [x_TD, routing.weights_TK, *(p for p in experts.parameters() if p.requires_grad)]
            y_TD = strategy.run(x_TD, routing, exchange, experts, None).y_TD
            loss = (y_TD.float() * coefficients(y_TD)).sum()
            answers.append([y_TD, *torch.autograd.grad(loss, leaves)])
        exchange.check()
    return [torch.equal(a, b) for a, b in zip(*answers, strict=True)], len(times)


@pytest.mark.parametrize(
    ("train_down", "tokens", "wide", "leaving"),
    [(True, 40, False, 2), (True, 0, True, 2), (False, 40, False, 2), (True, 40, False, 1)],
)
def test_dy_comes_beside_the_gradient_through_down(
    pool: Pool, train_down: bool, tokens: int, wide: bool, leaving: int
) -> None:
    """But on a rank where somebody else reads it: that one pulls, and its peer does not."""
    results = pool.run(2, run_dy, train_down, tokens, wide, leaving)
    for rank, (same, times) in enumerate(results):
        assert same == [True] * (4 + train_down)
        assert times == (rank < leaving)


def run_compiled(
    ranks: Ranks, name: str, train_down: bool, train: bool, sums: bool
) -> tuple[list[bool], int, int, int]:
    """As `run_both`, for a whole graph of fused, and serial outside.

    sums: so few tokens' go home beside down, too; the last number is of launches that did.
    """
    brought, home_beside_down = [], []

    def bring(*staged):
        brought.append(1)
        return rows_out(*staged)

    def launch(*args, **options):
        home_beside_down.append(1)
        return down_home.down_and_sums(*args, **options)

    with an_exchange(ranks) as (exchange, launches), real_empty(), pytest.MonkeyPatch.context() as patch:
        patch.setattr("imbrex.exchange.fused_call.rows_out", bring)
        if sums:
            patch.setattr("imbrex.exchange.nvlink.why_not_sums", lambda *_: None)
            patch.setattr("imbrex.exchange.nvlink.down_and_sums", launch)
        torch.compiler.reset()
        experts, answers = Own(ranks.rank, train_down=train_down), []
        fused = Fused() if name == "fused" else Auto()
        if isinstance(fused, Auto):  # as a call outside leaves it that has taken fused
            fused.fuses_in_graphs = True

        def call(strategy: Strategy, x_TD: Tensor, ids_TK: Tensor, weights_TK: Tensor) -> Tensor:
            routing = imbrex.Routing(ids_TK=ids_TK, weights_TK=weights_TK)
            return strategy.run(x_TD, routing, exchange, experts, lambda: 0.5 * x_TD).y_TD

        compiled = torch.compile(call, fullgraph=True, backend="aot_eager", dynamic=True)
        for run, strategy in ((call, Serial()), (compiled, fused)):
            x_TD, routing = inputs_of(ranks.rank, 31 + 9 * ranks.rank)
            with torch.set_grad_enabled(train):
                y_TD = run(strategy, x_TD, routing.ids_TK, routing.weights_TK)
            grads: list[Tensor] = []
            if train:
                leaves = [x_TD, routing.weights_TK, *(p for p in experts.parameters() if p.requires_grad)]
                grads += torch.autograd.grad((y_TD.float() * coefficients(y_TD)).sum(), leaves)
            answers.append([y_TD, *grads])
        exchange.check()
    same = [torch.equal(a, b) for a, b in zip(*answers, strict=True)]
    return same, len(launches), len(brought), len(home_beside_down)


@pytest.mark.untraced
@pytest.mark.parametrize(
    ("name", "train_down", "train", "sums"),
    [
        ("fused", True, True, True),
        ("fused", False, True, False),
        ("fused", True, False, False),
        ("auto", True, True, False),
    ],
)
def test_a_compiled_graph_runs_fused(
    pool: Pool, name: str, train_down: bool, train: bool, sums: bool
) -> None:
    for same, launched, brought, summed in pool.run(2, run_compiled, name, train_down, train, sums):
        assert same == [True] * (4 + train_down if train else 1)
        assert summed == sums
        assert launched == (train_down and train)
        assert brought == 1 + train  # x, and dy


def run_sums(ranks: Ranks, train: bool, tokens: int, leaving: int) -> tuple[list[bool], int]:
    """`run_both` where so few tokens' sums go home beside down, too, and how many launches did.

    leaving: ranks whose experts leave their last product.
    """
    sums = []

    def launch(*args, **options):
        sums.append(1)
        return down_home.down_and_sums(*args, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("imbrex.exchange.nvlink.why_not_sums", lambda *_: None)
        patch.setattr("imbrex.exchange.nvlink.down_and_sums", launch)
        patch.setattr(Kernels, "leaves", ranks.rank < leaving)
        same, _, _ = run_both(ranks, "identity", train, tokens)
    return same, len(sums)


@pytest.mark.parametrize(("train", "tokens", "leaving"), [(True, 40, 2), (False, 0, 2), (True, 40, 1)])
def test_sums_go_home_beside_down(pool: Pool, train: bool, tokens: int, leaving: int) -> None:
    """Also where one rank's experts leave nothing: their peers' flags are those of pieces all the same."""
    for rank, (same, launched) in enumerate(pool.run(2, run_sums, train, tokens, leaving)):
        assert same == [True] * (5 + train)
        assert launched == (2 if rank < leaving else 0)


def run_unequal(ranks: Ranks) -> tuple[list[bool], int]:
    """`run_sums` of ranks whose GPUs have unequal numbers of multiprocessors."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(f"{__name__}.SMS", (3, 1))
        return run_sums(ranks, True, 40, 2)


def test_ranks_of_unequal_gpus_agree_on_blocks(pool: Pool) -> None:
    """A routing waits for as many blocks of every rank as it has itself: one that had more waited until the
    time-out."""
    for same, launched in pool.run(2, run_unequal):
        assert same == [True] * 6
        assert launched == 2


def run_first(ranks: Ranks, train: bool, tokens: int, leaving: int, combine: str) -> tuple[list[bool], int]:
    """`run_both` with others' rows first, and how many launches that were.

    leaving: ranks whose experts leave their last product.
    """
    launched = []

    def launch(*args, **options):
        launched.append(options["first"])
        return others_first.others_first(*args, **options, blocks=2)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("imbrex.exchange.nvlink.others_first", launch)
        patch.setattr("imbrex.kernels.ffn.products.choose_tiling", lambda *_, **__: SHARED)
        patch.setattr(Kernels, "leaves", ranks.rank < leaving)
        patch.setattr(f"{__name__}.WIDTH", 512)  # which that codec's kernels take
        same, _, _ = run_both(ranks, "identity", train, tokens, Roles(first=1), combine)
    return same, len(launched)


@pytest.mark.parametrize(
    ("train", "tokens", "leaving", "combine"),
    [(True, 40, 2, "identity"), (False, 0, 2, "identity"), (True, 40, 1, "identity"), (True, 40, 2, "fp8")],
)
def test_others_rows_come_first(pool: Pool, train: bool, tokens: int, leaving: int, combine: str) -> None:
    """Also where one rank's experts leave nothing. Sums that cross in fp8 are behind."""
    for rank, (same, launched) in enumerate(pool.run(2, run_first, train, tokens, leaving, combine)):
        assert same == [True] * (5 + train)
        assert launched == (2 if rank < leaving and combine == "identity" else 0)


def run_noting_means(ranks: Ranks) -> tuple[int, set[int]]:
    """Rows in the mean as serial hears of them, and as all products of a fused step do."""
    seen: set[int] = set()

    def choose(*given: Any, **reading: Any) -> Tiling:
        seen.add(reading["mean"])
        return choose_tiling(*given, **reading)

    with an_exchange(ranks) as (exchange, _), pytest.MonkeyPatch.context() as patch:
        patch.setattr("imbrex.kernels.ffn.products.choose_tiling", choose)
        inputs = inputs_of(ranks.rank, 20 + ranks.rank)
        dispatched = exchange.dispatch(*inputs)
        y_TD = Fused().run(*inputs, exchange, Kernels(ranks.rank, train_down=True), None).y_TD
        y_TD.float().sum().backward()
        return dispatched.beside.mean_rows, seen


def test_products_hear_how_many_rows_there_are_in_the_mean(pool: Pool) -> None:
    """Memory has room for twice as many."""
    assert pool.run(2, run_noting_means) == [(21 * CHOICES, {21 * CHOICES})] * 2


def run_otherwise(ranks: Ranks) -> str:
    with an_exchange(ranks) as (exchange, _):
        strategy = Serial() if ranks.rank else Fused()
        experts = Kernels(ranks.rank, train_down=True)
        said, inputs = "nothing", inputs_of(ranks.rank, 20)
        try:
            strategy.run(*inputs, exchange, experts, None)
        except ValueError as error:
            said = str(error)
        Serial().run(*inputs, exchange, experts, None)
    return said


def test_ranks_that_disagree_hear_it(pool: Pool) -> None:
    for message in pool.run(2, run_otherwise):
        assert "disagree about what is called" in message


def run_other_roles(ranks: Ranks) -> list[str]:
    """The errors of two calls of ranks that stage tokens by other numbers of blocks."""
    said = []
    with an_exchange(ranks) as (exchange, _):
        strategy, experts = Fused(Roles(stage=2 - ranks.rank)), Kernels(ranks.rank, train_down=True)
        for _ in range(2):
            with pytest.raises(ValueError, match="schedule") as caught:
                strategy.run(*inputs_of(ranks.rank, 20), exchange, experts, None)
            said.append(str(caught.value))
    return said


def test_ranks_of_other_roles_hear_it(pool: Pool) -> None:
    """They would wait for blocks of each other that there are not, until the time-out."""
    for rank, said in enumerate(pool.run(2, run_other_roles)):
        for sentence in said:
            assert sentence.startswith(f"schedule: rank {1 - rank} moves 1 chunks in another order than ")
            assert "or by other roles" in sentence


SECONDS = {
    Roles(): (1.0, 1.0),
    Roles(32, 8): (0.995, 2.0),
    Roles(64, 24): (0.9, 0.98),
    Roles(96, 32): (3.0, 0.95),
    Roles(dy=0): (1.0, 0.99),
}
"""The second run needs no stage of 32, which gains under a hundredth."""
FIRST = Roles(first=24)


def run_auto(
    ranks: Ranks, over: str, device: float, called: float, first: float
) -> tuple[str, str, str, bool]:
    """Which strategy `auto` takes where fused is so many times as fast on the device, and as called; its
    reason, that of a fused layer made afterwards, and whether the bits are those of serial. first: seconds of
    a forward with others' rows first."""
    calls = []
    tuner._remembered.clear()

    def compare(*given, queued, **_):
        calls.append(queued)
        gain, ways = device if queued else called, given[5]
        if "fused" not in ways:
            assert {*ways} == {*SECONDS, FIRST}
            return {**SECONDS, FIRST: (first, 1.0)}
        # The slower of the two, by the device, does not count.
        fast, slow = (gain, 2 * gain), (2 * gain, 4 * gain)
        one, second, _ = ways
        return {
            one: fast if over == one else slow,
            second: slow if over == first else fast,
            "fused": (1.0, 2.0),
        }

    profile = Profile(tokens=20, forward={}, backward={})
    choice = Choice(scheduler="optsche", degree=1, forward=0.001, backward=0.002)
    times = [dict.fromkeys(tasks(1, weights=weights), 0.001) for weights in (False, True)]
    with an_exchange(ranks) as (exchange, _), pytest.MonkeyPatch.context() as patch:
        patch.setattr("imbrex.overlap.auto.compare", compare)
        patch.setattr("imbrex.overlap.auto.choose", lambda *_: choice)
        patch.setattr(Profile, "even_times", lambda *_: times)
        patch.setattr(Auto, "_profile", lambda *_: profile)
        strategy, experts = Auto(keep=False), Kernels(ranks.rank, train_down=True)
        arguments = *inputs_of(ranks.rank, 20), exchange, experts, None
        y_TD = strategy.run(*arguments).y_TD
        again = Auto(keep=False)
        again.run(*arguments)  # an alike layer: not compared again
        fused = Fused()
        other_TD = fused.run(*arguments).y_TD
        serial_TD = Serial().run(*arguments).y_TD
        same = torch.equal(y_TD, serial_TD) and torch.equal(other_TD, serial_TD)
        assert calls == [True, False, True]  # roles, then both as called and queued
        assert "others' rows of narrow experts first and" in Fused(Roles(first=9)).reason(exchange, experts)
        assert strategy.fuses_in_graphs is isinstance(strategy._chosen[exchange], Fused)
        taken, of_fused = (each.reason(exchange, experts) for each in (strategy, fused))
        return strategy._chosen[exchange].name, taken, of_fused, same


@pytest.mark.parametrize(
    ("over", "device", "called", "taken", "first"),
    [
        ("serial", 1.05, 0.99, "fused", 1.0),
        ("optsche-1", 1.01, 1.2, "optsche-1", 0.89),
        ("serial", 1.05, 0.9, "serial", 0.85),
    ],
)
def test_auto_takes_it_where_it_is_faster(
    pool: Pool, over: str, device: float, called: float, taken: str, first: float
) -> None:
    roles = "tokens staged by 64 blocks, sums begun by 32 blocks"
    if first < 0.9:
        roles = (
            "tokens staged by default, sums begun by 32 blocks, "
            "others' rows of narrow experts first and summed by 24 blocks"
        )
    for name, reason, of_fused, same in pool.run(2, run_auto, over, device, called, first):
        assert name == taken
        assert re.match(rf"{taken}[,;] ", reason)
        assert f", as {over}, " in reason or taken == over
        assert f"{device:.2f} times as fast on the device, {called:.2f} as called" in reason
        assert reason.endswith("measured in this process")
        assert (f"dy comes beside the gradient through down; {roles}; " in reason) is (taken == "fused")
        assert f"{roles} (measured in this process)" in of_fused
        assert same


def run_exact(ranks: Ranks, codec: dict[str, str], idle: bool) -> tuple[list[bool], list[int]]:
    """Whether y and all gradients are serial's, and how many rows there was room for. idle: the second rank
    has no rows."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(f"{__name__}.WIDTH", 512)
        with an_exchange(ranks, None, "even", **codec) as (exchange, _):
            exchange.transport.exact_rows = True  # pyright: ignore[reportAttributeAccessIssue]
            answers, rooms = [], []
            for strategy in (Serial(), Fused()):
                x_TD, routing = inputs_of(ranks.rank, 31 + 9 * ranks.rank)
                if idle:
                    routing = replace(routing, ids_TK=routing.ids_TK.clamp(max=1))
                    routing.ids_TK[:, 1] = -1
                experts = Weighing(ranks.rank, train_down=True)
                experts.register_forward_pre_hook(lambda _, given: rooms.append(len(given[0].rows_RD)))
                y_TD = strategy.run(x_TD, routing, exchange, experts, None).y_TD
                loss = (y_TD.float() * coefficients(y_TD)).sum()
                leaves = [x_TD, routing.weights_TK, *experts.parameters()]
                answers.append([y_TD, *torch.autograd.grad(loss, leaves)])
            exchange.check()
    return [torch.equal(a, b) for a, b in zip(*answers, strict=True)], rooms


@pytest.mark.parametrize("codec", [{}, {"dispatch": "fp8", "combine_backward": "fp8"}])
@pytest.mark.parametrize("idle", [False, True])
def test_rows_are_exactly_as_many_as_there_are(pool: Pool, codec: dict[str, str], idle: bool) -> None:
    for rank, (same, (serially, fused)) in enumerate(pool.run(2, run_exact, codec, idle)):
        assert same == [True] * 5
        assert serially == fused
        assert (fused == 0) is (idle and rank == 1)
