"""The host's time, on a machine without a GPU: calls of a step over NVLink, counted with kernels that do
nothing, and what the benchmark's result file says."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from benchmarks import host_time
from torch.nn.utils import parametrize

from imbrex.bench.results import check_results
from imbrex.runtime.members import member
from imbrex.runtime.tracing import Node
from tests.ranks.forked import run_code

COUNT = """
import os, sys
import torch
import torch.distributed as dist
from benchmarks import host_time
from tests.way import files_of

def nodes(root):
    found, left = set(), [root]
    while left:
        node = left.pop()
        if node is not None and node not in found:
            found.add(node)
            left += [of for of, _ in node.next_functions]
    return len(found)

store = f"file://{sys.argv[1]}/store"
dist.init_process_group("gloo", init_method=store, rank=0, world_size=1)
host_time.idle()
torch.autograd.set_multithreading_enabled(False)  # on the thread that is watched
for tokens, schedule in ((300, "serial"), (16, "serial"), (300, "fused")):
    layer = host_time.make_layer("mixtral", tokens, schedule)
    x = torch.randn(tokens, host_time.WIDTH, dtype=torch.bfloat16).requires_grad_()
    forward, step = host_time.forward_and_step(layer, x, torch.randn_like(x))
    for call in (forward, step):
        call()
        call()
        host_time.Idle.launches = 0
        print(len(files_of(call)), host_time.Idle.launches)
    y = layer(x)  # kept: before torch 2.13 a node whose result is gone cannot be asked
    print(nodes(y.grad_fn))
hidden, look_up = [], torch.nn.Module.__getattr__
torch.nn.Module.__getattr__ = lambda module, name: hidden.append(name) or look_up(module, name)
step()
print(hidden)
sys.stdout.flush()
os._exit(0)
"""


def test_a_step_from_a_record_makes_few_calls(tmp_path: Path) -> None:
    """Calls of the package's functions by a forward and by a step, and launches; then autograd's nodes: the
    gate, the rest of the layer and four leaves. Of 300 tokens, then of 16, both of whose products one launch
    makes where no backward follows, and of 300 that are fused."""
    *said, hidden = run_code(COUNT, str(tmp_path), folder=tmp_path).splitlines()[:10]
    assert hidden == "[]", "nn.Module's own look-up, behind an error: use runtime.members"
    lines = [tuple(map(int, line.split())) for line in said]
    for (forward, launches), (step, all_launches), (nodes,), least, most, more in (
        (*lines[:3], 7, 16, 0),
        (*lines[3:6], 5, 15, 0),
        (*lines[6:], 7, 14, 12),
    ):
        assert forward <= 93 + more
        assert step <= 128 + more
        assert (launches, all_launches, nodes) == (least, most, 6)


def test_a_member_is_what_the_module_says() -> None:
    """A parametrized weight is no parameter of the module's any more, nor is one that a call replaces."""
    inner = torch.nn.Linear(2, 2, bias=False)
    outer = torch.nn.Sequential(inner)
    assert member(outer, "0") is inner
    assert member(inner, "weight") is inner.weight
    assert member(inner, "in_features") == 2
    other = {"weight": torch.ones(2, 2)}
    (x,) = torch.func.functional_call(_Own(), other, ())
    assert x is other["weight"]
    parametrize.register_parametrization(inner, "weight", torch.nn.Tanh())
    assert torch.equal(member(inner, "weight"), inner.weight)
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        member(inner, "nothing")


class _Own(torch.nn.Linear):
    """A module that gives its own weight."""

    def __init__(self) -> None:
        super().__init__(2, 2, bias=False)

    def forward(self) -> tuple[Any, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return (member(self, "weight"),)


class _Double(Node):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return 2 * x

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        return 2 * gradients[0]


def test_a_node_says_as_torch_does_that_functorch_cannot_have_it() -> None:
    x = torch.ones(3, requires_grad=True)
    (d_x,) = torch.autograd.grad(_Double.apply(x).sum(), x)
    assert d_x.tolist() == [2, 2, 2]
    with pytest.raises(RuntimeError, match="setup_context"):
        torch.func.grad(lambda x: _Double.apply(x).sum())(x.detach())


def test_rows_of_calls_make_a_result_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Each call is waited for, before and behind; a step's backward runs where its name says."""
    waits, threads, out = [], {}, tmp_path / "host_time.json"

    def step(name: str) -> None:
        threads[name] = torch.autograd.is_multithreading_enabled()
        torch.ones(2).add(1)

    calls = {name: lambda name=name: step(name) for name in ("step", host_time.ONE_THREAD)}
    try:
        rows = host_time.measure(calls, {"T": 16}, 25, lambda: waits.append(1))
    finally:
        torch.autograd.set_multithreading_enabled(True)
    assert threads == {"step": True, host_time.ONE_THREAD: False}
    assert len(waits) == 2 * 2 * 25
    host_time.save(out, rows, ["--gpu", "16", "--repeats", "25"])
    check_results(out, host_time.QUESTION)
    content = json.loads(out.read_text())
    (run,) = content["runs"]
    assert run["command"].endswith("host_time.py --gpu 16 --repeats 25")
    assert {"hardware", "versions", "commit", "date"} <= set(run)
    for row, name in zip(content["rows"], calls, strict=True):
        assert (row["op"], row["case"], row["n"], row["run"]) == (name, {"T": 16}, 25, 0)
        assert row["min_us"] <= row["tenth_us"] <= row["median_us"] <= row["ninth_us"] <= row["max_us"]
        assert row["median_us"] <= row["whole_median_us"]
        assert (row["operators"], row["records"], row["device_allocations"]) == (2, 0, 0)
        assert row["functions"] >= 3


def test_of_several_processes_the_median_one_counts() -> None:
    row = {"op": "step", "impl": "imbrex", "case": {"T": 300}, "n": 200, "functions": 9, "operators": 2}
    row |= {"records": 0, "device_allocations": 0}
    names = ("median_us", "min_us", "max_us", "tenth_us", "ninth_us", "whole_median_us", "whole_min_us")
    rows = [row | dict.fromkeys(names, us) for us in (30.0, 10.0, 20.0)]
    found = host_time.median_row(rows)
    assert {name: found[name] for name in names} == dict.fromkeys(names, 20.0) | {
        "min_us": 10.0,
        "max_us": 30.0,
        "whole_min_us": 10.0,
    }
    assert (found["processes"], found["medians_us"]) == (3, [30.0, 10.0, 20.0])
    assert {key: found[key] for key in row} == row


def test_a_stack_is_told_by_its_layers() -> None:
    row = {"op": host_time.IN_A_STACK, "median_us": 800.0, "whole_median_us": 1600.0, "functions": 2000}
    row |= {"n": 200, "records": 8, "operators": 80}
    assert host_time.share_of(row, 8) == row | {
        "median_us": 100.0,
        "whole_median_us": 200.0,
        "functions": 250.0,
    }
    layers = [torch.nn.Linear(3, 3) for _ in range(2)]
    x, d_y = torch.randn(4, 3, requires_grad=True), torch.randn(4, 3)
    seen = []
    x.register_hook(seen.append)
    host_time.step_of(layers, x, d_y)()  # pyright: ignore[reportArgumentType]
    hidden = x.detach().requires_grad_()
    between = hidden + layers[0](hidden)
    (between + layers[1](between)).backward(d_y)
    assert hidden.grad is not None
    assert torch.equal(seen[0], hidden.grad)
    assert x.grad is None
