"""A model with replaced blocks saves what transformers would, and gets its own blocks back."""

import copy
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, MixtralConfig

import imbrex
from imbrex.adapters.huggingface import replace_blocks, restore_blocks, save_pretrained
from tests.tiny_models import FAMILIES, model_of, small


def files_of(folder: Path) -> dict[str, torch.Tensor]:
    return {name: t for file in folder.glob("*.safetensors") for name, t in load_file(file).items()}


def same(one, other) -> bool:
    return one.keys() == other.keys() and all(
        torch.equal(one[name], other[name]) and one[name].dtype == other[name].dtype for name in one
    )


@pytest.mark.parametrize("family", FAMILIES)
def test_what_is_saved_is_what_transformers_saves(family, tmp_path):
    model = model_of(family)
    model.save_pretrained(tmp_path / "theirs")
    replace_blocks(model)
    model.save_pretrained(tmp_path / "ours", max_shard_size="20KB", is_main_process=False)
    theirs, ours = files_of(tmp_path / "theirs"), files_of(tmp_path / "ours")
    assert same(theirs, ours)
    index = json.loads((tmp_path / "ours" / "model.safetensors.index.json").read_text())
    assert index["weight_map"].keys() == ours.keys()
    assert len(set(index["weight_map"].values())) >= 2
    for settings in ("config.json", "generation_config.json"):
        assert (tmp_path / "theirs" / settings).read_text() == (tmp_path / "ours" / settings).read_text()
    assert not (tmp_path / "ours" / ".partial").exists()


@pytest.mark.parametrize("family", FAMILIES)
def test_restored_blocks_are_those_that_were_replaced(family):
    model = model_of(family)
    before, ids = {n: t.clone() for n, t in model.state_dict().items()}, torch.randint(32, (2, 5))
    logits = model(ids).logits
    kinds = [type(module) for module in model.modules()]
    replace_blocks(model)
    restore_blocks(model)
    assert same(before, model.state_dict())
    assert [type(module) for module in model.modules()] == kinds
    assert torch.equal(model(ids).logits, logits)
    assert not {"save_pretrained", "generate"} & vars(model).keys()
    with pytest.raises(ValueError, match="has no replaced blocks"):
        restore_blocks(model)


def test_what_was_trained_is_what_is_restored_and_saved(tmp_path):
    model = model_of("qwen2_moe")
    layers = replace_blocks(model)
    with torch.no_grad():
        for parameter in layers[1].parameters():
            parameter += 1
    want = layers[1].experts.down_proj.detach().clone()
    model.save_pretrained(tmp_path)
    read = AutoModelForCausalLM.from_pretrained(tmp_path)
    restore_blocks(model)
    assert same(dict(read.state_dict()), model.state_dict())
    assert torch.equal(model.get_submodule("model.layers.1.mlp.experts").down_proj, want)


def test_a_copy_and_what_it_was_copied_from_are_restored_one_by_one():
    """They move their rows through one exchange, which neither may take from the other."""
    model, ids = model_of("mixtral"), torch.arange(6)[None]
    want = model(ids).logits
    replace_blocks(model)
    first, second = copy.deepcopy(model), copy.deepcopy(model)
    for restored, other in ((first, model), (model, second)):
        restore_blocks(restored)
        assert torch.equal(restored(ids).logits, want)
        torch.testing.assert_close(other(ids).logits, want, rtol=1e-5, atol=1e-5)


def test_frozen_weights_stay_frozen_both_ways():
    model = model_of("mixtral")
    frozen = ["model.layers.0.mlp.gate.weight", "model.layers.1.mlp.experts.gate_up_proj"]
    for name in frozen:
        model.get_parameter(name).requires_grad_(False)
    for step in (replace_blocks, restore_blocks):
        step(model)
        assert [name for name, p in model.named_parameters() if not p.requires_grad] == frozen


def test_a_second_save_replaces_the_first_and_a_failed_one_leaves_it(tmp_path, monkeypatch):
    model = model_of("mixtral")
    replace_blocks(model)
    model.save_pretrained(tmp_path, max_shard_size=20_000)
    files = sorted(path.name for path in tmp_path.iterdir())
    assert "model-00001-of-00003.safetensors" in files
    with monkeypatch.context() as patch:
        patch.setattr("safetensors.torch.save_file", full_disk)
        with pytest.raises(OSError, match="no space"):
            model.save_pretrained(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == files
    model.save_pretrained(tmp_path)
    assert sorted(p.name for p in tmp_path.iterdir()) == [
        "config.json",
        "generation_config.json",
        "model.safetensors",
    ]


def full_disk(*_, **__):
    raise OSError("no space left on device")


def test_settings_and_tied_weights_are_saved_as_they_were(tmp_path):
    config = small(MixtralConfig, intermediate_size=12, output_router_logits=True, tie_word_embeddings=True)
    model = AutoModelForCausalLM.from_config(config)
    with pytest.warns(UserWarning, match="output_router_logits"):
        replace_blocks(model)
    model.save_pretrained(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["output_router_logits"] is True
    assert "lm_head.weight" not in files_of(tmp_path)
    restore_blocks(model)
    assert model.config.output_router_logits is True


def test_bad_input_says_what_and_how_to_mend(tmp_path):
    model = model_of("mixtral")
    with pytest.raises(ValueError, match="no replaced blocks; use the model's own"):
        save_pretrained(model, tmp_path)
    layers = replace_blocks(model)
    with pytest.raises(ValueError, match=r"state_dict, push_to_hub cannot be had .* leave it out"):
        model.save_pretrained(tmp_path, state_dict={"a": 1}, push_to_hub=True)
    for size in ("5 apples", 0):
        with pytest.raises(ValueError, match=r"max_shard_size=.*; give bytes, or such as '5GB'"):
            model.save_pretrained(tmp_path, max_shard_size=size)
    setattr(layers[1], "experts", torch.nn.Sequential(layers[1].experts))  # noqa: B010
    with pytest.raises(ValueError, match=r"experts are a Sequential, not imbrex's own: merge or remove"):
        model.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="restore_blocks: experts are a Sequential"):
        restore_blocks(model)
    assert isinstance(model.get_submodule("model.layers.0.mlp"), imbrex.MoELayer)
