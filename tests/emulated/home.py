"""dx home beside the weights' gradients, emulated or on a GPU, and the three launches that it stands for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from imbrex.kernels.exchange.exchange import NvlinkExchange, Routed
from imbrex.kernels.ffn.ffn import LeftGradient
from imbrex.kernels.ffn.glue import COUNTERS, Groups
from imbrex.kernels.fused.home import home_beside_gradients
from imbrex.kernels.jit import Variant
from tests.emulated import kernel
from tests.emulated.gemm import Edits, EmulatedKernel
from tests.emulated.scenario import Case, make_exchange, make_inputs, route


@dataclass(frozen=True, kw_only=True, slots=True)
class Backward:
    """What a backward has when dx goes home, on all virtual ranks."""

    exchange: NvlinkExchange
    routed: Routed
    d_rows: Tensor
    numbers: Tensor
    pairs: list[tuple[LeftGradient, LeftGradient]]
    like: tuple[Tensor, Tensor]


def loader(edits: Edits = (), limit: float = 60.0) -> Callable[..., Any]:
    """Stands in for `jit.load`; `edits` are those of the fused kernel."""

    def load(variant: Variant, device: Any = None) -> Any:
        if not variant.source.startswith("fused/"):
            return kernel.load(variant)
        defines = dict(variant.defines)
        if "GROUPS" not in defines:  # no product
            return EmulatedKernel(variant, 0, None, edits, limit=limit)
        groups = int(defines["GROUPS"])
        rows = 64 * (int(defines["BLOCKS_M"]) if int(defines["PINGPONG"]) else groups)
        shared = 1024 + int(defines["STAGES"]) * 128 * (rows + int(defines["BLOCK_N"]))
        shared += groups * int(defines["PANELS"]) * 8192
        return EmulatedKernel(variant, shared, None, edits, limit=limit)

    return load


def begin(case: Case, inner: int, add: torch.dtype | None = None, **options: Any) -> Backward:
    """Random rows of `case`, whose experts have `inner` columns; gradients are added to tensors of `add`."""
    device = options.pop("device", "cpu")
    exchange, inputs = make_exchange(case, device, **options), make_inputs(case, device)
    routed = route(case, exchange, inputs)
    make = torch.Generator(device).manual_seed(case.seed)
    ranks, rows, width = case.ranks, exchange.shape.row_capacity, case.width

    def draw(*size: int) -> Tensor:
        return torch.randn(size, generator=make, device=device).bfloat16()

    pairs = []
    for counts_e in routed.counts_Le:
        ends = counts_e.cumsum(0).int()
        groups = Groups(plan=torch.cat([ends.new_zeros(COUNTERS), ends]))
        parts = (draw(rows, width), draw(rows, inner)), (draw(rows, 2 * inner), draw(rows, width))
        pair = []
        for d_out, given in parts:
            weight = torch.empty(
                len(ends), d_out.shape[1], given.shape[1], dtype=torch.bfloat16, device=device
            )
            add_to = None if add is None else draw(*weight.shape).to(add)
            pair.append(LeftGradient(d_out=d_out, rows=given, groups=groups, weight=weight, add_to=add_to))
        pairs.append(tuple(pair))
    numbers = torch.randn(ranks, rows, generator=make, device=device)
    like = inputs.x_WTD, inputs.weights_WTK
    given = {"routed": routed, "d_rows": draw(ranks, rows, width), "numbers": numbers, "pairs": pairs}
    return Backward(exchange=exchange, like=like, **given)


def _outputs(backward: Backward) -> tuple[Tensor, Tensor]:
    x_WTD, weights_WTK = (torch.full_like(tensor, float("nan")) for tensor in backward.like)
    return x_WTD, weights_WTK


def apart(backward: Backward, sms: int = 2, wire: str = "bf16") -> list[Tensor]:
    """dx, the gate weights' gradients and all weights' gradients, one launch after the other."""
    out, home = _outputs(backward)
    values = backward.numbers, home
    exchange, routed = backward.exchange, backward.routed
    sums = {"weighted": False, "values": values, "wire": wire}
    exchange.combine(backward.d_rows, routed, num_sms=sms, out=out, **sums)
    exchange.check(synchronize=True)
    results = [out, home]
    for pair in backward.pairs:
        for gradient in pair:
            total = None if gradient.add_to is None else gradient.add_to.clone()
            made = replace(gradient, add_to=None)(total)
            assert made is not None
            results.append(made)
    return results


def beside(
    backward: Backward, first_blocks: int, blocks: int | None = None, wire: str = "bf16"
) -> list[Tensor]:
    """The same in one launch."""
    out, home = _outputs(backward)
    pairs = [tuple(_apart_from(gradient) for gradient in pair) for pair in backward.pairs]
    made = home_beside_gradients(
        backward.exchange,
        backward.d_rows,
        backward.routed,
        {"values": (backward.numbers, home), "wire": wire},
        out,
        pairs,  # pyright: ignore[reportArgumentType]
        first_blocks=first_blocks,
        blocks=blocks,
    )
    backward.exchange.check(synchronize=True)
    return [out, home, *(gradient for pair in made for gradient in pair)]


def _apart_from(gradient: LeftGradient) -> LeftGradient:
    return gradient if gradient.add_to is None else replace(gradient, add_to=gradient.add_to.clone())


def differences(case: Case, found: list[Tensor], wanted: list[Tensor]) -> list[str]:
    """Names of what has other bits, or is no number."""
    wrong = []
    for rank, tokens in enumerate(case.tokens):
        for name, at in (("dx", 0), ("values", 1)):
            if not _same(found[at][rank, :tokens], wanted[at][rank, :tokens]):
                wrong.append(f"{name} of rank {rank}")
    for at in range(2, len(wanted)):
        if not _same(found[at], wanted[at]):
            wrong.append(f"gradient {(at - 2) % 2} of rank {(at - 2) // 2}")
    return wrong


def _same(found: Tensor, wanted: Tensor) -> bool:
    return torch.equal(found, wanted) and not bool(found.isnan().any())
