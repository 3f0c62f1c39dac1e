"""What the conformity suites share."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

FLOATS: dict[str, Any] = {"dtype": torch.float32, "device": "cpu"}
"""What inputs are drawn as, whatever torch's default dtype and device."""


class ConformityError(AssertionError):
    """A piece does not keep its contract; the text says which part of it, and on what input."""


def require(holds: object, what: str) -> None:
    """Raise ConformityError unless `holds`."""
    if not holds:
        raise ConformityError(what)


@contextmanager
def on(where: str) -> Iterator[None]:
    """What a piece raises inside becomes the cause of a ConformityError that says on what input."""
    try:
        yield
    except ConformityError:
        raise
    except ValueError as error:
        raise ConformityError(f"{where}: {error}") from error
    except Exception as error:
        raise ConformityError(f"{where}: {type(error).__name__}: {error}") from error
