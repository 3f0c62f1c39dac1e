"""Layers filled from transformers' blocks of small configurations: the same outputs and gradients."""

import json
import warnings
import weakref
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from transformers import (
    AutoModelForCausalLM,
    CompileConfig,
    DeepseekV3Config,
    MixtralConfig,
    PhimoeConfig,
    Qwen2MoeConfig,
)
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3MoE

import imbrex
from imbrex.adapters.huggingface import (
    SafetensorsFolder,
    block_prefix,
    from_pretrained,
    load_block,
    moe_config,
    replace_blocks,
    restore_blocks,
)
from imbrex.experts.experts import Experts
from tests.tiny_models import DEEPSEEK, FAMILIES, QWEN, model_of, small


def block_of(family):
    kind, config = FAMILIES[family]
    torch.manual_seed(0)
    block = kind(config).eval()
    for name, value in (*block.named_parameters(), *block.named_buffers()):
        torch.nn.init.normal_(value, std=0.05 if "router" in name else 0.3)
    return block, config


def one_by_one(state, names):
    """The same weights under the names that checkpoints carry."""
    found = {name: value for name, value in state.items() if not name.startswith("experts.")}
    for expert, (gate_up, down) in enumerate(
        zip(state["experts.gate_up_proj"], state["experts.down_proj"], strict=True)
    ):
        for name, value in zip(names, (*gate_up.chunk(2), down), strict=True):
            found[f"experts.{expert}.{name}.weight"] = value
    return found


def own_experts(layer: imbrex.MoELayer) -> Experts:
    experts: torch.nn.Module = layer.experts
    assert isinstance(experts, Experts)
    return experts


@pytest.mark.parametrize("family", FAMILIES)
def test_outputs_and_gradients_are_those_of_the_block(family):
    block, config = block_of(family)
    layer = imbrex.MoELayer(moe_config(config))
    load_block(layer, block)
    x_BSD = torch.randn(3, 7, 16)
    x, y = x_BSD.clone().requires_grad_(), x_BSD.clone().requires_grad_()
    want, got = block(x), layer(y)
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
    pull = torch.randn_like(want)
    (want * pull).sum().backward()
    (got * pull).sum().backward()
    torch.testing.assert_close(y.grad, x.grad, rtol=1e-5, atol=1e-5)
    theirs = {
        name.replace("router.", "gate.").replace("shared_experts.", "shared_expert."): parameter.grad
        for name, parameter in block.named_parameters()
    }
    ours = {name: parameter.grad for name, parameter in layer.named_parameters()}
    assert ours.keys() == theirs.keys()
    for name, grad in theirs.items():
        torch.testing.assert_close(ours[name], grad, rtol=1e-5, atol=2e-5, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize("names", [("w1", "w3", "w2"), ("gate_proj", "up_proj", "down_proj")])
def test_experts_one_by_one(names):
    block, config = block_of("qwen2_moe")
    fused, apart = (imbrex.MoELayer(moe_config(config)) for _ in range(2))
    load_block(fused, block)
    state = {f"model.layers.1.mlp.{k}": v for k, v in one_by_one(block.state_dict(), names).items()}
    load_block(apart, state, block_prefix(state, 1))
    assert all(torch.equal(a, b) for a, b in zip(fused.parameters(), apart.parameters(), strict=True))


@pytest.mark.parametrize("family", FAMILIES)
def test_a_saved_checkpoint(family, tmp_path):
    """As transformers writes it, whatever the names, read back lazily with its config.json."""
    _, config = FAMILIES[family]
    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_config(config).eval()
    model.save_pretrained(tmp_path)
    weights = SafetensorsFolder(tmp_path)
    assert any("experts.0." in name for name in weights), "transformers no longer writes experts one by one"
    layer = imbrex.MoELayer(moe_config(json.loads((tmp_path / "config.json").read_text())))
    load_block(layer, weights, block_prefix(weights, 1))
    x_BSD = torch.randn(2, 5, 16)
    torch.testing.assert_close(
        layer(x_BSD), model.get_submodule("model.layers.1.mlp")(x_BSD), rtol=1e-5, atol=1e-5
    )


@pytest.mark.parametrize("family", FAMILIES)
def test_a_model_from_a_folder_is_the_one_that_was_saved(family, tmp_path):
    model = model_of(family)
    model.save_pretrained(tmp_path)
    got = from_pretrained(tmp_path)
    ids = torch.arange(10).view(2, 5)
    assert type(got) is type(model)
    assert float((got(ids).logits - model(ids).logits).detach().abs().max()) < 3e-7
    assert all(not value.is_meta for value in (*got.parameters(), *got.buffers()))
    got.save_pretrained(tmp_path / "again")
    assert SafetensorsFolder(tmp_path).keys() == SafetensorsFolder(tmp_path / "again").keys()


def test_a_folder_whose_experts_are_fused_is_read_expert_by_expert(tmp_path):
    block, config = block_of("qwen2_moe")
    save_file({f"mlp.{n}": v.contiguous() for n, v in block.state_dict().items()}, tmp_path / "a.safetensors")
    layer, want = (imbrex.MoELayer(moe_config(config)) for _ in range(2))
    load_block(want, block)
    weights = SafetensorsFolder(tmp_path)
    assert torch.equal(weights.part("mlp.experts.down_proj", 2), block.experts.down_proj[2])
    load_block(layer, weights, "mlp.")
    assert all(torch.equal(a, b) for a, b in zip(layer.parameters(), want.parameters(), strict=True))


def test_what_cannot_be_loaded_is_refused(tmp_path):
    with pytest.raises(ValueError, match="the blocks have no values; give weights= and device="):
        replace_blocks(model_of("mixtral").to("meta"))
    model_of("mixtral").save_pretrained(tmp_path)
    settings = json.loads((tmp_path / "config.json").read_text())
    settings["quantization_config"] = {"quant_method": "fp8"}
    (tmp_path / "config.json").write_text(json.dumps(settings))
    with pytest.raises(ValueError, match="is quantised, which transformers would undo for all experts"):
        from_pretrained(tmp_path)


def test_of_a_folder_the_checkpoint_s_own_files_are_read(tmp_path):
    """As transformers does: an older checkpoint's may lie beside them."""
    model_of("mixtral").save_pretrained(tmp_path, max_shard_size="10KB")
    index = tmp_path / "model.safetensors.index.json"
    weights = {name: SafetensorsFolder(tmp_path)[name] for name in SafetensorsFolder(tmp_path)}
    save_file({name: torch.zeros_like(value) for name, value in weights.items()}, tmp_path / "z.safetensors")
    assert all(torch.equal(SafetensorsFolder(tmp_path)[name], value) for name, value in weights.items())
    for text in ("{", "[]", "{}", '{"weight_map": []}'):
        index.write_text(text)
        with pytest.raises(ValueError, match=r"is no index of tensors .*; download it again"):
            SafetensorsFolder(tmp_path)
    save_file(weights, tmp_path / "model.safetensors", {"format": "pt"})
    assert all(torch.equal(SafetensorsFolder(tmp_path)[name], value) for name, value in weights.items())
    for missing in ("lm_head.weight", "model.layers.1.self_attn.q_proj.weight"):
        # transformers draws what is not there.
        part = {name: value for name, value in weights.items() if name != missing}
        save_file(part, tmp_path / "model.safetensors", {"format": "pt"})
        with pytest.raises(ValueError, match=f"lacks {missing}, which transformers would draw"):
            from_pretrained(tmp_path)
    (tmp_path / "model.safetensors").write_bytes((tmp_path / "model.safetensors").read_bytes()[:-1])
    with pytest.raises(ValueError, match=r"model\.safetensors is no whole safetensors file .*; download it"):
        SafetensorsFolder(tmp_path)


def test_only_what_lives_here_is_read():
    block, config = block_of("mixtral")
    read = []

    class Watched(dict):
        def __getitem__(self, name):
            read.append(name)
            return super().__getitem__(name)

    layer = imbrex.MoELayer(moe_config(config))
    experts = own_experts(layer)
    experts.expert_ids = (4, 1, -1, -1, -1, -1)
    before = experts.down_proj[2:].detach().clone()
    load_block(layer, Watched(one_by_one(block.state_dict(), ("w1", "w3", "w2"))))
    assert {name.split(".")[1] for name in read if name.startswith("experts.")} == {"1", "4"}
    assert torch.equal(experts.down_proj[0], block.experts.down_proj[4])
    assert torch.equal(experts.down_proj[1], block.experts.down_proj[1])
    assert torch.equal(experts.down_proj[2:], before)


def test_float8_weights_are_expanded(tmp_path):
    """As in DeepSeek-V3's checkpoint: a scale for every 128 x 128 block; here 2 x 1 scales of 160 x 16."""
    config = small(DeepseekV3Config, **(DEEPSEEK | {"moe_intermediate_size": 160}))
    torch.manual_seed(0)
    block = DeepseekV3MoE(config)
    for value in (*block.parameters(), *block.buffers()):
        torch.nn.init.normal_(value)
    state = one_by_one(block.state_dict(), ("gate_proj", "up_proj", "down_proj"))
    name = "experts.5.gate_proj.weight"
    scale = torch.tensor([[2.0], [0.5]])
    state[name] = state[name].to(torch.float8_e4m3fn)
    by_hand = state[name].float() * torch.cat([torch.full((128, 1), 2.0), torch.full((32, 1), 0.5)])
    state[f"{name}_scale_inv"] = scale
    save_file(
        {f"model.layers.3.mlp.{k}": v.contiguous() for k, v in state.items()}, tmp_path / "x.safetensors"
    )
    layer = imbrex.MoELayer(moe_config(config))
    load_block(layer, SafetensorsFolder(tmp_path), "model.layers.3.mlp.")
    assert torch.equal(own_experts(layer).gate_up_proj[5, :160], by_hand)
    want = block.state_dict()["experts.gate_up_proj"]
    assert torch.equal(own_experts(layer).gate_up_proj[4], want[4])


def test_jitter_of_the_input_is_left_out_with_a_warning():
    with pytest.warns(UserWarning, match=r"input_jitter_noise=0\.01"):
        moe_config(small(PhimoeConfig, input_jitter_noise=0.01))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        moe_config(small(PhimoeConfig, input_jitter_noise=0.0))


def test_bad_input_says_what_and_how_to_mend(tmp_path):
    block, config = block_of("qwen2_moe")
    layer = imbrex.MoELayer(moe_config(config))
    with pytest.raises(ValueError, match="model_type 'llama'; use one of deepseek_v2, deepseek_v3, mixtral"):
        moe_config({"model_type": "llama"})
    with pytest.raises(ValueError, match="hidden_act 'gelu'"):
        moe_config(small(Qwen2MoeConfig, hidden_act="gelu"))
    with pytest.raises(ValueError, match="has no num_local_experts"):
        moe_config({"model_type": "mixtral", "hidden_act": "silu", "hidden_size": 4, "intermediate_size": 4})
    with pytest.raises(ValueError, match=r"no mlp\.gate\.weight or mlp\.router\.weight"):
        load_block(layer, block, "mlp.")
    with pytest.raises(ValueError, match="layer 0 has no MoE block"):
        block_prefix({"model.layers.0.mlp.up_proj.weight": torch.zeros(1)}, 0)
    with pytest.raises(ValueError, match=r"holds no \*\.safetensors"):
        SafetensorsFolder(tmp_path)
    narrower = moe_config(small(Qwen2MoeConfig, **(QWEN | {"num_experts": 5})))
    with pytest.raises(ValueError, match=r"gate\.weight is \[6, 16\] among the weights and \[5, 16\]"):
        load_block(imbrex.MoELayer(narrower), block)
    wider = moe_config(
        small(Qwen2MoeConfig, **(QWEN | {"moe_intermediate_size": 24}), shared_expert_intermediate_size=10)
    )
    with pytest.raises(ValueError, match=r"gate_up_proj of expert 0 is \[24, 16\]"):
        load_block(imbrex.MoELayer(wider), block)
    plain = imbrex.MoEConfig(hidden_size=16, intermediate_size=12, num_experts=6, top_k=3)
    with pytest.raises(ValueError, match="the block has a shared expert, the layer none"):
        load_block(imbrex.MoELayer(plain), block)
    biased = imbrex.MoEConfig(hidden_size=16, intermediate_size=12, num_experts=6, top_k=3, bias=True)
    with pytest.raises(ValueError, match="without bias"):
        load_block(imbrex.MoELayer(biased), block)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_model_with_its_blocks_replaced_says_the_same(family):
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(FAMILIES[family][1]).eval()
    ids = torch.randint(32, (2, 9))
    want = model(ids).logits
    layers = replace_blocks(model, losses=imbrex.AuxLosses(load_balance=0.1))
    assert [layer.exchange.layer for layer in layers] == list(range(1 if "deepseek" in family else 2))
    assert [m for m in model.modules() if isinstance(m, imbrex.MoELayer)] == layers
    assert not any(layer.training for layer in layers)
    torch.testing.assert_close(model(ids).logits, want, rtol=1e-5, atol=1e-5)
    (model(ids, labels=ids).loss + imbrex.aux_loss(model)).backward()
    gradients = {name for name, p in model.named_parameters() if p.grad is not None}
    assert gradients == {name for name, p in model.named_parameters() if p.requires_grad}


def test_replacing_nothing_and_losing_router_logits_is_said():
    model = AutoModelForCausalLM.from_config(
        small(MixtralConfig, intermediate_size=12, output_router_logits=True)
    )
    with pytest.warns(UserWarning, match=r"output_router_logits is turned off; give losses=AuxLosses"):
        replace_blocks(model)
    model(torch.randint(32, (1, 3)))
    with pytest.raises(ValueError, match="a MixtralForCausalLM has no MoE blocks; give the whole model"):
        replace_blocks(model)


@pytest.mark.untraced
def test_generation_with_a_static_cache_compiles_the_model():
    """As it is on a GPU, where transformers compiles by itself. Of two layers: numbers in which they differ
    become symbols of the compiler."""
    model = model_of("mixtral")
    ids = torch.randint(32, (1, 4))
    options: dict[str, Any] = {"do_sample": False, "max_new_tokens": 2}
    want = model.generate(ids, **options)
    replace_blocks(model)
    compiled = CompileConfig(backend="eager")
    setattr(compiled, "_compile_all_devices", True)  # noqa: B010
    options |= {"cache_implementation": "static", "compile_config": compiled}
    assert torch.equal(model.generate(ids, **options), want)


def test_no_expert_is_drawn_to_be_overwritten(monkeypatch):
    model = model_of("mixtral")
    monkeypatch.setattr(Experts, "_draw", lambda *_: pytest.fail("an expert is drawn"))
    for parameter in replace_blocks(model)[0].parameters():
        assert not parameter.isnan().any()


def test_a_block_is_let_go_of_before_the_next_is_replaced(monkeypatch):
    """So a model needs its own memory and a share of one block's while it is replaced, not all shares."""
    config = small(MixtralConfig, intermediate_size=12, num_local_experts=6, num_hidden_layers=4)
    model = AutoModelForCausalLM.from_config(config)
    experts = [weakref.ref(module) for path, module in model.named_modules() if path.endswith("mlp.experts")]
    alive = []

    def load(*what):
        alive.append(sum(ref() is not None for ref in experts))
        load_block(*what)

    monkeypatch.setattr("imbrex.adapters.huggingface.blocks.load_block", load)
    replace_blocks(model)
    assert alive == [4, 3, 2, 1]


def test_router_logits_are_refused_until_the_blocks_are_back():
    model, ids = model_of("mixtral"), torch.randint(32, (1, 4))
    replace_blocks(model)
    with pytest.raises(ValueError, match="output_router_logits=True after replace_blocks: nobody collects"):
        model(ids, output_router_logits=True)
    model.config.output_router_logits = True
    with pytest.raises(ValueError, match="leave it out, and give replace_blocks"):
        model(ids)
    restore_blocks(model)
    assert len(model(ids, labels=ids, output_router_logits=True).router_logits) == 2


@pytest.mark.parametrize("family", ["mixtral", "qwen2_moe", "qwen3_moe", "deepseek_v3"])
def test_the_router_s_arithmetic_can_be_theirs(family):
    """In bfloat16: the experts and weights of transformers' own gate, to the bit, and logits near its own."""
    _, config = FAMILIES[family]
    model = model_of(family, torch.bfloat16)
    ids = torch.randint(32, (8, 16), generator=torch.Generator().manual_seed(3))
    gates = [
        module.gate
        for module in model.modules()
        if isinstance(getattr(module, "experts", None), torch.nn.Module)
    ]
    x_TD = torch.randn(512, config.hidden_size).bfloat16()
    with torch.no_grad():
        truth, theirs = model(ids).logits, [gate(x_TD) for gate in gates]
        layers = replace_blocks(model, router="transformers")
        for layer, (_, weights_TK, ids_TK) in zip(layers, theirs, strict=True):
            ours = layer.gate(x_TD)
            order, other = ours.ids_TK.argsort(1), ids_TK.argsort(1)
            assert torch.equal(ours.ids_TK.gather(1, order), ids_TK.gather(1, other))
            assert torch.equal(ours.weights_TK.gather(1, order), weights_TK.float().gather(1, other))
        far = (model(ids).logits - truth).float().abs().mean() / truth.float().abs().mean()
    assert far < 0.01, far


def test_a_router_that_is_not_offered():
    with pytest.raises(ValueError, match="SparseMixer in bfloat16 is not offered; leave router= out"):
        replace_blocks(model_of("phimoe"), router="transformers")
    with pytest.raises(ValueError, match="router='theirs' is not known; use one of imbrex, transformers"):
        replace_blocks(model_of("mixtral"), router="theirs")
