"""What the conformity suites share."""

from __future__ import annotations


class ConformityError(AssertionError):
    """A piece does not keep its contract; the text says which part of it, and on what input."""


def require(holds: object, what: str) -> None:
    """Raise ConformityError unless `holds`."""
    if not holds:
        raise ConformityError(what)
