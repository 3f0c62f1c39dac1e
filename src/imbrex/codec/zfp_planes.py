"""ZFP's embedded coding of bit planes, many blocks at once.

A plane holds bit k of the n coefficients of a block. Coefficients before position s, the significant ones,
are written as they are. The rest: a 1 says that some of it is set, then bits up to and including the next 1
follow (which goes unsaid in the last place) and s moves behind it; a 0 ends the plane. Example, n = 4, s = 0,
plane 0b0100 (coefficient 2): 1, 0, 0, 1, then 0 for the rest: "10010" in order, and s = 3.

A block ends after `budget` bits, in the middle of a plane as it may be. Bits go to a row of 32-bit words kept
in int64, the lowest first.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from imbrex.codec.blocks import pack_nibbles, unpack_nibbles

PLANES, WORD, WINDOW = 32, 32, 8


def write(unsigned_Bn: Tensor, header_B: Tensor, header_bits: int, budget: int) -> Tensor:
    """Words [B, budget / 32 and spares] of blocks of 32-bit coefficients. Header 0 is a block of zeros."""
    num_blocks, size = unsigned_Bn.shape
    device = unsigned_Bn.device
    words = torch.zeros(num_blocks, budget // WORD + 3, dtype=torch.int64, device=device)
    words[:, 0] = header_B
    at_B = torch.full((num_blocks,), header_bits, dtype=torch.int64, device=device)
    at_B = torch.where(header_B == 0, budget, at_B)
    significant_B = torch.zeros_like(at_B)
    codes, lengths = (table.to(device) for table in _rest_codes(size))
    place_n = 1 << torch.arange(size, device=device)
    for plane in range(PLANES - 1, -1, -1):
        # host sync: no plane is written when every block is full
        if bool((at_B >= budget).all()):
            break
        bits_B = ((unsigned_Bn >> plane & 1) * place_n).sum(1)
        at_B = _append(words, at_B, bits_B & ((1 << significant_B) - 1), significant_B, budget)
        rest_B = bits_B >> significant_B
        index_B = rest_B + (1 << (size - significant_B))
        at_B = _append(words, at_B, codes[index_B], lengths[index_B], budget)
        top_B = torch.frexp(bits_B.double()).exponent.long()
        significant_B = torch.maximum(significant_B, top_B)
    return words


def _append(words: Tensor, at_B: Tensor, code_B: Tensor, length_B: Tensor, budget: int) -> Tensor:
    """Add codes of at most 32 bits at bit positions `at_B`; what lies behind the budget is dropped later."""
    at = at_B.clamp(max=budget)
    shifted = torch.where(at_B < budget, code_B, 0) << (at % WORD)
    word = (at // WORD)[:, None]
    words.scatter_add_(1, word, (shifted & 0xFFFFFFFF)[:, None])
    words.scatter_add_(1, word + 1, (shifted >> WORD)[:, None])
    return at_B + length_B


@lru_cache(maxsize=2)
def _rest_codes(size: int) -> tuple[Tensor, Tensor]:
    """How the rest of a plane is written, by its bits with a 1 put in front: codes and their lengths.

    Width w = number of bits of the rest; a code has at most 2 w bits.
    """
    index = torch.arange(2 << size, device="cpu")
    width = torch.frexp(index.double()).exponent.long() - 1
    rest = torch.where(index > 0, index - (1 << width.clamp(min=0)), 0)
    code, length, testing = torch.zeros_like(index), torch.zeros_like(index), torch.ones_like(index)
    for position in range(size):
        left = position < width
        remaining = rest >> position
        test = left & (testing == 1)
        some = remaining != 0
        code += (test & some).long() << length
        length += test.long()
        running = left & (some | (testing == 0))
        writes = running & (position < width - 1)
        bit = remaining & 1
        code += torch.where(writes, bit, 0) << length
        length += writes.long()
        # A 1 ends the run; a failed test ends the plane, and 2 never tests again.
        testing = torch.where(test & ~some, 2, torch.where(running, bit, testing))
    return code, length


def read(words_BW: Tensor, header_bits: int, budget: int, size: int) -> Tensor:
    """Coefficients [B, n] of words, as far as the budget reaches. Blocks of header 0 give rubbish."""
    num_blocks, device = words_BW.shape[0], words_BW.device
    words = torch.nn.functional.pad(words_BW, [0, 2])
    at_B = torch.full((num_blocks,), header_bits, dtype=torch.int64, device=device)
    significant_B = torch.zeros_like(at_B)
    out_Bn = torch.zeros(num_blocks, size, dtype=torch.int64, device=device)
    place_n = torch.arange(size, device=device)
    table = _windows(size).to(device)
    for plane in range(PLANES - 1, -1, -1):
        # host sync: planes are read only until every block is full
        if bool((at_B >= budget).all()):
            break
        told_B = torch.minimum(significant_B, budget - at_B)
        bits_B = _peek(words, at_B, told_B)
        at_B = at_B + told_B
        rest_B, significant_B, at_B = _read_rest(words, at_B, significant_B, budget, size, table)
        out_Bn += ((bits_B | rest_B)[:, None] >> place_n & 1) << plane
    return out_Bn


def _read_rest(words: Tensor, at_B: Tensor, start_B: Tensor, budget: int, size: int, table: Tensor):
    """The bits behind the significant ones, the new number of significant ones, the new position."""
    bits_B, running_B = torch.zeros_like(at_B), torch.zeros_like(at_B)
    position_B, open_B = start_B, (start_B < size) & (at_B < budget)
    # host sync: as many steps as the longest plane needs
    while bool(open_B.any()):
        length_B = (budget - at_B).clamp(max=WINDOW)
        window_B = _peek(words, at_B, length_B) | (1 << length_B)
        entry_B = table[position_B * 2 + running_B, window_B]
        entry_B = torch.where(open_B, entry_B, 0)
        bits_B = bits_B | entry_B >> 16
        at_B = at_B + (entry_B & 15)
        position_B = torch.where(open_B, entry_B >> 4 & 31, position_B)
        running_B = torch.where(open_B, entry_B >> 9 & 1, running_B)
        # The budget ends in the middle of a run: zfp takes the place it has come to for the 1.
        cut_B = open_B & (running_B == 1) & (at_B >= budget)
        bits_B = torch.where(cut_B, bits_B | 1 << position_B, bits_B)
        position_B = position_B + cut_B.long()
        open_B = open_B & (entry_B >> 10 & 1 == 0) & (at_B < budget)
    return bits_B, position_B, at_B


def _peek(words: Tensor, at_B: Tensor, length_B: Tensor) -> Tensor:
    """The next `length_B` bits, at most 16."""
    word = (at_B // WORD)[:, None]
    both = words.gather(1, word) | words.gather(1, word + 1) << WORD
    return (both.squeeze(1) >> (at_B % WORD)) & ((1 << length_B) - 1)


@lru_cache(maxsize=2)
def _windows(size: int) -> Tensor:
    """A table of what up to 8 bits say: by state (position * 2 + in a run), and by window with a 1 behind its
    last bit.

    An entry: bits used (4 bits), new position (5), in a run (1), plane ended (1), then from bit 16 on the
    coefficients found to be set.
    """
    numbers = (torch.arange(end, device="cpu") for end in (2 * size + 2, 2 << WINDOW))
    state, window = torch.meshgrid(*numbers, indexing="ij")
    length = torch.frexp(window.double()).exponent.long() - 1
    position, running = state // 2, state % 2
    used, ended, ones = torch.zeros_like(state), torch.zeros_like(state), torch.zeros_like(state)
    ended = torch.where(position >= size, 1, ended)
    for place in range(WINDOW):
        live = (ended == 0) & (place < length)
        bit = window >> place & 1
        test, run = live & (running == 0), live & (running == 1)
        used += live.long()
        ended = torch.where(test & (bit == 0), 1, ended)
        # A positive test in the last place says it all; in a run a 1, or reaching the last place, does.
        step = run & (bit == 0)
        position = position + step.long()
        hit = (run & (bit == 1)) | (((test & (bit == 1)) | step) & (position >= size - 1))
        running = torch.where(test & (bit == 1), 1, running)
        running = torch.where(hit, 0, running)
        ones = torch.where(hit, ones | (1 << position.clamp(max=size)), ones)
        position = position + hit.long()
        ended = torch.where(live & (position >= size), 1, ended)
    return used | position << 4 | running << 9 | ended << 10 | ones << 16


def to_bytes(words_BW: Tensor, budget: int, num_rows: int, count: int) -> Tensor:
    """uint8 [N, blocks * budget / 8] of the words of N rows of `count` blocks.

    A budget is whole nibbles; a row ends at a whole byte.
    """
    shifts = torch.arange(0, WORD, 4, device=words_BW.device)
    nibbles = (words_BW[:, :, None] >> shifts & 15).to(torch.uint8).flatten(1)[:, : budget // 4]
    by_row = nibbles.reshape(num_rows, count * budget // 4)
    return pack_nibbles(torch.nn.functional.pad(by_row, [0, by_row.shape[1] % 2]))


def from_bytes(encoded_NB: Tensor, budget: int, count: int) -> Tensor:
    """The inverse of `to_bytes`: int64 words [N * count, budget / 32 rounded up]."""
    num_blocks = encoded_NB.shape[0] * count
    nibbles = unpack_nibbles(encoded_NB)[:, : count * budget // 4].reshape(num_blocks, budget // 4)
    padded = torch.nn.functional.pad(nibbles, [0, -nibbles.shape[1] % 8]).view(
        num_blocks, -(-budget // WORD), 8
    )
    return (padded.long() << torch.arange(0, WORD, 4, device=padded.device)).sum(2)
