"""Engines' own classes, from their released wheels, over the deep_ep door: exact sums of small numbers.

requirements-engines.txt says how the wheels come here; without them these tests are skipped. The files that
run are named below. What they take from the rest of their engine and from its kernels is a stand-in.
"""

from __future__ import annotations

import importlib
import logging
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from imbrex.adapters import deep_ep
from tests.ranks.alone import alone, why_not_installed
from tests.ranks.pool import Pool, Ranks

E, K, D, BLOCK = 8, 2, 256, 128
MOE = "model_executor.layers.fused_moe"
DEEP_EP = "srt.layers.moe.token_dispatcher.deepep"
FP8 = torch.float8_e4m3fn


def released(package: str, version: str) -> pytest.MarkDecorator:
    reason = why_not_installed(package, version, "requirements-engines.txt")
    return pytest.mark.skipif(reason is not None, reason=str(reason))


@pytest.fixture(scope="module")
def pair() -> Iterator[Pool]:
    """Ranks of their own: deep_ep stays installed in them."""
    pool = Pool(2)
    yield pool
    pool.close(20)


def batch(rank: int, tokens: int) -> tuple[Tensor, Tensor, Tensor]:
    """Whole numbers in bfloat16, ids and weights, such that all sums are exact."""
    drawn = torch.Generator().manual_seed(rank)
    x_TD = torch.randint(-3, 4, (tokens, D), generator=drawn).bfloat16()
    ids_TK = torch.rand(tokens, E, generator=drawn).argsort(1)[:, :K]
    weights_TK = torch.randint(1, 3, (tokens, K), generator=drawn) / 4
    return x_TD, ids_TK, weights_TK


def expert(x_ND: Tensor, number: int) -> Tensor:
    """What expert `number` makes of rows: each has its own place and factor."""
    return x_ND.roll(number, 1) * (number + 1)


def dense(x_TD: Tensor, ids_TK: Tensor, weights_TK: Tensor) -> Tensor:
    """What all experts make of the tokens, weighted and summed, on one rank."""
    y_TD = torch.zeros_like(x_TD)
    for token, (ids, weights) in enumerate(zip(ids_TK.tolist(), weights_TK, strict=True)):
        for number, weight in zip(ids, weights, strict=True):
            y_TD[token] += expert(x_TD[token : token + 1], number)[0] * weight
    return y_TD


def quantised(x_TD: Tensor) -> tuple[Tensor, Tensor]:
    """fp8 values and one scale a block; whole numbers up to three pass unchanged."""
    scales = torch.full((len(x_TD), D // BLOCK), 0.5)
    return (x_TD.float() * 2).to(FP8), scales


def restored(values_ND: Tensor, scales_NS: Tensor | None) -> Tensor:
    if scales_NS is None:
        return values_ND
    return (values_ND.float() * scales_NS.repeat_interleave(BLOCK, 1)).bfloat16()


def counts_of(world: int, rank: int, tokens: list[int]) -> list[int]:
    """Choices of all ranks' tokens that name this rank's experts."""
    ids = torch.cat([batch(other, tokens[other])[1] for other in range(world)])
    return torch.bincount(ids.flatten(), minlength=E).view(world, -1)[rank].tolist()


def vllm_names(ranks: Ranks) -> dict[str, dict[str, Any]]:
    """What vLLM's files find in the rest of vLLM: one host, unquantised logs, the product of its kernels."""
    dp = SimpleNamespace(rank_in_group=ranks.rank, world_size=ranks.world_size)

    def moe_sum(x_NKD: Tensor, y_ND: Tensor) -> None:
        y_ND.copy_(x_NKD.sum(1))

    def quantise(x_TD: Tensor, scale: Any, **options: Any) -> tuple[Tensor, Tensor]:
        assert options["block_shape"] == [BLOCK, BLOCK]
        return quantised(x_TD)

    return {
        "logger": {"init_logger": logging.getLogger},
        "platforms": {"current_platform": SimpleNamespace(is_rocm=lambda: False)},
        "_custom_ops": {"moe_sum": moe_sum},
        "envs": SimpleNamespace(
            VLLM_DEEPEP_BUFFER_SIZE_MB=1024, VLLM_DEEPEP_HIGH_THROUGHPUT_FORCE_INTRA_NODE=False
        ).__dict__,
        "distributed.parallel_state": {
            "get_dp_group": lambda: dp,
            "get_tp_group": lambda: None,
            "in_the_same_node_as": lambda group, source_rank: [True] * group.size(),
        },
        "utils.torch_utils": {"PIN_MEMORY": False},
        f"{MOE}.utils": {"moe_kernel_quantize_input": quantise},
    }


VLLM = [
    "distributed.device_communicators.all2all",
    "distributed.device_communicators.base_device_communicator",
    f"{MOE}.prepare_finalize.deepep_ht",
    f"{MOE}.modular_kernel",
    f"{MOE}.topk_weight_and_reduce",
    "utils.import_utils",
    "utils.math_utils",
    "v1.worker.ubatching",
]


def over_vllm(ranks: Ranks, tokens: list[int], fp8: bool, asynchronous: bool) -> tuple[bool, list[int]]:
    """Whether `DeepEPHTPrepareAndFinalize` gives the dense sum, and its counts of the local experts."""
    deep_ep.install()
    with alone("vllm", VLLM, vllm_names(ranks)):
        all2all = importlib.import_module("vllm.distributed.device_communicators.all2all")
        theirs = importlib.import_module(f"vllm.{MOE}.prepare_finalize.deepep_ht")
        reduce = importlib.import_module(f"vllm.{MOE}.topk_weight_and_reduce")
        manager = all2all.DeepEPHTAll2AllManager(ranks.group)
        own = E // ranks.world_size
        first = ranks.rank * own
        buffer = manager.get_handle({})
        assert buffer is manager.get_handle({})
        moe = theirs.DeepEPHTPrepareAndFinalize(buffer, ranks.world_size, ranks.world_size, first)
        shape = [BLOCK, BLOCK] if fp8 else None
        config = SimpleNamespace(
            is_block_quantized=fp8,
            block_shape=shape,
            quant_dtype=FP8,
            per_act_token_quant=False,
            a1_scale=None,
        )
        x_TD, ids_TK, weights_TK = batch(ranks.rank, tokens[ranks.rank])
        given = x_TD, weights_TK, ids_TK, E, None, False, config
        rows, scales, meta, ids_NK, weights_NK = (
            moe.prepare_async(*given, defer_input_quant=not fp8)()
            if asynchronous
            else moe.prepare(*given, defer_input_quant=not fp8)
        )
        assert (rows.dtype, scales is not None) == ((FP8, True) if fp8 else (torch.bfloat16, False))
        rows_ND = restored(rows, scales)
        y_NKD = rows_ND.new_zeros(len(rows_ND), K, D)
        # As their kernels do: ids of other ranks' experts, which -1 has become, give nothing.
        for row, column in ((ids_NK >= first) & (ids_NK < first + own)).nonzero().tolist():
            y_NKD[row, column] = expert(rows_ND[row : row + 1], int(ids_NK[row, column]))[0]
        output = torch.empty_like(x_TD)
        back = output, y_NKD, weights_NK, ids_NK, False, reduce.TopKWeightAndReduceDelegate()
        if asynchronous:
            moe.finalize_async(*back)()
        else:
            moe.finalize(*back)
        manager.destroy()
        return torch.equal(output, dense(x_TD, ids_TK, weights_TK)), meta.expert_num_tokens.tolist()


@released("vllm", "0.33.0")
@pytest.mark.parametrize(
    ("tokens", "fp8", "asynchronous"), [([9, 6], False, False), ([0, 7], False, True), ([9, 6], True, True)]
)
def test_vllm_s_own_class_sums_exactly(pair: Pool, tokens: list[int], fp8: bool, asynchronous: bool) -> None:
    told = pair.run(2, over_vllm, tokens, fp8, asynchronous)
    assert told == [(True, counts_of(2, rank, tokens)) for rank in range(2)]


def sglang_names(fp8: bool) -> dict[str, dict[str, Any]]:
    """What SGLang's files find in the rest of SGLang: an NVIDIA GPU, DeepGEMM, settings as they default."""
    moe = SimpleNamespace(deepep_config=None, tbo_enabled=None)
    resources = SimpleNamespace(buffers={})
    arguments = SimpleNamespace(moe=SimpleNamespace(deepep_dispatcher_output_dtype="fp8" if fp8 else "bf16"))
    envs = SimpleNamespace(
        SGLANG_DEEPEP_NUM_MAX_DISPATCH_TOKENS_PER_RANK=SimpleNamespace(get=lambda: 128),
        SGLANG_IN_DEEPGEMM_PRECOMPILE_STAGE=SimpleNamespace(get=lambda: False),
    )

    def quantise(x_TD: Tensor, block: int, **options: Any) -> tuple[Tensor, Tensor]:
        assert block == BLOCK
        return quantised(x_TD)

    recorder = SimpleNamespace(on_deepep_dispatch_normal=lambda *_, **__: None)
    gemm = SimpleNamespace(ENABLE_JIT_DEEPGEMM=True, DEEPGEMM_SCALE_UE8M0=False)
    return {
        "srt.environ": {"envs": envs},
        "srt.eplb.expert_distribution": {"get_global_expert_distribution_recorder": lambda: recorder},
        "srt.layers": {"deep_gemm_wrapper": gemm},
        "srt.layers.dp_attention": {"get_is_extend_in_batch": lambda: True},
        "srt.runtime_context": {
            "get_exec": lambda: arguments,
            "get_flags": lambda: SimpleNamespace(moe=moe),
            "get_resources": lambda: resources,
            "get_server_args": lambda: arguments,
        },
        "srt.utils": {
            "get_bool_env_var": lambda name: False,
            "get_cuda_version": lambda: (13, 0),
            "is_cuda": lambda: True,
            "is_flashinfer_available": lambda: False,
            "is_hip": lambda: False,
            "is_npu": lambda: False,
        },
        "kernels.ops.quantization.fp8_kernel": {"sglang_per_token_group_quant_fp8": quantise},
    }


SGLANG = [DEEP_EP, "srt.layers.moe.token_dispatcher.base", "srt.layers.moe.utils"]


def over_sglang(ranks: Ranks, tokens: list[int], fp8: bool, asynchronous: bool) -> tuple[bool, list[int]]:
    """Whether `DeepEPDispatcher` gives the dense sum, and its counts of the local experts."""
    deep_ep.install()
    patch = pytest.MonkeyPatch()
    card = SimpleNamespace(multi_processor_count=132)
    patch.setattr(torch.cuda, "get_device_properties", lambda device: card)
    with alone("sglang", SGLANG, sglang_names(fp8)), patch.context():
        theirs = importlib.import_module(f"sglang.{DEEP_EP}")
        own = E // ranks.world_size
        dispatcher = theirs.DeepEPDispatcher(
            group=ranks.group,
            router_topk=K,
            num_experts=E,
            num_local_experts=own,
            hidden_size=D,
            params_dtype=torch.bfloat16,
            deepep_mode=theirs.DeepEPMode.NORMAL,
            async_finish=asynchronous,
        )
        x_TD, ids_TK, weights_TK = batch(ranks.rank, tokens[ranks.rank])
        choices = SimpleNamespace(topk_weights=weights_TK, topk_ids=ids_TK.int())
        rows, scales, ids_NK, weights_NK, counts = dispatcher.dispatch(x_TD, choices)
        assert (rows.dtype, scales is not None) == ((FP8, True) if fp8 else (torch.bfloat16, False))
        rows_ND = restored(rows, scales)
        y_ND = torch.zeros_like(rows_ND)
        for row, column in (ids_NK >= 0).nonzero().tolist():
            number = ranks.rank * own + int(ids_NK[row, column])
            y_ND[row] += expert(rows_ND[row : row + 1], number)[0] * weights_NK[row, column]
        home = dispatcher.combine(theirs.DeepEPNormalCombineInput(y_ND, ids_NK, weights_NK))
    patch.undo()
    return torch.equal(home, dense(x_TD, ids_TK, weights_TK)), counts


@released("sglang", "0.5.23")
@pytest.mark.parametrize(
    ("tokens", "fp8", "asynchronous"), [([9, 6], False, False), ([0, 7], False, True), ([9, 6], True, True)]
)
def test_sglang_s_own_class_sums_exactly(
    pair: Pool, tokens: list[int], fp8: bool, asynchronous: bool
) -> None:
    told = pair.run(2, over_sglang, tokens, fp8, asynchronous)
    # With DeepGEMM they ask for counts in multiples of its tile.
    rounded = [[-(-n // 128) * 128 for n in counts_of(2, rank, tokens)] for rank in range(2)]
    assert told == [(True, counts) for counts in rounded]
