"""The work that one call puts on the GPU, as a CUDA graph: to be counted, not replayed."""

from __future__ import annotations

from collections.abc import Callable

import torch


def capture(call: Callable[[], object]) -> torch.cuda.CUDAGraph:
    """The graph of `call`, which runs nothing; its memory is free when the graph is gone.

    Unlike `torch.cuda.graph` it keeps the allocator's free blocks, so that what is timed later finds them.
    """
    graph, stream = torch.cuda.CUDAGraph(keep_graph=True), torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        graph.capture_begin()
        call()
        graph.capture_end()
    torch.cuda.current_stream().wait_stream(stream)
    return graph
