"""HTML files of facts, tables and figures that open without a network."""

from __future__ import annotations

import html
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 1080px; margin: 2rem auto; padding: 0 1rem }
h1 { font-size: 1.5rem } h2 { font-size: 1.15rem; margin: 2rem 0 .2rem }
p { margin: .2rem 0 .6rem; color: #555 }
table { border-collapse: collapse } th { text-align: left }
td, th { padding: .15rem 1.2rem .15rem 0; vertical-align: top }
td:first-child { color: #555 } td { overflow-wrap: anywhere }
"""


def write_page(
    path: str | os.PathLike[str],
    *,
    title: str,
    facts: Mapping[str, str],
    sections: Sequence[tuple[str, str, Figure | str]],
) -> None:
    """Write the file. facts: the table at its head. sections: heading, what it shows, and a figure, or HTML
    such as that of `table`."""
    rows = "".join(f"<tr><td>{_text(k)}</td><td>{_text(v)}</td></tr>" for k, v in facts.items())
    body, script = [], True
    for name, about, content in sections:
        drawn = content if isinstance(content, str) else _embed(content, first=script)
        script = script and isinstance(content, str)
        body.append(f"<h2>{_text(name)}</h2><p>{_text(about)}</p>{drawn}")
    Path(path).write_text(
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{_text(title)}</title>'
        f"<style>{STYLE}</style></head><body><h1>{_text(title)}</h1><table>{rows}</table>{''.join(body)}"
        "</body></html>",
        encoding="utf-8",
    )


def table(head: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    """A table as HTML."""
    tops = "".join(f"<th>{_text(cell)}</th>" for cell in head)
    rows = ("".join(f"<td>{_text(cell)}</td>" for cell in line) for line in lines)
    return f"<table><tr>{tops}</tr>{''.join(f'<tr>{row}</tr>' for row in rows)}</table>"


def empty_figure(x: str, y: str, *, height: int = 340) -> Figure:
    """A figure with named axes and nothing in it."""
    import plotly.graph_objects as go

    return go.Figure(layout={"xaxis": {"title": x}, "yaxis": {"title": y}, "height": height})


def _text(value: str) -> str:
    return html.escape(str(value))


def _embed(figure: Figure, *, first: bool) -> str:
    figure.update_layout(template="plotly_white", margin={"l": 60, "r": 20, "t": 30, "b": 50})
    return figure.to_html(
        full_html=False, include_plotlyjs="inline" if first else False, config={"displaylogo": False}
    )


__all__ = ["empty_figure", "table", "write_page"]
