"""The layer over the NVLink kernels, one process a GPU, against the oracle and against all-to-all."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

import imbrex
from imbrex.exchange import recorded
from imbrex.overlap import Serial
from imbrex.router.capacity import Capacity
from tests.gpu.gpus import RANKS, worlds
from tests.poison import real_empty
from tests.ranks.layer_jobs import Case, coefficients, make_layer, run_layer, tokens_of
from tests.ranks.pool import Pool, Ranks
from tests.ranks.test_layer import largest_error, relative

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(300),
    pytest.mark.skipif(RANKS < 2, reason="NVLink needs two GPUs"),
]
CONFIG = imbrex.MoEConfig(hidden_size=256, intermediate_size=128, num_experts=12, top_k=3)
NVLINK = Case(config=CONFIG, dtype=torch.bfloat16, tokens=(70, 0, 33, 128), options={"transport": "nvlink"})


@pytest.mark.parametrize("experts", ["grouped", "kernels", "gelu"])
@pytest.mark.parametrize("world", worlds())
def test_outputs_and_all_gradients_twice_the_same_bits(nccl: Pool, world: int, experts: str) -> None:
    """gelu: experts that leave their rows to be weighted by the exchange."""
    case = replace(NVLINK, options={"transport": "nvlink", "experts": experts})
    if experts == "gelu":
        config = replace(CONFIG, activation="gelu", bias=True)
        case = replace(NVLINK, config=config, options={"transport": "nvlink", "experts": "grouped"})
    results, again = (nccl.run(world, run_layer, case) for _ in range(2))
    errors = largest_error(case, world, results)
    assert max(errors.values()) < 0.03, errors
    for first, second in zip(results, again, strict=True):
        assert torch.equal(first["y"], second["y"])
        for name, grad in first["grads"].items():
            assert torch.equal(grad, second["grads"][name]), name


@pytest.mark.parametrize("world", worlds())
def test_the_same_bits_as_all_to_all(nccl: Pool, world: int) -> None:
    """Both round a partial sum once to cross, and sum in the same order."""
    ours = nccl.run(world, run_layer, NVLINK)
    theirs = nccl.run(world, run_layer, replace(NVLINK, options={"transport": "alltoall"}))
    for first, second in zip(ours, theirs, strict=True):
        assert relative(first["y"], second["y"]) < 2e-3
        assert relative(first["x_grad"], second["x_grad"]) < 4e-3


@pytest.mark.parametrize("split", ["even", "balanced", "nearest"])
def test_replicas_and_tensor_ranks(nccl: Pool, split: str) -> None:
    world = worlds()[-1]
    slots = [[0, 1, 2, 3, 4, 5, 11], [6, 7, 8, 9, 10, 11, 0]]
    case = replace(
        NVLINK, slots=slots, tensor_parallel=world // 2, options={"transport": "nvlink", "split": split}
    )
    errors = largest_error(case, world, nccl.run(world, run_layer, case))
    assert max(errors.values()) < 0.03, errors


def test_fp8_on_the_wire(nccl: Pool) -> None:
    """As in `tests/ranks/test_layer_nvlink.py`, and close to the same layer over all-to-all."""
    config = replace(CONFIG, hidden_size=1024)
    case = replace(NVLINK, config=config, options={"transport": "nvlink", "codec": "fp8"})
    world = worlds()[-1]
    ours = nccl.run(world, run_layer, case)
    theirs = nccl.run(world, run_layer, replace(case, options={"transport": "alltoall", "codec": "fp8"}))
    for first, second in zip(ours, theirs, strict=True):
        assert relative(first["y"], second["y"]) < 0.015
        assert relative(first["x_grad"], second["x_grad"]) < 0.015


@pytest.mark.parametrize("tokens", [(70, 0, 33, 128), (600, 1, 520, 700)])
def test_rows_dispatched_again(nccl: Pool, tokens: tuple[int, ...]) -> None:
    """The bits of rows that were kept, in one kernel and in two."""
    case, world = replace(NVLINK, tokens=tokens), worlds()[-1]
    kept = nccl.run(world, run_layer, case)
    again = replace(case, options={**case.options, "schedule": Serial(keep_rows=False)})
    for first, second in zip(kept, nccl.run(world, run_layer, again), strict=True):
        assert torch.equal(first["y"], second["y"])
        assert torch.equal(first["x_grad"], second["x_grad"])
        for name, grad in first["grads"].items():
            assert torch.equal(grad, second["grads"][name]), name


LONG = (600, 1, 520, 700)
"""Tokens of a rank that do not come in one kernel."""


@pytest.mark.parametrize("width", [256, 4608])
@pytest.mark.parametrize("world", worlds())
def test_fused_has_the_bits_of_serial(nccl: Pool, world: int, width: int) -> None:
    """Outputs and all gradients; of wide rows SwiGLU's gradient is a kernel of its own."""
    config = replace(CONFIG, hidden_size=width)
    case = replace(NVLINK, config=config, tokens=LONG)
    fused = replace(case, options={"transport": "nvlink", "schedule": "fused"})
    for first, second in zip(
        nccl.run(world, run_layer, case), nccl.run(world, run_layer, fused), strict=True
    ):
        assert torch.equal(first["y"], second["y"])
        assert torch.equal(first["x_grad"], second["x_grad"])
        for name, grad in first["grads"].items():
            assert torch.equal(grad, second["grads"][name]), name


@pytest.mark.parametrize("split", ["even", "balanced"])
def test_fused_with_replicas_and_tensor_ranks(nccl: Pool, split: str) -> None:
    world, slots = worlds()[-1], [[0, 1, 2, 3, 4, 5, 11], [6, 7, 8, 9, 10, 11, 0]]
    case = replace(NVLINK, slots=slots, tensor_parallel=world // 2, tokens=LONG)
    both = []
    for schedule in ("serial", "fused"):
        options = {"transport": "nvlink", "split": split, "schedule": schedule}
        both.append(nccl.run(world, run_layer, replace(case, options=options)))
    for first, second in zip(*both, strict=True):
        assert torch.equal(first["y"], second["y"])
        assert torch.equal(first["x_grad"], second["x_grad"])


def test_a_captured_fused_layer_follows_its_tokens(nccl: Pool) -> None:
    case = replace(NVLINK, tokens=LONG, options={"transport": "nvlink", "schedule": "fused"})
    for same in nccl.run(worlds()[-1], run_captured, case, 8):
        assert same == [True] * 8


def run_random_calls(ranks: Ranks, case: Case, calls: int) -> int:
    """Steps with changing numbers of tokens of which an output or a gradient has not the bits of serial."""
    fused = make_layer(
        replace(case, options={**case.options, "schedule": "fused"}), ranks.group, ranks.device
    )
    serial = make_layer(case, ranks.group, ranks.device)
    wrong = 0
    for call in range(calls):
        torch.manual_seed(1000 * ranks.rank + call)
        tokens = int(torch.randint(257, 900, ()))
        x_TD = torch.randn(tokens, case.config.hidden_size, device=ranks.device, dtype=case.dtype)
        x_TD.requires_grad_()
        answers = []
        for layer in (fused, serial):
            y_TD = layer(x_TD)
            leaves = [x_TD, *layer.parameters()]
            answers.append([y_TD, *torch.autograd.grad(y_TD, leaves, coefficients(y_TD).to(y_TD.dtype))])
        wrong += not all(torch.equal(one, other) for one, other in zip(*answers, strict=True))
    return wrong


def test_random_calls_have_the_bits_of_serial(nccl: Pool) -> None:
    case = replace(NVLINK, tokens=(899,) * 4)
    assert nccl.run(worlds()[-1], run_random_calls, case, 1000) == [0] * worlds()[-1]


def run_picked(ranks: Ranks, case: Case) -> str:
    return make_layer(case, ranks.group, ranks.device).reasons["transport"]


def test_auto_picks_it_for_bfloat16(nccl: Pool) -> None:
    case = replace(NVLINK, options={})
    (picked,) = set(nccl.run(2, run_picked, case))
    assert picked.startswith("nvlink: bfloat16 tokens on GPUs of one host that reach each other's memory; a")
    (other,) = set(nccl.run(2, run_picked, replace(case, dtype=torch.float32)))
    assert other.endswith("; not nvlink: tokens are float32, not bfloat16")


def run_recorded(ranks: Ranks, case: Case) -> list[bool]:
    """Of four calls from a record and by steps, whether y and all gradients have the same bits."""
    layer, same = make_layer(case, ranks.group, ranks.device), []
    with pytest.MonkeyPatch.context() as patch:
        for call in range(4):
            torch.manual_seed(100 * call + ranks.rank)
            x_TD, found = torch.randn_like(tokens_of(case, ranks.rank)).to(ranks.device), []
            for steps in (False, True):
                patch.setattr(recorded, "on_gpu", lambda x_TD, steps=steps: not steps)
                with torch.no_grad():
                    found.append([layer(x_TD)])
                leaf = x_TD.clone().requires_grad_()
                y_TD = layer(leaf)
                (y_TD.float() * coefficients(y_TD)).sum().backward()
                found[-1] += [y_TD.detach(), leaf.grad, *(p.grad for p in layer.parameters())]
                layer.zero_grad()
            same.append(all(torch.equal(*pair) for pair in zip(*found, strict=True)))
    return same


RECORDED = {
    "plain": CONFIG,
    "shared": replace(CONFIG, shared=imbrex.SharedExperts(intermediate_size=64)),
    "wide": replace(CONFIG, hidden_size=7168),
}


@pytest.mark.parametrize("config", RECORDED)
@pytest.mark.parametrize("tokens", [(64, 7, 33, 128), (300, 130, 5, 512), (300, 0, 5, 512)])
def test_calls_from_a_record_have_the_bits_of_their_steps(
    nccl: Pool, tokens: tuple[int, ...], config: str
) -> None:
    options = {"transport": "nvlink", "experts": "kernels"}
    case = replace(NVLINK, config=RECORDED[config], tokens=tokens, options=options)
    for same in nccl.run(worlds()[-1], run_recorded, case):
        assert same == [True] * 4


def run_captured(ranks: Ranks, case: Case, replays: int) -> list[bool]:
    """Gate, dispatch, experts and combine replayed on changing tokens: the bits of calls without a graph."""
    layer = make_layer(case, ranks.group, ranks.device)
    x_TD = tokens_of(case, ranks.rank).to(ranks.device)
    same = []
    with torch.no_grad():
        layer(x_TD)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            y_TD = layer(x_TD)
        for replay in range(replays):
            torch.manual_seed(100 * replay + ranks.rank)
            x_TD.copy_(torch.randn_like(x_TD))
            graph.replay()
            torch.cuda.synchronize()
            same.append(torch.equal(layer(x_TD), y_TD))
            torch.cuda.synchronize()
    return same


@pytest.mark.parametrize("tokens", [(64, 7, 33, 128), (300, 130, 5, 512)])
@pytest.mark.parametrize("experts", ["grouped", "kernels"])
def test_a_captured_layer_follows_its_tokens(nccl: Pool, tokens: tuple[int, ...], experts: str) -> None:
    case = replace(NVLINK, tokens=tokens, options={"transport": "nvlink", "experts": experts})
    for same in nccl.run(worlds()[-1], run_captured, case, 8):
        assert same == [True] * 8


def run_one_kernel(ranks: Ranks, case: Case, replays: int) -> tuple[list[bool], int, int]:
    """Dispatch and experts in one kernel, called and captured: whether y has the bits of two; how many calls
    took it by default, of one, and of all."""
    layer, taken = make_layer(case, ranks.group, ranks.device), []
    transport: Any = layer.exchange.transport
    x_TD = tokens_of(case, ranks.rank).to(ranks.device)
    with torch.no_grad(), pytest.MonkeyPatch.context() as patch:
        run = recorded.run_few
        patch.setattr(recorded, "run_few", lambda *call, **how: taken.append(1) or run(*call, **how))
        layer(x_TD)
        default, transport.one_kernel = len(taken), True
        layer(x_TD)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            y_TD = layer(x_TD)
        same = []
        for replay in range(replays):
            torch.manual_seed(100 * replay + ranks.rank)
            x_TD.copy_(torch.randn_like(x_TD))
            graph.replay()
            torch.cuda.synchronize()
            for one in (False, True):
                transport.one_kernel = one
                same.append(torch.equal(layer(x_TD), y_TD))
            torch.cuda.synchronize()
        layer.check(synchronize=True)
        transport.one_kernel = None
    return same, default, len(taken)


@pytest.mark.parametrize("tokens", [(1, 1, 1, 1), (64, 7, 33, 128)])
def test_a_dispatch_and_its_experts_in_one_kernel(nccl: Pool, tokens: tuple[int, ...]) -> None:
    case = replace(NVLINK, tokens=tokens, options={"transport": "nvlink", "experts": "kernels"})
    for same, default, taken in nccl.run(worlds()[-1], run_one_kernel, case, 8):
        assert same == [True] * 16
        assert default == (max(tokens) <= 2)
        assert taken >= default + 2, "a call and a capture"


def run_silent(ranks: Ranks, case: Case) -> None:
    """Nothing between tokens and gradients waits for the GPU."""
    layer = make_layer(case, ranks.group, ranks.device)
    x_TD = tokens_of(case, ranks.rank).to(ranks.device).requires_grad_()
    for call in range(3):
        y_TD = layer(x_TD)
        y_TD.backward(torch.ones_like(y_TD))
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error" if call else "default")
    torch.cuda.set_sync_debug_mode("default")


def test_no_host_synchronisation(nccl: Pool) -> None:
    nccl.run(worlds()[-1], run_silent, NVLINK)


def test_dropped_choices_and_shared_experts(nccl: Pool) -> None:
    gate = imbrex.Gate(capacity=Capacity(factor=0.7))
    config = imbrex.MoEConfig(
        hidden_size=256,
        intermediate_size=128,
        num_experts=12,
        top_k=3,
        gate=gate,
        activation="gelu",
        bias=True,
    )
    case = replace(NVLINK, config=config)
    world = worlds()[-1]
    results = nccl.run(world, run_layer, case)
    assert sum(int((~r["kept"]).sum()) for r in results) > 0
    errors = largest_error(case, world, results)
    assert max(errors.values()) < 0.03, errors


def run_many(ranks: Ranks, case: Case, calls: int) -> float:
    """Two layers that share a heap, called in turn with changing numbers of tokens, beside all-to-all."""
    layers = [make_layer(case, ranks.group, ranks.device) for _ in range(2)]
    other = make_layer(replace(case, options={"transport": "alltoall"}), ranks.group, ranks.device)
    assert layers[0].exchange.transport is layers[1].exchange.transport
    worst = 0.0
    layers[0](tokens_of(replace(case, tokens=(128,)), ranks.rank).to(ranks.device))
    for call in range(calls):
        tokens = tuple(
            int(t) for t in torch.randint(0, 128, (4,), generator=torch.Generator().manual_seed(call))
        )
        x_TD = tokens_of(replace(case, tokens=tokens), ranks.rank).to(ranks.device)
        y_TD, truth = layers[call % 2](x_TD), other(x_TD)
        if y_TD.numel():
            worst = max(worst, relative(y_TD, truth))
    return worst


def test_many_calls_of_two_layers(nccl: Pool) -> None:
    assert max(nccl.run(worlds()[-1], run_many, NVLINK, 60)) < 4e-3


def run_compiled(ranks: Ranks, case: Case) -> float:
    layer = make_layer(case, ranks.group, ranks.device)
    x_TD = tokens_of(case, ranks.rank).to(ranks.device)
    with real_empty():
        compiled = torch.compile(layer, fullgraph=True, backend="aot_eager", dynamic=True)
        grads: list[Any] = []
        for run in (layer, compiled):
            x = x_TD.clone().requires_grad_()
            y = run(x)
            (y.float() * coefficients(y)).sum().backward()
            grads.append((y.detach(), x.grad))
    return max(relative(b, a) for a, b in zip(*grads, strict=True))


@pytest.mark.parametrize("schedule", ["serial", "fused"])
def test_one_compiled_graph(nccl: Pool, schedule: str) -> None:
    options = {"transport": "nvlink", "schedule": schedule}
    for tokens in ((70, 5, 33, 128), LONG):
        case = replace(NVLINK, tokens=tokens, options=options)
        assert max(nccl.run(worlds()[-1], run_compiled, case)) < 1e-3


def run_wrong(ranks: Ranks, case: Case) -> str:
    layer = make_layer(case, ranks.group, ranks.device)
    try:
        layer(torch.randn(4, 256 + 8 * ranks.rank, device=ranks.device).bfloat16())
    except ValueError as error:
        return str(error)
    return "nothing was raised"


def test_a_wrong_width_stops_every_rank_at_the_first_call(nccl: Pool) -> None:
    config = imbrex.MoEConfig(hidden_size=256, intermediate_size=128, num_experts=8, top_k=3)
    answers = nccl.run(2, run_wrong, replace(NVLINK, config=config))
    assert answers[1] == "dispatch: on rank 1, x has 2 dimensions and last size 264; give tokens [T, 256]"
    assert answers[0] == "dispatch: rank 1 was given tokens that cannot be dispatched"


@pytest.mark.parametrize("schedule", ["optsche-1", "optsche-3", "stage-major-2"])
@pytest.mark.parametrize("options", [{"experts": "kernels"}, {"experts": "grouped"}, {"codec": "fp8"}])
def test_chunks_have_the_numbers_of_serial(nccl: Pool, schedule: str, options: dict[str, Any]) -> None:
    """As in `tests/ranks/test_layer_nvlink.py`; products of fewer rows may round otherwise."""
    config = replace(CONFIG, hidden_size=1024)
    case = replace(
        NVLINK, config=config, tokens=(1600, 0, 520, 700), options={"transport": "nvlink", **options}
    )
    serial = nccl.run(worlds()[-1], run_layer, case)
    chunked = replace(case, options={**case.options, "schedule": schedule})
    for theirs, ours in zip(serial, nccl.run(worlds()[-1], run_layer, chunked), strict=True):
        assert relative(ours["y"], theirs["y"]) < 4e-3
        assert relative(ours["x_grad"], theirs["x_grad"]) < 4e-3
        for name, grad in theirs["grads"].items():
            assert relative(ours["grads"][name], grad) < 8e-3, name


@pytest.mark.parametrize("tokens", [(70, 0, 33, 128), (2, 0, 1, 0), (0,)])
def test_small_chunks_of_tensor_ranks(nccl: Pool, tokens: tuple[int, ...]) -> None:
    world = worlds()[-1]
    options = {"transport": "nvlink", "schedule": "exact-3"}
    case = replace(NVLINK, tokens=tokens, tensor_parallel=world // 2, options=options)
    results = nccl.run(world, run_layer, case)
    if any(tokens):
        errors = largest_error(case, world, results)
        assert max(errors.values()) < 0.03, errors


def test_captured_chunks_follow_their_tokens(nccl: Pool) -> None:
    options = {"transport": "nvlink", "experts": "kernels", "schedule": "optsche-2"}
    for same in nccl.run(worlds()[-1], run_captured, replace(NVLINK, options=options), 8):
        assert same == [True] * 8


def test_chunks_without_host_synchronisation(nccl: Pool) -> None:
    case = replace(NVLINK, tokens=(1200, 700), options={"transport": "nvlink", "schedule": "optsche-2"})
    nccl.run(worlds()[-1], run_silent, case)


def run_auto(ranks: Ranks, case: Case) -> tuple[str, float]:
    layer = make_layer(case, ranks.group, ranks.device)
    serial = make_layer(replace(case, options={"transport": "nvlink"}), ranks.group, ranks.device)
    x_TD = tokens_of(case, ranks.rank).to(ranks.device)
    error = relative(layer(x_TD), serial(x_TD))
    return layer.reasons["schedule"], error


def test_schedule_auto_measures_chunks(nccl: Pool) -> None:
    case = replace(NVLINK, tokens=(1200, 700), options={"transport": "nvlink", "schedule": "auto"})
    for reason, error in nccl.run(2, run_auto, case):
        assert reason.startswith("auto: ")
        assert any(word in reason for word in (" ms forward and ", "measured", " times as fast"))
        assert error < 4e-3


def test_chunks_give_fp8_experts_their_rows(nccl: Pool) -> None:
    config = replace(CONFIG, hidden_size=1024)
    options = {"transport": "nvlink", "experts": "kernels-fp8", "codec": "fp8"}
    case = replace(NVLINK, config=config, tokens=(1200, 700), options=options)
    chunked = replace(case, options=options | {"schedule": "optsche-2"})
    serial, ours = (nccl.run(2, run_inference, one) for one in (case, chunked))
    for mine, theirs in zip(ours, serial, strict=True):
        assert relative(mine, theirs) < 4e-3


def run_inference(ranks: Ranks, case: Case) -> torch.Tensor:
    layer = make_layer(case, ranks.group, ranks.device)
    with torch.no_grad():
        return layer(tokens_of(case, ranks.rank).to(ranks.device)).cpu()
