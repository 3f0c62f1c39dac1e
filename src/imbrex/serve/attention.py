"""Attention over a static cache, in which every request has a slot of fixed length.

Torch computes it. On a GPU, compiled `flex_attention`, which splits the keys, serves rows of few tokens, and
flash attention rows of many; both read only the used part of a slot. Elsewhere it is
`scaled_dot_product_attention` with a mask.

Latent attention (DeepSeek-V2, section 2.1) has one latent row per token in its cache. Rows of few tokens meet
it in its absorbed form: heads come into the latents' space, and torch's batched products do the rest over all
of a slot, since no kernel of torch's is fast for heads of 576 values. For rows of many tokens, chunks of
prompts, one product makes keys and values of all heads from the used part of the slots, for flash attention.

Shape letters besides those of the contracts: B rows of a step, S tokens of a row (T = B * S), H heads, G
heads of keys and values, C width of a head, L tokens that a slot has room for, Z slots, P = B * L.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from imbrex.serve.between import (
    AS_WRITTEN,
    Between,
    early_launches,
    grouped_heads,
    latent_row,
    latent_weights,
)

Cache = tuple[Tensor, ...]
FEW, BLOCK = 4, 128
"""The most tokens of a row that `flex_attention` serves, and the keys in a block of its mask."""
MANY = 64
"""The fewest tokens of a row for which latents are expanded. In DeepSeek-V3's widths that takes 47.2 MFLOP a
cached token that is used, and 0.1 more for each token of the row; absorbed, a token of the row takes 0.28
MFLOP and 1.5 KB of scores for every token that a slot has room for. That is as much for rows of 262 tokens if
slots are full, of 103 if half full, of 47 if a quarter full."""
FLEX: dict[str, Any] = {"BLOCK_N": 32, "num_stages": 4, "num_warps": 2}
"""The tiles of `flex_attention`: of those that `benchmarks/attention.py` times, within 4 % of the best from 8
to 128 rows. torch's own choice of one stage takes up to 1.6 times as long."""
SHAPES = 64
"""The number of step sizes for which a process may compile attention."""
FLASH_DTYPES = (torch.bfloat16, torch.float16)
FLASH_WIDTH, FLASH_STEP = 256, 8
"""The widest head of flash attention, and what the width of a head is a multiple of."""
GROUPED_MAJORS = (9, 10)
"""Compute capabilities on which torch's grouped product of bfloat16 does not ask the device for its sizes."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Grouped:
    """The sizes of grouped-query attention. head_size: C. theta: the base of the rotary positions. qk_norm:
    whether queries and keys are normed by head, as in Qwen3."""

    num_heads: int
    num_kv_heads: int
    head_size: int
    theta: float = 1e6
    qk_norm: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Latent:
    """The sizes of multi-head latent attention. query_rank, kv_rank: widths of the latents. nope, rope:
    values of a head without and with rotary positions. value: the values of a head's output."""

    num_heads: int
    query_rank: int
    kv_rank: int
    nope: int
    rope: int
    value: int
    theta: float = 1e4


class Span:
    """The positions of a step's tokens: row b has the tokens `start_B[b]` to `start_B[b] + S` of the slot
    `slots_B[b]`, whose cache holds all tokens before.

    Without `slots_B` row b is slot b. live_T: tokens whose results are needed; choices of the others are
    dropped. capacity: L. It is made inside a captured step, so every index is computed on the device.

    Example: start_B [3, 0], two tokens a row, L = 8: positions [3, 4, 0, 1], cache rows [3, 4, 8, 9].
    """

    def __init__(
        self,
        start_B: Tensor,
        length: int,
        capacity: int,
        *,
        live_T: Tensor | None = None,
        slots_B: Tensor | None = None,
    ) -> None:
        device, rows = start_B.device, len(start_B)
        self.rows, self.length, self.capacity = rows, length, capacity
        self.live_T, self.given_B = live_T, slots_B
        self.slots_B = torch.arange(rows, device=device) if slots_B is None else slots_B
        steps_S = torch.arange(length, device=device)
        self.position_BS = start_B[:, None] + steps_S
        self.position_T = self.position_BS.flatten()
        self.row_T = (self.slots_B[:, None] * capacity + self.position_BS).flatten()
        self.used_B = (start_B + length).to(torch.int32)
        self._mask_B1SL: Tensor | None = None
        self._hidden_BSL: Tensor | None = None
        self._bounds: tuple[Tensor, Tensor] | None = None
        self._packing: tuple[Tensor, Tensor, Tensor] | None = None
        self._blocks: Any = None

    def mask_B1SL(self) -> Tensor:
        """The tokens of its slot that a token sees: those before it, and itself."""
        if self._mask_B1SL is None:
            of_slot_L = torch.arange(self.capacity, device=self.position_T.device)
            self._mask_B1SL = (of_slot_L <= self.position_BS[..., None])[:, None]
        return self._mask_B1SL

    def hidden_BSL(self) -> Tensor:
        """The tokens of its slot that a token does not see."""
        if self._hidden_BSL is None:
            self._hidden_BSL = ~self.mask_B1SL()[:, 0]
        return self._hidden_BSL

    def blocks(self) -> Any:
        """The mask for `flex_attention`, which reads blocks of the used part only."""
        if self._blocks is None:
            from torch.nn.attention.flex_attention import BlockMask

            position_BS, blocks = self.position_BS, -(-self.capacity // BLOCK)
            index = torch.arange(blocks, dtype=torch.int32, device=position_BS.device)

            def sees(row: Tensor, head: Tensor, token: Tensor, key: Tensor) -> Tensor:
                return key <= position_BS[row, token]

            self._blocks = BlockMask.from_kv_blocks(
                ((self.used_B + BLOCK - 1) // BLOCK)[:, None, None],
                index.expand(self.rows, 1, 1, blocks).contiguous(),
                BLOCK_SIZE=(BLOCK, BLOCK),
                mask_mod=sees,
                seq_lengths=(self.length, self.capacity),
                compute_q_blocks=False,
            )
        return self._blocks

    def bounds(self) -> tuple[Tensor, Tensor]:
        """The first token of every row, and of its slot in the cache, int32 [B + 1], for flash attention."""
        if self._bounds is None:
            ends_B = torch.arange(self.rows + 1, device=self.position_T.device) * self.length
            starts_B = F.pad(self.slots_B * self.capacity, (0, 1))
            self._bounds = ends_B.to(torch.int32), starts_B.to(torch.int32)
        return self._bounds

    def packing(self) -> tuple[Tensor, Tensor, Tensor]:
        """The used parts of the rows' slots, one behind another: their rows in the flat cache, int64 [P],
        where each row's begin, int32 [B + 1], and their number, int32 [B]. A row without a live token has
        one; behind the last end stand rows of any slot.

        Example: start_B [3, 0], two tokens a row, L = 8: cache rows 0 to 4, 8, 9, and nine more; [0, 5, 7];
        [5, 2].
        """
        if self._packing is None:
            used_B = self.used_B
            if self.live_T is not None:
                used_B = torch.where(self.live_T.view(self.rows, -1).any(1), used_B, 1)
            begin_B1 = F.pad(used_B.cumsum(0), (1, 0))
            place_P = torch.arange(self.rows * self.capacity, device=used_B.device)
            row_P = torch.searchsorted(begin_B1[1:], place_P, right=True).clamp_(max=self.rows - 1)
            of_slot_P = (place_P - begin_B1[row_P]).clamp_(max=self.capacity - 1)
            index_P = self.slots_B[row_P] * self.capacity + of_slot_P
            self._packing = index_P, begin_B1.to(torch.int32), used_B
        return self._packing

    def of_rows(self, cache: Tensor) -> Tensor:
        """The slots of the rows, [B, L, ...]: a view where row b is slot b."""
        return cache[: self.rows] if self.given_B is None else cache[self.given_B]


def attend(q_BSHC: Tensor, cache: Cache, span: Span, *, compiles: bool) -> Tensor:
    """Attend to all tokens of the cache up to each row's own; [B, S, H, C]. compiles: whether by a compiled
    `flex_attention` where it is the fastest."""
    if q_BSHC.is_cuda and q_BSHC.dtype in FLASH_DTYPES:
        if compiles and span.given_B is None and _takes_few(q_BSHC, cache[0]):
            return _few(q_BSHC, span.of_rows(cache[0]), span.of_rows(cache[1]), span)
        keys, values = (slots.flatten(0, 1) for slots in cache)
        return _flash(q_BSHC, keys, values, span, span.bounds()[1], span.used_B)
    keys, values = (span.of_rows(slots) for slots in cache)
    return _dot(q_BSHC, keys, values, span.mask_B1SL())


def _takes_few(q_BSHC: Tensor, k_ZLGC: Tensor) -> bool:
    """Whether `flex_attention` splits keys of these heads: as many of queries to one of keys as a power of
    two."""
    length, shared = q_BSHC.shape[1], q_BSHC.shape[2] // k_ZLGC.shape[2]
    return length <= FEW and shared & (shared - 1) == 0


def _few(q_BSHC: Tensor, k_BLGC: Tensor, v_BLGC: Tensor, span: Span) -> Tensor:
    # Every size is compiled by itself, since keys are split by a number of rows that is known.
    with torch._dynamo.config.patch(recompile_limit=SHAPES):
        return _compiled_flex()(q_BSHC, k_BLGC, v_BLGC, span.blocks())


@functools.cache
def _compiled_flex() -> Callable[..., Tensor]:
    return torch.compile(_flex, dynamic=False, fullgraph=True, options=early_launches())


def _flex(q_BSHC: Tensor, k_BLGC: Tensor, v_BLGC: Tensor, blocks: Any) -> Tensor:
    from torch.nn.attention.flex_attention import flex_attention

    q, k, v = (x.transpose(1, 2) for x in (q_BSHC, k_BLGC, v_BLGC))
    y = flex_attention(q, k, v, block_mask=blocks, enable_gqa=True, kernel_options=FLEX)  # type: ignore[arg-type]
    return y.transpose(1, 2)  # type: ignore[union-attr]


def _dot(q_BSHC: Tensor, k_BLGC: Tensor, v_BLGC: Tensor, mask: Tensor | None) -> Tensor:
    q, k, v = (x.transpose(1, 2) for x in (q_BSHC, k_BLGC, v_BLGC))
    y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None, enable_gqa=True)
    return y.transpose(1, 2)


def _flash(
    q_BSHC: Tensor, k_RGC: Tensor, v_RGC: Tensor, span: Span, begin_B1: Tensor, used_B: Tensor
) -> Tensor:
    """Torch's flash attention reads so many keys from every row's first one on. Its public door for ragged
    rows, `varlen_attn`, takes no slot lengths before torch 2.13."""
    out_THC, *_ = torch.ops.aten._flash_attention_forward(
        q_BSHC.flatten(0, 1),
        k_RGC,
        v_RGC,
        span.bounds()[0],
        begin_B1,
        span.length,
        span.capacity,
        0.0,
        True,
        False,
        seqused_k=used_B,
    )
    return out_THC.view_as(q_BSHC)


class Rotary(nn.Module):
    """Rotary positions (RoFormer, section 3.4.2): halves of a head turn by position times frequency.

    A row of `turn_LC` is what `between.turned` takes for a position, (cos, cos, -sin, sin)."""

    turn_LC: Tensor

    def __init__(
        self, width: int, theta: float, positions: int, *, dtype: torch.dtype, device: torch.device
    ) -> None:
        super().__init__()
        half = torch.arange(width // 2, dtype=torch.float32, device=device)
        place_L = torch.arange(positions, dtype=torch.float32, device=device)
        angle = place_L[:, None] * theta ** (-half * 2 / width)
        cos, sin = angle.cos(), angle.sin()
        turn_LC = torch.cat((cos, cos, -sin, sin), -1).to(dtype)
        self.register_buffer("turn_LC", turn_LC, persistent=False)


class GroupedAttention(nn.Module):
    """Grouped-query attention with rotary positions."""

    def __init__(self, sizes: Grouped, hidden_size: int, *, eps: float, **kind) -> None:
        super().__init__()
        self.sizes, self.eps, heads, groups = sizes, eps, sizes.num_heads, sizes.num_kv_heads
        self.qkv = nn.Linear(hidden_size, (heads + 2 * groups) * sizes.head_size, bias=False, **kind)
        self.out = nn.Linear(heads * sizes.head_size, hidden_size, bias=False, **kind)
        if sizes.qk_norm:
            self.q_norm = nn.RMSNorm(sizes.head_size, eps=eps, **kind)
            self.k_norm = nn.RMSNorm(sizes.head_size, eps=eps, **kind)

    @staticmethod
    def cache(sizes: Grouped, slots: int, capacity: int, **kind) -> Cache:
        shape = slots, capacity, sizes.num_kv_heads, sizes.head_size
        return torch.zeros(shape, **kind), torch.zeros(shape, **kind)

    def forward(
        self, x_TD: Tensor, span: Span, cache: Cache | None, turn_TC: Tensor, between: Between
    ) -> Tensor:
        sizes, rows = self.sizes, (span.rows, span.length)
        qkv_THC = self.qkv(x_TD).view(len(x_TD), -1, sizes.head_size)
        norms = (self.q_norm.weight, self.k_norm.weight) if sizes.qk_norm else None
        of_heads = qkv_THC, norms, turn_TC, sizes.num_heads, self.eps
        if cache is None:
            q, k, v = (x.unflatten(0, rows) for x in grouped_heads(*of_heads))
            y = _dot(q, k, v, None)
        else:
            q = between.grouped_into_cache(*of_heads, [part.flatten(0, 1) for part in cache], span.row_T)
            y = attend(q.unflatten(0, rows), cache, span, compiles=between is not AS_WRITTEN)
        return self.out(y.reshape(len(x_TD), -1))


class LatentAttention(nn.Module):
    """Multi-head latent attention. Absorbed, queries are taken into the latents' space, and the weighted
    latents out of it; expanded, latents into keys and values of all heads. Either way a token costs kv_rank +
    rope values of cache."""

    def __init__(self, sizes: Latent, hidden_size: int, *, eps: float, **kind) -> None:
        super().__init__()
        self.sizes, self.eps, heads = sizes, eps, sizes.num_heads
        self.q_down = nn.Linear(hidden_size, sizes.query_rank, bias=False, **kind)
        self.q_norm = nn.RMSNorm(sizes.query_rank, eps=eps, **kind)
        self.q_up = nn.Linear(sizes.query_rank, heads * (sizes.nope + sizes.rope), bias=False, **kind)
        self.kv_down = nn.Linear(hidden_size, sizes.kv_rank + sizes.rope, bias=False, **kind)
        self.kv_norm = nn.RMSNorm(sizes.kv_rank, eps=eps, **kind)
        self.k_up = nn.Parameter(torch.empty(heads, sizes.nope, sizes.kv_rank, **kind))
        self.v_up = nn.Parameter(torch.empty(heads, sizes.value, sizes.kv_rank, **kind))
        self.out = nn.Linear(heads * sizes.value, hidden_size, bias=False, **kind)
        for weight in (self.k_up, self.v_up):
            nn.init.normal_(weight, std=sizes.kv_rank**-0.5)

    @staticmethod
    def cache(sizes: Latent, slots: int, capacity: int, **kind) -> Cache:
        return (torch.zeros(slots, capacity, sizes.kv_rank + sizes.rope, **kind),)

    def forward(
        self, x_TD: Tensor, span: Span, cache: Cache | None, turn_TC: Tensor, between: Between
    ) -> Tensor:
        tokens, rows = len(x_TD), (span.rows, span.length)
        q_THC = self.q_up(self.q_norm(self.q_down(x_TD))).view(tokens, self.sizes.num_heads, -1)
        of_row = self.kv_down(x_TD), self.kv_norm.weight, turn_TC, self.eps
        if cache is None:
            kept_BLC = latent_row(*of_row).unflatten(0, rows)
            y_THC = self._absorbed(q_THC, kept_BLC, _later(span), turn_TC, between)
        else:
            between.latent_into_cache(*of_row, cache[0].flatten(0, 1), span.row_T)
            if expands(self.sizes, span.length, q_THC):
                y_THC = self._expanded(q_THC, cache[0].flatten(0, 1), span, turn_TC, between)
            else:
                y_THC = self._absorbed(q_THC, span.of_rows(cache[0]), span.hidden_BSL(), turn_TC, between)
        return self.out(y_THC.reshape(tokens, -1))

    def _absorbed(
        self, q_THC: Tensor, kept_BLC: Tensor, hidden_BSL: Tensor, turn_TC: Tensor, between: Between
    ) -> Tensor:
        sizes, (tokens, heads) = self.sizes, q_THC.shape[:2]
        nope, rope = q_THC.split([sizes.nope, sizes.rope], -1)
        absorbed_HTC = torch.bmm(nope.transpose(0, 1), self.k_up)
        scale = (sizes.nope + sizes.rope) ** -0.5
        q_THC = between.latent_queries(absorbed_HTC, rope, turn_TC, scale)
        # The latents that every head attends to.
        scores_BXL = torch.bmm(q_THC.view(len(kept_BLC), -1, q_THC.shape[-1]), kept_BLC.mT)
        weights_BXL = latent_weights(scores_BXL, hidden_BSL)
        y_BXC = torch.bmm(weights_BXL, kept_BLC[..., : sizes.kv_rank])
        y_HTC = y_BXC.view(tokens, heads, -1).transpose(0, 1)
        return torch.bmm(y_HTC, self.v_up.mT).transpose(0, 1)

    def _expanded(
        self, q_THC: Tensor, kept_RC: Tensor, span: Span, turn_TC: Tensor, between: Between
    ) -> Tensor:
        """Flash attention wants values as wide as keys: they are with what stands behind them in a head, and
        what comes of that is cut off. So neither is copied."""
        sizes, (index_P, begin_B1, used_B) = self.sizes, span.packing()
        up_HCK = between.latent_up(self.k_up, self.v_up, sizes.rope)
        up_1KN, packed_PK = up_HCK.flatten(0, 1)[None].mT, kept_RC[index_P]
        q_BSHC = between.latent_heads(q_THC, turn_TC).unflatten(0, (span.rows, span.length))
        if q_THC.is_cuda:
            # Rows behind the last end are neither computed nor read.
            both_PN = F.grouped_mm(packed_PK, up_1KN, offs=begin_B1[-1:])
        else:
            both_PN = packed_PK @ up_1KN[0]
        both_PHC = both_PN.unflatten(1, up_HCK.shape[:2])
        keys, values = both_PHC[..., sizes.value :], both_PHC[..., : sizes.nope + sizes.rope]
        if q_THC.is_cuda:
            y_BSHC = _flash(q_BSHC, keys, values, span, begin_B1, used_B)
        else:
            of_slot_BL = begin_B1[:-1, None] + torch.arange(span.capacity, device=begin_B1.device)
            of_slot_BL.clamp_(max=len(keys) - 1)
            y_BSHC = _dot(q_BSHC, keys[of_slot_BL], values[of_slot_BL], span.mask_B1SL())
        return y_BSHC.flatten(0, 1)[..., : sizes.value]


def expands(sizes: Latent, length: int, x: Tensor) -> bool:
    """Whether rows of so many tokens have their latents expanded. On a GPU, where flash attention takes the
    heads and a product whose number of rows only the device knows does not ask for it."""
    width = sizes.nope + sizes.rope
    if length < MANY or sizes.value > width:
        return False
    if not x.is_cuda:
        return True
    step = {width % FLASH_STEP, sizes.value % FLASH_STEP, (sizes.kv_rank + sizes.rope) % FLASH_STEP}
    grouped = x.dtype == torch.bfloat16 and torch.cuda.get_device_capability()[0] in GROUPED_MAJORS
    return grouped and width <= FLASH_WIDTH and step == {0}


def _later(span: Span) -> Tensor:
    return span.position_BS[:, None, :] > span.position_BS[..., None]
