"""Checks of arguments: whether an object of a user's has what is needed, before it is used."""

from __future__ import annotations

import os
from typing import TypeVar

Value = TypeVar("Value")
PARTS = {
    "codec": ("Codec", "name nbytes encode decode"),
    "transport": ("Backend", "name replicated device exchange_counts"),
    "transport of bytes": ("Transport", "broadcasts relays plan begin_move begin_move_back home rows_sent"),
    "schedule": ("Strategy", "name reason run"),
    "experts": ("Experts", "applies_weights forms parameters"),
}
"""The protocol in `imbrex.contracts` for each argument, and the members that every layer needs."""


NOT_PICKLED = (
    "Exchange: it cannot be pickled, nor can a model with a MoELayer, whose group is this process's; save "
    "model.state_dict(), over ranks with imbrex.parallel.checkpoint, and load into a new model"
)
"""The error message for pickling."""
UNREADABLE = (
    *(ArithmeticError, AttributeError, EOFError, LookupError, MemoryError),
    *(OSError, RecursionError, TypeError, ValueError),
)
"""Errors of reading a file that is cut off, or of another kind."""


def why(error: BaseException) -> str:
    """Say in a few words what went wrong: the text of an error may hold a whole file."""
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:200]


def debug_is_on() -> bool:
    """Whether IMBREX_DEBUG=1 asks for checks that wait for the GPU."""
    return os.environ.get("IMBREX_DEBUG") == "1"


def piece(argument: str, value: Value) -> Value:
    """Return a user's object unchanged. Raises ValueError if it is a class, or lacks a member of its
    protocol."""
    protocol, parts = PARTS[argument]
    if isinstance(value, type):
        raise ValueError(f"{argument}: {value.__name__} is a class; give an object, {value.__name__}(...)")
    missing = [part for part in parts.split() if not hasattr(value, part)]
    if missing:
        what = repr(value) if isinstance(value, int | float | str | None) else f"a {type(value).__name__}"
        raise ValueError(
            f"{argument}: {what} has no {', '.join(missing)}; give a name, or an object that keeps "
            f"imbrex.contracts.{protocol}"
        )
    return value


def expect(what: str, value: object, kinds: tuple[type, ...], mend: str) -> None:
    """Raise ValueError unless `value` is an instance of one of `kinds`. mend: what to do instead, the end of
    the message. `True` is no number."""
    if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
        raise ValueError(f"{what} is {value!r}; {mend}")
