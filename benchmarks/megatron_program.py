"""Megatron-Core's own training program for `benchmarks/megatron_models.py`: models, ways, steps.

Models are built with Megatron's configurations and its specs without Transformer Engine: its `GPTModel`,
attention, router, shared experts, `DistributedDataParallel` or Megatron-FSDP, and distributed optimizer. Two
pieces of it that want other wheels are torch's: scaled-dot-product attention stands where Transformer
Engine's would, and `grouped_mm` where `GroupedMLP` calls the package grouped_gemm.
"""

from __future__ import annotations

import gc
import itertools
import sys
import time
import types
import warnings
import zlib
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import Any
from unittest.mock import Mock

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from imbrex.adapters import deep_ep
from imbrex.bench.machine import foreign_bytes

SEQUENCE = 4096
GIB = 2**30


@dataclass(frozen=True, kw_only=True, slots=True)
class Published:
    """A published model, of fewer layers, all sparse. layers: those kept. of: those that it has. Its
    vocabulary is cut as its layers are, so that the head has the share of the time of the whole model's.
    settings: of Megatron's configuration. sharded: those that differ under Megatron-FSDP."""

    layers: int
    of: int
    vocabulary: int
    settings: dict[str, Any]
    sharded: dict[str, Any] = field(default_factory=dict)
    rotary_base: int = 10000
    sequence: int = SEQUENCE

    @property
    def kept_vocabulary(self) -> int:
        return max(self.vocabulary * self.layers // self.of // 128, 1) * 128

    def under(self, program: str) -> Published:
        """The model as a program trains it."""
        return replace(self, settings=self.settings | self.sharded) if program == "fsdp" else self

    def config(self, world: int, device: torch.device, dispatcher: dict[str, Any]) -> Any:
        """Megatron's configuration, bfloat16, experts over all ranks."""
        from megatron.core.transformer import (  # pyright: ignore[reportMissingImports]
            MLATransformerConfig,
            TransformerConfig,
        )

        kind = MLATransformerConfig if "kv_lora_rank" in self.settings else TransformerConfig
        return kind(
            num_layers=self.layers,
            normalization="RMSNorm",
            qk_layernorm=True,
            gated_linear_unit=True,
            activation_func=F.silu,
            bias_activation_fusion=True,
            add_bias_linear=False,
            hidden_dropout=0.0,
            attention_dropout=0.0,
            moe_router_dtype="fp32",
            expert_model_parallel_size=world,
            perform_initialization=False,
            use_cpu_initialization=device.type == "cpu",
            params_dtype=torch.bfloat16,
            bf16=True,
            **self.settings | dispatcher,
        )

    def flops(self) -> float:
        """Floating-point operations of a token's forward and backward, as Megatron's trainer counts them
        (`num_floating_point_operations`, megatron/training/training.py at 001b00c): 3 x 2 for every weight of
        a product that the token meets, and for half the causal square of attention; router and norms are
        not counted."""
        of = self.settings
        width, heads = of["hidden_size"], of["num_attention_heads"]
        if "kv_lora_rank" in of:
            rope, value = of["qk_pos_emb_head_dim"], of["v_head_dim"]
            query = of["qk_head_dim"] + rope
            weights = of["q_lora_rank"] * (width + heads * query) + width * (of["kv_lora_rank"] + rope)
            weights += of["kv_lora_rank"] * heads * (of["qk_head_dim"] + value) + heads * value * width
        else:
            query = value = of["kv_channels"]
            weights = width * query * (2 * heads + 2 * of["num_query_groups"])
        shared = of.get("moe_shared_expert_intermediate_size") or 0
        weights += 3 * width * (of["moe_router_topk"] * of["moe_ffn_hidden_size"] + shared)
        attention = self.sequence / 2 * heads * (query + value)
        return 6.0 * (self.layers * (weights + attention) + width * self.kept_vocabulary)


MODELS = {
    "deepseek-v3": Published(
        layers=1,
        of=61,
        vocabulary=129280,
        settings={
            "hidden_size": 7168,
            "num_attention_heads": 128,
            "multi_latent_attention": True,
            "q_lora_rank": 1536,
            "kv_lora_rank": 512,
            "qk_head_dim": 128,
            "qk_pos_emb_head_dim": 64,
            "v_head_dim": 128,
            "ffn_hidden_size": 18432,
            "num_moe_experts": 256,
            "moe_ffn_hidden_size": 2048,
            "moe_shared_expert_intermediate_size": 2048,
            "moe_router_topk": 8,
            "moe_router_num_groups": 8,
            "moe_router_group_topk": 4,
            "moe_router_score_function": "sigmoid",
            "moe_router_topk_scaling_factor": 2.5,
            "moe_router_enable_expert_bias": True,
            "moe_router_load_balancing_type": "seq_aux_loss",
            "moe_aux_loss_coeff": 1e-4,
        },
        sharded={"num_moe_experts": 128},  # half of them; a token's are as many
    ),
    "qwen3-235b-a22b": Published(
        layers=4,
        of=94,
        vocabulary=151936,
        rotary_base=1000000,
        settings={
            "hidden_size": 4096,
            "num_attention_heads": 64,
            "num_query_groups": 4,
            "kv_channels": 128,
            "ffn_hidden_size": 12288,
            "num_moe_experts": 128,
            "moe_ffn_hidden_size": 1536,
            "moe_router_topk": 8,
            "moe_router_load_balancing_type": "aux_loss",
            "moe_aux_loss_coeff": 1e-3,
        },
    ),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Way:
    """A way to move tokens. dispatcher: settings of Megatron's. experts: whose they are, `imbrex` or
    `megatron` (its `GroupedMLP`). layer: whether imbrex's whole layer stands in the spec."""

    dispatcher: dict[str, Any]
    experts: str = "imbrex"
    layer: bool = False


def _flex(backend: str) -> dict[str, Any]:
    return {"moe_token_dispatcher_type": "flex", "moe_flex_dispatcher_backend": backend}


WAYS = {
    "alltoall": Way(dispatcher={"moe_token_dispatcher_type": "alltoall"}),
    "hybridep": Way(dispatcher=_flex("hybridep")),
    "deepep": Way(dispatcher=_flex("deepep")),
    "imbrex": Way(dispatcher={"moe_token_dispatcher_type": "allgather"}, layer=True),
    "allgather": Way(dispatcher={"moe_token_dispatcher_type": "allgather"}),
    "alltoall-megatron": Way(
        dispatcher={"moe_token_dispatcher_type": "alltoall", "moe_grouped_gemm": True}, experts="megatron"
    ),
}
"""alltoall-megatron: with Megatron's own grouped experts too; all others have imbrex's."""
PROGRAMS = ("ddp", "fsdp")


class TorchAttention(nn.Module):
    """Megatron's contract of a core attention, causal, by torch: `[S, B, heads, width]` each."""

    def __init__(self, config: Any, *_: Any, softmax_scale: float | None = None, **__: Any) -> None:
        super().__init__()
        self.config, self.scale = config, softmax_scale

    def forward(self, query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> Tensor:
        q, k, v = (x.permute(1, 2, 0, 3) for x in (query, key, value))
        width = v.shape[-1]
        v = F.pad(v, (0, q.shape[-1] - width))  # flash attention wants one width
        y = F.scaled_dot_product_attention(
            q, k, v, is_causal=True, scale=self.scale, enable_gqa=q.shape[1] != k.shape[1]
        )
        return y[..., :width].permute(2, 0, 1, 3).flatten(2)


class _GroupedGemm(types.ModuleType):
    """Stands where Megatron imports grouped_gemm: its one product, by torch."""

    def __init__(self) -> None:
        super().__init__("grouped_gemm")
        self.ops = types.SimpleNamespace(gmm=self.gmm)

    @staticmethod
    def gmm(rows: Tensor, weights: Tensor, counts: Tensor, trans_b: bool = False) -> Tensor:
        ends = counts.to(rows.device, torch.int32).cumsum(0, dtype=torch.int32)
        return F.grouped_mm(rows, weights.mT if trans_b else weights, offs=ends)


def prepare(world: int, device: torch.device) -> None:
    """Lend Megatron what it lacks here, and lay its groups over all ranks. To be called once a process."""
    warnings.simplefilter("ignore")
    deep_ep.install()
    sys.modules.setdefault("grouped_gemm", _GroupedGemm())
    from megatron.core import parallel_state  # pyright: ignore[reportMissingImports]
    from megatron.core.tensor_parallel.random import (  # pyright: ignore[reportMissingImports]
        model_parallel_cuda_manual_seed,
    )
    from megatron.core.transformer import (  # pyright: ignore[reportMissingImports]
        multi_latent_attention,
    )
    from megatron.core.transformer.moe import moe_utils  # pyright: ignore[reportMissingImports]

    # 0.16.1 asks for both without Transformer Engine: one is undefined there, the other said to be there.
    if not hasattr(moe_utils, "te_general_gemm"):
        moe_utils.te_general_gemm = None
    if isinstance(multi_latent_attention.TELinear, Mock):
        multi_latent_attention.HAVE_TE = False
    parallel_state.initialize_model_parallel(expert_model_parallel_size=world)
    if device.type == "cuda":
        model_parallel_cuda_manual_seed(1)
        torch._dynamo.config.recompile_limit = 64  # Megatron's small functions, of every way and layer


def build(published: Published, way: Way, world: int, device: torch.device) -> Any:
    """Megatron's GPTModel in bfloat16, with weights that are the same for all ways."""
    from megatron.core.models.gpt import GPTModel  # pyright: ignore[reportMissingImports]
    from megatron.core.transformer.module import Float16Module  # pyright: ignore[reportMissingImports]

    config = published.config(world, device, way.dispatcher)
    model = GPTModel(
        config=config,
        transformer_layer_spec=_spec(config, way),
        vocab_size=published.kept_vocabulary,
        max_sequence_length=published.sequence,
        position_embedding_type="rope",
        rotary_base=published.rotary_base,
        share_embeddings_and_output_weights=False,
    )
    model = Float16Module(config, model.to(device))
    draw_weights(model, dist.get_rank(), config.num_moe_experts // world)
    return model


def _spec(config: Any, way: Way) -> Any:
    """Megatron's spec of a sparse layer with torch's attention, and the way's experts or layer."""
    from megatron.core.models.gpt.gpt_layer_specs import (  # pyright: ignore[reportMissingImports]
        get_gpt_layer_local_spec,
    )

    from imbrex.adapters.megatron import ImbrexExperts, with_imbrex

    spec = get_gpt_layer_local_spec(
        num_experts=config.num_moe_experts,
        moe_grouped_gemm=way.experts == "megatron",
        qk_layernorm=True,
        multi_latent_attention=config.multi_latent_attention,
        normalization="RMSNorm",
    )
    layer = spec.submodules
    attention = layer.self_attention
    inside = replace(attention.submodules, core_attention=TorchAttention)
    layer = replace(layer, self_attention=replace(attention, submodules=inside))
    if way.experts == "imbrex" and not way.layer:
        layer = replace(
            layer, mlp=replace(layer.mlp, submodules=replace(layer.mlp.submodules, experts=ImbrexExperts))
        )
    spec = replace(spec, submodules=layer)
    return with_imbrex(spec) if way.layer else spec


@torch.no_grad()
def draw_weights(model: nn.Module, rank: int, local_experts: int, scale: float = 0.02) -> None:
    """Draw every weight from a seed of its own, an expert's from its number, whatever holds it."""
    for name, parameter in model.named_parameters():
        if ".experts." in name:
            continue
        if parameter.ndim == 1:
            parameter.fill_(1.0)
        else:
            _draw(parameter, zlib.crc32(name.encode()), scale)
    layers = [module for module in model.modules() if hasattr(module, "token_dispatcher")]
    for number, layer in enumerate(layers):
        gate_up, down = expert_weights(layer.experts, local_experts)
        for local in range(local_experts):
            seed = 1000003 * (number + 1) + 2 * (rank * local_experts + local)
            _draw(gate_up[local], seed, scale)
            _draw(down[local], seed + 1, scale)


def expert_weights(experts: Any, local: int) -> tuple[Tensor, Tensor]:
    """The weights as views [e, 2F, D] and [e, D, F], in imbrex's experts or in Megatron's `GroupedMLP`."""
    if hasattr(experts, "weight1"):
        width = experts.weight1.shape[0]
        first, second = experts.weight1.view(local, width, -1), experts.weight2.view(local, -1, width)
        return first.mT, second.mT
    return experts.experts.gate_up_proj, experts.experts.down_proj


def _draw(weight: Tensor, seed: int, scale: float) -> None:
    drawn = torch.Generator(weight.device).manual_seed(seed)
    weight.copy_(torch.randn(weight.shape, generator=drawn, device=weight.device, dtype=weight.dtype) * scale)


def wrap(model: Any, program: str) -> tuple[Any, Any]:
    """The model in Megatron's data parallelism, and its optimizer."""
    from megatron.core.distributed import (  # pyright: ignore[reportMissingImports]
        DistributedDataParallel,
        DistributedDataParallelConfig,
    )

    sharded = program == "fsdp"
    settings = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True,
        overlap_grad_reduce=True,
        overlap_param_gather=sharded,
        gradient_reduce_div_fusion=dist.get_backend() == "nccl",
        use_distributed_optimizer=True,
        use_megatron_fsdp=sharded,
        data_parallel_sharding_strategy="optim_grads_params" if sharded else "no_shard",
    )
    kind = DistributedDataParallel
    if sharded:
        from megatron.core.distributed.fsdp.mcore_fsdp_adapter import (  # pyright: ignore[reportMissingImports]
            FullyShardedDataParallel as kind,
        )
    net = kind(config=model.config, ddp_config=settings, module=model)
    if sharded:
        leave_out_lone_reductions(net.module.grad_reduce_pipeline)
    return net, _optimizer(net)


def leave_out_lone_reductions(pipeline: Any) -> None:
    """Keep Megatron-FSDP 0.16.1 from reducing gradients over groups of one rank.

    Experts without a replica have their gradients where they are added up. In every micro-batch it copies
    them all, as a reduction, and adds the copy to them, so each weighs twice as much as the next (NVIDIA's
    Megatron-LM, issue 6660; mended behind this release by pull request 6773).
    """
    reduce = pipeline._bucket_group_gradient_reduce

    def reduce_over_several(buckets: list[int], **settings: Any) -> Any:
        if pipeline.get_fsdp_buffer(buckets[0]).data_parallel_group.size() > 1:
            return reduce(buckets, **settings)
        for bucket in buckets:
            pipeline.bucket_grad_ready_params[bucket] = set()
        return None

    pipeline._bucket_group_gradient_reduce = reduce_over_several


def _optimizer(net: Any) -> Any:
    """Megatron's distributed Adam, as Transformer Engine's in one kernel."""
    from megatron.core.optimizer import (  # pyright: ignore[reportMissingImports]
        OptimizerConfig,
        get_megatron_optimizer,
    )

    config = OptimizerConfig(
        optimizer="adam",
        lr=1e-5,
        weight_decay=0.1,
        bf16=True,
        params_dtype=torch.bfloat16,
        use_distributed_optimizer=True,
    )
    optimizer = get_megatron_optimizer(config, [net], use_gloo_process_groups=False)
    for part in getattr(optimizer, "chained_optimizers", [optimizer]):
        for group in part.optimizer.param_groups:
            group["fused"], group["foreach"] = True, False
    return optimizer


_NONE = types.SimpleNamespace(parameter_groups=())


class Training:
    """Steps of one way: `microbatches` forwards and backwards, then the optimizer."""

    def __init__(
        self, published: Published, name: str, program: str, microbatches: int, device: torch.device
    ) -> None:
        world = dist.get_world_size()
        self.net, self.optimizer = wrap(build(published, WAYS[name], world, device), program)
        self.net.train()
        drawn = torch.Generator().manual_seed(1 + dist.get_rank())
        shape = microbatches, 1, published.sequence + 1
        self.ids = torch.randint(published.kept_vocabulary, shape, generator=drawn).to(device)
        self.positions = torch.arange(published.sequence, device=device)[None]

    def gradients(self) -> Tensor:
        """Add up the gradients of all micro-batches, reduced over ranks; returns the mean loss."""
        from megatron.core.distributed import finalize_model_grads  # pyright: ignore[reportMissingImports]
        from megatron.core.transformer.moe.moe_utils import (  # pyright: ignore[reportMissingImports]
            MoEAuxLossAutoScaler,
        )

        self.net.zero_grad_buffer()
        self.optimizer.zero_grad()
        count, losses = len(self.ids), []
        for number, ids in enumerate(self.ids):
            with nullcontext() if number == count - 1 else self.net.no_sync():
                loss = self.net(ids[:, :-1], self.positions, None, labels=ids[:, 1:]).mean()
                MoEAuxLossAutoScaler.set_loss_scale(torch.ones(1, device=loss.device) / count)
                (loss / count).backward()
                losses.append(loss.detach())
        finalize_model_grads([self.net])
        for group in getattr(self.net, "param_and_grad_buffer", _NONE).parameter_groups:
            buffer = group.main_grad_buffer
            if buffer.data_parallel_group.size() == 1:  # its reduction was left out
                buffer.data.mul_(buffer.gradient_scaling_factor)
        return torch.stack(losses).mean()

    def update(self) -> None:
        updated, *_ = self.optimizer.step()
        assert updated, "Megatron's optimizer skipped the step"

    def release(self) -> None:
        """Free weights, gradients and the optimizer's states: Megatron's hooks hold them behind the model's
        end."""
        if hasattr(self.net, "stop_communication"):
            self.net.stop_communication()  # the next step's weights are on their way
        held: list[Any] = [self.ids]
        for part in getattr(self.optimizer, "chained_optimizers", [self.optimizer]):
            held += [x for group in part.optimizer.param_groups for x in group["params"]]
            held += [x for state in part.optimizer.state.values() for x in state.values()]
        held += [*held, *self.net.module.parameters()]
        held += [getattr(x, "grad", None) for x in held] + [getattr(x, "main_grad", None) for x in held]
        for group in getattr(self.net, "param_and_grad_buffer", _NONE).parameter_groups:
            held += [getattr(buffer, "data", None) for buffer in vars(group).values()]
        for tensor in held:
            if isinstance(tensor, Tensor):
                local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
                local.untyped_storage().resize_(0)
        gc.collect()
        if self.ids.is_cuda:
            torch.cuda.empty_cache()


def run(
    published: Published,
    name: str,
    program: str,
    *,
    microbatches: int,
    warm: int,
    repeats: int,
    device: torch.device,
) -> dict[str, Any]:
    """Losses of the first `warm` steps, and seconds of `repeats` others, each the slowest rank's: whole
    steps, and of those the gradients. With the peak of a rank's memory."""
    from megatron.core.transformer.moe import fused_a2a  # pyright: ignore[reportMissingImports]

    fused_a2a.reset_hybrid_ep_buffer()  # it keeps the sizes of the first model
    foreign = foreign_bytes()
    training = Training(published.under(program), name, program, microbatches, device)
    losses = []
    for _ in range(warm):
        losses.append(training.gradients())
        training.update()
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    marks = list(_marked(training, repeats, device))
    steps = [_seconds(a, c) for (a, _), (c, _) in itertools.pairwise(marks)]
    gradients = [_seconds(a, b) for a, b in marks[:-1]]
    peak = 0
    if device.type == "cuda":
        peak = torch.cuda.max_memory_allocated() + max(foreign_bytes() - foreign, 0)
    training.release()
    slowest = torch.tensor([*steps, *gradients, peak / GIB], device=device, dtype=torch.float64)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    mean = torch.stack(losses).double().to(device)
    dist.all_reduce(mean)
    figures = slowest.tolist()
    return {
        "losses": (mean / dist.get_world_size()).tolist(),
        "steps": figures[:repeats],
        "gradients": figures[repeats : 2 * repeats],
        "peak_gib": figures[-1],
    }


def _marked(training: Training, repeats: int, device: torch.device) -> Iterator[tuple[Any, Any]]:
    """Marks before each step and between its two parts, and one behind the last."""
    dist.barrier()
    pairs = []
    for _ in range(repeats):
        before = _mark(device)
        training.gradients()
        pairs.append((before, _mark(device)))
        training.update()
    pairs.append((_mark(device), None))
    if device.type == "cuda":
        torch.cuda.synchronize()
    return iter(pairs)


def _mark(device: torch.device) -> Any:
    if device.type == "cpu":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def _seconds(a: Any, b: Any) -> float:
    return b - a if isinstance(a, float) else a.elapsed_time(b) * 1e-3
