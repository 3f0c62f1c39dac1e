"""Checkpoints that any number of ranks can read, and that are either complete or not there.

    DIRECTORY/step_00000200/            torch.distributed.checkpoint files and COMPLETE
    DIRECTORY/.step_00000250.partial/   being written, or cut off: never read

A checkpoint is written under its partial name, flushed to the disk, marked and renamed, in this order.
"""

from __future__ import annotations

import json
import os
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save
from torch.optim import Optimizer

from imbrex.parallel.logical_tensors import Layout, LoadPlanner, SavePlanner, layouts

FORMAT = 1
MARK = "COMPLETE"
PREFIX = "step_"


def save(
    directory: str | os.PathLike[str],
    model: nn.Module,
    optimizer: Optimizer | None,
    step: int,
    extra: dict[str, Any] | None = None,
    *,
    keep: int | None = None,
    group: dist.ProcessGroup | None = None,
) -> Path:
    """Write `model` and `optimizer` after `step` steps; the checkpoint's path.

    Expert parameters and their optimizer state are written as logical tensors [num_experts, ...], each expert
    once. extra: JSON values to keep with it. keep: remove all but that many of the newest complete ones.
    group: all ranks that hold a part of the model; default: all ranks, or this process where
    torch.distributed is not initialised. Collective over it: an error of one rank is raised on all.

    Raises OSError (a full or read-only disk) with no new checkpoint left behind.
    """
    directory = Path(directory)
    final, partial = directory / f"{PREFIX}{step:08d}", directory / f".{PREFIX}{step:08d}.partial"
    _on_first(group, lambda: _make_room(partial))
    state, where = _state_of(model, optimizer)
    pieces = {"storage_writer": FileSystemWriter(partial), "planner": SavePlanner(where)}
    written = _dcp(dcp_save, state, group, **pieces)
    _agree(group, written, OSError, f"cannot write checkpoint {final}")
    _on_first(group, lambda: _publish(partial, final, step, extra or {}))
    if keep is not None:
        _on_first(group, lambda: _prune(directory, keep))
    return final


def load(
    path: str | os.PathLike[str],
    model: nn.Module,
    optimizer: Optimizer | None = None,
    *,
    group: dist.ProcessGroup | None = None,
) -> dict[str, Any]:
    """Fill `model` and `optimizer` in place from the complete checkpoint `path`; its `extra`.

    The number of ranks, the placement and the tensor-parallel size may differ from when it was saved.
    Collective over `group` as in `save`. Gradients of `optimizer`'s parameters are dropped.

    Raises ValueError, on all ranks and before anything is changed, where `path` is no complete checkpoint or
    is one of another shape.
    """
    path = Path(path)
    mark = _on_first(group, lambda: _read_mark(path))
    if optimizer is not None:
        # With gradients present, torch would not create the state that is to be filled.
        optimizer.zero_grad(set_to_none=True)
    state, where = _state_of(model, optimizer)
    reader = FileSystemReader(path)
    _agree(group, _misfit(path, reader.read_metadata(), state, where), ValueError, "")
    read = _dcp(dcp_load, state, group, storage_reader=reader, planner=LoadPlanner(where))
    _agree(group, read, OSError, f"cannot read checkpoint {path}")
    set_state_dict(
        model,
        [] if optimizer is None else [optimizer],
        model_state_dict=state["model"],
        optim_state_dict=state.get("optimizer", {}),
    )
    return mark["extra"]


def load_latest(
    directory: str | os.PathLike[str],
    model: nn.Module,
    optimizer: Optimizer | None = None,
    *,
    group: dist.ProcessGroup | None = None,
) -> int | None:
    """`load` the newest complete checkpoint of `directory`; its step, or `None` where there is none."""
    path = _on_first(group, lambda: latest(directory))
    if path is None:
        return None
    load(path, model, optimizer, group=group)
    return step_of(path)


def latest(directory: str | os.PathLike[str]) -> Path | None:
    """The newest complete checkpoint of `directory`, or `None`."""
    complete = _complete(Path(directory))
    return complete[-1] if complete else None


def step_of(path: str | os.PathLike[str]) -> int:
    """The step after which the checkpoint `path` was saved."""
    return int(_read_mark(Path(path))["step"])


def _state_of(model: nn.Module, optimizer: Optimizer | None) -> tuple[dict[str, Any], dict[str, Layout]]:
    """What DCP saves or fills, and the layouts of the logical tensors in it by flattened name."""
    of_parameter = layouts(model)
    model_state, optimizer_state = get_state_dict(model, [] if optimizer is None else [optimizer])
    state: dict[str, Any] = {"model": model_state}
    if optimizer is not None:
        state["optimizer"] = optimizer_state
    where = {f"model.{name}": layout for name, layout in of_parameter.items()}
    slots: dict[str, Any] = optimizer_state["state"] if optimizer is not None else {}  # pyright: ignore
    for name, layout in of_parameter.items():
        for key, value in slots.get(name, {}).items():
            # Moments have the parameter's shape; a step count has none.
            if isinstance(value, torch.Tensor) and value.dim() == len(layout.shape):
                where[f"optimizer.state.{name}.{key}"] = layout
    return state, where


def _misfit(path: Path, metadata: Metadata, state: dict[str, Any], where: dict[str, Layout]) -> str:
    """Why a checkpoint does not fit, or an empty string."""
    shapes = {
        name: tuple(stored.size)
        for name, stored in metadata.state_dict_metadata.items()
        if isinstance(stored, TensorStorageMetadata)
    }
    wanted = dict(_tensors("", state)) | {name: layout.shape for name, layout in where.items()}
    wrong = [
        f"{name} is {list(shapes[name]) if name in shapes else 'missing'} there and {list(shape)} here"
        for name, shape in wanted.items()
        if shapes.get(name) != shape
    ]
    surplus = [
        f"{name} is {list(shape)} there and missing here"
        for name, shape in shapes.items()
        if name.startswith("model.") and name not in wanted
    ]
    problems = sorted(wrong + surplus, key=lambda p: not p.startswith("model."))
    if not problems:
        return ""
    more = f", and {len(problems) - 1} more" if len(problems) > 1 else ""
    return (
        f"checkpoint {path} is of another shape: {problems[0]}{more}; build the model with the configuration "
        "it was saved with, or start anew in another directory"
    )


def _tensors(prefix: str, value: Any):
    """(dotted name, shape) of every tensor with a dimension in a nested state dict."""
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from _tensors(f"{prefix}.{key}" if prefix else str(key), inner)
    elif isinstance(value, torch.Tensor) and value.dim():
        yield prefix, tuple(value.shape)


def _complete(directory: Path) -> list[Path]:
    """Complete checkpoints by step."""
    if not directory.is_dir():
        return []
    return sorted(p for p in directory.iterdir() if p.name.startswith(PREFIX) and (p / MARK).is_file())


def _read_mark(path: Path) -> dict[str, Any]:
    try:
        mark = json.loads((path / MARK).read_text())
    except (OSError, json.JSONDecodeError):
        raise ValueError(
            f"{path} is no complete checkpoint; pass a {PREFIX}... folder that holds a {MARK} file"
        ) from None
    if mark.get("format") != FORMAT:
        raise ValueError(
            f"{path} has checkpoint format {mark.get('format')}, this version reads {FORMAT}; load it with "
            "the version that wrote it"
        )
    return mark


def _make_room(partial: Path) -> None:
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)


def _publish(partial: Path, final: Path, step: int, extra: dict[str, Any]) -> None:
    with (partial / MARK).open("w") as file:
        json.dump({"format": FORMAT, "step": step, "extra": extra}, file)
        file.flush()
        os.fsync(file.fileno())
    _flush(partial)
    replaced = final.with_name(f".{final.name}.replaced")
    shutil.rmtree(replaced, ignore_errors=True)
    if final.exists():
        final.rename(replaced)
    partial.rename(final)
    _flush(final.parent)
    shutil.rmtree(replaced, ignore_errors=True)


def _flush(directory: Path) -> None:
    """Bring a directory's entries to the disk."""
    handle = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _prune(directory: Path, keep: int) -> None:
    for path in _complete(directory)[: -max(keep, 1)]:
        # The mark goes first: a checkpoint half removed must not look complete.
        (path / MARK).unlink()
        shutil.rmtree(path)


def _dcp(call: Callable[..., Any], state: dict[str, Any], group: dist.ProcessGroup | None, **pieces) -> str:
    """Runs a collective of DCP; what went wrong, on any rank, or an empty string."""
    try:
        with warnings.catch_warnings():
            # DCP warns where torch.distributed is not initialised: one process alone is meant.
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
            call(state, process_group=group, no_dist=not _distributed(), **pieces)
    except CheckpointException as error:
        for failure, _ in error.failures.values():
            if not isinstance(failure, Exception):
                raise failure from None
        found = error.failures.items()
        return "; ".join(f"rank {rank}: {type(f).__name__}: {f}" for rank, (f, _) in found)
    return ""


def _distributed() -> bool:
    return dist.is_available() and dist.is_initialized()


def _ranks(group: dist.ProcessGroup | None) -> int:
    return dist.get_world_size(group) if _distributed() else 1


def _agree(group: dist.ProcessGroup | None, problem: str, kind: type[Exception], prefix: str) -> None:
    """Raises `kind` on every rank if any rank has a problem."""
    problems = [problem]
    if _ranks(group) > 1:
        problems = [""] * _ranks(group)
        dist.all_gather_object(problems, problem, group=group)
    first = next((p for p in problems if p), None)
    if first is not None:
        raise kind(f"{prefix}: {first}" if prefix else first)


def _on_first(group: dist.ProcessGroup | None, call: Callable[[], Any]) -> Any:
    """Runs `call` on the first rank; its result, or its OSError or ValueError, on all."""
    outcome: list[Any] = [None, None]
    if _ranks(group) == 1 or dist.get_rank(group) == 0:
        try:
            outcome[0] = call()
        except (OSError, ValueError) as error:
            outcome[1] = error
    if _ranks(group) > 1:
        dist.broadcast_object_list(outcome, group=group, group_src=0)
    if outcome[1] is not None:
        raise outcome[1]
    return outcome[0]
