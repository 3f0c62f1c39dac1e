"""A closed loop replayed: the engine's own scheduling over steps whose times were measured.

Thousands of tokens a request take minutes of a GPU. What such a loop does with them follows from the time of
a step of decoding by its rows and the tokens before them, that of a chunk of prompts, and how many tokens a
step gives. So the engine runs with a model that has no layers, on a CPU, and its clock goes on by the
measured time of every step:

    launch of step n+1      the host's clock stands where step n ends, the device's goes on by step n+1
    tokens of step n land   at the host's clock

One rank stands for all: their users are as many and ask for the same. The host is taken to be hidden behind
the device. A loop on GPUs of the same load says how far both are true.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from imbrex.bench.serve.loop import Load, serve
from imbrex.layer import MoEConfig
from imbrex.serve.attention import Cache, Grouped, Span
from imbrex.serve.engine import Engine, Settings
from imbrex.serve.model import Decoder, ModelConfig

Curve = Sequence[tuple[float, float]]
"""(tokens, seconds) of measurements, by tokens."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StepTimes:
    """Seconds of steps. decode: by rows, over the tokens in their caches. prefill: of a chunk of prompts, by
    rows that have one, over the tokens before each. Each over the room of a slot instead, where attention
    goes through all of it."""

    decode: Mapping[int, Curve]
    prefill: Mapping[int, Curve]
    decode_by_room: bool = False
    prefill_by_room: bool = False


def at(curve: Curve, tokens: float) -> float:
    """The seconds at a number of tokens, on the line through the two measurements next to it.

    Example: (1024, 10), (2048, 12): 13 at 2560.
    """
    if len(curve) == 1:
        return curve[0][1]
    right = next((i for i, (x, _) in enumerate(curve) if x >= tokens), len(curve) - 1)
    (x0, y0), (x1, y1) = curve[max(right, 1) - 1], curve[max(right, 1)]
    return y0 + (y1 - y0) * (tokens - x0) / (x1 - x0)


def replay(times: StepTimes, load: Load, settings: Settings) -> dict[str, Any]:
    """The point of a load on one rank, whose steps take what was measured. Drafts are forced."""
    sizes = set(settings.buckets) - set(times.decode)
    if sizes:
        raise ValueError(f"serve: no measured step of {sorted(sizes)} rows; give the engine other sizes")
    timeline = Timeline()
    engine = _Paced(_model(settings), settings, timeline)
    steps, chunk = engine.steps, engine.chunk

    def paced(program: Callable[[], None], seconds: Callable[[], float]) -> Callable[[], None]:
        def run() -> None:
            timeline.launch(seconds())
            program()

        return run

    def seconds(key: int | str) -> float:
        if isinstance(key, int):
            tokens = settings.room if times.decode_by_room else float(steps.state.length_Z[:key].sum()) / key
            return at(times.decode[key], tokens)
        # Chunks of fewer and of more prompts, each with as many tokens before all of them together.
        before, live = float(chunk.start_B.sum()), int((chunk.count_B > 0).sum())
        of_rows = [
            (rows, at(curve, settings.room if times.prefill_by_room else before / rows))
            for rows, curve in sorted(times.prefill.items())
        ]
        return at(of_rows, live)

    for key, program in engine.programs.items():
        engine.programs[key] = paced(program, lambda key=key: seconds(key))
    return serve(engine, load, None)


class Timeline:
    """Seconds of a host and a device: the host is a step ahead."""

    def __init__(self) -> None:
        self.host = self.device = 0.0
        self.ahead = False

    def launch(self, seconds: float) -> None:
        self.host, self.ahead = self.device, True
        self.device += seconds

    def land(self) -> None:
        """The host takes what has landed; where it launched nothing before, it waits for the device."""
        self.host = self.host if self.ahead else self.device
        self.ahead = False

    def read(self) -> float:
        return self.host


class _Paced(Engine):
    """An engine whose clock is a timeline."""

    def __init__(self, model: Decoder, settings: Settings, timeline: Timeline) -> None:
        super().__init__(model, settings, clock=timeline.read)
        self.timeline = timeline

    def _land(self, landings: int = 0, *, everything: bool = False) -> None:
        self.timeline.land()
        super()._land(landings, everything=everything)


class _Unlayered(Decoder):
    """No layer, and a drafting block that hands rows through."""

    def drafted(self, hidden_TD: Tensor, next_T: Tensor, span: Span, cache: Cache | None) -> Tensor:
        return hidden_TD


def _model(settings: Settings) -> Decoder:
    config = ModelConfig(
        moe=MoEConfig(hidden_size=1, intermediate_size=1, num_experts=1, top_k=1),
        attention=Grouped(num_heads=1, num_kv_heads=1, head_size=2),
        num_layers=0,
        vocabulary=2,
        positions=settings.capacity,
        drafting=settings.drafting.length > 0,
    )
    return _Unlayered(config, lambda index: nn.Identity(), device=torch.device("cpu"))
