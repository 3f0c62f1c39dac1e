"""Down and the sums home in one launch, emulated or on a GPU, and the two launches that it stands for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from imbrex.kernels.exchange.exchange import NvlinkExchange, Routed
from imbrex.kernels.ffn.ffn import LeftProduct
from imbrex.kernels.ffn.glue import COUNTERS, Groups
from imbrex.kernels.fused.down_home import How, down_and_sums
from tests.emulated.scenario import Case, make_exchange, make_inputs, route


@dataclass(frozen=True, kw_only=True, slots=True)
class Forward:
    """What a forward has when the last product is left, on all virtual ranks."""

    case: Case
    exchange: NvlinkExchange
    routed: Routed
    acts: list[Tensor]
    weights: list[Tensor]
    row_weights: Tensor | None
    addend: Tensor | None


def begin(case: Case, inner: int, *, applied: bool = True, addend: bool = False, **options: Any) -> Forward:
    """Random rows of `case`, whose experts have `inner` columns. applied: the product applies the weights,
    else the sums do."""
    device = options.pop("device", "cpu")
    exchange, inputs = make_exchange(case, device, **options), make_inputs(case, device)
    routed = route(case, exchange, inputs)
    make = torch.Generator(device).manual_seed(case.seed)
    rows = exchange.shape.row_capacity

    def draw(*size: int) -> Tensor:
        return torch.randn(size, generator=make, device=device).bfloat16()

    acts, weights = [], []
    for rank in range(case.ranks):
        low, high = case.slots_of(rank)
        acts.append(draw(rows, inner))
        weights.append(draw(high - low, case.width, inner))
    by_row = torch.rand(case.ranks, rows, generator=make, device=device) if applied else None
    more = draw(*inputs.x_WTD.shape) if addend else None
    return Forward(
        case=case,
        exchange=exchange,
        routed=routed,
        acts=acts,
        weights=weights,
        row_weights=by_row,
        addend=more,
    )


def products_of(forward: Forward) -> tuple[Tensor, list[LeftProduct]]:
    """Rows that nobody has written, and what writes them."""
    shape = forward.exchange.shape
    device = forward.acts[0].device
    size = forward.case.ranks, shape.row_capacity, forward.case.width
    rows = torch.full(size, float("nan"), dtype=torch.bfloat16, device=device)
    products = []
    for rank, (act, weight) in enumerate(zip(forward.acts, forward.weights, strict=True)):
        ends = forward.routed.counts_Le[rank, : len(weight)].cumsum(0).int()
        groups = Groups(plan=torch.cat([ends.new_zeros(COUNTERS), ends]))
        weights_R = None if forward.row_weights is None else forward.row_weights[rank]
        products.append(
            LeftProduct(act_RF=act, down_eDF=weight, groups=groups, out_RD=rows[rank], weights_R=weights_R)
        )
    return rows, products


def empty_out(forward: Forward) -> Tensor:
    size = forward.case.ranks, max(forward.case.tokens), forward.case.width
    return torch.full(size, float("nan"), dtype=torch.bfloat16, device=forward.acts[0].device)


def apart(forward: Forward, sms: int = 2, pieces: tuple[int, int, int] | None = None) -> Tensor:
    """The products, then the sums."""
    rows, products = products_of(forward)
    for product in products:
        if len(product.down_eDF):
            product()
    out, weighted = empty_out(forward), forward.row_weights is None
    more = {"addend": forward.addend, "num_sms": sms, "out": out, "pieces": pieces}
    forward.exchange.combine(rows, forward.routed, weighted=weighted, **more)
    forward.exchange.check(synchronize=True)
    return out


def together(forward: Forward, **options: Any) -> Tensor:
    """The same in one launch."""
    rows, products = products_of(forward)
    out, weighted = empty_out(forward), forward.row_weights is None
    more = {"weighted": weighted, "addend": forward.addend, "how": How(**options)}
    down_and_sums(forward.exchange, rows, forward.routed, products, out, **more)
    forward.exchange.check(synchronize=True)
    return out


def differences(case: Case, found: Tensor, wanted: Tensor) -> list[str]:
    """Ranks whose tokens have other bits, or are no numbers."""
    return [
        f"rank {rank}"
        for rank, tokens in enumerate(case.tokens)
        if not torch.equal(found[rank, :tokens], wanted[rank, :tokens])
        or bool(found[rank, :tokens].isnan().any())
    ]
