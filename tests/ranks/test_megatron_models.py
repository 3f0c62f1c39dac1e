"""`benchmarks/megatron_models.py` on two gloo ranks: Megatron-Core's own models in all ways and programs at a
tiny size, and what becomes of the others when a way fails or hangs."""

from __future__ import annotations

import gc
import importlib.metadata
import importlib.util
import json
import os
import re
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from benchmarks import megatron_models
from benchmarks.megatron_models import CASES, Board, Plan, Task, compete, tasks_of
from benchmarks.megatron_program import MODELS, WAYS, Published, Training, leave_out_lone_reductions

from tests.ranks.megatron_on_cpu import on_cpu

needs_megatron = pytest.mark.skipif(
    importlib.util.find_spec("megatron") is None or importlib.util.find_spec("einops") is None,
    reason="megatron-core or einops is not installed: pip install --no-deps -r requirements-doors.txt",
)
SMALL = {
    "hidden_size": 64,
    "num_attention_heads": 4,
    "ffn_hidden_size": 64,
    "num_moe_experts": 16,
    "moe_ffn_hidden_size": 32,
    "moe_router_topk": 4,
}
MORE = {
    "deepseek-v3": {
        "q_lora_rank": 32,
        "kv_lora_rank": 32,
        "qk_head_dim": 16,
        "qk_pos_emb_head_dim": 16,
        "v_head_dim": 16,
        "moe_shared_expert_intermediate_size": 32,
        "moe_router_num_groups": 4,
        "moe_router_group_topk": 2,
    },
    "qwen3-235b-a22b": {"num_query_groups": 2, "kv_channels": 16},
}


def small(name: str) -> Published:
    model = MODELS[name]
    settings = model.settings | SMALL | MORE[name]
    return replace(model, layers=1, of=1, vocabulary=256, sequence=32, settings=settings, sharded={})


def tiny_plan(**settings: Any) -> Plan:
    models = {name: small(name) for name in MODELS}
    sizes: dict[str, Any] = {"world": 2, "microbatches": 2, "warm": 2, "repeats": 1}
    return Plan(models=models, device="cpu", around=on_cpu, **sizes | settings)


@needs_megatron
@pytest.mark.timeout(120)
def test_all_ways_train_the_same_model(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHDYNAMO_DISABLE", "1")
    cases = [("deepseek-v3", "ddp", way) for way in WAYS]
    cases += [("deepseek-v3", "fsdp", way) for way in ("hybridep", "imbrex")]
    cases += [("qwen3-235b-a22b", "ddp", "imbrex")]
    tasks = [Task(*case) for case in cases]
    plan = tiny_plan()
    board = Board(plan)
    for task, answer in compete(tasks, plan):
        board.hear(task, answer)
    assert board.failed == {}
    rows = board.rows()
    assert [(r["case"]["model"], r["case"]["program"], r["impl"]) for r in rows] == cases
    for row in rows:
        assert len(row["losses"]) == 2
        assert 5.0 < row["losses"][1] < row["losses"][0] < 6.0
        first = next(r["losses"] for r in rows if r["case"]["model"] == row["case"]["model"])
        assert row["losses"] == pytest.approx(first, rel=1e-4)
        assert 0 < row["gradients_us"] < row["median_us"]
    lines = board.table().splitlines()
    assert len(lines) == len(rows)
    assert all("x" in line and "TFLOP/s" in line for line in lines)


def gradient_of_experts(self: Training, plain: Any) -> Any:
    """The gradients of a step, and in the place of its loss the length of the experts'."""
    plain(self)
    buffer = getattr(self.net, "param_and_grad_buffer", None)
    if buffer is not None:
        whole = [group.main_grad_buffer.data for group in buffer.parameter_groups if group.is_expert_param]
    else:
        whole = [p.main_grad for name, p in self.net.module.named_parameters() if ".experts." in name]
    return torch.stack([part.double().square().sum() for part in whole]).sum().sqrt()


@needs_megatron
@pytest.mark.timeout(60)
def test_sharded_experts_have_the_gradients_of_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHDYNAMO_DISABLE", "1")
    plain = Training.gradients
    monkeypatch.setattr(Training, "gradients", lambda self: gradient_of_experts(self, plain))
    tasks = [Task("deepseek-v3", program, "alltoall") for program in ("ddp", "fsdp")]
    answers: dict[Task, Any] = dict(compete(tasks, tiny_plan(microbatches=3, warm=1)))
    ours, sharded = (answers[task]["losses"] for task in tasks)
    assert ours[0] > 0.01
    assert sharded == pytest.approx(ours, rel=1e-3)


@dataclass
class Group:
    """A process group by its number of ranks."""

    ranks: int

    def size(self) -> int:
        return self.ranks


def test_only_groups_of_one_rank_are_not_reduced() -> None:
    reduced: list[tuple[list[int], bool]] = []
    pipeline = SimpleNamespace(
        bucket_grad_ready_params={0: {"a"}, 1: {"b"}, 2: {"c"}},
        get_fsdp_buffer=lambda bucket: SimpleNamespace(data_parallel_group=Group(2 - bucket % 2)),
        _bucket_group_gradient_reduce=lambda buckets, async_op: reduced.append((buckets, async_op)),
    )
    leave_out_lone_reductions(pipeline)
    pipeline._bucket_group_gradient_reduce([0, 2], async_op=True)
    pipeline._bucket_group_gradient_reduce([1], async_op=True)
    assert reduced == [([0, 2], True)]
    assert pipeline.bucket_grad_ready_params == {0: {"a"}, 1: set(), 2: {"c"}}


def stand_in(published: Published, name: str, program: str, *, device: torch.device, **_: Any) -> Any:
    """A way that only meets the other rank, or fails on one of them, or hangs."""
    if name == "deepep" and dist.get_rank() == 1:
        raise ValueError("no such\nbuffer")
    if name == "hybridep":
        time.sleep(60)
    if name == "allgather":
        os._exit(3)
    dist.barrier()
    losses = [7.0, 6.9] if name != "alltoall-megatron" else [7.0, 6.0]
    return {"losses": losses, "steps": [0.5, 0.4], "gradients": [0.3, 0.2], "peak_gib": 1.5}


def test_ways_that_fail_or_hang_take_nothing_from_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(megatron_models, "run", stand_in)
    monkeypatch.setattr(megatron_models, "prepare", lambda world, device: None)
    plan = replace(tiny_plan(limit=1.0), around=Plan(world=2).around)
    one = [Task("deepseek-v3", "ddp", way) for way in ("alltoall", *list(WAYS)[1:])]
    board = Board(plan)
    for task, answer in compete(one * 2, plan):
        board.hear(task, answer)
    failed = {task.way: why for task, why in board.failed.items()}
    words = failed.pop("deepep")
    assert re.fullmatch(r"rank 1, ValueError at test_megatron_models\.py:\d+: no such buffer", words)
    assert failed.pop("hybridep") == "no answer within 1 s"
    assert failed.pop("allgather") == "ended without a word"
    assert "are not those of deepseek-v3 ddp alltoall" in failed.pop("alltoall-megatron")
    assert failed == {}
    rows = {row["impl"]: row for row in board.rows()}
    assert sorted(rows) == ["alltoall", "imbrex"]
    assert rows["imbrex"]["n"] == 4
    assert rows["imbrex"]["median_us"] == 450000.0
    assert rows["imbrex"]["tokens_per_s"] == round(2 * 32 / 0.45)
    assert board.table().count("FAILED") == 4


def test_the_command_writes_rows_as_ways_end(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(megatron_models, "run", stand_in)
    monkeypatch.setattr(megatron_models, "prepare", lambda world, device: None)
    monkeypatch.setattr(megatron_models, "Plan", lambda **settings: plan_of(settings))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(importlib.metadata, "version", lambda name: f"the version of {name}")
    out = tmp_path / "rows.json"
    words = ["--ways=alltoall,deepep,imbrex,allgather", "--cases=deepseek-v3:fsdp", "--rounds=2"]
    monkeypatch.setattr(sys, "argv", ["megatron_models.py", f"--out={out}", *words])
    megatron_models.main()
    content = json.loads(out.read_text())
    assert [row["impl"] for row in content["rows"]] == ["alltoall", "imbrex"]
    assert all(row["n"] == 4 and row["case"]["program"] == "fsdp" for row in content["rows"])
    assert all(row["case"]["E"] == 16 for row in content["rows"])
    (run,) = content["runs"]
    assert run["versions"]["megatron-core"] == "the version of megatron-core"
    assert run["command"] == f"make gpu-bench NAME=megatron_models ARGS='{words[2]} {words[1]} {words[0]}'"
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1] == f"2 rows in {out}"
    assert lines[-2].split() == ["deepseek-v3", "fsdp", "deepep", "FAILED"]
    assert lines[0].endswith("s  deepseek-v3 fsdp alltoall 450.0 ms")
    (why,) = [line for line in lines if "no such buffer" in line]
    assert "s  deepseek-v3 fsdp deepep failed: rank 1, ValueError at " in why


def plan_of(settings: dict[str, Any]) -> Plan:
    assert {model.layers for model in settings.pop("models").values()} == {1, 4}
    return replace(tiny_plan(**settings | {"world": 2, "limit": 2.0}), around=Plan(world=2).around)


def test_ranks_that_cannot_start_are_one_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(world: int, device: torch.device) -> None:
        raise ImportError("No module named 'megatron'")

    monkeypatch.setattr(megatron_models, "prepare", refuse)
    with pytest.raises(RuntimeError, match=r"Megatron's ranks: rank \d, ImportError at \S+: No module named"):
        list(compete([Task("deepseek-v3", "ddp", "alltoall")], tiny_plan()))


def leave_a_group_to_the_collector(folder: Path) -> None:
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=0, world_size=1)
    ring: list[Any] = [dist.group.WORLD]
    ring.append(ring)
    dist.destroy_process_group()


def test_ranks_collect_no_group_of_the_process_that_starts_them(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(megatron_models, "run", stand_in)
    monkeypatch.setattr(megatron_models, "prepare", lambda world, device: gc.collect())
    gc.disable()
    try:
        leave_a_group_to_the_collector(tmp_path)
        plan = replace(tiny_plan(start=10.0), around=Plan(world=2).around)
        ((_, answer),) = compete([Task("deepseek-v3", "ddp", "alltoall")], plan)
    finally:
        gc.enable()
    assert isinstance(answer, dict), answer


def test_sharded_ways_come_first_and_those_that_may_be_lost_last() -> None:
    first, other = ("alltoall", "hybridep", "imbrex"), ("alltoall", "hybridep", "deepep", "imbrex")
    order = [("deepseek-v3", "fsdp", way) for way in first]
    order += [(model, "ddp", way) for model in ("deepseek-v3", "qwen3-235b-a22b") for way in other]
    for last in ("allgather", "alltoall-megatron"):
        order += [(model, "ddp", last) for model in ("deepseek-v3", "qwen3-235b-a22b")]
    order.append(("deepseek-v3", "fsdp", "deepep"))
    assert tasks_of(",".join(CASES), ",".join(WAYS)) == [Task(*each) for each in order]


def test_deepseek_has_half_of_its_experts_where_it_is_sharded() -> None:
    model = MODELS["deepseek-v3"]
    assert model.under("ddp").settings["num_moe_experts"] == 256
    assert model.under("fsdp").settings == model.settings | {"num_moe_experts": 128}
    assert model.under("fsdp").flops() == model.flops()


def test_no_way_begins_behind_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(megatron_models, "run", stand_in)
    assert list(compete([Task("deepseek-v3", "ddp", "alltoall")], tiny_plan(end=0.0))) == []


def test_operations_are_those_of_the_published_layers() -> None:
    deepseek, qwen = MODELS["deepseek-v3"], MODELS["qwen3-235b-a22b"]
    attention = 7168 * 1536 + 1536 * 128 * 192 + 7168 * 576 + 512 * 128 * 256 + 128 * 128 * 7168
    weights = attention + 9 * 3 * 7168 * 2048 + 2048 * 128 * 320 + 7168 * deepseek.kept_vocabulary
    assert deepseek.flops() == 6 * weights
    attention = 4096 * 128 * (64 + 4 + 4 + 64)
    weights = 4 * (attention + 8 * 3 * 4096 * 1536 + 2048 * 64 * 256) + 4096 * qwen.kept_vocabulary
    assert qwen.flops() == 6 * weights
