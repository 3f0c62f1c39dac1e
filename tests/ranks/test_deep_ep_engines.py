"""Engines' own classes, from their released wheels, over the deep_ep door: exact sums of small numbers; and
torchtitan's own DeepEP back end, forward and backward.

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
import torch.distributed as dist
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


def sglang_dispatcher(theirs: Any, ranks: Ranks, width: int, mode: str, **options: bool) -> Any:
    """SGLang's own dispatcher, of experts spread evenly over the ranks."""
    return theirs.DeepEPDispatcher(
        group=ranks.group,
        router_topk=K,
        num_experts=E,
        num_local_experts=E // ranks.world_size,
        hidden_size=width,
        params_dtype=torch.bfloat16,
        deepep_mode=getattr(theirs.DeepEPMode, mode),
        **options,
    )


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
        dispatcher = sglang_dispatcher(theirs, ranks, D, "NORMAL", async_finish=asynchronous)
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


WIDE, MOST = 2048, 12
"""The least width that vLLM takes for blocks, and the tokens of a rank that there is room for."""


def wide_batch(rank: int, tokens: int) -> tuple[Tensor, Tensor, Tensor]:
    """Whole numbers in bfloat16 up to 3, one of them in every block of 128, so that fp8 changes none."""
    x_TD, ids_TK, weights_TK = batch(rank, tokens)
    x_TD = x_TD.repeat(1, WIDE // x_TD.shape[1])
    x_TD[:, ::BLOCK] = 3.5
    return x_TD, ids_TK, weights_TK


def wide_dense(rank: int, tokens: int) -> Tensor:
    return dense(*wide_batch(rank, tokens))


def through_experts(ranks: Ranks, rows: Any, counts_e: Tensor) -> Tensor:
    """What this rank's experts make of the blocks; NaN where there is no row."""
    if isinstance(rows, tuple):
        values, scales = rows
        assert values.dtype == FP8
        rows = (values.float() * scales.repeat_interleave(BLOCK, 2)).bfloat16()
    y_eMD = torch.full_like(rows, float("nan"))
    for slot, count in enumerate(counts_e.tolist()):
        number = ranks.rank * len(counts_e) + slot
        y_eMD[slot, :count] = expert(rows[slot, :count], number)
    return y_eMD


def vllm_decoding_names(ranks: Ranks) -> dict[str, dict[str, Any]]:
    more = {
        "VLLM_DEEPEPLL_NVFP4_DISPATCH": False,
        "VLLM_DEEPEP_LOW_LATENCY_USE_MNNVL": False,
    }
    parallel = SimpleNamespace(enable_fault_tolerance=False)
    names = vllm_names(ranks)
    names["envs"] = dict(names["envs"]) | more
    names["config"] = {"get_current_vllm_config": lambda: SimpleNamespace(parallel_config=parallel)}
    names[f"{MOE}.utils"] = {"moe_kernel_quantize_input": lambda x, *_, **__: (x, None)}
    counts = torch.tensor([MOST] * ranks.world_size, device="cpu")
    names["forward_context"] = {
        "get_forward_context": lambda: SimpleNamespace(
            dp_metadata=SimpleNamespace(num_tokens_across_dp_cpu=counts)
        )
    }
    return names


def config_of(fp8: bool) -> Any:
    shape = [BLOCK, BLOCK] if fp8 else None
    return SimpleNamespace(
        is_block_quantized=False,
        block_shape=shape,
        quant_dtype=FP8 if fp8 else None,
        per_act_token_quant=False,
        a1_scale=None,
        a2_scale=None,
        is_scale_swizzled=False,
    )


LOW_LATENCY = [*VLLM, f"{MOE}.prepare_finalize.deepep_ll"]


def over_vllm_blocks(ranks: Ranks, tokens: list[int], fp8: bool) -> tuple[bool, list[int]]:
    """Whether `DeepEPLLPrepareAndFinalize` gives the dense sum, and its counts of the local experts."""
    deep_ep.install()
    with alone("vllm", LOW_LATENCY, vllm_decoding_names(ranks)):
        all2all = importlib.import_module("vllm.distributed.device_communicators.all2all")
        theirs = importlib.import_module(f"vllm.{MOE}.prepare_finalize.deepep_ll")
        reduce = importlib.import_module(f"vllm.{MOE}.topk_weight_and_reduce")
        manager = all2all.DeepEPLLAll2AllManager(ranks.group)
        sizes = {"num_ep_ranks": ranks.world_size, "num_local_experts": E // ranks.world_size}
        buffer = manager.get_handle(
            {
                "max_num_tokens_per_dp_rank": MOST,
                "token_hidden_size": WIDE,
                "num_global_experts": E,
                **sizes,
            }
        )
        moe = theirs.DeepEPLLPrepareAndFinalize(buffer, MOST, ranks.world_size, use_fp8_dispatch=fp8)
        x_TD, ids_TK, weights_TK = wide_batch(ranks.rank, tokens[ranks.rank])
        hook, receive = moe.prepare_async(x_TD, weights_TK, ids_TK, E, None, False, config_of(fp8))
        hook()
        rows, scales, meta, _, _ = receive()
        rows = rows if scales is None else (rows, scales)
        y_eMD = through_experts(ranks, rows, meta.expert_num_tokens)
        output = torch.empty_like(x_TD)
        back = output, y_eMD, weights_TK, ids_TK, False, reduce.TopKWeightAndReduceDelegate()
        hook, receive = moe.finalize_async(*back)
        hook()
        receive()
        manager.destroy()
    exact = torch.equal(output, wide_dense(ranks.rank, tokens[ranks.rank]))
    return exact, meta.expert_num_tokens.tolist()


@released("vllm", "0.33.0")
@pytest.mark.parametrize(("tokens", "fp8"), [([9, 6], False), ([0, 7], True)])
def test_vllm_s_blocks_sum_exactly(pair: Pool, tokens: list[int], fp8: bool) -> None:
    told = pair.run(2, over_vllm_blocks, tokens, fp8)
    assert told == [(True, counts_of(2, rank, tokens)) for rank in range(2)]


V2 = [*VLLM, f"{MOE}.prepare_finalize.deepep_v2"]


def over_v2(ranks: Ranks, tokens: list[int]) -> bool:
    """Whether `DeepEPV2PrepareAndFinalize`, as it decodes, gives the dense sum."""
    deep_ep.install()
    names = vllm_decoding_names(ranks)
    names["triton_utils"] = {"triton": SimpleNamespace(jit=lambda f: f), "tl": SimpleNamespace(constexpr=int)}
    with alone("vllm", V2, names):
        theirs = importlib.import_module(f"vllm.{MOE}.prepare_finalize.deepep_v2")
        reduce = importlib.import_module(f"vllm.{MOE}.topk_weight_and_reduce")
        own, world = E // ranks.world_size, ranks.world_size
        buffer = deep_ep.ElasticBuffer(ranks.group, num_max_tokens_per_rank=64, hidden=WIDE, num_topk=K)
        first = ranks.rank * own
        moe = theirs.DeepEPV2PrepareAndFinalize(buffer, world, world, first, E, K, use_cudagraph=True)
        # The experts make local ids global, which a kernel of Triton's does else.
        moe.defer_globalize = True
        x_TD, ids_TK, weights_TK = wide_batch(ranks.rank, tokens[ranks.rank])
        given = x_TD, weights_TK, ids_TK, E, None, False, config_of(False)
        rows_ND, _, meta, ids_NK, weights_NK = moe.prepare(*given)
        assert len(rows_ND) == 16 * world, "room for the most tokens, as a power of two"
        y_ND = torch.zeros_like(rows_ND)
        count = int(meta.psum_recv_per_rank[-1])
        for row, column in (ids_NK[:count] >= 0).nonzero().tolist():
            number = first + int(ids_NK[row, column])
            y_ND[row] += expert(rows_ND[row : row + 1], number)[0] * weights_NK[row, column]
        output = torch.empty_like(x_TD)
        done = moe.finalize_async(output, y_ND, weights_NK, ids_NK, False, reduce.TopKWeightAndReduceNoOP())
        done()
    return torch.equal(output, wide_dense(ranks.rank, tokens[ranks.rank]))


@released("vllm", "0.33.0")
def test_vllm_s_v2_decodes_exactly(pair: Pool) -> None:
    assert pair.run(2, over_v2, [9, 6]) == [True, True]


def over_sglang_blocks(ranks: Ranks, tokens: list[int], fp8: bool, hooked: bool) -> tuple[bool, list[int]]:
    """Whether `DeepEPDispatcher` in its low-latency mode gives the dense sum, and its counts."""
    deep_ep.install()
    names = sglang_names(fp8)
    names["srt.layers.dp_attention"] = {"get_is_extend_in_batch": lambda: False}
    recorder = SimpleNamespace(on_deepep_dispatch_low_latency=lambda *_: None)
    names["srt.eplb.expert_distribution"] = {"get_global_expert_distribution_recorder": lambda: recorder}
    names["srt.layers"]["deep_gemm_wrapper"].DEEPGEMM_BLACKWELL = False
    names["srt.environ"]["envs"].SGLANG_DEEPEP_NUM_MAX_DISPATCH_TOKENS_PER_RANK = SimpleNamespace(
        get=lambda: MOST
    )
    patch = pytest.MonkeyPatch()
    card = SimpleNamespace(multi_processor_count=132)
    patch.setattr(torch.cuda, "get_device_properties", lambda device: card)
    patch.setenv("NVSHMEM_QP_DEPTH", "1024")
    with alone("sglang", SGLANG, names):
        theirs = importlib.import_module(f"sglang.{DEEP_EP}")
        dispatcher = sglang_dispatcher(theirs, ranks, WIDE, "LOW_LATENCY", return_recv_hook=hooked)
        x_TD, ids_TK, weights_TK = wide_batch(ranks.rank, tokens[ranks.rank])
        choices = SimpleNamespace(topk_weights=weights_TK, topk_ids=ids_TK.int())
        rows, scales, ids, weights, counts_e, _ = dispatcher.dispatch(x_TD, choices)
        y_eMD = through_experts(ranks, rows if scales is None else (rows, scales), counts_e)
        home = dispatcher.combine(theirs.DeepEPLLCombineInput(y_eMD, ids, weights))
    patch.undo()
    return torch.equal(home, wide_dense(ranks.rank, tokens[ranks.rank])), counts_e.tolist()


@released("sglang", "0.5.23")
@pytest.mark.parametrize(("tokens", "fp8", "hooked"), [([9, 6], False, True), ([0, 7], True, False)])
def test_sglang_s_blocks_sum_exactly(pair: Pool, tokens: list[int], fp8: bool, hooked: bool) -> None:
    told = pair.run(2, over_sglang_blocks, tokens, fp8, hooked)
    assert told == [(True, counts_of(2, rank, tokens)) for rank in range(2)]


TITAN = why_not_installed("torchtitan", "0.3.0", "requirements-doors.txt")


def over_titan(ranks: Ranks) -> list[float]:
    """Errors of torchtitan's DeepEP back end against all experts on one rank: output, and the gradients of
    tokens, scores and experts."""
    deep_ep.install()
    with alone("torchtitan", ["distributed.deepep.deepep"], {}):
        theirs = importlib.import_module("torchtitan.distributed.deepep.deepep")
    for name in ("dispatch", "combine"):
        torch.library.impl(theirs._lib, name, "CPU")(getattr(theirs, f"_{name}_op_impl"))
    drawn = torch.Generator().manual_seed(ranks.rank)
    tokens, own = (9, 6)[ranks.rank], E // ranks.world_size
    x_TD = torch.randn(tokens, 16, generator=drawn)
    ids_TK = torch.rand(tokens, E, generator=drawn).argsort(1)[:, :K]
    scores_TK = torch.rand(tokens, K, generator=drawn)
    w_EDD = torch.randn(E, 16, 16, generator=torch.Generator().manual_seed(9)) * 0.3
    first = ranks.rank * own
    ours = [t.clone().requires_grad_() for t in (x_TD, scores_TK, w_EDD[first : first + own])]
    theirs.get_buffer(ranks.group, hidden=16, num_max_tokens_per_rank=9, num_topk=K)
    rows, counts_e, state = theirs.dispatch_tokens(ours[0], ids_TK, ours[1], own, E, num_tokens_per_rank=9)
    parts = rows.split(counts_e.tolist())
    y_TD = theirs.combine_tokens(torch.cat([p @ w for p, w in zip(parts, ours[2], strict=True)]), state)
    theirs.sync_combine()
    y_TD.square().sum().backward()
    all_of = [t.clone().requires_grad_() for t in (x_TD, scores_TK, w_EDD)]
    every_TKD = torch.einsum("td,tkde->tke", all_of[0], all_of[2][ids_TK])
    expected_TD = (every_TKD * all_of[1][:, :, None]).sum(1)
    expected_TD.square().sum().backward()
    grads = [t.grad for t in all_of if t.grad is not None]
    dist.all_reduce(grads[2], group=ranks.group)
    pairs = zip(
        [y_TD, *(t.grad for t in ours)], [expected_TD, *grads[:2], grads[2][first:][:own]], strict=True
    )
    return [float((a - b).abs().max()) for a, b in pairs if a is not None]


@pytest.mark.skipif(TITAN is not None, reason=str(TITAN))
def test_torchtitan_s_own_deep_ep_trains(pair: Pool) -> None:
    for gaps in pair.run(2, over_titan):
        assert len(gaps) == 4
        assert max(gaps) < 2e-5
