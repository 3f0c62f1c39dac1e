"""Helpers that all conformity suites use."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

FLOATS: dict[str, Any] = {"dtype": torch.float32, "device": "cpu"}
"""The dtype and device of drawn inputs, whatever torch's defaults are."""


class ConformityError(AssertionError):
    """A piece does not keep its contract; the text says which part of it, and on what input."""


def require(holds: object, what: str) -> None:
    """Raise ConformityError unless `holds`."""
    if not holds:
        raise ConformityError(what)


@contextmanager
def on(where: str) -> Iterator[None]:
    """Turn a piece's error into a ConformityError that says on what input, with the error as its cause."""
    try:
        yield
    except ConformityError:
        raise
    except ValueError as error:
        raise ConformityError(f"{where}: {error}") from error
    except Exception as error:
        raise ConformityError(f"{where}: {type(error).__name__}: {error}") from error
