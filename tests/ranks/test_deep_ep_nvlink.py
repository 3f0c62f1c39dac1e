"""Both DeepEP buffers over the NVLink kernels, without a GPU: the tests of the other transports once more,
with the kernels compiled by g++ among gloo ranks."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch

from imbrex.adapters.deep_ep import Buffer, HybridEPBuffer, opening
from imbrex.kernels.exchange import NvlinkExchange
from tests.emulated import kernel
from tests.ranks import test_deep_ep, test_deep_ep_hybrid, test_deep_ep_megatron
from tests.ranks.emulated_nvlink import EmulatedNvlink
from tests.ranks.pool import Pool, Ranks
from tests.ranks.test_deep_ep import TOKENS

pytestmark = pytest.mark.skipif(not kernel.available(), reason="the emulation needs g++")
HALF_EMPTY = (0, 0, 0, 2)


def over_nvlink(ranks: Ranks, function: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
    """What `auto` picks here is the emulated NVLink."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(opening.Nvlink, "of_or_reason", lambda group, **_: (EmulatedNvlink(group), ""))
        return function(ranks, *arguments)


class Emulated:
    """A pool whose ranks are joined by NVLink."""

    def __init__(self, pool: Pool) -> None:
        self.pool = pool

    def run(self, world: int, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        return self.pool.run(world, over_nvlink, function, arguments)


@pytest.fixture
def nvlink(pool: Pool) -> Any:
    return Emulated(pool)


@pytest.mark.parametrize("tokens", [TOKENS, HALF_EMPTY], ids=["ragged", "nearly none"])
def test_every_call_of_the_legacy_buffer(nvlink: Any, tokens: tuple[int, ...]) -> None:
    test_deep_ep.test_every_call(nvlink, 4, tokens)


@pytest.mark.parametrize("tokens", [TOKENS, HALF_EMPTY], ids=["ragged", "nearly none"])
def test_compact_rows(nvlink: Any, tokens: tuple[int, ...]) -> None:
    test_deep_ep_hybrid.test_compact_rows(nvlink, 4, tokens)


@pytest.mark.parametrize("budget", [None, 64, 8, 0], ids=["exact", "ample", "too small", "none"])
def test_expert_major_rows(nvlink: Any, budget: int | None) -> None:
    test_deep_ep_hybrid.test_expert_major_rows(nvlink, 2, TOKENS, budget)


@pytest.mark.parametrize("module", [test_deep_ep, test_deep_ep_hybrid], ids=["legacy", "hybrid"])
def test_one_rank_s_mistake_is_every_rank_s_and_the_buffer_goes_on(nvlink: Any, module: Any) -> None:
    for kind in module.MESSAGES:
        module.test_one_rank_s_mistake_is_every_rank_s_and_the_buffer_goes_on(nvlink, kind)


def test_one_rank_s_mistake_without_a_plan_is_every_rank_s_at_every_call(nvlink: Any) -> None:
    for kind in [*test_deep_ep.WRONG, *test_deep_ep.CALLS]:
        test_deep_ep.test_one_rank_s_mistake_without_a_plan_is_every_rank_s_at_every_call(nvlink, kind)


def test_worst_case_sizes_and_fp8(nvlink: Any) -> None:
    test_deep_ep.test_worst_case_sizes_and_fp8(nvlink)


def test_megatrons_back_ends(nvlink: Any) -> None:
    test_deep_ep_megatron.test_the_deepep_back_end(nvlink, 2)
    test_deep_ep_megatron.test_the_hybridep_back_end(nvlink, 2, None)
    test_deep_ep_megatron.test_the_hybridep_back_end(nvlink, 2, 96)


def run_wider(ranks: Ranks) -> str:
    buffer: Any = Buffer(ranks.group)
    x_TD, ids_TK, weights_TK = test_deep_ep.draw(ranks.rank)
    rows, *_, handle, _ = test_deep_ep.dispatch(buffer, x_TD, ids_TK, weights_TK)
    with pytest.raises(ValueError, match="give rows as wide") as caught:
        buffer.combine(rows.repeat(1, 2), handle)
    return str(caught.value)


def test_wider_rows_than_were_dispatched_are_refused(nvlink: Any) -> None:
    for said in nvlink.run(2, run_wider):
        assert re.search("on rank 0, 1024 bytes a row to sum, 512 dispatched", said)


def run_other_sizes(ranks: Ranks) -> list[str]:
    """Inputs that every rank could serve by itself, on heaps of different sizes."""
    buffer, x_TD, ids_TK = HybridEPBuffer(ranks.group, 16, 4, 2), torch.ones(4, 16), torch.arange(4)[:, None]
    odd, said = ranks.rank == 1, []
    for other in (
        {"pad_multiple": 2},
        {"topk_idx": ids_TK.repeat(1, 2).index_fill(1, torch.tensor([1]), -1)},
    ):
        good: dict[str, Any] = {"hidden": x_TD, "topk_idx": ids_TK, "pad_multiple": 1}
        with pytest.raises(ValueError, match="ranks disagree about") as caught:
            buffer.dispatch_with_permute(**good | (other if odd else {}))
        said.append(str(caught.value))
        assert buffer.dispatch_with_permute(**good)[3].tolist() == [2, 2]
    return said


def test_sizes_that_differ_are_compared_before_kernels_wait(nvlink: Any) -> None:
    first, second = nvlink.run(2, run_other_sizes)
    assert first == second
    assert "pad_multiple: 1 on rank 0, 2 on rank 1" in first[0]
    assert "the number of choices: 1 on rank 0, 2 on rank 1" in first[1]


def run_uncopied(ranks: Ranks) -> list[bool]:
    """Whether kernels read the rows where the program has them, and sum those at an odd address alike."""
    buffer: Any = Buffer(ranks.group)
    x_TD, ids_TK, weights_TK = test_deep_ep.draw(ranks.rank)
    rows, *_, handle, _ = test_deep_ep.dispatch(buffer, x_TD, ids_TK, weights_TK)
    _, _, blocks, _, _ = buffer.low_latency_dispatch(x_TD, ids_TK, 8, test_deep_ep.E, use_fp8=False)
    given_eMD = torch.ones(test_deep_ep.E // 2, 16, test_deep_ep.D).bfloat16()
    read, theirs = [], NvlinkExchange.combine
    odd = torch.cat([rows.new_zeros(1), rows.flatten()])[1:].view_as(rows)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            NvlinkExchange,
            "combine",
            lambda self, given, *a, **k: read.append(given.data_ptr()) or theirs(self, given, *a, **k),
        )
        sums = buffer.combine(rows, handle)[0]
        buffer.low_latency_combine(given_eMD, ids_TK, weights_TK, blocks)
        again = buffer.combine(odd, handle)[0]
    assert read[:2] == [rows.data_ptr(), given_eMD.data_ptr()]
    return [odd.data_ptr() % 16 > 0, read[2] % 16 == 0, torch.equal(sums, again)]


def test_sums_copy_no_rows_that_lie_right(nvlink: Any) -> None:
    assert nvlink.run(2, run_uncopied) == [[True] * 3] * 2
