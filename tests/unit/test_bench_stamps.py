"""Stamps of blocks: clocks of multiprocessors and the GPU's time become times of one scale."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from imbrex.bench.stamps import STAMPS, stamped, summarise, tick_of, times_of
from imbrex.kernels.exchange.variants import PULL, SMALL

SECOND = 10**9


def launch(begins: list[int], clocks: list[int], **cycles: int) -> Tensor:
    """Blocks that begin at so many ns, at what their clock then shows, of half a ns a cycle; each comes by so
    many cycles later, and ends after 20000."""
    words = torch.zeros(len(begins), len(STAMPS), dtype=torch.int64)
    words[:, STAMPS["kBeginTime"]] = torch.tensor(begins)
    words[:, STAMPS["kEndTime"]] = torch.tensor(begins) + 10_000
    for name, since in {"kBegun": 0, "kEnded": 20_000, **cycles}.items():
        words[:, STAMPS[name]] = torch.tensor(clocks) + since
    return words


def test_times_are_of_one_scale_from_the_first_begin() -> None:
    first = launch([64 + SECOND, 32 + SECOND, 96 + SECOND], [7, 10**6, 50], kReleased=2000, kTile=4000)
    second = launch([5032 + SECOND], [9], kStored=200)
    times = times_of([first, second])
    assert times[0][:, STAMPS["kTile"]].tolist() == [2.032, 2.0, 2.064]
    assert times[1][:, STAMPS["kStored"]].tolist() == [5.1]
    assert bool(times[0][:, STAMPS["kFull"]].isnan().all())
    assert tick_of([first, second]) == 32


def test_what_an_older_launch_has_left_is_no_time() -> None:
    """A block that there is not, and a stamp that this launch's block has not set."""
    words = launch([10 * SECOND, 10 * SECOND, 0], [500, 600, 700], kReleased=100)
    words[0, STAMPS["kPlaced"]] = 499
    words[1, STAMPS["kPlaced"]] = 1600
    (times,) = times_of([words])
    assert len(times) == 2
    assert times[0, STAMPS["kPlaced"]].isnan()
    assert times[1, STAMPS["kPlaced"]] == 0.5


def test_a_line_is_of_blocks_that_came_by_in_medians_of_replays() -> None:
    replays = []
    for late in (0, 2000, 200_000):
        words = launch([100, 200, 300], [1000, 1000, 1000], kReleased=0, kTile=4000)
        words[0, STAMPS["kTile"]] = 0
        words[2, STAMPS["kTile"]] += late if late < 20_000 else 10_000
        replays.append(times_of([words])[0])
    lines = {line.words: line for line in summarise(replays)}
    assert lines["first tile known"] == ("first tile known", 2, *map(pytest.approx, (2.1, 2.65, 3.2)))
    assert "rows asked for" not in lines
    assert str(lines["begun"]).split()[-4:] == ["3", "0.00", "0.10", "0.20"]


def test_kernels_without_stamps_are_as_they_are() -> None:
    assert stamped(PULL) is PULL
    assert stamped(SMALL).defines == (*SMALL.defines, ("STAMPS", 1))
