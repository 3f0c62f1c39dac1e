"""Words that ranks exchange before rows move, so that one rank's mistake is every rank's ValueError."""

from __future__ import annotations

import os
import weakref
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from imbrex.contracts import VERSION, Backend, Geometry, Routing
from imbrex.exchange.plan import chosen_twice
from imbrex.runtime.waits import RankLostError
from imbrex.runtime.words import words

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
HEADER, TOKENS, PROBLEM, CHUNKS, PROMISE, BACKWARDS = 15, 6, 8, 12, 13, 14
"""int64 values before the counts: version, exchange, layer, call, placement, dtype, tokens, checksum, problem
and its three details, chunks, whether the rows of the combine are sure to fit, backwards. `TOKENS`,
`PROBLEM`, `CHUNKS`, `PROMISE` and `BACKWARDS` are places of these."""
DTYPE, CHECKSUM = 5, 7
TEXT_BYTES = 240
ALIKE = {
    0: "the version of imbrex",
    1: "the exchange that is called (exchanges are numbered as they were made)",
    2: "the layer that is called",
    3: "the number of calls so far",
    4: "the placement (its checksum; every rank must relocate between the same two calls)",
    DTYPE: "the dtype of x",
    CHUNKS: "the number of chunks (0 is a check of the input alone)",
    BACKWARDS: "the layers gone back through since the last call (a checksum of their order)",
}
ALIKE_REPLICATED = {
    TOKENS: "the number of tokens",
    CHECKSUM: "the tokens' experts (this transport wants equal tokens)",
}
"""Words of the header that must be the same on every rank, by their place."""

PROBLEMS = {
    1: "x has {0} dimensions and last size {1}; give tokens [T, {2}]",
    2: "x has {0} tokens but the routing has {1}; route the same tokens that you dispatch",
    3: "the routing has {0} choices a token; this exchange was made for {1}",
    4: "x has a dtype that cannot be exchanged; use float32, bfloat16, float16 or float64",
    5: "ids must be int64 and weights float32; convert them with .long() and .float()",
    6: "x, ids and weights must be on one device: a GPU for a group of nccl, the CPU for one of gloo",
    7: "choice {1} of token {0} is expert {2}, which does not exist; ids are 0..E-1, or -1 to drop a choice",
    8: "token {0} wants expert {1} twice; an expert may stand at most once in a row of ids",
    9: "the weight of choice {1} of token {0} is NaN or infinite; check the router's input",
    10: "the mask kept_TK is not of bools; pass one as recorded in Routing.kept_TK",
    11: "weights have {0} dimensions and another shape than ids; give one for every choice, [{1}, {2}]",
    12: "the mask kept_TK is not on the device of x; move it there with .to(x.device)",
    13: "x is sparse or nested; give a plain tensor, as x.to_dense() or x.values() gives it",
}


def is_plain(x: Tensor) -> bool:
    """Whether it is neither sparse nor nested, so that all rows are there, of one width."""
    return x.layout is torch.strided and not x.is_nested


def find_problem(
    x_TD: Tensor, routing: Routing, geometry: Geometry, place: torch.device | None
) -> tuple[int, ...]:
    """The first thing wrong with the input as (number in PROBLEMS, three details), or zeros.

    place: where the exchange's transport takes rows; `None`: wherever the tokens are.

    Shapes and dtypes always; values on the CPU, and on a GPU only under IMBREX_DEBUG=1 (a host sync).
    """
    ids, weights, width = routing.ids_TK, routing.weights_TK, geometry.hidden_size
    if not is_plain(x_TD):
        return 13, 0, 0, 0
    if x_TD.dim() != 2 or x_TD.shape[1] != width:
        return 1, x_TD.dim(), x_TD.shape[-1] if x_TD.dim() else 0, width
    if ids.dim() != 2 or ids.shape[0] != x_TD.shape[0]:
        return 2, x_TD.shape[0], ids.shape[0] if ids.dim() else 0, 0
    if ids.shape[1] != geometry.top_k:
        return 3, ids.shape[1], geometry.top_k, 0
    if ids.shape != weights.shape:
        return 11, weights.dim(), ids.shape[0], geometry.top_k
    if x_TD.dtype not in DTYPES:
        return 4, 0, 0, 0
    if ids.dtype != torch.int64 or weights.dtype != torch.float32:
        return 5, 0, 0, 0
    if routing.kept_TK is not None and routing.kept_TK.dtype != torch.bool:
        return 10, 0, 0, 0
    if routing.kept_TK is not None and routing.kept_TK.device != x_TD.device:
        return 12, 0, 0, 0
    if not x_TD.device == ids.device == weights.device or x_TD.device.type != (place or x_TD.device).type:
        return 6, 0, 0, 0
    if ids.device.type == "cpu" or os.environ.get("IMBREX_DEBUG") == "1":
        return find_bad_value(ids, weights, geometry.placement.num_experts)
    return 0, 0, 0, 0


def explain(problem: tuple[int, ...]) -> str | None:
    """The result of `find_problem` as a sentence, or `None`."""
    number, *details = problem
    return PROBLEMS[number].format(*details) if number else None


def find_bad_value(ids_TK: Tensor, weights_TK: Tensor, num_experts: int) -> tuple[int, ...]:
    """An id out of range, an expert twice in a row, a weight that is not finite; or zeros."""
    outside = (ids_TK < -1) | (ids_TK >= num_experts)
    if outside.any():
        # host sync: only where something is wrong
        token, choice = outside.nonzero()[0].tolist()
        return 7, token, choice, int(ids_TK[token, choice])
    ordered_TK, twice = chosen_twice(ids_TK)
    if twice.any():
        # host sync: only where something is wrong
        token, choice = twice.nonzero()[0].tolist()
        return 8, token, int(ordered_TK[token, choice]), 0
    wrong = ~torch.isfinite(weights_TK) & (ids_TK >= 0)
    if wrong.any():
        # host sync: only where something is wrong
        token, choice = wrong.nonzero()[0].tolist()
        return 9, token, choice, 0
    return 0, 0, 0, 0


class Backwards:
    """The order in which the exchanges of a group were gone back through since its last call. Rows that cross
    in a backward do not say whose they are: of two layers in another order on one rank, gradients are mixed.
    """

    def __init__(self) -> None:
        self._checksum = 0

    def note(self, number: int) -> None:
        self._checksum = zlib.crc32(number.to_bytes(8, "little"), self._checksum)

    def take(self) -> int:
        """The checksum, once."""
        checksum, self._checksum = self._checksum, 0
        return checksum


_backwards: weakref.WeakKeyDictionary[Any, Backwards] = weakref.WeakKeyDictionary()


def backwards_of(group: Any) -> Backwards:
    """The backwards of a process group."""
    return _backwards.setdefault(group, Backwards())


def write_header(
    problem: tuple[int, ...],
    x_TD: Tensor,
    ids_TK: Tensor,
    call: tuple[int, int, int, int],
    replicated: bool,
    chunks: int = 1,
    promise: bool = False,
    backwards: int = 0,
) -> Tensor:
    """The header of this rank's message, int64 [HEADER], on the device of the ids. call: the numbers of the
    exchange, of its layer and of the call, and of where its experts live. promise: of `Exchange.dispatch`.
    backwards: of `Backwards`."""
    fine = not problem[0]
    dtype = DTYPES.index(x_TD.dtype) if fine else 0
    tokens = x_TD.shape[0] if fine else 0
    head = words(VERSION, *call, dtype, tokens, 0, *problem, chunks, promise, backwards)
    head = head.to(ids_TK.device if fine else "cpu", non_blocking=True)
    if replicated and fine:
        place = torch.arange(1, ids_TK.numel() + 1, device=ids_TK.device)
        head[CHECKSUM] = (ids_TK.flatten() * place).sum()
    return head


def check_headers(headers_WH: Tensor, replicated: bool) -> None:
    """Raise the same ValueError on every rank where one reports a problem, or where they disagree."""
    headers = headers_WH.tolist()
    for rank, header in enumerate(headers):
        if header[PROBLEM]:
            text = PROBLEMS[header[PROBLEM]].format(*header[PROBLEM + 1 : CHUNKS])
            raise ValueError(f"dispatch: on rank {rank}, {text}")
    first, names = headers[0], ALIKE | ALIKE_REPLICATED if replicated else ALIKE
    alike = slice(PROBLEM if replicated else TOKENS)
    for rank, header in enumerate(headers):
        if header[alike] == first[alike] and all(header[n] == first[n] for n in (CHUNKS, BACKWARDS)):
            continue
        for place, name in names.items():
            if header[place] != first[place]:
                values = first[place], header[place]
                ours, theirs = (DTYPES[v] if place == DTYPE else v for v in values)
                raise ValueError(
                    f"dispatch: ranks disagree about {name}: {ours} on rank 0, {theirs} on rank {rank}; "
                    "every rank must make the same calls with the same kind of input"
                )


def agree(
    backend: Backend,
    settings: Mapping[str, int | str],
    what: str,
    problem: ValueError | None = None,
    *,
    own: Sequence[int] = (),
) -> list[list[int]]:
    """Compare settings over all ranks, once, at construction.

    problem: what this rank found wrong by itself. Raises ValueError on every rank: the problem where it was
    found, its rank elsewhere; else the setting and the rank that differs. own: what a rank says of itself,
    returned of all ranks, by rank.
    """
    values = [v if isinstance(v, int) else zlib.crc32(v.encode()) for v in settings.values()]
    words_W = backend.exchange_counts(words(problem is not None, *own, *values))
    if problem is not None:
        raise problem
    wrong, values_W = words_W[:, 0].nonzero().flatten(), words_W[:, 1 + len(own) :]
    if len(wrong):
        raise ValueError(f"{what}: rank {int(wrong[0])} cannot be served; its own error says why")
    for place, (name, mine) in enumerate(settings.items()):
        column = values_W[:, place]
        different = (column != column[0]).nonzero().flatten().tolist()
        if different:
            raise ValueError(
                f"{what}: ranks disagree about {name}: rank {different[0]} was given something else than "
                f"rank 0 (here: {mine}); give every rank of the group the same"
            )
    return words_W[:, 1 : 1 + len(own)].tolist()


def raise_together(
    backend: Backend, what: str, problem: str | None, dtype: torch.dtype | None = None
) -> None:
    """One exchange, two where a rank has a problem: then ValueError on every rank with what is wrong on the
    first that has one. dtype: of this rank's rows; ValueError, too, where ranks have several."""
    try:
        code = DTYPES.index(dtype) if dtype in DTYPES else -1
        flags_W = backend.exchange_counts(words(problem is not None, code))
    except RankLostError as error:
        raise RankLostError(str(error).replace("in plan", f"in {what}")) from error
    wrong = flags_W[:, 0].nonzero().flatten()
    if not len(wrong):
        _refuse_several(what, flags_W[:, 1].tolist())
        return
    text = (problem or "").encode("ascii", "replace")[:TEXT_BYTES].ljust(TEXT_BYTES)
    letters = backend.exchange_counts(words(*text))[wrong[0]].tolist()
    raise ValueError(f"{what}: on rank {int(wrong[0])}, {bytes(letters).decode().rstrip()}")


def _refuse_several(what: str, dtypes_W: list[int]) -> None:
    """Raise ValueError where the ranks' rows, by their places in `DTYPES`, are not of one dtype."""
    for rank, code in enumerate(dtypes_W):
        if code != dtypes_W[0]:
            raise ValueError(
                f"{what}: ranks disagree about the dtype of rows: {DTYPES[dtypes_W[0]]} on rank 0, "
                f"{DTYPES[code]} on rank {rank}; give every rank the same"
            )
