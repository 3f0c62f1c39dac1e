"""The observer that records nothing, which layers and exchanges have by default."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

_NOTHING: AbstractContextManager[Any] = nullcontext()


class Observer:
    """Records nothing and costs nothing. It is the base of observers that record, such as `Recorder`.

    Names are stable. Spans and phases: `route`, `plan`, `dispatch`, `experts`, `combine` in the forward;
    `combine_backward`, `experts_backward`, `dispatch_backward` in the backward, `weights_backward` in chunks;
    `dispatch_again` if rows are not kept; `give_up`, without length, when events go on without `peer`;
    `measure`, a task or a run that `schedule="auto"` times.
    Counters: `bytes_sent` [W] by destination rank, `bytes_by_tier` [2] (on several nodes: inside this one, to
    others), `rows` (computed by the local experts), `drops` (choices left out), `gave_up` [W] (calls that
    went on without a rank), `expert_load` [E] (choices of this rank's tokens by logical expert),
    `co_activation` [E, E] (this rank's tokens that chose both experts), `host_syncs`, `heaps` (over NVLink:
    memory mapped by all GPUs, made for calls of a new size). The keywords `where` say where, at least
    `layer=int`.

    `enabled` lets a caller skip the work of preparing what it would count; `co_activation` does so for that
    counter.
    """

    enabled: bool = False
    co_activation: bool = False
    measuring: bool = False
    """Whether the calls are measurements, whose tokens nobody should count."""

    def span(self, name: str, **where: int) -> AbstractContextManager[Any]:
        """A context whose duration is one span called `name`."""
        return _NOTHING

    def count(self, name: str, value: Any, **where: int) -> None:
        """Add `value`, a number, a sequence of numbers or a tensor, to the counter `name` at `where`."""

    def phase(self, name: str, **where: int) -> None:
        """Say what this rank is about to do, for whoever reads the board after its death."""
