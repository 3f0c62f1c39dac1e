"""Bars and lines as SVG, without a library."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 760, 340, 64, 190, 24, 56
COLOURS = ("#7f7f7f", "#1f77b4", "#d62728", "#2ca02c", "#ff7f0e", "#9467bd", "#8c564b", "#e377c2", "#17becf")


def bars(groups: Mapping[str, Mapping[str, float]], y_title: str) -> str:
    """Draw bars. groups: by label under the axis, values by series, if any."""
    series = list(dict.fromkeys(name for values in groups.values() for name in values))
    top = 1.1 * max((value for values in groups.values() for value in values.values()), default=1.0)
    parts, room = _frame(y_title, "", series), (WIDTH - LEFT - RIGHT) / len(groups)
    parts += _grid(0.0, top, lambda y: _height(y / top))
    bar = 0.8 * room / max(len(series), 1)
    for place, (label, values) in enumerate(groups.items()):
        parts.append(_text(LEFT + (place + 0.5) * room, HEIGHT - BOTTOM + 18, label, anchor="middle"))
        for number, name in enumerate(series):
            if name not in values:
                continue
            x, y = LEFT + (place + 0.1) * room + number * bar, _height(values[name] / top)
            parts.append(
                f'<rect x="{x:.1f}" y="{y:.1f}" width="{bar * 0.94:.1f}" '
                f'height="{HEIGHT - BOTTOM - y:.1f}" fill="{_colour(number)}"/>'
            )
            parts.append(_text(x + bar / 2, y - 4, f"{values[name]:.3g}", anchor="middle", size=10))
    return "\n".join([*parts, "</svg>"]) + "\n"


def lines(
    curves: Mapping[str, Sequence[tuple[float, float]]], x_title: str, y_title: str, *, logarithmic: bool
) -> str:
    """Draw lines. curves: (x, y) by series; `logarithmic` in both axes."""
    scale = math.log10 if logarithmic else float
    points = {name: [(scale(x), scale(y)) for x, y in curve] for name, curve in curves.items()}
    every = [point for curve in points.values() for point in curve]
    (x0, x1), (y0, y1) = ((min(axis), max(axis)) for axis in zip(*every, strict=True))
    y0, y1 = y0 - 0.05 * (y1 - y0), y1 + 0.05 * (y1 - y0) or 1.0

    def at(x: float, y: float) -> tuple[float, float]:
        across = LEFT + (x - x0) / max(x1 - x0, 1e-9) * (WIDTH - LEFT - RIGHT)
        return round(across, 1), round(_height((y - y0) / max(y1 - y0, 1e-9)), 1)

    back = (lambda v: 10**v) if logarithmic else (lambda v: v)
    parts = _frame(y_title, x_title, list(curves))
    parts += _grid(y0, y1, lambda y: at(x0, y)[1], back)
    for step in range(5):
        x = x0 + (x1 - x0) * step / 4
        parts.append(_text(at(x, y0)[0], HEIGHT - BOTTOM + 18, f"{back(x):.3g}", anchor="middle"))
    for number, curve in enumerate(points.values()):
        path = " ".join(f"{x},{y}" for x, y in (at(*point) for point in curve))
        parts.append(f'<polyline points="{path}" fill="none" stroke="{_colour(number)}" stroke-width="1.8"/>')
    return "\n".join([*parts, "</svg>"]) + "\n"


def dots(columns: Mapping[str, Sequence[float]], y_title: str, *, bands: Sequence[float] = ()) -> str:
    """A column of dots by label; `bands` are dashed lines across."""
    every = [0.0, *bands, *(value for values in columns.values() for value in values)]
    room = max(every) - min(every) or 1.0
    low, high = min(every) - 0.05 * room, max(every) + 0.05 * room

    def at(y: float) -> float:
        return _height((y - low) / (high - low))

    across = (WIDTH - LEFT - 20) / len(columns)
    parts = [*_frame(y_title, "", []), *_grid(low, high, at)]
    for band in bands:
        parts.append(f'<path d="M{LEFT} {at(band):.1f}H{WIDTH - 20}" stroke="#999" stroke-dasharray="4 3"/>')
    for number, (label, values) in enumerate(columns.items()):
        x = LEFT + (number + 0.5) * across
        for value in values:
            parts.append(f'<circle cx="{x:.1f}" cy="{at(value):.1f}" r="4" fill="{_colour(number)}"/>')
        turn = f'transform="translate({x:.1f} {HEIGHT - BOTTOM + 12}) rotate(18)"'
        parts.append(f'<text {turn} font-size="10">{label}</text>')
    return "\n".join([*parts, "</svg>"]) + "\n"


def heat(rows: Sequence[Sequence[float]], x_title: str, y_title: str) -> str:
    """Draw a cell a value, rows from the top: white is 1, red more, blue less; full colour from twice and
    from nothing."""
    parts = _frame(y_title, x_title, ())
    width, height = (WIDTH - LEFT - RIGHT) / len(rows[0]), (HEIGHT - TOP - BOTTOM) / len(rows)
    for y, row in enumerate(rows):
        for x, value in enumerate(row):
            rest = round(255 * (1 - min(1.0, abs(value - 1))))
            colour = f"rgb(255,{rest},{rest})" if value > 1 else f"rgb({rest},{rest},255)"
            at = f'x="{LEFT + x * width:.1f}" y="{TOP + y * height:.1f}"'
            size = f'width="{width:.1f}" height="{height:.1f}"'
            parts.append(f'<rect {at} {size} fill="{colour}"><title>{value:.2f}</title></rect>')
    return "".join([*parts, "</svg>"])


def _frame(y_title: str, x_title: str, series: Sequence[str]) -> list[str]:
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" '
        'font-family="system-ui, sans-serif" font-size="12">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
        f'<text transform="translate(16 {HEIGHT / 2}) rotate(-90)" text-anchor="middle">{y_title}</text>',
        _text((WIDTH - RIGHT + LEFT) / 2, HEIGHT - 12, x_title, anchor="middle"),
    ]
    for number, name in enumerate(series):
        y = TOP + 16 + 18 * number
        parts.append(
            f'<rect x="{WIDTH - RIGHT + 14}" y="{y - 9}" width="10" height="10" fill="{_colour(number)}"/>'
        )
        parts.append(_text(WIDTH - RIGHT + 30, y, name))
    return parts


def _grid(low: float, high: float, height, back=lambda v: v) -> list[str]:
    parts = []
    for step in range(6):
        value = low + (high - low) * step / 5
        y = height(value)
        parts.append(f'<path d="M{LEFT} {y:.1f}H{WIDTH - RIGHT}" stroke="#ddd"/>')
        parts.append(_text(LEFT - 6, y + 4, f"{back(value):.3g}", anchor="end"))
    return parts


def _height(share: float) -> float:
    return HEIGHT - BOTTOM - share * (HEIGHT - TOP - BOTTOM)


def _colour(number: int) -> str:
    return COLOURS[number % len(COLOURS)]


def _text(x: float, y: float, text: str, *, anchor: str = "start", size: int = 12) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-size="{size}">{text}</text>'
