"""Checkpoints of one process: complete or not there, and errors that say what to do."""

import json
import warnings
from collections.abc import Callable
from unittest import mock

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

import imbrex
from imbrex.parallel import checkpoint

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
        "before the mark": "imbrex.parallel.checkpoint._publish",
        "before the rename": "imbrex.parallel.checkpoint._flush",
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
    mark = json.loads((path / checkpoint.MARK).read_text())
    (path / checkpoint.MARK).write_text(json.dumps(mark | {"format": 99}))
    with pytest.raises(ValueError, match="format 99, this version reads 1"):
        checkpoint.load(path, model)


class Scaled(nn.Module):
    """Experts of a caller's that multiply by a number for each slot and column."""

    applies_weights = False

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


def test_a_damaged_file_is_an_error(tmp_path):
    model, optimizer = build()
    path = checkpoint.save(tmp_path, model, optimizer, 1)
    (stored,) = path.glob("*.distcp")
    stored.write_bytes(stored.read_bytes()[:100])
    with pytest.raises(OSError, match="cannot read checkpoint"):
        checkpoint.load(path, model, optimizer)
