"""`benchmarks/megatron_models.py` on two gloo ranks: Megatron-Core's own models in all ways and programs at a
tiny size, and what becomes of the others when a way fails or hangs."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from benchmarks import megatron_models
from benchmarks.megatron_models import Board, Plan, Task, compete
from benchmarks.megatron_program import MODELS, WAYS, Published

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
    return replace(model, layers=1, of=1, vocabulary=256, sequence=32, settings=settings)


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
    assert failed.pop("deepep") == "rank 1, ValueError: no such buffer"
    assert failed.pop("hybridep") == "no answer within 1 s"
    assert failed.pop("allgather") == "ended without a word"
    assert "are not those of deepseek-v3 ddp alltoall" in failed.pop("alltoall-megatron")
    assert failed == {}
    rows = {row["impl"]: row for row in board.rows()}
    assert sorted(rows) == ["alltoall", "imbrex"]
    assert rows["imbrex"]["n"] == 4
    assert rows["imbrex"]["median_us"] == 450000.0
    assert rows["imbrex"]["tokens_per_s"] == round(2 * 32 / 0.45)
    assert "FAILED: no answer" in board.table()


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
    (run,) = content["runs"]
    assert run["versions"]["megatron-core"] == "the version of megatron-core"
    assert run["command"] == f"make gpu-bench NAME=megatron_models ARGS='{words[2]} {words[1]} {words[0]}'"
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1] == f"2 rows in {out}"
    assert "FAILED: rank 1, ValueError" in lines[-2]
    assert lines[0].endswith("s  deepseek-v3 fsdp alltoall 450.0 ms")


def plan_of(settings: dict[str, Any]) -> Plan:
    assert {model.layers for model in settings.pop("models").values()} == {1, 4}
    return replace(tiny_plan(**settings | {"world": 2, "limit": 2.0}), around=Plan(world=2).around)


def test_ranks_that_cannot_start_are_one_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(world: int, device: torch.device) -> None:
        raise ImportError("No module named 'megatron'")

    monkeypatch.setattr(megatron_models, "prepare", refuse)
    with pytest.raises(RuntimeError, match=r"Megatron's ranks: rank \d, ImportError: No module named"):
        list(compete([Task("deepseek-v3", "ddp", "alltoall")], tiny_plan()))


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
