"""Checkpoints of one process: complete or not there, and errors that say what to do."""

import json
import os
import pickle
import warnings
from collections.abc import Callable
from enum import Enum
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

import imbrex
from imbrex.contracts import RowForm
from imbrex.parallel import checkpoint
from imbrex.parallel.checkpoint_files import StreamEvent, digest, publish, read_mark

CONFIG = imbrex.MoEConfig(hidden_size=6, intermediate_size=8, num_experts=3, top_k=2)


def build(seed=0, optimizer: Callable[..., torch.optim.Optimizer] = torch.optim.AdamW):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(6, 6), imbrex.MoELayer(CONFIG))
    return model, optimizer(model.parameters(), lr=1e-2)


def step(model, optimizer):
    x = torch.randn(10, 6, generator=torch.Generator().manual_seed(3))
    loss = (model(x) - x).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss.item()


def test_goes_on_to_the_bit_without_a_warning(tmp_path):
    model, optimizer = build()
    for _ in range(3):
        step(model, optimizer)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        path = checkpoint.save(tmp_path, model, optimizer, 3, {"tokens": 30})
        other = build(seed=9)
        step(*other)  # leaves gradients and another optimizer state behind
        extra = checkpoint.load(path, *other)
    assert extra == {"tokens": 30}
    assert (path.name, checkpoint.step_of(path)) == ("step_00000003", 3)
    assert [step(*other) for _ in range(3)] == [step(model, optimizer) for _ in range(3)]


def test_the_model_alone(tmp_path):
    model, _ = build()
    checkpoint.save(tmp_path, model, None, 1)
    other, _ = build(seed=9)
    assert checkpoint.load_latest(tmp_path, other) == 1
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True))


def test_compiled_and_checkpointed_wrappers_do_not_change_names(tmp_path):
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    model, optimizer = build()
    step(model, optimizer)
    model[1] = checkpoint_wrapper(model[1])
    compiled = torch.compile(model, backend="eager")
    assert isinstance(compiled, nn.Module)
    checkpoint.save(tmp_path, compiled, optimizer, 1)
    other = build(seed=9)
    assert checkpoint.load_latest(tmp_path, *other) == 1
    assert step(*other) == step(model, optimizer)


@pytest.mark.parametrize("cut", ["before the mark", "before the rename", "at a rename"])
def test_cut_off_half_way_is_never_loaded(tmp_path, cut):
    model, optimizer = build()
    checkpoint.save(tmp_path, model, optimizer, 1)
    want = [p.detach().clone() for p in model.parameters()]
    step(model, optimizer)
    target = {
        "before the mark": "imbrex.parallel.checkpoint_files.publish",
        "before the rename": "imbrex.parallel.checkpoint_files.flush",
        "at a rename": "pathlib.Path.rename",
    }[cut]
    with mock.patch(target, side_effect=KeyboardInterrupt), pytest.raises(KeyboardInterrupt):
        checkpoint.save(tmp_path, model, optimizer, 2)
    other = build(seed=9)
    assert checkpoint.load_latest(tmp_path, *other) == 1
    assert all(torch.equal(a, b) for a, b in zip(want, other[0].parameters(), strict=True))
    # The same step can be saved again afterwards, and then counts.
    checkpoint.save(tmp_path, model, optimizer, 2)
    assert checkpoint.load_latest(tmp_path, *other) == 2
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step_00000001", "step_00000002"]


def test_saving_a_step_again_replaces_it(tmp_path):
    model, optimizer = build()
    checkpoint.save(tmp_path, model, optimizer, 5)
    step(model, optimizer)
    path = checkpoint.save(tmp_path, model, optimizer, 5, {"again": True})
    other = build(seed=9)
    assert checkpoint.load(path, *other) == {"again": True}
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), other[0].parameters(), strict=True))
    assert [p.name for p in tmp_path.iterdir()] == ["step_00000005"]


def test_keeps_the_newest(tmp_path):
    model, optimizer = build()
    for number in (8, 9, 10, 100):
        checkpoint.save(tmp_path, model, optimizer, number, keep=2)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step_00000010", "step_00000100"]


def test_nothing_to_resume(tmp_path):
    model, optimizer = build()
    assert checkpoint.load_latest(tmp_path / "none", model, optimizer) is None
    (tmp_path / "step_00000007").mkdir()
    assert checkpoint.load_latest(tmp_path, model, optimizer) is None
    with pytest.raises(ValueError, match="no complete checkpoint; pass a step_"):
        checkpoint.load(tmp_path / "step_00000007", model)


def test_other_formats_and_optimizers_are_refused(tmp_path):
    model, optimizer = build()
    path = checkpoint.save(tmp_path, model, optimizer, 1)
    other = build(optimizer=lambda p, lr: torch.optim.SGD(p, lr=lr, momentum=0.9))
    with pytest.raises(ValueError, match="momentum_buffer is missing there"):
        checkpoint.load(path, *other)
    wider = nn.Sequential(nn.Linear(6, 6), imbrex.MoELayer(CONFIG), nn.Linear(6, 1))
    with pytest.raises(ValueError, match=r"model\.2\.weight is missing there and \[1, 6\] here, and 1 more"):
        checkpoint.load(path, wider)
    with pytest.raises(ValueError, match=r"model\.1\.\S+ is \[.*\] there and missing here"):
        checkpoint.load(path, nn.Sequential(nn.Linear(6, 6)))
    mark = json.loads((path / "COMPLETE").read_text())
    (path / "COMPLETE").write_text(json.dumps(mark | {"format": 99}))
    with pytest.raises(ValueError, match="format 99, this version reads 2"):
        checkpoint.load(path, model)


class Scaled(nn.Module):
    """Experts of a caller's that multiply by a number for each slot and column."""

    applies_weights = False
    forms = (RowForm.ROWS,)

    def __init__(self, *shape):
        super().__init__()
        self.scale = nn.Parameter(torch.rand(shape))

    def forward(self, dispatched):
        return dispatched.rows_RD * self.scale.repeat_interleave(dispatched.counts_e, 0)


def test_a_callers_experts(tmp_path):
    first, second = (imbrex.MoELayer(CONFIG, experts=Scaled(3, 6)) for _ in range(2))
    path = checkpoint.save(tmp_path, first, None, 1)
    stored = FileSystemReader(path).read_metadata().state_dict_metadata["model.experts.scale"]
    assert isinstance(stored, TensorStorageMetadata)
    assert len(stored.chunks) == 3
    checkpoint.load(path, second)
    x_TD = torch.randn(4, 6)
    assert torch.equal(first(x_TD), second(x_TD))
    with pytest.raises(ValueError, match=r"experts\.scale of Scaled is \[1, 6\] for 3 slots"):
        checkpoint.save(tmp_path, imbrex.MoELayer(CONFIG, experts=Scaled(1, 6)), None, 2)


def test_a_place_that_cannot_be_written(tmp_path):
    (tmp_path / "file").write_text("")
    model, optimizer = build()
    with pytest.raises(OSError, match="file"):
        checkpoint.save(tmp_path / "file", model, optimizer, 1)


def test_only_a_number_makes_a_checkpoint_and_numbers_count(tmp_path):
    """Folders of a user's are neither read nor removed, and 100000000 comes after 99999999."""
    model, optimizer = build()
    kept = checkpoint.save(tmp_path, model, optimizer, 100)
    kept.rename(tmp_path / "step_00000100.keep")
    (tmp_path / "step_00000101").mkdir()
    (tmp_path / "step_00000101" / "thesis.tex").write_text("mine")
    (tmp_path / "step_00000101" / "COMPLETE").write_text("mine too")
    noted = checkpoint.save(tmp_path, model, optimizer, 102)
    (noted / "notes.txt").write_text("mine")
    for number in (103, 99_999_999, 100_000_000):
        checkpoint.save(tmp_path, model, optimizer, number, keep=1)
    assert checkpoint.step_of(checkpoint.latest(tmp_path) or "") == 100_000_000
    mine = ["step_00000100.keep", "step_00000101", "step_00000102"]
    assert sorted(p.name for p in tmp_path.iterdir()) == [*mine, "step_100000000"]
    assert checkpoint.load(tmp_path / mine[0], model) == {}
    for number, strange in ((101, "thesis.tex"), (102, "notes.txt")):
        with pytest.raises(ValueError, match=f"holds {strange}, which no checkpoint has: move it"):
            checkpoint.save(tmp_path, model, optimizer, number)
    checkpoint.clear(tmp_path)
    assert sorted(p.name for p in tmp_path.iterdir()) == mine
    assert (tmp_path / "step_00000101" / "thesis.tex").read_text() == "mine"


def test_going_back_to_an_older_one_loses_none(tmp_path):
    """`keep` counts up to the step just saved: a later one, given up or damaged, pushes nothing out."""
    model, optimizer = build()
    for number in (1, 2, 5):
        checkpoint.save(tmp_path, model, optimizer, number)
    checkpoint.save(tmp_path, model, optimizer, 3, keep=2)
    assert [p.name[-1] for p in sorted(tmp_path.iterdir())] == ["2", "3", "5"]


@pytest.mark.parametrize("cut", [0, 1, 2])
def test_a_removal_that_is_cut_off_leaves_nothing_that_looks_complete(tmp_path, cut):
    model, optimizer = build()
    checkpoint.save(tmp_path, model, optimizer, 1)
    checkpoint.save(tmp_path, model, optimizer, 2)

    def cut_off(path, **_):
        if Path(path).exists():
            for file in sorted(Path(path).iterdir())[:cut]:
                file.unlink()
            raise KeyboardInterrupt

    with mock.patch("shutil.rmtree", side_effect=cut_off), pytest.raises(KeyboardInterrupt):
        checkpoint.save(tmp_path, model, optimizer, 3, keep=1)
    steps = [path for path in sorted(tmp_path.iterdir()) if path.name.startswith("step_")]
    for path in steps:
        checkpoint.load(path, model, optimizer)
    assert steps[-1].name == "step_00000003"
    checkpoint.save(tmp_path, model, optimizer, 4, keep=1)
    assert [p.name for p in tmp_path.iterdir()] == ["step_00000004"]


def test_a_replacement_that_is_cut_off_keeps_the_earlier_one(tmp_path):
    model, optimizer = build()
    checkpoint.save(tmp_path, model, optimizer, 5, {"first": True})
    rename = Path.rename

    def cut_off(path, target):
        if path.name.endswith(".partial"):
            raise KeyboardInterrupt
        return rename(path, target)

    with mock.patch("pathlib.Path.rename", cut_off), pytest.raises(KeyboardInterrupt):
        checkpoint.save(tmp_path, model, optimizer, 5)
    assert checkpoint.load_latest(tmp_path, model, optimizer) == 5
    checkpoint.save(tmp_path, model, optimizer, 6)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step_00000005", "step_00000006"]
    assert checkpoint.load(tmp_path / "step_00000005", model, optimizer) == {"first": True}


def cut(path):
    path.write_bytes(path.read_bytes()[:100])


def flip_in_a_tensor(path):
    """The bytes of the first bias: the file can be read as well as before."""
    content = bytearray(path.read_bytes())
    bias = next(p for p in build()[0].parameters() if p.dim() == 1)
    at = content.rindex(bias.detach().numpy().tobytes())
    content[at] ^= 1
    path.write_bytes(content)


def other_extra(path):
    path.write_text(path.read_text().replace('"tokens": 7', '"tokens": 8'))


def pipe(path):
    path.unlink()
    os.mkfifo(path)


DAMAGE = {
    "a pipe": ("__0_0.distcp", pipe, r"__0_0\.distcp cannot be read \(it is no file\)"),
    "mark without an end": ("COMPLETE", lambda path: path.write_text("[" * 100_000), "COMPLETE was changed"),
    "cut off": ("__0_0.distcp", cut, r"__0_0\.distcp was changed \(100 bytes of \d+\)"),
    "a bit of a tensor": ("__0_0.distcp", flip_in_a_tensor, "its checksum is another"),
    "missing": ("__0_0.distcp", Path.unlink, "__0_0.distcp is missing"),
    "metadata": (".metadata", cut, ".metadata was changed"),
    "mark cut off": ("COMPLETE", cut, "its COMPLETE was changed"),
    "mark": ("COMPLETE", other_extra, "its COMPLETE was changed"),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_damage_is_seen_and_the_older_one_read(tmp_path, kind):
    name, damage, said = DAMAGE[kind]
    model, optimizer = build()
    first = checkpoint.save(tmp_path, model, optimizer, 1)
    path = checkpoint.save(tmp_path, model, optimizer, 2, {"tokens": 7})
    damage(path / name)
    other, before = build(seed=9), build(seed=9)
    with pytest.raises(checkpoint.CheckpointDamaged, match=said) as caught:
        checkpoint.load(path, *other)
    assert str(caught.value).endswith(f"; load {first} instead")
    assert all(map(torch.equal, other[0].parameters(), before[0].parameters()))
    with pytest.warns(UserWarning, match=f"{said}.*: an older one is tried"):
        assert checkpoint.load_latest(tmp_path, *other) == 1
    assert all(map(torch.equal, other[0].parameters(), model.parameters()))
    damage = cut if name == "COMPLETE" else damage
    damage(first / name)
    with (
        pytest.warns(match="damaged"),
        pytest.raises(OSError, match="no older one is whole: take a copy of it"),
    ):
        checkpoint.load_latest(tmp_path, *other)


class Wicked:
    """Runs a function of its choice when a pickle of it is read."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)


def test_nothing_in_a_checkpoint_is_run(tmp_path):
    model, optimizer = build()
    path = checkpoint.save(tmp_path, model, optimizer, 1)
    metadata = FileSystemReader(path).read_metadata()
    metadata.planner_data = Wicked(tmp_path / "ran")
    (path / ".metadata").write_bytes(pickle.dumps(metadata))
    sign(path)
    with pytest.raises(checkpoint.CheckpointDamaged, match=r"names pathlib\.Path\.touch|for 'touch'"):
        checkpoint.load(path, model, optimizer)
    assert not (tmp_path / "ran").exists()


class ByGetattr(pickle.Pickler):
    """Writes members of enumerations as Python up to 3.11.3 does."""

    def reducer_override(self, obj):
        return (getattr, (type(obj), obj.name)) if isinstance(obj, Enum) else NotImplemented


def test_what_an_older_python_wrote_is_read(tmp_path):
    model, optimizer = build()
    path = checkpoint.save(tmp_path, model, optimizer, 1)
    with (path / ".metadata").open("rb") as file:
        metadata = pickle.load(file)
    with (path / ".metadata").open("wb") as file:
        ByGetattr(file).dump(metadata)
    assert b"getattr" in (path / ".metadata").read_bytes()
    sign(path)
    checkpoint.load(path, model, optimizer)


def test_a_value_that_only_code_can_read_is_refused_when_it_is_saved(tmp_path):
    model, optimizer = build()
    optimizer.param_groups[0]["schedule"] = Wicked(tmp_path / "ran")
    with pytest.raises(OSError, match=r"schedule is no plain value.*keep numbers, texts, tuples"):
        checkpoint.save(tmp_path, model, optimizer, 1)
    assert not (tmp_path / "ran").exists()
    with mock.patch("imbrex.parallel.logical_tensors._plain"):
        path = checkpoint.save(tmp_path, model, optimizer, 1)
    with pytest.raises(OSError, match="schedule is no plain value"):
        checkpoint.load(path, model, optimizer)
    assert not (tmp_path / "ran").exists()


def sign(path):
    """Make a mark that fits the files, as somebody who means harm would."""
    mark = read_mark(path)
    (path / "COMPLETE").unlink()
    digests = {file.name: digest(file) for file in path.iterdir()}
    path.rename(path.with_name("partial"))
    publish(path.with_name("partial"), path, StreamEvent(step=mark.step, extra=mark.extra, files=digests))


def test_what_cannot_be_kept_is_refused_before_anything_is_written(tmp_path):
    model, optimizer = build()
    for step, keep, extra, said in (
        (1, None, {"when": object()}, "extra cannot be written as JSON.*not JSON serializable.*; give str"),
        (-1, None, None, "step -1"),
        (1, 0, None, "keep 0"),
    ):
        with pytest.raises(ValueError, match=said):
            checkpoint.save(tmp_path, model, optimizer, step, extra, keep=keep)
    assert list(tmp_path.iterdir()) == []


def test_optimizers_that_keep_no_value_for_each_of_the_parameters(tmp_path):
    model, optimizer = build(optimizer=torch.optim.Adafactor)
    step(model, optimizer)
    said = r"Adafactor keeps row_var of 1.experts.gate_up_proj as \[3, 16, 1\], not for each of its values"
    whole = torch.optim.LBFGS(model.parameters())
    cases: list[tuple[Any, Any, str]] = [
        (model, optimizer, said),
        (
            model,
            whole,
            "checkpoint: LBFGS keeps no state for each parameter; give another optimizer of torch's, or",
        ),
        (model, [optimizer], "checkpoint: list keeps no state for each parameter"),
        (
            model.state_dict(),
            optimizer,
            "checkpoint: OrderedDict is no model; give the module, not its state_dict",
        ),
    ]
    for what, other, words in cases:
        with pytest.raises(ValueError, match=words):
            checkpoint.save(tmp_path, what, other, 1)
    assert checkpoint.latest(tmp_path) is None
    checkpoint.save(tmp_path, model, None, 2)
    with pytest.raises(ValueError, match="checkpoint: LBFGS keeps no state"):
        checkpoint.load_latest(tmp_path, model, whole)
    checkpoint.load_latest(tmp_path, model)
