"""`python -m docs.tables`: write every table and picture of the documentation."""

from __future__ import annotations

from docs.tables.pages import stale
from docs.tables.results import ROOT


def main() -> None:
    for path, text in stale().items():
        path.write_text(text, encoding="utf-8")
        print(f"written: {path.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
