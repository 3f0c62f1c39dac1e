"""What autograd offers besides a plain backward, over every schedule: the gradients are the same."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.checkpoint import GraphExecGroup, checkpoint, create_selective_checkpoint_contexts

import imbrex
from imbrex.overlap import Events, Serial, chunks
from imbrex.placement import from_slots
from tests.emulated import kernel
from tests.ranks.emulated_nvlink import EmulatedNvlink
from tests.ranks.layer_jobs import Case, make_layer
from tests.ranks.pool import Pool, Ranks
from tests.ranks.test_fused import emulating, inputs_of
from tests.ranks.test_fused_moving import CONFIG as KERNELS
from tests.ranks.test_fused_moving import Housed
from tests.ranks.test_layer import relative

CONFIG = imbrex.MoEConfig(
    hidden_size=64,
    intermediate_size=24,
    num_experts=8,
    top_k=3,
    shared=imbrex.SharedExperts(intermediate_size=16),
)
NEEDS_GPP = pytest.mark.skipif(not kernel.available(), reason="the emulation needs g++")
TRANSPORTS = ["alltoall", pytest.param("nvlink", marks=NEEDS_GPP)]
SCHEDULES: dict[str, Any] = {
    "serial": "serial",
    "rows again": Serial(keep_rows=False),
    "chunks": "optsche-2",
    "fused": "fused",
    "events": Events(),
    "patient": Events(5.0, 1),
}


def make(
    ranks: Ranks, transport: str, schedule: str, experts: str = "auto", tokens: int = 5
) -> tuple[Any, Tensor]:
    """A layer of a new group of its own parts, and tokens: so many, and more on other ranks."""
    emulated = ranks.device == "cpu" and transport == "nvlink"
    over = EmulatedNvlink(ranks.group, timeout=60.0) if emulated else transport
    options = {"transport": over, "schedule": SCHEDULES[schedule], "experts": experts}
    dtype = torch.bfloat16 if transport == "nvlink" else torch.float32
    torch.manual_seed(0)
    layer: Any = make_layer(Case(config=CONFIG, dtype=dtype, options=options), ranks.group, ranks.device)
    torch.manual_seed(ranks.rank)
    return layer, torch.randn(tokens + 4 * ranks.rank, 64, device=ranks.device, dtype=dtype).requires_grad_()


def go_back(y_TD: Tensor) -> None:
    y_TD.float().square().sum().backward()


def plain(layer: Any, x_TD: Tensor) -> None:
    go_back(layer(x_TD))


def saved_elsewhere(layer: Any, x_TD: Tensor) -> None:
    with torch.autograd.graph.saved_tensors_hooks(lambda saved: saved.detach().clone(), lambda copy: copy):
        y_TD = layer(x_TD)
    go_back(y_TD)


def calls_of(layer: Any, x_TD: Tensor, run: Callable[[Tensor], Any], *groups: Any) -> int:
    """How often a backward of `run` calls the layer, the forward included."""
    calls = []
    hook = layer.gate.register_forward_hook(lambda *_: calls.append(1))
    y_TD = run(x_TD)
    with groups[0] if groups else nullcontext():
        go_back(y_TD)
    hook.remove()
    return len(calls)


CHECKPOINT = partial(checkpoint, use_reentrant=False)


def checkpointed(layer: Any, x_TD: Tensor) -> None:
    """One forward more, whatever the parts of a backward."""
    assert calls_of(layer, x_TD, partial(CHECKPOINT, layer)) == 2


def checkpointed_in_a_group(layer: Any, x_TD: Tensor) -> None:
    assert calls_of(layer, x_TD, partial(CHECKPOINT, layer), GraphExecGroup()) == 2


def checkpointed_twice(layer: Any, x_TD: Tensor) -> None:
    """One inside the other, which runs the forward once more for what is saved behind the inner one."""
    one = torch.ones((), dtype=x_TD.dtype)
    assert calls_of(layer, x_TD, partial(CHECKPOINT, lambda x_TD: CHECKPOINT(layer, x_TD) * one)) == 3


def checkpointed_by_operator(layer: Any, x_TD: Tensor) -> None:
    """Torch refuses to run such a forward again twice."""
    products = partial(create_selective_checkpoint_contexts, [torch.ops.aten.mm.default])
    assert calls_of(layer, x_TD, partial(CHECKPOINT, layer, context_fn=products)) == 2


def checkpointed_reentrant(layer: Any, x_TD: Tensor) -> None:
    go_back(checkpoint(layer, x_TD, use_reentrant=True))


def evaluated_before(layer: Any, x_TD: Tensor) -> None:
    layer.eval()
    with torch.inference_mode():
        layer(x_TD)
    layer.train()
    plain(layer, x_TD)


def with_hooks_of_modules(layer: Any, x_TD: Tensor) -> None:
    for module in (layer, layer.experts):
        module.register_full_backward_hook(lambda *_: None)
    plain(layer, x_TD)


def with_another_graph(layer: Any, x_TD: Tensor) -> None:
    """A second call is under way when the first goes back."""
    y_TD, other_TD = layer(x_TD), layer(2 * x_TD.detach())
    go_back(y_TD)
    gradients = [parameter.grad.clone() for parameter in layer.parameters()]
    go_back(other_TD)
    for parameter, gradient in zip(layer.parameters(), gradients, strict=True):
        parameter.grad = gradient


def run_steps(
    ranks: Ranks, transport: str, schedule: str, ways: list[Callable[..., None]], tokens: int = 5
) -> list[str]:
    """The gradients that differ from those of a plain backward, by way."""
    differ: list[str] = []
    usual: dict[str, Any] = {}
    for way in (plain, *ways):
        layer, x_TD = make(ranks, transport, schedule, tokens=tokens)
        way(layer, x_TD)
        gradients: dict[str, Any] = {"x": x_TD.grad}
        gradients |= {name: p.grad for name, p in layer.named_parameters()}
        usual = usual or gradients
        close = 1e-6 if way is saved_elsewhere and x_TD.dtype == torch.float32 else 0.0
        for name, gradient in gradients.items():
            if gradient is None or relative(gradient, usual[name]) > close:
                differ.append(f"{way.__name__}: {name}")
        layer.close()
    return differ


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_gradients_are_those_of_a_plain_backward(pool: Pool, transport: str, schedule: str) -> None:
    ways = [
        saved_elsewhere,
        checkpointed,
        checkpointed_in_a_group,
        checkpointed_twice,
        checkpointed_by_operator,
        checkpointed_reentrant,
        evaluated_before,
        with_hooks_of_modules,
        with_another_graph,
    ]
    assert pool.run(2, run_steps, transport, schedule, ways) == [[]] * 2


def over_kernels(ranks: Ranks, nvlink: Any, schedule: str) -> tuple[Any, Tensor]:
    """A layer over emulated kernels, of which fused ones bring rows, and tokens."""
    torch.manual_seed(1)
    place = from_slots([[0, 1, 2, 3], [4, 5, 6, 7]], 8)
    layer = imbrex.MoELayer(
        *(KERNELS, ranks.group),
        placement=place,
        transport=nvlink,
        schedule=SCHEDULES[schedule],
        experts=Housed(place.local(ranks.rank)),
        dtype=torch.bfloat16,
    )
    return layer, inputs_of(ranks.rank, 20 + 9 * ranks.rank)[0]


def run_kept(ranks: Ranks, transport: str, schedule: str, again: bool) -> set[str]:
    """Tensors that a call still holds when its caller has let go of them; of one that runs `again`, rows in
    and out of experts among them."""
    made: dict[str, StorageWeakRef] = {}

    def note(name: str, tensor: Tensor) -> None:
        made.setdefault(name, StorageWeakRef(tensor.untyped_storage()))

    with emulating(ranks) if transport == "kernels" else nullcontext() as nvlink:
        if nvlink is None:
            layer, x_TD = make(ranks, transport, schedule)
            layer.shared_expert.register_forward_hook(lambda *call: note("shared", call[-1]))
        else:
            layer, x_TD = over_kernels(ranks, nvlink[0], schedule)
        if again or nvlink is not None:
            layer.experts.register_forward_hook(lambda *call: note("rows out", call[-1]))
        if again:
            layer.experts.register_forward_hook(lambda *call: note("rows in", call[1][0].rows_RD))
        layer.register_forward_hook(lambda *call: note("output", call[-1]))
        total = (CHECKPOINT(layer, x_TD) if again else layer(x_TD)).sum()
        alive = {name for name, reference in made.items() if not reference.expired()}
        total.backward()
    assert len(made) == 2 + again + (again and nvlink is None)
    return alive


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("transport", ["alltoall", pytest.param("kernels", marks=NEEDS_GPP)])
def test_a_call_keeps_none_of_its_results(pool: Pool, transport: str, schedule: str) -> None:
    """Nor does a backward want those of experts that multiply by the weights: as large as all rows."""
    assert pool.run(2, run_kept, transport, schedule, False) == [set()] * 2


@pytest.mark.parametrize("schedule", ["serial", "chunks", "fused"])
@pytest.mark.parametrize("transport", ["alltoall", pytest.param("kernels", marks=NEEDS_GPP)])
def test_a_checkpointed_call_keeps_no_rows(pool: Pool, transport: str, schedule: str) -> None:
    """Events keep rows that came, since they may have to compute on fewer of them."""
    assert pool.run(2, run_kept, transport, schedule, True) == [set()] * 2


def run_frozen(ranks: Ranks, transport: str, schedule: str, autocast: bool) -> bool:
    """Whether the tokens' gradients are the usual ones, and experts have none, that were frozen between a
    forward and its backward."""
    usual: Tensor | None = None
    for freezes in (False, True):
        layer, x_TD = make(ranks, transport, schedule)
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            y_TD = layer(x_TD)
        layer.experts.requires_grad_(not freezes)
        go_back(y_TD)
        assert x_TD.grad is not None
        usual = x_TD.grad if usual is None else usual
        without = all((p.grad is None) == freezes for p in layer.experts.parameters())
        if not without or not torch.equal(x_TD.grad, usual):
            return False
        layer.close()
    return True


@pytest.mark.parametrize(
    ("schedule", "autocast"), [("serial", False), ("chunks", False), ("chunks", True), ("events", False)]
)
def test_experts_are_frozen_between_a_forward_and_its_backward(
    pool: Pool, schedule: str, autocast: bool
) -> None:
    assert pool.run(2, run_frozen, "alltoall", schedule, autocast) == [True] * 2


def run_under_way(ranks: Ranks, schedule: str) -> tuple[list[bool], int]:
    """Whether gradients of fused kernels are those of a plain backward where it asks others for what was
    saved; and how many rows of dy came beside their product, which was that of the plain one."""
    ways, usual, staged = (plain, checkpointed, saved_elsewhere, checkpointed_reentrant), [], []
    same: list[bool] = []
    with emulating(ranks) as (nvlink, _), pytest.MonkeyPatch.context() as patch:
        bring = chunks.bring_gradient
        patch.setattr(chunks, "bring_gradient", lambda *args: staged.append(1) or bring(*args))
        for way in ways:
            layer, x_TD = over_kernels(ranks, nvlink, schedule)
            way(layer, x_TD)
            gradients = [x_TD.grad, *(p.grad for p in layer.parameters())]
            usual = usual or gradients
            same.append(all(torch.equal(a, b) for a, b in zip(gradients, usual, strict=True)))  # pyright: ignore
            layer.check(synchronize=True)
    return same, len(staged)


@NEEDS_GPP
@pytest.mark.parametrize("schedule", ["fused", "events"])
def test_no_gradient_is_under_way_while_a_forward_runs_again(pool: Pool, schedule: str) -> None:
    """It would wait for rows that are staged for the forward's kernels by then. In a checkpoint of torch's
    older kind the forward has run again before."""
    assert pool.run(2, run_under_way, schedule) == [([True] * 4, 2)] * 2


def run_experts_again(ranks: Ranks, schedule: str) -> list[bool]:
    """Whether gradients are those of a plain backward where experts alone are checkpointed, and another call
    comes between a forward and its backward."""
    answers: list[list[Tensor]] = []
    with emulating(ranks) as (nvlink, _):
        for again in (False, True):
            layer, x_TD = over_kernels(ranks, nvlink, schedule)
            if again:
                run = layer.experts.forward
                layer.experts.forward = lambda rows, run=run: checkpoint(run, rows, use_reentrant=False)
            with_another_graph(layer, x_TD)
            answers.append([gradient_of(leaf) for leaf in (x_TD, *layer.parameters())])
            layer.check(synchronize=True)
    return [torch.equal(a, b) for a, b in zip(*answers, strict=True)]


def run_two_in_one(ranks: Ranks, schedule: str) -> tuple[list[bool], int]:
    """Whether gradients of two calls in one checkpoint are those of a plain backward; and the calls."""
    answers: list[list[Tensor]] = []
    calls = 0
    with emulating(ranks) as (nvlink, _):
        for again in (False, True):
            layer, x_TD = over_kernels(ranks, nvlink, schedule)
            twice = lambda x_TD, layer=layer: layer(layer(x_TD))  # noqa: E731
            calls = calls_of(layer, x_TD, partial(CHECKPOINT, twice) if again else twice)
            answers.append([gradient_of(leaf) for leaf in (x_TD, *layer.parameters())])
    return [torch.equal(a, b) for a, b in zip(*answers, strict=True)], calls


@NEEDS_GPP
@pytest.mark.parametrize("schedule", ["chunks", "fused", "events"])
def test_two_calls_in_one_checkpoint_run_again_once(pool: Pool, schedule: str) -> None:
    """The backward of the first uses what the second one's backward has computed again: there were nine calls
    of each in two chunks, and four by the others."""
    assert pool.run(2, run_two_in_one, schedule) == [([True] * 4, 4)] * 2


def gradient_of(leaf: Tensor) -> Tensor:
    assert leaf.grad is not None
    return leaf.grad


@NEEDS_GPP
@pytest.mark.parametrize("schedule", ["serial", "fused", "events"])
def test_experts_that_run_again_find_their_rows(pool: Pool, schedule: str) -> None:
    """What is staged for kernels by then is of the other call."""
    assert pool.run(2, run_experts_again, schedule) == [[True] * 4] * 2


def run_watched(ranks: Ranks, transport: str, schedule: str, experts: str = "auto") -> bool:
    """Whether gradients are finite where autograd raises at NaN, with rows to spare that hold it."""
    layer, x_TD = make(ranks, transport, schedule, experts)
    with torch.autograd.set_detect_anomaly(True):
        plain(layer, x_TD)
    return all(bool(p.grad.isfinite().all()) for p in layer.parameters())


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_memory_that_nobody_writes_is_no_anomaly(pool: Pool, transport: str, schedule: str) -> None:
    assert pool.run(2, run_watched, transport, schedule) == [True] * 2
