"""The heap of an exchange, and the structs of its kernels as `protocol.cuh` and the `.cu` files declare them.

Every rank has the same heap, one symmetric allocation, sized once for the worst case:

    control         status, epochs, flags of peers          flags: peers write them; the rest: this rank
    staged flags    u32 [W, groups]                         peer w has staged group g of its tokens
    reduced flags   u32 [W, groups]                         peer w has reduced group g of this rank's tokens
    choices         int32 and float32 [2, W, T, K]          ids and gate weights of every rank, two calls deep
    scratch         int32                                   this rank's routing blocks
    received        [buffers, token capacity, row]          compact rows, pushed by peers
    staged          [buffers, T, row]                       this rank's tokens, pulled by peers
    reduced         [buffers, token capacity, row]          sums given by the caller, pulled by peers
    partials        [2, W - 1, T, row]                      sums of this rank's tokens, pushed by peers
    values          float32 [2, W - 1, T, K]                numbers of the choices' rows, with the sums
    inbox           [buffers, W, early groups, row]         first tokens of every rank, pushed by peers
    early           u64 [2, W, blocks, W], [2, T / 32, W]   tokens of every owner; the upper half is the epoch

Every flag has one writer and only grows. Nothing is reset: a call number (epoch) distinguishes old from new.
A buffer is written again once every peer has begun a later call of the same kind ("credit"). With two buffers
that has nearly always happened already, so data meets no barrier.
"""

from __future__ import annotations

import ctypes
import functools
from dataclasses import dataclass

from imbrex.kernels.routing.split_layout import flow_bytes
from imbrex.kernels.structs import struct

MAX_RANKS, MOST_RANKS = 64, 16
"""The most ranks that can route (64), and the most that can also exchange rows (16)."""
MAX_BLOCKS = 132
KINDS = ("route", "push", "pull", "combine", "small", "gather", "small rows", "token choice")
PHASES = (
    "",
    "start of the call",
    "expert ids",
    "rows",
    "staged rows",
    "reduced rows",
    "own blocks",
    "keys",
)
PEER_GAVE_UP = "a peer gave up"
CODES = (
    "",
    "timed out",
    PEER_GAVE_UP,
    "expert ids out of range or repeated in a token",
    "overflow",
    "ranks disagree about what is called",
    "it was given an input that cannot be dispatched",
)
CHUNK, SEGMENT = 128, 32
SHARED_BYTES = 227 * 1024


Control = struct("peers/protocol.cuh", "Control")
Group = struct("peers/protocol.cuh", "Group")
Route = struct("routing/scratch.cuh", "Route")
Push = struct("exchange/push.cuh", "Push")
Pull = struct("exchange/pull.cuh", "Pull")
Reduce = struct("exchange/reduce.cuh", "Reduce")
Gather = struct("exchange/gather.cu", "Gather")
Small = struct("exchange/small.cuh", "Small")
Dispatch = struct("exchange/dispatch.cu", "Dispatch")
Expert = struct("exchange/expert.cu", "Expert")
Stage = struct("exchange/stage.cu", "Stage")
StageAgain = struct("exchange/stage_again.cu", "StageAgain")
CONTROL_BYTES, OVERFLOWS_AT = -(-ctypes.sizeof(Control) // 512) * 512, Control.overflows.offset
"""Bytes of the `Control` at the start of every heap, and the offset in it of the count of overflows."""
SMALL_SMS = 64
SMALL_PUSHERS = 16
SMALL_TOKENS = 512
"""The most tokens of a rank in a small dispatch. A heap for larger calls has memory for small ones too."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Shape:
    """The sizes that an exchange is made for.

    max_tokens: the most tokens of a rank. row_bytes: the most bytes of a row, a multiple of 16.
    most_slots: local slots of the fullest rank. token_capacity: compact rows that a rank can receive.
    row_capacity: expert-major rows that a rank can hold, padding included.
    alignment: the rows of a slot are padded to a multiple of it.
    tensor: ranks that share every expert: rank p holds a part of the experts of owner p // tensor.
    """

    ranks: int
    max_tokens: int
    choices: int
    experts: int
    most_slots: int
    row_bytes: int
    alignment: int
    row_capacity: int
    token_capacity: int
    buffers: int = 2
    tensor: int = 1

    def mean_rows(self, tokens: int) -> int:
        """The mean of expert-major rows of a rank if every rank has `tokens` tokens."""
        return tokens * self.choices * self.tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class Layout:
    """Offsets of the parts of a heap, in bytes. value_bytes, partial_bytes: sizes of one of the two buffers
    of `values` and of `partials`."""

    staged_flags: int
    reduced_flags: int
    flags: int
    ids: int
    tokens: int
    counts: int
    received: int
    staged: int
    reduced: int
    partials: int
    small_ids: int
    small_tokens: int
    small_staged: int
    inbox: int
    early: int
    values: int
    value_bytes: int
    partial_bytes: int
    nbytes: int


def layout(shape: Shape, *, compact: bool = True, expert: bool = True) -> Layout:
    """The layout of a heap. compact, expert: the layouts of rows that it has room for."""
    at = CONTROL_BYTES

    def take(nbytes: int) -> int:
        nonlocal at
        start, at = at, at + (nbytes + 1023) // 1024 * 1024
        return start

    ranks, tokens, few = shape.ranks, shape.max_tokens, min(shape.max_tokens, SMALL_TOKENS)
    flags = max(tokens, SMALL_PARTS * few)
    chunks = ranks * -(-tokens // CHUNK)
    rows = shape.buffers * shape.token_capacity * shape.row_bytes
    # From the other ranks: numbers of rows that come with a combine's sums, and sums, in either wire format.
    value_bytes = 4 * (ranks - 1) * tokens * shape.choices
    partial_bytes = (ranks - 1) * tokens * max(shape.row_bytes, wire_bytes(1, "fp8"))
    return Layout(
        flags=flags,
        staged_flags=take(4 * ranks * flags),
        reduced_flags=take(4 * ranks * flags),
        ids=take(4 * 4 * ranks * tokens * shape.choices),
        tokens=take(4 * 2 * ranks),
        counts=take(4 * chunks * (2 * shape.experts + ranks)),
        received=take(rows if compact else 0),
        staged=take(shape.buffers * tokens * shape.row_bytes if expert else 0),
        reduced=take(rows if compact else 0),
        partial_bytes=partial_bytes,
        value_bytes=value_bytes,
        partials=take(2 * partial_bytes if expert else 0),
        small_ids=take(8 * 4 * ranks * few * shape.choices if expert else 0),
        small_tokens=take(8 * 2 * ranks),
        small_staged=take(2 * ranks * few * shape.row_bytes if expert else 0),
        inbox=take(
            shape.buffers * ranks * early_groups(shape) * (32 // ranks) * shape.row_bytes if expert else 0
        ),
        early=take(16 * ranks * (MAX_BLOCKS * ranks + -(-tokens // SEGMENT)) if compact else 0),
        values=take(2 * value_bytes if expert else 0),
        nbytes=at,
    )


EARLY_BYTES = 12 << 20
"""The most bytes that a rank pushes to its peers while ranks route: some 38 us of the wire."""


def early_groups(shape: Shape) -> int:
    """Groups of 32 / W tokens that a rank pushes to all peers before it knows who wants them."""
    if shape.ranks == 1:
        return 0
    group, tokens = 32 // shape.ranks, EARLY_BYTES // ((shape.ranks - 1) * shape.row_bytes)
    return min(tokens // group, -(-shape.max_tokens // group))


def route_shared(shape: Shape, chunks: int, room: int = 0, window: int = 0) -> int:
    """Bytes of shared memory of a block that routes `chunks` chunks, `window` of them at once (0: all). room:
    slots beyond one an expert.
    """
    owner_words = CHUNK // 2 if shape.ranks <= MOST_RANKS else 2 * CHUNK
    words = (window or chunks) * (4 + 5 * shape.experts + CHUNK * shape.choices // 2 + owner_words)
    words += 5 * chunks * shape.ranks
    words += shape.ranks * (shape.experts + 2 * shape.ranks + shape.most_slots)
    words += shape.ranks**2 * -(-shape.max_tokens // CHUNK)
    flow = flow_bytes(shape.ranks, shape.ranks, room) if room else 0
    return 4 * (words + shape.most_slots + shape.experts) + flow


def route_blocks(shape: Shape, min_blocks: int, room: int = 0, fewest: int | None = None) -> tuple[int, int]:
    """Blocks of the routing kernel, and their shared memory in bytes: `min_blocks` blocks, or more if the
    masks do not fit in so few. fewest: by default a block for every four chunks, since four chunks take less
    time than waiting for more blocks.
    """
    chunks = shape.ranks * -(-shape.max_tokens // CHUNK)
    for blocks in range(min(min_blocks, fewest or -(-chunks // 4)), MAX_BLOCKS + 1):
        nbytes = route_shared(shape, -(-chunks // blocks), room)
        if nbytes <= SHARED_BYTES:
            return blocks, nbytes
    raise ValueError(
        f"exchange: {shape.ranks} ranks x {shape.max_tokens} tokens and {shape.experts} experts do not fit "
        f"the routing "
        f"kernel's shared memory; use fewer tokens a call"
    )


def small_pushers(ranks: int, sms: int) -> int:
    """Blocks of a small dispatch that push, 8 a peer and at most `SMALL_PUSHERS`; the others route and place.

    128 tokens on two H200 with 64 SMs take 25.9 us with 8, and 27.6 with 16.
    """
    return max(1, min(SMALL_PUSHERS, 8 * (ranks - 1), sms // 2))


def small_shared(shape: Shape, tokens: int, room: int = 0) -> int:
    """Bytes of shared memory of a block that routes by itself, for at most `tokens` tokens a rank."""
    chunks = shape.ranks * -(-tokens // CHUNK)
    nbytes = route_shared(shape, chunks, room)
    nbytes += 4 * chunks * (CHUNK * shape.choices + shape.experts + shape.ranks) + 4 * shape.ranks
    nbytes += 4 * -(-shape.most_slots // 32)
    if nbytes > SHARED_BYTES:
        raise ValueError(
            f"exchange: {shape.ranks} ranks x {tokens} tokens and {shape.experts} experts are too many for "
            f"one kernel's shared memory; use route and pull"
        )
    return nbytes


QUANTISERS = 14


@functools.cache
def mover_shared(row_bytes: int, targets: int, quantisers: int = 0, besides: int = 0) -> tuple[int, int]:
    """Stages, and bytes of shared memory, of a kernel that moves rows to at most `targets` addresses each.

    quantisers: warps that quantise, each of which keeps the scales of a row. Stages are a multiple of them.
    besides: bytes of shared memory kept for other uses.
    """
    fixed = 1024 + 4 * (16 + 32 * (16 + 8 * targets)) + 128 + quantisers * 4 * (row_bytes // 256)
    slot = -(-row_bytes // 128) * 128
    stages = min((SHARED_BYTES - besides - fixed) // slot, 40)
    if stages < 6:
        raise ValueError(
            f"exchange: rows of {row_bytes} bytes are too long; at most {SHARED_BYTES // 6 - 3000}"
        )
    stages -= stages % max(quantisers, 1)
    return stages, fixed + stages * slot


def quantisers_of(row_bytes: int, targets: int, besides: int = 0) -> int:
    """The number of warps that quantise rows of `row_bytes`: one for every stage, at most 14."""
    return min(QUANTISERS, mover_shared(row_bytes, targets, 0, besides)[0] - 1)


FP8_MULTIPLE = 128
"""Alignment of fp8 rows; rows that begin at other addresses cross 6 % slower."""


def fp8_pitch(width: int) -> int:
    """Bytes from one row of the fp8 codec to the next."""
    return -(-(width + width // 32) // FP8_MULTIPLE) * FP8_MULTIPLE


def fp8_bytes(width: int) -> int:
    """Bytes of a row of the fp8 codec, or ValueError where the kernel cannot write it."""
    if width % 512:
        raise ValueError(f"exchange: fp8 rows of {width} values; the kernel writes multiples of 512")
    return width + width // 32


SMALL_PARTS = 4
REDUCE_WARPS, REDUCE_SLOTS, REDUCE_STEP = 16, 6, 2048
TERMS_BYTES = 52 * 16 + 16
FP8_SMS = 32
"""SMs of a combine whose sums cross as fp8. With 32 it is faster than bf16, with 24 it is not."""


@functools.cache
def reduce_shared(row_bytes: int, wire: str) -> int:
    """Bytes of shared memory of the combine kernel. Each warp has slots for steps of REDUCE_STEP bytes, two
    lists of terms and, if sums cross as fp8, the scales of a row.
    """
    scales = 16 * _wire_steps(row_bytes) if wire == "fp8" else 0
    return REDUCE_WARPS * (REDUCE_SLOTS * REDUCE_STEP + 2 * TERMS_BYTES + scales)


def _wire_steps(row_bytes: int) -> int:
    """Steps of a row. A warp encodes a step of 512 values at once."""
    return -(-row_bytes // 1024)


@functools.cache
def wire_bytes(row_bytes: int, wire: str) -> int:
    """Bytes from one sum to the next when they cross as `wire`. `exchange/wire.cuh` describes the format."""
    return -(-(_wire_steps(row_bytes) * (512 + 16)) // 128) * 128 if wire == "fp8" else row_bytes


@functools.cache
def combine_pieces(max_tokens: int, wire: str = "bf16", row_bytes: int = 0) -> tuple[int, int, int]:
    """Tokens that a warp takes at once, parts of a row, and warps that begin by reducing; chosen by timing.

    row_bytes: with it, the parts of few tokens' rows are at least what a warp adds in a step.
    """
    reducers = 14 if wire == "fp8" else 10
    parts = min(SMALL_PARTS, max(1, row_bytes // REDUCE_STEP)) if row_bytes else SMALL_PARTS
    return (1, parts, REDUCE_WARPS) if max_tokens <= SMALL_TOKENS else (3, 1, reducers)


def most_pieces(args: ctypes.Structure, ranks: int) -> int:
    """Pieces of a rank's combine, of its own tokens and the others', if every rank has `max_tokens`."""
    return -(-args.max_tokens // args.piece_tokens) * args.parts * ranks


GATHER_WARPS = 16
GATHER_COLUMNS = 2048
"""Bytes of a piece that one warp adds."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GatherShape:
    """A block of the kernel that adds pulled sums: crews of one warp that loads and `adders` that add.

    piece_bytes: bytes of a row that a crew adds at once. slots: pieces that a crew has room for.
    """

    piece_bytes: int
    crews: int
    adders: int
    slots: int

    @property
    def threads(self) -> int:
        return 32 * self.crews * (1 + self.adders)

    @property
    def shared(self) -> int:
        """Bytes of shared memory: barriers, slots, and what the last warp reads past the last slot."""
        pitch = -(-self.piece_bytes // 128) * 128
        behind = self.adders * GATHER_COLUMNS - pitch
        return 1024 + self.crews * self.slots * pitch + behind


def gather_shape(row_bytes: int) -> GatherShape:
    """The shape for rows of `row_bytes`: two crews or more, so that one adds while the other waits. Pieces
    are whole rows, or multiples of 128 bytes: others cross at half the rate.
    """
    pieces = -(-row_bytes // ((GATHER_WARPS // 2 - 1) * GATHER_COLUMNS))
    piece = row_bytes if pieces == 1 else -(-row_bytes // (128 * pieces)) * 128
    pitch, adders = -(-piece // 128) * 128, -(-piece // GATHER_COLUMNS)
    crews = GATHER_WARPS // (1 + adders)
    slots = min((SHARED_BYTES - 1024 - adders * GATHER_COLUMNS + pitch) // pitch, 64) // crews
    return GatherShape(piece_bytes=piece, crews=crews, adders=adders, slots=slots)
