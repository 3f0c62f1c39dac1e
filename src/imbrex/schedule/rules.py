"""Orders of tasks by rule, whatever times the tasks have."""

from __future__ import annotations

from imbrex.schedule.tasks import Kind, Order, Task, Times


def chunks_of(times: Times) -> int:
    """The number of chunks that the tasks belong to."""
    return 1 + max(task.chunk for task in times)


def stages(times: Times, *stages: tuple[Kind, ...]) -> list[Task]:
    """All tasks, stage by stage: the kinds of a stage for chunk 0, for chunk 1, and so on."""
    degree = chunks_of(times)
    return [Task(kind=kind, chunk=chunk) for kinds in stages for chunk in range(degree) for kind in kinds]


def sequential(times: Times) -> Order:
    """One task after the other, chunk by chunk: nothing overlaps."""
    order = [Task(kind=kind, chunk=c) for c in range(chunks_of(times)) for kind in Kind]
    return Order.of([task for task in order if task in times])


def stage_major(times: Times) -> Order:
    """Every kind for all chunks before the next kind, as Tutel runs."""
    return Order.of([task for task in stages(times, *((kind,) for kind in Kind)) if task in times])


def optsche(times: Times) -> Order:
    """ScheMoE's order (Eq. 12 to 14): all encoding, then decode, experts and encode chunk by chunk, then
    all decoding; the moves in the order their chunks are ready. Best where all chunks are alike and a kind
    takes the same out and back. Elsewhere it may take up to twice as long as the best, and no longer, as one
    of the two lines is always busy. Weight gradients fill the wait for what returns: they stand between the
    last encoding and the last decoding.
    Example: of two chunks, one's `encode_out` and `move_back` and the other's `move_out` and `decode_back`
    take a second each, all else nothing: 4 seconds, where 2 are enough.
    """
    last = [Task(kind=Kind.weights, chunk=c) for c in range(chunks_of(times))]
    middle = stages(times, (Kind.decode_out, Kind.experts, Kind.encode_back, Kind.move_back))
    first = stages(times, (Kind.encode_out, Kind.move_out))
    end = stages(times, (Kind.decode_back,))
    return Order.of([*first, *middle, *(task for task in last if task in times), *end])
