"""Gates against the blocks of transformers: ids and weights equal, gradients equal."""

from types import SimpleNamespace

import pytest
import torch
from transformers.models.deepseek_v2.modeling_deepseek_v2 import DeepseekV2TopkRouter
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3TopkRouter
from transformers.models.mixtral.modeling_mixtral import MixtralTopKRouter
from transformers.models.phimoe.modeling_phimoe import PhimoeTopKRouter
from transformers.models.qwen2_moe.modeling_qwen2_moe import Qwen2MoeTopKRouter

from imbrex.router.gates import Gate, Groups
from imbrex.router.router import Router

T, D, E, K = 37, 20, 12, 4


def config(**extra):
    return SimpleNamespace(
        hidden_size=D,
        num_local_experts=E,
        num_experts=E,
        num_experts_per_tok=K,
        routed_scaling_factor=2.5,
        **extra,
    )


CASES = {
    "mixtral": (MixtralTopKRouter, config(), Gate()),
    "qwen2_moe": (Qwen2MoeTopKRouter, config(norm_topk_prob=False), Gate(normalize=False)),
    "qwen2_moe_norm": (Qwen2MoeTopKRouter, config(norm_topk_prob=True), Gate()),
    "deepseek_v2": (
        DeepseekV2TopkRouter,
        config(topk_method="group_limited_greedy", n_group=4, topk_group=2),
        Gate(normalize=False, scale=2.5, groups=Groups(num_groups=4, topk_groups=2, by="max")),
    ),
    "deepseek_v3": (
        DeepseekV3TopkRouter,
        config(norm_topk_prob=True, n_group=3, topk_group=2),
        Gate(score="sigmoid", scale=2.5, bias=True, groups=Groups(num_groups=3, topk_groups=2)),
    ),
    "phimoe": (
        PhimoeTopKRouter,
        config(router_jitter_noise=0.01, input_jitter_noise=0.0),
        Gate(score="sparsemixer"),
    ),
}


def pair(name, *, spread=1.0):
    kind, hf_config, gate = CASES[name]
    torch.manual_seed(0)
    theirs, ours = kind(hf_config).eval(), Router(D, E, K, gate=gate)
    if gate.score == "sparsemixer":
        theirs.top_k = ours.top_k = 2
    weight = torch.randn(E, D) * spread
    theirs.load_state_dict({"weight": weight}, strict=False)
    ours.load_state_dict({"weight": weight}, strict=False)
    if gate.bias:
        bias = {"e_score_correction_bias": torch.randn(E) * 0.3}
        theirs.load_state_dict(bias, strict=False)
        ours.load_state_dict(bias, strict=False)
    return theirs, ours


@pytest.mark.parametrize("name", CASES)
def test_equals_transformers(name):
    theirs, ours = pair(name, spread=0.05 if name == "phimoe" else 1.0)
    x_TD = torch.randn(T, D)
    x, y = x_TD.clone().requires_grad_(), x_TD.clone().requires_grad_()
    _, want_TK, want_ids_TK = theirs(x)
    routing = ours(y)
    ids_TK, order = routing.ids_TK.sort(-1)
    want_ids_TK, want_order = want_ids_TK.sort(-1)
    assert torch.equal(ids_TK, want_ids_TK)
    got_TK, want_TK = routing.weights_TK.gather(1, order), want_TK.gather(1, want_order)
    torch.testing.assert_close(got_TK, want_TK, rtol=1e-6, atol=1e-7)
    pull_TK = torch.randn_like(want_TK)
    (want_TK * pull_TK).sum().backward()
    (got_TK * pull_TK).sum().backward()
    torch.testing.assert_close(y.grad, x.grad, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(ours.weight.grad, theirs.weight.grad, rtol=1e-5, atol=1e-5)
    assert routing.kept_TK is None
    assert routing.losses == {}


def test_sparsemixer_sampling_equals_transformers(monkeypatch):
    """Given the same draws: the choices, corrected weights and gradients of Phi-3.5's training."""
    theirs, ours = pair("phimoe", spread=0.05)
    ours.gate = Gate(score="sparsemixer", noise=1.0, jitter=0.3)
    theirs.router_jitter_noise = 0.3
    generator = torch.Generator().manual_seed(1)
    draws = [torch.rand(T, E, generator=generator) + 1e-3 for _ in range(2)]
    coins = [torch.rand(T, 1, generator=generator) for _ in range(2)]
    left: dict[str, list] = {}

    def exponential(self):
        return self.copy_(-left["draws"].pop(0).log())

    monkeypatch.setattr(torch.Tensor, "exponential_", exponential)
    monkeypatch.setattr(torch, "rand_like", lambda _: left["coins"].pop(0).clone())
    monkeypatch.setattr(torch.Tensor, "uniform_", lambda self, *_: self)

    x_TD = torch.ones(T, D) + 0.1 * torch.randn(T, D)
    results = []
    for router in (theirs.train(), ours.train()):
        left = {"draws": list(draws), "coins": list(coins)}
        x = x_TD.clone().requires_grad_()
        out = router(x)
        ids, weights = (out.ids_TK, out.weights_TK) if router is ours else (out[2], out[1])
        (weights * torch.arange(2 * T).view(T, 2)).sum().backward()
        results.append((ids, weights.detach(), x.grad, router.weight.grad))
    assert torch.equal(results[0][0], results[1][0])
    assert (results[0][1] < 0.3333).any(), "no corrected weight among the draws: the test would prove nothing"
    for want, got in zip(results[0][1:], results[1][1:], strict=True):
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
