"""When the blocks of a small batch's kernels come where: the host's side of `ptx/stamps.cuh`.

kernels = [few_variant(), REDUCE_BEHIND]  # loaded by `stamps.load` in place of `jit.load`
replays.append(times_of(read_stamps(kernels)))  # behind each replay
for line in summarise([replay[0] for replay in replays]):  # of the first of the kernels
    print(line)
"""

from __future__ import annotations

import functools
import re
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from imbrex.kernels import jit
from imbrex.kernels.structs import sources_from

HEADER = "ptx/stamps.cuh"
_DECLARED: list[tuple[str, str]] = re.findall(
    r"^    (k\w+), +// (.+)$", sources_from(HEADER)[HEADER], re.MULTILINE
)
STAMPS = {name: number for number, (name, _) in enumerate(_DECLARED)}
"""The stamps of a block, by name: where each stands."""
BLOCKS = 256
"""The blocks that there is room for."""


class Line(NamedTuple):
    """A stamp in words, how many blocks have it, and when: the first, the middle and the last of them."""

    words: str
    blocks: int
    first: float
    median: float
    last: float

    def __str__(self) -> str:
        return f"{self.words:45}{self.blocks:5}{self.first:9.2f}{self.median:9.2f}{self.last:9.2f}"


def stamped(variant: jit.Variant) -> jit.Variant:
    """The kernel with stamps, if it has any."""
    if HEADER not in jit.sources_of(variant):
        return variant
    return replace(variant, defines=(*variant.defines, ("STAMPS", 1)))


def load(variant: jit.Variant, device: torch.device | int | None = None) -> jit.Kernel:
    """`jit.load` of the kernel with stamps."""
    return jit.load(stamped(variant), device)


@functools.cache
def _reader(variant: jit.Variant) -> jit.Kernel:
    return load(variant).beside("read_stamps")


def read_stamps(variants: Sequence[jit.Variant]) -> list[Tensor]:
    """The stamps that the last launches of each have left, int64 [blocks, stamps] on the host; zeros of
    blocks that have not begun since this was called before."""
    words = [torch.empty(BLOCKS, len(STAMPS), dtype=torch.int64, device="cuda") for _ in variants]
    for variant, to in zip(variants, words, strict=True):
        _reader(variant).launch(grid=1, block=BLOCKS, args=[to])
    return [to.cpu() for to in words]


def times_of(launches: Sequence[Tensor]) -> list[Tensor]:
    """Microseconds [blocks, stamps] of each of some launches in a row, given what `read_stamps` gives; NaN
    where a block did not come by. Zero is when the first block of the first launch began: when it knows that
    the launch before has ended depends on what it does before it looks, 1.6 us in a dispatch."""
    begin, end = STAMPS["kBeginTime"], STAMPS["kEndTime"]
    live = [words[words[:, begin] > 0] for words in launches]
    origin, times = live[0][:, begin].min(), []
    for words in live:
        begun, ended = words[:, STAMPS["kBegun"]], words[:, STAMPS["kEnded"]]
        ns = ((words[:, end] - words[:, begin]).double() / (ended - begun)).median()
        since = (words - begun[:, None]).double() * ns + (words[:, begin] - origin).double()[:, None]
        came = (words >= begun[:, None]) & (words <= ended[:, None])
        times.append(torch.where(came, since / 1000, torch.nan))
    return times


def tick_of(launches: Sequence[Tensor]) -> int:
    """Nanoseconds from one time of the GPU that blocks began at to the next, at least."""
    begins = torch.cat([words[:, STAMPS["kBeginTime"]] for words in launches]).unique()
    return int(begins[begins > 0].diff().min())


def summarise(replays: Sequence[Tensor]) -> list[Line]:
    """A line a stamp that some block has, in medians over replays of one launch, times [blocks, stamps]."""
    lines = []
    for name, words in _DECLARED[2:]:
        at = [times[:, STAMPS[name]] for times in replays]
        spans = torch.stack([torch.nanquantile(t, torch.tensor([0, 0.5, 1]).to(t)) for t in at])
        first, median, last = spans.nanmedian(0).values.tolist()
        blocks = int(at[-1].isfinite().sum())
        if blocks:
            lines.append(Line(words, blocks, first, median, last))
    return lines


__all__ = ["STAMPS", "Line", "load", "read_stamps", "stamped", "summarise", "tick_of", "times_of"]
