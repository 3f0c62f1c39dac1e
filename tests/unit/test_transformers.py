"""transformers' own switch `experts_implementation="imbrex"`, on one rank."""

import copy
import gc
import io
import warnings
import weakref

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize
from transformers import AutoModelForCausalLM, GptOssConfig

import imbrex.adapters.transformers
from imbrex.adapters.transformers import Held, OwnExperts, TheirExperts, register
from tests.tiny_models import FAMILIES, model_of, small


@pytest.fixture(autouse=True)
def registered():
    register()


def gradients_of(model, ids):
    model.zero_grad()
    out = model(ids, labels=ids)
    out.loss.backward()
    return out.logits, {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_computes_the_same(family):
    model, ids = model_of(family), torch.randint(32, (2, 7))
    logits, gradients = gradients_of(model, ids)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model.set_experts_implementation("imbrex")
        ours, theirs = gradients_of(model, ids)
    torch.testing.assert_close(ours, logits, rtol=1e-5, atol=1e-5)
    assert theirs.keys() == gradients.keys()
    for name, gradient in gradients.items():
        torch.testing.assert_close(theirs[name], gradient, rtol=1e-4, atol=1e-5, msg=lambda m, n=name: n + m)


class LowRank(nn.Module):
    """An update of fused weights, of parameters of its own."""

    def __init__(self, weight):
        super().__init__()
        experts, out, into = weight.shape
        self.left, self.right = (nn.Parameter(torch.randn(experts, *s)) for s in ((out, 2), (2, into)))

    def forward(self, weight):
        return weight + self.left @ self.right


@pytest.mark.parametrize("updated", [False, True])
@pytest.mark.filterwarnings("ignore:transformers computes the experts")
def test_experts_have_their_gradients_by_schedules_of_several_chunks(updated):
    """These differentiate in what they are told of, and the experts lie in transformers' module."""
    register("imbrex-chunks", schedule="optsche-2")
    model, ids = model_of("mixtral"), torch.randint(32, (2, 7))
    if updated:
        experts = model.get_submodule("model.layers.0.mlp.experts")
        down = experts.get_parameter("down_proj").requires_grad_(False)
        parametrize.register_parametrization(experts, "down_proj", LowRank(down))
    _, gradients = gradients_of(model, ids)
    model.set_experts_implementation("imbrex-chunks")
    _, ours = gradients_of(model, ids)
    assert ours.keys() == gradients.keys()
    for name, gradient in gradients.items():
        torch.testing.assert_close(ours[name], gradient, rtol=1e-4, atol=1e-5, msg=lambda m, n=name: n + m)


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe"])
def test_router_logits_and_their_loss_stay_transformers(family):
    model, ids = model_of(family), torch.randint(32, (2, 7))
    plain = model(ids, labels=ids, output_router_logits=True)
    model.set_experts_implementation("imbrex")
    ours = model(ids, labels=ids, output_router_logits=True)
    assert len(ours.router_logits) == len(plain.router_logits) == model.config.num_hidden_layers
    for mine, theirs in zip(ours.router_logits, plain.router_logits, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(ours.aux_loss, plain.aux_loss)
    ours.loss.backward()
    assert model.get_submodule("model.layers.0.mlp.gate").weight.grad.abs().sum() > 0


def test_experts_that_are_no_plain_swiglu_are_transformers_and_it_says_why():
    torch.manual_seed(0)
    config = small(GptOssConfig, intermediate_size=12, num_local_experts=4, head_dim=8, num_experts_per_tok=2)
    model = AutoModelForCausalLM.from_config(config).eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    ids = torch.randint(32, (2, 7))
    logits, gradients = gradients_of(model, ids)
    model.set_experts_implementation("imbrex")
    with pytest.warns(UserWarning, match="experts of GptOssExperts, not imbrex: is_concatenated is False"):
        ours, theirs = gradients_of(model, ids)
    torch.testing.assert_close(ours, logits, rtol=1e-5, atol=1e-5)
    for name, gradient in gradients.items():
        torch.testing.assert_close(theirs[name], gradient, rtol=1e-4, atol=1e-5, msg=lambda m, n=name: n + m)


def test_what_was_registered_keeps_no_model_alive():
    model = model_of("mixtral")
    model.set_experts_implementation("imbrex")
    model(torch.randint(32, (1, 3)))
    experts = weakref.ref(model.get_submodule("model.layers.0.mlp.experts"))
    del model
    gc.collect()
    assert experts() is None


def test_copies_and_files_of_a_model_begin_anew():
    """What imbrex keeps at the experts is of a process and its placement; weights go through bit for bit."""
    model, ids = model_of("mixtral"), torch.randint(32, (2, 5))
    model.set_experts_implementation("imbrex")
    logits = model(ids).logits
    copied, file = copy.deepcopy(model), io.BytesIO()
    with torch.no_grad():
        copied.get_parameter("model.layers.0.mlp.experts.down_proj").zero_()
    assert not torch.equal(copied(ids).logits, logits)
    assert torch.equal(model(ids).logits, logits)
    torch.save(model, file)
    file.seek(0)
    assert torch.equal(torch.load(file, weights_only=False)(ids).logits, logits)


def test_an_older_transformers_is_refused_with_the_way_out(monkeypatch):
    import transformers.distributed.expert_parallel as theirs

    monkeypatch.delattr(theirs, "EPImplementationInterface")
    with pytest.raises(ValueError, match=r"install 5\.23 or newer, or use .*replace_blocks\(model, group\)"):
        imbrex.adapters.transformers.register()


def test_a_graph_computes_with_the_weights_of_the_call(monkeypatch):
    """Those that are at transformers' module then, and only where nobody listens to imbrex's experts."""
    module = model_of("mixtral").get_submodule("model.layers.0.mlp.experts")
    own = OwnExperts(module, module.num_experts, "loop")
    held = Held(own, module)
    assert held.kernel_weights is None
    monkeypatch.setattr(imbrex.experts.experts, "fits", lambda *_: True)
    own.experts.implementation, own.experts.one_launch = "kernels", True
    for _ in range(2):
        found = held.kernel_weights
        assert found is not None
        assert found[0] is module.gate_up_proj
        assert found[1] is module.down_proj
        assert found[2] is True
        module.gate_up_proj = nn.Parameter(module.gate_up_proj.detach().clone())
    for listen in (own.experts.register_forward_hook, own.experts.register_forward_pre_hook):
        hook = listen(lambda *_: None)
        assert held.kernel_weights is None
        hook.remove()
    assert held.kernel_weights is not None
    assert Held(TheirExperts(module.forward, module.num_experts), module).kernel_weights is None
