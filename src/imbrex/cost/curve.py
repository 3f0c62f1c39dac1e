"""Seconds as a function of size, through what was measured."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Curve:
    """Straight lines between measured (size, seconds), sizes ascending; beyond the last point the last line
    goes on, before the first one the first, never below zero.

    Lines, and not one start-up time and one rate: a product of few rows costs more a row than one of many,
    and a message below a token bucket's burst goes faster than the rate.
    """

    points: tuple[tuple[float, float], ...]

    @staticmethod
    def through(measured: Iterable[tuple[float, float]]) -> Curve:
        """Sizes may stand in any order; of equal sizes the shortest time counts.

        Raises ValueError without a point.
        """
        shortest: dict[float, float] = {}
        for size, seconds in measured:
            shortest[size] = min(seconds, shortest.get(size, seconds))
        if not shortest:
            raise ValueError("cost: a curve needs at least one measured point")
        return Curve(points=tuple(sorted(shortest.items())))

    def __call__(self, size: float) -> float:
        """Seconds at `size`. Example: through (1, 3), (2, 4), (4, 8) it is 3.5 at 1.5 and 10 at 5."""
        if len(self.points) == 1:
            return self.points[0][1]
        sizes = [point[0] for point in self.points]
        right = min(max(bisect_left(sizes, size), 1), len(sizes) - 1)
        (x0, y0), (x1, y1) = self.points[right - 1], self.points[right]
        return max(0.0, y0 + (size - x0) * (y1 - y0) / (x1 - x0))
