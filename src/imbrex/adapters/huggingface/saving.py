"""Saves a model with replaced blocks as transformers would: all experts, under transformers' names.

The layers' experts are gathered to the rank that writes, one layer at a time. When all files are complete,
they are renamed to those of a sharded checkpoint.
"""

from __future__ import annotations

import copy
import json
import os
import re
import shutil
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from imbrex.adapters.huggingface.gathering import Team, gather_experts, why_not_gathered
from imbrex.adapters.huggingface.replaced import (
    ReplacedBlock,
    plain_name,
    replaced_blocks,
    whole,
)
from imbrex.guards import PartialStateWarning

UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
STALE = re.compile(r"model(-\d{5}-of-\d{5})?\.safetensors(\.index\.json)?")
"""Weights of an earlier save, which the new ones replace."""
IN_TRAINER = (
    " (Trainer saves on one: give it ReplacedBlocks(), and instead of its save_model() call the model's "
    "save_pretrained())"
)
"""Advice for a rank that saves alone."""


def save_pretrained(
    model: nn.Module,
    save_directory: str | os.PathLike[str],
    *,
    max_shard_size: int | str = "5GB",
    **options: Any,
) -> None:
    """Write configuration and weights so that transformers' `from_pretrained` can read them.

    model: with blocks that `replace_blocks` replaced; this function is then the model's own
    `save_pretrained`. Collective over the ranks of its layers: every rank calls it; the first one writes, and
    holds one layer's experts and one file's tensors at a time. An error on one rank is raised on all, and the
    folder keeps what it had before.
    max_shard_size: the size at which a file ends, in bytes or as in "5GB".
    options: those of transformers' method. `is_main_process`, `save_function` and `safe_serialization` have
    no effect; other ones are a ValueError.

    Raises RankLostError if a rank does not call it.
    """
    blocks = replaced_blocks(model)
    if not blocks:
        raise ValueError("save_pretrained: no replaced blocks; use the model's own save_pretrained")
    team = Team([layer for _, layer in blocks], "save_pretrained", IN_TRAINER)
    team.meet()
    team.attempt(lambda: _refuse_misuse(model, blocks, max_shard_size, options))
    dense = team.attempt(lambda: _dense_state(model, [name for name, _ in blocks]))
    with _Shards(Path(save_directory), _bytes(max_shard_size), team) as shards:
        shards.add(lambda: _original_names(model, dense))
        for name, layer in blocks:
            experts, beside = gather_experts(layer, team, everywhere=False), team.attempt(layer.dense_state)
            shards.add(partial(_tensors_of, model, name, layer, experts, beside))
        shards.publish(lambda folder: _write_settings(model, blocks[0][1].origin.router_logits, folder))


def _refuse_misuse(model: nn.Module, blocks: list, size: int | str, options: dict[str, Any]) -> None:
    ignored = ("is_main_process", "save_function", "safe_serialization", "save_original_format")
    surplus = [name for name, value in options.items() if name not in ignored and value not in (None, False)]
    surplus += ["save_original_format"] if options.get("save_original_format") is False else []
    if surplus:
        raise ValueError(
            f"save_pretrained: {', '.join(surplus)} cannot be had with replaced blocks; leave it out "
            "(a state_dict holds one rank's experts only; upload the folder once it is written)"
        )
    if getattr(model, "_hf_peft_config_loaded", False):
        raise ValueError(
            "save_pretrained: the model has adapters; save these by get_adapter_state_dict(), or merge them"
        )
    _bytes(size)
    reasons = (why_not_gathered(layer) for _, layer in blocks)
    reason = next((reason for reason in reasons if reason is not None), None)
    if reason is not None:
        raise ValueError(f"save_pretrained: {reason}")


def _dense_state(model: nn.Module, blocks: list[str]) -> dict[str, Tensor]:
    """The state outside the blocks, under the names it has in memory. Collective where FSDP shards it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", PartialStateWarning)
        state = {plain_name(name): value for name, value in model.state_dict().items()}
    inside = tuple(f"{name}." for name in blocks)
    tied: dict[str, str] = getattr(model, "all_tied_weights_keys", None) or {}
    ignored = getattr(model, "_keys_to_ignore_on_save", None) or ()
    dense = {}
    for name, value in state.items():
        if name.startswith(inside) or name in ignored or tied.get(name) in state:
            continue
        dense[name] = whole(value)
    return dense


def _tensors_of(
    model: nn.Module, name: str, layer: ReplacedBlock, experts: dict[str, Tensor], dense: dict[str, Tensor]
) -> dict[str, Tensor]:
    state = layer.block_state(experts, dense)
    return _original_names(model, {f"{name}.{inner}": value for inner, value in state.items()})


def _original_names(model: nn.Module, state: dict[str, Tensor]) -> dict[str, Tensor]:
    """The tensors under the names that checkpoints carry, experts one by one where these do."""
    from transformers.core_model_loading import revert_weight_conversion

    return revert_weight_conversion(model, state)  # pyright: ignore[reportArgumentType]


def _write_settings(model: nn.Module, router_logits: bool, folder: Path) -> None:
    config: Any = copy.deepcopy(model.config)
    config.architectures = [type(model).__name__]
    config.dtype = str(getattr(model, "dtype", torch.float32)).removeprefix("torch.")
    if hasattr(config, "output_router_logits"):
        config.output_router_logits = router_logits
    config.save_pretrained(folder)
    settings: Any = getattr(model, "generation_config", None)
    if settings is not None:
        settings.save_pretrained(folder)


def _bytes(size: int | str) -> int:
    parts = re.fullmatch(r"([\d.]+)\s*([KMGT]B)?", str(size).upper())
    if parts is None or float(parts[1]) <= 0:
        raise ValueError(f"save_pretrained: max_shard_size={size!r}; give bytes, or such as '5GB'")
    return int(float(parts[1]) * UNITS[parts[2] or ""])


class _Shards:
    """The files of one save, written under another name until all are there. Only the first rank writes;
    each step ends with all ranks knowing whether it could."""

    def __init__(self, folder: Path, limit: int, team: Team) -> None:
        self.folder, self.limit, self.team = folder, limit, team
        self.partial = folder / ".partial"
        self.waiting: dict[str, Tensor] = {}
        self.files: list[list[str]] = []
        self.total = {"total_parameters": 0, "total_size": 0}

    def __enter__(self) -> _Shards:
        self._step(self._make_room)
        return self

    def __exit__(self, *_: object) -> None:
        if self.team.first:
            shutil.rmtree(self.partial, ignore_errors=True)

    def add(self, tensors: Callable[[], dict[str, Tensor]]) -> None:
        def write() -> None:
            for name, tensor in tensors().items():
                size = tensor.numel() * tensor.element_size()
                nbytes = sum(t.numel() * t.element_size() for t in self.waiting.values())
                if self.waiting and nbytes + size > self.limit:
                    self._flush()
                self.waiting[name] = tensor.contiguous()
                self.total["total_parameters"] += tensor.numel()
                self.total["total_size"] += size

        self._step(write)

    def publish(self, settings: Callable[[Path], None]) -> None:
        def write() -> None:
            self._flush()
            settings(self.partial)
            for file in self.folder.iterdir():
                if STALE.fullmatch(file.name):
                    file.unlink()
            self._name_files()
            for file in sorted(self.partial.iterdir()):
                file.replace(self.folder / file.name)

        self._step(write)

    def _step(self, work: Callable[[], None]) -> None:
        self.team.attempt(work if self.team.first else lambda: None)

    def _make_room(self) -> None:
        shutil.rmtree(self.partial, ignore_errors=True)
        self.partial.mkdir(parents=True)

    def _flush(self) -> None:
        from safetensors.torch import save_file

        save_file(self.waiting, self.partial / f"{len(self.files)}.part", metadata={"format": "pt"})
        self.files.append(list(self.waiting))
        self.waiting = {}

    def _name_files(self) -> None:
        if len(self.files) == 1:
            (self.partial / "0.part").rename(self.partial / "model.safetensors")
            return
        where = {}
        for number, names in enumerate(self.files):
            file = f"model-{number + 1:05d}-of-{len(self.files):05d}.safetensors"
            (self.partial / f"{number}.part").rename(self.partial / file)
            where |= dict.fromkeys(names, file)
        index = json.dumps({"metadata": self.total, "weight_map": where}, indent=2, sort_keys=True)
        (self.partial / "model.safetensors.index.json").write_text(index + "\n")
