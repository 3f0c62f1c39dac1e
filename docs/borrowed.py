"""Pages of the site that are files of the repository's root, so that no text stands twice."""

from __future__ import annotations

from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
BORROWED = {"index.md": "README.md", "contributing.md": "CONTRIBUTING.md"}


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """The root's text, its links as seen from `docs/`."""
    source = BORROWED.get(page.file.src_uri)
    if source is None:
        return markdown
    text = (ROOT / source).read_text(encoding="utf-8").replace("](docs/", "](")
    for here, there in BORROWED.items():
        text = text.replace(f"]({there})", f"]({here})")
    return text
