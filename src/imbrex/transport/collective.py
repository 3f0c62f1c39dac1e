"""What the transports over torch.distributed share: a group, bounded waits, the exchange of counts."""

from __future__ import annotations

import os
from collections.abc import Callable
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

DEFAULT_TIMEOUT_S = 60.0


class RankLostError(RuntimeError):
    """A collective of an exchange failed or ran past its time-out: a rank died, is stuck or left."""


def timeout_seconds(timeout: float | None) -> float:
    """`timeout`, else `IMBREX_TIMEOUT_S`, else 60 s. Raises ValueError where it is not above zero."""
    given = os.environ.get("IMBREX_TIMEOUT_S") if timeout is None else timeout
    try:
        seconds = DEFAULT_TIMEOUT_S if given is None else float(given)
    except ValueError:
        seconds = 0.0
    if not seconds > 0:
        raise ValueError(
            f"timeout: {given!r} is not a number of seconds above 0 (timeout= or IMBREX_TIMEOUT_S)"
        )
    return seconds


class Collective:
    """A process group and how to wait on it. `group=None` is a group of one, which never communicates."""

    name = "collective"
    replicated = False
    broadcasts = False

    def __init__(self, group: dist.ProcessGroup | None, *, timeout: float | None = None) -> None:
        self.group = group
        self.timeout_s = timeout_seconds(timeout)
        self.rank = 0 if group is None else dist.get_rank(group)
        self.world_size = 1 if group is None else dist.get_world_size(group)
        self.device = torch.device("cpu") if group is None else device_of(group)

    def exchange_counts(self, message: Tensor) -> Tensor:
        """int64 [L] of this rank to int64 [W, L] of all ranks, on the host."""
        if self.world_size == 1:
            # host sync: the counts decide the sizes of what follows
            return message.cpu()[None]
        sent = message.to(self.device)
        gathered = sent.new_empty(self.world_size * sent.numel())
        self.wait("plan", lambda: dist.all_gather_into_tensor(gathered, sent, self.group, async_op=True))
        # host sync: the counts decide the sizes of what follows
        return gathered.view(self.world_size, -1).cpu()

    def wait(self, phase: str, start: Callable[[], dist.Work | None]) -> None:
        """Start a collective and wait for it, at most `timeout_s`."""
        try:
            self.wait_started(phase, start())
        except RuntimeError as error:
            raise self.lost(phase, error) from error

    def wait_started(self, phase: str, work: dist.Work | None) -> None:
        try:
            if work is None:
                return
            if self.device.type == "cpu":
                work.wait(timedelta(seconds=self.timeout_s))
            else:
                # A time-out given to NCCL would block the host here; its watchdog keeps the group's own.
                work.wait()
        except RuntimeError as error:
            raise self.lost(phase, error) from error

    def lost(self, phase: str, error: RuntimeError) -> RankLostError:
        if isinstance(error, RankLostError):
            return error
        first = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        return RankLostError(
            f"rank {self.rank} of {self.world_size} lost its peers in {phase}: a rank died, left or was silent "
            f"for {self.timeout_s:g} s ({first})"
        )


class Done:
    """A move that is over."""

    def __init__(self, rows: Tensor) -> None:
        self.rows = rows

    def finish(self) -> Tensor:
        return self.rows


class InFlight:
    """A collective under way. Holds what it reads until it is over."""

    def __init__(
        self,
        transport: Collective,
        phase: str,
        work: dist.Work | None,
        rows: Tensor,
        reads: Tensor,
        select: Callable[[Tensor], Tensor] | None = None,
    ) -> None:
        self.transport, self.phase, self.work, self.rows = transport, phase, work, rows
        self.reads: Tensor | None = reads
        self.select = select

    def finish(self) -> Tensor:
        self.transport.wait_started(self.phase, self.work)
        self.reads = None
        return self.rows if self.select is None else self.select(self.rows)


def device_of(group: dist.ProcessGroup) -> torch.device:
    """Where a group communicates: the current GPU if it has a CUDA back end, else the CPU."""
    types = {device.type for device in group._device_types}
    if "cuda" in types and torch.cuda.is_available() and "nccl" in str(dist.get_backend(group)):
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")
