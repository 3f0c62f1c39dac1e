"""What the balancer's report shows, of a story by hand."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from imbrex.balancer import report
from imbrex.balancer.report import Story

STORY = Story(
    layers=(3, 5),
    loads_ILW=np.array([[[3.0, 1.0], [2.0, 2.0]], [[1.0, 1.0], [0.0, 0.0]]]),
    counts_ILE=np.array([[[2.0, 1.0, 1.0], [4.0, 0.0, 0.0]], [[1.0, 1.0, 0.0], [0.0, 0.0, 0.0]]]),
    switched=[(1, 0)],
    predicted_IL=np.array([[0.0, 0.0], [0.5, 1.0]]),
    facts={},
)


def drawn(figure: Any) -> tuple[Any, ...]:
    """Lines or heat maps of a figure."""
    return figure.data


def test_balancedness_is_of_layers_with_a_load() -> None:
    actual, predicted = drawn(report._balancedness(STORY, None))
    assert (actual.name, actual.y.tolist()) == ("actual", pytest.approx([5 / 6, 1.0]))
    assert predicted.y == pytest.approx([np.nan, 0.75], nan_ok=True)
    even = replace(STORY, loads_ILW=np.ones((2, 2, 2)), predicted_IL=None)
    lines = drawn(report._balancedness(even, STORY))
    assert {line.name: line.y.tolist() for line in lines} == {
        "actual": pytest.approx([1.0, 1.0]),
        "without": pytest.approx([5 / 6, 1.0]),
    }


def test_loads_are_shown_over_their_mean() -> None:
    (over_time,) = drawn(report._over_time(STORY))
    assert over_time.z.tolist() == [[1.25, 0.75], [1.0, 1.0]]
    names, _, figures = zip(*report._before_and_after(STORY, None), strict=True)
    assert [name.partition(", ")[2] for name in names] == ["first quarter", "last quarter"]
    assert [drawn(figure)[0].z.tolist() for figure in figures] == [[[1.5, 0.5], [1, 1]], [[1, 1], [0, 0]]]
    assert list(drawn(figures[0])[0].y) == [3, 5]
