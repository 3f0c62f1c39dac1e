"""The router by itself: laws over random cases, ties, capacity, losses, bias, bad input."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from imbrex.router.capacity import Capacity, keep
from imbrex.router.gates import Gate, Groups
from imbrex.router.global_batch import GlobalBatch
from imbrex.router.losses import AuxLosses
from imbrex.router.router import Router
from tests.poison import real_empty

ALL = AuxLosses(load_balance=0.1, sequence_balance=0.01, z=0.001)


def expected_kept(ids_TK, weights_TK, limit, by):
    """Capacity by its definition, one choice after another."""
    tokens, top_k = ids_TK.shape
    queue = [(k, t) for k in range(top_k) for t in range(tokens)]
    if by == "probability":
        queue.sort(key=lambda c: -weights_TK[c[1], c[0]].item())
    kept, taken = torch.zeros_like(ids_TK, dtype=torch.bool), {}
    for k, t in queue:
        expert = ids_TK[t, k].item()
        taken[expert] = taken.get(expert, 0) + 1
        kept[t, k] = taken[expert] <= limit
    return kept


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    tokens=st.integers(0, 40),
    experts=st.integers(1, 13),
    top_k=st.integers(1, 13),
    score=st.sampled_from(["softmax", "sigmoid", "sparsemixer"]),
    factor=st.sampled_from([0.3, 1.0, 1.1, 4.0]),
    by=st.sampled_from(["position", "probability"]),
    tied=st.booleans(),
    seed=st.integers(0, 99),
)
def test_laws(tokens, experts, top_k, score, factor, by, tied, seed):
    top_k = min(top_k, experts)
    torch.manual_seed(seed)
    gate = Gate(score=score, capacity=Capacity(factor=factor, drop_by=by))
    router = Router(5, experts, top_k, gate=gate, losses=ALL)
    x_TD = torch.randn(tokens, 5)
    if tied:
        with torch.no_grad():
            router.weight.copy_(router.weight.mul(3).round().clamp(-1, 1))
        x_TD = x_TD.round().clamp(-1, 1)
    routing = router(x_TD)
    full = Router(5, experts, top_k, gate=Gate(score=score))
    full.load_state_dict(router.state_dict())
    dropless = full(x_TD)

    assert dropless.ids_TK.dtype == torch.int64
    assert dropless.weights_TK.dtype == torch.float32
    assert all(len(set(row)) == top_k and set(row) <= set(range(experts)) for row in dropless.ids_TK.tolist())
    limit = math.ceil(round(factor * top_k * tokens / experts, 6))
    want_TK = expected_kept(dropless.ids_TK, dropless.weights_TK, limit, by)
    assert torch.equal(routing.kept_TK, want_TK)
    assert torch.equal(routing.ids_TK, torch.where(want_TK, dropless.ids_TK, -1))
    assert torch.equal(routing.weights_TK, dropless.weights_TK)
    assert all(torch.isfinite(loss) for loss in routing.losses.values())

    replayed = full(x_TD, kept_TK=routing.kept_TK)
    assert torch.equal(replayed.ids_TK, routing.ids_TK)
    assert torch.equal(replayed.weights_TK, routing.weights_TK)


@pytest.mark.parametrize("sign", [-1.0, 1.0])
def test_a_weight_that_is_nan_is_not_dropped_unseen(sign):
    """Dropped, its token would come out as a finite number."""
    nan = torch.tensor([math.nan]).copysign(torch.tensor(sign))
    ids_TK, weights_TK = torch.zeros(3, 1, dtype=torch.int64), torch.tensor([[0.1], [0.2], [0.3]])
    weights_TK[1] = nan
    assert weights_TK[1].signbit() == (sign < 0)
    capacity = Capacity(factor=0.3, drop_by="probability")
    kept_TK = keep(ids_TK, weights_TK, 1, capacity, GlobalBatch())
    assert kept_TK.tolist() == [[False], [True], [False]]


@pytest.mark.parametrize("score", ["softmax", "sigmoid", "sparsemixer"])
def test_equal_scores_choose_the_lowest_expert(score):
    router = Router(3, 11, 4, gate=Gate(score=score))
    torch.nn.init.ones_(router.weight)
    assert router(torch.randn(50, 3)).ids_TK.tolist() == [[0, 1, 2, 3]] * 50


def test_equal_groups_choose_the_lowest_group():
    router = Router(3, 12, 4, gate=Gate(groups=Groups(num_groups=4, topk_groups=2)))
    torch.nn.init.ones_(router.weight)
    assert router(torch.randn(5, 3)).ids_TK.tolist() == [[0, 1, 2, 3]] * 5


def test_losses_by_hand():
    """Two sequences of two tokens, two experts, logits chosen so that probabilities are 3/4 and 1/4."""
    router = Router(2, 2, 1, losses=ALL)
    with torch.no_grad():
        router.weight.copy_(torch.eye(2) * math.log(3))
    x_TD = torch.tensor([[1.0, 0.0], [1.0, 0.0], [1.0, 0.0], [0.0, 1.0]])
    losses = router(x_TD, num_sequences=2).losses
    # f = (3/4, 1/4), P = (5/8, 3/8): 2 * (15/32 + 3/32) = 9/8
    assert losses["load_balance"].item() == pytest.approx(9 / 8, abs=1e-6)
    # sequence 1: f = (1, 0), P = (3/4, 1/4): 3/2; sequence 2: f = P = (1/2, 1/2): 1; mean 5/4
    assert losses["sequence_balance"].item() == pytest.approx(5 / 4, abs=1e-6)
    assert losses["z"].item() == pytest.approx(math.log(4) ** 2, abs=1e-6)
    want = 0.1 * 9 / 8 + 0.01 * 5 / 4 + 0.001 * math.log(4) ** 2
    assert float(router.losses.total(losses).detach()) == pytest.approx(want, abs=1e-6)


def test_switch_loss_is_that_of_transformers_over_k():
    from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

    router = Router(6, 7, 3, losses=ALL)
    x_TD = torch.randn(31, 6)
    want = load_balancing_loss_func((x_TD @ router.weight.detach().T,), 7, 3)
    assert router(x_TD).losses["load_balance"].item() == pytest.approx(float(want) / 3, rel=1e-5)


def test_loss_gradient_lowers_the_load_of_the_busiest():
    torch.manual_seed(0)
    router = Router(4, 6, 2, losses=AuxLosses(load_balance=1.0))
    x_TD = torch.randn(200, 4) + 1
    loads = []
    for _ in range(200):
        routing = router(x_TD)
        loads.append(torch.bincount(routing.ids_TK.flatten(), minlength=6).max().item())
        (gradient,) = torch.autograd.grad(router.losses.total(routing.losses), router.weight)
        with torch.no_grad():
            router.weight.sub_(gradient, alpha=0.3)
    assert loads[0] > 1.5 * 200 * 2 / 6
    assert loads[-1] < 0.75 * loads[0]


def test_bias_update_balances_without_touching_weights():
    torch.manual_seed(0)
    router = Router(4, 6, 2, gate=Gate(score="sigmoid", bias=True))
    x_TD = torch.randn(300, 4) + 1
    first = router(x_TD)
    for _ in range(300):
        router.update_bias(torch.bincount(router(x_TD).ids_TK.flatten(), minlength=6), 0.01)
    loads = torch.bincount(router(x_TD).ids_TK.flatten(), minlength=6)
    assert torch.bincount(first.ids_TK.flatten(), minlength=6).max() > 150
    assert loads.max() < 125
    # weights come from the scores without the bias
    scores_TE = (x_TD @ router.weight.T).sigmoid()
    got = router(x_TD)
    chosen_TK = scores_TE.gather(1, got.ids_TK)
    torch.testing.assert_close(got.weights_TK, chosen_TK / chosen_TK.sum(1, keepdim=True))


def test_bias_update_by_hand():
    router = Router(4, 3, 1, gate=Gate(score="sigmoid", bias=True))
    router.update_bias(torch.tensor([6, 3, 0]), 0.5)
    assert router.state_dict()["e_score_correction_bias"].tolist() == [-0.5, 0.0, 0.5]


def test_scores_stay_float32_under_autocast():
    router = Router(64, 8, 2)
    x_TD = torch.randn(16, 64)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        under = router(x_TD)
    assert torch.equal(under.weights_TK, router(x_TD).weights_TK)


def test_noise_only_while_training():
    router = Router(4, 8, 2, gate=Gate(noise=5.0))
    x_TD = torch.randn(64, 4)
    assert not torch.equal(router(x_TD).ids_TK, router(x_TD).ids_TK)
    router.eval()
    assert torch.equal(router(x_TD).ids_TK, router(x_TD).ids_TK)


@pytest.mark.parametrize(
    "gate",
    [
        Gate(score="sigmoid", bias=True, groups=Groups(num_groups=4, topk_groups=2)),
        Gate(capacity=Capacity(factor=0.5, drop_by="probability")),
    ],
    ids=["deepseek_v3", "capacity"],
)
@pytest.mark.untraced
def test_compiles_without_a_break(gate):
    router = Router(16, 8, 2, gate=gate, losses=ALL)
    x_TD = torch.randn(24, 16)
    with real_empty():
        got = torch.compile(router, fullgraph=True, backend="aot_eager")(x_TD, num_sequences=3)
    want = router(x_TD, num_sequences=3)
    assert torch.equal(got.ids_TK, want.ids_TK)
    torch.testing.assert_close(got.weights_TK, want.weights_TK)
    torch.testing.assert_close(dict(got.losses), dict(want.losses))


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: Router(4, 3, 4), "top_k=4 of num_experts=3"),
        (lambda: Router(4, 3, 0), "top_k=0"),
        (lambda: Router(4, 6, 2, gate=Gate(groups=Groups(num_groups=4, topk_groups=2))), "does not divide"),
        (lambda: Router(4, 8, 5, gate=Gate(groups=Groups(num_groups=4, topk_groups=2))), "raise topk_groups"),
        (lambda: Router(4, 4, 1, gate=Gate(groups=Groups(num_groups=4, topk_groups=2))), "by='max'"),
        (lambda: Groups(num_groups=2, topk_groups=3), "topk_groups=3"),
        (
            lambda: Groups(num_groups=2, topk_groups=1, by="sum"),  # pyright: ignore
            "by='sum'",
        ),
        (
            lambda: Gate(score="tanh"),  # pyright: ignore
            "score='tanh'",
        ),
        (lambda: Gate(score="sparsemixer", bias=True), "leave both out"),
        (lambda: Gate(noise=-1.0), "noise=-1.0"),
        (lambda: Gate(scale=0.0), "scale=0.0"),
        (lambda: Capacity(factor=float("nan")), "factor=nan"),
        (
            lambda: Capacity(drop_by="luck"),  # pyright: ignore
            "drop_by='luck'",
        ),
        (lambda: AuxLosses(z=-0.1), "z=-0.1"),
        (lambda: Router(4, 4, 2)(torch.zeros(3, 5)), r"\[T, 4\]"),
        (lambda: Router(4, 4, 2)(torch.zeros(3, 4, dtype=torch.int64)), "floating point"),
        (lambda: Router(4, 4, 2)(torch.zeros(3, 4), num_sequences=2), "num_sequences=2"),
        (lambda: Router(4, 4, 2)(torch.zeros(3, 4), kept_TK=torch.ones(3, 1, dtype=torch.bool)), "kept_TK"),
        (lambda: Router(4, 4, 2).update_bias(torch.zeros(4), 0.1), r"Gate\(bias=True\)"),
        (lambda: Router(4, 4, 2, gate=Gate(bias=True)).update_bias(torch.zeros(3), 0.1), "one per expert"),
    ],
)
def test_bad_input_says_what_and_how_to_mend(build, message):
    with pytest.raises(ValueError, match=message):
        build()
