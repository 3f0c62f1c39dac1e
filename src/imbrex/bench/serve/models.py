"""The models that are served: published widths, and the demo's, with random weights."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import nn

from imbrex.bench.serve.rivals import GatherScatterMoE, TransformersMoE
from imbrex.layer import MoEConfig, MoELayer, SharedExperts
from imbrex.router.gates import Gate, Groups
from imbrex.serve.attention import Grouped, Latent
from imbrex.serve.checkpoint import load_weights, served_config
from imbrex.serve.model import Decoder, ModelConfig, draw

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
GATHER = "gather-scatter"
TRANSFORMERS = "transformers"
ALONE = "alone"
RIVALS = {GATHER: GatherScatterMoE, TRANSFORMERS: TransformersMoE}
SEED = 11

MODELS = {
    "demo": ModelConfig(
        moe=MoEConfig(hidden_size=128, intermediate_size=192, num_experts=8, top_k=2),
        attention=Grouped(num_heads=4, num_kv_heads=4, head_size=32, theta=1e4),
        num_layers=3,
        vocabulary=256,
        positions=0,
        drafting=True,
    ),
    "qwen3-30b-a3b": ModelConfig(
        moe=MoEConfig(
            hidden_size=2048,
            intermediate_size=768,
            num_experts=128,
            top_k=8,
            gate=Gate(score="softmax", normalize=True),
        ),
        attention=Grouped(num_heads=32, num_kv_heads=4, head_size=128, qk_norm=True),
        num_layers=48,
        vocabulary=151936,
        positions=0,
    ),
    "deepseek-v3-8": ModelConfig(
        moe=MoEConfig(
            hidden_size=7168,
            intermediate_size=2048,
            num_experts=256,
            top_k=8,
            gate=Gate(score="sigmoid", bias=True, groups=Groups(num_groups=8, topk_groups=4), scale=2.5),
            shared=SharedExperts(intermediate_size=2048),
        ),
        attention=Latent(num_heads=128, query_rank=1536, kv_rank=512, nope=128, rope=64, value=128),
        num_layers=8,
        vocabulary=129280,
        positions=0,
        drafting=True,
    ),
}
MODELS |= {
    f"{name}-half": replace(whole, moe=replace(whole.moe, num_experts=whole.moe.num_experts // 2))
    for name, whole in MODELS.items()
    if name != "demo"
}
"""The demo's, Qwen3-30B-A3B at full depth, and DeepSeek-V3's widths with 8 layers of experts and its drafting
block, from their published configurations. DeepSeek-V3's dense layers and its stretched positions are left
out. `positions` is set for each run.

A `-half` has half of the experts, and every token chooses as many of them: of T tokens it reads and computes
what a rank of two does with T tokens a rank, and nothing crosses."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Way:
    """How the feed-forward part runs. transport: of `MoELayer`; `gather-scatter`, NCCL's AllGather and
    ReduceScatter without a host synchronisation; `transformers`, its experts between the same two calls;
    `alone`, every rank with all experts (data parallelism only). codec, experts: as in `MoELayer`."""

    transport: str = "auto"
    codec: str = "identity"
    experts: str = "auto"

    @property
    def name(self) -> str:
        """The name in tables."""
        parts = (self.transport, self.codec, self.experts)
        return " ".join(p for p, plain in zip(parts, ("", "identity", "auto"), strict=True) if p != plain)

    @property
    def captured(self) -> bool:
        """Whether a CUDA graph takes it on GPUs that reach each other: byte transports ask the host for
        counts."""
        return self.transport in ("auto", "nvlink", ALONE, *RIVALS)


def takes_graphs(model: nn.Module, way: Way) -> bool:
    """Whether CUDA graphs take a model by a way: `auto` may have chosen a transport that they do not."""
    layers = [module for module in model.modules() if isinstance(module, MoELayer)]
    return way.captured and all(
        layer.ranks.size == 1 or layer.exchange.transport.name == "nvlink" for layer in layers
    )


def make_moe(
    config: MoEConfig, way: Way, group: dist.ProcessGroup | None, device: torch.device, dtype: torch.dtype
) -> Callable[[int], nn.Module]:
    """A maker of the feed-forward part of a block, whose weights are yet to be drawn."""

    def make(index: int) -> nn.Module:
        if way.transport in RIVALS:
            layer: nn.Module = RIVALS[way.transport](config, group, dtype=dtype)
        else:
            alone = way.transport == ALONE
            layer = MoELayer(
                config,
                None if alone else group,
                transport="auto" if alone else way.transport,
                codec="identity" if alone else way.codec,
                experts=way.experts,
                layer=index,
                device="meta",
                dtype=dtype,
            )
        layer = layer.to_empty(device=device)
        for buffer in layer.buffers():
            buffer.zero_()
        return layer

    return make


def make_model(
    name: str,
    way: Way,
    group: dist.ProcessGroup | None,
    *,
    positions: int,
    device: torch.device,
    dtype: torch.dtype,
    drafting: bool | None = None,
    whole_head: bool = False,
) -> Decoder:
    """The model of a name with random weights, drawn where it stands, or that of a checkpoint's folder with
    its own. Collective. drafting: its drafting block, where not as published. whole_head: every rank has the
    head of the whole vocabulary."""
    config = MODELS[name] if name in MODELS else served_config(name)
    drafting = config.drafting if drafting is None else drafting
    config = replace(config, positions=positions, drafting=drafting)
    split = None if way.transport == ALONE or whole_head else group
    moe = make_moe(config.moe, way, group, device, dtype)
    model = Decoder(config, moe, head_group=split, device=device, dtype=dtype)
    if name in MODELS:
        draw(model, seed=SEED)
    else:
        load_weights(model, name)
    return model


def make_beside(model: Decoder, way: Way, group: dist.ProcessGroup) -> Decoder:
    """A model by another way to the experts, over the parameters of `model`: nothing is drawn or copied.
    Of a way that spreads experts as `model` does, so not `alone`."""
    if way.transport == ALONE:
        raise ValueError("serve: every rank has all experts alone; make that model by itself")
    weight, nowhere = model.embedding.weight, torch.device("meta")
    moe = make_moe(model.config.moe, way, group, nowhere, weight.dtype)
    other = Decoder(model.config, moe, head_group=model.head.group, device=nowhere, dtype=weight.dtype)
    other.load_state_dict(model.state_dict(), assign=True)
    other.turned, other.compiled = model.turned, model.compiled
    return other
