"""`Trainer` over ranks that hold other experts: the steps and the checkpoints of a plain model on one."""

import importlib
import importlib.util
import os
import shutil
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, Trainer, TrainerState, TrainingArguments

import imbrex
from imbrex.adapters.huggingface import replace_blocks, save_pretrained
from imbrex.adapters.huggingface.blocks import moe_blocks
from imbrex.adapters.huggingface.replaced import replaced_blocks
from imbrex.adapters.huggingface.training import ReplacedBlocks, _save_random_numbers
from tests.ranks.pool import PRELOADED, Pool, Ranks
from tests.tiny_models import model_of
from tests.unit.test_huggingface_saving import same

# Loaded once, before the ranks are forked, not by each of them.
PRELOADED.append("tests.tiny_models")


def stepped_by_hand(ids: torch.Tensor, steps: int) -> tuple[Any, list[float]]:
    """A model on one rank, and the norms of its steps' gradients."""
    model, norms = model_of("qwen3_moe").train(), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for _ in range(steps):
        model(ids, labels=ids).loss.backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)))
        optimizer.step()
        optimizer.zero_grad()
    return model, norms


def calls(ranks: Ranks, folder: str):
    """What Trainer calls, in its order, for one step and one checkpoint; it saves on the first rank only."""
    model, ids = model_of("qwen3_moe").train(), torch.arange(12).view(2, 6)
    replace_blocks(model, ranks.group)
    args = SimpleNamespace(
        output_dir=folder,
        max_grad_norm=0.1,
        save_strategy="steps",
        save_only_model=True,
        parallel_mode="none",
        gradient_accumulation_steps=1,
        gradient_checkpointing=False,
        gradient_checkpointing_kwargs=None,
        load_best_model_at_end=False,
        world_size=2,
        process_index=ranks.rank,
    )
    state, control = TrainerState(log_history=[{"grad_norm": 7.0}]), None
    callback, saved = ReplacedBlocks(save_optimizer=True), stepper(model)
    callback.on_train_begin(args, state, control, model=model)
    assert args.max_grad_norm == 0
    model(ids, labels=ids).loss.backward()
    callback.on_pre_optimizer_step(args, state, control, model=model)
    for step in saved.values():
        step.step()
    state.global_step, logs = 1, {"grad_norm": 7.0}
    callback.on_log(args, state, control, logs=logs)
    assert [logs] == state.log_history == [{"grad_norm": pytest.approx(stepped_by_hand(ids, 1)[1][0])}]
    if ranks.rank == 0:
        model.save_pretrained(f"{folder}/checkpoint-1")
    callback.on_save(args, state, control, model=model, **saved)
    callback.on_train_end(args, state, control, model=model)
    assert (args.max_grad_norm, vars(model)["save_pretrained"].__func__) == (0.1, save_pretrained)
    args.save_only_model = False
    with pytest.raises(ValueError, match="save_only_model=True or save_strategy='no'"):
        callback.on_train_begin(args, state, control, model=model)
    if ranks.rank == 0:
        state.save_to_json(f"{folder}/checkpoint-1/trainer_state.json")
    ranks.group.barrier().wait()
    read_again(ranks, folder, args, state)
    return far_from_hand(f"{folder}/checkpoint-1", ids, 1)


def stepper(model: Any) -> dict[str, Any]:
    """An optimizer whose rate halves with every step."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    return {"optimizer": optimizer, "lr_scheduler": torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)}


def read_again(ranks: Ranks, folder: str, args: Any, state: TrainerState) -> None:
    """Where Trainer goes on, or takes the best, which leaves experts out, they are those of the files."""
    args.save_only_model, best = True, f"{folder}/checkpoint-1"
    whole: Any = moe_blocks(AutoModelForCausalLM.from_pretrained(best))[0][1].experts.gate_up_proj  # pyright: ignore
    for gone_on in (True, False):
        model, callback = model_of("qwen3_moe"), ReplacedBlocks()
        layer: Any = replace_blocks(model, ranks.group)[0]
        own = whole[[expert for expert in layer.experts.expert_ids if expert >= 0]]
        assert not torch.equal(layer.experts.gate_up_proj, own)
        args.load_best_model_at_end = not gone_on
        kept = stepper(model)
        callback.on_train_begin(args, state if gone_on else TrainerState(), None, model=model, **kept)
        if gone_on:
            assert kept["lr_scheduler"].get_last_lr() == [0.25]
            momentum = kept["optimizer"].state[layer.experts.gate_up_proj]["momentum_buffer"]
            assert 0 < float(momentum.abs().max()) < 1
        if not gone_on:
            callback.on_train_end(args, TrainerState(best_model_checkpoint=best), None, model=model)
        assert torch.equal(layer.experts.gate_up_proj, own)
    with pytest.raises(ValueError, match="went on from another checkpoint than"):
        ReplacedBlocks().on_train_begin(args, TrainerState(global_step=1), None, model=model)
    refuse_uneven(ranks, args, model)
    refuse_missing(ranks, args, model, Path(folder))


def refuse_missing(ranks: Ranks, args: Any, model: Any, folder: Path) -> None:
    """What one rank cannot write is raised on all."""
    with pytest.raises(RuntimeError, match=r"Parent directory .*missing does not exist"):
        _save_random_numbers(args, model, folder / ("missing" if ranks.rank == 1 else ""))


def refuse_uneven(ranks: Ranks, args: Any, model: Any) -> None:
    """A rank whose loader ends earlier is named on all, before the first step."""
    said = "would make 6 steps with 12 batches on rank 0 and 5 steps with 10 batches on rank 1"
    batches, state = [0] * (12 - 2 * ranks.rank), TrainerState(max_steps=6 - ranks.rank)
    with pytest.raises(ValueError, match=said):
        ReplacedBlocks().on_train_begin(args, state, None, model=model, train_dataloader=batches)
    args.gradient_accumulation_steps = 2
    with pytest.raises(ValueError, match="0 steps with 12 batches on rank 0 and 0 steps with 10 batches on"):
        ReplacedBlocks().on_train_begin(args, TrainerState(), None, model=model, train_dataloader=batches)
    args.gradient_accumulation_steps = 1


def far_from_hand(folder: str, ids: torch.Tensor, steps: int) -> float:
    read = AutoModelForCausalLM.from_pretrained(folder).state_dict()
    want = stepped_by_hand(ids, steps)[0].state_dict()
    assert not same(want, model_of("qwen3_moe").state_dict())
    return max(float((read[name] - want[name]).abs().max()) for name in want)


def test_what_trainer_calls_makes_the_step_of_a_plain_model(pair, tmp_path):
    assert max(pair.run(2, calls, str(tmp_path))) < 1e-5


class Watched(ReplacedBlocks):
    """Notes before every step by how much its backward has divided the experts' gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.divided: list[int] = []

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        self.divided += [max(layer.mean_over for _, layer in replaced_blocks(model))]
        super().on_pre_optimizer_step(args, state, control, model=model)


def shard_on_cpus() -> None:
    """Accelerate shards on GPUs alone: have it take these CPUs for some."""
    state_class: Any = importlib.import_module("accelerate.state").AcceleratorState
    kinds: Any = importlib.import_module("accelerate.utils").DistributedType
    begin = state_class.__init__

    def sharding(state: Any, *arguments: Any, **options: Any) -> None:
        begin(state, *arguments, **options)
        plugin = options.get("fsdp_plugin") or vars(state).get("fsdp_plugin")
        if plugin is not None:
            state.distributed_type, state.fsdp_plugin = kinds.FSDP, plugin

    state_class.__init__ = sharding


SHARDED = {
    "fsdp": True,
    "fsdp_config": {
        "transformer_layer_cls_to_wrap": ["Qwen3MoeDecoderLayer"],
        "state_dict_type": "FULL_STATE_DICT",
    },
}


def arguments(folder: str, micro: int, sharded: bool) -> TrainingArguments:
    return TrainingArguments(
        folder,
        use_cpu=True,
        max_steps=2,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=micro,
        optim="sgd",
        learning_rate=0.5,
        lr_scheduler_type="constant",
        max_grad_norm=0.1,
        save_steps=1,
        logging_steps=1,
        save_only_model=True,
        report_to=[],
        disable_tqdm=True,
        **(SHARDED if sharded else {}),
    )


def launched(ranks: Ranks, sharded: bool) -> None:
    """What a launcher tells a rank, and nothing of a training before."""
    for name in [name for name in os.environ if name.startswith(("ACCELERATE_", "FSDP_"))]:
        del os.environ[name]
    if sharded:
        shard_on_cpus()
    os.environ |= {"RANK": str(ranks.rank), "WORLD_SIZE": "2", "LOCAL_RANK": str(ranks.rank)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29511", "LOCAL_WORLD_SIZE": "2"}


def train(ranks: Ranks, folder: str, micro: int, sharded: bool):
    launched(ranks, sharded)
    model, ids = model_of("qwen3_moe"), torch.arange(6)
    replace_blocks(model, ranks.group)
    args = arguments(folder, micro, sharded)
    rows = [{"input_ids": ids, "labels": ids}] * 16
    watched = Watched()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        Trainer(model, args, train_dataset=rows, callbacks=[watched]).train()  # pyright: ignore
    assert watched.sync is None
    assert {hasattr(p, "full_tensor") for p in imbrex.expert_parameters(model)} == {False}
    assert hasattr(model.lm_head.weight, "full_tensor") == sharded
    assert not [str(one.message) for one in caught if "clip_grad_norm_" in str(one.message)]
    if sharded:  # Trainer goes on from nothing then that has no optimizer's state
        return far_from_hand(f"{folder}/checkpoint-2", ids[None], 2), watched.divided
    # Another model goes on from there.
    model, args.max_steps = model_of("qwen3_moe"), 3
    replace_blocks(model, ranks.group)
    trainer = Trainer(model, args, train_dataset=rows, callbacks=[watched])  # pyright: ignore
    trainer.train(resume_from_checkpoint=f"{folder}/checkpoint-2")
    norms = [row["grad_norm"] for row in trainer.state.log_history if "grad_norm" in row]
    assert norms == pytest.approx(stepped_by_hand(ids[None], 3)[1], rel=1e-4)
    return far_from_hand(f"{folder}/checkpoint-3", ids[None], 3), watched.divided


@pytest.fixture(scope="module")
def pair() -> Iterator[Pool]:
    """A world of two: Trainer takes all ranks there are."""
    pool = Pool(2)
    yield pool
    pool.close(20)


@pytest.mark.skipif(importlib.util.find_spec("accelerate") is None, reason="Trainer wants accelerate")
@pytest.mark.parametrize(("micro", "sharded"), [(1, False), (2, False), (1, True)])
def test_trainer_makes_the_steps_of_a_plain_model(pair, tmp_path, micro, sharded):
    """With DDP, and where FSDP2 shards all but the experts."""
    for far, divided in pair.run(2, train, str(tmp_path), micro, sharded):
        assert far < 1e-5
        assert divided == [2 if micro == 1 else 1] * (2 if sharded else 3)


def go_on(ranks: Ranks, folder: str, sharded: bool) -> tuple[dict[str, torch.Tensor], ...]:
    """The weights that three steps of AdamW make, and those of one step behind a checkpoint of two, in the
    same way and in the other."""
    rows = [{"input_ids": ids, "labels": ids} for ids in torch.arange(96).remainder(31).view(16, 6)]
    ended: list[dict[str, torch.Tensor]] = []
    for begin, way in (
        (None, sharded),
        (f"{folder}/checkpoint-2", sharded),
        (f"{folder}/checkpoint-2", not sharded),
    ):
        launched(ranks, way)
        args = arguments(folder, 1, way)
        args.max_steps, args.optim, args.lr_scheduler_type, args.learning_rate = (
            3,
            "adamw_torch",
            "linear",
            1e-2,
        )
        model = model_of("qwen3_moe")
        replace_blocks(model, ranks.group)
        for block in model.model.layers:
            block.self_attn.attention_dropout = 0.3
        callback = ReplacedBlocks(save_optimizer=True)
        trainer = Trainer(model, args, train_dataset=rows, callbacks=[callback])  # pyright: ignore
        trainer.train(resume_from_checkpoint=begin)
        ended.append(AutoModelForCausalLM.from_pretrained(f"{folder}/checkpoint-3").state_dict())
        ranks.group.barrier().wait()
        if ranks.rank == 0:
            shutil.rmtree(f"{folder}/checkpoint-3")
    return tuple(ended)


@pytest.mark.skipif(importlib.util.find_spec("accelerate") is None, reason="Trainer wants accelerate")
@pytest.mark.parametrize("sharded", [False, True])
def test_trainer_goes_on_with_its_optimizer(pair: Pool, tmp_path: Any, sharded: bool) -> None:
    """To the bit: weights, AdamW's moments, the learning rate, the random numbers of dropout, the data."""
    for whole, again, other in pair.run(2, go_on, str(tmp_path), sharded):
        assert same(whole, again)
        assert same(whole, other)


class Step:
    """What an optimizer is to the callback."""

    def __init__(self) -> None:
        self.param_groups: list[dict[str, Any]] = [{"params": [], "fused": True}]


@pytest.mark.parametrize(
    ("version", "ram", "best", "said"),
    [
        (1, False, False, "of Trainer's ways to shard, FSDP2 leaves a rank its own experts"),
        (2, True, False, "without cpu_ram_efficient_loading"),
        (2, False, True, "load_best_model_at_end=True: with FSDP2 Trainer reads a file"),
        (2, False, None, "Trainer goes on from no such shards"),
        (2, False, False, ""),
    ],
)
def test_of_the_ways_to_shard_one_leaves_experts_alone(
    version: int, ram: bool, best: bool | None, said: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    model, optimizer = model_of("qwen3_moe"), Step()
    (first, second), state = replace_blocks(model, None), TrainerState()
    plugin = SimpleNamespace(fsdp_version=version, cpu_ram_efficient_loading=ram, ignored_modules=None)
    states = SimpleNamespace(AcceleratorState=SimpleNamespace(_shared_state={"fsdp_plugin": plugin}))
    monkeypatch.setitem(sys.modules, "accelerate.state", states)  # type: ignore[arg-type]
    args = SimpleNamespace(device="cpu", load_best_model_at_end=best, save_strategy="no", max_grad_norm=1.0)
    args.output_dir, args.process_index = str(tmp_path), 1
    for folder in ("checkpoint-1/imbrex", "checkpoint-2"):
        (tmp_path / folder).mkdir(parents=True)
    args.gradient_accumulation_steps, args.parallel_mode, args.gradient_checkpointing = 2, "none", False
    args.gradient_checkpointing_kwargs, callback = None, ReplacedBlocks(save_optimizer=best is None)
    plugin.state_dict_type = "SHARDED_STATE_DICT"
    if said:
        with pytest.raises(ValueError, match=said):
            callback.on_init_end(args, state, None, model=model)
        return
    callback.on_init_end(args, state, None, model=model)
    assert plugin.ignored_modules == [first.experts, second.experts]
    # Trainer reads this with FSDP2, and refuses it with DDP; the other checkpoint is not ours to change.
    assert [path.name for path in tmp_path.glob("*/*.bin*")] == ["pytorch_model_fsdp.bin"]
    callback.on_train_begin(args, state, None, model=model, optimizer=optimizer)
    assert optimizer.param_groups[0]["fused"] is False
    states.AcceleratorState._shared_state.clear()
    callback.on_init_end(args, state, None, model=model)
    assert not [*tmp_path.glob("*/*.bin*")]
