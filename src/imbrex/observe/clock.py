"""Times of a piece of work on a GPU, without the host's time."""

from __future__ import annotations

from collections.abc import Callable

import torch

PAUSE_CYCLES = 1_000_000
"""A pause of about half a millisecond: the host queues the work while the GPU waits, so launches do not
count."""


def device_microseconds(
    work: Callable[[], object],
    pause_cycles: int = PAUSE_CYCLES,
    align: Callable[[], object] | None = None,
) -> float:
    """Microseconds that `work` takes on the current stream, from an idle GPU; waits for it to end.

    `align` is called right before the clock starts: what makes the ranks start together.
    """
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda._sleep(pause_cycles)
    if align is not None:
        align()
    begin.record()
    work()
    end.record()
    # host sync: a measurement reads its clock
    end.synchronize()
    return begin.elapsed_time(end) * 1e3


def microseconds_side_by_side(
    work: Callable[[], object], beside: Callable[[], object] | None
) -> tuple[float, float]:
    """Microseconds that `work` takes on the current stream and `beside` on another, started together from an
    idle GPU; waits for both. 0 for what is not there."""
    stream = torch.cuda.Stream()
    begin, end, other_begin, other_end = (torch.cuda.Event(enable_timing=True) for _ in range(4))
    # host sync: a measurement begins on an idle GPU
    torch.cuda.synchronize()
    torch.cuda._sleep(4 * PAUSE_CYCLES)
    stream.wait_stream(torch.cuda.current_stream())
    if beside is not None:
        with torch.cuda.stream(stream):
            other_begin.record()
            beside()
            other_end.record()
    begin.record()
    work()
    end.record()
    # host sync: a measurement reads its clocks
    torch.cuda.synchronize()
    other = other_begin.elapsed_time(other_end) * 1e3 if beside is not None else 0.0
    return begin.elapsed_time(end) * 1e3, other
