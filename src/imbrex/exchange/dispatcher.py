"""The base of all dispatchers: a key, a geometry, an observer, and defaults for what only some can do."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from imbrex.codec.fp8 import BLOCK, Fp8
from imbrex.contracts import Experts, Geometry, Listener, Roles, Routing, RowForm, Wire
from imbrex.exchange import autograd
from imbrex.exchange.agreement import DTYPES, PROBLEMS, is_plain
from imbrex.kernels.ffn.glue import Groups
from imbrex.runtime.tracing import FORWARD, differentiated, traced


class DispatcherBase:
    """A dispatcher that serves every call itself, gives plain rows only, and counts on the host."""

    geometry: Geometry
    dtypes: Sequence[torch.dtype] = DTYPES
    roles = Roles()
    promise = promised = uncompiled = room_for_all = False
    place: torch.device | None = None
    """The device on which tokens must be; a rank alone takes them anywhere."""

    def __init__(self, geometry: Geometry, observer: Listener, layer: int, *signature: Any) -> None:
        """Register the dispatcher. signature: what the shapes of its state depend on, besides its class, rank
        and placement."""
        where = geometry.rank, geometry.placement.rank_offsets, geometry.tensor_parallel
        self.observer, self.layer = observer, layer
        self.key = autograd.register(self, *where, *signature)
        self.number = 0
        self.relocate(geometry)

    @property
    def counts_on_device(self) -> bool:
        return False

    @property
    def about_rows(self) -> str:
        return ""

    def relocate(self, geometry: Geometry) -> None:
        """Take a geometry. Ranks compare `where` at every call: one with another placement would send rows
        astray."""
        self.geometry = geometry
        self.where = zlib.crc32(repr(geometry.placement).encode())

    def take_agreement(self, number: int, node_of_W: Sequence[int]) -> None:
        """Take what ranks agreed on at construction: the number of this exchange, the same on all ranks, and
        the node of every rank."""
        self.number = number

    @property
    def family(self) -> Sequence[Any]:
        return (self,)

    def for_call(self, x_TD: Tensor, routing: Routing) -> Any:
        return self

    def run_whole(
        self, x_TD: Tensor, routing: Routing, experts: Experts, addend: Callable[[], Tensor] | None
    ) -> Tensor | None:
        return None

    def about_whole(self, experts: object, schedule: str) -> str:
        return ""

    def beside(self, chunks: int, *, in_turn: bool = False) -> Any:
        return self

    def fusing(self, roles: Roles | None = None, inner: int = 0) -> Any:
        raise ValueError(f"no kernel fuses this exchange: {self.why_not_form(RowForm.UNDER_WAY)}")

    def agree_on_rows(self, problem: str | None, dtype: torch.dtype) -> None:
        """Nothing: there is nobody else to tell."""

    def why_not_form(self, form: RowForm) -> str | None:
        return None if form is RowForm.ROWS else f"nothing here gives rows that are {form.value}"

    def form_of(self, forms: Sequence[RowForm], x_TD: Tensor, weights_TK: Tensor) -> RowForm:
        return RowForm.ROWS

    def why_not_tokens(self, x: Tensor) -> str | None:
        width = self.geometry.hidden_size
        if FORWARD["_current_level"] >= 0:
            return PROBLEMS[14]
        if not is_plain(x):
            return PROBLEMS[13]
        if x.dim() < 1 or x.shape[-1] != width:
            return f"x has the shape {tuple(x.shape)}; give tokens [..., {width}]"
        if x.dtype not in DTYPES:
            return f"x is {x.dtype}; use float32, bfloat16, float16 or float64"
        place, device = self.place, x.device
        if place is None or device == place or device.type == place.type:
            return None
        return f"x is on {device}; this exchange takes it on {place.type}"

    def count_into(self, tally_WS: Tensor | None) -> None:
        raise ValueError(
            "Exchange: counts are added up on the device by transport 'nvlink' alone, with split 'even' or "
            "'balanced' and without tensor ranks; ask `counts_on_device`, and else count in a split of yours"
        )

    def check(self, *, synchronize: bool = False) -> None:
        """Nothing: every failure here raises at once."""

    def close(self) -> None:
        autograd.release(self.key)


class WiredDispatcher(DispatcherBase):
    """A dispatcher whose rows cross as codecs write them. Rows that cross in fp8 may stay in fp8."""

    wire: Wire

    def why_not_form(self, form: RowForm) -> str | None:
        if form is not RowForm.FP8:
            return super().why_not_form(form)
        codec, width = self.wire.dispatch, self.geometry.hidden_size
        if not (isinstance(codec, Fp8) and codec.wire_dtype == torch.float8_e4m3fn):
            return f"they cross as {codec.name}, not as fp8"
        return f"they have {width} values, no multiple of {BLOCK}" if width % BLOCK else None

    def form_of(self, forms: Sequence[RowForm], x_TD: Tensor, weights_TK: Tensor) -> RowForm:
        """Rows come in fp8 only if tokens are bfloat16 and this call has no gradients and is not traced."""
        if RowForm.FP8 not in forms or self.why_not_form(RowForm.FP8) is not None:
            return RowForm.ROWS
        plain = x_TD.dtype != torch.bfloat16 or differentiated(x_TD, weights_TK)
        return RowForm.ROWS if plain or traced(x_TD, weights_TK) else RowForm.FP8


def form_of_arrival(form: RowForm, beside: Any) -> RowForm:
    """The form in which rows came of a dispatch that was asked for `form`: plain rows where nothing, or their
    groups alone, came beside them."""
    return RowForm.ROWS if beside is None or isinstance(beside, Groups) else form


def nothing_to_move() -> None:
    """The move of a crossing that does all its work in `read`."""
