"""One product of the experts' rows: which kernel, with which cut, and how early it begins."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Unpack

from torch import Tensor

from imbrex.kernels.arguments import multiprocessors
from imbrex.kernels.ffn.glue import Groups
from imbrex.kernels.gemm.gemm import (
    ALONE,
    BEHIND,
    FOLLOWS,
    Epilogue,
    Extras,
    Layout,
    Tiling,
    gemm_variant,
    launch_gemm,
    of_file,
)
from imbrex.kernels.gemm.portable import is_portable, launch_portable
from imbrex.kernels.gemm.tiling import LOW, PAIRED, SHARED, SMALL, TALL, Reading, choose_tiling
from imbrex.kernels.jit import Variant

FOLLOWING = (SHARED, LOW, SMALL)
FEW_ROWS = 64
"""Rows of an expert, in the mean, up to which the last product asks for weights while the first one runs."""


def queue_product(
    layout: Layout,
    a: Tensor,
    b: Tensor,
    groups: Groups,
    out: Tensor,
    epilogue: Epilogue = Epilogue.PLAIN,
    *,
    follows: bool = False,
    **more: Unpack[Extras],
) -> int:
    """Queues one product of `groups`. follows: the launch right before makes its rows, and where they end is
    known, or told, before it ends (gemm/follow.cu). With `progress` it tells of its tiles where it can
    (gemm/parts.cuh), and returns how many of columns there are, for `begins_behind`; else 0."""
    progress = more.pop("progress", None)
    if is_portable(a.get_device()):
        launch_portable(layout, a, b, groups.ends_e, out, epilogue, **more)
        return 0
    index_R, experts = more.get("index_R"), groups.ends_e.numel()
    rows = a.shape[0] if index_R is None else index_R.shape[0]
    operands, expected = (layout, epilogue, rows, experts, a, out), groups.expected if follows else 0
    behind, gather = more.get("beside", ALONE).file == BEHIND, index_R is not None
    reading: Reading = {"gather": gather, "expected": expected, "mean": groups.mean_rows, "tall": not gather}
    tiling = tiling_of(*operands, **reading)
    early = follows and not behind and tiling in FOLLOWING and (expected or rows) <= FEW_ROWS * experts
    if early:
        more["beside"] = FOLLOWS
    elif progress is not None:
        more["progress"] = progress
    launch_gemm(
        layout,
        a,
        b,
        groups.ends_e,
        out,
        groups.other_counter if behind or (early and epilogue is not Epilogue.SWIGLU) else groups.counter,
        tiling=tiling,
        epilogue=epilogue,
        **more,
    )
    return 0 if progress is None or early else -(-out.shape[-1] // (tiling.block_n // 2))


def tiling_of(
    layout: Layout,
    epilogue: Epilogue,
    rows: int,
    experts: int,
    a: Tensor,
    out: Tensor,
    **reading: Unpack[Reading],
) -> Tiling:
    return choose_tiling(
        layout,
        epilogue,
        rows,
        experts,
        (out.shape[-2], out.shape[-1]),
        sms=multiprocessors(a.get_device()),
        **(reading | {"depth": a.shape[1]}),
    )


def following_variants() -> list[Variant]:
    """Every product that can begin before the one before it has ended."""
    cuts = itertools.product((Epilogue.SWIGLU, Epilogue.PLAIN, Epilogue.WEIGHTED), FOLLOWING)
    behind = itertools.product((Epilogue.PLAIN, Epilogue.WEIGHTED), (*FOLLOWING, PAIRED, TALL))
    return [
        *(following_variant(*cut) for cut in cuts),
        *(of_file(gemm_variant(Layout.FORWARD, *cut), BEHIND) for cut in behind),
    ]


def following_variant(epilogue: Epilogue, tiling: Tiling) -> Variant:
    """The product that begins before the one before it has ended."""
    variant = gemm_variant(Layout.FORWARD, epilogue, tiling)
    return replace(variant, source=FOLLOWS.file[0], entry=FOLLOWS.file[1])
