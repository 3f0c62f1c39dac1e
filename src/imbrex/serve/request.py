"""A request, its answer, and the reasons for which a request is refused."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Integral


@dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    """A prompt, and the number of tokens to generate."""

    prompt: Sequence[int]
    max_tokens: int


class Answer:
    """The tokens of an answer, in the order of their delivery. refused: why there are none. arrivals: for
    every delivery the seconds on the clock of `time.perf_counter`, and the number of tokens."""

    def __init__(self, request: Request) -> None:
        self.request = request
        self.tokens: list[int] = []
        self.arrivals: list[tuple[float, int]] = []
        self.refused: str | None = None
        self.done = False

    def deliver(self, tokens: Sequence[int], now: float) -> None:
        self.tokens += tokens
        self.arrivals.append((now, len(tokens)))


def why_not_request(request: Request, *, vocabulary: int, room: int) -> str | None:
    """Why a request cannot be answered, or `None`."""
    if not isinstance(request.prompt, Sequence):
        return f"the prompt is {type(request.prompt).__name__}; give a list of tokens"
    length = len(request.prompt)
    if not length:
        return "the prompt is empty; give at least one token"
    if not is_whole(request.max_tokens) or request.max_tokens < 1:
        return f"{request.max_tokens!r} tokens are wanted; ask for a whole number of at least 1"
    if length + request.max_tokens > room:
        return (
            f"{length} tokens and {request.max_tokens} more are wanted, and a slot has room for {room}; "
            "shorten the prompt or ask for fewer"
        )
    for place, token in enumerate(request.prompt):
        if not is_whole(token) or not 0 <= token < vocabulary:
            return f"token {place} is {token!r}; a token is a whole number from 0 to {vocabulary - 1}"
    return None


def is_whole(value: object) -> bool:
    """Whether a value is a whole number, numpy's included, which `True` is not."""
    return isinstance(value, Integral) and not isinstance(value, bool)
