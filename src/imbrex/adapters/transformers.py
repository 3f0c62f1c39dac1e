"""imbrex behind transformers' own options, in every model whose experts transformers fuses.

    imbrex.adapters.transformers.register()
    config = DistributedConfig(fsdp_size=2, ep_size=2, ep_implementation="imbrex")
    model = AutoModelForCausalLM.from_pretrained(name, distributed_config=config)

With `ep_implementation="imbrex"` imbrex moves tokens between ranks, each of which has loaded its own experts
only. With `experts_implementation="imbrex"` it computes experts, on one rank or after another implementation
has moved tokens. Router, losses, saving and FSDP stay transformers'. Needs transformers 5.23; for older ones
use `imbrex.adapters.huggingface`.
"""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.func import functional_call
from torch.nn.utils import parametrize

from imbrex import Dispatched, Exchange, RankLostError, Routing, overlap
from imbrex.contracts import Codec, RowForm, Strategy, Transport, Wire
from imbrex.experts import Experts, ExternalExperts
from imbrex.overlap import Scheduler
from imbrex.placement import contiguous
from imbrex.runtime.gradients import scale_gradient
from imbrex.runtime.tracing import in_trace_too
from imbrex.runtime.waits import reduce_scatter_single
from imbrex.transport import Auto

_registered = itertools.count()


@dataclass(frozen=True, kw_only=True, slots=True)
class Choices:
    """The arguments of a call of `register`."""

    transport: str | Transport | Auto
    codec: str | Codec | Wire | Mapping[str, str | Codec]
    schedule: str | Strategy | Scheduler
    experts: str
    timeout: float | None


def register(
    name: str = "imbrex",
    *,
    transport: str | Transport | Auto = "auto",
    codec: str | Codec | Wire | Mapping[str, str | Codec] = "identity",
    schedule: str | Strategy | Scheduler = "serial",
    experts: str = "auto",
    timeout: float | None = None,
) -> None:
    """Make `name` an `ep_implementation` and an `experts_implementation` of transformers, in this process.

    Call it on every rank before the model is loaded. Call it with another name for other settings, since
    transformers' configuration holds nothing but the name: `register("imbrex-fp8", codec="fp8")`.
    transport, codec, schedule, timeout: as in `MoELayer`. experts: `loop`, `grouped`, `kernels`,
    `kernels-fp8` or `auto`. Experts other than plain SwiGLU are computed by transformers, with a warning that
    says why; imbrex moves their tokens nevertheless.

    Raises ValueError if the installed transformers has no such registry.
    """
    reason = why_not_registered()
    if reason is not None:
        raise ValueError(f"register: {reason}")
    from transformers.distributed.expert_parallel import EPImplementationInterface
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    choices = Choices(transport=transport, codec=codec, schedule=schedule, experts=experts, timeout=timeout)
    EPImplementationInterface.register(name, _implementation(choices))
    ALL_EXPERTS_FUNCTIONS.register(name, _experts_function(choices))


def why_not_registered() -> str | None:
    """Why the installed transformers cannot use imbrex, or `None`."""
    try:
        from transformers.distributed.expert_parallel import EPImplementationInterface  # noqa: F401
        from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS  # noqa: F401
    except ImportError:
        import transformers

        return (
            f"transformers {transformers.__version__} has no registry of expert-parallel implementations; "
            "install 5.23 or newer, or use imbrex.adapters.huggingface.replace_blocks(model, group)"
        )
    return None


def why_not_own(module: nn.Module) -> str | None:
    """Why imbrex cannot compute these experts of transformers, or `None`: it computes plain SwiGLU."""
    from transformers.activations import ACT2FN
    from transformers.integrations import moe

    rules = {
        "has_gate": True,
        "is_concatenated": True,
        "is_transposed": False,
        "has_bias": False,
        "has_post_expert_norm": False,
    }
    for flag, value in rules.items():
        if getattr(module, flag, None) is not value:
            return f"{flag} is {getattr(module, flag, None)}"
    activation = getattr(module, "act_fn", None)
    if activation is not F.silu and not isinstance(activation, (nn.SiLU, type(ACT2FN["silu"]))):
        return f"they compute {type(activation).__name__}, not silu"
    if getattr(module.__class__, "_apply_gate", None) is not moe._default_apply_gate:
        return "they have a gate of their own"
    if {name for name, _ in module.named_parameters()} != {"gate_up_proj", "down_proj"}:
        return "they have parameters beside gate_up_proj and down_proj"
    return None


class OwnExperts:
    """Experts of transformers, computed by imbrex."""

    def __init__(self, module: nn.Module, num_experts: int, implementation: str) -> None:
        down: Any = module.down_proj
        _, hidden_size, intermediate_size = down.shape
        self.experts = Experts(
            tuple(range(num_experts)),
            hidden_size,
            intermediate_size,
            implementation=implementation,
            device="meta",
            dtype=down.dtype,
        )
        self.applies_weights = self.experts.applies_weights

    @property
    def forms(self) -> tuple[RowForm, ...]:
        return self.experts.forms

    def run(self, module: Any, dispatched: Dispatched) -> Tensor:
        weights = {"gate_up_proj": module.gate_up_proj, "down_proj": module.down_proj}
        return functional_call(self.experts, weights, (dispatched,))


class TheirExperts:
    """Experts of transformers, computed by transformers, with one choice of weight 1 per row."""

    applies_weights, forms = False, (RowForm.ROWS,)

    def __init__(self, forward: Callable[..., Tensor], num_experts: int) -> None:
        self.forward, self.num_experts = forward, num_experts

    def run(self, module: Any, dispatched: Dispatched) -> Tensor:
        rows_RD, counts_e = dispatched.rows_RD, dispatched.counts_e
        if rows_RD.shape[0] == 0:
            # One row of zeros, dropped again: the experts' parameters stay in everybody's backward.
            one_1D = rows_RD.sum(0, keepdim=True)
            ids_11 = torch.zeros(1, 1, dtype=torch.int64, device=rows_RD.device)
            return self.forward(module, one_1D, ids_11, torch.ones_like(ids_11, dtype=rows_RD.dtype))[:0]
        row_R = torch.arange(rows_RD.shape[0], dtype=torch.int64, device=rows_RD.device)
        ids_R = torch.searchsorted(counts_e.cumsum(0), row_R, right=True)
        # Rows past the counts are unset; transformers multiplies them by a weight of zero.
        past_R1 = (ids_R >= self.num_experts)[:, None]
        weights_R1 = (~past_R1).to(rows_RD.dtype)
        return self.forward(module, rows_RD.masked_fill(past_R1, 0.0), ids_R[:, None], weights_R1)


class Held(ExternalExperts):
    """Experts for one call, with the parameters as they are in that call."""

    def __init__(self, experts: OwnExperts | TheirExperts, module: nn.Module) -> None:
        self.experts, self.module = experts, module
        self.applies_weights = experts.applies_weights
        self.unchanged = isinstance(experts, OwnExperts) and experts.experts.unchanged

    @property
    def forms(self) -> tuple[RowForm, ...]:
        return self.experts.forms

    @property
    def kernel_weights(self) -> tuple[Tensor, Tensor, bool | None] | None:
        """Says the same as that of `Experts`, of the weights as they are in this call."""
        own = self.experts.experts.kernel_weights if isinstance(self.experts, OwnExperts) else None
        module: Any = self.module
        return None if own is None else (module.gate_up_proj, module.down_proj, own[2])

    def parameters(self) -> Iterator[Tensor]:
        """The weights as they are in this call, also where they are computed, as by PEFT for LoRA: schedules
        of several chunks differentiate in them, too."""
        module = self.module
        plain = (name for name, _ in module.named_parameters(recurse=False))
        for name in (*plain, *getattr(module, "parametrizations", ())):
            yield getattr(module, name)
        for name, child in module.named_children():
            if name != "parametrizations":
                yield from child.parameters()

    def __call__(self, dispatched: Dispatched) -> Tensor:
        return self.experts.run(self.module, dispatched)


class Seat:
    """The exchange and the experts of one experts module of transformers, over the ranks of a group. It does
    not hold the module, which may hold it. forward: transformers' own function of the module and its
    arguments."""

    exchange: Exchange

    def __init__(
        self,
        module: nn.Module,
        forward: Callable[..., Tensor],
        num_experts: int,
        choices: Choices,
        group: dist.ProcessGroup | None,
        layer: int,
    ) -> None:
        self.choices, self.group, self.layer = choices, group, layer
        self.num_local, self.begun = num_experts, False
        reason = why_not_own(module)
        if reason is None:
            self.experts = OwnExperts(module, num_experts, choices.experts)
        else:
            warnings.warn(
                f"transformers computes the experts of {module.__class__.__name__}, not imbrex: {reason}",
                stacklevel=2,
            )
            self.experts = TheirExperts(forward, num_experts)
        self.strategy = overlap.make(choices.schedule)

    def __call__(self, module: nn.Module, x_TD: Tensor, ids_TK: Tensor, weights_TK: Tensor) -> Tensor:
        routing = Routing(ids_TK=ids_TK.long(), weights_TK=weights_TK.float())
        # What is computed must be one tensor in a call.
        with parametrize.cached() if hasattr(module, "parametrizations") else nullcontext():
            return self.strategy.run(x_TD, routing, self.exchange, Held(self.experts, module), None).y_TD

    def begin(self, width: int, top_k: int, dtype: torch.dtype) -> None:
        """Make the exchange, at the first call: only that knows the width, K and the dtype of tokens."""
        size = 1 if self.group is None else self.group.size()
        self.exchange = Exchange(
            contiguous(self.num_local * size, size),
            width,
            top_k,
            group=self.group,
            transport=self.choices.transport if size > 1 else "auto",
            codec=self.choices.codec if size > 1 else "identity",
            dtype=dtype,
            timeout=self.choices.timeout,
            layer=self.layer,
        )
        self.begun = True


class Seats(dict[int, Seat]):
    """The `Seat`s of an experts module on one rank, by K. A copy of the module starts without any, and so
    does one that is loaded from a file."""

    def __deepcopy__(self, memo: dict[int, object]) -> Seats:
        return Seats()

    def __reduce__(self) -> tuple[type, tuple[()]]:
        return dict, ()


def _implementation(choices: Choices) -> type:
    from transformers.distributed.expert_parallel import EPImplementation

    numbers = itertools.count()

    class ImbrexEP(EPImplementation):
        """Ranks that hold other experts exchange tokens by imbrex. Those of a tensor-parallel group, which
        hold the same tokens, take a slice each."""

        def __init__(self, experts: nn.Module, ep_mesh: Any, tp_mesh: Any) -> None:
            super().__init__(experts, ep_mesh, tp_mesh)
            group = ep_mesh.get_group()
            count: Any = self.num_local_experts
            forward: Any = self.experts_forward
            self.seat = Seat(
                experts, lambda _, *tokens: forward(*tokens), count, choices, group, next(numbers)
            )
            self.experts, self.mean_over = experts, 0

        def __call__(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
            if not self.seat.begun:
                _begin(self, hidden_states.shape[1], top_k_index.shape[1], hidden_states.dtype)
            if self.tp_mesh.size() > 1 and torch.is_grad_enabled() and not torch.compiler.is_compiling():
                # transformers' own sums over these ranks come in another order in a compiled backward.
                self.seat.exchange.dispatcher.uncompiled = True
            over = self.mean_over
            if over > 1 and torch.is_grad_enabled():
                hidden_states, top_k_weights = (
                    scale_gradient(part, float(over)) for part in (hidden_states, top_k_weights)
                )
            if self.tp_mesh.size() == 1:
                y_TD = self.seat(self.experts, hidden_states, top_k_index, top_k_weights)
            else:
                own = (_slice(t, self.tp_mesh) for t in (hidden_states, top_k_index, top_k_weights))
                y_TD = _joined(self.seat(self.experts, *own), self.tp_mesh, hidden_states.shape)
            return scale_gradient(y_TD, 1 / over) if over > 1 and torch.is_grad_enabled() else y_TD

    return ImbrexEP


@in_trace_too
def _begin(implementation: Any, width: int, top_k: int, dtype: torch.dtype) -> None:
    """Make the seat ready at the first call: FSDP may have come since the implementation was made."""
    meshes = implementation.ep_mesh, implementation.tp_mesh
    implementation.mean_over = spare_copies(implementation.experts, *meshes)
    try:
        implementation.seat.begin(width, top_k, dtype)
    except RankLostError as error:
        if meshes[1].size() == 1:
            raise
        sentence = "ranks that share a model (tp_size) compile it all or none, or call it once before"
        raise RankLostError(f"{error}; {sentence}") from error


class InPlace:
    """How FSDP2 sums the gradients of what one rank alone holds: where they lie. By itself it copies them to
    what is to be summed, divides that into a third copy, and copies it to the sum: of one layer of
    DeepSeek-V3 on two GPUs 11 GB each."""

    def __init__(self) -> None:
        self._operand: tuple[Any, Tensor] | None = None

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """FSDP2 asks for the operand on the caller's stream, and then for the sum on one of its own: that is
        the operand."""
        stream = torch.get_device_module(device).current_stream()
        if self._operand is not None:
            (begun, operand), self._operand = self._operand, None
            if stream != begun and operand.shape == torch.Size(size) and operand.dtype == dtype:
                return operand
        operand = torch.empty(size, dtype=dtype, device=device)
        self._operand = stream, operand
        return operand

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: Any, op: Any, async_op: bool = False
    ) -> Any:
        return reduce_scatter_single(output_tensor, input_tensor, op, group, async_op)


def spare_copies(experts: nn.Module, ep_mesh: Any, tp_mesh: Any) -> int:
    """Where FSDP2 wraps experts that no other rank holds, have it sum their gradients in place. Gives the
    power of two by which they are to come divided, of the batches whose mean is taken; FSDP2 divides them by
    the rest."""
    ranks = ep_mesh.size()
    if not isinstance(experts, FSDPModule) or ranks != dist.get_world_size():
        return 1
    batches = ranks // tp_mesh.size()
    over = batches & -batches
    rest: Any = None if over == batches else batches / over
    comm: Any = InPlace()
    experts.set_custom_reduce_scatter(comm)
    experts.set_gradient_divide_factor(rest)
    return over


def _slice(same: Tensor, mesh: Any) -> Tensor:
    """This rank's rows of what all ranks of `mesh` hold; the gradient is everybody's rows again."""
    from torch.distributed.tensor import DTensor, Replicate, Shard

    whole = DTensor.from_local(same, mesh, [Replicate()], run_check=False)
    return whole.redistribute(mesh, [Shard(0)]).to_local()


def _joined(own: Tensor, mesh: Any, shape: torch.Size) -> Tensor:
    """The rows of all ranks, put together from their slices."""
    from torch.distributed.tensor import DTensor, Shard

    sliced = DTensor.from_local(own.contiguous(), mesh, [Shard(0)], shape=shape, stride=(shape[1], 1))
    return sliced.full_tensor()


def _experts_function(choices: Choices) -> Any:
    attribute = f"_imbrex_seats_{next(_registered)}"

    @in_trace_too
    def seated(module: Any, width: int, top_k: int, dtype: torch.dtype) -> None:
        seats = vars(module).get(attribute)
        if not isinstance(seats, Seats):
            seats = Seats()
            setattr(module, attribute, seats)
        seat = Seat(module, grouped_mm_experts_forward, module.num_experts, choices, None, 0)
        seat.begin(width, top_k, dtype)
        seats[top_k] = seat

    def forward(module: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        top_k = top_k_index.shape[1]
        if top_k not in getattr(module, attribute, ()):
            seated(module, hidden_states.shape[1], top_k, hidden_states.dtype)
        # Where other ranks hold experts too, transformers gives theirs the first id that is none of ours.
        ids_TK = top_k_index.masked_fill(top_k_index >= module.num_experts, -1)
        seat = getattr(module, attribute)[top_k]
        return seat(module, hidden_states, ids_TK, top_k_weights).to(hidden_states.dtype)

    from transformers.integrations.moe import grouped_mm_experts_forward

    return forward
