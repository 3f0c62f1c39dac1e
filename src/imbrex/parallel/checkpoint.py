"""Checkpoints that any number of ranks can read, and that are either complete or not there.

What a checkpoint's folder holds, and how it comes and goes, is `imbrex.parallel.checkpoint_files`.
"""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save
from torch.optim import LBFGS, Optimizer

from imbrex.guards import PartialStateWarning
from imbrex.parallel import checkpoint_files as files
from imbrex.parallel.checkpoint_files import CheckpointDamaged, StreamEvent, clear
from imbrex.parallel.logical_tensors import Layout, LoadPlanner, SavePlanner, layouts
from imbrex.runtime import problems, waits
from imbrex.transport.collective import device_of

__all__ = ["CheckpointDamaged", "clear", "latest", "load", "load_latest", "save", "step_of"]


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
    once. directory: on a disk that all ranks see. extra: JSON values to keep with it, the first rank's.
    keep: of the checkpoints up to this step, remove all but that many of the newest; a folder into which
    somebody put another file stays. group: all ranks that hold a part of the model; default: all ranks, or
    this process where torch.distributed is not initialised. Collective over it: an error of one rank is
    raised on all.

    Raises ValueError for an `extra`, `step` or `keep` that cannot be, and OSError (a full or read-only disk,
    a rank that does not see it), with no new checkpoint left behind.
    """
    _meet(group, "save")
    finals = _of_all(group, lambda: _check(directory, step, keep, extra))
    _refuse_several_steps(finals)
    final = finals[0]
    partial = _on_first(group, lambda: files.make_room(final.parent, step))
    state, where = _on_all(group, lambda: _state_to_write(partial, model, optimizer))
    pieces = {"storage_writer": FileSystemWriter(partial), "planner": SavePlanner(where)}
    _dcp(f"cannot write checkpoint {final}", dcp_save, state, group, **pieces)
    digests = _of_all(group, lambda: _digests(partial, group))
    _on_first(group, lambda: _publish(partial, final, step, extra or {}, digests))
    if keep is not None:
        _on_first(group, lambda: files.prune(final.parent, keep, step))
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
    Collective over `group` as in `save`. Gradients of `optimizer`'s parameters are dropped. Every file is
    read for its checksum first, once among all ranks. Nothing in the files is run.

    Raises, on all ranks and before anything is changed: ValueError where `path` is no complete checkpoint or
    is one of another shape, CheckpointDamaged, an OSError, where its files are not what was written.
    """
    path = Path(path)
    _meet(group, "load")
    try:
        return _load(path, model, optimizer, group)
    except CheckpointDamaged as error:
        older = _on_first(group, lambda: files.newest(path.parent, besides=path))
        raise CheckpointDamaged(
            f"{error}; " + (f"load {older} instead" if older else "no other is beside it: take a copy of it")
        ) from None


def load_latest(
    directory: str | os.PathLike[str],
    model: nn.Module,
    optimizer: Optimizer | None = None,
    *,
    group: dist.ProcessGroup | None = None,
) -> int | None:
    """`load` the newest complete checkpoint of `directory`; its step, or `None` where there is none.

    One that is damaged is passed over, with a warning on the first rank, for the next older one. Raises
    CheckpointDamaged where all are.
    """
    _meet(group, "load_latest")
    paths: list[Path] = _on_first(group, lambda: files.marked(Path(directory)))
    damaged: CheckpointDamaged | None = None
    for path in reversed(paths):
        try:
            _load(path, model, optimizer, group)
        except CheckpointDamaged as error:
            damaged = error
            if _is_first(group):
                warnings.warn(f"{error}: an older one is tried", stacklevel=2)
            continue
        return step_of(path)
    if damaged is not None:
        raise CheckpointDamaged(f"{damaged}; no older one is whole: take a copy of it, or start anew")
    return None


def latest(directory: str | os.PathLike[str]) -> Path | None:
    """The newest complete checkpoint of `directory`, or `None`. Its files are not compared with their
    checksums: `load` does that."""
    return files.newest(Path(directory))


def step_of(path: str | os.PathLike[str]) -> int:
    """The step after which the checkpoint `path` was saved."""
    return files.read_mark(Path(path)).step


def _check(
    directory: str | os.PathLike[str], step: int, keep: int | None, extra: dict[str, Any] | None
) -> Path:
    """Where the checkpoint goes. Raises ValueError for what cannot be."""
    if not hasattr(step, "__index__") or step < 0 or (keep is not None and keep < 1):
        raise ValueError(f"checkpoint: step {step}, keep {keep}; give a step from 0 on, and keep 1 or more")
    try:
        json.dumps(extra)
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(
            f"checkpoint: extra cannot be written as JSON ({error}); give str, numbers, lists and dicts"
        ) from None
    return files.folder_of(Path(directory), step)


def _refuse_several_steps(finals: list[Path]) -> None:
    """Raise ValueError on every rank where one is after another step than the first."""
    for rank, final in enumerate(finals):
        if final.name != finals[0].name:
            raise ValueError(
                f"checkpoint: ranks disagree about the step: {finals[0].name} on rank 0, {final.name} on "
                f"rank {rank}; save on every rank after the same step"
            )


def _state_to_write(
    partial: Path, model: nn.Module, optimizer: Optimizer | None
) -> tuple[dict[str, Any], dict[str, Layout]]:
    if not partial.is_dir():
        raise OSError(f"this rank does not see {partial}: save to a disk that all ranks share")
    return _state_of(model, optimizer)


def _digests(partial: Path, group: dist.ProcessGroup | None) -> files.Digests:
    """Checksums of the files that this rank wrote: torch numbers files by the writer's rank in the group."""
    rank = _rank(group)
    names = [path.name for path in partial.glob(f"__{rank}_*")]
    names += [".metadata"] if rank == 0 else []
    return {name: files.digest(partial / name) for name in names}


def _publish(
    partial: Path, final: Path, step: int, extra: dict[str, Any], digests: list[files.Digests]
) -> None:
    written = {name: of_file for of_rank in digests for name, of_file in of_rank.items()}
    here = {path.name: path.stat().st_size for path in partial.iterdir()}
    if here != {name: size for name, (size, _) in written.items()}:
        raise OSError(
            f"the ranks do not see the same files in {partial}: save to a disk that all ranks share"
        )
    files.publish(partial, final, StreamEvent(step=step, extra=extra, files=written))


def _load(
    path: Path, model: nn.Module, optimizer: Optimizer | None, group: dist.ProcessGroup | None
) -> dict[str, Any]:
    mark: StreamEvent = _on_all(group, lambda: files.read_mark(path))
    _on_all(group, lambda: files.check_whole(path, mark.files, _share(sorted(mark.files), group)))
    if optimizer is not None:
        # With gradients present, torch would not create the state that is to be filled.
        optimizer.zero_grad(set_to_none=True)
    state, where = _on_all(group, lambda: _state_of(model, optimizer))
    reader = files.Reader(path)
    _on_all(group, lambda: _check_fits(path, reader.read_metadata(), state, where))
    planner = LoadPlanner(where)
    _dcp(f"cannot read checkpoint {path}", dcp_load, state, group, storage_reader=reader, planner=planner)
    _on_all(group, lambda: _fill(state, model, optimizer))
    return mark.extra


def _fill(state: dict[str, Any], model: nn.Module, optimizer: Optimizer | None) -> None:
    with _all_ranks_write():
        set_state_dict(
            model,
            [] if optimizer is None else [optimizer],
            model_state_dict=state["model"],
            optim_state_dict=state.get("optimizer", {}),
        )


def _share(names: list[str], group: dist.ProcessGroup | None) -> list[str]:
    """This rank's part of `names`: the disk that all read from is read once."""
    return names[_rank(group) :: _ranks(group)]


def _state_of(model: nn.Module, optimizer: Optimizer | None) -> tuple[dict[str, Any], dict[str, Layout]]:
    """The state that DCP saves or fills, and the layouts of the logical tensors in it by flattened name."""
    if not isinstance(model, nn.Module):
        raise ValueError(
            f"checkpoint: {type(model).__name__} is no model; give the module, not its state_dict"
        )
    if isinstance(optimizer, LBFGS) or not isinstance(optimizer, Optimizer | None):
        raise ValueError(
            f"checkpoint: {type(optimizer).__name__} keeps no state for each parameter; give another "
            "optimizer of torch's, or None to save and load the model alone"
        )
    of_parameter = layouts(model)
    with _all_ranks_write():
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
                _refuse_factors(optimizer, f"{key} of {name}", value, model_state[name])
                where[f"optimizer.state.{name}.{key}"] = layout
    return state, where


def _refuse_factors(optimizer: object, what: str, value: torch.Tensor, parameter: Any) -> None:
    """Raise ValueError where an optimizer does not keep a value for each of a parameter's, as Adafactor,
    whose means over a dimension are no pieces of a logical tensor."""
    if value.shape != parameter.shape:
        raise ValueError(
            f"checkpoint: {type(optimizer).__name__} keeps {what} as {list(value.shape)}, not for each of "
            f"its values {list(parameter.shape)}; give optimizer=None to save the model alone, or train "
            "experts by another optimizer"
        )


@contextmanager
def _all_ranks_write() -> Iterator[None]:
    """A context without the warning that a state dict holds one rank's experts only."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", PartialStateWarning)
        yield


def _check_fits(path: Path, metadata: Metadata, state: dict[str, Any], where: dict[str, Layout]) -> None:
    """Raise ValueError where the tensors of a checkpoint are not those of `state`."""
    shapes = {
        name: tuple(stored.size)
        for name, stored in metadata.state_dict_metadata.items()
        if isinstance(stored, TensorStorageMetadata)
    }
    expected = dict(_tensors("", state)) | {name: layout.shape for name, layout in where.items()}
    wrong = [
        f"{name} is {list(shapes[name]) if name in shapes else 'missing'} there and {list(shape)} here"
        for name, shape in expected.items()
        if shapes.get(name) != shape
    ]
    surplus = [
        f"{name} is {list(shape)} there and missing here"
        for name, shape in shapes.items()
        if name.startswith("model.") and name not in expected
    ]
    problems = sorted(wrong + surplus, key=lambda p: not p.startswith("model."))
    if not problems:
        return
    more = f", and {len(problems) - 1} more" if len(problems) > 1 else ""
    raise ValueError(
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


def _dcp(
    what: str, call: Callable[..., Any], state: dict[str, Any], group: dist.ProcessGroup | None, **pieces
) -> None:
    """Runs a collective of DCP; OSError, on all ranks, where it went wrong on any."""

    def run() -> None:
        try:
            with warnings.catch_warnings():
                # DCP warns where torch.distributed is not initialised: one process alone is meant.
                warnings.filterwarnings("ignore", message="torch.distributed is disabled")
                call(state, process_group=group, no_dist=not _distributed(), **pieces)
        except CheckpointException as error:
            own, _ = error.failures.get(_rank(group), (None, None))
            if own is not None and not isinstance(own, Exception):
                raise own from None
            errors = [f"rank {rank}: {type(f).__name__}: {f}" for rank, (f, _) in error.failures.items()]
            raise OSError(f"{what}: {'; '.join(errors)}") from None

    _on_all(group, run)


def _distributed() -> bool:
    return dist.is_available() and dist.is_initialized()


def _ranks(group: dist.ProcessGroup | None) -> int:
    return dist.get_world_size(group) if _distributed() else 1


def _rank(group: dist.ProcessGroup | None) -> int:
    return dist.get_rank(group) if _distributed() else 0


def _is_first(group: dist.ProcessGroup | None) -> bool:
    return _rank(group) == 0


def _whole(group: dist.ProcessGroup | None) -> dist.ProcessGroup:
    whole = group or dist.group.WORLD
    assert whole is not None
    return whole


def _meet(group: dist.ProcessGroup | None, what: str) -> None:
    """Raise RankLostError where a rank does not come to this call within the usual time-out: what follows
    waits for as long as a disk may take."""
    if _ranks(group) == 1:
        return
    whole = _whole(group)
    here = torch.zeros(1, dtype=torch.int32, device=device_of(whole))
    try:
        call = partial(dist.all_reduce, here, group=whole, async_op=True)
        waits.run(f"checkpoint.{what}", call, on_host=not here.is_cuda, group=whole)
    except waits.RankLostError as error:
        raise waits.RankLostError(f"{error}; call it on every rank, not on the first alone") from error


def _on_all(group: dist.ProcessGroup | None, call: Callable[[], Any]) -> Any:
    """Runs `call` on every rank; this rank's result. An exception of one rank is raised on all."""
    return _settled(group, call, tells=False)[0]


def _of_all(group: dist.ProcessGroup | None, call: Callable[[], Any]) -> list[Any]:
    """Runs `call` on every rank; the results of all. An exception of one rank is raised on all."""
    return _settled(group, call, tells=True)[1]


def _on_first(group: dist.ProcessGroup | None, call: Callable[[], Any]) -> Any:
    """Runs `call` on the first rank; its result, or its exception, on all."""
    return _settled(group, call if _is_first(group) else lambda: None, tells=True)[1][0]


_KINDS = (CheckpointDamaged, OSError, ValueError)


def _settled(
    group: dist.ProcessGroup | None, call: Callable[[], Any], *, tells: bool
) -> tuple[Any, list[Any]]:
    result, own = problems.attempt(call)
    of_ranks: list[Any] = [(result if tells else None, mine := problems.quote(own, _KINDS))]
    if _ranks(group) > 1:
        of_ranks = problems.gather("a checkpoint", of_ranks[0], _whole(group), problems.SLOW_S, own)
    if own is not None and not isinstance(own, Exception):
        raise own
    for rank, (_, problem) in enumerate(of_ranks):
        if problem is None:
            continue
        if own is not None and mine == problem:
            raise own
        raise problem[0](f"rank {rank}: {problem[1]}")
    return result, [sentence for sentence, _ in of_ranks]
