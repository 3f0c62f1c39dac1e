"""The question that a plan answers: a model's layer on so many ranks, and the world that these are in."""

from __future__ import annotations

from dataclasses import dataclass

from imbrex.simulate.device import Shape
from imbrex.simulate.fabric import Fabric
from imbrex.simulate.loads import Spread, Stragglers
from imbrex.simulate.profile import Profile

MODES = ("train", "forward", "decode")


@dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    """The question that `choose` answers. tokens: of a rank in a step. mode: `train`, `forward` or `decode`.
    layers: of the model that have experts. codecs: to choose from. seed: of loads and stragglers."""

    shape: Shape
    ranks: int
    tokens: int
    mode: str = "train"
    layers: int = 1
    codecs: tuple[str, ...] = ("identity",)
    seed: int = 0
    replicas: tuple[int, ...] = (0,)

    @property
    def training(self) -> bool:
        return self.mode == "train"


@dataclass(frozen=True, kw_only=True, slots=True)
class World:
    """The machine, its network and its loads, on which layouts are simulated."""

    profile: Profile
    fabric: Fabric
    spread: Spread
    stragglers: Stragglers

    @property
    def is_processor(self) -> bool:
        """Whether experts are computed by a processor, without kernels."""
        return self.profile["multiprocessors"] <= 1


__all__ = ["MODES", "Request", "World"]
