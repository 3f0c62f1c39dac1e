"""Work beside the caller."""

from __future__ import annotations

import threading

import pytest
import torch

from imbrex.runtime.streams import Lane, OrderedStream


def test_work_runs_before_it_is_waited_for() -> None:
    lane, done = Lane(torch.device("cpu")), threading.Event()
    begun = lane.start(done.set)
    assert done.wait(5.0)
    begun.finish()
    lane.close()


def test_what_it_raises_is_raised_at_the_end_and_hurts_nothing_else() -> None:
    lane = Lane(torch.device("cpu"))
    wrong = lane.start(lambda: 1 / 0)
    later: list[int] = []
    lane.start(lambda: later.append(1)).finish()
    with pytest.raises(ZeroDivisionError):
        wrong.finish()
    assert later == [1]
    lane.close()


def test_work_that_waits_does_not_hold_up_the_next() -> None:
    lane, gate = Lane(torch.device("cpu")), threading.Event()
    first = lane.start(lambda: gate.wait(5.0))
    lane.start(gate.set).finish()
    first.finish()
    lane.close()


def test_work_is_in_inference_mode_where_its_caller_is() -> None:
    """Nobody else can write to tensors that were made there."""
    lane = Lane(torch.device("cpu"))
    with torch.inference_mode():
        numbers = torch.zeros(2)
        lane.start(lambda: numbers.add_(1)).finish()
    inside = lane.start(torch.is_inference_mode_enabled).finish()
    lane.close()
    assert numbers.tolist() == [1, 1]
    assert not inside


def test_a_line_on_a_cpu_is_the_caller() -> None:
    line, done = OrderedStream(torch.device("cpu")), []
    queued = [line.start(lambda number=number: done.append(number) or -number) for number in range(3)]
    assert done == [0, 1, 2]
    assert [one.finish() for one in reversed(queued)] == [-2, -1, 0]
