"""Down with others' rows first, and the sums home, emulated or on a GPU, beside the two launches it stands
for (`tests.emulated.down_home.apart`)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from imbrex.kernels.exchange.exchange import Routed
from imbrex.kernels.ffn.glue import Groups
from imbrex.kernels.fused.others_first import others_first
from tests.emulated.down_home import Forward, empty_out, products_of

PARTS = 8


def own_rows(routed: Routed, rank: int, slots: int) -> Tensor:
    """int32 [slots, 2]: the first own row of every expert of a rank, and the one behind the last."""
    position_WTK, ends = routed.position_LWTK[rank].cpu(), routed.counts_Le[rank, :slots].cumsum(0).cpu()
    source = torch.full((int(ends[-1]) if slots else 0,), -1)
    for p in range(len(position_WTK)):
        tokens = int(routed.tokens_LW[rank, p])
        rows = position_WTK[p, :tokens].flatten()
        source[rows[rows >= 0].long()] = p
    own, begin = torch.empty(slots, 2, dtype=torch.int32), 0
    for slot, end in enumerate(ends.tolist()):
        of = source[begin:end]
        assert torch.equal(of, of.sort().values), "rows of an expert lie in the order of their tokens' ranks"
        own[slot] = torch.tensor([begin + int((of < rank + i).sum()) for i in (0, 1)])
        begin = end
    return own.to(routed.position_LWTK.device)


def made(groups: Groups) -> None:
    """Tell of all rows, as a product with one tile of columns does, and of all ends of own rows."""
    counts = groups.ends_e.diff(prepend=groups.ends_e.new_zeros(1))
    part = torch.arange(len(counts), device=counts.device) * PARTS // max(1, len(counts))
    groups.progress.zero_()[:PARTS].index_add_(0, part, counts)
    groups.bounds.fill_(2 * len(counts))


def together(
    forward: Forward,
    first: int,
    blocks: int | None = None,
    *,
    make: Callable[[int, Groups], int] | None = None,
    **sums: Any,
) -> Tensor:
    """Product and sums of all virtual ranks in one launch. make: queues a rank's first product, and returns
    its tiles of columns; without, its rows are there."""
    rows, products = products_of(forward)
    left = []
    for rank, product in enumerate(products):
        own_e2 = own_rows(forward.routed, rank, len(product.down_eDF))
        made(product.groups)
        left.append(replace(product, own_e2=own_e2, tiles=1))
    if make is not None:
        for rank, product in enumerate(left):
            product.groups.progress.zero_()
            left[rank] = replace(product, tiles=make(rank, product.groups))
    out = empty_out(forward)
    sums |= {"weighted": forward.row_weights is None, "addend": forward.addend}
    others_first(forward.exchange, rows, forward.routed, left, out, first=first, blocks=blocks, **sums)
    forward.exchange.check(synchronize=True)
    return out
