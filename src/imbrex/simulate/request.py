"""The inputs of the planner: the layer of a model and its number of ranks, and the machine."""

from __future__ import annotations

from dataclasses import dataclass

from imbrex.simulate.device import Shape
from imbrex.simulate.fabric import Fabric
from imbrex.simulate.loads import Spread, Stragglers
from imbrex.simulate.profile import Profile

MODES = ("train", "forward", "decode")


@dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    """The layer to plan. tokens: of a rank in a step. mode: `train`, `forward` or `decode`. layers: the
    number of the model's layers with experts. codecs: those to choose from. seed: for loads and
    stragglers."""

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
    """The machine, its network and the loads, with which layouts are simulated."""

    profile: Profile
    fabric: Fabric
    spread: Spread
    stragglers: Stragglers

    @property
    def is_processor(self) -> bool:
        """Whether experts are computed by a processor, without kernels."""
        return self.profile["multiprocessors"] <= 1


__all__ = ["MODES", "Request", "World"]
