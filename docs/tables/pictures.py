"""The documentation's pictures, as SVG without a library."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from html import escape
from xml.etree import ElementTree

from docs.tables import layer
from docs.tables.codecs import trainings
from docs.tables.results import read, select

from imbrex.reproduce import convergence, table_6

WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 760, 300, 60, 150, 20, 44
COLOURS = ("#7f7f7f", "#d62728", "#1f77b4", "#2ca02c")
Lines = Mapping[str, Sequence[tuple[float, float]]]
HEAD = '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {} {}" font-family="system-ui, sans-serif" '
BOTH_GREY = "#767d86"
"""Text that is legible on white and on a forge's dark page."""
BARS = {
    "imbrex-serial": "#2f81f7",
    "imbrex-alltoall": "#3fa98f",
    "nccl-a2a": "#a0714f",
    "nccl-agrs": "#8a8f98",
    "nccl-agrs-bag": "#b58bd0",
}
BAR, GAP, NAME, SCALE = 15, 18, 178, 150.0
"""Pixels: a bar, between groups, a group's name, and a layer as long as its experts alone."""
MODEL_TITLES = {"qwen2-moe": "Qwen2-MoE", "deepseek-v3": "DeepSeek-V3"}


def layer_bars() -> str:
    """The README's picture: a layer's time over that of its experts alone, by model and pass."""
    found = layer.first_screen_cases()
    bars = {name: colour for name, colour in BARS.items() if all(name in us for us in found.values())}
    names, y = legend(bars)
    height = y + len(found) * (len(bars) * BAR + GAP) + 24
    parts = [
        HEAD.format(WIDTH, height) + f'font-size="12" fill="{BOTH_GREY}">',
        f"<title>Time of one MoE layer on {layer.WORDS[layer.ranks_shown()]} H200, over the time of its "
        "experts alone</title>",
    ]
    parts += names
    top = y - 6
    for (model, _, op), us in found.items():
        middle = y + len(bars) * BAR / 2
        parts.append(
            f'<text x="{NAME - 10}" y="{middle - 2}" text-anchor="end" font-weight="bold">'
            f"{MODEL_TITLES[model]}</text>"
        )
        parts.append(f'<text x="{NAME - 10}" y="{middle + 12}" text-anchor="end">{op}</text>')
        for name, colour in bars.items():
            over = us[name] / us[layer.FLOOR]
            width = over * SCALE
            parts.append(
                f'<rect x="{NAME}" y="{y}" width="{width:.1f}" height="{BAR - 2}" fill="{colour}"/>'
                f'<text x="{NAME + width + 6:.1f}" y="{y + 11}">{over:.2f} ({us[name]:,.0f} us)</text>'
            )
            y += BAR
        y += GAP
    alone, bottom = NAME + SCALE, y - 6
    parts.append(f'<path d="M{alone} {top}V{bottom}" stroke="{BOTH_GREY}" stroke-dasharray="3 3"/>')
    parts.append(f'<text x="{alone + 6}" y="{y + 6}">1 = the experts alone, torch\'s grouped GEMM</text>')
    return whole(parts)


def legend(bars: Mapping[str, str]) -> tuple[list[str], int]:
    """Every bar's colour and name, in as many lines as they take, and where the bars begin."""
    parts, x, y = [], NAME, 8
    for name, colour in bars.items():
        title = layer.IMPLEMENTATIONS[name].replace("`", "")
        across = 32 + round(6.4 * len(title))
        if x + across > WIDTH:
            x, y = NAME, y + 18
        parts.append(f'<rect x="{x}" y="{y}" width="11" height="11" fill="{colour}"/>')
        parts.append(f'<text x="{x + 16}" y="{y + 10}">{escape(title)}</text>')
        x += across
    return parts, y + 26


def draw(lines: Lines, marks: Mapping[float, str], x_title: str, y_title: str, top: float) -> str:
    """An SVG of lines by name; `marks` are vertical lines with a text. The y axis is from 0 to `top`."""
    last = max(x for points in lines.values() for x, _ in points)
    parts = [
        HEAD.format(WIDTH, HEIGHT) + 'font-size="12">',
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
    return whole(parts)


def whole(parts: Sequence[str]) -> str:
    text = "\n".join([*parts, "</svg>"]) + "\n"
    ElementTree.fromstring(text)
    return text


def drift(batch: int = 512) -> str:
    """Imbalance by iteration while tasks change."""
    names = {
        "none": "no balancer",
        "stale": "offline plan, stale",
        "online": "online",
        "hindsight": "hindsight",
    }
    lines: dict[str, list[tuple[float, float]]] = {about: [] for about in names.values()}
    marks, begin = {}, 0
    rows = select(read("placement"), op="drift", case={"batch": batch})
    for task in dict.fromkeys(row["case"]["task"] for row in rows):
        marks[begin] = task
        of_task = {row["impl"]: row["series"] for row in select(rows, case={"task": task})}
        for impl, series in of_task.items():
            lines[names[impl]] += [(begin + n, value) for n, value in enumerate(series)]
        begin += len(of_task["online"])
    return draw(lines, marks, f"iteration ({batch} tokens)", "fullest rank over the mean, minus 1", 0.3)


def renewal() -> str:
    """Share of a new plan's gain by the number of experts fetched."""
    lines: dict[str, list[tuple[float, float]]] = {}
    for row in select(read("placement"), op="renewal"):
        case = row["case"]
        name = f"{case['W']} ranks, {case['S']} slots"
        lines.setdefault(name, []).append((case["budget_percent"], max(row["gain"], 0.0)))
    return draw(lines, {20: ""}, "fetches allowed, % of DeepSeek's", "share of the gain", 1.0)


PICTURES: dict[str, Callable[[], str]] = {
    "docs/layer.svg": layer_bars,
    "docs/placement-drift.svg": drift,
    "docs/placement-renewal.svg": renewal,
    "docs/convergence.svg": lambda: table_6.picture(convergence.learned(trainings())),
}
