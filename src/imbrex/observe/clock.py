"""Time of one piece of work on the GPU, without the host's part."""

from __future__ import annotations

from collections.abc import Callable

import torch

PAUSE_CYCLES = 1_000_000
"""About half a millisecond: the host queues the work while the GPU waits, so launches do not count."""


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
