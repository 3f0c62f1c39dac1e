"""One random exchange among virtual ranks, compared with `imbrex.exchange.plan` (positions) and with
sums in the same order.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from imbrex.codec.fp8 import Fp8
from imbrex.contracts import Placement, Plan
from imbrex.exchange import plan as oracle
from imbrex.kernels.exchange import layout as lay
from imbrex.kernels.exchange.exchange import NvlinkExchange, Routed
from imbrex.kernels.exchange.groups import RowGroups, empty_groups
from imbrex.kernels.heap import VirtualHeap
from imbrex.placement.flow import split_balanced
from imbrex.placement.split import split_evenly
from imbrex.transport.base import straight
from tests.emulated.float64 import check_against_float64
from tests.emulated.ragged import hits_of


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """What a scenario is made of; `tokens`: of every rank; `drop`: share of choices that are -1;
    `balanced`: replicas by the loads of the batch; `tensor`: ranks that share every expert."""

    placement: Placement
    tokens: tuple[int, ...]
    choices: int
    width: int = 64
    alignment: int = 1
    drop: float = 0.1
    skew: float = 0.0
    seed: int = 0
    balanced: bool = False
    tensor: int = 1

    @property
    def ranks(self) -> int:
        return self.placement.num_ranks * self.tensor

    def slots_of(self, rank: int) -> tuple[int, int]:
        """First slot of the rank, and the one behind its last."""
        owner = rank // self.tensor
        return self.placement.rank_offsets[owner], self.placement.rank_offsets[owner + 1]


@dataclass(frozen=True, kw_only=True, slots=True)
class Inputs:
    ids_WTK: Tensor
    weights_WTK: Tensor
    x_WTD: Tensor
    tokens_W: Tensor


def make_inputs(case: Case, device: torch.device | str = "cpu") -> Inputs:
    make = torch.Generator().manual_seed(case.seed)
    ranks, most = case.ranks, max(case.tokens)
    experts = case.placement.num_experts
    likely = torch.rand(ranks, most, experts, generator=make) + case.skew * torch.arange(experts) / experts
    ids = likely.topk(case.choices, dim=-1).indices
    ids[torch.rand(ids.shape, generator=make) < case.drop] = -1
    weights = torch.rand(ranks, most, case.choices, generator=make)
    x = torch.randn(ranks, most, case.width, generator=make).bfloat16()
    tokens = torch.tensor(case.tokens, dtype=torch.int32)
    return Inputs(
        ids_WTK=ids.to(device), weights_WTK=weights.to(device), x_WTD=x.to(device), tokens_W=tokens.to(device)
    )


def make_exchange(case: Case, device: torch.device | str = "cpu", **options: Any) -> NvlinkExchange:
    ranks, most = case.ranks, max(case.tokens)
    sizes = torch.tensor(case.placement.rank_offsets).diff().tolist()
    capacity = ranks * most * min(case.choices, max(sizes)) + max(sizes) * (case.alignment - 1)
    shape = lay.Shape(
        ranks=ranks,
        max_tokens=most,
        choices=case.choices,
        experts=case.placement.num_experts,
        most_slots=max(1, *sizes),
        row_bytes=2 * case.width,
        alignment=case.alignment,
        row_capacity=max(capacity, 1),
        token_capacity=max((ranks - 1) * most, 1),
        tensor=case.tensor,
    )
    return NvlinkExchange(lambda nbytes: VirtualHeap(ranks, nbytes, device), case.placement, shape, **options)


def route(case: Case, exchange: NvlinkExchange, inputs: Inputs, tally: Tensor | None = None) -> Routed:
    given = inputs.ids_WTK, inputs.weights_WTK, inputs.tokens_W
    return exchange.route(*given, tally=tally, balanced=case.balanced)


def make_plans(case: Case, inputs: Inputs) -> list[Plan]:
    """The plan of every rank, on the CPU, for their actual tokens."""
    ids = [inputs.ids_WTK[r, :t].cpu() for r, t in enumerate(case.tokens)]
    counts = torch.stack([oracle.count_choices(one, case.placement.num_experts) for one in ids])
    split = (split_balanced if case.balanced else split_evenly)(counts, case.placement)
    slots = [oracle.choose_slots(one, split[r], case.placement) for r, one in enumerate(ids)]
    wanted = [oracle.ranks_wanted(one, case.placement, case.tensor) for one in slots]
    rows = torch.stack([one.sum(0) for one in wanted])
    rows.fill_diagonal_(0)
    return [
        oracle.make_plan(
            slots[r],
            split,
            straight(wanted[r], rows, r),
            case.placement,
            r,
            tensor_size=case.tensor,
            alignment=case.alignment,
        )
        for r in range(case.ranks)
    ]


def sent_to(plan: Plan, rank: int) -> Tensor:
    """Tokens that the plan's rank sends to `rank`."""
    sends = plan.traffic.splits_2W[0].tolist()
    first = sum(sends[:rank])
    return plan.traffic.sent_tokens_N[first : first + sends[rank]]


def check_positions(case: Case, plans: list[Plan], routed: Routed) -> None:
    """Every integer the device computed, against the plans."""
    position, recv, send = (t.cpu() for t in (routed.position_LWTK, routed.recv_row_LWT, routed.send_row_LTW))
    for me in range(case.ranks):
        low, high = case.slots_of(me)
        counts = routed.counts_Le[me, : high - low].cpu()
        assert counts.tolist() == plans[me].counts_e.tolist()
        received = 0
        for source, plan in enumerate(plans):
            tokens = case.tokens[source]
            here = (plan.slot_TK >= low) & (plan.slot_TK < high)
            assert torch.equal(position[me, source, :tokens].long(), torch.where(here, plan.position_TK, -1))
            assert bool((position[me, source, tokens:] == -1).all())
            want = torch.full((tokens,), -1)
            if source != me:
                sent = sent_to(plan, me)
                want[sent] = torch.arange(received, received + len(sent))
                received += len(sent)
                assert torch.equal(send[source, :tokens, me].long(), want)
            else:
                assert torch.equal(send[me, :tokens, me] == 0, here.any(1))
            assert torch.equal(recv[me, source, :tokens].long(), want)
        assert routed.totals_L4[me].tolist() == [plans[me].num_rows, received, 0, 0]
        assert routed.tokens_LW[me].tolist() == list(case.tokens)


def compact_rows(case: Case, plans: list[Plan], inputs: Inputs, me: int) -> Tensor:
    """What rank `me` receives."""
    rows = []
    for source, plan in enumerate(plans):
        rows.append(inputs.x_WTD[source].cpu()[sent_to(plan, me)])
    return torch.cat(rows)


def rows_at(case: Case, plans: list[Plan], me: int, per_choice: Callable[[int], Tensor]) -> Tensor:
    """Expert-major rows of rank `me`; `per_choice(source)` gives [T, K, ...]; unset rows are zero."""
    low, high = case.slots_of(me)
    out = None
    for source, plan in enumerate(plans):
        values = per_choice(source)
        if out is None:
            out = values.new_zeros(max(plans[me].num_rows, 1), *values.shape[2:])
        here = (plan.slot_TK >= low) & (plan.slot_TK < high)
        out[plan.position_TK[here]] = values[here]
    assert out is not None
    return out


def add_rows(total_TD: Tensor, weight_T: Tensor, rows_TD: Tensor) -> Tensor:
    """One fused multiply-add: float32 rounding of the exact float64 step."""
    return (total_TD.double() + weight_T.double()[:, None] * rows_TD.double()).float()


def through_wire(partial_TD: Tensor, wire: str) -> Tensor:
    """A rank's sums as they arrive, float32: rounded to bf16, or those as rows of the fp8 codec."""
    rounded = partial_TD.bfloat16()
    if wire == "bf16" or not len(rounded):
        return rounded.float()
    codec = Fp8.e4m3()
    return codec.decode(codec.encode(rounded, torch.bfloat16), rounded.shape[1], torch.float32)


def combined(
    case: Case, plans: list[Plan], inputs: Inputs, rows_WRD: list[Tensor], weighted: bool, wire: str = "bf16"
) -> Tensor:
    """float32 [W, T, D]: sums on the other ranks as the wire rounds them, and the own rows, in the order of
    the ranks.
    """
    out = torch.zeros(case.ranks, max(case.tokens), case.width)
    for home, plan in enumerate(plans):
        gates_TK = inputs.weights_WTK[home, : case.tokens[home]].cpu()
        if not weighted:
            gates_TK = torch.ones_like(gates_TK)
        total_TD = out[home, : case.tokens[home]]
        for rank in range(case.ranks):
            low, high = case.slots_of(rank)
            here_TK = (plan.slot_TK >= low) & (plan.slot_TK < high)
            sums_TD = total_TD if rank == home else torch.zeros_like(total_TD)
            for k in range(case.choices):
                mine = here_TK[:, k]
                rows = rows_WRD[rank][plan.position_TK[mine, k]]
                sums_TD[mine] = add_rows(sums_TD[mine], gates_TK[mine, k], rows)
            if rank != home:
                sent = here_TK.any(1)
                total_TD[sent] += through_wire(sums_TD[sent], wire)
    return out


def check_exchange(
    case: Case, exchange: NvlinkExchange, device: torch.device | str = "cpu", sms: int = 2
) -> None:
    """Route, push, pull, combine once; every row to the bit."""
    inputs = make_inputs(case, device)
    plans = make_plans(case, inputs)
    routed = route(case, exchange, inputs)
    exchange.check(synchronize=True)
    check_positions(case, plans, routed)

    received = exchange.push(inputs.x_WTD, routed, num_sms=sms, tokens=inputs.tokens_W).rows
    rows = exchange.pull(inputs.x_WTD, routed, num_sms=sms)
    exchange.check(synchronize=True)
    expert_rows = []
    for me in range(case.ranks):
        want = compact_rows(case, plans, inputs, me)
        assert torch.equal(received[me, : len(want)].cpu(), want)
        x = [inputs.x_WTD[s, :t, None].cpu().expand(-1, case.choices, -1) for s, t in enumerate(case.tokens)]
        expert_rows.append(rows_at(case, plans, me, x.__getitem__))
        filled = rows_at(
            case, plans, me, lambda s: torch.ones(case.tokens[s], case.choices, dtype=torch.bool)
        )
        assert torch.equal(rows[me, : len(filled)].cpu()[filled], expert_rows[me][filled])
    check_combine(case, plans, exchange, inputs, routed, torch.full_like(rows, float("nan")), sms)
    check_compact_combine(case, plans, exchange, inputs, routed, device, sms)


def check_combine(
    case: Case,
    plans: list[Plan],
    exchange: NvlinkExchange,
    inputs: Inputs,
    routed: Routed,
    given: Tensor,
    sms: int,
) -> None:
    """Random rows in `given`, summed with and without the gate weights."""
    outputs = []
    for me, plan in enumerate(plans):
        make = torch.Generator().manual_seed(me)
        outputs.append(torch.randn(max(plan.num_rows, 1), case.width, generator=make).bfloat16())
        given[me, : len(outputs[me])] = outputs[me].to(given.device)
    wires = ["bf16", "bf16"] + ["fp8"] * (case.width % 256 == 0)
    for weighted, wire in zip((True, False, True), wires, strict=False):
        dtype = torch.bfloat16 if weighted else torch.float32
        numbers = torch.randn(given.shape[:2], generator=torch.Generator().manual_seed(int(weighted)))
        home = torch.full(inputs.weights_WTK.shape, float("nan"), device=given.device)
        y = exchange.combine(
            given,
            routed,
            weighted=weighted,
            num_sms=sms,
            wire=wire,
            out_dtype=dtype,
            values=(numbers.to(given.device), home),
        )
        exchange.check(synchronize=True)
        check_numbers(case, plans, numbers, home.cpu())
        want = combined(case, plans, inputs, outputs, weighted, wire).to(dtype)
        for me, tokens in enumerate(case.tokens):
            assert torch.equal(y.view(want.shape)[me, :tokens].cpu(), want[me, :tokens])
        if wire == "bf16":
            check_against_float64(case, plans, inputs, outputs, weighted, want)


def check_numbers(case: Case, plans: list[Plan], given_WR: Tensor, home_WTK: Tensor) -> None:
    """Every choice has its row's number; where ranks share an expert, their sum in the order of the ranks."""
    for home, plan in enumerate(plans):
        want_TK = torch.zeros(plan.slot_TK.shape)
        for rank in range(case.ranks):
            low, high = case.slots_of(rank)
            here_TK = (plan.slot_TK >= low) & (plan.slot_TK < high)
            want_TK[here_TK] += given_WR[rank][plan.position_TK[here_TK]]
        assert torch.equal(home_WTK[home, : case.tokens[home]], want_TK)


def check_compact_combine(
    case: Case,
    plans: list[Plan],
    exchange: NvlinkExchange,
    inputs: Inputs,
    routed: Routed,
    device: torch.device | str,
    sms: int,
) -> None:
    """Every rank returns the rows it received, plus its own token where it wants itself, plus an addend."""
    reduced = exchange.reduced_rows(case.width)
    for me in range(case.ranks):
        rows = compact_rows(case, plans, inputs, me)
        reduced[me, : len(rows)] = rows.to(device)
    y = exchange.combine_compact(inputs.x_WTD, routed, addend=-inputs.x_WTD, num_sms=sms)
    y = y.view(inputs.x_WTD.shape)
    exchange.check(synchronize=True)
    for me, tokens in enumerate(case.tokens):
        times = oracle.ranks_wanted(plans[me].slot_TK, case.placement, case.tensor).sum(1)
        x = inputs.x_WTD[me, :tokens].cpu().float()
        assert torch.equal(y[me, :tokens].cpu(), ((times[:, None] - 1) * x).bfloat16())


def check_quantised(
    case: Case, exchange: NvlinkExchange, device: torch.device | str = "cpu", sms: int = 2
) -> None:
    """Rows that cross as fp8 are what the codec writes, bit for bit; awkward values among them."""
    inputs = make_inputs(case, device)
    blocks = inputs.x_WTD.view(case.ranks, -1, case.width // 128, 128)
    blocks.mul_(
        10.0 ** torch.arange(-20, 20).float()[torch.arange(blocks.shape[1]) % 40, None, None].to(device)
    )
    blocks[:, 0, 0] = 0
    blocks[:, 0, 1] *= -0.0
    blocks[:, 0, 2, 5] = float("inf")
    blocks[:, 0, 3, 7] = float("nan")
    blocks[:, 1, 0, :64] = 0
    blocks[:, 1, 1] = 2.0**-130
    plans = make_plans(case, inputs)
    routed = route(case, exchange, inputs)
    received = exchange.push(inputs.x_WTD, routed, num_sms=sms, tokens=inputs.tokens_W, quantise=True).rows
    exchange.check(synchronize=True)
    for me in range(case.ranks):
        want = Fp8.e4m3().encode(compact_rows(case, plans, inputs, me), torch.bfloat16)
        assert torch.equal(received[me, : len(want)].cpu(), want)


def check_dispatch(
    case: Case, exchange: NvlinkExchange, device: torch.device | str = "cpu", sms: int = 2
) -> None:
    """Routing beside the push: the integers of the one and the rows of the other, as they are and as fp8."""
    inputs = make_inputs(case, device)
    plans = make_plans(case, inputs)
    given = inputs.x_WTD, inputs.ids_WTK, inputs.weights_WTK, sms, inputs.tokens_W
    for quantise in (False, True) if case.width % 512 == 0 else (False,):
        lease, routed = exchange.dispatch(*given, balanced=case.balanced, quantise=quantise)
        exchange.check(synchronize=True)
        check_positions(case, plans, routed)
        for me, tokens in enumerate(case.tokens):
            want = compact_rows(case, plans, inputs, me)
            if quantise:
                want = Fp8.e4m3().encode(want, torch.bfloat16)
            assert torch.equal(lease.rows[me, : len(want)].cpu(), want)
            weights = routed.weights_LWTK[:, me, :tokens].cpu()
            assert torch.equal(weights, inputs.weights_WTK[me, :tokens].cpu().expand_as(weights))


def check_groups(groups: RowGroups, routed: Routed, me: int) -> None:
    """What a small dispatch writes for the experts, from what it writes for the exchange."""
    counts, (position, weights) = routed.counts_Le[me], (routed.position_LWTK[me], routed.weights_LWTK[me])
    own = RowGroups(*(part if len(routed.counts_Le) == 1 else part[me] for part in groups))
    assert own.counts.tolist() == counts.tolist()
    assert own.plan.tolist() == [0] * 12 + counts.cumsum(0).tolist()
    wanted = hits_of(counts.tolist())
    told = (wanted != -7).nonzero().flatten()
    assert torch.equal(own.hits.cpu()[told], wanted[told])
    here = position >= 0
    assert torch.equal(own.weights[position[here].long()], weights[here])


def check_small(
    case: Case,
    exchange: NvlinkExchange,
    device: torch.device | str = "cpu",
    sms: int = 2,
    *,
    large: bool = False,
) -> None:
    """Dispatch in one kernel, `large`: of any number of tokens, and the combine of its rows: positions and
    bits of the two kernels.
    """
    inputs = make_inputs(case, device)
    plans = make_plans(case, inputs)
    dispatch = exchange.dispatch_expert if large else exchange.dispatch_small
    given = inputs.x_WTD, inputs.ids_WTK, inputs.weights_WTK, sms, inputs.tokens_W
    groups: RowGroups | None = None
    more: dict[str, Any] = {}
    if not large:
        slots = exchange.shape.most_slots
        groups = empty_groups(exchange.local_ranks, exchange.shape.row_capacity, slots, 12, exchange.device)
        more = {"groups": groups}
    rows, routed = dispatch(*given, balanced=case.balanced, **more)
    exchange.check(synchronize=True)
    check_positions(case, plans, routed)
    for me in range(case.ranks):
        if groups is not None:
            check_groups(groups, routed, me)
        x = [inputs.x_WTD[s, :t, None].cpu().expand(-1, case.choices, -1) for s, t in enumerate(case.tokens)]
        filled = rows_at(
            case, plans, me, lambda s: torch.ones(case.tokens[s], case.choices, dtype=torch.bool)
        )
        assert torch.equal(
            rows[me, : len(filled)].cpu()[filled], rows_at(case, plans, me, x.__getitem__)[filled]
        )
    check_combine(case, plans, exchange, inputs, routed, torch.full_like(rows, float("nan")), sms)
