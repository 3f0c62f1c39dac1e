"""The device's time of a loop: each program's, and that in which no step ran."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any

import torch

from imbrex.serve.engine import Engine


class DeviceTime:
    """The device's time of every call of an engine's programs, until its figures are asked for."""

    def __init__(self, engine: Engine) -> None:
        self.engine, self.programs = engine, dict(engine.programs)
        self.spans: list[tuple[int | str, Any, Any]] = []
        for key, program in self.programs.items():
            engine.programs[key] = lambda key=key, program=program: self._call(key, program)

    def _call(self, key: int | str, program: Callable[[], None]) -> None:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        program()
        end.record()
        self.spans.append((key, begin, end))

    def figures(self) -> dict[str, Any]:
        """The share of the time in which no step ran, and of every program the calls, the median and the mean
        in ms. The engine is as before."""
        self.engine.programs = self.programs
        torch.cuda.synchronize()
        whole = self.spans[0][1].elapsed_time(self.spans[-1][2])
        of_key: dict[str, list[float]] = {}
        for key, begin, end in self.spans:
            of_key.setdefault(str(key), []).append(begin.elapsed_time(end))
        busy = sum(map(sum, of_key.values()))
        return {
            "no_step_share": round(1 - busy / whole, 4),
            "device_ms": {key: round(statistics.median(times), 3) for key, times in of_key.items()},
            "device_mean_ms": {key: round(statistics.fmean(times), 3) for key, times in of_key.items()},
            "device_calls": {key: len(times) for key, times in of_key.items()},
        }
