"""Draw docs/placement-*.svg from benchmarks/results/placement.json.

python benchmarks/placement_figures.py
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 760, 300, 60, 150, 20, 44
COLOURS = ("#7f7f7f", "#d62728", "#1f77b4", "#2ca02c")
Lines = Mapping[str, Sequence[tuple[float, float]]]


def draw(lines: Lines, marks: Mapping[float, str], x_title: str, y_title: str, top: float) -> str:
    """An SVG of lines by name; `marks` are vertical lines with a text. The y axis is from 0 to `top`."""
    last = max(x for points in lines.values() for x, _ in points)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" '
        'font-family="system-ui, sans-serif" font-size="12">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
    ]

    def at(x: float, y: float) -> tuple[float, float]:
        across = LEFT + x / last * (WIDTH - LEFT - RIGHT)
        return round(across, 1), round(HEIGHT - BOTTOM - min(y, top) / top * (HEIGHT - TOP - BOTTOM), 1)

    for step in range(6):
        (x0, y0), (x1, _) = at(0, top * step / 5), at(last, 0)
        parts.append(f'<path d="M{x0} {y0}H{x1}" stroke="#ddd"/>')
        parts.append(f'<text x="{x0 - 6}" y="{y0 + 4}" text-anchor="end">{top * step / 5:.2g}</text>')
    for x, text in marks.items():
        (x0, y0), (_, y1) = at(x, 0), at(x, top)
        parts.append(f'<path d="M{x0} {y0}V{y1}" stroke="#999" stroke-dasharray="3 3"/>')
        parts.append(f'<text x="{x0 + 4}" y="{y1 - 6}">{text}</text>')
    for place, (name, points) in enumerate(lines.items()):
        path = " ".join(f"{x},{y}" for x, y in (at(*point) for point in points))
        colour = COLOURS[place % len(COLOURS)]
        parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>')
        y = TOP + 20 + 20 * place
        parts.append(f'<text x="{WIDTH - RIGHT + 14}" y="{y}" fill="{colour}">{name}</text>')
    x0, y0 = at(last / 2, 0)
    parts.append(f'<text x="{x0}" y="{y0 + 34}" text-anchor="middle">{x_title}</text>')
    parts.append(
        f'<text transform="translate(16 {HEIGHT / 2}) rotate(-90)" text-anchor="middle">{y_title}</text>'
    )
    return "\n".join([*parts, "</svg>"]) + "\n"


def drift(rows: list[dict], batch: int) -> str:
    names = {
        "none": "no balancer",
        "stale": "offline plan, stale",
        "online": "online",
        "hindsight": "hindsight",
    }
    lines: dict[str, list[tuple[float, float]]] = {about: [] for about in names.values()}
    marks, begin = {}, 0
    rows = [row for row in rows if row["op"] == "drift" and row["case"]["batch"] == batch]
    for task in dict.fromkeys(row["case"]["task"] for row in rows):
        marks[begin] = task
        of_task = {row["impl"]: row["series"] for row in rows if row["case"]["task"] == task}
        for impl, series in of_task.items():
            lines[names[impl]] += [(begin + n, value) for n, value in enumerate(series)]
        begin += len(of_task["online"])
    return draw(lines, marks, f"iteration ({batch} tokens)", "fullest rank over the mean, minus 1", 0.3)


def renewal(rows: list[dict]) -> str:
    lines: dict[str, list[tuple[float, float]]] = {}
    for row in rows:
        if row["op"] == "renewal":
            case = row["case"]
            name = f"{case['W']} ranks, {case['S']} slots"
            lines.setdefault(name, []).append((case["budget_percent"], max(row["gain"], 0.0)))
    return draw(lines, {20: ""}, "fetches allowed, % of DeepSeek's", "share of the gain", 1.0)


def main() -> None:
    rows = json.loads((ROOT / "benchmarks/results/placement.json").read_text())["rows"]
    (ROOT / "docs/placement-drift.svg").write_text(drift(rows, 512))
    (ROOT / "docs/placement-renewal.svg").write_text(renewal(rows))


if __name__ == "__main__":
    main()
