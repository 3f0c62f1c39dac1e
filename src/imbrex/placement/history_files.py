"""Reads and writes recorded loads in the formats of TensorRT-LLM, SGLang, Megatron and vLLM; reads traces of
tokens.

    directory with meta_info.json and rank*.safetensors   TensorRT-LLM; keys `{iteration}_{layer}`, int64 [E]
    *.json with `logical_count`, *.pt with the same       SGLang; [L, E] or [steps, L, E]
    *.json with `load_history`                            vLLM's recorded loads (ADRS benchmark)
    *.jsonl, or a directory of rank*.jsonl                Megatron: `tpe` per iteration and layer, or a
                                                          trace with `top_indices`
    *.npz, *.npy                                          ids [layers, tokens, choices]
"""

from __future__ import annotations

import json
import os
import pickle
import zipfile
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from imbrex.placement.history import MOST_CHOICES, LoadHistory, check_ids, history_of_ids
from imbrex.placement.packing import Ints
from imbrex.placement.safetensors_file import read_arrays, write_arrays
from imbrex.runtime.checks import UNREADABLE, why

META = "meta_info.json"


def read_history(
    path: str | os.PathLike[str], *, batch: int = 128, array: str = "", num_experts: int = 0
) -> LoadHistory:
    """Read recorded loads from a file of any format above, recognised by its name and content.

    batch: the tokens of an iteration, for traces. array: the name of the ids in an `.npz`; by default the
    first that ends in "ids". num_experts: for a trace; by default its largest id and one.

    Raises ValueError, in one sentence, if the file is cut off, or is not what its name says.
    """
    path = Path(path)
    if not path.exists():
        raise ValueError(f"statistics: {path} does not exist")
    try:
        if path.is_dir():
            if (path / META).exists():
                return _read_tensorrt_llm(path)
            return _read_megatron(sorted(path.glob("rank*.jsonl")), path, num_experts)
        readers: dict[str, Callable[[], LoadHistory]] = {
            ".json": lambda: _read_json(path),
            ".pt": lambda: _from_counts(_load_pt(path)["logical_count"]),
            ".jsonl": lambda: _read_megatron([path], path, num_experts),
            ".npz": lambda: _read_trace(path, batch, array, num_experts),
            ".npy": lambda: _read_trace(path, batch, array, num_experts),
        }
        if path.suffix not in readers:
            raise ValueError(f"the name ends in none of {', '.join(readers)}")
        return readers[path.suffix]()
    except (*UNREADABLE, pickle.UnpicklingError, RuntimeError) as error:
        what = str(error).removeprefix("statistics: ") if type(error) is ValueError else why(error)
        raise ValueError(f"statistics: cannot read {path} ({what})") from None


def write_history(path: str | os.PathLike[str], history: LoadHistory, *, rank: int = 0) -> None:
    """Write a directory in TensorRT-LLM's format: this rank's counts and, from rank 0, their description."""
    path = Path(path)
    path.mkdir(parents=True, exist_ok=True)
    write_arrays(
        path / f"rank{rank}.safetensors",
        {
            f"{history.first_iteration + i}_{layer}": history.counts_ILE[i, at]
            for i in range(history.num_iterations)
            for at, layer in enumerate(history.layers)
        },
    )
    if rank == 0:
        meta = {"num_experts": history.num_experts, "num_experts_per_token": history.top_k}
        (path / META).write_text(json.dumps(meta), encoding="utf-8")


def _read_tensorrt_llm(path: Path) -> LoadHistory:
    meta = json.loads((path / META).read_text(encoding="utf-8"))
    num_experts = int(meta["num_experts"])
    files = [f for f in sorted(path.glob("rank*.safetensors")) if not f.stem.endswith("_raw")]
    if not files:
        raise ValueError("it holds no rank*.safetensors")
    counts: dict[tuple[int, int], Ints] = {}
    for file in files:
        for name, counts_E in read_arrays(file).items():
            if counts_E.shape != (num_experts,):
                raise ValueError(f"{file.name}: {name} has shape {counts_E.shape}, not [{num_experts}]")
            iteration, layer = (int(part) for part in name.split("_"))
            counts[iteration, layer] = counts.get((iteration, layer), 0) + whole_numbers(counts_E)
    return _from_cells(counts, int(meta.get("num_experts_per_token", 0)))


def _from_cells(counts: dict[tuple[int, int], Ints], top_k: int = 0) -> LoadHistory:
    """Build a history from counts by (iteration, layer). Every iteration must have every layer."""
    iterations, layers = (sorted(set(numbers)) for numbers in zip(*counts, strict=True))
    for iteration in range(iterations[0], iterations[-1] + 1):
        for layer in layers:
            if (iteration, layer) not in counts:
                raise ValueError(f"layer {layer} is missing in iteration {iteration}")
    for layer in layers:
        _check_kind(counts, iterations, layers[0], layer)
    return LoadHistory(
        counts_ILE=np.stack([np.stack([counts[i, layer] for layer in layers]) for i in iterations]),
        layers=tuple(layers),
        top_k=top_k,
        first_iteration=iterations[0],
    )


def _check_kind(
    counts: dict[tuple[int, int], Ints], iterations: Sequence[int], first: int, layer: int
) -> None:
    """Raise ValueError where a layer has other experts than the first one, or than itself before."""
    experts = len(counts[iterations[0], first])
    if len(counts[iterations[0], layer]) != experts:
        raise ValueError(
            f"layers {first} and {layer} differ in their experts; give layers of one kind in a file"
        )
    for iteration in iterations:
        if len(counts[iteration, layer]) != experts:
            raise ValueError(
                f"layer {layer} has {experts} experts in iteration {iterations[0]} and "
                f"{len(counts[iteration, layer])} in iteration {iteration}; give records of one model"
            )


def whole_numbers(values: Any) -> Ints:
    """Numbers of a file as int64. Raises ValueError where one is none, or no whole one of at most 2^53."""
    try:
        array = np.asarray(values.cpu() if isinstance(values, torch.Tensor) else values)
        array = (
            array if np.issubdtype(array.dtype, np.integer) else array.astype(np.float64, casting="same_kind")
        )
    except (OverflowError, TypeError, ValueError):
        raise ValueError(
            "rows of counts differ in length, or hold something else than numbers; give layers of one kind "
            "in a file"
        ) from None
    # NaN is not, either.
    if not ((np.abs(array) <= MOST_CHOICES) & (np.rint(array) == array)).all():
        raise ValueError(
            f"counts of shape {array.shape}, {np.isnan(array).sum()} of them NaN; expected whole numbers "
            "up to 2^53"
        )
    return array.astype(np.int64)


def _from_counts(counts: Any) -> LoadHistory:
    """Build a history from whole numbers [L, E] or [steps, L, E]."""
    array = whole_numbers(counts)
    array = array[None] if array.ndim == 2 else array
    if array.ndim != 3:
        raise ValueError(f"counts of shape {array.shape}; expected whole numbers [steps, layers, experts]")
    return LoadHistory(counts_ILE=array, layers=tuple(range(array.shape[1])))


def _read_json(path: Path) -> LoadHistory:
    content = json.loads(path.read_text(encoding="utf-8"))
    if "load_history" in content:
        return _from_counts([entry["logical_expert_load"] for entry in content["load_history"]])
    return _from_counts(content["logical_count"])


def _load_pt(path: Path) -> dict[str, Any]:
    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError:
        # torch's own words advise to load it in a way that runs what is in it.
        raise ValueError(
            "it holds other things than tensors and numbers, as torch.save writes them"
        ) from None


def _read_megatron(files: Iterable[Path], path: Path, num_experts: int) -> LoadHistory:
    lines = [json.loads(line) for file in files for line in file.open(encoding="utf-8") if line.strip()]
    if not lines:
        raise ValueError(f"{path.name} holds no lines of rank*.jsonl")
    if "top_indices" in lines[0]:
        lines = [_count_line(line, num_experts or _largest_id(lines) + 1) for line in lines]
    places = sorted({(str(line.get("block", "")), int(line["layer"])) for line in lines})
    layers = [layer for _, layer in places]
    number = dict(zip(places, layers if len(set(layers)) == len(layers) else range(len(places)), strict=True))
    counts: dict[tuple[int, int], Ints] = {}
    for line in lines:
        where = int(line["iter"]), number[str(line.get("block", "")), int(line["layer"])]
        counts_E = whole_numbers(line["tpe"])
        if counts_E.ndim != 1 or counts.get(where, counts_E).shape != counts_E.shape:
            raise ValueError(
                f"lines of layer {where[1]} in iteration {where[0]} differ in their experts; "
                "give the ranks of one run"
            )
        counts[where] = counts.get(where, 0) + counts_E
    return _from_cells(counts)


def _largest_id(lines: list[dict]) -> int:
    return max(int(np.max(whole_numbers(line["top_indices"]), initial=0)) for line in lines)


def _count_line(line: dict, num_experts: int) -> dict:
    ids = whole_numbers(line["top_indices"]).ravel()
    check_ids(ids, num_experts)
    tpe = np.bincount(ids[ids >= 0], minlength=num_experts)
    return {"iter": line["step"], "block": line.get("block", ""), "layer": line["layer"], "tpe": tpe}


def _read_trace(path: Path, batch: int, array: str, num_experts: int) -> LoadHistory:
    ids = read_ids(path, array)
    return history_of_ids(ids, num_experts or int(ids.max()) + 1, batch)


def read_ids(path: Path, array: str = "") -> np.ndarray:
    """The ids of a trace of tokens, [layers, tokens, choices]."""
    stored, _ = read_trace(path, array)
    ids = stored[None] if stored.ndim == 2 else stored
    if ids.ndim != 3 or not ids.size or not np.issubdtype(ids.dtype, np.integer):
        raise ValueError(f"ids are {ids.dtype} {ids.shape}; expected integers [layers, tokens, choices]")
    return ids


def read_trace(path: Path, array: str = "") -> tuple[np.ndarray, np.ndarray | None]:
    """The ids of a trace of tokens as they are stored, and their weights if an `.npz` has them: for ids named
    `NAMEids` they are named `NAMEw`. array: the name of the ids; by default the first that ends in "ids".

    Raises ValueError if the file holds no such array of numbers.
    """
    try:
        loaded = np.load(path, allow_pickle=False)
        if isinstance(loaded, np.ndarray):
            return loaded, None
        arrays = {name: loaded[name] for name in _names(loaded.files, array)}
    except (ValueError, EOFError, zipfile.BadZipFile):
        # numpy's own words advise to load it in a way that runs what is in it.
        raise ValueError("it holds no array of numbers as numpy.save and numpy.savez write them") from None
    if not arrays:
        raise ValueError(f"no array {array or '*ids'!r}; it has {', '.join(loaded.files)}")
    ids, *weights = arrays.values()
    return ids, weights[0] if weights else None


def _names(files: list[str], array: str) -> list[str]:
    """Names of the arrays of ids and of their weights in a file: two, one or none."""
    ids = array or next((name for name in files if name.endswith("ids")), "")
    return [name for name in (ids, f"{ids.removesuffix('ids')}w") if ids in files and name in files]
