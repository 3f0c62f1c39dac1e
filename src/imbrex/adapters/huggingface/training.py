"""A callback for transformers' `Trainer` with replaced blocks. `Trainer` does some things on one rank only,
or not at all, in which every rank must take part.

    Trainer(model=model, args=args, callbacks=[ReplacedBlocks()], ...)
"""

from __future__ import annotations

import json
import math
import random
import sys
from collections.abc import Mapping, Sized
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import TrainerCallback, TrainerState

import imbrex
from imbrex.adapters.huggingface.gathering import Team
from imbrex.adapters.huggingface.replaced import replaced_blocks
from imbrex.adapters.huggingface.weights import SafetensorsFolder, block_prefix, load_block
from imbrex.parallel.backward import sync_in_backward
from imbrex.parallel.checkpoint import latest, load, save

STATE = "imbrex"
"""The folder in a checkpoint of Trainer's that holds the optimizer's state, and all weights beside it."""
SHARDED = "pytorch_model_fsdp.bin"
"""The file of weights that Trainer wants with FSDP2; here it holds none. See `_fit`."""


class ReplacedBlocks(TrainerCallback):
    """Makes gradients those of all ranks' mean loss, clips them by the norm over all ranks' experts, and has
    every rank take part in saving checkpoints. Sums run beside the backward; behind it where a step has
    several micro-batches, or gradients are checkpointed by torch's reentrant way.

    Where Trainer goes on from a checkpoint, or takes the best one at its end, it leaves out experts, whose
    names differ in files: every rank then reads its own. The norm that it logs is that of all ranks.

    Wants `save_only_model=True`: Trainer writes the optimizer's state of one rank.
    save_optimizer: write the state of all ranks beside the model, by `imbrex.parallel.checkpoint`, with that
        of the learning rate and of the random numbers. Trainer goes on from it to the same steps, with DDP
        or FSDP2 whichever wrote it; without it, it begins with a new optimizer, and with FSDP2 not at all."""

    def __init__(self, *, save_optimizer: bool = False) -> None:
        self.save_optimizer = save_optimizer
        self.max_grad_norm, self.norm = 0.0, math.nan
        self.own_save: Any = None
        self.sync: Any = None

    def on_init_end(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        """Have FSDP2, which shards the model as a training begins, leave the experts where they are."""
        plugin = _fsdp_plugin()
        if plugin is None:
            _fit(args)
            return
        if plugin.fsdp_version != 2 or plugin.cpu_ram_efficient_loading:
            raise ValueError(
                "ReplacedBlocks: of Trainer's ways to shard, FSDP2 leaves a rank its own experts, where each "
                "rank has the model: give fsdp_config={'version': 2}, without cpu_ram_efficient_loading"
            )
        if args.load_best_model_at_end:
            raise ValueError(
                "ReplacedBlocks: load_best_model_at_end=True: with FSDP2 Trainer reads a file that "
                "save_only_model=True leaves out; load the best checkpoint yourself, by from_pretrained"
            )
        if self.save_optimizer and not str(plugin.state_dict_type).endswith("FULL_STATE_DICT"):
            raise ValueError(
                "ReplacedBlocks: save_optimizer=True: Trainer goes on from no such shards; give "
                "fsdp_config={'version': 2, 'state_dict_type': 'FULL_STATE_DICT'}"
            )
        plugin.ignored_modules = [layer.experts.to(args.device) for _, layer in replaced_blocks(model)]
        vars(model)["load_state_dict"] = partial(_load_what_there_is, model)
        _fit(args)

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **others: Any) -> None:
        blocks = replaced_blocks(model)
        if not blocks:
            raise ValueError("ReplacedBlocks: no replaced blocks in the model; call replace_blocks first")
        if str(getattr(args.save_strategy, "value", args.save_strategy)) != "no" and not args.save_only_model:
            raise ValueError(
                "ReplacedBlocks: Trainer would write the optimizer's state of one rank's experts only; give "
                "save_only_model=True or save_strategy='no'; to resume, ReplacedBlocks(save_optimizer=True)"
            )
        _refuse_uneven([layer for _, layer in blocks], args, state.max_steps, others.get("train_dataloader"))
        if state.global_step > 0:
            _go_on(_resumed(args, state), model, others.get("optimizer"), others.get("lr_scheduler"))
        if _fsdp_plugin() is not None:
            _step_apart(others["optimizer"])
        # Trainer would clip before the gradients are all ranks', by the norm of one rank's experts.
        self.max_grad_norm, args.max_grad_norm = args.max_grad_norm or 0.0, 0.0
        # Trainer saves on one rank, in the middle of a step that the others go on with: see `on_save`.
        self.own_save = vars(model)["save_pretrained"]
        vars(model)["save_pretrained"] = _later
        if _one_backward_a_step(args) and all(layer.mean_over == 1 for _, layer in blocks):
            self.sync = sync_in_backward(model, dense=_averages_dense(args))

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        imbrex.sync_gradients(model, dense=_averages_dense(args))
        # To infinity means that nothing is scaled, as in Trainer.
        self.norm = imbrex.clip_grad_norm_(model, self.max_grad_norm or math.inf)

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        for row in (logs, state.log_history[-1] if state.log_history else None):
            if row is not None and "grad_norm" in row:
                # host sync: where Trainer copies its own norm
                row["grad_norm"] = float(self.norm)

    def on_save(self, args: Any, state: Any, control: Any, model: Any = None, **others: Any) -> None:
        folder = Path(args.output_dir) / f"checkpoint-{state.global_step}"
        self.own_save(folder)
        if not self.save_optimizer:
            return
        optimizer, extra = others["optimizer"], {"lr_scheduler": others["lr_scheduler"].state_dict()}
        save(folder / STATE, model, _own(optimizer), state.global_step, extra)
        _save_random_numbers(args, model, folder)
        _fit(args)

    def on_train_end(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        if self.sync is not None:
            self.sync.remove()
            self.sync = None
        vars(model)["save_pretrained"] = self.own_save
        args.max_grad_norm = self.max_grad_norm
        if args.load_best_model_at_end and state.best_model_checkpoint is not None:
            _load_experts(model, Path(state.best_model_checkpoint))


def _fsdp_plugin() -> Any:
    """The settings by which Trainer shards with FSDP, or `None`. They are accelerate's, which is not
    imported where Trainer has not; to make another of its states would change the one that there is."""
    states: Any = sys.modules.get("accelerate.state")
    return None if states is None else vars(states.AcceleratorState)["_shared_state"].get("fsdp_plugin")


def _fit(args: Any) -> None:
    """Have checkpoints with an optimizer's state fit this Trainer, however they were written: with FSDP2 it
    wants a file that it refuses otherwise. Every rank does so before it looks."""
    for state in Path(args.output_dir).glob(f"checkpoint-*/{STATE}"):
        file = state.with_name(SHARDED)
        if _fsdp_plugin() is None:
            file.unlink(missing_ok=True)
        elif not file.exists():
            draft = state.with_name(f"{SHARDED}.{args.process_index}")
            torch.save({}, draft)
            draft.replace(file)


def _step_apart(optimizer: Any) -> None:
    """Have an optimizer step through parameters one at a time: torch's faster ways refuse groups of which
    FSDP2 shards some and not the experts."""
    for group in optimizer.param_groups:
        group.update({way: False for way in ("fused", "foreach") if way in group})


def _refuse_uneven(layers: list[imbrex.MoELayer], args: Any, steps: int, loader: Any) -> None:
    """Raise ValueError on every rank where Trainer would call the model more often on some than on others:
    those would wait, in sums of Trainer's own, for one that has ended."""
    team = Team(layers, "the start of a training")
    team.meet()
    times = [getattr(args, f"{what}_strategy", None) for what in ("eval", "save")]
    epochs = "epoch" in [str(getattr(time, "value", time)) for time in times]
    batches = len(loader) if isinstance(loader, Sized) else 0
    heard = team.hear((steps, batches if epochs or args.gradient_accumulation_steps > 1 else 0, batches))
    if len({numbers[:2] for numbers in heard.values()}) > 1:
        first: dict[tuple[int, ...], int] = {}
        for rank, numbers in sorted(heard.items()):
            first.setdefault(numbers, rank)
        each = " and ".join(f"{n} steps with {b} batches on rank {rank}" for (n, _, b), rank in first.items())
        raise ValueError(
            f"ReplacedBlocks: Trainer would make {each}; give every rank a loader of the same length: leave "
            "get_train_dataloader to Trainer, which divides evenly, or use drop_last=True and equal shares"
        )


def _averages_dense(args: Any) -> bool:
    """Whether nobody else averages the gradients of dense layers: Trainer's DDP does."""
    return str(getattr(args.parallel_mode, "value", args.parallel_mode)) != "distributed"


def _one_backward_a_step(args: Any) -> bool:
    """Whether every parameter gets its gradient once a step."""
    reentrant = (args.gradient_checkpointing_kwargs or {}).get("use_reentrant", True)
    return args.gradient_accumulation_steps == 1 and not (args.gradient_checkpointing and reentrant)


def _resumed(args: Any, state: Any) -> Path:
    """The folder that Trainer has gone on from, which it tells nobody."""
    folder = Path(args.output_dir) / f"checkpoint-{state.global_step}"
    file = folder / "trainer_state.json"
    if file.exists():
        history = TrainerState.load_from_json(str(file)).log_history
        if json.dumps(history) == json.dumps(state.log_history):
            return folder
    raise ValueError(
        f"ReplacedBlocks: Trainer went on from another checkpoint than {folder}, and has left out its "
        "experts; put it there, or give its folder's parent as output_dir"
    )


def _go_on(folder: Path, model: Any, optimizer: Any, lr_scheduler: Any) -> None:
    """Read what Trainer has left out of a checkpoint."""
    state = latest(folder / STATE)
    if state is None:
        _load_experts(model, folder)
        return
    extra = load(state, model, _own(optimizer))
    lr_scheduler.load_state_dict(extra["lr_scheduler"])


def _own(optimizer: Any) -> Any:
    """The torch optimizer in accelerate's."""
    return getattr(optimizer, "optimizer", optimizer)


def _load_what_there_is(model: Any, state_dict: Mapping[str, Any], *arguments: Any, **options: Any) -> Any:
    """A model's `load_state_dict`, but of the file `SHARDED`, which holds nothing and misses nothing."""
    if not state_dict:
        return torch.nn.modules.module._IncompatibleKeys([], [])
    return type(model).load_state_dict(model, state_dict, *arguments, **options)


def _save_random_numbers(args: Any, model: Any, folder: Path) -> None:
    """Write the state of this rank's generators where Trainer looks for them. Raises on all ranks what one
    says."""

    def write() -> None:
        states = {"python": random.getstate(), "numpy": np.random.get_state(), "cpu": torch.get_rng_state()}
        if torch.cuda.is_available():
            of_one = _averages_dense(args)
            states["cuda"] = torch.cuda.get_rng_state() if of_one else torch.cuda.get_rng_state_all()
        rank = "" if args.world_size <= 1 else f"_{args.process_index}"
        torch.save(states, folder / f"rng_state{rank}.pth")

    Team([layer for _, layer in replaced_blocks(model)], "writing of random numbers").attempt(write)


def _load_experts(model: Any, folder: Path) -> None:
    """Read the blocks of a checkpoint, each rank its own experts. Raises on all ranks what one says."""
    blocks = replaced_blocks(model)

    def read() -> None:
        weights = SafetensorsFolder(folder)
        for name, layer in blocks:
            load_block(layer, weights, block_prefix(weights, int(name.split(".")[-2])))

    team = Team([layer for _, layer in blocks], "reading of a checkpoint")
    team.meet()
    team.attempt(read)


def _later(*_: Any, **__: Any) -> None:
    """Trainer's own call, which `on_save` makes up for on every rank."""
