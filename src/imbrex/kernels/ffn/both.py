"""Gate, up and down of a small batch in one launch: the host's side of `ffn/both.cu`.

Where it is the faster way (`why_two`), or where it is asked for: `Experts.one_launch`,
`Groups(one_launch=True)`. The bits of two launches; in fp8 of three, since rows are quantised inside.
"""

from __future__ import annotations

import functools
from typing import Any

from torch import Tensor

from imbrex.kernels import jit, records
from imbrex.kernels.arguments import multiprocessors
from imbrex.kernels.ffn.glue import Groups
from imbrex.kernels.gemm.gemm import (
    BEHIND,
    FOLLOWS,
    Epilogue,
    Layout,
    check_products,
    gemm_variant,
    products_status,
    ragged_map,
    stacked_map,
)
from imbrex.kernels.gemm.tiling import SMALL
from imbrex.kernels.jit import ByValue, KernelError, Variant, load
from imbrex.kernels.structs import struct

BOTH = struct("ffn/both.cuh", "Both")
ENTRY = "gate_up_and_down"
MOST_EXPERTS = 1024
"""Experts of a rank: a block keeps 12 bytes of each in the shared memory that a product leaves."""
MOST_READ = 4 << 30
"""Bytes of weights up to which one launch is faster."""
FEW_ROWS = 32
"""Rows of an expert, in the mean, up to which weights are all that takes time, and narrow tiles read them."""


def both_variant(*, weighted: bool, fp8: bool = False) -> Variant:
    """The kernel whose result's rows are multiplied by weights, or not."""
    up = gemm_variant(Layout.FORWARD, Epilogue.SWIGLU, SMALL, fp8=fp8)
    return Variant(source="ffn/both.cu", entry=ENTRY, defines=(*up.defines, ("WEIGHTED", int(weighted))))


def shipped_variants() -> list[Variant]:
    return [both_variant(weighted=weighted, fp8=fp8) for weighted in (True, False) for fp8 in (True, False)]


def why_two(expected: int, experts: int, sizes: tuple[int, int], *, fp8: bool = False) -> str | None:
    """Why two launches are faster of `expected` rows, or `None`. sizes: D and F.

    One H200, half of the experts and twice the tokens of a rank of two, dispatch and sums included: one
    launch saves up to 15 us, in fp8 12 to 24, and never lost, up to so many bytes of weights
    (benchmarks/decode_one.py).
    """
    width, inner = sizes
    hit = experts * (1 - (1 - 1 / max(1, experts)) ** expected)
    if (3 if fp8 else 6) * width * inner * hit > MOST_READ:
        return "reading the weights takes so long that wide tiles gain more than one launch saves"
    return None


def why_not_both(
    groups: Groups, *, sizes: tuple[int, int], keep: bool, elsewhere: bool, fp8: bool = False
) -> str | None:
    """Why one launch does not compute both products of `groups`, or `None`. sizes: D and F; keep: gate and up
    are kept; elsewhere: rows are read through an index, or come beside the first product."""
    experts = groups.ends_e.numel()
    if groups.one_launch is False:
        return "two are asked for"
    if keep or elsewhere:
        return "gate and up are kept, or rows do not lie in the order of experts"
    if not 0 < groups.expected <= FEW_ROWS * experts:
        return f"the rows are not those of a small dispatch, {FEW_ROWS} an expert in the mean at most"
    if groups.hits is None:
        return "nobody has told which experts have rows"
    if experts > MOST_EXPERTS:
        return f"a rank has {experts} experts, {MOST_EXPERTS} at most"
    return None if groups.one_launch else why_two(groups.expected, experts, sizes, fp8=fp8)


def run_both(
    rows_RD: Tensor,
    gate_up_eGD: Tensor,
    down_eDF: Tensor,
    groups: Groups,
    act_RF: Tensor,
    out_RD: Tensor,
    weights_R: Tensor | None,
    scales: tuple[Tensor, Tensor] | None = None,
) -> None:
    """Queue both products of rows_RD: `act_RF` and `out_RD` get what two launches give. All contiguous bf16,
    but `weights_R` float32. Where `why_not_both` says nothing; KernelError where a multiprocessor has no
    room for a block: each has one, and they wait for each other's tiles.

    scales: float32 [e, N/128, K/128] of both weights, which are float8_e4m3fn then; `act_RF` is float32, and
    gets SwiGLU's result before it is quantised."""
    device, experts, fp8 = rows_RD.get_device(), len(down_eDF), scales is not None
    smem = shared_bytes(experts, fp8=fp8)
    kernel, blocks = _kernel(weights_R is not None, fp8, smem, device)
    up_scales, down_scales = scales or (None, None)
    both = BOTH(
        hits=groups.hits,
        weights=weights_R,
        counter=groups.counter,
        status=products_status(device),
        experts=experts,
        width=out_RD.shape[1],
        inner=act_RF.shape[1],
        rows=rows_RD if fp8 else None,
        act=act_RF if fp8 else None,
        up_scales=up_scales,
        down_scales=down_scales,
    )
    make = _fp8_maps if fp8 else both_maps
    maps = make(rows_RD, gate_up_eGD, down_eDF, act_RF, out_RD)
    args, how = [maps, both], {"grid": blocks, "block": SMALL.threads, "smem": smem, "dependent": True}
    records.launch(kernel, args, how)
    check_products(device)


def ended_before_last(device: int) -> bool:
    """Whether sums behind the last launch of the current stream find what all launches before that one wrote:
    it is a product that waits for them before sums may begin. device: a CUDA device's number, or -1."""
    latest = jit.latest_launch(device)
    return latest is not None and latest.entry in (FOLLOWS.file[1], BEHIND[1], ENTRY)


def shared_bytes(experts: int, *, fp8: bool = False) -> int:
    """Bytes of dynamic shared memory: a product's, three numbers of every expert and one more, and in fp8
    scales of every stage's rows."""
    return SMALL.smem + -(-12 * (experts + 1) // 16) * 16 + fp8 * 4 * SMALL.stages * SMALL.block_m


def both_maps(
    rows_RD: Tensor, gate_up_eGD: Tensor, down_eDF: Tensor, act_RF: Tensor, out_RD: Tensor
) -> ByValue:
    """`BothMaps`: rows, weights and result of each product."""
    height, width = SMALL.box_m, SMALL.block_n
    maps = (
        ragged_map(rows_RD, 64, height),
        stacked_map(gate_up_eGD, 64, width // 2, 2),
        ragged_map(act_RF, 64, 64),
        ragged_map(act_RF, 64, height),
        stacked_map(down_eDF, 64, width),
        ragged_map(out_RD, 64, 64),
    )
    return ByValue(b"".join(bytes(part.raw) for part in maps))


def _fp8_maps(
    _rows_RD: Tensor, gate_up_eGD: Tensor, down_eDF: Tensor, _act_RF: Tensor, out_RD: Tensor
) -> ByValue:
    """`BothMaps` of weights and of the last result, each in the place of those that are not read, too."""
    up, down = stacked_map(gate_up_eGD, 128, SMALL.block_n // 2, 2), stacked_map(down_eDF, 128, SMALL.block_n)
    maps = up, up, up, down, down, ragged_map(out_RD, 64, 64)
    return ByValue(b"".join(bytes(part.raw) for part in maps))


@functools.cache
def _kernel(weighted: bool, fp8: bool, smem: int, device: int) -> tuple[Any, int]:
    """The kernel and the blocks of a launch, one a multiprocessor."""
    kernel = load(both_variant(weighted=weighted, fp8=fp8), device)
    if not kernel.resident(SMALL.threads, smem):
        raise KernelError(
            f"ffn: one launch for both products wants {smem} bytes of shared memory in every multiprocessor, "
            "and the device has less: use one_launch=False"
        )
    return kernel, multiprocessors(device)


__all__ = [
    "BOTH",
    "ENTRY",
    "MOST_EXPERTS",
    "both_maps",
    "both_variant",
    "ended_before_last",
    "run_both",
    "shared_bytes",
    "shipped_variants",
    "why_not_both",
    "why_two",
]
