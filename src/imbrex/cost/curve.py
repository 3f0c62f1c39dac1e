"""Seconds as a function of size, interpolated between measurements."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Curve:
    """A piecewise linear function through measured points (size, seconds), in ascending order of size. Before
    the first point and behind the last one the nearest line is extended, but not below zero.

    It is not a start-up time and a rate, because a product of few rows costs more per row than one of many,
    and a message that fits into a token bucket's burst goes faster than the rate.

    Example: through (1, 2.0) and (3, 4.0) it is 3.0 at 2, and 5.0 at 4.
    """

    points: tuple[tuple[float, float], ...]

    @staticmethod
    def through(measured: Iterable[tuple[float, float]]) -> Curve:
        """The curve through points in any order. Of several with the same size the shortest time counts.
        Raises ValueError if there are none."""
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
