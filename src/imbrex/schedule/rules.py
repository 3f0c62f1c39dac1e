"""Schedulers by fixed rules, which do not depend on the tasks' times."""

from __future__ import annotations

from imbrex.schedule.tasks import Kind, Order, Task, Times


def chunks_of(times: Times) -> int:
    """The number of chunks of the tasks."""
    return 1 + max(task.chunk for task in times)


def stages(times: Times, *stages: tuple[Kind, ...]) -> list[Task]:
    """The tasks stage by stage; a stage is some kinds of tasks, which are done for chunk 0, then for chunk 1,
    and so on."""
    degree = chunks_of(times)
    return [Task(kind=kind, chunk=chunk) for kinds in stages for chunk in range(degree) for kind in kinds]


def sequential(times: Times) -> Order:
    """One task after the other, chunk by chunk, without overlap."""
    order = [Task(kind=kind, chunk=c) for c in range(chunks_of(times)) for kind in Kind]
    return Order.of([task for task in order if task in times])


def stage_major(times: Times) -> Order:
    """Every kind of task for all chunks before the next kind, as in Tutel."""
    return Order.of([task for task in stages(times, *((kind,) for kind in Kind)) if task in times])


def optsche(times: Times) -> Order:
    """The order of ScheMoE (Eq. 12 to 14): all encoding; then, chunk by chunk, decode, experts and encode;
    then all decoding. Moves are in the order in which their chunks are ready.

    It is the best order if all chunks are equal and every kind takes the same time out and back. Otherwise it
    may take up to twice as long as the best, but no longer, as the processor or the network is always busy.
    In the backward the weights' gradients fill the time until rows return: they are between the last encoding
    and the last decoding.

    Example: of two chunks, `encode_out` and `move_back` of one and `move_out` and `decode_back` of the other
    take a second each, everything else nothing. This order takes 4 seconds, the best one 2.
    """
    last = [Task(kind=Kind.weights, chunk=c) for c in range(chunks_of(times))]
    middle = stages(times, (Kind.decode_out, Kind.experts, Kind.encode_back, Kind.move_back))
    first = stages(times, (Kind.encode_out, Kind.move_out))
    end = stages(times, (Kind.decode_back,))
    return Order.of([*first, *middle, *(task for task in last if task in times), *end])
