"""A model whose experts live on several ranks: saved whole, restored whole, one rank's error everyone's."""

import os
import re
import shutil
import warnings
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from transformers import AutoModelForCausalLM

import imbrex
from imbrex.adapters.huggingface import (
    PartialStateWarning,
    from_pretrained,
    loading,
    replace_blocks,
    restore_blocks,
)
from imbrex.adapters.huggingface.gathering import Team
from imbrex.parallel import checkpoint
from imbrex.placement import from_slots
from imbrex.runtime import problems
from tests.ranks.pool import PRELOADED, Pool, RankError, Ranks
from tests.tiny_models import FAMILIES, model_of
from tests.unit.test_huggingface_saving import same

# Loaded once, before the ranks are forked, not by each of them.
PRELOADED.append("tests.tiny_models")


def save_and_restore(ranks: Ranks, family: str, folder: str, tensor: int, slots, dtype: torch.dtype):
    model = model_of(family, dtype)
    before = {name: t.clone() for name, t in model.state_dict().items()}
    experts = FAMILIES[family][1].num_local_experts if family == "mixtral" else 0
    placement = None if slots is None else from_slots(slots, experts)
    layers = replace_blocks(model, ranks.group, tensor_parallel=tensor, placement=placement)
    model.save_pretrained(folder, max_shard_size="10KB")
    # What is held here alone, to be written to a file by `save_pretrained` only.
    held = sum(p.numel() for p in layers[0].experts.parameters())
    restore_blocks(model)
    read = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
    return same(before, model.state_dict()), same(before, read.state_dict()), held


REPLICAS = [[0, 3, 1, -1], [4, 2, 0, 5]]


@pytest.mark.parametrize(
    ("family", "world", "tensor", "slots", "dtype"),
    [
        *((family, 2, 1, None, torch.float32) for family in FAMILIES),
        ("qwen2_moe", 4, 2, None, torch.bfloat16),
        ("mixtral", 4, 4, None, torch.float16),
        ("mixtral", 2, 1, REPLICAS, torch.float32),
        ("mixtral", 4, 2, REPLICAS, torch.float32),
    ],
)
def test_all_experts_are_saved_and_restored(pool, tmp_path, family, world, tensor, slots, dtype):
    answers = pool.run(world, save_and_restore, family, str(tmp_path), tensor, slots, dtype)
    assert [(restored, read) for restored, read, _ in answers] == [(True, True)] * world
    assert len(list(tmp_path.glob("model-*-of-*.safetensors"))) > 2


def save_with_one_wrong(ranks: Ranks, folder: str, wrong: int, option: str):
    model = model_of("mixtral")
    replace_blocks(model, ranks.group)
    told = []
    for options in ({option: True} if ranks.rank == wrong else {}, {}):
        try:
            model.save_pretrained(folder, **options)
            told.append("saved")
        except ValueError as error:
            told.append(str(error))
    return told


def test_an_error_on_one_rank_is_every_ranks(pool, tmp_path):
    first, second = pool.run(2, save_with_one_wrong, str(tmp_path), 1, "push_to_hub")
    assert "push_to_hub cannot be had with replaced blocks" in second[0]
    assert first[0].startswith("save_pretrained: on rank 1: save_pretrained: push_to_hub")
    assert first[1] == second[1] == "saved"


def save_where_nothing_can_be(ranks: Ranks, file: str):
    model = model_of("mixtral")
    replace_blocks(model, ranks.group)
    with pytest.raises(OSError, match=r"(?i)not a directory") as caught:
        model.save_pretrained(Path(file) / "model")
    return str(caught.value)


def test_a_disk_that_fails_is_every_ranks_error(pool, tmp_path):
    (tmp_path / "file").write_text("")
    told = pool.run(2, save_where_nothing_can_be, str(tmp_path / "file"))
    assert told[1].startswith("save_pretrained: on rank 0: ")


def load_whole(ranks: Ranks) -> str:
    """What `load_state_dict` says of the weights of a plain model."""
    model = model_of("mixtral")
    whole = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    replace_blocks(model, ranks.group)
    with pytest.raises(RuntimeError, match="weights of all 6 experts") as caught:
        model.load_state_dict(whole)
    model.load_state_dict(model.state_dict())
    return str(caught.value)


def test_weights_of_all_experts_are_read_by_another_door(pool: Pool) -> None:
    for said in pool.run(2, load_whole):
        assert said.count("of which this rank holds 3: replace_blocks(model, group, weights=...)") == 1


def replace_with_one_wrong(ranks: Ranks, wrong: str, folder: str) -> str:
    """The last rank has another model or folder than it should; then all go on together."""
    model, weights, last = model_of("mixtral"), None, ranks.rank == ranks.world_size - 1
    if last and wrong == "meta":
        model.to("meta")
    elif wrong == "weights":
        weights = dict(model.state_dict())
        if last:
            del weights["model.layers.1.mlp.experts.down_proj"]
    elif wrong == "model" and last:
        model = torch.nn.Linear(2, 2)
    router = "transformers" if wrong == "router" and last else "imbrex"
    call: Any = partial(replace_blocks, model, ranks.group, weights=weights, router=router)
    if wrong in ("folder", "file"):
        odd = folder if wrong == "folder" else f"{folder}/cut"
        call = partial(from_pretrained, odd if last else f"{folder}/whole", ranks.group)
    said = r"holds no|replace_blocks|load_block|moe_config|header"
    with pytest.raises(Exception, match=said) as caught:
        call()
    assert len(replace_blocks(model_of("mixtral"), ranks.group)) == 2
    return str(caught.value)


@pytest.mark.parametrize(
    ("wrong", "why"),
    [
        ("meta", "replace_blocks: the blocks have no values; give weights= and device="),
        ("weights", "load_block: no model.layers.1.mlp.experts.down_proj among the weights"),
        ("model", "moe_config: the configuration has no model_type"),
        ("folder", ".* holds no \\*.safetensors"),
        ("file", ".*model.safetensors is no whole safetensors file .Error while deserializing header"),
        ("router", ""),
    ],
)
def test_what_one_rank_cannot_replace_is_every_ranks_error(
    pool: Pool, tmp_path: Path, wrong: str, why: str
) -> None:
    model_of("mixtral").save_pretrained(tmp_path / "whole")
    if wrong == "file":
        shutil.copytree(tmp_path / "whole", tmp_path / "cut")
        (tmp_path / "cut" / "model.safetensors").write_bytes(b"x" * 7)
    first, second = pool.run(2, replace_with_one_wrong, wrong, str(tmp_path))
    if wrong == "router":
        assert first == second
        assert "ranks disagree about router: {0: 'imbrex', 1: 'transformers'}; give" in first
        return
    assert re.match(why, second)
    assert re.match(f"(replace_blocks|from_pretrained): on rank 1: {why}", first)


def gather_with_one_failing(ranks: Ranks, folder: str, failing: int, where: str) -> list[str]:
    """One rank fails as it saves and as it restores, and lives on; then all save together."""
    model = model_of("mixtral")
    replace_blocks(model, ranks.group)
    # What nobody tells the others is a loss, here not after half an hour.
    usual, problems.SLOW_S, told = problems.SLOW_S, 1.0, []
    for call in (lambda: model.save_pretrained(folder), lambda: restore_blocks(model)):
        broken = mock.patch(f"imbrex.adapters.huggingface.{where}", side_effect=MemoryError("no room"))
        fails = broken if ranks.rank == failing else nullcontext()
        with fails, pytest.raises(Exception, match="no room") as caught:
            call()
        told.append(f"{caught.type.__name__}: {caught.value}")
    problems.SLOW_S = usual
    model.save_pretrained(folder)
    return told


@pytest.mark.parametrize(
    ("where", "failing"),
    [("gathering._place", 0), ("gathering._make_room", 2), ("replaced.ReplacedBlock.dense_state", 1)],
)
def test_a_rank_that_fails_while_experts_are_gathered_tells_the_others(
    pool: Pool, tmp_path: Path, where: str, failing: int
) -> None:
    answers = pool.run(4, gather_with_one_failing, str(tmp_path), failing, where)
    assert answers.pop(failing) == ["MemoryError: no room"] * 2
    for said in answers:
        quoted = f"on rank {failing}: MemoryError: no room"
        assert said == [f"RuntimeError: {door}: {quoted}" for door in ("save_pretrained", "restore_blocks")]


def read_interrupted(ranks: Ranks, folder: str) -> str:
    """Rank 1 is interrupted as it reads; then all go on together."""
    broken = mock.patch.object(loading, "_load_dense", side_effect=KeyboardInterrupt("now"))
    with broken if ranks.rank == 1 else nullcontext(), pytest.raises(BaseException, match="now") as caught:
        from_pretrained(folder, ranks.group)
    assert len(replace_blocks(model_of("mixtral"), ranks.group)) == 2
    return f"{caught.type.__name__}: {caught.value}"


def test_a_rank_that_is_interrupted_tells_the_others(pool: Pool, tmp_path: Path) -> None:
    model_of("mixtral").save_pretrained(tmp_path)
    first, second = pool.run(2, read_interrupted, str(tmp_path))
    assert second == "KeyboardInterrupt: now"
    assert first == "RuntimeError: from_pretrained: on rank 1: KeyboardInterrupt: now"


def hear_alone(ranks: Ranks, call: str) -> None:
    layers = replace_blocks(model_of("mixtral"), ranks.group)
    team = Team(layers, "a test")
    os.environ["IMBREX_TIMEOUT_S"] = "0.5"
    if call == "dead" and ranks.rank == 1:
        os._exit(0)
    if ranks.rank == 0:
        (team.agree if call == "dead" else partial(team.hear, 1))()


@pytest.mark.parametrize(
    ("call", "why"), [("dead", "a rank died or left"), ("silent", r"a rank was silent for 0\.5 s")]
)
def test_a_rank_that_does_not_tell_is_lost(call: str, why: str) -> None:
    """Not for the half hour of torch's own way to gather objects."""
    pool = Pool(2)
    try:
        with pytest.raises(RankError, match=f"rank 0 lost its peers in a test: {why}"):
            pool.run(2, hear_alone, call)
    finally:
        pool.close()


def save_alone(ranks: Ranks, folder: str):
    model = model_of("mixtral")
    replace_blocks(model, ranks.group)
    os.environ["IMBREX_TIMEOUT_S"] = "1"
    if ranks.rank == 0:
        model.save_pretrained(folder)


def test_one_rank_that_saves_alone_is_told(tmp_path):
    pool, said = Pool(2), r"save_pretrained is collective: call it on every rank \(Trainer saves on one"
    try:
        with pytest.raises(RankError, match=said):
            pool.run(2, save_alone, str(tmp_path))
    finally:
        pool.close()
    assert not list(tmp_path.iterdir())


def states(ranks: Ranks, folder: str):
    model = model_of("mixtral")
    replace_blocks(model, ranks.group)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        checkpoint.save(folder, model, None, 1, group=ranks.group)
        checkpoint.load_latest(folder, model, group=ranks.group)
        model.save_pretrained(folder)
        quiet = [str(w.message) for w in caught if w.category is PartialStateWarning]
        model.state_dict()
        loud = [str(w.message) for w in caught if w.category is PartialStateWarning]
    return quiet, loud


def test_a_state_dict_says_that_it_holds_one_ranks_experts(pool, tmp_path):
    for quiet, loud in pool.run(2, states, str(tmp_path)):
        assert quiet == []
        assert loud[0].startswith(
            "state_dict: of 6 experts it holds those of this rank only; to save the model"
        )
    assert pool.run(1, states, str(tmp_path / "alone")) == [([], [])]


def generate(ranks: Ranks, ends: list[int]):
    """Every rank its own prompts and its own end; the tokens of the plain model and of the replaced one, also
    of as many steps as a rank wants, where a cache of fixed length must have room for those of others."""
    model = model_of("qwen3_moe")
    torch.manual_seed(ranks.rank)
    ids = torch.randint(32, (1, 3 + ranks.rank))
    options = {"do_sample": False, "eos_token_id": ends[ranks.rank], "pad_token_id": 0, "max_new_tokens": 8}
    want = model.generate(ids, **options)
    replace_blocks(model, ranks.group)
    fixed = {"cache_implementation": "static", "disable_compile": True, "max_new_tokens": 1 + ranks.rank % 4}
    short = torch.equal(model.generate(ids, **options | fixed), want[:, : ids.shape[1] + 1 + ranks.rank % 4])
    return want.shape[1] - ids.shape[1], torch.equal(model.generate(ids, **options), want) and short


def test_ranks_that_end_at_other_tokens_generate_what_they_would_alone(pool):
    answers = pool.run(8, generate, [first_token(rank) for rank in range(4)] + [31] * 4)
    assert [same for _, same in answers] == [True] * 8
    lengths = [length for length, _ in answers]
    assert lengths[:4] == [1] * 4
    assert max(lengths) == 8


def first_token(rank: int) -> int:
    model = model_of("qwen3_moe")
    torch.manual_seed(rank)
    ids = torch.randint(32, (1, 3 + rank))
    return int(model(ids).logits[0, -1].argmax())


def test_experts_are_kept_out_of_data_parallelism(pool):
    assert pool.run(2, ignored) == [["down_proj", "gate_up_proj"]] * 2


def ignored(ranks: Ranks):
    model = model_of("mixtral")
    replace_blocks(model, ranks.group)
    names = model._ddp_params_and_buffers_to_ignore
    assert {model.get_parameter(n) for n in names} == set(imbrex.expert_parameters(model))
    return sorted({name.rpartition(".")[2] for name in names})
