"""Spans, counters, the board and the trace, on one process."""

import json
import os
import signal
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import pytest
import torch

import imbrex
from imbrex.exchange.plan import count_pairs
from imbrex.observe import (
    Observer,
    PhaseBoard,
    Recorder,
    bracket_backward,
    find_dead,
    fold,
    merge_traces,
    read_board,
    trace_events,
)
from tests.ranks.forked import start_code


def test_off_records_nothing_and_costs_no_allocation_per_span():
    off = Observer()
    assert off.span("route", layer=0) is off.span("plan", layer=1)
    with off.span("route"):
        off.count("rows", 3)
        off.phase("plan")
    assert not off.enabled


def test_off_is_traced_in_a_full_graph():
    off = Observer()

    @torch.compile(fullgraph=True, backend="eager")
    def twice(x):
        with off.span("route", layer=1):
            y = 2 * x
        off.count("rows", 3, layer=1)
        return y

    assert twice(torch.ones(3)).tolist() == [2.0, 2.0, 2.0]


@contextmanager
def bounded(span: AbstractContextManager[Any]) -> Iterator[list[float]]:
    """`span`; the least and the most milliseconds that it may say it took, once it is over."""
    bounds: list[float] = []
    begin = time.perf_counter_ns()
    with span:
        inside = time.perf_counter_ns()
        yield bounds
        least = time.perf_counter_ns() - inside
    bounds += [least / 1e6, (time.perf_counter_ns() - begin) / 1e6]


def test_spans_count_their_own_time_once():
    recorder = Recorder(rank=0)
    recorder.begin_step(7)
    with bounded(recorder.span("forward")) as forward:
        time.sleep(0.02)
        with bounded(recorder.span("dispatch", layer=2)) as dispatch:
            time.sleep(0.03)
    times = recorder.end_step()
    assert dispatch[0] <= times["dispatch"] <= dispatch[1]
    assert forward[0] - dispatch[1] <= times["forward"] <= forward[1] - dispatch[0], "without the inner 30 ms"
    inner, outer = recorder.spans
    assert (inner.name, inner.step, inner.where) == ("dispatch", 7, (("layer", 2),))
    assert outer.begin_ns <= inner.begin_ns
    assert outer.duration_ns == outer.self_ns + inner.duration_ns
    assert abs(outer.begin_ns / 1e9 - time.time()) < 5, "times are on the wall clock"


def test_fold_sums_to_the_step():
    folded = fold({"plan": 1.0, "plan_backward": 2.0, "experts": 4.0, "forward": 9.0}, 20.0)
    assert folded == {
        "route": 0.0,
        "plan": 3.0,
        "dispatch": 0.0,
        "experts": 4.0,
        "combine": 0.0,
        "rest": 13.0,
    }


def test_counters_add_numbers_sequences_and_tensors():
    recorder = Recorder()
    load = torch.tensor([1, 2])
    recorder.count("expert_load", load, layer=0)
    recorder.count("expert_load", load, layer=0)
    recorder.count("expert_load", [5, 5], layer=1)
    recorder.count("host_syncs", 1)
    recorder.count("host_syncs", 1)
    load.zero_()
    assert recorder.take_counters() == {
        ("expert_load", (("layer", 0),)): [2, 4],
        ("expert_load", (("layer", 1),)): [5, 5],
        ("host_syncs", ()): 2,
    }
    assert recorder.take_counters() == {}


def test_experts_that_tokens_chose_together():
    assert count_pairs(torch.tensor([[0, 2], [2, -1]]), 3).tolist() == [[1, 0, 1], [0, 0, 0], [1, 0, 2]]
    recorder = Recorder(co_activation=True)
    config = imbrex.MoEConfig(hidden_size=8, intermediate_size=8, num_experts=4, top_k=2)
    layer = imbrex.MoELayer(config, observer=recorder, layer=3)
    for _ in range(2):
        layer(torch.randn(300, 8))
    counters, where = recorder.take_counters(), (("layer", 3),)
    pairs_EE = torch.tensor(counters["co_activation", where])
    assert pairs_EE.diagonal().tolist() == counters["expert_load", where]
    assert torch.equal(pairs_EE, pairs_EE.T)
    assert int(pairs_EE.sum()) == 600 * 2 * 2


def test_bracket_times_the_backward_of_what_is_inside():
    recorder = Recorder()
    x = torch.ones(4, requires_grad=True)
    inside: list[list[float]] = []

    class Slow(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return 3 * x

        @staticmethod
        def backward(ctx, grad):  # pyright: ignore[reportIncompatibleMethodOverride]
            with bounded(nullcontext()) as slept:
                time.sleep(0.02)
            inside.append(slept)
            return 3 * grad

    y = bracket_backward(recorder, "experts_backward", Slow.apply, x, layer=1)
    assert "experts_backward" not in recorder.end_step(), "nothing went backward yet"
    with bounded(nullcontext()) as outside:
        y.sum().backward()
    assert inside[0][0] <= recorder.end_step()["experts_backward"] <= outside[1]
    assert x.grad is not None
    assert x.grad.tolist() == [3.0] * 4


@pytest.mark.untraced
def test_board_tells_where_a_killed_process_was(tmp_path):
    script = f"""
import time
from imbrex.observe import PhaseBoard, Recorder
recorder = Recorder(rank=3, board=PhaseBoard({str(tmp_path / "board")!r}, 3))
recorder.begin_step(41)
with recorder.span("dispatch", layer=2):
    print("inside", flush=True)
    time.sleep(60)
"""
    process, until = start_code(script, folder=tmp_path), time.monotonic() + 60
    while process.stdout != "inside\n":
        assert process.poll() is None, process.stderr
        assert time.monotonic() < until
        time.sleep(0.01)
    (phase,) = read_board(tmp_path / "board")
    assert phase.alive
    assert find_dead([phase]) == ()
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    (dead,) = find_dead(read_board(tmp_path / "board"))
    assert (dead.rank, dead.pid, dead.step, dead.layer, dead.name) == (3, process.pid, 41, 2, "dispatch")
    assert str(dead) == "step 41, layer 2, phase dispatch"


def test_board_keeps_the_phase_that_raised(tmp_path):
    recorder = Recorder(board=PhaseBoard(tmp_path, 0))
    with pytest.raises(RuntimeError), recorder.span("combine", layer=0):
        raise RuntimeError
    assert read_board(tmp_path)[0].name == "combine"
    with recorder.span("plan", layer=1), recorder.span("dispatch", layer=1):
        pass
    assert read_board(tmp_path)[0].name == "combine", "leaving a span restores the phase before it"


def test_a_name_that_is_cut_off_can_be_read(tmp_path):
    """Within a letter of two bytes."""
    PhaseBoard(tmp_path, 0).write("a" + "ä" * 16)
    assert read_board(tmp_path)[0].name.startswith("a" + "ä" * 15)


def test_steps_that_nobody_ends_do_not_grow(monkeypatch):
    monkeypatch.setattr("imbrex.observe.recorder.MOST_PENDING", 4)
    recorder = Recorder(keep_spans=0)
    for _ in range(9):
        with recorder.span("experts"):
            pass
    assert len(recorder._pending) == 4


def test_layers_of_other_shapes_need_numbers_of_their_own():
    recorder = Recorder()
    recorder.count("expert_load", [1, 2], layer=0)
    with pytest.raises(ValueError, match=r"expert_load at .* had shape \[2\] and has \[3\]; give layers"):
        recorder.count("expert_load", [1, 2, 3], layer=0)
    recorder.count("bytes_sent", [1, 2], layer=0)
    recorder.count("bytes_sent", [0], layer=0)  # of a rank alone, as beside a layer in a benchmark


def test_board_write_is_cheap(tmp_path):
    board = PhaseBoard(tmp_path, 0)
    took_ms = []
    for _ in range(10):
        with bounded(nullcontext()) as batch:
            for _ in range(1000):
                board.write("dispatch", 3)
        took_ms.append(batch[0])
    assert min(took_ms) / 1000 < 20e-3, "measured: 0.2 us"


def test_trace_is_complete_events_from_zero(tmp_path):
    ranks = []
    for rank in range(2):
        recorder = Recorder(rank=rank)
        recorder.begin_step(5)
        with recorder.span("route", layer=1):
            pass
        recorder.end_step()
        ranks.append(trace_events(recorder.spans, rank))
    merge_traces(ranks, tmp_path / "trace.json")
    trace = json.loads((tmp_path / "trace.json").read_text())
    complete = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    assert {event["pid"] for event in complete} == {0, 1}
    assert min(event["ts"] for event in complete) == 0
    assert complete[0]["args"] == {"step": 5, "layer": 1}
    names = [event for event in trace["traceEvents"] if event["name"] == "process_name"]
    assert [event["args"]["name"] for event in names] == ["rank 0", "rank 1"]
