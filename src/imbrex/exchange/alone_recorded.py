"""Small batches of a rank alone, without gradients: launches that are made once, and repeated by addresses.

    x_TD ──order_few──▶ rows_RD ──both products──▶ out_RD ──sum_rows──▶ y_TD

Where the host takes longer than the kernels, as in decoding, it is asked for as little as can be. All tensors
between tokens and result lie in one piece of memory, which a caching allocator mostly gives again; the first
call with a piece launches in the usual way, on record (`kernels.records`), later ones launch the record, as
over NVLink (`exchange.recorded`).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from imbrex.exchange.nvlink_fit import DTYPE
from imbrex.exchange.recorded_memory import Place, can_be_added, new_piece, places_of
from imbrex.kernels.ffn.both import ended_before_last
from imbrex.kernels.ffn.ffn import run_in_order
from imbrex.kernels.ffn.glue import COUNTERS, Groups, hit_words, sum_rows
from imbrex.kernels.gemm.gemm import check_products
from imbrex.kernels.gemm.portable import is_portable
from imbrex.kernels.jit import launch_all
from imbrex.kernels.records import recording, repeatable
from imbrex.kernels.rows.choices import MOST_FEW, FewRows, order_few
from imbrex.runtime.tracing import differentiated, plain, seen

MOST_RECORDS = 256
"""The number of records, one for a size and a piece of memory, after which all are forgotten."""
BLANKS = {(0, ""): 0, (1, ""): 1, (2, ""): 2}
"""Arguments of `order_few` that differ from call to call, and their order: tokens, ids, their weights."""
BLANKS_LAST = {(7, ""): 0}
BLANKS_ADDED = {(7, ""): 0, (8, ""): 1}
"""Arguments of the sums that differ: the result, and what is added to it."""


class Layout(NamedTuple):
    """Places of what lies between tokens and result in a piece of `nbytes` bytes: of `FewRows` by name, and
    of the products' results."""

    few: dict[str, Place]
    act: Place
    out: Place
    nbytes: int


class Record(NamedTuple):
    """The launches of a call."""

    first: Any
    between: tuple[Any, ...]
    last: Any


class FewRecorder:
    """The records of a dispatcher of a rank alone."""

    def __init__(self) -> None:
        self._layouts: dict[Any, Layout] = {}
        self._records: dict[Any, Record] = {}

    def run(
        self,
        tokens: tuple[Tensor, Tensor, Tensor],
        weights: tuple[Tensor, Tensor],
        one_launch: bool | None,
        added_TD: Tensor | None,
    ) -> Tensor:
        """Launch the kernels of a call that `serves_few`: y_TD. tokens: x_TD, ids_TK and their weights, an
        input without a problem. weights: the experts' gate_up_eGD and down_eDF. added_TD: what is added to
        the sums, or `None`."""
        x_TD, ids_TK, weights_TK = (tensor.contiguous() for tensor in tokens)
        tokens, (gate_up_eGD, down_eDF) = (x_TD, ids_TK, weights_TK), weights
        size = ids_TK.shape, down_eDF.shape, one_launch, added_TD is not None
        layout = self._layouts.get(size)
        if layout is None:
            layout = self._layouts[size] = layout_of(ids_TK.shape, down_eDF.shape)
        piece = new_piece(layout.nbytes, x_TD.device)
        y_TD = torch.empty_like(x_TD)
        key = size, piece.data_ptr(), gate_up_eGD.data_ptr(), down_eDF.data_ptr()
        record = self._records.get(key)
        if record is None:
            if len(self._records) >= MOST_RECORDS:
                self._records.clear()
            self._records[key] = _record(layout, piece, tokens, weights, one_launch, added_TD, y_TD)
        else:
            record.first.launch(x_TD.data_ptr(), ids_TK.data_ptr(), weights_TK.data_ptr())
            launch_all(record.between)
            check_products(x_TD.get_device())
            ends = () if added_TD is None else (added_TD.data_ptr(),)
            record.last.launch(y_TD.data_ptr(), *ends)
        return y_TD


def serves_few(tokens: tuple[Tensor, Tensor, Tensor], weights: tuple[Tensor, Tensor]) -> bool:
    """Whether a `FewRecorder` runs a call of these tensors, as of `FewRecorder.run`, whose shapes fit each
    other: few choices, no gradients, nobody who sees single steps, everything as kernels take it."""
    (x_TD, ids_TK, weights_TK), (gate_up_eGD, down_eDF) = tokens, weights
    if not 0 < ids_TK.numel() <= MOST_FEW or differentiated(x_TD, weights_TK, *weights):
        return False
    if is_portable(x_TD.get_device()) or seen(x_TD, ids_TK, weights_TK, *weights):
        return False
    if not x_TD.dtype == gate_up_eGD.dtype == down_eDF.dtype == DTYPE:
        return False
    if not x_TD.get_device() == gate_up_eGD.get_device() == down_eDF.get_device():
        return False
    return gate_up_eGD.is_contiguous() and down_eDF.is_contiguous()


def adds(added_TD: Tensor | None, x_TD: Tensor) -> bool:
    """Whether the last launch of such a call can add this to its sums."""
    if added_TD is None:
        return True
    return plain(added_TD) and not differentiated(added_TD) and can_be_added(added_TD, x_TD)


def layout_of(ids: torch.Size, weights: torch.Size) -> Layout:
    """The layout of calls with ids [T, K] and experts of weights [e, D, F]."""
    (tokens, choices), (experts, width, inner) = ids, weights
    rows = tokens * choices
    few: dict[str, tuple[torch.dtype, tuple[int, ...]]] = {
        "rows_RD": (DTYPE, (rows, width)),
        "position_TK": (torch.int64, (tokens, choices)),
        "choice_R": (torch.int64, (rows,)),
        "weights_R": (torch.float32, (rows,)),
        "counts_e": (torch.int64, (experts,)),
        "plan": (torch.int32, (COUNTERS + experts,)),
        "hits": (torch.int32, (hit_words(experts),)),
    }
    places, nbytes = places_of([*few.values(), (DTYPE, (rows, inner)), (DTYPE, (rows, width))], 0)
    *places, act, out = places
    return Layout(dict(zip(few, places, strict=True)), act, out, nbytes)


def _record(
    layout: Layout,
    piece: Tensor,
    tokens: tuple[Tensor, Tensor, Tensor],
    weights: tuple[Tensor, Tensor],
    one_launch: bool | None,
    added_TD: Tensor | None,
    y_TD: Tensor,
) -> Record:
    """Launch the kernels of a call in the usual way, and keep them on record."""
    few = FewRows(**{name: place.of([piece]) for name, place in layout.few.items()})
    act_RF, out_RD = layout.act.of([piece]), layout.out.of([piece])
    groups = Groups(few.plan, expected=tokens[1].numel(), hits=few.hits, one_launch=one_launch)
    with recording() as tape:
        order_few(*tokens, len(weights[1]), COUNTERS, few)
        run_in_order(few.rows_RD, weights, groups, act_RF, out_RD, few.weights_R)
        early = ended_before_last(y_TD.get_device())
        sum_rows(out_RD, few.position_TK, None, addend_TD=added_TD, early=early, out=y_TD)
    first, *between, last = tape
    blanks = BLANKS_LAST if added_TD is None else BLANKS_ADDED
    return Record(first.again(BLANKS), repeatable(between), last.again(blanks))
