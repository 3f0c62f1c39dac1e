"""The doors for DeepEP's programs that need no ranks: registration, refusals, settings, events."""

from __future__ import annotations

import inspect
import tomllib
import typing
from pathlib import Path
from typing import Any

import pytest
import torch

from imbrex.adapters import deep_ep
from imbrex.adapters.deep_ep.permuted import make_permutation
from tests.ranks.forked import run_code

INSTALL = """
import importlib, importlib.util, sys, types
import imbrex.adapters.deep_ep as doors
assert importlib.util.find_spec("deep_ep") is None, "the test is for a machine without DeepEP"
for name in ("deep_ep", "deep_ep_cpp"):
    sys.modules[name] = types.ModuleType(name)
    before = dict(sys.modules)
    try:
        doors.install()
    except RuntimeError as error:
        print(error)
    assert sys.modules == before
    del sys.modules[name]
doors.install()
doors.install()
from deep_ep import Buffer, Config, ElasticBuffer, EventOverlap, HybridEPBuffer, topk_idx_t
from deep_ep.hybrid_ep_buffer import indices_to_map
from deep_ep.utils import EventHandle
import deep_ep.utils
from deep_ep.utils.event import EventOverlap as EventOfModule
assert EventOfModule is EventOverlap
assert importlib.util.find_spec("deep_ep.utils.event") is not None
assert importlib.util.find_spec("deep_ep") is not None
assert importlib.import_module("deep_ep") is deep_ep
assert (Buffer, HybridEPBuffer) == (doors.Buffer, doors.HybridEPBuffer)
assert deep_ep.utils.EventOverlap is EventOverlap is doors.EventOverlap
assert deep_ep.hybrid_ep_buffer.indices_to_map is doors.indices_to_map
"""


@pytest.mark.untraced
def test_installed_modules_are_found_and_real_ones_are_left_alone(tmp_path: Path) -> None:
    said = run_code(INSTALL, folder=tmp_path).splitlines()
    for line, name in zip(said, ("deep_ep", "deep_ep_cpp"), strict=True):
        assert f"another {name} is already imported; call install() before" in line


EVENTS = "previous_event async_finish allocate_on_comm_stream"
ROUTING = "topk_idx topk_weights"
SIGNATURES = {
    "Buffer.__init__": "group num_nvl_bytes num_rdma_bytes low_latency_mode num_qps_per_rank "
    "allow_nvlink_for_low_latency_mode allow_mnnvl explicitly_destroy enable_shrink comm",
    "Buffer.get_dispatch_layout": f"topk_idx num_experts {EVENTS}",
    "Buffer.dispatch": "x handle num_tokens_per_rank num_tokens_per_rdma_rank is_token_in_rank "
    f"num_tokens_per_expert {ROUTING} expert_alignment num_worst_tokens config {EVENTS}",
    "Buffer.combine": f"x handle topk_weights bias config {EVENTS}",
    "Buffer.low_latency_dispatch": "x topk_idx num_max_dispatch_tokens_per_rank num_experts "
    "cumulative_local_expert_recv_stats dispatch_wait_recv_cost_stats use_fp8 round_scale use_ue8m0 "
    "async_finish return_recv_hook",
    "Buffer.low_latency_combine": "x topk_idx topk_weights handle use_logfmt zero_copy async_finish "
    "return_recv_hook out combine_wait_recv_cost_stats",
    "Buffer.clean_low_latency_buffer": "num_max_dispatch_tokens_per_rank hidden num_experts",
    "Buffer.get_next_low_latency_combine_buffer": "handle",
    "HybridEPBuffer.__init__": "group hidden_dim max_num_of_tokens_per_rank num_local_experts use_fp8 "
    "num_sms_dispatch_api num_sms_combine_api num_sms_preprocessing_api num_blocks_permute "
    "num_blocks_unpermute load_cached_kernels use_shared_buffer enable_custom_allgather "
    "num_of_hybrid_ep_ranks_per_nvlink_domain use_mnnvl",
    "HybridEPBuffer.dispatch": f"hidden scaling_factor {ROUTING} num_of_experts probs routing_map "
    "num_dispatched_tokens_tensor num_dispatched_tokens handle",
    "HybridEPBuffer.combine": "hidden probs handle",
    "HybridEPBuffer.dispatch_with_permute": f"hidden {ROUTING} num_of_experts_per_rank num_of_experts "
    "use_fp8 routing_map probs scaling_factor num_permuted_tokens pad_multiple handle non_blocking "
    "fuse_permute_dispatch num_dispatched_tokens use_host_meta",
    "HybridEPBuffer.combine_with_unpermute": "hidden probs handle pad_multiple fuse_unpermute_combine "
    "num_dispatched_tokens",
    "HybridEPBuffer.update_template_config": "hidden_dim num_of_tokens_per_rank num_local_experts "
    "pad_multiple use_fp8 fuse_permute_dispatch",
}


@pytest.mark.parametrize("name", SIGNATURES)
def test_arguments_stand_where_programs_put_them(name: str) -> None:
    """DeepEP's legacy `Buffer` and NVIDIA's `HybridEPBuffer`; what imbrex adds comes after."""
    kind, call = name.split(".")
    names = list(inspect.signature(getattr(getattr(deep_ep, kind), call)).parameters)[1:]
    wanted = SIGNATURES[name].split()
    assert names[: len(wanted)] == wanted


def test_keywords_of_other_versions_are_taken() -> None:
    buffer = deep_ep.Buffer(None, use_fabric=True, allow_nvlink_for_normal_mode=False)
    assert buffer._backend.transport.name == "alltoall"


def test_a_tuple_of_three_is_refused_by_name() -> None:
    buffer: typing.Any = deep_ep.Buffer(None)
    ids_TK = torch.tensor([[0], [1]])
    per_rank, _, per_expert, wanted_TW, _ = buffer.get_dispatch_layout(ids_TK, 2)
    layout = {
        "num_tokens_per_rank": per_rank,
        "is_token_in_rank": wanted_TW,
        "num_tokens_per_expert": per_expert,
    }
    pair = torch.ones(2, 8), torch.ones(2, 1)
    *_, handle, _ = buffer.dispatch(pair, **layout)
    triple = (*pair, torch.ones(1, 1))
    for given in (layout, {"handle": handle}):
        with pytest.raises(ValueError, match=r"x is a tuple of 3.*give rows, or values and one tensor of sc"):
            buffer.dispatch(triple, **given)


def test_a_handle_with_ids_goes_the_handle_s_way() -> None:
    buffer: typing.Any = deep_ep.HybridEPBuffer(None, 8, 4, 4)
    x_TD, ids_TK = torch.arange(16.0).view(2, 8), torch.tensor([[0, 3], [2, 1]])
    given = {"topk_idx": ids_TK, "num_of_experts": 4}
    *_, handle = buffer.dispatch(x_TD, topk_weights=torch.ones(2, 2), **given)
    weights_TK = torch.tensor([[0.25, 0.5], [0.75, 1.0]])
    rows, probs_NE, _, _ = buffer.dispatch(x_TD, topk_idx=ids_TK, topk_weights=weights_TK, handle=handle)
    assert torch.equal(rows, x_TD)
    assert probs_NE is not None
    assert probs_NE.tolist() == [[0.25, 0, 0, 0.5], [0, 1.0, 0.75, 0]]


MASKS = ("update_mask_buffer", "query_mask_buffer", "clean_mask_buffer")
ABSENT = [(f"low_latency_{name}", "no call goes on without one of the ranks") for name in MASKS]
ABSENT += [(name, "RDMA through NVSHMEM") for name in ("internode_dispatch", "internode_combine")]
ABSENT += [("get_local_buffer_tensor", "no communication buffer to look into")]


@pytest.mark.parametrize(("name", "reason"), ABSENT)
def test_calls_that_are_not_offered_say_why(name: str, reason: str) -> None:
    buffer = deep_ep.Buffer(None)
    with pytest.raises(NotImplementedError, match=rf"Buffer\.{name} is not offered: .*{reason}"):
        getattr(buffer, name)(1, 2, key=3)


def test_modes_that_are_not_offered_say_why() -> None:
    with pytest.raises(NotImplementedError, match=r"enable_shrink.*no call goes on without one of the ranks"):
        deep_ep.Buffer(None, enable_shrink=True)
    with pytest.raises(NotImplementedError, match=r"torch\.distributed group"):
        deep_ep.Buffer(None, comm=object())
    elastic = deep_ep.ElasticBuffer(None)
    with pytest.raises(NotImplementedError, match=r"pp_send is not offered: remote caches"):
        elastic.pp_send(torch.zeros(1), 0)
    with pytest.raises(NotImplementedError, match=r"do_expand=True.*dispatch_with_permute"):
        elastic.dispatch(torch.zeros(1, 8), torch.zeros(1, 1, dtype=torch.int64), do_expand=True)
    with pytest.raises(AttributeError, match="no attribute 'sent'"):
        elastic.sent  # noqa: B018


@pytest.mark.parametrize("transport", ["allgather", "allreduce"])
def test_a_transport_without_a_routing_by_rank_is_refused(transport: str) -> None:
    for make in (
        lambda: deep_ep.Buffer(None, transport=transport),
        lambda: deep_ep.HybridEPBuffer(None, 8, 4, 2, transport=transport),
    ):
        with pytest.raises(ValueError, match=f"the {transport} transport does not carry given rows"):
            make()


@pytest.fixture
def _twenty_sms():
    yield
    deep_ep.Buffer.num_sms = 20


@pytest.mark.usefixtures("_twenty_sms")
def test_sms_go_into_the_configurations() -> None:
    assert deep_ep.Buffer.get_dispatch_config(4) == deep_ep.Config(20)
    with pytest.warns(UserWarning, match="take no SM count"):
        deep_ep.Buffer.set_num_sms(24)
    assert deep_ep.Buffer.get_dispatch_config(3).num_sms == 24
    assert deep_ep.Buffer.get_combine_config(1).num_sms == 24
    for wrong in (0, 7):
        with pytest.raises(ValueError, match="give an even number above 0"):
            deep_ep.Buffer.set_num_sms(wrong)
    with pytest.raises(ValueError, match="a group of 0 ranks"):
        deep_ep.Buffer.get_dispatch_config(0)


def test_size_hints_grow_with_the_rows_and_ranks() -> None:
    config = deep_ep.Config(20, 8, 256)
    # 10 channels of 256 rows for each of 4 ranks
    assert config.get_nvl_buffer_size_hint(14336, 4) == 10 * 4 * 256 * (14336 + 512)
    assert config.get_nvl_buffer_size_hint(14336, 8) == 2 * config.get_nvl_buffer_size_hint(14336, 4)
    assert config.get_rdma_buffer_size_hint(14336, 8) == 0
    buffer = deep_ep.Buffer(None, 10, 20)
    assert (buffer.num_nvl_bytes, buffer.num_rdma_bytes, buffer.group_size) == (10, 20, 1)


class Recorded:
    """Stands for a handle on a GPU."""

    def __init__(self) -> None:
        self.waits = 0

    def current_stream_wait(self) -> None:
        self.waits += 1


def test_events_are_waited_for_where_programs_wait() -> None:
    event = Recorded()
    overlap = deep_ep.EventOverlap(event)  # pyright: ignore[reportArgumentType]
    overlap.current_stream_wait()
    assert event.waits == 1
    with overlap as inside:
        assert inside.event is event
        assert event.waits == 1
    assert event.waits == 2
    buffer = deep_ep.Buffer(None)
    ids_TK = torch.tensor([[0], [-1]])
    per_rank, _, per_expert, in_rank, after = buffer.get_dispatch_layout(
        ids_TK, 2, overlap, async_finish=True
    )
    assert isinstance(after.event, deep_ep.EventHandle)
    assert event.waits == 3
    rows, *_, handle, after = buffer.dispatch(
        torch.ones(2, 4),
        num_tokens_per_rank=per_rank,
        is_token_in_rank=in_rank,
        num_tokens_per_expert=per_expert,
        previous_event=overlap,
    )
    assert after.event is None
    assert isinstance(rows, torch.Tensor)
    assert handle is not None
    summed, _, after = buffer.combine(rows, handle, previous_event=overlap, async_finish=True)
    assert summed.tolist() == [[1.0] * 4, [0.0] * 4]
    after.current_stream_wait(release_handle=True)
    assert (event.waits, after.event) == (5, None)
    deep_ep.EventOverlap().current_stream_wait()


def test_an_event_is_let_go_of_and_calls_its_hook_once() -> None:
    event, called = Recorded(), []
    overlap = deep_ep.EventOverlap(event)  # pyright: ignore[reportArgumentType]
    overlap.register_hook_after_wait(lambda: called.append(event.waits))
    with pytest.raises(ValueError, match="a hook is registered already"):
        overlap.register_hook_after_wait(called.clear)
    with overlap(release_handle=True) as inside:
        assert inside is overlap
    assert (called, overlap.event) == ([1], None)
    with overlap:
        pass
    assert called == [1]


def test_counts_stay_on_the_device_by_an_older_name() -> None:
    buffer, x_TD = deep_ep.HybridEPBuffer(None, 2, 4, 2), torch.ones(3, 2)
    given: dict[str, Any] = {
        "hidden": x_TD,
        "topk_idx": torch.tensor([[1], [0], [1]]),
        "use_host_meta": False,
    }
    with pytest.raises(ValueError, match="non_blocking without num_permuted_tokens"):
        buffer.dispatch_with_permute(**given)
    assert buffer.dispatch_with_permute(**given, num_permuted_tokens=4)[3].tolist() == [1, 2]


def test_a_rank_outside_of_the_group_is_told_so() -> None:
    outside: Any = torch.distributed.GroupMember.NON_GROUP_MEMBER
    with pytest.raises(ValueError, match="give a process group that this rank is in"):
        deep_ep.Buffer(outside)


def test_destroy_wants_to_be_announced() -> None:
    deep_ep.Buffer(None, explicitly_destroy=True).destroy()
    with pytest.raises(ValueError, match="explicitly_destroy=True"):
        deep_ep.Buffer(None).destroy()


def test_ids_to_a_map() -> None:
    ids_TK, weights_TK = torch.tensor([[2, 0], [-1, 1], [-1, -1]]), torch.tensor([[1.0, 2], [3, 4], [5, 6]])
    map_TE, probs_TE = deep_ep.indices_to_map(ids_TK, weights_TK, 3, 3)
    assert map_TE.tolist() == [[True, False, True], [False, True, False], [False] * 3]
    assert probs_TE is not None
    assert probs_TE.tolist() == [[2, 0, 1], [0, 4, 0], [0, 0, 0]]
    assert deep_ep.indices_to_map(ids_TK, None, 3, 3)[1] is None


def test_the_permutation_of_its_docstring() -> None:
    ids_NK = torch.tensor([[4, 5], [5, -1], [2, 4]])
    whole = make_permutation(ids_NK, range(4, 6), 2, None, on_host=True)
    rows = whole.expand(torch.tensor([[0.0], [1], [2]]))
    assert rows.flatten().tolist() == [0, 2, 0, 1]
    assert whole.counts_e.tolist() == [2, 2]
    assert whole.reduce(rows).flatten().tolist() == [0, 1, 2]
    short = make_permutation(ids_NK, range(4, 6), 2, 2, on_host=False)
    assert (short.counts_e.tolist(), short.num_rows, short.overflow.item()) == ([2, 0], 2, 1)
    assert short.position_NK.tolist() == [[0, -1], [-1, -1], [-1, 1]]


def test_a_cached_dispatch_may_have_another_budget() -> None:
    buffer = deep_ep.HybridEPBuffer(None, 2, 4, 2)
    x_TD, ids_TK = torch.tensor([[1.0, 2], [3, 4], [5, 6]]), torch.tensor([[1, 0], [1, -1], [0, 1]])
    *_, counts, handle = buffer.dispatch_with_permute(hidden=x_TD, topk_idx=ids_TK)
    assert counts.tolist() == [2, 3]
    for budget, rows, counts, flag in ((7, [1, 5, 1, 3, 5, 0, 0], [2, 3], 0), (3, [1, 5, 1], [2, 1], 1)):
        again = buffer.dispatch_with_permute(hidden=x_TD, handle=handle, num_permuted_tokens=budget)
        assert again[0][:, 0].tolist() == rows
        assert (again[3].tolist(), again[4][10].item()) == (counts, flag)
        assert again[4][7].tolist() == counts
    grown = buffer.dispatch_with_permute(hidden=x_TD, handle=again[4], num_permuted_tokens=5)
    assert grown[0][:, 0].tolist() == [1, 5, 1, 0, 0]
    summed, _ = buffer.combine_with_unpermute(hidden=grown[0], handle=grown[4])
    assert summed[:, 0].tolist() == [2, 0, 5]


def test_a_probability_without_a_choice_is_not_carried() -> None:
    buffer = deep_ep.HybridEPBuffer(None, 2, 4, 2)
    map_TE = torch.tensor([[True, False], [False, False], [True, True]])
    probs_TE = torch.tensor([[1.0, 2], [3, 4], [5, 6]])
    rows, probs, _, _, handle = buffer.dispatch_with_permute(
        hidden=torch.ones(3, 2), routing_map=map_TE, probs=probs_TE
    )
    assert probs is not None
    assert probs.tolist() == [1, 5, 6]
    again = buffer.dispatch_with_permute(hidden=torch.ones(3, 2), probs=10 * probs_TE, handle=handle)
    assert again[1] is not None
    assert again[1].tolist() == [10, 50, 60]
    compact = buffer.dispatch(torch.ones(3, 2), probs=probs_TE, handle=handle)[1]
    assert compact is not None
    assert compact.tolist() == [[1, 0], [5, 6]]
    d_probs = buffer.combine_with_unpermute(hidden=rows, probs=probs, handle=handle)[1]
    assert d_probs is not None
    assert d_probs.tolist() == [[1, 0], [0, 0], [5, 6]]


def test_the_configuration_of_a_hybrid_buffer_grows() -> None:
    buffer = deep_ep.HybridEPBuffer(None, 8, 4, 2)
    assert buffer.configurer.buffer_config.max_num_of_tokens_per_rank == 4
    config = buffer.update_template_config(num_of_tokens_per_rank=2, pad_multiple=16)
    assert (config.max_num_of_tokens_per_rank, config.pad_multiple) == (2, 16)
    buffer.dispatch(torch.ones(6, 8), topk_idx=torch.zeros(6, 1).long())
    grown = buffer.configurer.buffer_config
    assert (grown.max_num_of_tokens_per_rank, grown.hidden_dim, grown.num_of_experts_per_rank) == (6, 8, 2)
    names = "group rank group_size local_rank node_rank num_of_nodes runtime"
    assert all(hasattr(buffer, name) for name in names.split())
    buffer.empty_jit_cache()


def test_a_hybrid_handle_must_be_whole_and_fit() -> None:
    buffer = deep_ep.HybridEPBuffer(None, 8, 4, 2)
    x_TD, ids_TK = torch.ones(3, 8), torch.tensor([[0], [1], [1]])
    rows, _, _, _, handle = buffer.dispatch_with_permute(hidden=x_TD, topk_idx=ids_TK)
    calls = {
        "pass the handle that a dispatch returned, whole": lambda: buffer.combine(x_TD, handle=tuple(handle)),
        "2 tokens for a handle of 3": lambda: buffer.dispatch(x_TD[:2], handle=handle),
        "with new probabilities": lambda: buffer.dispatch(x_TD, topk_idx=ids_TK[1:], handle=handle),
        "give [P, D] with the P rows": lambda: buffer.combine_with_unpermute(hidden=rows[1:], handle=handle),
        "[2, 8] for 3 rows received": lambda: buffer.combine(x_TD[:2], handle=handle),
        "give bfloat16, float16": lambda: buffer.combine_with_unpermute(hidden=rows.byte(), handle=handle),
    }
    for says, call in calls.items():
        with pytest.raises(ValueError, match="HybridEPBuffer") as error:
            call()
        assert says in str(error.value)


PLUG_IN = """
import importlib, sys
from pathlib import Path
from typing import Any

sys.path.insert(0, sys.argv[1])
home, name = sys.argv[2].split(":")
getattr(importlib.import_module(home), name)()
import deep_ep

print(deep_ep.Buffer.__module__)
"""


@pytest.mark.untraced
@pytest.mark.parametrize("there", [False, True])
@pytest.mark.parametrize("group", ["vllm.general_plugins", "sglang.srt.plugins"])
def test_engines_find_it_by_a_plug_in(tmp_path: Path, group: str, there: bool) -> None:
    """The entry points install it, and leave a deep_ep that is there alone."""
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    if there:
        (tmp_path / "deep_ep.py").write_text("class Buffer: ...\n")
    target = project["entry-points"][group]["imbrex"]
    said = run_code(PLUG_IN, str(tmp_path), target, folder=tmp_path)
    assert said.strip() == ("deep_ep" if there else "imbrex.adapters.deep_ep.legacy")
