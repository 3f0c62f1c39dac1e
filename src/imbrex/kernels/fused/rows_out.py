"""Gate and up while their rows come: one launch in place of a pull and the first product of the experts.

    staged, routed = exchange.stage(x_TD, ids_TK, weights_TK)
    launch_gemm(..., beside=rows_out(staged))        # fills staged.rows, and multiplies them

The bits are those of `NvlinkExchange.pull` and of `launch_gemm`. `fused/movers.cuh` says who brings what.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from imbrex.kernels.exchange.lease import Staged
from imbrex.kernels.ffn.glue import Groups
from imbrex.kernels.gemm.gemm import Beside, Epilogue, Layout, gemm_variant, of_file
from imbrex.kernels.gemm.tiling import gemm_choices
from imbrex.kernels.jit import Variant, load
from imbrex.kernels.structs import Struct, struct

ROWS = struct("fused/movers.cuh", "Rows")
BEFORE_THREADS = 256
SOURCE, ENTRY = "fused/rows_out.cu", "rows_and_product"
ALL = 1 << 30
PRODUCTS = {
    Layout.FORWARD: (Epilogue.SWIGLU, Epilogue.SWIGLU_KEEP),
    Layout.DGRAD: (Epilogue.PLAIN, Epilogue.SWIGLU_GRADIENT),
}
"""The products whose rows come beside them, by the operand's layout."""


def shipped_variants() -> list[Variant]:
    """One for every way that gate and up, and the gradient through down, are cut and stored."""
    choices = [c for c in gemm_choices() if c.epilogue in PRODUCTS.get(c.layout, ())]
    choices = [c for c in choices if c.wide or c.layout is Layout.FORWARD]
    beside = [
        of_file(gemm_variant(c.layout, c.epilogue, c.tiling, True), file_of(fp8=fp8))
        for c in choices
        for fp8 in (False, True)
    ]
    return [*beside, *(before_variant(fp8=fp8) for fp8 in (False, True))]


def before_variant(*, fp8: bool) -> Variant:
    """The kernel of `bring_rows`. fp8: as in `file_of`."""
    return Variant(source="fused/rows_before.cu", entry="bring_rows", defines=(("WIRE_FP8", int(fp8)),))


def file_of(*, fp8: bool) -> tuple[Any, ...]:
    """The kernel. fp8: peers have staged rows of the `fp8` codec."""
    return SOURCE, ENTRY, ("WIRE_FP8", int(fp8))


def bring_rows(staged: Staged, num_sms: int, local: int = 0, *, load: Callable[..., Any] = load) -> Tensor:
    """Queue what brings the rows of rank `local` and nothing else: [room, D], for whoever reads them before
    their product, or a product that cannot bring them."""
    rows = staged.rows if staged.rows.dim() == 2 else staged.rows[local]
    if rows.shape[0]:
        args = [staged.group(local, num_sms), _rows_of(staged, local)]
        load(before_variant(fp8=staged.pitch > 0), rows.device).launch(
            grid=num_sms, block=BEFORE_THREADS, args=args
        )
    return rows


def rows_out(staged: Staged, local: int = 0) -> Beside:
    """The kernel that brings the rows of rank `local` of this process beside a product of `staged.rows`."""
    rows = _rows_of(staged, local)
    parts = rows.x, rows.token, rows.position, rows.totals, rows.there
    return Beside(
        file=file_of(fp8=staged.pitch > 0),
        args=lambda blocks: (staged.group(local, blocks), rows),
        key=(
            staged.exchange,
            local,
            *parts,
            rows.staged_at,
            rows.max_tokens,
            rows.choices,
            rows.pitch,
            rows.blocks,
            rows.own,
            rows.bounds,
        ),
        plan=staged.plan,
        own_e2=staged.own_e2,
        mean_rows=staged.mean_rows,
    )


def rows_out_once(staged: Staged) -> Beside | None:
    """`rows_out` for the first who asks; `None` for a forward that runs again, as in a checkpoint of the
    experts alone: its rows are there, and what is staged may be another call's."""
    staged.uses.append(None)
    return rows_out(staged) if len(staged.uses) == 1 else None


def _rows_of(staged: Staged, local: int) -> Struct:
    """The rows of one rank, as movers are told of them."""
    position = staged.position_LWTK[local]
    return ROWS(
        x=staged.x if staged.x.dim() == 2 else staged.x[local],
        out=staged.rows if staged.rows.dim() == 2 else staged.rows[local],
        token=staged.token_LR[local],
        position=position,
        totals=staged.totals_L4[local],
        there=staged.there_LC[local],
        staged_at=staged.staged_at,
        room=staged.rows.shape[-2],
        max_tokens=position.shape[1],
        choices=position.shape[2],
        row_bytes=staged.rows.shape[-1] * staged.rows.element_size(),
        pitch=staged.pitch,
        blocks=ALL if staged.movers is None else staged.movers,
        own=staged.own_e2,
        bounds=None if staged.plan is None else Groups(staged.plan).bounds,
    )
