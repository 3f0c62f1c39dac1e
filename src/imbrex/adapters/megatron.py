"""imbrex's MoE layer in Megatron-Core, by Megatron's own specs.

    from imbrex.adapters.megatron import with_imbrex

    spec = with_imbrex(get_gpt_layer_local_spec(num_experts=64))  # of a layer or a block, with TE or without
    model = GPTModel(config, spec, ...)

imbrex's layer replaces Megatron's `MoELayer` everywhere in the spec. Router, losses, shared experts, latent
projections and recomputation stay Megatron's; the exchange and the experts are imbrex's.
`MoESubmodules(experts=ImbrexExperts)` uses the experts alone, with any of Megatron's dispatchers. Needs
Megatron-Core 0.16 or newer.
"""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Mapping
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.transformer.moe.moe_layer import MoELayer  # pyright: ignore[reportMissingImports]
from megatron.core.transformer.moe.moe_utils import (  # pyright: ignore[reportMissingImports]
    get_default_pg_collection,
)
from megatron.core.transformer.moe.token_dispatcher import (  # pyright: ignore[reportMissingImports]
    MoETokenDispatcher,
)
from torch import Tensor, nn

from imbrex import Dispatched, Exchange, Routing, overlap
from imbrex.contracts import Codec, Handle, RowForm, Strategy, Transport, Wire
from imbrex.experts import Experts
from imbrex.overlap import Scheduler
from imbrex.placement import contiguous
from imbrex.transport import Auto

PLAIN = {
    "gated_linear_unit": True,
    "activation_func": F.silu,
    "add_bias_linear": False,
    "fp8": None,
    "fp4": None,
    "activation_func_clamp_value": None,
    "glu_linear_offset": 0.0,
    "moe_apply_probs_on_input": False,
    "delay_wgrad_compute": False,
}
"""The settings of Megatron's configuration for experts that imbrex can compute."""
REFUSED = {
    "moe_shared_expert_overlap": "imbrex moves rows in one call; compute shared experts beside it",
    "moe_pad_expert_input_to_capacity": "rows need no padding; drop by moe_expert_capacity_factor alone",
    "moe_router_padding_for_quantization": "its padding adds choices to tokens; leave it out",
    "overlap_dispatch_backward_with_experts_wgrad": "rows go home in one call; leave it out",
}
"""Settings of Megatron's dispatchers that imbrex does not have, and what to do instead."""
EXTRA = "._extra_state"
SETTINGS = "transport", "codec", "schedule", "experts", "timeout"


def with_imbrex(spec: Any, **settings: Any) -> Any:
    """Return a spec of a layer, a block or an MTP block in which `ImbrexMoELayer` replaces Megatron's
    `MoELayer`; the given spec is not changed. settings: `transport`, `codec`, `schedule`, `experts`,
    `timeout`.

    Raises ValueError if the spec has no `MoELayer`, or for a setting of another name.
    """
    unknown = sorted(set(settings) - set(SETTINGS))
    if unknown:
        raise ValueError(f"with_imbrex: there is no setting {unknown[0]!r}; use {', '.join(SETTINGS)}")
    ours = _exchanged(spec, settings)
    if ours is spec:
        raise ValueError(
            "with_imbrex: the spec has no MoELayer of Megatron's; give it that of a model with experts, as "
            "in get_gpt_layer_local_spec(num_experts=64)"
        )
    return ours


def _exchanged(spec: Any, settings: Mapping[str, Any]) -> Any:
    """A spec with `ImbrexMoELayer` in the place of Megatron's layer; the same object if it has none."""
    if isinstance(spec, partial):
        if spec.func is MoELayer:
            return partial(ImbrexMoELayer, *spec.args, **spec.keywords, **settings)
        inside = {name: _exchanged(part, settings) for name, part in spec.keywords.items()}
        same = all(inside[name] is part for name, part in spec.keywords.items())
        return spec if same else partial(spec.func, *spec.args, **inside)
    if isinstance(spec, list | tuple) and not hasattr(spec, "_fields"):
        parts = [_exchanged(part, settings) for part in spec]
        return spec if all(map(lambda a, b: a is b, parts, spec)) else type(spec)(parts)
    if not dataclasses.is_dataclass(spec) or isinstance(spec, type):
        return spec
    if getattr(spec, "module", None) is MoELayer:
        params = {**getattr(spec, "params", {}), **settings}
        return dataclasses.replace(spec, module=ImbrexMoELayer, params=params)
    parts = {f.name: getattr(spec, f.name) for f in dataclasses.fields(spec) if f.init}
    ours = {name: _exchanged(part, settings) for name, part in parts.items()}
    changed = {name: part for name, part in ours.items() if part is not parts[name]}
    return dataclasses.replace(spec, **changed) if changed else spec


def why_not_own(config: Any) -> str | None:
    """Why imbrex cannot compute the experts of this configuration, or `None`: it computes plain SwiGLU."""
    for name, value in PLAIN.items():
        if getattr(config, name, value) not in (value, None):
            return f"{name} is {getattr(config, name)}"
    return None


class ImbrexExperts(nn.Module):
    """The experts of one rank with Megatron's arguments, computed by imbrex.

    Parameters are imbrex's: `experts.gate_up_proj` [e, 2F, D] and `experts.down_proj` [e, D, F]. Distributed
    checkpoints have Megatron's names and shapes, so Megatron's own experts can read them, and vice versa.
    implementation: as in `imbrex.experts.Experts`. Raises ValueError if the configuration has experts other
    than plain SwiGLU, or experts that tensor ranks share.
    """

    implementation = "auto"

    def __init__(
        self,
        num_local_experts: int,
        config: Any,
        submodules: Any = None,
        pg_collection: Any = None,
        name: str | None = None,
    ) -> None:
        super().__init__()
        groups = get_default_pg_collection() if pg_collection is None else pg_collection
        reason = why_not_own(config) or _why_shared(groups)
        if reason is not None:
            raise ValueError(f"ImbrexExperts: {reason}")
        self.config, self.num_local_experts = config, num_local_experts
        self.ep_group, self.dp_group = groups.ep, groups.expt_dp
        first = self.ep_group.rank() * num_local_experts
        self.experts = Experts(
            tuple(range(first, first + num_local_experts)),
            getattr(config, "moe_latent_size", None) or config.hidden_size,
            config.moe_ffn_hidden_size,
            implementation=self.implementation,
            device="meta",
            dtype=config.params_dtype,
        )
        if not getattr(config, "init_model_with_meta_device", False):
            self.experts.to_empty(device="cpu" if config.use_cpu_initialization else torch.device("cuda"))
            self.reset_parameters()
        for parameter in self.experts.parameters():
            vars(parameter)["allreduce"] = config.expert_model_parallel_size == 1
            vars(parameter)["tensor_model_parallel"] = True

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draw the weights by Megatron's functions: on a GPU from its generator for experts; on a CPU each
        rank draws all experts, so that equal seeds give different experts."""
        if not self.config.perform_initialization:
            return
        from megatron.core import tensor_parallel  # pyright: ignore[reportMissingImports]

        gate_up, down = self.experts.gate_up_proj, self.experts.down_proj
        ids, forked = self.experts.expert_ids, nullcontext()
        drawn = range(self.ep_group.size() * self.num_local_experts)
        if gate_up.is_cuda:
            drawn = ids
            name = tensor_parallel.get_expert_parallel_rng_tracker_name()
            forked = tensor_parallel.get_cuda_rng_tracker().fork(name)
        with forked:
            for expert in drawn:
                pair = [torch.empty_like(weight[0]) for weight in (gate_up, down)]
                self.config.init_method(pair[0])
                self.config.output_layer_init_method(pair[1])
                if expert in ids:
                    gate_up[expert - ids[0]].copy_(pair[0])
                    down[expert - ids[0]].copy_(pair[1])

    def forward(
        self, rows_RD: Tensor, tokens_per_expert: Tensor, probs_R: Tensor, **_: Any
    ) -> tuple[Tensor, None]:
        """Compute the expert-major rows of the local experts, times their probabilities, in the rows'
        dtype."""
        counts_e = tokens_per_expert.to(rows_RD.device, torch.int64)
        handle = Handle(weights_R=probs_R.float(), state=(), num_tokens=rows_RD.shape[0])
        out_RD = self.experts(Dispatched(rows_RD=rows_RD, counts_e=counts_e, handle=handle))
        if not self.experts.applies_weights:
            out_RD = out_RD * probs_R[:, None]
        return out_RD.to(rows_RD.dtype), None

    def backward_dw(self) -> None:
        """Nothing to do: gradients of weights are computed together with those of rows."""

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple[Any, ...] = (), metadata: Any = None
    ) -> dict[str, Any]:
        """The weights under the names of Megatron's own experts: `[..., E, 2F, D]` and `[..., E, D, F]`."""
        from megatron.core.dist_checkpointing.mapping import (  # pyright: ignore[reportMissingImports]
            ShardedObject,
            ShardedTensor,
        )

        if (metadata or {}).get("singleton_local_shards", False):
            raise ValueError(
                "ImbrexExperts: no checkpoint with a tensor for each expert; leave singleton_local_shards out"
            )
        place = len(sharded_offsets), self.ep_group.rank(), self.ep_group.size()
        replica, sharded = (0, 0, self.dp_group.rank()), {}
        for name, theirs in (("gate_up_proj", "linear_fc1"), ("down_proj", "linear_fc2")):
            sharded[f"{prefix}experts.{name}"] = ShardedTensor.from_rank_offsets(
                f"{prefix}experts.{theirs}.weight",
                getattr(self.experts, name),
                *sharded_offsets,
                place,
                replica_id=replica,
                prepend_axis_num=len(sharded_offsets),
            )
            # Theirs keep a state of every expert beside its weights, which is empty without fp8.
            for expert in self.experts.expert_ids:
                offsets = *sharded_offsets, (place[0], expert, self.ep_group.size() * self.num_local_experts)
                sharded[f"{prefix}{theirs}{EXTRA}{expert}"] = ShardedObject(
                    f"{prefix}experts.{theirs}{EXTRA}",
                    None,
                    tuple(size for _, _, size in offsets),
                    tuple(number for _, number, _ in offsets),
                    replica_id=replica,
                )
        return sharded

    def _load_from_state_dict(self, state_dict, prefix, *more):  # pyright: ignore[reportIncompatibleMethodOverride]
        for key in [key for key in state_dict if key.startswith(prefix) and EXTRA in key]:
            del state_dict[key]
        super()._load_from_state_dict(state_dict, prefix, *more)


class TheirExperts:
    """Megatron's own experts with imbrex's contract of experts. They need counts on the host, and weigh
    rows."""

    applies_weights, forms = True, (RowForm.ROWS,)

    def __init__(self, experts: nn.Module) -> None:
        self.experts, self.parameters = experts, experts.parameters

    def __call__(self, dispatched: Dispatched) -> Tensor:
        # host sync: Megatron's experts ask for a list of how many rows each has.
        counts_e = dispatched.counts_e.cpu()
        rows_RD, num_rows = dispatched.rows_RD, int(counts_e.sum())
        out_RD, bias = self.experts(rows_RD[:num_rows], counts_e, dispatched.handle.weights_R[:num_rows])
        assert bias is None, "Megatron's MoELayer takes no bias either"
        missing = rows_RD.shape[0] - num_rows
        return F.pad(out_RD, (0, 0, 0, missing)) if missing else out_RD


class Handing(MoETokenDispatcher):
    """A dispatcher with Megatron's contract that does nothing but keep the routing: the layer dispatches,
    computes and combines in one call."""

    def dispatch_preprocess(
        self, tokens: Tensor, routing_map: Tensor, probs: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return the tokens as [T, D], and keep the routing map for the layer."""
        self.shape, self.map_TE = tokens.shape, routing_map
        return tokens.reshape(-1, tokens.shape[-1]), probs

    def combine_postprocess(self, hidden_states: Tensor) -> Tensor:
        return hidden_states.view(self.shape)


class ImbrexMoELayer(MoELayer):
    """Megatron's MoE layer with imbrex's exchange, and with imbrex's experts if they are plain SwiGLU.

    transport, codec, schedule, timeout: as in `imbrex.MoELayer`. experts: `loop`, `grouped`, `kernels`,
    `kernels-fp8`, `auto`, or `megatron` for those of the spec. The exchange is made in the first call, by all
    ranks of the expert-parallel group together.

    Raises ValueError if the configuration needs something that imbrex does not have.
    """

    def __init__(
        self,
        config: Any,
        submodules: Any = None,
        layer_number: int | None = None,
        pg_collection: Any = None,
        *,
        transport: str | Transport | Auto = "auto",
        codec: str | Codec | Wire | Mapping[str, str | Codec] = "identity",
        schedule: str | Strategy | Scheduler = "serial",
        experts: str = "auto",
        timeout: float | None = None,
        **more: Any,
    ) -> None:
        groups = get_default_pg_collection() if pg_collection is None else pg_collection
        _check(config, groups)
        reason = why_not_own(config)
        if experts == "auto" and reason is not None:
            warnings.warn(f"Megatron computes its experts, not imbrex: {reason}", stacklevel=2)
            experts = "megatron"
        if experts != "megatron":
            built = type("ImbrexExperts", (ImbrexExperts,), {"implementation": experts})
            submodules = dataclasses.replace(submodules, experts=built)
        super().__init__(config, submodules, layer_number, groups, **more)
        self.token_dispatcher = Handing(config=config, pg_collection=groups)
        self.strategy = overlap.make(schedule)
        self._pieces = {"transport": transport, "codec": codec} if groups.ep.size() > 1 else {}
        self._timeout = timeout
        self._exchange: Exchange | None = None

    def dispatch(self, hidden_states: Tensor, probs: Tensor) -> tuple[Tensor, Tensor]:
        return hidden_states, probs

    def routed_experts_compute(self, hidden_states: Tensor, probs: Tensor) -> tuple[Tensor, None]:
        """Send tokens to their experts and back, in one call of the strategy. Returns [T, D], and no bias."""
        if self._exchange is None:
            self._exchange = self._open(hidden_states)
        routing = routing_of(self.token_dispatcher.map_TE, probs, self.config.moe_router_topk)
        experts: Any = self.experts
        experts = experts.experts if isinstance(experts, ImbrexExperts) else TheirExperts(experts)
        return self.strategy.run(hidden_states, routing, self._exchange, experts, None).y_TD, None

    def combine(self, output: Tensor) -> Tensor:
        return output

    def _open(self, x_TD: Tensor) -> Exchange:
        ranks = self.ep_group.size()
        return Exchange(
            contiguous(self.config.num_moe_experts, ranks),
            x_TD.shape[1],
            self.config.moe_router_topk,
            group=self.ep_group if ranks > 1 else None,
            dtype=x_TD.dtype,
            timeout=self._timeout,
            layer=self.layer_number or 0,
            **self._pieces,
        )


def routing_of(map_TE: Tensor, probs_TE: Tensor, top_k: int) -> Routing:
    """The routing of Megatron's map of choices, bool [T, E], and their probabilities, float [T, E]. A token
    has at most `top_k` choices, with experts in ascending order."""
    experts_TE = torch.arange(map_TE.shape[1], device=map_TE.device).where(map_TE, map_TE.shape[1])
    ids_TK = experts_TE.topk(top_k, dim=1, largest=False).values
    ids_TK = ids_TK.masked_fill(ids_TK == map_TE.shape[1], -1)
    return Routing(ids_TK=ids_TK, weights_TK=probs_TE.float().gather(1, ids_TK.clamp(min=0)))


def _why_shared(groups: Any) -> str | None:
    if groups.expt_tp is not None and groups.expt_tp.size() > 1:
        return "experts are not shared by tensor ranks here; set expert_tensor_parallel_size=1"
    return None


def _check(config: Any, groups: Any) -> None:
    for name, remedy in REFUSED.items():
        if getattr(config, name, False):
            raise ValueError(f"ImbrexMoELayer: {name} is set; {remedy}")
    if getattr(config, "transformer_impl", "") == "inference_optimized":
        raise ValueError("ImbrexMoELayer: transformer_impl='inference_optimized' has a layer of its own")
    reason = _why_shared(groups)
    if reason is not None:
        raise ValueError(f"ImbrexMoELayer: {reason}")


__all__ = ["ImbrexExperts", "ImbrexMoELayer", "with_imbrex"]
