"""Messages by which ranks agree before rows move, so that one rank's mistake is a ValueError on every rank.

At construction `agree` compares the settings of an exchange. At every call each rank sends a header: what it
is about to do, and the first problem with its input, if any (`find_problem`, `write_header`). `check_headers`
raises the same error on every rank. Before a combine, `raise_together` does so for the experts' rows.
"""

from __future__ import annotations

import weakref
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from imbrex.contracts import VERSION, Backend, Geometry, Routing
from imbrex.exchange.plan import chosen_twice
from imbrex.runtime.checks import debug_is_on
from imbrex.runtime.roll import UNEVEN
from imbrex.runtime.tracing import FORWARD
from imbrex.runtime.waits import RankLostError
from imbrex.runtime.words import words
from imbrex.transport.collective import Collective
from imbrex.transport.groups import hosts_of

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
HEADER = 15
"""The number of int64 values in a header: version, exchange, layer, call, placement, dtype, tokens, checksum
of the ids, problem and its three details, chunks, promise, backwards. The constants below are the indices of
some of them."""
DTYPE, TOKENS, CHECKSUM, PROBLEM, CHUNKS, PROMISE, BACKWARDS = 5, 6, 7, 8, 12, 13, 14
MIXER = 0x9E3779B1
"""An odd number near 2^32 divided by the golden ratio: its multiples are spread over all words of 31 bits."""
SETTLES = -2
"""The number of chunks in the header of a call that may choose another transport before it dispatches."""
TEXT_BYTES = 240
"""The most bytes of a sentence that `raise_together` sends to the other ranks."""
EQUAL = {
    0: "the version of imbrex",
    1: "the exchange that is called (exchanges are numbered as they were made)",
    2: "the layer that is called",
    3: "the number of calls so far",
    4: "the placement (its checksum; every rank must relocate between the same two calls)",
    DTYPE: "the dtype of x",
    CHUNKS: "the number of chunks (a compiled layer has 1, as schedule='serial'; 0 is a check of the input "
    "alone, -1 one chunk of another schedule, of Serial(keep_rows=False), or of training where transformers "
    "shares a model by tp_size, -2 a first call that may choose another transport: compile all ranks there, "
    "or none)",
    BACKWARDS: "the layers gone back through since the last call (a checksum of their order)",
}
"""The header's values that must be equal on all ranks, by index, and their names in error messages."""
EQUAL_IF_REPLICATED = {
    TOKENS: "the number of tokens",
    CHECKSUM: "the tokens' experts (this transport wants equal tokens)",
}
"""Further values that must be equal if the transport wants the same tokens on every rank."""

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
    10: "the mask kept_TK is no plain tensor of bools; pass one as recorded in Routing.kept_TK",
    11: "weights have {0} dimensions and another shape than ids; give one for every choice, [{1}, {2}]",
    12: "the mask kept_TK is not on the device of x; move it there with .to(x.device)",
    13: "x is sparse or nested; give a plain tensor, as x.to_dense() or x.values() gives it",
    14: "derivatives are computed forward (torch.func.jvp, jacfwd or forward_ad), and none of them crosses; "
    "use backward(), torch.autograd.grad or jacobian",
}
"""Sentences about a wrong input, by the number that a header carries; the details fill the braces."""


def is_plain(x: Tensor) -> bool:
    """Whether `x` is neither sparse nor nested."""
    return x.layout is torch.strided and not x.is_nested


def find_problem(
    x_TD: Tensor,
    routing: Routing,
    geometry: Geometry,
    place: torch.device | None,
    debug: bool | None = None,
) -> tuple[int, ...]:
    """The first problem with the input, as (number in `PROBLEMS`, three details), or four zeros.

    Shapes, dtypes and devices are always checked. Values are checked on the CPU, and on a GPU only if
    IMBREX_DEBUG=1, because that needs a host synchronisation.

    debug: whether it is, from a caller who has looked before: reading the environment takes a microsecond.
    place: the device on which the transport takes rows, of which the type counts; `None`: any device.
    """
    ids, weights, width = routing.ids_TK, routing.weights_TK, geometry.hidden_size
    if FORWARD["_current_level"] >= 0:
        return 14, 0, 0, 0
    if not is_plain(x_TD):
        return 13, 0, 0, 0
    tokens, choices = x_TD.shape, ids.shape
    if len(tokens) != 2 or tokens[1] != width:
        return 1, len(tokens), tokens[-1] if tokens else 0, width
    if len(choices) != 2 or choices[0] != tokens[0]:
        return 2, tokens[0], choices[0] if choices else 0, 0
    if choices[1] != geometry.top_k:
        return 3, choices[1], geometry.top_k, 0
    if choices != weights.shape:
        return 11, weights.dim(), choices[0], geometry.top_k
    if x_TD.dtype not in DTYPES:
        return 4, 0, 0, 0
    if ids.dtype != torch.int64 or weights.dtype != torch.float32:
        return 5, 0, 0, 0
    kept_TK, device = routing.kept_TK, x_TD.device
    if kept_TK is not None and kept_TK.dtype != torch.bool:
        return 10, 0, 0, 0
    if kept_TK is not None and kept_TK.device != device:
        return 12, 0, 0, 0
    if not device == ids.device == weights.device:
        return 6, 0, 0, 0
    # The text of a type is made anew every time, which takes the host longer than to compare devices.
    if place is not None and device != place and device.type != place.type:
        return 6, 0, 0, 0
    if ids.is_cpu or (debug_is_on() if debug is None else debug):
        # Nothing that a graph would save: a checkpointed call counts what its forward did.
        return find_bad_value(ids, weights.detach(), geometry.placement.num_experts)
    return 0, 0, 0, 0


def explain(problem: tuple[int, ...]) -> str | None:
    """The sentence for a result of `find_problem`, or `None` if there is no problem."""
    number, *details = problem
    return PROBLEMS[number].format(*details) if number else None


def find_bad_value(ids_TK: Tensor, weights_TK: Tensor, num_experts: int) -> tuple[int, ...]:
    """The first id out of range, expert chosen twice by a token, or weight that is not finite, as
    `find_problem` returns it; or four zeros."""
    outside = (ids_TK < -1) | (ids_TK >= num_experts)
    if outside.any():
        # host sync: only if something is wrong
        token, choice = outside.nonzero()[0].tolist()
        return 7, token, choice, int(ids_TK[token, choice])
    ordered_TK, twice = chosen_twice(ids_TK)
    if twice.any():
        # host sync: only if something is wrong
        token, choice = twice.nonzero()[0].tolist()
        return 8, token, int(ordered_TK[token, choice]), 0
    wrong = ~torch.isfinite(weights_TK) & (ids_TK >= 0)
    if wrong.any():
        # host sync: only if something is wrong
        token, choice = wrong.nonzero()[0].tolist()
        return 9, token, choice, 0
    return 0, 0, 0, 0


class Backwards:
    """A checksum of the order in which the layers of a group have run their backwards since its last call.

    Messages of a backward do not name their layer. If one rank ran two layers' backwards in another order,
    gradients would be mixed up without an error, so ranks compare this checksum at the next call.
    """

    def __init__(self) -> None:
        self._checksum = 0

    def note(self, number: int) -> None:
        """Add a backward of the exchange with this number."""
        self._checksum = zlib.crc32(number.to_bytes(8, "little"), self._checksum)

    def take(self) -> int:
        """Return the checksum, and start a new one."""
        checksum, self._checksum = self._checksum, 0
        return checksum


_backwards: weakref.WeakKeyDictionary[Any, Backwards] = weakref.WeakKeyDictionary()


def backwards_of(group: Any) -> Backwards:
    """The `Backwards` of a process group, which all its exchanges share."""
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
    """The header of this rank's message: int64 [HEADER], on the device of the ids.

    problem: from `find_problem`. call: the numbers of the exchange, its layer and the call, and the checksum
        of the placement. replicated: whether the transport wants the same tokens on all ranks. chunks: the
        number of parts that are planned together; 0 for a check alone, -1 for one that a compiled layer
        would not go on with in the same way. promise: as in `Exchange.dispatch`.
        backwards: from `Backwards.take`.
    """
    fine = not problem[0]
    dtype = DTYPES.index(x_TD.dtype) if fine else 0
    tokens = x_TD.shape[0] if fine else 0
    head = words(VERSION, *call, dtype, tokens, 0, *problem, chunks, promise, backwards)
    head = head.to(ids_TK.device if fine else "cpu", non_blocking=True)
    if replicated and fine:
        # Not by the places themselves: with them two tokens whose ids have one sum may change places.
        factors = torch.arange(1, ids_TK.numel() + 1, device=ids_TK.device) * MIXER & 0x7FFFFFFF
        head[CHECKSUM] = (ids_TK.flatten() * (factors ^ factors >> 15)).sum()
    return head


def check_headers(headers_WH: Tensor, replicated: bool) -> None:
    """Raise the same ValueError on every rank if a header has a problem, or if headers differ where they must
    be equal. headers_WH: int64 [W, HEADER] on the host."""
    headers = headers_WH.tolist()
    for rank, header in enumerate(headers):
        if header[PROBLEM]:
            text = PROBLEMS[header[PROBLEM]].format(*header[PROBLEM + 1 : CHUNKS])
            raise ValueError(f"dispatch: on rank {rank}, {text}")
    first, names = headers[0], EQUAL | EQUAL_IF_REPLICATED if replicated else EQUAL
    # The first values of a header are those that must be equal, so most headers are compared at once.
    equal = slice(PROBLEM if replicated else TOKENS)
    for rank, header in enumerate(headers):
        if header[equal] == first[equal] and all(header[n] == first[n] for n in (CHUNKS, BACKWARDS)):
            continue
        for index, name in names.items():
            if header[index] != first[index]:
                values = first[index], header[index]
                ours, theirs = (DTYPES[v] if index == DTYPE else v for v in values)
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
    """Compare settings over all ranks; at construction. Collective.

    settings: values by their names in error messages. what: the name of the thing that is constructed.
    problem: an error that this rank has found by itself. own: numbers of this rank that may differ.

    Returns the numbers `own` of every rank. Raises ValueError on every rank: `problem` on the rank that has
    one, and a sentence that names this rank on the others; or a sentence that names the setting that differs.
    """
    values = [zlib.crc32(str(value).encode()) for value in settings.values()]  # a number may be any
    try:
        words_W = backend.exchange_counts(words(problem is not None, *own, *values))
    except RankLostError as error:
        text = str(error).removesuffix(UNEVEN).replace("in plan", f"in the set-up of {what}")
        raise RankLostError(f"{text}; make it on every rank of the group") from error
    if problem is not None:
        raise problem
    wrong, values_W = words_W[:, 0].nonzero().flatten(), words_W[:, 1 + len(own) :]
    if len(wrong):
        raise ValueError(f"{what}: rank {int(wrong[0])} cannot be served; its own error says why")
    for index, (name, mine) in enumerate(settings.items()):
        column = values_W[:, index]
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
    """Raise ValueError on every rank if one rank has a problem, with the sentence of the first one that has.
    Collective: one exchange of counts, and a second one if there is a problem.

    what: the call, for error messages. dtype: the dtype of this rank's rows. Ranks with different dtypes are
        a ValueError, too.
    """
    try:
        code = DTYPES.index(dtype) if dtype in DTYPES else -1
        flags_W = backend.exchange_counts(words(problem is not None, code))
    except RankLostError as error:
        # Ranks meet here in the middle of a call: nobody has fewer of them.
        text = str(error).removesuffix(UNEVEN).replace("in plan", f"in {what}")
        raise RankLostError(text) from error
    wrong = flags_W[:, 0].nonzero().flatten()
    if not len(wrong):
        _refuse_several(what, flags_W[:, 1].tolist())
        return
    text = (problem or "").encode("ascii", "replace")[:TEXT_BYTES].ljust(TEXT_BYTES)
    letters = backend.exchange_counts(words(*text))[wrong[0]].tolist()
    raise ValueError(f"{what}: on rank {int(wrong[0])}, {bytes(letters).decode().rstrip()}")


def raise_in_data_group(group: dist.ProcessGroup | None, problem: ValueError | None) -> None:
    """Raise what is wrong in this expert-parallel group, or in another that holds the same experts: its ranks
    would not come to the router's sums over `group`, the data group. Their hosts tell each other."""
    if group is not None and group.size() > 1:
        try:
            what = "MoELayer: in its data group"
            raise_together(Collective(hosts_of(group)), what, str(problem) if problem else None)
        except ValueError as error:
            raise (problem or error) from None
    elif problem is not None:
        raise problem


def _refuse_several(what: str, dtypes_W: list[int]) -> None:
    """Raise ValueError if ranks have rows of different dtypes. dtypes_W: indices in `DTYPES`, by rank."""
    for rank, code in enumerate(dtypes_W):
        if code != dtypes_W[0]:
            raise ValueError(
                f"{what}: ranks disagree about the dtype of rows: {DTYPES[dtypes_W[0]]} on rank 0, "
                f"{DTYPES[code]} on rank {rank}; give every rank the same"
            )
