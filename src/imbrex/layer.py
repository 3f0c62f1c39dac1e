"""The expert-parallel Mixture-of-Experts layer. Read this first.

    x_TD ─router▶ Routing ─exchange.dispatch▶ rows_RD ─experts▶ rows_RD ─exchange.combine▶ y_TD

The exchange tells every rank how many tokens want each expert, chooses replicas, plans the position of every
row, encodes rows and moves them. The strategy decides when these steps run.

Read on in this order: `router/router.py` chooses the experts of a token; `overlap/serial.py` runs the steps
one after the other; `exchange/exchange.py` dispatches and combines, by one of the dispatchers beside it
(`bytes.py`, `nvlink.py`, `tiered.py`, `alone.py`); `experts/experts.py` computes. The values that pass
between them, and the protocols, are in `contracts`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from copy import deepcopy
from dataclasses import dataclass, field, fields, replace
from types import NoneType
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from imbrex import guards, overlap
from imbrex.balancer import OnlineBalancer
from imbrex.contracts import (
    Backend,
    Codec,
    Heralding,
    Output,
    Placement,
    Routing,
    RowForm,
    Split,
    Strategy,
    Wire,
)
from imbrex.exchange import plan
from imbrex.exchange.agreement import DTYPES, agree, is_plain, raise_in_data_group
from imbrex.exchange.autograd import check_in_op
from imbrex.exchange.exchange import Exchange
from imbrex.experts.experts import Activation, Experts, Shard
from imbrex.experts.shared import SharedExpert, gated
from imbrex.observe import Observer
from imbrex.placement import contiguous, split_evenly
from imbrex.ranks import Ranks, refuse_ddp, refuse_meta, refuse_sharded
from imbrex.router.gates import Gate
from imbrex.router.global_batch import GlobalBatch
from imbrex.router.losses import AuxLosses
from imbrex.router.router import Router
from imbrex.runtime.checks import expect, piece
from imbrex.runtime.gradients import scale_gradient
from imbrex.runtime.members import member
from imbrex.runtime.tracing import autocast_on
from imbrex.runtime.words import words
from imbrex.schedule.schedulers import Scheduler
from imbrex.transport import Auto


def _expect_size(what: str, name: str, value: int) -> None:
    expect(f"{what}: {name}", value, (int,), "give a whole number")
    if value < 1:
        raise ValueError(f"{what}: {name} is {value}; it must be at least 1")


@dataclass(frozen=True, kw_only=True, slots=True)
class SharedExperts:
    """Experts that every token visits.

    intermediate_size: the sum of their widths. gated: multiply their output by
        sigmoid(x @ shared_expert_gate), as in Qwen2-MoE.
    """

    intermediate_size: int
    gated: bool = False

    def __post_init__(self) -> None:
        _expect_size("SharedExperts", "intermediate_size", self.intermediate_size)


@dataclass(frozen=True, kw_only=True, slots=True)
class MoEConfig:
    """The sizes and the gate of a layer: what it computes, not how.

    hidden_size: D. intermediate_size: F, of one expert. num_experts: E. top_k: K.
    gate: how a token chooses experts. activation: `swiglu` or `gelu`. bias: whether experts have biases.
    shared: experts that every token visits, or `None`.
    """

    hidden_size: int
    intermediate_size: int
    num_experts: int
    top_k: int
    gate: Gate = field(default_factory=Gate)
    activation: Activation = "swiglu"
    bias: bool = False
    shared: SharedExperts | None = None

    def __post_init__(self) -> None:
        for name in ("hidden_size", "intermediate_size", "num_experts", "top_k"):
            _expect_size("MoEConfig", name, getattr(self, name))
        expect("MoEConfig: gate", self.gate, (Gate,), "give an object, as in Gate(score='sigmoid')")
        expect("MoEConfig: shared", self.shared, (SharedExperts, NoneType), "give SharedExperts(...)")
        self.gate.check(self.num_experts, self.top_k)


class MoELayer(nn.Module):
    """A Mixture-of-Experts layer whose experts live on the ranks of a process group.

    config: what it computes. group: the ranks it is spread over, a process group or a DeviceMesh with a
        dimension `ep` and optionally `tp` and `dp`; `None` is one process alone.
    tensor_parallel: how many ranks share an expert, each with a piece of its width F; divides the group.
    data_group: the ranks that hold the same experts in other expert-parallel groups.
    transport, codec, schedule, experts: a name or your own object; `auto` picks, and `reasons` says why. Your
        own experts are a module that keeps the contract `imbrex.contracts.Experts`, built for this rank's
        slots.
    losses: coefficients of the auxiliary losses, which `imbrex.aux_loss(model)` collects.
    placement: where the experts live (default: contiguous). split: how choices are shared among replicas:
        `even`, `balanced`, `nearest` or a function. balancer: renews the placement while the model runs.
    observer, layer: the observer that hears what happens, and the layer's number in its records.
    timeout: as in `Exchange`.
    device, dtype: of the parameters (torch's defaults); `auto` expects tokens of this dtype.

    Losses and expert capacity count the tokens of all ranks. The backward differentiates the sum of all
    ranks' losses; `imbrex.sync_gradients(model)` turns that into the mean that data parallelism uses.
    With `transport="allreduce"` the tokens, and the loss, are the same on every rank of the group.
    """

    is_copy = False
    """Whether `copy.deepcopy` made this layer: it is of no use once the original's experts have moved."""
    shares_exchange = False
    """Whether another layer, a copy of this one or its original, uses the same exchange."""
    mean_over = 1
    """A power of two by which the experts' gradients are divided; `imbrex.parallel.backward` sets it."""
    backward_sync: Any = None
    """The `BackwardSync` that sums gradients while the backward runs; `imbrex.parallel.backward` sets it."""

    def __init__(
        self,
        config: MoEConfig,
        group: dist.ProcessGroup | DeviceMesh | None = None,
        *,
        tensor_parallel: int = 1,
        data_group: dist.ProcessGroup | None = None,
        transport: str | Backend | Auto = "auto",
        codec: str | Codec | Wire | Mapping[str, str | Codec] = "identity",
        schedule: str | Strategy | Scheduler = "serial",
        experts: str | nn.Module = "auto",
        losses: AuxLosses | None = None,
        placement: Placement | None = None,
        split: str | Split = split_evenly,
        balancer: OnlineBalancer | None = None,
        observer: Observer | None = None,
        layer: int = 0,
        timeout: float | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        _check_given(config, losses=losses, placement=placement, balancer=balancer, dtype=dtype)
        expect("MoELayer: observer", observer, (Observer, NoneType), "give an object, as Recorder()")
        expect("MoELayer: layer", layer, (int,), "give its number")
        self.config = config
        self.ranks = Ranks.of(group, tensor_parallel, data_group)
        self.placement = placement or contiguous(config.num_experts, self.ranks.expert_size)
        self.strategy = overlap.make(schedule)
        self.exchange = Exchange(
            self.placement,
            config.hidden_size,
            config.top_k,
            group=self.ranks.group,
            tensor_parallel=self.ranks.tensor_size,
            transport=transport,
            codec=codec,
            split=split,
            rows_per_slot=self._rows_per_slot(),
            dtype=dtype or torch.get_default_dtype(),
            timeout=timeout,
            observer=observer,
            layer=layer,
        )
        # Ranks that start their moves in different ways would wait for each other forever.
        agree(self.exchange.transport, self._settings(losses, dtype), "MoELayer")
        self.token_groups = self.ranks.token_groups(replicated=self.exchange.transport.replicated)
        kind = {"device": device, "dtype": dtype}
        self.gate = Router(
            config.hidden_size,
            config.num_experts,
            config.top_k,
            gate=config.gate,
            losses=losses,
            batch=GlobalBatch(self.token_groups),
            **kind,
        )
        self.experts = self._make_experts(experts, kind)
        self._add_shared(config, kind)
        self.routing: Routing | None = None
        self._begin(balancer)

    def forward(self, x: Tensor, *, kept_TK: Tensor | None = None) -> Tensor:
        """x [..., D] to y of the same shape and dtype. If x is [B, S, D], the sequence-level loss counts B
        sequences. `self.routing` becomes the routing of this call, with differentiable losses.

        kept_TK: bool [T, K]; keep exactly these choices, as recorded in `routing.kept_TK`.
        """
        if not isinstance(x, Tensor):
            self._refuse_no_tensor(x)
        if autocast_on(x):
            x = x.to(torch.get_autocast_dtype(x.device.type))
        compiling = torch.compiler.is_compiling()
        gate, experts = member(self, "gate"), member(self, "experts")
        # One rank's wrong input is every rank's error, before any of them waits for rows.
        if not compiling:
            self._check(x, kept_TK, together=gate.is_collective)
        is_flat = x.dim() == 2
        x_TD = x if is_flat else x.reshape(-1, x.shape[-1])
        num_sequences = max(x.shape[0], 1) if x.dim() == 3 else 1
        after = self._check_in_traced(x_TD) if compiling else None
        route = self._route_observed if self.exchange.dispatcher.observer.enabled else gate
        routing = route(x_TD, num_sequences=num_sequences, kept_TK=kept_TK, after=after)
        # When the shared experts run is the strategy's choice.
        shared = None if self.shared_expert is None else lambda: self._shared_output(x_TD)
        if self.mean_over > 1 and torch.is_grad_enabled():
            output = self._run_for_mean(x_TD, routing, shared)
        else:
            output = self.strategy.run(x_TD, routing, self.exchange, experts, shared)
        if output.kept_TK is not None:
            routing = routing.keep(output.kept_TK)
        # nn.Module.__setattr__ would look for parameters and buffers first, in ten calls.
        object.__setattr__(self, "routing", routing)
        y_TD = output.y_TD
        if y_TD.dtype is not x_TD.dtype:  # of somebody's own experts
            y_TD = y_TD.to(x_TD.dtype)
        return y_TD if is_flat else y_TD.view_as(x)

    def _route_observed(self, x_TD: Tensor, **how: Any) -> Routing:
        """The gate's routing, with a span, and counters of what it says."""
        observer, number = self.exchange.observer, self.exchange.layer
        with observer.span("route", layer=number):
            routing: Routing = self.gate(x_TD, **how)
        if routing.kept_TK is not None:
            observer.count("drops", (~routing.kept_TK).sum(), layer=number)
        if observer.co_activation:
            pairs_EE = plan.count_pairs(routing.ids_TK, self.config.num_experts)
            observer.count("co_activation", pairs_EE, layer=number)
        return routing

    def _run_for_mean(self, x_TD: Tensor, routing: Routing, shared: Callable[[], Tensor] | None) -> Output:
        """Run the strategy so that gradients are divided by `mean_over` before the experts' backward and
        multiplied by it after. That is exact for powers of two, and takes two passes over tokens in place of
        one over the gradients of all experts."""
        over = float(self.mean_over)
        weighted = replace(routing, weights_TK=scale_gradient(routing.weights_TK, over))
        addend = None if shared is None else lambda: scale_gradient(shared(), over)
        run = self.strategy.run(scale_gradient(x_TD, over), weighted, self.exchange, self.experts, addend)
        return replace(run, y_TD=scale_gradient(run.y_TD, 1 / over))

    def aux_loss(self) -> Tensor | float:
        """The sum of the auxiliary losses of the last call, each times its coefficient."""
        if self.routing is None:
            return 0.0
        total = self.gate.losses.total(self.routing.losses)
        if self.training and self.routing.losses and not torch.compiler.is_compiling():
            guards.look_at_losses(total, self.gate.weight)
        return total

    @property
    def reasons(self) -> dict[str, str]:
        """The transport, schedule and experts that were chosen, and why."""
        exchange, experts = self.exchange, self.experts
        transport, dispatcher = exchange.transport, exchange.dispatcher
        about = f"{type(experts).__name__}: given by the caller"
        if isinstance(experts, Experts):
            about = f"{experts.implementation}: {experts.implementation_reason}{self._about_experts()}"
        return {
            "transport": f"{transport.name}: {exchange.transport_reason}{dispatcher.about_rows}",
            "schedule": f"{self.strategy.name}: {self.strategy.reason(exchange, experts)}",
            "experts": about + dispatcher.about_whole(experts, self.strategy.name),
        }

    def _about_experts(self) -> str:
        """A clause of `reasons` about experts: in fp8, whether rows arrive in fp8; in bf16 by kernels over
        NVLink, how many launches compute a small batch."""
        if self.experts.implementation == "kernels" and self.exchange.transport.name == "nvlink":
            ways = {
                None: "one launch or two, whichever is faster for its rows and weights",
                True: "one launch: asked for",
                False: "two launches: asked for",
            }
            return f"; products of a small batch in {ways[self.experts.one_launch]}"
        if self.experts.implementation != "kernels-fp8":
            return ""
        reason = self.exchange.dispatcher.why_not_form(RowForm.FP8)
        return "; rows come in fp8" if reason is None else f"; rows are quantised here: {reason}"

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draw all parameters as construction does, for a layer that was made on the device `meta`, after
        `to_empty`. Collective. Your own experts must draw theirs themselves."""
        self.gate.reset_parameters()
        for module in (self.shared_expert, self.shared_expert_gate):
            for linear in () if module is None else module.modules():
                if isinstance(linear, nn.Linear):
                    linear.reset_parameters()
        if isinstance(self.experts, Experts):
            self.experts.reset_parameters(self.ranks.agree_on_seed())
        self._share_parameters()

    def __deepcopy__(self, memo: dict[int, object]) -> MoELayer:
        """Copy the layer, as for an average of weights: its own parameters, the same ranks and exchange, no
        routing yet. The copy is only good for the placement that the original has now."""
        for shared in (self.ranks, self.strategy, self.token_groups):
            memo[id(shared)] = shared
        memo[id(self.routing)] = memo[id(self.backward_sync)] = None
        copied = memo[id(self)] = type(self).__new__(type(self))
        copied.__setstate__(deepcopy(self.__dict__, memo))
        copied.is_copy = copied.shares_exchange = self.shares_exchange = True
        guards.watch(copied)
        return copied

    def __copy__(self) -> MoELayer:
        """Make another object for the same layer: it shares parameters, ranks and exchange."""
        copied = type(self).__new__(type(self))
        copied.__dict__.update(self.__dict__)
        return copied

    def __reduce_ex__(self, protocol: object) -> str:
        """Refuse pickle, as the exchange does, before torch fails on a process group."""
        return self.exchange.__reduce_ex__(protocol)

    def check(self, *, synchronize: bool = False) -> None:
        """Raise if a call has failed on the device; see `Exchange.check`."""
        self.exchange.check(synchronize=synchronize)

    def close(self) -> None:
        """Free what the exchange holds. The layer cannot be used afterwards."""
        self.exchange.close()

    def _settings(self, losses: AuxLosses | None, dtype: torch.dtype | None) -> dict[str, str]:
        """Settings that must be the same on every rank, besides those that the exchange compares."""
        config = {f.name: repr(getattr(self.config, f.name)) for f in fields(self.config)}
        pieces = {"the schedule": self.strategy.name, "the losses": repr(losses), "the dtype": str(dtype)}
        return pieces | config

    def _make_experts(self, experts: str | nn.Module, kind: dict) -> Experts:
        if isinstance(experts, nn.Module):
            return cast("Experts", piece("experts", experts))
        config, ranks = self.config, self.ranks
        return Experts(
            self.placement.local(ranks.expert_rank),
            config.hidden_size,
            config.intermediate_size,
            activation=config.activation,
            bias=config.bias,
            shard=Shard(rank=ranks.tensor_rank, size=ranks.tensor_size),
            implementation=experts,
            seed=ranks.agree_on_seed(),
            **kind,
        )

    def _add_shared(self, config: MoEConfig, kind: dict) -> None:
        self.shared_expert = self.shared_expert_gate = None
        if config.shared is None:
            return
        self.shared_expert = SharedExpert(config.hidden_size, config.shared.intermediate_size, **kind)
        if config.shared.gated:
            self.shared_expert_gate = nn.Linear(config.hidden_size, 1, bias=False, **kind)

    def _begin(self, balancer: OnlineBalancer | None) -> None:
        self._share_parameters()
        guards.watch(self)
        if balancer is not None:
            balancer.attach(self)

    def _share_parameters(self) -> None:
        experts = {id(parameter) for parameter in self.experts.parameters()}
        self.ranks.share([p for p in self.parameters() if id(p) not in experts])

    def _shared_output(self, x_TD: Tensor) -> Tensor:
        assert self.shared_expert is not None
        if x_TD.requires_grad:
            # The gradients of its projections are summed first, so that dx does not depend on when this ran.
            x_TD = x_TD.view_as(x_TD)
        score = self.shared_expert_gate
        return self.shared_expert(x_TD) if score is None else gated(self.shared_expert, score, x_TD)

    def _rows_per_slot(self):
        """A function from the tokens of the group to the rows of every slot, if the capacity pads; else
        `None`."""
        config, capacity = self.config, self.config.gate.capacity
        if capacity is None or not capacity.pad:
            return None
        others = self.ranks.data_size

        def rows(tokens: int) -> int:
            return int(capacity.limit(words(tokens * others)[0], config.top_k, config.num_experts))

        return rows

    def _check(self, x: Tensor, kept_TK: Tensor | None, *, together: bool) -> None:
        """Raise ValueError on every rank if one has an input of a wrong shape, dtype or mask. together: the
        router sums over the global batch, so all ranks check in first: the others would wait in its sums."""
        if self.routing is None:
            refuse_ddp(self.experts, self.ranks)
            refuse_sharded(self.experts, self.ranks)
            refuse_meta(self)
        if self.is_copy and self.placement != self.exchange.geometry.placement:
            raise ValueError(
                "MoELayer: this is a copy, and the experts of the layer that it was copied from have moved, "
                "with the exchange that both use; copy it anew, or without a balancer"
            )
        problem = None
        try:
            if self.routing is None:
                self.exchange.settle(x)
            self._check_in(x, kept_TK, together=together)
        except ValueError as error:
            if not together:
                raise
            problem = error
        if together:
            raise_in_data_group(self.ranks.data_group, problem)

    def _check_in(self, x: Tensor, kept_TK: Tensor | None, *, together: bool) -> None:
        """Meet the other ranks if this one's input is wrong, or if they come `together`."""
        wrong = self.exchange.dispatcher.why_not_tokens(x) is not None
        if kept_TK is not None and not wrong:
            expected = x.numel() // x.shape[-1], self.config.top_k
            # Any other thing is told to the others as a mask of a wrong dtype.
            if not isinstance(kept_TK, Tensor) or not is_plain(kept_TK):
                kept_TK = torch.zeros(expected, dtype=torch.int64, device=x.device)
            wrong = kept_TK.shape != expected or kept_TK.dtype != torch.bool or kept_TK.device != x.device
        if wrong or together:
            herald = None
            if not together and isinstance(self.strategy, Heralding):
                herald = self.strategy.herald(self.exchange)
            self.exchange.check_in(x, kept_TK=kept_TK, herald=herald)

    def _refuse_no_tensor(self, x: object) -> None:
        """Raise TypeError, and ValueError on the other ranks, which hear of it as of a wrong shape."""
        error = TypeError(
            f"MoELayer: x is a {type(x).__name__}; give tokens [..., {self.config.hidden_size}]"
        )
        try:
            stand_in = torch.zeros((), dtype=torch.float32, device=self.gate.weight.device)
            self._check(stand_in, None, together=self.gate.is_collective)
        except ValueError:
            raise error from None
        raise error

    def _check_in_traced(self, x_TD: Tensor) -> Tensor | None:
        """The check-in of `_check` as an operator of a compiled graph, so that ranks that are not compiled
        meet it. Returns 0, which the gate adds to what it sums, or `None` where nobody checks in."""
        if not self.gate.is_collective:
            return None
        return check_in_op(x_TD.detach(), self.exchange.dispatcher.key, self.ranks.data_group_name)

    def extra_repr(self) -> str:
        ranks = self.ranks
        return f"expert_parallel={ranks.expert_size}, tensor_parallel={ranks.tensor_size}, " + ", ".join(
            f"{piece}={choice.split(':')[0]}" for piece, choice in self.reasons.items()
        )


def _check_given(
    config: object, *, losses: object, placement: object, balancer: object, dtype: object
) -> None:
    expect("MoELayer: config", config, (MoEConfig,), "give MoEConfig(hidden_size=...)")
    expect("MoELayer: losses", losses, (AuxLosses, NoneType), "give AuxLosses(load_balance=...)")
    expect("MoELayer: placement", placement, (Placement, NoneType), "make one with imbrex.placement")
    expect("MoELayer: balancer", balancer, (OnlineBalancer, NoneType), "give an OnlineBalancer")
    expect("MoELayer: dtype", dtype, (torch.dtype, NoneType), "give one of torch's, as torch.bfloat16")
    if dtype not in (None, *DTYPES):
        raise ValueError(f"MoELayer: dtype is {dtype}; give one of {', '.join(map(str, DTYPES))}")
    if isinstance(config, MoEConfig) and isinstance(placement, Placement):
        experts, placed = config.num_experts, placement.num_experts
        if placed != experts:
            raise ValueError(
                f"MoELayer: placement is of {placed} experts, the config of {experts}; make another"
            )
