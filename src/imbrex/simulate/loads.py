"""The rows of every rank, from how often experts are chosen and where they are; and ranks that are slow."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from imbrex.contracts import Placement
from imbrex.placement import LoadHistory, Target, plan_history
from imbrex.placement.bounds import Pouring
from imbrex.placement.planner import to_held
from imbrex.simulate.engine import Floats

ROUNDS = 16
"""Rounds of pouring choices over replicas; the fullest rank is then within 0.1 % of the best split's."""
DRAWN, RECORDED, MOST_RECORDED = 4, 16, 64
"""Layers that are drawn, batches of a record that is drawn, and its layers at most."""
MOST_SAMPLED = 2.0**53
"""Choices that are sampled; more have no noise that counts."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Spread:
    """A distribution of choices over experts.

    kind: `even`; `sampled`, all experts equally likely; `zipf`, the e-th most popular in proportion to
    e^-amount; `lognormal`, popularity with this sigma; `trace`, recorded shares. history: that of a trace.
    """

    kind: str = "sampled"
    amount: float = 0.0
    history: LoadHistory | None = None

    @staticmethod
    def parse(text: str) -> Spread:
        """Read `even`, `sampled`, `zipf:1.2` or `lognormal:0.5`."""
        kind, _, amount = text.partition(":")
        if kind not in ("even", "sampled", "zipf", "lognormal") or (kind in ("zipf", "lognormal")) != bool(
            amount
        ):
            raise ValueError(f"--skew: {text!r}; use even, sampled, zipf:A or lognormal:SIGMA")
        try:
            number = float(amount or 0)
        except ValueError:
            number = -1.0
        if not 0 <= number < 100:
            raise ValueError(f"--skew: {amount!r} is no number from 0 up; use e.g. {kind}:0.5")
        return Spread(kind=kind, amount=number)

    @staticmethod
    def of_history(history: LoadHistory) -> Spread:
        """The recorded shares of a history, of its layers that have choices."""
        if not history.counts_ILE.any():
            raise ValueError("--trace: nothing was chosen in any layer; record again")
        return Spread(kind="trace", history=history)

    def draw(self, experts: int, choices: float, seed: int, *, top_k: int = 1, layers: int = DRAWN) -> Floats:
        """Draw the choices of every expert, float64 [L, E], `choices` in all. A token chooses an expert at
        most once, so no expert has more than `choices` / `top_k`."""
        random = np.random.default_rng(seed)
        shares = _capped(self._shares(experts, random, layers), 1 / top_k)
        if self.kind == "even" or choices > MOST_SAMPLED:
            return shares * choices
        return random.multinomial(round(choices), shares).astype(np.float64)

    def _shares(self, experts: int, random: np.random.Generator, layers: int) -> Floats:
        if self.history is not None:
            if self.history.num_experts != experts:
                raise ValueError(
                    f"--trace: it has {self.history.num_experts} experts, the model {experts}; give a trace "
                    "of this model"
                )
            load_LE = self.history.load()[_places(self.history, layers)]
            return load_LE / load_LE.sum(1, keepdims=True)
        weight_E = np.ones((layers, experts))
        if self.kind == "zipf":
            weight_E = random.permuted(
                np.tile(np.arange(1, experts + 1.0) ** -self.amount, (layers, 1)), axis=1
            )
        if self.kind == "lognormal":
            weight_E = random.lognormal(0.0, self.amount, (layers, experts))
        return weight_E / weight_E.sum(1, keepdims=True)

    def record(
        self, experts: int, choices: float, seed: int, *, top_k: int = 1, layers: int = DRAWN
    ) -> LoadHistory:
        """The trace, or a record of the law that `draw` draws by: batches of so many choices, not its own.
        layers: of the model, which share a planner's effort; like the drawn ones, and those among them."""
        if self.history is not None:
            return self.history
        shares_LE = _capped(self._shares(experts, np.random.default_rng(seed), DRAWN), 1 / top_k)
        layers = min(max(layers, DRAWN), MOST_RECORDED)
        like_L = np.searchsorted(_spaced(layers, DRAWN), np.arange(layers), side="right") - 1
        number = round(min(choices, MOST_SAMPLED))
        counts_ILE = np.random.default_rng((seed, 1)).multinomial(
            number, shares_LE[like_L], size=(RECORDED, layers)
        )
        return LoadHistory(counts_ILE=counts_ILE, layers=tuple(range(layers)), top_k=top_k)


def _spaced(number: int, limit: int) -> NDArray[np.int64]:
    """Indices below `number`, at most `limit`, evenly spaced, with the first and the last."""
    return np.unique(np.linspace(0, number - 1, limit).astype(np.int64))


def _places(history: LoadHistory, layers: int) -> list[int]:
    """Indices of at most so many layers of the history, of those that have choices, evenly spaced."""
    able = np.flatnonzero(history.counts_ILE.any((0, 2)))
    return able[_spaced(len(able), layers)].tolist()


def _capped(shares_LE: Floats, cap: float) -> Floats:
    """Cut shares to at most `cap`; the others get the excess in proportion to their own."""
    for _ in range(shares_LE.shape[1]):
        over = shares_LE > cap
        if not over.any():
            break
        rest = np.where(over, 0.0, shares_LE)
        room = 1 - cap * over.sum(1, keepdims=True)
        shares_LE = np.where(over, cap, rest * room / np.maximum(rest.sum(1, keepdims=True), 1e-300))
    return shares_LE / shares_LE.sum(1, keepdims=True)


def of_ranks(load_LE: Floats, ranks: int) -> Floats:
    """Rows of every rank over their mean, [L, W], with the experts in order."""
    experts = load_LE.shape[1]
    firsts = np.linspace(0, experts, ranks, endpoint=False).astype(int)
    loads_LW = np.add.reduceat(load_LE, firsts, axis=1) if ranks <= experts else load_LE
    return loads_LW / loads_LW.mean(1, keepdims=True)


def homes(history: LoadHistory, ranks: int, slots: int, layers: int = DRAWN) -> list[Placement]:
    """Homes of the experts of the recorded layers that `Spread.draw` gives choices of, as a plan of the whole
    record for the balanced split has them."""
    numbers = [history.layers[place] for place in _places(history, layers)]
    planned = plan_history(history, Target(num_ranks=ranks, slots=slots), layers=numbers)
    return [planned[number] for number in numbers]


def of_homes(load_LE: Floats, placements: Sequence[Placement]) -> Floats:
    """Rows of every rank over their mean, [L, W], with a placement a layer: split as evenly as it goes."""
    rows = []
    for load_E, placement in zip(load_LE, placements, strict=True):
        pouring = Pouring(load_E[None], to_held(placement))
        for _ in range(ROUNDS):
            pouring.pour()
        rows.append(pouring.loads_HW[0])
    loads_LW = np.stack(rows)
    return loads_LW / loads_LW.mean(1, keepdims=True)


@dataclass(frozen=True, kw_only=True, slots=True)
class Stragglers:
    """Factors by which ranks are slower: exp of a normal variable with `sigma`, never below 1; and with
    probability `chance` times `factor`."""

    sigma: float = 0.0
    chance: float = 0.0
    factor: float = 1.0

    @staticmethod
    def parse(text: str) -> Stragglers:
        """Read `SIGMA` or `SIGMA,CHANCE,FACTOR`."""
        try:
            numbers = [float(part) for part in text.split(",")]
        except ValueError:
            numbers = []
        wrong = len(numbers) not in (1, 3) or min(numbers) < 0 or not all(n < 1000 for n in numbers)
        if wrong or any(chance > 1 for chance in numbers[1:2]):
            raise ValueError(
                f"--stragglers: {text!r}; give SIGMA or SIGMA,CHANCE,FACTOR, e.g. 0.02,0.001,3, a chance "
                "of at most 1"
            )
        return Stragglers(**dict(zip(("sigma", "chance", "factor"), numbers, strict=False)))

    def draw(self, ranks: int, seed: int | tuple[int, ...]) -> Floats:
        """Draw the factors of `ranks` ranks; equal seeds give equal factors."""
        random = np.random.default_rng(seed)
        slow_W = np.exp(self.sigma * np.abs(random.standard_normal(ranks)))
        return np.where(random.random(ranks) < self.chance, slow_W * max(1.0, self.factor), slow_W)


__all__ = ["Spread", "Stragglers", "homes", "of_homes", "of_ranks"]
