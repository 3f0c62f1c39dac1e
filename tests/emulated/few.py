"""A small dispatch and its experts in one launch, emulated or on a GPU, and what it stands for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from imbrex.kernels.exchange import layout as lay
from imbrex.kernels.exchange.exchange import NvlinkExchange, Routed
from imbrex.kernels.exchange.groups import RowGroups, empty_groups
from imbrex.kernels.ffn.both import shared_bytes
from imbrex.kernels.ffn.ffn import run_experts
from imbrex.kernels.ffn.glue import COUNTERS, Groups
from imbrex.kernels.fused.few import dispatch_and_experts
from imbrex.kernels.jit import Variant
from tests.emulated import kernel
from tests.emulated.gemm import Edits, EmulatedKernel
from tests.emulated.scenario import Case, Inputs, make_exchange, make_inputs


@dataclass(frozen=True, kw_only=True, slots=True)
class Few:
    """A small batch of virtual ranks, and the experts of each."""

    case: Case
    exchange: NvlinkExchange
    inputs: Inputs
    experts: list[tuple[Tensor, Tensor]]

    @property
    def tensors(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        inputs = self.inputs
        return inputs.x_WTD, inputs.ids_WTK, inputs.weights_WTK, inputs.tokens_W


def loader(case: Case, edits: Edits = (), limit: float = 60.0) -> Callable[..., Any]:
    """Stands in for `jit.load`; `edits` are those of the kernel of one launch."""

    def load(variant: Variant, device: Any = None) -> Any:
        if not variant.source.startswith("fused/"):
            return kernel.load(variant)
        return EmulatedKernel(variant, shared_of(case), None, edits, limit=limit)

    return load


def shared_of(case: Case) -> int:
    """Bytes of shared memory of a block."""
    exchange, slots = make_exchange(case, load=lambda *_: None), case.slots_of(0)
    few = min(exchange.shape.max_tokens, lay.SMALL_TOKENS)
    room = max(case.placement.num_slots - case.placement.num_experts, 0)
    return max(lay.small_shared(exchange.shape, few, room), shared_bytes(slots[1] - slots[0]))


def begin(case: Case, inner: int, **options: Any) -> Few:
    """Random tokens of `case`, whose experts have `inner` columns; every rank has as many slots."""
    device = options.pop("device", "cpu")
    exchange, inputs = make_exchange(case, device, **options), make_inputs(case, device)
    make = torch.Generator(device).manual_seed(case.seed)

    def draw(*size: int) -> Tensor:
        return (torch.randn(size, generator=make, device=device) * size[-1] ** -0.5).bfloat16()

    experts = []
    for rank in range(case.ranks):
        low, high = case.slots_of(rank)
        experts.append((draw(high - low, 2 * inner, case.width), draw(high - low, case.width, inner)))
    return Few(case=case, exchange=exchange, inputs=inputs, experts=experts)


Result = tuple[Tensor, Routed, RowGroups]


def apart(few: Few, sms: int = 3, *, one_launch: bool | None = False) -> Result:
    """The dispatch, then every rank's experts, in two launches or in one."""
    case, exchange = few.case, few.exchange
    slots, room = case.slots_of(0)[1], exchange.shape.row_capacity
    left = empty_groups(case.ranks, room, slots, COUNTERS, exchange.device)
    rows, routed = exchange.dispatch_small(*few.tensors[:3], sms, few.inputs.tokens_W, groups=left)
    exchange.check(synchronize=True)
    rows, results = rows.view(case.ranks, room, case.width), []
    for me in range(case.ranks):
        plan, hits, weights_R = (
            part.view(case.ranks, -1)[me] for part in (left.plan, left.hits, left.weights)
        )
        groups = Groups(plan, expected=max(1, max(case.tokens)), hits=hits, one_launch=one_launch)
        results.append(run_experts(rows[me], *few.experts[me], groups, weights_R))
    return torch.stack(results), routed, left


def together(few: Few, sms: int = 3) -> Result:
    """The same in one launch."""
    done = dispatch_and_experts(few.exchange, few.tensors, few.experts, sms)
    few.exchange.check(synchronize=True)
    return done[:3]


def summed(few: Few, results: Tensor, routed: Routed, **behind: int) -> Tensor:
    """Every token's sum [L, most tokens, D], zeros where a rank has fewer."""
    how: Any = {"weighted": False, **behind}
    y_LTD = few.exchange.combine(results.view(few.case.ranks, -1, few.case.width), routed, num_sms=2, **how)
    few.exchange.check(synchronize=True)
    for me, tokens in enumerate(few.case.tokens):
        y_LTD.view(few.case.ranks, -1, few.case.width)[me, tokens:] = 0
    return y_LTD


def differences(few: Few, one: Result, two: Result) -> list[str]:
    """What differs: rows that are there, where tokens go, weights of rows and numbers of them."""
    ranks, width = few.case.ranks, few.case.width
    fields = "position_LWTK", "recv_row_LWT", "send_row_LTW", "counts_Le", "totals_L4", "tokens_LW"
    found = [name for name in fields if not torch.equal(getattr(one[1], name), getattr(two[1], name))]
    for me in range(ranks):
        live = int(two[2].plan.view(ranks, -1)[me, -1])
        mine, other = (result[0].view(ranks, -1, width)[me, :live] for result in (one, two))
        if not torch.equal(mine.view(torch.int16), other.view(torch.int16)) or bool(mine.isnan().any()):
            found.append(f"rows of rank {me}")
        for name in ("counts", "plan", "hits"):
            parts = [getattr(result[2], name).view(ranks, -1)[me] for result in (one, two)]
            if name == "hits":  # the number of experts hit, and an entry for each and behind the last
                parts = [torch.cat([part[:1], part[2 : 4 + 2 * int(part[0])]]) for part in parts]
            if not torch.equal(*parts):
                found.append(f"{name} of rank {me}")
    return found
