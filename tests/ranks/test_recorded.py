"""Calls that are made again from a record, on emulated kernels: the bits of their steps, call by call."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import imbrex
from imbrex.contracts import Dispatched
from imbrex.exchange import nvlink_fit, recorded, recorded_back, recorded_launches, recorded_memory
from imbrex.experts.experts import Experts
from imbrex.kernels.exchange.exchange import NvlinkExchange
from imbrex.kernels.ffn import both, slopes
from imbrex.kernels.ffn.ffn import ffn
from imbrex.kernels.fused.few import SOURCE, dispatching_sms, run_few
from imbrex.kernels.jit import Variant
from imbrex.overlap import Serial
from imbrex.placement import contiguous, from_slots
from tests.emulated import kernel
from tests.emulated.gemm import EmulatedKernel, emulate
from tests.emulated.home import loader
from tests.poison import real_empty
from tests.ranks.emulated_nvlink import EmulatedNvlink
from tests.ranks.pool import Pool, Ranks

pytestmark = pytest.mark.skipif(not kernel.available(), reason="the emulation needs g++")
EXPERTS, WIDTH, INNER, CHOICES = 4, 256, 64, 2


class Own(Experts):
    """imbrex's experts by their kernels, on CPUs."""

    unchanged = True  # type: ignore[assignment]

    def __init__(self, slots: tuple[int, ...]) -> None:
        super().__init__(slots, WIDTH, INNER, seed=3, dtype=torch.bfloat16)
        self.implementation, self.applies_weights = "kernels", True

    def forward(self, dispatched: Dispatched) -> Tensor:
        weights = self.gate_up_proj, self.down_proj
        return ffn(dispatched.rows_RD, *weights, dispatched.counts_e, weights_R=dispatched.handle.weights_R)


class Layer:
    """Serial calls of an exchange over emulated kernels, by steps or from a record; `again`: how many of its
    launches were from the record."""

    def __init__(
        self, ranks: Ranks, patch: pytest.MonkeyPatch, tensor: int = 1, *, one_kernel: bool | None = None
    ) -> None:
        self.patch, self.again, self.rank = patch, 0, ranks.rank
        self.addend: Callable[[], Tensor] | None = None
        nvlink = EmulatedNvlink(ranks.group, one_kernel=one_kernel)
        nvlink.load = load_any  # pyright: ignore[reportAttributeAccessIssue]
        nvlink.least_sms = 4
        placement = contiguous(EXPERTS, ranks.world_size // tensor)
        options: dict[str, Any] = {"group": ranks.group, "transport": nvlink, "dtype": torch.bfloat16}
        self.exchange = imbrex.Exchange(placement, WIDTH, CHOICES, tensor_parallel=tensor, **options)
        self.experts = Own(placement.local(ranks.rank // tensor))
        launch = NvlinkExchange.launch_again

        def counted(kernels: NvlinkExchange, *what: Any) -> None:
            self.again += 1
            launch(kernels, *what)

        patch.setattr(NvlinkExchange, "launch_again", counted)
        pieces: dict[int, Tensor] = {}

        def new_piece(nbytes: int, device: torch.device) -> Tensor:
            with real_empty():
                return pieces.setdefault(nbytes, torch.empty(nbytes, dtype=torch.uint8)).fill_(0xFF)

        patch.setattr(recorded_memory, "new_piece", new_piece)
        gradients: dict[int, list[Tensor]] = {}

        def new_gradient(weight: Tensor) -> Tensor:
            """One of two, in turn."""
            with real_empty():
                both = gradients.setdefault(weight.numel(), [torch.empty_like(weight) for _ in range(2)])
            both.reverse()
            return both[0].detach().fill_(torch.nan)

        patch.setattr(recorded_memory, "new_gradient", new_gradient)
        for room in (recorded, recorded_back):
            patch.setattr(room, "launch_all", lambda launches: [launch.launch() for launch in launches])

    def __call__(self, x_TD: Tensor, routing: imbrex.Routing, *, steps: bool, keep: bool = False) -> Tensor:
        self.patch.setattr(recorded, "on_gpu", lambda x_TD: not steps)
        with torch.set_grad_enabled(keep):
            return Serial().run(x_TD, routing, self.exchange, self.experts, self.addend).y_TD


def one_launch(weighted: bool, fp8: bool, smem: int, device: int) -> tuple[EmulatedKernel, int]:
    return EmulatedKernel(both.both_variant(weighted=weighted), smem, None, ()), 2


def load_any(variant: Variant, device: Any = None) -> Any:
    """Stands in for `jit.load`; a kernel of a dispatch and its experts is for half of all experts."""
    if variant.source != SOURCE:
        return loader()(variant, device)
    return EmulatedKernel(variant, both.shared_bytes(EXPERTS // 2), None, ())


@contextmanager
def a_layer(ranks: Ranks, few: int, tensor: int = 1, *, one_kernel: bool | None = None) -> Iterator[Layer]:
    with pytest.MonkeyPatch.context() as patch:
        emulate(patch, blocks=2)
        patch.setattr(both, "_kernel", one_launch)
        patch.setattr("imbrex.exchange.nvlink_fit.FEW_TOKENS", few)
        patch.setattr("imbrex.kernels.rows.weights._BLOCKS", 2)
        patch.setattr("imbrex.kernels.exchange.launches.FEW_SMS", 2)  # so that one kernel routes and pulls
        yield Layer(ranks, patch, tensor, one_kernel=one_kernel)


def inputs_of(rank: int, call: int, tokens: int) -> tuple[Tensor, imbrex.Routing]:
    make = torch.Generator().manual_seed(100 * call + rank)
    ids_TK = torch.rand(tokens, EXPERTS, generator=make).topk(CHOICES).indices
    ids_TK[::5, 1] = -1
    x_TD = torch.randn(tokens, WIDTH, generator=make).bfloat16()
    return x_TD, imbrex.Routing(ids_TK=ids_TK, weights_TK=torch.rand(tokens, CHOICES, generator=make))


def beside_steps(ranks: Ranks, layer: Any, calls: int) -> tuple[list[bool], list[int]]:
    """Whether calls have the bits of their steps, which come between, and the launches made again so far."""
    same, launches = [], []
    for call in range(calls):
        x_TD, routing = inputs_of(ranks.rank, call, 7 + 3 * ranks.rank)
        ours = layer(x_TD, routing, steps=False)
        launches.append(layer.again)
        same.append(torch.equal(ours, layer(x_TD, routing, steps=True)))
    return same, launches


def run_again(ranks: Ranks, few: int, asked: bool | None) -> tuple[list[bool], list[int], int]:
    """Of six calls, whether y has the bits of the steps; how many launches were from a record so far; how
    many records have both products in one launch."""
    together: list[int] = []
    with a_layer(ranks, few) as layer:
        layer.experts.one_launch, run = asked, both.run_both
        layer.patch.setattr(both, "run_both", lambda *operands: (together.append(1), run(*operands)))
        same, launches = beside_steps(ranks, layer, 6)
    return same, launches, len(together)


@pytest.mark.parametrize(("few", "asked", "together"), [(256, None, 1), (256, False, 0), (0, True, 0)])
def test_calls_from_a_record_have_the_bits_of_their_steps(
    pool: Pool, few: int, asked: bool | None, together: int
) -> None:
    """The steps of the same inputs come between, so that every recorded call has the same buffer."""
    for same, launches, found in pool.run(2, run_again, few, asked):
        assert same == [True] * 6
        assert launches == [0, 2, 4, 6, 8, 10]
        assert found == together


def run_in_one(ranks: Ranks, with_one: list[int]) -> tuple[list[bool], list[int], list[tuple[int, int]]]:
    """The same of ranks of which some are to dispatch and compute in one kernel; of every record that has it,
    for how many tokens, and on how many multiprocessors a rank dispatches."""
    together: list[tuple[int, int]] = []

    def dispatching(tokens: int, sms: int) -> int:
        together.append((tokens, dispatching_sms(tokens, sms)))
        return together[-1][1]

    with a_layer(ranks, 256, one_kernel=ranks.rank in with_one) as layer:
        layer.patch.setattr(recorded, "dispatching_sms", dispatching)
        same, launches = beside_steps(ranks, layer, 4)
    return same, launches, together


@pytest.mark.parametrize("with_one", [[0, 1], [1]])
def test_a_dispatch_and_its_experts_in_one_kernel_are_recorded(pool: Pool, with_one: list[int]) -> None:
    """Ranks need not agree on it."""
    for rank, (same, launches, found) in enumerate(pool.run(2, run_in_one, with_one)):
        assert same == [True] * 4
        assert launches == [0, 2, 4, 6]
        assert found == [(10, 2)] * (rank in with_one)


def run_by_default(ranks: Ranks, sizes: list[tuple[int, int]]) -> list[tuple[list[bool], int, int, int]]:
    """Where ranks have so many tokens each, of two calls, one that keeps rows for a backward, and two while a
    graph is captured: whether y has the bits of the steps; how many took one kernel; of the last two how
    often hosts met, and how many turned to the steps behind their meeting."""
    found, together, turned = [], [], []
    with a_layer(ranks, 256) as layer:
        run, by_steps = run_few, recorded.Recorder._by_steps
        board = getattr(layer.exchange.transport, "_board")  # noqa: B009
        layer.patch.setattr(recorded, "run_few", lambda *call: together.append(1) or run(*call))
        layer.patch.setattr(recorded.Recorder, "_by_steps", lambda *call: turned.append(1) or by_steps(*call))
        for call, tokens in enumerate(sizes):
            inputs, before = inputs_of(ranks.rank, call, tokens[ranks.rank]), len(together)
            ys = [layer(*inputs, steps=False, keep=keep) for keep in (False, False, True)]
            meetings = board.calls
            turned.clear()
            with pytest.MonkeyPatch.context() as graph:
                graph.setattr(EmulatedNvlink, "capturing", True)
                ys += [layer(*inputs, steps=False, keep=keep) for keep in (False, True)]
            meetings = board.calls - meetings
            same = [torch.equal(y_TD, layer(*inputs, steps=True)) for y_TD in ys]
            found.append((same, len(together) - before, meetings, len(turned)))
    return found


def test_one_and_two_tokens_take_one_kernel_by_default(pool: Pool) -> None:
    """A call and a captured one; the second is from a record. What counts is the rank with most tokens: where
    this rank has more than two, a captured call makes its steps at once, else when it has heard of others."""
    sizes = [(1, 1), (1, 2), (3, 3), (2, 3), (4, 1)]
    for rank, found in enumerate(pool.run(2, run_by_default, sizes)):
        for tokens, (same, *numbers) in zip(sizes, found, strict=True):
            one = max(tokens) <= 2
            assert all(same)
            assert numbers == [2 * one, 2, int(tokens[rank] <= 2 and not one)]


def say_by_default(ranks: Ranks) -> list[str]:
    """What is said of one kernel that nobody has asked for, before and behind calls."""
    with a_layer(ranks, 256) as layer:
        experts, dispatcher = layer.experts, layer.exchange.dispatcher
        about, observer = dispatcher.about_whole, dispatcher.observer
        said = [about(experts, "serial"), about(experts, "optsche-2")]
        dispatcher.observer = SimpleNamespace(enabled=True)  # type: ignore[assignment]
        said.append(about(experts, "serial"))
        dispatcher.observer = observer
        for call, tokens in enumerate((2, 3)):
            layer(*inputs_of(ranks.rank, call, tokens), steps=False)
            said.append(about(experts, "serial"))
        layer.patch.setattr(recorded, "why_not_few", lambda *call: "there is no room")
        for call, tokens in enumerate((1, 4)):
            layer(*inputs_of(ranks.rank, call, tokens), steps=False)
            said.append(about(experts, "serial"))
        layer.patch.setattr("imbrex.kernels.fused.few.MOST_READ", 6 * WIDTH * INNER * 2 - 1)
        layer.exchange.dispatcher.recorder._apart = None  # type: ignore[attr-defined]
        said.append(about(experts, "serial"))
        layer.exchange.transport.one_kernel = False  # type: ignore[attr-defined]
        return [*said, about(experts, "serial")]


def test_what_takes_one_kernel_by_default_is_said(pool: Pool) -> None:
    """A batch of more tokens says nothing new of those that may take it."""
    one = "; its dispatch in the one, too, up to 2 tokens a rank"
    room = "; its dispatch apart: of the last size of a batch, there is no room"
    read = "; its dispatch apart: one kernel is faster up to 0 MiB of weights only"
    assert pool.run(2, say_by_default) == [[one, "", "", one, one, room, room, read, ""]] * 2


def say_one_kernel(ranks: Ranks) -> list[str]:
    """What is said of the one kernel, as the layer is made and where something is against it."""
    with a_layer(ranks, 256, one_kernel=True) as layer:
        about, experts = layer.exchange.dispatcher.about_whole, layer.experts
        said = [about(experts, "serial"), about(experts, "optsche-2"), about(torch.nn.Identity(), "serial")]
        experts.one_launch = False
        said.append(about(experts, "serial"))
        experts.one_launch, experts.implementation = None, "kernels-fp8"
        said.append(about(experts, "serial"))
        experts.implementation = "kernels"
        x_TD, routing = inputs_of(ranks.rank, 0, 7 + 3 * ranks.rank)
        layer(x_TD, routing, steps=False, keep=True)
        said.append(about(experts, "serial"))
        layer.patch.setattr(recorded, "why_not_few", lambda *call: "there is no room")
        layer(x_TD, routing, steps=False)
        said.append(about(experts, "serial"))
        return said


def test_what_takes_one_kernel_is_said(pool: Pool) -> None:
    asked = ": one_kernel is asked for"
    why = [
        "schedule 'optsche-2' takes steps apart",
        "experts are not imbrex's own, or a hook reads them",
        "two launches are asked for as well (experts.one_launch)",
        "experts are computed by 'kernels-fp8', not by 'kernels'",
        "of the last size of a batch, there is no room",
    ]
    one, (*never, last) = (
        f"; its dispatch in the one, too{asked}",
        [f"; its dispatch apart{asked}, but {w}" for w in why],
    )
    assert pool.run(2, say_one_kernel) == [[one, *never, one, last]] * 2


def run_captured(ranks: Ranks) -> tuple[list[bool], int, int]:
    """Whether y has the bits of the steps where a graph is captured, of two calls and of one whose rows are
    kept for a backward; the records behind the first call, and how many calls took one kernel."""
    together: list[int] = []
    with a_layer(ranks, 256, one_kernel=True) as layer:
        run = run_few
        layer.patch.setattr(recorded, "run_few", lambda *a, **how: together.append(1) or run(*a, **how))
        x_TD, routing = inputs_of(ranks.rank, 0, 7 + 3 * ranks.rank)
        wanted = layer(x_TD, routing, steps=False)
        dispatcher: Any = layer.exchange.dispatcher
        records = dispatcher.recorder.records.launches
        layer.patch.setattr(EmulatedNvlink, "capturing", True)
        same = [torch.equal(wanted, layer(x_TD, routing, steps=False)) for _ in range(2)]
        same.append(torch.equal(wanted, layer(x_TD, routing, steps=False, keep=True)))
        return same, len(records), len(together)


def test_captured_calls_take_one_kernel_and_leave_no_record(pool: Pool) -> None:
    assert pool.run(2, run_captured) == [([True] * 3, 1, 3)] * 2


def run_in_turn(ranks: Ranks) -> tuple[list[bool], int]:
    """Calls of rows that take one buffer and the other, of two sizes, behind one another; then the steps."""
    with a_layer(ranks, 0) as layer:
        calls = [inputs_of(ranks.rank, call, (9, 4)[call % 3 == 2]) for call in range(9)]
        ours = [layer(*inputs, steps=False) for inputs in calls]
        theirs = [layer(*inputs, steps=True) for inputs in calls]
    return [torch.equal(*pair) for pair in zip(ours, theirs, strict=True)], layer.again


def test_each_buffer_and_each_size_has_its_record(pool: Pool) -> None:
    for same, again in pool.run(2, run_in_turn):
        assert same == [True] * 9
        assert again == 2 * (9 - 4)


def run_in_many_sizes(ranks: Ranks) -> tuple[list[bool], list[int]]:
    """Training steps of ever other numbers of tokens, on record, then by steps; and the most that is kept of
    patterns, memory of backwards and records."""
    same, numbers, limit = [], [], 2
    with a_layer(ranks, 0) as layer:
        layer.patch.setattr(recorded_launches, "MOST_RECORDS", limit)
        records = layer.exchange.dispatcher.recorder.records  # type: ignore[attr-defined]
        for tokens in range(1, 5):
            inputs = inputs_of(ranks.rank, tokens, tokens)
            ours, theirs = (gradients(layer, inputs, "all", steps=steps) for steps in (False, True))
            same += [
                a is not None and b is not None and torch.equal(a, b)
                for a, b in zip(ours, theirs, strict=True)
            ]
            kept = records.patterns, records.scratches, records.launches
            numbers.append(max(map(len, kept)))
    return same, [max(numbers), limit]


def test_sizes_that_never_come_again_are_forgotten(pool: Pool) -> None:
    for same, (number, limit) in pool.run(2, run_in_many_sizes):
        assert all(same)
        assert number == limit


def gradients(
    layer: Layer, inputs: tuple[Tensor, imbrex.Routing], trained: str, *, steps: bool
) -> list[Tensor | None]:
    """y and the gradients of everything that is trained, of two backwards."""
    x_TD, routing = inputs
    x_TD = x_TD.clone().requires_grad_(trained != "experts")
    weights_TK = routing.weights_TK.clone().requires_grad_(trained != "experts")
    weights = layer.experts.gate_up_proj, layer.experts.down_proj
    weights[1].requires_grad_(trained != "all but down")
    y_TD = layer(x_TD, imbrex.Routing(ids_TK=routing.ids_TK, weights_TK=weights_TK), steps=steps, keep=True)
    found: list[Tensor | None] = [y_TD.detach()]
    for again in range(2):
        (y_TD.float() * torch.arange(y_TD.numel()).view_as(y_TD).sin()).sum().backward(retain_graph=not again)
        for leaf in (x_TD, weights_TK, *weights):
            found.append(None if leaf.grad is None else leaf.grad.clone())
            leaf.grad = None
    return found


def run_trained(ranks: Ranks, few: int, trained: str, kind: str) -> tuple[list[list[bool]], int]:
    """Of three calls, whether y and every gradient has the bits of the steps. kind: "wide", SwiGLU's gradient
    is a kernel of its own, as for rows of more than 4096 values; "halves", each expert is that of two ranks;
    or "single", calls of one token."""
    same = []
    with a_layer(ranks, few, 1 + (kind == "halves")) as layer:
        if kind == "wide":
            layer.patch.setattr(slopes, "FUSED_WIDTH", WIDTH - 1)
        for call in range(3):
            inputs = inputs_of(ranks.rank, call, 1 if kind == "single" else 7 + 3 * ranks.rank)
            pairs = zip(
                *(gradients(layer, inputs, trained, steps=steps) for steps in (False, True)), strict=True
            )
            same.append([a is b or (a is not None and b is not None and torch.equal(a, b)) for a, b in pairs])
    return same, layer.again


@pytest.mark.parametrize(
    ("few", "trained", "kind", "launches"),
    [
        (256, "all", "", 6),
        (256, "all", "single", 6),
        (0, "all", "", 6),
        (0, "all", "wide", 6),
        (0, "all", "halves", 6),
        (0, "all but down", "", 6),
        (256, "experts", "", 5),
        (256, "experts", "wide", 5),
    ],
)
def test_gradients_have_the_bits_of_those_of_the_steps(
    pool: Pool, few: int, trained: str, kind: str, launches: int
) -> None:
    """launches: of the exchange, from a record: of two forwards, and of one backward, since every second one
    has its gradients elsewhere; nothing goes home to tokens that nobody trains. The second backward of a call
    makes the steps."""
    for same, again in pool.run(2, run_trained, few, trained, kind):
        assert same == [[True] * 9] * 3
        assert again == launches


def run_added(ranks: Ranks, few: int) -> tuple[list[list[bool]], list[int], list[int]]:
    """Of six calls, whether y, the gradients of tokens, choices and experts, and that of a matrix by which
    what is added is made of tokens, have the bits of the steps; launches from a record so far; how often it
    was made."""
    same, launches, made, again = [], [], [], torch.eye(WIDTH).bfloat16().requires_grad_()
    with a_layer(ranks, few) as layer:
        for call in range(6):
            x_TD, routing = inputs_of(ranks.rank, call, 8)
            pair = []
            for steps in (False, True):
                leaf = x_TD.clone().requires_grad_(call != 1)

                def added(leaf: Tensor = leaf, turned: bool = call == 5) -> Tensor:
                    made.append(1)
                    return (again.mT @ leaf.mT).mT if turned else leaf @ again

                layer.addend = None if call == 4 else added
                y_TD = layer(leaf, routing, steps=steps, keep=call != 0)
                if call:
                    (y_TD.float() * torch.arange(y_TD.numel()).view_as(y_TD).sin()).sum().backward()
                leaves = (leaf, again, *layer.experts.parameters())
                pair.append([y_TD.detach(), *(t.grad for t in leaves if t.grad is not None)])
                again.grad = None
                layer.experts.zero_grad()
            same.append([torch.equal(*two) for two in zip(*pair, strict=True)])
            launches.append(layer.again)
    return same, launches, made


@pytest.mark.parametrize("few", [256, 0])
def test_shared_experts_join_calls_on_record(pool: Pool, few: int) -> None:
    """A forward without gradients, a training step where tokens need none, two where they do, one without
    shared experts, and one whose result lies in another order, which makes its steps. From a record: the
    forward of the fourth, and the backward of the fifth, which is the same without shared experts."""
    for same, launches, made in pool.run(2, run_added, few):
        assert [len(each) for each in same] == [1, 4, 5, 5, 4, 5]
        assert all(map(all, same))
        assert launches == [0, 0, 0, 2, 4, 4]
        assert len(made) == 2 * 5


def run_kept_elsewhere(ranks: Ranks) -> list[list[bool]]:
    """Of two calls: gradients where what is saved is kept elsewhere meanwhile, and where the forward is made
    once more in the backward, against those of a plain call."""
    same: list[list[bool]] = []
    with a_layer(ranks, 256) as layer:
        x_TD, routing = inputs_of(ranks.rank, 0, 8)

        def forward(x_TD: Tensor) -> Tensor:
            return layer(x_TD, routing, steps=False, keep=True)

        def again(x_TD: Tensor) -> Tensor:
            return checkpoint(forward, x_TD, use_reentrant=False)  # type: ignore[return-value]

        for _ in range(2):
            found = []
            for call, elsewhere in ((forward, False), (forward, True), (again, False)):
                leaf = x_TD.clone().requires_grad_()
                with torch.autograd.graph.save_on_cpu() if elsewhere else nullcontext():
                    y_TD = call(leaf)
                y_TD.float().square().sum().backward()
                found.append([y_TD.detach(), leaf.grad, *(p.grad for p in layer.experts.parameters())])
                layer.experts.zero_grad()
            same += [
                [torch.equal(*pair) for pair in zip(found[0], other, strict=True)] for other in found[1:]
            ]
    return same


def test_what_is_saved_may_be_kept_elsewhere_or_computed_again(pool: Pool) -> None:
    for same in pool.run(2, run_kept_elsewhere):
        assert same == [[True] * 4] * 4


def run_counting_rows(ranks: Ranks) -> list[list[bool]]:
    """Rows are exactly as many as there are: ranks have met when they turn to the steps."""
    with a_layer(ranks, 0) as layer:
        layer.exchange.transport.exact_rows = True  # type: ignore[attr-defined]
        inputs = inputs_of(ranks.rank, 0, 7)
        both = (gradients(layer, inputs, "all", steps=steps) for steps in (False, True))
        pairs = zip(*both, strict=True)
        return [[torch.equal(a, b) for a, b in pairs], [layer.again == 0]]  # type: ignore[arg-type]


def test_steps_behind_the_meeting_have_the_bits_too(pool: Pool) -> None:
    for same in pool.run(2, run_counting_rows):
        assert same == [[True] * 9, [True]]


def run_joined(ranks: Ranks) -> tuple[list[bool], list[int], list[int]]:
    """Four calls with gradients, behind the second beside another layer, with which rows are counted first:
    whether y has the bits of the steps, the launches from a record so far, and the waits of the host."""
    same, launches, waits, asked = [], [], [], []
    with a_layer(ranks, 0) as layer:
        dispatcher: Any = layer.exchange.dispatcher
        count, transport, other = dispatcher._count_rows, dispatcher.transport, nn.Identity()
        dispatcher._count_rows = lambda routed: asked.append(1) or count(routed)
        layer.patch.setattr(nvlink_fit, "SPARED_BY_ALL", 2 * 7 * CHOICES * WIDTH * 2)
        for call in range(4):
            if call == 2:
                transport.join(other)
            x_TD, routing = inputs_of(ranks.rank, 0, 7)
            x_TD.requires_grad_()
            ours = layer(x_TD, routing, steps=False, keep=True)
            launches.append(layer.again)
            waits.append(len(asked))
            same.append(torch.equal(ours, layer(x_TD, routing, steps=True, keep=True)))
    return same, launches, waits


def test_a_record_is_not_launched_where_rows_are_counted_from_now_on(pool: Pool) -> None:
    for same, launches, waits in pool.run(2, run_joined):
        assert same == [True] * 4
        assert launches == [0, 2, 2, 2]
        assert waits == [0, 0, 1, 3]


def run_moved(ranks: Ranks) -> tuple[list[bool], list[int], int]:
    """Of six calls as above: behind the second experts move, behind the fourth choices are counted, which
    the steps count too. And how many were."""
    same, launches, tally_WS = [], [], torch.zeros(2, EXPERTS, dtype=torch.int32)
    with a_layer(ranks, 256) as layer:
        for call in range(6):
            if call == 2:
                slots = [[2, 3], [0, 1]]
                layer.exchange.relocate(from_slots(slots, EXPERTS))
                layer.experts = Own(tuple(slots[ranks.rank]))
            if call == 4:
                layer.exchange.count_into(tally_WS)
            inputs = inputs_of(ranks.rank, call, 8)
            same.append(torch.equal(layer(*inputs, steps=False), layer(*inputs, steps=True)))
            launches.append(layer.again)
    return same, launches, int(tally_WS.sum())


def test_a_record_holds_until_experts_move_or_choices_are_counted(pool: Pool) -> None:
    for same, launches, counted in pool.run(2, run_moved):
        assert same == [True] * 6
        assert launches == [0, 2, 2, 4, 4, 6]
        assert counted == 2 * 2 * 2 * (8 * CHOICES - 2)


def run_differently(ranks: Ranks, exact: bool) -> list[Any]:
    """Rank 1 makes steps and promises nothing, where rank 0 makes its record and where it has one; then its
    input is wrong; then all is well. exact: rows are as many as there are, and nothing is recorded."""
    heard: list[Any] = []
    with a_layer(ranks, 0 if exact else 256) as layer:
        layer.exchange.transport.exact_rows = exact  # type: ignore[attr-defined]
        board: Any = getattr(layer.exchange.transport, "_board")  # noqa: B009
        first = ranks.rank == 1
        for call, (steps, wrong) in enumerate(
            [(first, False), (False, False), (first, False), (False, first), (False, False)]
        ):
            x_TD, routing = inputs_of(ranks.rank, call, 8)
            with pytest.MonkeyPatch.context() as patch:
                if steps:
                    patch.setattr("imbrex.overlap.serial.surely_fit", lambda experts: False)
                before = board.calls
                try:
                    layer(x_TD.float() if wrong else x_TD, routing, steps=steps)
                    heard.append(board.calls - before)
                except ValueError as error:
                    heard.append(str(error))
    return heard


@pytest.mark.parametrize("exact", [False, True])
def test_ranks_may_differ_and_hear_of_each_other(pool: Pool, exact: bool) -> None:
    answers = pool.run(2, run_differently, exact)
    for *meetings, said, again in answers:
        assert (meetings, again) == ([2, 1, 2], 1)
        assert said.startswith("dispatch: ")
    assert "rank 1 was given tokens that cannot be dispatched" in answers[0][3]


def run_left(ranks: Ranks) -> bool:
    """Whether an exchange goes with its last reference, before Python looks for circles."""
    gc.disable()
    try:
        with a_layer(ranks, 256) as layer:
            layer(*inputs_of(ranks.rank, 0, 8), steps=False)
            dispatcher = weakref.ref(layer.exchange.dispatcher)
            del layer.exchange
            return dispatcher() is None
    finally:
        gc.enable()


def test_a_record_holds_no_exchange(pool: Pool) -> None:
    assert pool.run(2, run_left) == [True, True]
