"""The paper's testbed as its own tables imply it, and how long its layers take there in two ways.

32 RTX 2080 Ti on 8 nodes. Table 1: 21 ms of all-to-all a layer of four all-to-alls of 8,634,368 bytes, so
1.64 GB/s a GPU. Table 10: the codec quarters an exchange of four times 644,245,094 bytes and saves 1137 ms,
so it took 1516 ms or more, 1.70 GB/s. The rest of its 2401 ms, three times 4 M H operations a token, is 17.9
TFLOP/s. Pipe-A2A: table 10, 1264 to 1110 ms with a quarter of the bytes moved in 379 ms: 1.68 times.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from imbrex.overlap import SCHEDULERS, Kind, makespan
from imbrex.schedule.tasks import tasks

BATCHES, FACTORS, LENGTHS = (2, 4, 8), (1.0, 1.1, 1.2), (512, 1024, 2048)
WIDTHS = (512, 1024, 2048, 4096, 8192)


@dataclass(frozen=True, kw_only=True, slots=True)
class Layer:
    """A layer of table 4. tokens: B L f, those that cross (k = 1). width, inner: M, H."""

    tokens: float
    width: int
    inner: int

    @property
    def nbytes(self) -> float:
        """S of Eq. 2, float32."""
        return 4 * self.tokens * self.width

    @property
    def operations(self) -> float:
        """Operations of one forward: two products a token."""
        return 4 * self.tokens * self.width * self.inner


@dataclass(frozen=True, kw_only=True, slots=True)
class Rates:
    """The rates of a machine.

    start_s: of a message. bytes_s, operations_s: a second and GPU. coded_s: bytes of rows that a codec
    reads or writes a second. pipe: how much faster Pipe-A2A is, from `pipe_from` bytes on."""

    start_s: float
    bytes_s: float
    operations_s: float
    coded_s: float
    pipe: float = 1.0
    pipe_from: float = 0.0


TESTBED = Rates(
    start_s=1e-4, bytes_s=1.67e9, operations_s=17.9e12, coded_s=130e9, pipe=1.4, pipe_from=200 << 20
)
"""Pipe-A2A as figure 9 has it, 1.4 times NCCL's above 200 MB. start_s is ours: the paper has none."""


def every_layer() -> Iterator[Layer]:
    """Table 4: 675 layers, the full grid."""
    for batch, factor, length, inner, width in itertools.product(BATCHES, FACTORS, LENGTHS, WIDTHS, WIDTHS):
        yield Layer(tokens=batch * length * factor, width=width, inner=inner)


def seconds(layer: Layer, rates: Rates, *, scheduler: str, degree: int, codec: bool, pipe: bool) -> float:
    """Seconds of a forward and of a backward, which computes twice as much."""
    total = 0.0
    for effort in (1, 2):
        sizes = _times(layer, rates, degree, effort, codec=codec, pipe=pipe)
        times = {task: sizes[task.kind] for task in tasks(degree)}
        total += makespan(SCHEDULERS[scheduler](times), times)
    return total


def _times(
    layer: Layer, rates: Rates, degree: int, effort: int, *, codec: bool, pipe: bool
) -> Mapping[Kind, float]:
    moved = layer.nbytes / degree / (4 if codec else 1)
    gain = rates.pipe if pipe and layer.nbytes / (4 if codec else 1) >= rates.pipe_from else 1.0
    move = rates.start_s + moved / rates.bytes_s / gain
    code = layer.nbytes / degree / rates.coded_s if codec else 0.0
    time_of = dict.fromkeys(Kind, code)
    time_of[Kind.move_out] = time_of[Kind.move_back] = move
    time_of[Kind.experts] = effort * layer.operations / degree / rates.operations_s
    return time_of


def tutel(layer: Layer, rates: Rates) -> float:
    """Stage-major, no codec, the best of 1, 2, 4 and 8 chunks."""
    return min(
        seconds(layer, rates, scheduler="stage-major", degree=r, codec=False, pipe=False)
        for r in (1, 2, 4, 8)
    )


def schemoe(
    layer: Layer, rates: Rates, *, codec: bool = True, order: bool = True, pipe: bool = True
) -> float:
    """Two chunks; without `order`, one after the other."""
    name = "optsche" if order else "sequential"
    return seconds(layer, rates, scheduler=name, degree=2 if order else 1, codec=codec, pipe=pipe)
