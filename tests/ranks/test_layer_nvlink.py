"""The layer over the NVLink kernels without a GPU: gloo ranks, shared memory, the kernels compiled by g++."""

from __future__ import annotations

import re
import time
import weakref
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch

import imbrex
from imbrex.contracts import RowForm
from imbrex.exchange import nvlink_fit
from imbrex.kernels.exchange.exchange import NvlinkExchange
from imbrex.kernels.exchange.failures import ExchangeError
from imbrex.observe import Recorder
from imbrex.overlap import Auto, Serial
from imbrex.placement import contiguous, from_slots
from tests.emulated import kernel
from tests.ranks.emulated_nvlink import EmulatedNvlink
from tests.ranks.layer_jobs import Case, coefficients, make_layer, run_layer, tokens_of
from tests.ranks.pool import Pool, Ranks
from tests.ranks.test_layer import largest_error, relative

pytestmark = pytest.mark.skipif(not kernel.available(), reason="the emulation needs g++")
CONFIG = imbrex.MoEConfig(hidden_size=64, intermediate_size=24, num_experts=6, top_k=3)
CASE = Case(config=CONFIG, dtype=torch.bfloat16)
SPLIT_SLOTS = [[0, 1], [2, 3, 0], [4, 5], [1, -1]]


def run_emulated(ranks: Ranks, case: Case, options: dict[str, Any]) -> dict[str, Any]:
    nvlink = EmulatedNvlink(ranks.group)
    return run_layer(ranks, replace(case, options={**options, "transport": nvlink}))


@pytest.mark.parametrize(
    ("change", "options"),
    [
        ({}, {}),
        ({"tensor_parallel": 2}, {}),
        ({"slots": SPLIT_SLOTS}, {}),
        ({"slots": SPLIT_SLOTS}, {"split": "balanced"}),
        ({"slots": [[0, 1, 5], [2, 3, 4, 0]], "tensor_parallel": 2}, {"split": "balanced"}),
        ({"slots": [[0, 1, 5], [2, 3, 4, 0]], "tensor_parallel": 2}, {"split": "nearest"}),
        ({"config": replace(CASE.config, activation="gelu", bias=True)}, {"experts": "grouped"}),
    ],
)
def test_outputs_and_all_gradients(pool: Pool, change: dict[str, Any], options: dict[str, Any]) -> None:
    case = replace(CASE, **change)
    errors = largest_error(case, 4, pool.run(4, run_emulated, case, options))
    # As over the other transports: 2^-8 a rounding, five of them.
    assert max(errors.values()) < 0.03, errors


def a_view(values: torch.Tensor) -> torch.Tensor:
    """The same values, with gaps in memory between them."""
    return torch.stack([values, torch.full_like(values, 2)], -1)[..., 0]


def run_on_views(ranks: Ranks, learns: bool) -> list[bool]:
    """Whether a call of views has the bits of one of their values, and whether counters are of both."""
    options = {"transport": EmulatedNvlink(ranks.group), "observer": Recorder()}
    layer = make_layer(replace(CASE, options=options), ranks.group)
    x_TD, found = tokens_of(CASE, ranks.rank), []
    with torch.set_grad_enabled(learns):
        routing = layer.gate(x_TD)
        for change in (torch.clone, a_view):
            given = imbrex.Routing(ids_TK=change(routing.ids_TK), weights_TK=change(routing.weights_TK))
            arguments = change(x_TD), given, layer.exchange, layer.experts
            found.append(Serial().run(*arguments, partial(change, x_TD)).y_TD)
    (loads,) = (n for (name, _), n in options["observer"].take_counters().items() if name == "expert_load")
    counted = 2 * routing.ids_TK.flatten().bincount(minlength=CONFIG.num_experts)
    return [torch.equal(*found), loads == counted.tolist()]


@pytest.mark.parametrize("learns", [False, True])
def test_views_give_what_their_values_do(pool: Pool, learns: bool) -> None:
    assert pool.run(2, run_on_views, learns) == [[True, True]] * 2


def run_rows_kept_on_one(ranks: Ranks) -> str:
    options = {"transport": EmulatedNvlink(ranks.group), "schedule": Serial(keep_rows=ranks.rank == 1)}
    with pytest.raises(ValueError, match="what is called") as raised:
        run_layer(ranks, replace(CASE, options=options))
    return str(raised.value)


def test_rows_that_one_rank_alone_dispatches_again(pool: Pool) -> None:
    """It would wait for them in its backward, as beside a rank that is compiled and keeps its own."""
    for said in pool.run(2, run_rows_kept_on_one):
        assert "where only some are compiled, use schedule='serial'" in said


@pytest.mark.parametrize("codec", [{"dispatch": "fp8", "combine_backward": "fp8"}, "fp8"])
def test_fp8_on_the_wire(pool: Pool, codec: Any) -> None:
    """Nearly the rows that all-to-all carries: tokens are the same to the bit; of sums, which kernels round
    to bfloat16 before they write them, some fall on the next of the 256 values."""
    config = imbrex.MoEConfig(hidden_size=512, intermediate_size=24, num_experts=6, top_k=3)
    case, bound = replace(CASE, config=config), 0.015 if codec == "fp8" else 4e-3
    ours = pool.run(4, run_emulated, case, {"codec": codec})
    theirs = pool.run(4, run_layer, replace(case, options={"codec": codec, "transport": "alltoall"}))
    plain = pool.run(4, run_layer, replace(case, options={"transport": "alltoall"}))
    for first, second, third in zip(ours, theirs, plain, strict=True):
        for name in ("y", "x_grad"):
            assert relative(first[name], second[name]) < bound
            assert not len(first[name]) or relative(first[name], third[name]) > 0.018


def note_rows(seen: list[Any], _: torch.nn.Module, given: tuple[Any, ...]) -> None:
    seen.append(weakref.ref(given[0].rows_RD))


def run_keeping(ranks: Ranks, case: Case, nvlink: bool) -> list[Any]:
    """y and all gradients, rows kept or dispatched again; whether the rows were gone after the forward."""
    found = []
    for keep_rows in (True, False):
        transport = EmulatedNvlink(ranks.group) if nvlink else "alltoall"
        options = {"transport": transport, "schedule": Serial(keep_rows=keep_rows)}
        layer = make_layer(replace(case, options=options), ranks.group)
        seen: list[Any] = []
        layer.experts.register_forward_pre_hook(partial(note_rows, seen))
        x_TD = tokens_of(case, ranks.rank).requires_grad_()
        y_TD = layer(x_TD)
        found.append([seen[0]() is None, y_TD])
        (y_TD.float() * coefficients(y_TD)).sum().backward()
        found[-1] += [x_TD.grad, *(p.grad for p in layer.parameters())]
    kept, again = found
    return [kept.pop(0), again.pop(0), all(torch.equal(a, b) for a, b in zip(kept, again, strict=True))]


@pytest.mark.parametrize("nvlink", [True, False])
def test_rows_are_kept_or_dispatched_again(pool: Pool, nvlink: bool) -> None:
    case = replace(CASE, tokens=(5, 2, 3, 8))
    for answer in pool.run(4, run_keeping, case, nvlink):
        assert answer == [False, True, True]


def run_frozen_on_one(ranks: Ranks) -> bool:
    """Whether rows dispatched again give x its gradient, where rank 1 learns nothing and needs none."""
    found = []
    for keep_rows in (True, False):
        options = {"transport": "alltoall", "experts": "loop", "timeout": 5}
        options["schedule"] = Serial(keep_rows=keep_rows)
        layer = make_layer(replace(CASE, options=options), ranks.group)
        layer.experts.requires_grad_(ranks.rank == 0)
        x_TD = tokens_of(CASE, ranks.rank).requires_grad_()
        y_TD = layer(x_TD)
        (y_TD.float() * coefficients(y_TD)).sum().backward()
        found.append(x_TD.grad)
    return torch.equal(*found)


def test_a_rank_that_learns_nothing_dispatches_rows_again_with_the_others(pool: Pool) -> None:
    assert pool.run(2, run_frozen_on_one) == [True, True]


class Unfused(torch.nn.Module):
    """Experts as wide as tokens that read their rows twice and skip those without rows."""

    applies_weights, forms = False, (RowForm.ROWS,)

    def __init__(self, slots: int) -> None:
        super().__init__()
        drawn = torch.Generator().manual_seed(5)
        weight = torch.randn(2, slots, 16, 16, generator=drawn) / 4
        self.gate, self.up = (torch.nn.Parameter(w) for w in weight)

    def forward(self, dispatched: imbrex.Dispatched) -> torch.Tensor:
        rows_RD, out, begin = dispatched.rows_RD, [dispatched.rows_RD[:0] @ self.gate[0]], 0
        for slot, count in enumerate(dispatched.counts_e.tolist()):
            rows = rows_RD[begin : begin + count]
            if count:
                out.append(torch.relu(rows @ self.gate[slot]) * (rows @ self.up[slot]))
            begin += count
        return torch.cat(out)


def run_again_with_idle_ranks(ranks: Ranks) -> list[bool]:
    """All tokens want the experts of the first rank: the others have no rows, and save none or many."""
    found = []
    for keep_rows in (True, False):
        exchange = imbrex.Exchange(contiguous(4, 4), 16, 1, group=ranks.group, transport="alltoall")
        x_TD = torch.randn(3 + ranks.rank, 16, generator=torch.Generator().manual_seed(ranks.rank))
        experts, x_TD = Unfused(1), x_TD.requires_grad_()
        weights_TK = torch.ones(len(x_TD), 1, requires_grad=True)
        routing = imbrex.Routing(ids_TK=torch.zeros_like(weights_TK).long(), weights_TK=weights_TK)
        y_TD = Serial(keep_rows=keep_rows).run(x_TD, routing, exchange, experts, None).y_TD
        (y_TD * coefficients(y_TD)).sum().backward()
        found.append([y_TD, x_TD.grad, weights_TK.grad, experts.gate.grad, experts.up.grad])
    return [a is None if b is None else torch.equal(a, b) for a, b in zip(*found, strict=True)]


def test_ranks_without_rows_dispatch_again_with_the_others(pool: Pool) -> None:
    for same in pool.run(4, run_again_with_idle_ranks):
        assert same == [True] * 5


def run_exact(ranks: Ranks, case: Case) -> list[Any]:
    """Rows for the worst case, and exactly those that there are: how many, and whether all bits agree."""
    found, counts = [], []
    for exact in (False, True):
        nvlink = EmulatedNvlink(ranks.group, exact_rows=exact)
        layer = make_layer(replace(case, options={"transport": nvlink}), ranks.group)
        layer.experts.register_forward_pre_hook(lambda _, given: counts.append(len(given[0].rows_RD)))
        x_TD = tokens_of(case, ranks.rank).requires_grad_()
        y_TD = layer(x_TD)
        (y_TD.float() * coefficients(y_TD)).sum().backward()
        found.append([y_TD, x_TD.grad, *(p.grad for p in layer.parameters())])
    return [*counts, all(torch.equal(a, b) for a, b in zip(*found, strict=True))]


def test_exactly_as_many_rows_as_there_are(pool: Pool) -> None:
    answers = pool.run(4, run_exact, replace(CASE, tokens=(300, 0, 3, 8)))
    assert sum(exact for _, exact, _ in answers) == 3 * 311
    for worst, _, same in answers:
        assert worst == 4 * 512 * 2
        assert same


def run_sparing(ranks: Ranks, case: Case, spared: int) -> list[int]:
    """Rows of a call that is differentiated on the rank with the most tokens, and of one that is not."""
    counts: list[int] = []
    layer = make_layer(replace(case, options={"transport": EmulatedNvlink(ranks.group)}), ranks.group)
    layer.experts.register_forward_pre_hook(lambda _, given: counts.append(len(given[0].rows_RD)))
    patch = pytest.MonkeyPatch()
    patch.setattr(nvlink_fit, "SPARED", spared)
    for differentiated in (True, False):
        layer(tokens_of(case, ranks.rank).requires_grad_(differentiated and ranks.rank != 2))
    patch.undo()
    return counts


def test_rows_that_a_backward_keeps_are_exactly_many_where_that_spares_memory(pool: Pool) -> None:
    case = replace(CASE, tokens=(300, 0, 3, 8))
    worst, row = 4 * 512 * 2, 64 * 2
    spared = worst * 3 // 4 * row
    answers = pool.run(4, run_sparing, case, spared)
    assert sum(kept for kept, _ in answers) == 3 * 311
    assert [rows for _, rows in answers] == [worst] * 4
    assert pool.run(4, run_sparing, case, spared + 1) == [[worst, worst]] * 4


def run_among(ranks: Ranks, case: Case, by_all: int) -> tuple[list[int], list[str]]:
    """Rows of a layer alone; beside another, without gradients and with them; beside one that rank 2 alone
    has not collected yet; and alone again. What `reasons` say alone and beside another."""
    counts: list[int] = []
    nvlink = EmulatedNvlink(ranks.group)
    made = [make_layer(replace(case, options={"transport": nvlink}), ranks.group)]
    made[0].experts.register_forward_pre_hook(lambda _, given: counts.append(len(given[0].rows_RD)))
    x_TD, said = tokens_of(case, ranks.rank).requires_grad_(), [made[0].reasons["transport"]]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(nvlink_fit, "SPARED_BY_ALL", by_all)
        made[0](x_TD)
        made.append(make_layer(replace(case, options={"transport": nvlink}), ranks.group))
        made[0](x_TD.detach())
        made[0](x_TD)
        said.append(made[0].reasons["transport"])
        made.pop().close()
        garbage = torch.nn.Identity()
        if ranks.rank == 2:
            nvlink.join(garbage)
        made[0](x_TD)
        nvlink.leave(garbage)
        made[0](x_TD)
    return counts, said


def test_rows_of_many_layers_are_exactly_many_where_all_together_spare_memory(pool: Pool) -> None:
    """Of two layers; one rank's word is enough, since ranks collect garbage at different times."""
    case, worst, by_token = replace(CASE, tokens=(3, 0, 300, 8)), 4 * 512 * 2, 3 * 2 * 64 * 2
    answers = pool.run(4, run_among, case, 2 * 300 * by_token)
    for counts, _ in answers:
        assert [counts[call] for call in (0, 1, 4)] == [worst] * 3
    assert [sum(counts[call] for counts, _ in answers) for call in (2, 3)] == [3 * 311] * 2
    assert {said[0].partition("; ")[2] for _, said in answers} == {
        f"a backward keeps as many rows as there are from {-(-(200 << 20) // by_token)} tokens a rank on"
    }
    assert all(said[1].endswith("from 300 tokens a rank on, with 2 layers") for _, said in answers)
    assert pool.run(4, run_among, case, 2 * 301 * by_token)[0][0] == [worst] * 5


def run_growing(ranks: Ranks, case: Case) -> tuple[list[float], list[int]]:
    """A second call with more tokens than the heap has room for, a small one, then the backward of all."""
    nvlink = EmulatedNvlink(ranks.group)
    found = []
    for transport in (nvlink, "alltoall"):
        layer = make_layer(replace(case, options={"transport": transport}), ranks.group)
        inputs = [
            tokens_of(replace(case, tokens=tokens), ranks.rank).requires_grad_()
            for tokens in ((9, 520, 3, 5), (2, 600, 0, 8), (9, 0, 70, 200))
        ]
        outputs = [layer(x) for x in inputs]
        torch.cat([(y.float() * coefficients(y)).sum()[None] for y in outputs]).sum().backward()
        found.append([*outputs, *(x.grad for x in inputs), layer.gate.weight.grad])
    rooms = [exchange.shape.max_tokens for exchange in nvlink._exchanges.values()]
    return [relative(a, b) for a, b in zip(*found, strict=True) if a.numel()], rooms


def test_a_heap_grows_between_a_call_and_its_backward(pool: Pool) -> None:
    for errors, rooms in pool.run(4, run_growing, CASE):
        assert rooms == [640, 256]
        assert max(errors) < 5e-3, errors


def run_relocated(ranks: Ranks) -> list[bool]:
    """Rows, counts and sums after every move are those of all-to-all, whose rows stand in the same order."""
    before = [[0, 1], [2, 3, -1], [4, 5], [-1]], [[0, 1], [2, 3, 0], [4, 5], [1]]
    after = [[5, 4], [3, 2, 1], [0, -1], [4]], [[5, 0], [3, 2, 4], [0, 1], [4]]
    placements, moved = ([from_slots(slots, 6) for slots in side] for side in (before, after))
    x_TD, same = tokens_of(CASE, ranks.rank), []
    torch.manual_seed(ranks.rank)
    for place, move, split in zip(placements, moved, ("even", "balanced"), strict=True):
        exchanges = [
            imbrex.Exchange(place, 64, 3, group=ranks.group, transport=transport, split=split)
            for transport in (EmulatedNvlink(ranks.group), "alltoall")
        ]
        for _ in range(2):
            ids_TK = torch.rand(len(x_TD), 6).argsort(1)[:, :3]
            routing = imbrex.Routing(ids_TK=ids_TK, weights_TK=torch.rand(ids_TK.shape))
            ours, theirs = (exchange.dispatch(x_TD, routing) for exchange in exchanges)
            same += [torch.equal(ours.counts_e, theirs.counts_e)]
            same += [torch.equal(ours.rows_RD[: len(theirs.rows_RD)], theirs.rows_RD)]
            y, truth = (
                e.combine(d.rows_RD, d.handle) for e, d in zip(exchanges, (ours, theirs), strict=True)
            )
            same += [not len(y) or relative(y, truth) < 4e-3]
            for exchange in exchanges:
                exchange.relocate(move)
    return same


def test_experts_move_between_calls(pool: Pool) -> None:
    for same in pool.run(4, run_relocated):
        assert same == [True] * 12


def run_wrong_later(ranks: Ranks, schedule: str) -> list[str]:
    options = {"transport": EmulatedNvlink(ranks.group), "schedule": schedule}
    layer = make_layer(replace(CASE, options=options), ranks.group)
    x_TD, answers = tokens_of(CASE, ranks.rank), []
    for given in (x_TD, x_TD.float() if ranks.rank == 1 else x_TD, x_TD):
        try:
            answers.append(str(layer(given).shape[0]))
        except ValueError as error:
            answers.append(str(error))
    return answers


@pytest.mark.parametrize("schedule", ["serial", "optsche-2"])
def test_a_wrong_input_is_every_ranks_error_at_any_call(pool: Pool, schedule: str) -> None:
    answers = pool.run(2, run_wrong_later, schedule)
    assert answers[0] == ["5", "dispatch: rank 1 was given tokens that cannot be dispatched", "5"]
    assert answers[1][1].startswith("dispatch: on rank 1, x is torch.float32; NVLink's kernels move bfloat16")


def run_promised(ranks: Ranks) -> list[Any]:
    """How often hosts meet in a call, and what is said: with imbrex's experts; where a hook of one rank sees
    their result, and where it changes that."""
    nvlink = EmulatedNvlink(ranks.group)
    layer, x_TD = make_layer(replace(CASE, options={"transport": nvlink}), ranks.group), tokens_of(CASE, 0)
    heard: list[Any] = []
    hooks = [None, lambda *_: None, lambda module, given, rows_RD: rows_RD[:, :-1]]
    for hook in hooks:
        handle = layer.experts.register_forward_hook(hook) if hook and ranks.rank == 1 else None
        before = nvlink._board.calls
        try:
            layer(x_TD)
            heard.append(nvlink._board.calls - before)
        except ValueError as error:
            heard.append(str(error))
        if handle is not None:
            handle.remove()
    return heard


def test_hosts_meet_once_a_call_where_rows_are_sure_to_fit(pool: Pool) -> None:
    for once, twice, said in pool.run(2, run_promised):
        assert (once, twice) == (1, 2)
        assert "combine: on rank 1, rows are [" in said


def make_impatient(ranks: Ranks) -> tuple[imbrex.MoELayer, torch.optim.Optimizer]:
    """A layer that has made a step, which may compile kernels; they wait for 0.5 s from then on."""
    nvlink = EmulatedNvlink(ranks.group)
    layer = make_layer(replace(CASE, options={"transport": nvlink}), ranks.group)
    layer(tokens_of(CASE, ranks.rank).requires_grad_()).sum().backward()
    layer.zero_grad()
    for kernels in nvlink._held:
        kernels._status.timeout = 0.5
        kernels._groups.clear()  # which hold it, made once
    return layer, torch.optim.SGD(layer.parameters(), lr=0.1)


def run_left_alone(ranks: Ranks, where: str) -> tuple[str, float]:
    """What rank 0 hears, and after how many seconds, once rank 1 has left between forward and backward."""
    layer, optimizer = make_impatient(ranks)
    y_TD = layer(tokens_of(CASE, ranks.rank).requires_grad_())
    if ranks.rank == 1:
        return "left", 0.0
    with pytest.MonkeyPatch.context() as patch:
        # Results that nobody writes are numbers here, as they may be on a GPU.
        patch.setattr(torch.Tensor, "new_empty", torch.Tensor.new_zeros)
        y_TD.sum().backward()
    assert layer.gate.weight.grad is not None
    assert layer.gate.weight.grad.isnan().all()
    began = time.monotonic()
    try:
        if where == "check":
            layer.check()
        elif where == "sync_gradients":
            imbrex.sync_gradients(layer)
        elif where == "step":
            optimizer.step()
        else:
            layer(tokens_of(CASE, ranks.rank))
    except ExchangeError as error:
        other = make_layer(CASE, None)
        other(tokens_of(CASE, 0)).sum().backward()
        torch.optim.SGD(other.parameters(), lr=0.1).step()
        return str(error), time.monotonic() - began
    return "nothing", 0.0


def run_unrouted(ranks: Ranks, where: str) -> tuple[str, list[bool]]:
    """What rank 0 hears whose peer comes to a call and never to its routing; and of its output and of every
    gradient, whether it is NaN: experts that got no row have zeros."""
    (layer, optimizer), x_TD = make_impatient(ranks), tokens_of(CASE, ranks.rank)
    if ranks.rank == 1:
        layer.exchange.dispatcher.agree([(x_TD, layer.gate(x_TD))])
        layer.exchange.dispatcher.agree_on_rows(None, torch.bfloat16)
        return "left", []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.Tensor, "new_empty", torch.Tensor.new_zeros)
        patch.setattr(NvlinkExchange, "check", lambda self, **how: None)  # a GPU has not failed yet
        y_TD = layer(x_TD.requires_grad_())
        y_TD.sum().backward()
    before = [p.detach().clone() for p in layer.parameters()]
    shown = [y_TD, x_TD.grad, layer.gate.weight.grad]
    try:
        if where == "sync_gradients":
            imbrex.sync_gradients(layer)
        else:
            optimizer.step()
    except ExchangeError as error:
        assert all(torch.equal(a, b) for a, b in zip(before, layer.parameters(), strict=True))
        return str(error), [bool(one is not None and one.isnan().all()) for one in shown]
    return "nothing", []


@pytest.mark.parametrize("where", ["sync_gradients", "step"])
def test_no_step_is_taken_behind_a_routing_that_failed(pool: Pool, where: str) -> None:
    (said, nan), _ = pool.run(2, run_unrouted, where)
    assert "rank 0 in small call" in said, said
    assert nan == [True] * 3


@pytest.mark.parametrize("where", ["check", "sync_gradients", "step", "the next call"])
def test_a_call_that_failed_surfaces_at_once_wherever_the_layer_is_next_used(pool: Pool, where: str) -> None:
    """And in its own model alone."""
    (said, seconds), _ = pool.run(2, run_left_alone, where)
    assert "rank 0 in combine call" in said, said
    assert "of layer 0" in said
    assert seconds < 0.4


def run_chunked(ranks: Ranks, case: Case, schedules: tuple[Any, ...]) -> list[dict[str, Any]]:
    """`serial`, then every schedule, over one heap."""
    transport = EmulatedNvlink(ranks.group)
    given = {**case.options, "transport": transport}
    return [run_layer(ranks, replace(case, options={**given, "schedule": s})) for s in ("serial", *schedules)]


SHARED = replace(CONFIG, activation="gelu", bias=True, shared=imbrex.SharedExperts(intermediate_size=8))


@pytest.mark.parametrize(
    ("change", "schedules"),
    [
        ({"tokens": (300, 0, 7, 130)}, ("optsche-1", "exact-2", "stage-major-3")),
        ({"config": SHARED, "tensor_parallel": 2}, ("optsche-11", "fastermoe")),
        ({"tokens": (0,)}, ("optsche-2",)),
    ],
)
def test_chunks_have_the_bits_of_serial(
    pool: Pool, change: dict[str, Any], schedules: tuple[str, ...]
) -> None:
    """Those of tokens and gate, and of the tokens' gradients where no shared experts' are added. Gradients of
    experts are sums over chunks, each rounded."""
    for serial, *others in pool.run(4, run_chunked, replace(CASE, **change), schedules):
        for one in others:
            assert torch.equal(one["y"], serial["y"])
            grads = {"x": one["x_grad"], **one["grads"]}
            for name, grad in {"x": serial["x_grad"], **serial["grads"]}.items():
                exact = name in (("gate.weight",) if "shared" in str([*grads]) else ("gate.weight", "x"))
                assert relative(grads[name], grad) <= (0.0 if exact else 8e-3), name


def test_chunks_cross_in_fp8(pool: Pool) -> None:
    config = imbrex.MoEConfig(hidden_size=512, intermediate_size=24, num_experts=6, top_k=3)
    case = replace(CASE, config=config, tokens=(5, 0, 130, 8), options={"codec": "fp8"})
    for serial, one in pool.run(2, run_chunked, case, ("optsche-2",)):
        assert torch.equal(one["y"], serial["y"])
        assert torch.equal(one["x_grad"], serial["x_grad"])


def test_chunks_choose_replicas(pool: Pool) -> None:
    """Each for itself, so only their sums are those of the oracle; one split is the caller's."""
    for split in ("balanced", "nearest"):
        case = replace(CASE, slots=SPLIT_SLOTS)
        found = pool.run(4, run_emulated, case, {"split": split, "schedule": "optsche-3"})
        errors = largest_error(case, 4, found)
        assert max(errors.values()) < 0.03, errors


def run_auto(ranks: Ranks) -> tuple[str, bool]:
    case = replace(CASE, options={"schedule": Auto(degrees=(1, 2)), "transport": EmulatedNvlink(ranks.group)})
    layer = make_layer(case, ranks.group)
    y_TD = layer(tokens_of(case, ranks.rank))
    serial = run_emulated(ranks, CASE, {})
    return layer.reasons["schedule"], torch.equal(y_TD, serial["y"])


def test_auto_measures_and_picks(pool: Pool) -> None:
    (answer,) = set(pool.run(2, run_auto))
    assert re.match("auto: (optsche|exact)-[12], predicted ", answer[0]), answer
    assert answer[1]
