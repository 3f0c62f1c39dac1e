"""How far a training run is: a bar on a terminal, ten lines elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from typing import Any


class Progress:
    """A context; calling it with a step's record moves it on. One rank of a run shows it: bars of several
    would write over each other."""

    def __init__(self, *, first_step: int, steps: int, shown: bool) -> None:
        self._first, self._steps, self._shown = first_step, steps, shown
        self._began = time.monotonic()
        self._bar: Any = None

    def __enter__(self) -> Progress:
        if self._shown and sys.stderr.isatty():
            from rich.console import Console
            from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
            from rich.progress import Progress as Bar

            self._bar = Bar(
                TextColumn("step"),
                MofNCompleteColumn(),
                BarColumn(),
                TextColumn("{task.fields[so_far]}"),
                TimeRemainingColumn(),
                console=Console(stderr=True),
            )
            self._bar.start()
            self._task = self._bar.add_task("", total=self._steps, completed=self._first, so_far="")
        return self

    def __call__(self, record: Mapping[str, Any]) -> None:
        done = record["step"] + 1
        so_far = f"loss {record['loss']:.3f}  {record['tokens_per_s']:,.0f} tokens/s"
        if self._bar is not None:
            self._bar.update(self._task, completed=done, so_far=so_far)
        elif self._shown and (done == self._steps or done % max(1, self._steps // 10) == 0):
            left_s = (time.monotonic() - self._began) / (done - self._first) * (self._steps - done)
            print(f"step {done}/{self._steps}  {so_far}  {left_s:.0f} s to go", file=sys.stderr, flush=True)

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()
