"""The contract of a buffer's backend, and what its two implementations share.

Received rows are ordered by source rank, then token, with this rank's own rows in their place. So the order
depends on the routing alone. Example with two ranks: tokens 0 and 2 of rank 0 and tokens 0 and 1 of rank 1
want rank 1. It receives four rows, (0, 0), (0, 2), (1, 0), (1, 1), the first two from the other rank. On the
way back rank 0 gets two sums.
"""

from __future__ import annotations

import functools
import operator
import zlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from imbrex import contracts
from imbrex.adapters.deep_ep.choices import Choices
from imbrex.adapters.deep_ep.hybrid_handle import BufferConfig, Expanded, Inputs, Record
from imbrex.adapters.deep_ep.permuted import Permutation
from imbrex.codec import from_bytes
from imbrex.transport import make as make_transport
from imbrex.transport import words

TEXT_BYTES = 240
MOST_TOKENS = "num_max_dispatch_tokens_per_rank"
"""A setting: tokens of a rank that there is to be room for, whatever comes."""
DTYPE = "the dtype of rows"
DTYPES = sorted({kind for kind in vars(torch).values() if isinstance(kind, torch.dtype)}, key=str)
NUMBERS = {kind: number for number, kind in enumerate(DTYPES)}
"""Dtypes and the numbers that ranks compare."""


def kind_of(rows_ND: Tensor, beside: Tensor | None, route: Any) -> dict[str, int]:
    """The settings of a combine that must be alike on every rank."""
    return {
        "the width of rows": rows_ND.shape[1],
        DTYPE: NUMBERS[rows_ND.dtype],
        "what goes home beside them": 0 if beside is None else 1 + sum(beside.shape[1:]),
        **dispatch_of(route),
    }


def kind_of_rows(columns: Sequence[Tensor]) -> dict[str, int]:
    """The settings of a dispatch that must be alike; none are told of rows that are wrong."""
    sizes = [column.shape[1] * column.dtype.itemsize for column in columns]
    return {"the bytes of a row": sum(sizes), DTYPE: NUMBERS[columns[0].dtype] if columns else -1}


def dispatch_of(route: Any) -> dict[str, int]:
    """The setting that tells which dispatch of a buffer a handle is of; 0 for one that was taken apart."""
    return {"which dispatch the handle is of": 0 if route is None else route.number}


def heard_by_all(call: Callable[..., Any]) -> Any:
    """Let the other ranks hear, as of any wrong input, of an error that a call of a buffer raises here before
    they have met in it, so that none waits for this one. It becomes a ValueError here, too, unless it says
    that something is not offered."""

    @functools.wraps(call)
    def heard(self: Any, *arguments: Any, **options: Any) -> Any:
        backend = self._backend
        backend.met = False
        try:
            return call(self, *arguments, **options)
        except NotImplementedError as error:
            if not backend.met:
                with suppress(ValueError):
                    backend.meet(call.__name__, str(error), {})
            raise
        except Exception as error:
            if not backend.met:
                kind = "" if isinstance(error, ValueError) else f"{type(error).__name__}: "
                backend.meet(call.__name__, f"{kind}{error}", {})
            raise

    return heard


class Labels(NamedTuple):
    """The choices of compact rows: the local expert of each, int64 [N, K], or -1; its weight, float32, or 0;
    how many every local expert has [e], or None where nobody has counted."""

    ids_NK: Tensor
    weights_NK: Tensor
    counts_e: Tensor | None


class Backend(Protocol):
    """Rows out to the ranks that want them, once each, and sums of rows back home: what both buffers are made
    of. Over bytes, or by NVLink's kernels; a route is the backend's own, and knows `num_tokens`, T,
    `num_rows`, the compact rows received, and `number`: which dispatch of the buffer it is of, from 1 on.
    """

    rank: int
    world_size: int
    transport: Any
    met: bool
    """Whether the ranks have met in the call that is under way."""

    def wrong_device(self, *tensors: Tensor | None) -> str: ...

    def close(self) -> None: ...

    def meet(self, call: str, problem: str, settings: dict[str, int]) -> None:
        """Tell every rank what is wrong with this rank's input of a call without a plan, or nothing, and what
        must be alike: ValueError on every rank where there is something."""
        ...

    def why_not_sum(self, rows_ND: Tensor, route: Any) -> str:
        """Why rows that fit the route cannot be summed, or nothing."""
        ...

    def plan_ranks(
        self,
        problem: str,
        wanted_TW: Tensor,
        columns: Sequence[Tensor],
        worst: int,
        settings: dict[str, int],
    ) -> tuple[Any, Tensor]:
        """The route of tokens to ranks, and the rows that every rank sends to every other, [W, W]."""
        ...

    def read_ranks(self, handle: tuple, columns: Sequence[Tensor]) -> Any:
        """The route again, from the tensors of a legacy handle."""
        ...

    def plan_choices(
        self, call: str, problem: str, inputs: Inputs, config: BufferConfig, settings: dict[str, int]
    ) -> tuple[Any, Choices]:
        """The route of tokens to the ranks of their experts, and the choices of the own tokens."""
        ...

    def reweigh(self, route: Any, weights_TK: Tensor) -> Any:
        """A copy of a route with other weights."""
        ...

    def resize(self, route: Any, size: int) -> Any:
        """The route with `size` compact rows, or as many as are received where that may be more."""
        ...

    def carry(self, columns: Sequence[Tensor], route: Any) -> list[Tensor]:
        """Columns of a token [T, ...] to columns of compact rows [N, ...], of any dtype, as bytes."""
        ...

    def carry_with_sources(self, columns: Sequence[Tensor], route: Any) -> tuple[list[Tensor], Tensor]:
        """Does as `carry`, and gives the token of every row on its source rank, int32 [N]."""
        ...

    def carry_labelled(
        self,
        columns: Sequence[Tensor],
        ids_TK: Tensor,
        weights_TK: Tensor,
        route: Any,
        num_experts: int,
        *,
        counted: bool = True,
    ) -> tuple[list[Tensor], Tensor, Labels]:
        """Does as `carry_with_sources`, and tells the choices of every row: ids_TK int64, weights_TK
        float32. counted: somebody wants to know how many each expert has."""
        ...

    def sums_of(self, route: Any, rows_WW: Tensor, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
        """Rows that ranks 0 to i send to rank j, [W, W]; that this one sends to every rank, [W, 1]; zeros,
        [W, 1]. int32, on `device`."""
        ...

    def bring_home(
        self, columns: Sequence[Tensor], dtypes: Sequence[torch.dtype], route: Any, *, rounded: bool
    ) -> list[Tensor]:
        """Columns of compact rows [N, ...] summed over a token's ranks, in rank order: float32 [T, ...].

        dtypes: how a column crosses, where it does as bytes. rounded: the sums of the first column are wanted
        in its dtype.
        """
        ...

    def heads(self, route: Any, wanted_TW: Tensor) -> Tensor:
        """The place of every token among the rows for a rank, int32 [T, W], or -1."""
        ...

    def received(self, route: Any, device: torch.device) -> Tensor:
        """Compact rows that there are: int32 [1]."""
        ...

    def expand(
        self,
        inputs: Inputs,
        record: Record,
        permutation: Permutation | None,
        budget: int | None,
        *,
        on_host: bool,
    ) -> Expanded:
        """Expert-major rows, where `permutation` has them, or where the routing puts them."""
        ...

    def reduce(
        self, hidden: Tensor, probs: Tensor | None, record: Record, permutation: Permutation
    ) -> tuple[Tensor, Tensor | None]:
        """Sums of a token's expert-major rows, and the value of each of its choices."""
        ...

    def blocks(self, inputs: Inputs, record: Record, room: int) -> Expanded:
        """Expert-major rows, those of an expert in a block of `room`; rows of no token are not written."""
        ...

    def origins(self, route: Any) -> tuple[Tensor, Tensor]:
        """The source rank, and the token there, of everything that a permutation places: int64 [N]."""
        ...

    def weigh_home(
        self,
        call: str,
        problem: str,
        inputs: Inputs,
        rows_RD: Tensor,
        record: Record,
        settings: dict[str, int],
    ) -> Tensor:
        """Sums of a token's rows, where the permutation has them, times the weights of its choices: [T, D].
        The ranks meet first, as in `meet`."""
        ...


class BackendBase:
    """A group, and how its ranks tell each other what is wrong. `who` stands in errors."""

    met = False
    dispatches = 0
    """The number of dispatches that have been planned, on all ranks."""

    def __init__(self, who: str, group: dist.ProcessGroup | None, transport: str | contracts.Backend) -> None:
        self.who = who
        self.rank = 0 if group is None else dist.get_rank(group)
        self.world_size = 1 if group is None else dist.get_world_size(group)
        self.transport = make_transport(transport, group, num_ranks=self.world_size, top_k=1)[0]

    def close(self) -> None:
        """Nothing is held here."""

    def sums_of(self, route: Any, rows_WW: Tensor, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
        own = rows_WW[self.rank][:, None].int().to(device)
        return rows_WW.cumsum(0, dtype=torch.int32).to(device), own, torch.zeros_like(own)

    def wrong_device(self, *tensors: Tensor | None) -> str:
        """Says what is wrong with the devices of a call's tensors, or nothing."""
        some = [tensor for tensor in tensors if tensor is not None]
        if any(tensor.layout != torch.strided or tensor.is_quantized for tensor in some):
            return "a tensor is sparse or quantised; give plain ones"
        devices = {tensor.device for tensor in some}
        right = self.world_size == 1 or all(d.type == self.transport.device.type for d in devices)
        if len(devices) == 1 and right:
            return ""
        where = ", ".join(sorted(map(str, devices)))
        return f"tensors are on {where}; the group takes them on {self.transport.device.type}"

    def why_not_sum(self, rows_ND: Tensor, route: Any) -> str:
        """A sentence on why rows cannot be summed, whatever their number, or nothing."""
        if rows_ND.dim() != 2:
            return f"rows are {list(rows_ND.shape)}; give [N, D]"
        if not rows_ND.is_floating_point() or rows_ND.dtype.itemsize == 1:
            return f"rows are {rows_ND.dtype}; give bfloat16, float16 or float32"
        return self.wrong_device(rows_ND)

    def check_alike(self, call: str, settings: Mapping[str, int], every_rank: list[list[int]]) -> None:
        """Raise on every rank where settings differ. every_rank: the values of all of them."""
        for place, name in enumerate(settings):
            for rank, values in enumerate(every_rank):
                if values[place] != every_rank[0][place]:
                    pair: list[Any] = [every_rank[0][place], values[place]]
                    if name == DTYPE:
                        pair = [DTYPES[number] for number in pair]
                    raise ValueError(
                        f"{self.who}.{call}: ranks disagree about {name}: {pair[0]} on rank 0, {pair[1]} on "
                        f"rank {rank}; give every rank the same kind of input"
                    )

    def raise_problems(self, call: str, problem: str) -> None:
        texts = enumerate(self._tell_text(f"{call}: {problem}" if problem else ""))
        rank, text = next((rank, text) for rank, text in texts if text)
        theirs, _, sentence = text.partition(": ")
        raise ValueError(f"{self.who}.{theirs}: on rank {rank}, {sentence}")

    def note_of(self, call: str, settings: Mapping[str, int]) -> int:
        """A number that is another one for another call, or other settings."""
        numbers = [operator.index(number).to_bytes(8, "little", signed=True) for number in settings.values()]
        return zlib.crc32(b"".join(numbers), zlib.crc32(f"{call}: {', '.join(settings)}".encode()))

    def raise_difference(self, call: str, settings: Mapping[str, int]) -> None:
        """Raise ValueError on every rank, whose notes differ: with both calls, or the setting. Messages of
        one size come first, since calls may have different settings."""
        texts = self._tell_text(f"{call}: {', '.join(settings)}")
        rank = next((rank for rank, text in enumerate(texts) if text != texts[0]), None)
        if rank is not None:
            calls = [text.partition(":")[0] for text in texts]
            raise ValueError(
                f"{self.who}: ranks make different calls: {calls[0]} on rank 0, {calls[rank]} on rank "
                f"{rank}; make the same on every rank"
            )
        settings_W = self.transport.exchange_counts(words(*settings.values()))
        self.check_alike(call, settings, settings_W.tolist())

    def _tell_text(self, text: str) -> list[str]:
        letters = text.encode("ascii", "replace")[:TEXT_BYTES].ljust(TEXT_BYTES)
        letters_WL = self.transport.exchange_counts(words(*letters)).tolist()
        return [bytes(letters).decode().rstrip() for letters in letters_WL]

    def check_worst(self, rows_WW: Tensor, most_W: list[int]) -> None:
        """ValueError on every rank where one receives more rows than it has room for. rows_WW: on the host.
        most_W: `num_worst_tokens` of every rank."""
        for rank, (received, room) in enumerate(zip(rows_WW.sum(0).tolist(), most_W, strict=True)):
            if 0 < room < received:
                raise ValueError(
                    f"{self.who}.dispatch: rank {rank} receives {received} tokens, more than "
                    f"num_worst_tokens, {room}; give the tokens of all ranks together"
                )


def why_not_whole(name: str, number: Any, least: int) -> str:
    """Say that a number is not a whole one, or too small, or nothing."""
    if hasattr(number, "__index__") and least <= operator.index(number) < 2**31:
        return ""
    return f"{name} is {number}; give a whole number from {least}"


def why_not_stats(stats_e: Any, slots: int) -> str:
    """Say that counts cannot be added to a tensor of a program's, or nothing."""
    if stats_e is None or (isinstance(stats_e, Tensor) and stats_e.shape == (slots,)):
        return ""
    kind = list(stats_e.shape) if isinstance(stats_e, Tensor) else type(stats_e).__name__
    return f"cumulative_local_expert_recv_stats is {kind}; give int32 [{slots}]"


def cut(encoded_NB: Tensor, columns: Sequence[Tensor]) -> list[Tensor]:
    """The columns that are written side by side in rows of bytes; `columns` tell their widths and dtypes."""
    sizes = [column.shape[1] * column.dtype.itemsize for column in columns]
    parts = encoded_NB.split(sizes, 1)
    return [from_bytes(part, c.shape[1], c.dtype) for part, c in zip(parts, columns, strict=True)]


def pad_rows(rows_ND: Tensor, size: int, fill: float = 0) -> Tensor:
    """Rows followed by rows of `fill` up to `size`."""
    if size <= rows_ND.shape[0]:
        return rows_ND
    # torch has few operations for fp8; its zeros are zero bytes.
    values = rows_ND.view(torch.uint8) if rows_ND.dtype.itemsize == 1 else rows_ND
    further = values.new_full((size - len(values), *values.shape[1:]), fill)
    return torch.cat([values, further]).view(rows_ND.dtype)
