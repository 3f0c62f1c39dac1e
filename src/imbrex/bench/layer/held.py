"""Layers held for seconds, at the clock that the card's power limit leaves them: time, power and energy.

A call that is timed by itself finds a card that has cooled. In a model there is no pause, and a card that
multiplies draws all that it may: then a schedule gains only as much as it spares joules.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from imbrex.bench.layer.race import (
    FUSED_LOCAL,
    LOCAL,
    OURS,
    OURS_ALONE,
    OURS_FUSED,
    Entry,
    Race,
    case_of,
    note_of,
)
from imbrex.bench.results import write_results

WAYS = OURS, OURS_FUSED, OURS_ALONE, LOCAL, FUSED_LOCAL
SETTLE = 0.25
"""The share of a way's calls that run before it is timed, until its clock is steady."""
IDLE = "a GPU that waits"
PAUSE_CYCLES = 2_000_000


class Meter:
    """The energy that this rank's GPU has drawn, by NVIDIA's management library (`nvidia-ml-py`).

    Raises ImportError without it.
    """

    def __init__(self) -> None:
        import pynvml  # pyright: ignore[reportMissingImports]

        pynvml.nvmlInit()
        uuid = torch.cuda.get_device_properties(torch.cuda.current_device()).uuid
        self._library, self._gpu = pynvml, pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}")

    def joules(self) -> float:
        return self._library.nvmlDeviceGetTotalEnergyConsumption(self._gpu) / 1e3

    def limit(self) -> float:
        """Watts that the card may draw."""
        return self._library.nvmlDeviceGetEnforcedPowerLimit(self._gpu) / 1e3


def hold(call: Callable[[], object], seconds: float, meter: Meter) -> dict[str, float]:
    """Call it again and again for so many seconds on all ranks: microseconds and joules of a call, watts, and
    how many calls; the slowest rank's time, the ranks' mean energy."""
    count = _calls_in(call, seconds)
    for _ in range(int(SETTLE * count)):
        call()
    # host sync: a measurement begins on an idle GPU
    torch.cuda.synchronize()
    dist.barrier()
    before, begin = meter.joules(), time.perf_counter()
    for _ in range(count):
        call()
    # host sync: a measurement reads its clock
    torch.cuda.synchronize()
    spent, joules = time.perf_counter() - begin, meter.joules() - before
    slowest, energy = (torch.tensor(value, device="cuda", dtype=torch.float64) for value in (spent, joules))
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    dist.all_reduce(energy)
    mean = float(energy) / dist.get_world_size()
    times = {"mean_us": round(1e6 * float(slowest) / count, 1), "joules": round(mean / count, 4)}
    return times | {"watts": round(mean / float(slowest), 1), "n": count}


def _calls_in(call: Callable[[], object], seconds: float, trials: int = 5) -> int:
    """How many calls fill so many seconds, the same number on all ranks."""
    call()
    # host sync: a measurement begins on an idle GPU
    torch.cuda.synchronize()
    begin = time.perf_counter()
    for _ in range(trials):
        call()
    # host sync: a measurement reads its clock
    torch.cuda.synchronize()
    count = torch.tensor(int(seconds * trials / (time.perf_counter() - begin)), device="cuda")
    dist.all_reduce(count, op=dist.ReduceOp.MIN)
    return max(trials, int(count))


def hold_layers(
    rank: int, world: int, entries: list[Entry], seconds: float, out: str, run: dict[str, Any]
) -> list[dict[str, Any]]:
    """The rows of all entries and of `WAYS`, in the result file `out` as soon as a model's are there."""
    meter = Meter()
    rows = [idle_row(seconds, meter)]
    for entry in entries:
        runner = Race(entry.model, rank, world)
        inputs = runner.inputs(entry)
        for op in entry.ops:
            calls = runner.calls(op, inputs) | runner.local_calls(op, inputs)
            for name in (way for way in WAYS if way in calls):
                times = hold(calls[name], seconds, meter)
                about = {"op": f"{op}, held", "impl": name, "case": case_of(entry, runner)}
                about["limit_w"] = meter.limit()
                rows.append(about | times | {"note": note_of(name, runner.experts.implementation)})
                if rank == 0:
                    print(rows[-1], flush=True)
        if rank == 0:
            write_results(out, "fused", run, rows)
        runner.close()
        del runner
        torch.cuda.empty_cache()
    return rows


def idle_row(seconds: float, meter: Meter) -> dict[str, Any]:
    """A row of what a GPU draws whose only thread waits."""
    times = hold(lambda: torch.cuda._sleep(PAUSE_CYCLES), seconds, meter)
    return {"op": "held", "impl": IDLE, "case": {}, "limit_w": meter.limit()} | times
