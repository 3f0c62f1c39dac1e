"""A callback for transformers' `Trainer` with replaced blocks. `Trainer` does some things on one rank only,
or not at all, in which every rank must take part.

    Trainer(model=model, args=args, callbacks=[ReplacedBlocks()], ...)
"""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Sized
from pathlib import Path
from typing import Any

from transformers import TrainerCallback, TrainerState

import imbrex
from imbrex.adapters.huggingface.gathering import Team
from imbrex.adapters.huggingface.replaced import replaced_blocks
from imbrex.adapters.huggingface.weights import SafetensorsFolder, block_prefix, load_block
from imbrex.parallel.backward import sync_in_backward


class ReplacedBlocks(TrainerCallback):
    """Makes gradients those of all ranks' mean loss, clips them by the norm over all ranks' experts, and has
    every rank take part in saving checkpoints. Sums run beside the backward; behind it where a step has
    several micro-batches, or gradients are checkpointed by torch's reentrant way.

    Where Trainer goes on from a checkpoint, or takes the best one at its end, it leaves out experts, whose
    names differ in files: every rank then reads its own. The norm that it logs is that of all ranks.

    Wants `save_only_model=True`: Trainer writes the optimizer's state of one rank;
    `imbrex.parallel.checkpoint` writes all of it."""

    def __init__(self) -> None:
        self.max_grad_norm, self.norm = 0.0, math.nan
        self.own_save: Any = None
        self.sync: Any = None

    def on_init_end(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        """Have FSDP2, which shards the model as a training begins, leave the experts where they are."""
        plugin = _fsdp_plugin()
        if plugin is None:
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
        plugin.ignored_modules = [layer.experts.to(args.device) for _, layer in replaced_blocks(model)]

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **others: Any) -> None:
        blocks = replaced_blocks(model)
        if not blocks:
            raise ValueError("ReplacedBlocks: no replaced blocks in the model; call replace_blocks first")
        if str(getattr(args.save_strategy, "value", args.save_strategy)) != "no" and not args.save_only_model:
            raise ValueError(
                "ReplacedBlocks: Trainer would write the optimizer's state of one rank's experts only; give "
                "save_only_model=True or save_strategy='no', and to resume use imbrex.parallel.checkpoint"
            )
        _refuse_uneven([layer for _, layer in blocks], args, state.max_steps, others.get("train_dataloader"))
        if state.global_step > 0:
            _load_experts(model, _resumed(args, state))
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

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.own_save(os.path.join(args.output_dir, f"checkpoint-{state.global_step}"))

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


def _load_experts(model: Any, folder: Path) -> None:
    """Read the blocks of a checkpoint, each rank its own experts. Raises on all ranks what one says."""
    blocks, problem = replaced_blocks(model), None
    try:
        weights = SafetensorsFolder(folder)
        for name, layer in blocks:
            load_block(layer, weights, block_prefix(weights, int(name.split(".")[-2])))
    except (OSError, ValueError) as error:
        problem = error
    team = Team([layer for _, layer in blocks], "reading of a checkpoint")
    team.meet()
    team.agree(problem)


def _later(*_: Any, **__: Any) -> None:
    """Trainer's own call, which `on_save` makes up for on every rank."""
