"""What some ranks saved, any other number of ranks reads and goes on with: the same losses, the same bits."""

from __future__ import annotations

import re
import shutil
import time
import warnings
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.nn.parallel import DistributedDataParallel

import imbrex
from imbrex.experts.experts import Experts
from imbrex.parallel import checkpoint
from imbrex.placement import from_slots
from imbrex.router.gates import Gate
from imbrex.runtime import problems
from tests.ranks.pool import Pool, Ranks

CONFIG = imbrex.MoEConfig(
    hidden_size=6,
    intermediate_size=8,
    num_experts=5,
    top_k=2,
    gate=Gate(score="sigmoid", bias=True),
    bias=True,
    shared=imbrex.SharedExperts(intermediate_size=4, gated=True),
)
REPLICAS = ((0, 1, 2), (3, 1, -1), (4, -1, 0), (2, 3))


@dataclass(frozen=True, kw_only=True, slots=True)
class Split:
    """How a model is spread over `world` ranks."""

    world: int
    tensor: int = 1
    slots: tuple[tuple[int, ...], ...] | None = None
    wrap: str = ""


def build(ranks: Ranks, split: Split, seed: int, config: imbrex.MoEConfig = CONFIG):
    torch.manual_seed(seed)
    placement = None if split.slots is None else from_slots(split.slots, config.num_experts)
    group = ranks.group if ranks.world_size > 1 else None
    layer = imbrex.MoELayer(config, group, tensor_parallel=split.tensor, placement=placement)
    model = nn.Sequential(nn.Linear(6, 6), layer)
    for parameter in model[0].parameters():
        nn.init.uniform_(parameter, -0.4, 0.4, generator=torch.Generator().manual_seed(seed))
    if split.wrap == "fsdp":
        mesh = DeviceMesh.from_group(ranks.group, "cpu")
        fully_shard(model, mesh=mesh, ignored_params=set(imbrex.expert_parameters(model)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-2)
    if split.wrap == "ddp":
        imbrex.ignore_in_ddp(model)
        return DistributedDataParallel(model, process_group=ranks.group), optimizer
    return model, optimizer


def steps(ranks: Ranks, model: nn.Module, optimizer, first: int, number: int) -> list[float]:
    """Losses of `number` steps on the same global batches, whatever the number of ranks."""
    losses = []
    for step in range(first, first + number):
        batch = torch.randn(16, 6, generator=torch.Generator().manual_seed(step))
        x = batch.chunk(ranks.world_size)[ranks.rank]
        optimizer.zero_grad(set_to_none=False)
        loss = (model(x) - x.sin()).square().mean()
        loss.backward()
        imbrex.sync_gradients(model, dense=not isinstance(model, DistributedDataParallel | FSDPModule))
        optimizer.step()
        mean = loss.detach().clone()
        dist.all_reduce(mean, group=ranks.group)
        losses.append(mean.item() / ranks.world_size)
    return losses


def logical_experts(model: nn.Module) -> dict[tuple[str, int, int], torch.Tensor]:
    """Expert parameters of this rank by name, expert and piece of F. The down bias is the first piece's."""
    (layer,) = [m for m in model.modules() if isinstance(m, imbrex.MoELayer)]
    experts: nn.Module = layer.experts
    assert isinstance(experts, Experts)
    return {
        (name, expert, experts.shard.rank): parameter[slot].detach().clone()
        for name, parameter in experts.named_parameters()
        for slot, expert in enumerate(experts.expert_ids)
        if expert >= 0 and (name != "down_proj_bias" or experts.shard.rank == 0)
    }


def save_and_go_on(ranks: Ranks, split: Split, directory: str):
    model, optimizer = build(ranks, split, seed=1)
    steps(ranks, model, optimizer, 0, 3)
    checkpoint.save(directory, model, optimizer, 3, {"tokens": 48}, group=ranks.group)
    kept = logical_experts(model)
    return kept, steps(ranks, model, optimizer, 3, 3)


def resume(ranks: Ranks, split: Split, directory: str):
    model, optimizer = build(ranks, split, seed=2)
    assert checkpoint.load_latest(directory, model, optimizer, group=ranks.group) == 3
    kept = logical_experts(model)
    return kept, steps(ranks, model, optimizer, 3, 3)


def whole(answers) -> dict[tuple[str, int], torch.Tensor]:
    """Whole experts from the pieces of all ranks; replicas must be equal."""
    pieces: dict[tuple[str, int], dict[int, torch.Tensor]] = {}
    for kept, _ in answers:
        for (name, expert, piece), value in kept.items():
            held = pieces.setdefault((name, expert), {})
            assert torch.equal(held.setdefault(piece, value), value)
    return {key: join(key[0], [held[i] for i in sorted(held)]) for key, held in pieces.items()}


def join(name: str, pieces: list[torch.Tensor]) -> torch.Tensor:
    if name == "down_proj_bias":
        return pieces[0]
    if name == "down_proj":
        return torch.cat(pieces, 1)
    return torch.cat([torch.cat([p.chunk(2)[half] for p in pieces]) for half in (0, 1)])


SAVED = {
    "ep4": Split(world=4),
    "ep2_tp2": Split(world=4, tensor=2),
    "replicas": Split(world=4, slots=REPLICAS),
    "fsdp": Split(world=4, wrap="fsdp"),
}
READERS = [
    ("ep4", Split(world=1)),
    ("ep4", Split(world=2)),
    ("ep4", Split(world=8)),
    ("ep4", Split(world=8, tensor=4)),
    ("ep4", Split(world=2, wrap="ddp")),
    ("ep4", Split(world=2, wrap="fsdp")),
    ("fsdp", Split(world=4, tensor=2)),
    ("ep4", Split(world=4, slots=REPLICAS)),
    ("ep2_tp2", Split(world=1)),
    ("ep2_tp2", Split(world=8, tensor=2)),
    ("ep2_tp2", Split(world=4, tensor=4)),
    ("replicas", Split(world=2)),
    ("replicas", Split(world=4, tensor=2)),
]


@pytest.fixture(scope="module")
def saved(pool, tmp_path_factory):
    found = {}
    for name, split in SAVED.items():
        directory = tmp_path_factory.mktemp(name)
        found[name] = directory, pool.run(split.world, save_and_go_on, split, str(directory))
    return found


@pytest.mark.parametrize(
    ("name", "split"),
    READERS,
    ids=[f"{n}-to-{s.world}x{s.tensor}{'r' * bool(s.slots)}{s.wrap}" for n, s in READERS],
)
def test_any_ranks_go_on_where_others_stopped(pool, saved, name, split):
    directory, before = saved[name]
    after = pool.run(split.world, resume, split, str(directory))
    want, got = whole(before), whole(after)
    assert want.keys() == got.keys()
    assert all(torch.equal(want[key], got[key]) for key in want)
    assert after[0][1] == pytest.approx(before[0][1], abs=1e-5)


def test_experts_are_written_once(saved):
    """Also with replicas and spares the chunks of a parameter hold as many values as its logical tensor."""
    for directory, _ in saved.values():
        metadata = FileSystemReader(directory / "step_00000003").read_metadata()
        for name in ("model.1.experts.down_proj", "optimizer.state.1.experts.down_proj.exp_avg"):
            stored = metadata.state_dict_metadata[name]
            assert isinstance(stored, TensorStorageMetadata)
            assert list(stored.size) == [5, 6, 8]
            assert sum(chunk.sizes.numel() for chunk in stored.chunks) == 5 * 6 * 8


def load_other_shape(ranks: Ranks, directory: str):
    config = imbrex.MoEConfig(hidden_size=6, intermediate_size=12, num_experts=5, top_k=2)
    model, optimizer = build(ranks, Split(world=2), 2, config)
    before = [p.detach().clone() for p in model.parameters()]
    with pytest.raises(ValueError, match="another shape") as caught:
        checkpoint.load_latest(directory, model, optimizer, group=ranks.group)
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    return str(caught.value)


def test_another_shape_is_an_error_on_every_rank(pool, saved):
    for text in pool.run(2, load_other_shape, str(saved["ep4"][0])):
        assert "experts.gate_up_proj is [5, 16, 6] there and [5, 24, 6] here" in text
        assert "build the model with the configuration" in text


def save_where_it_cannot(ranks: Ranks, directory: str, broken: int):
    model, optimizer = build(ranks, Split(world=2), 1)
    full = OSError(28, "No space left on device")
    disk = mock.patch("os.fsync", side_effect=full) if ranks.rank == broken else nullcontext()
    with disk, pytest.raises(OSError, match="No space left on device"):
        checkpoint.save(directory, model, optimizer, 1, group=ranks.group)
    return str(checkpoint.latest(directory))


@pytest.mark.parametrize("broken", [0, 1])
def test_a_full_disk_is_an_error_on_every_rank(pool, tmp_path, broken):
    assert pool.run(2, save_where_it_cannot, str(tmp_path), broken) == ["None", "None"]
    assert [p for p in Path(tmp_path).iterdir() if not p.name.startswith(".")] == []


def save_what_one_cannot(ranks: Ranks, directory: str, how: str):
    """Rank 1 alone has an `extra` that JSON cannot write, no step or another one, or another disk under the
    same name."""
    model, optimizer = build(ranks, Split(world=2), 1)
    odd = ranks.rank == 1
    extra = {"bad": object()} if odd and how == "extra" else {}
    step: Any = {"no step": float("nan"), "another step": 2}.get(how, 1) if odd else 1
    blind = mock.patch("pathlib.Path.is_dir", return_value=False) if odd and how == "path" else nullcontext()
    with blind:
        return _said(lambda: checkpoint.save(directory, model, optimizer, step, extra, group=ranks.group))


def load_what_one_does_not_see(ranks: Ranks, directory: str):
    model, optimizer = build(ranks, Split(world=2), 1)
    path = Path(directory) / ("step_00000003" if ranks.rank == 0 else "elsewhere")
    return _said(lambda: checkpoint.load(path, model, optimizer, group=ranks.group))


def _said(call) -> str:
    try:
        call()
    except (ValueError, OSError) as error:
        return f"{type(error).__name__} {error}"
    return ""


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("extra", "ValueError {}checkpoint: extra cannot be"),
        ("path", "OSError {}this rank does not see"),
        ("no step", "ValueError {}checkpoint: step nan, keep None; give a step from 0 on"),
    ],
)
def test_what_one_rank_cannot_save_is_an_error_on_every_rank_at_once(pool, tmp_path, how, said):
    first, second = pool.run(2, save_what_one_cannot, str(tmp_path), how)
    assert first.startswith(said.format("rank 1: "))
    assert second.startswith(said.format(""))
    assert checkpoint.latest(tmp_path) is None


def test_ranks_after_several_steps_save_nothing(pool, tmp_path):
    """Each had returned a path of its own, of which one was there."""
    for said in pool.run(2, save_what_one_cannot, str(tmp_path), "another step"):
        assert said.startswith(
            "ValueError checkpoint: ranks disagree about the step: step_00000001 on rank 0, step_00000002 on"
        )
    assert checkpoint.latest(tmp_path) is None


def test_a_path_that_one_rank_does_not_see_is_an_error_on_every_rank_at_once(pool, saved):
    first, second = pool.run(2, load_what_one_does_not_see, str(saved["ep4"][0]))
    assert first.startswith("ValueError rank 1: ")
    assert "elsewhere is no complete checkpoint" in first
    assert "on a disk that all ranks see" in second


def load_with_one_shard_damaged(ranks: Ranks, directory: str):
    model, optimizer = build(ranks, Split(world=2), 2)
    with warnings.catch_warnings(record=True) as caught:
        step = checkpoint.load_latest(directory, model, optimizer, group=ranks.group)
    return step, [str(warning.message) for warning in caught]


def test_all_ranks_fall_back_to_the_same_older_one(pool, tmp_path):
    pool.run(2, save_and_go_on, Split(world=2), str(tmp_path))
    newer = tmp_path / "step_00000004"
    shutil.copytree(tmp_path / "step_00000003", newer)
    shard = newer / "__1_0.distcp"
    shard.write_bytes(shard.read_bytes()[:-1] + b"x")
    (first, said), (second, nothing) = pool.run(2, load_with_one_shard_damaged, str(tmp_path))
    assert (first, second, nothing) == (3, 3, [])
    assert any("__1_0.distcp was changed" in text and "an older one is tried" in text for text in said)


def stop_one(ranks: Ranks, directory: str, name: str, problem: BaseException | None) -> str:
    """What a rank is told where the function `name` raises `problem` on rank 1, or hangs there; then, unless
    it hung, all go on."""
    model, optimizer = build(ranks, Split(world=2), 1)
    effect = problem or (lambda *_: time.sleep(1.5))
    where = f"imbrex.parallel.checkpoint.{name}"
    broken = mock.patch(where, side_effect=effect) if ranks.rank == 1 else nullcontext()
    slow = mock.patch.object(problems, "SLOW_S", 60.0 if problem else 0.5)
    path = checkpoint.save(directory, model, optimizer, 1, group=ranks.group)
    try:
        with broken, slow:
            checkpoint.load(path, model, optimizer, group=ranks.group)
    except BaseException as error:  # noqa: BLE001 (what is raised is compared)
        if problem is not None:
            checkpoint.load(path, model, optimizer, group=ranks.group)
        return f"{type(error).__name__}: {error}"
    return ""


@pytest.mark.parametrize(
    ("name", "problem", "said"),
    [
        ("_state_of", KeyboardInterrupt("now"), "KeyboardInterrupt: now"),
        ("files.Reader.read_data", KeyboardInterrupt("now"), "KeyboardInterrupt: now"),
        ("set_state_dict", KeyError("x"), "KeyError: 'x'"),
    ],
)
def test_whatever_stops_one_rank_stops_all_at_once(pool, tmp_path, name, problem, said):
    first, second = pool.run(2, stop_one, str(tmp_path), name, problem)
    assert re.match(r"(RuntimeError|OSError): .*rank 1: ", first)
    assert first.endswith(f"rank 1: {said}")
    assert second == said


def test_a_rank_that_hangs_in_the_middle_is_named(tmp_path):
    """Not by torch, and not after the half hour of its own way to gather objects."""
    alone = Pool(2, timeout_s=60.0)
    try:
        said, _ = alone.run(2, stop_one, str(tmp_path), "_state_of", None)
    finally:
        alone.close()
    assert said.startswith(
        "RankLostError: rank 0 lost its peers in a checkpoint: a rank was silent for 0.5 s"
    )
    assert said.endswith("not heard of since: rank 1")


def call_alone(ranks: Ranks, directory: str, name: str) -> str:
    """What the first rank is told that saves or loads by itself."""
    if ranks.rank == 1:
        time.sleep(1.0)
        return ""
    more = {"step": 1} if name == "save" else {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("IMBREX_TIMEOUT_S", "0.5")
        with pytest.raises(imbrex.RankLostError) as caught:
            getattr(checkpoint, name)(directory, torch.nn.Linear(2, 2), None, group=ranks.group, **more)
    return str(caught.value)


def test_a_rank_that_saves_or_loads_alone_is_told(tmp_path):
    for name in ("save", "load", "load_latest"):
        alone = Pool(2, timeout_s=60.0)
        try:
            said, _ = alone.run(2, call_alone, str(tmp_path), name)
        finally:
            alone.close()
        assert f"lost its peers in checkpoint.{name}: a rank was silent for 0.5 s; not heard of since" in said
        assert said.endswith("call it on every rank, not on the first alone")
