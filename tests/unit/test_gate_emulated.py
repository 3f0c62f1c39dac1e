"""The gate's kernels, emulated, against the router's operators of torch."""

from __future__ import annotations

import ctypes
import functools
from typing import Any

import numpy as np
import pytest
import torch

from imbrex.kernels.gate import choose as kernels
from imbrex.router import node
from imbrex.router.chosen import choose_by_kernels
from imbrex.router.gates import Gate, Groups, choose
from imbrex.router.global_batch import GlobalBatch
from imbrex.router.logits import logits_backward, split
from imbrex.router.losses import AuxLosses, auxiliary_losses
from tests.emulated import kernel

pytestmark = pytest.mark.skipif(not kernel.available(), reason="compiles the kernels with g++")
GATES = {  # of two variants of the kernels, each a second of g++
    "softmax": (Gate(), 8, 2),
    "scores as they are": (Gate(normalize=False, scale=2.0), 60, 4),
    "sigmoid": (Gate(score="sigmoid"), 200, 8),
    "deepseek_v2": (
        Gate(normalize=False, scale=16.0, groups=Groups(num_groups=8, topk_groups=3, by="max")), 64, 6,
    ),
    "deepseek_v3": (
        Gate(score="sigmoid", bias=True, scale=2.5, groups=Groups(num_groups=8, topk_groups=4)), 256, 8,
    ),
    "all of them": (Gate(), 32, 32),
}  # fmt: skip


BOTH = AuxLosses(load_balance=0.5, sequence_balance=0.25, z=0.125)
ALONE = GlobalBatch()


@pytest.fixture(autouse=True)
def _emulated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        kernels,
        "_kernel",
        lambda entry, values, sigmoid, _: kernel.load(kernels._variant(entry, values, sigmoid)),
    )


def choose_experts(logits_TE, bias_E, choice):
    return choose_by_kernels(logits_TE, bias_E, choice, (), 1, ALONE)[:2]


def by_torch(logits_TE, bias_E, gate: Gate, top_k: int):
    scores_TE = logits_TE.sigmoid() if gate.score == "sigmoid" else logits_TE.softmax(-1)
    ids_TK, weights_TK = choose(scores_TE, bias_E, gate, top_k)
    return ids_TK, weights_TK * gate.scale


@pytest.mark.parametrize("name", GATES)
@pytest.mark.parametrize("tokens", [0, 1, 70])
def test_as_the_operators(name: str, tokens: int) -> None:
    """Logits of few values, so that many tie; then weights and gradients of any."""
    gate, experts, top_k = GATES[name]
    bias_E = torch.randint(-3, 4, (experts,)) / 64 if gate.bias else None
    ties_TE = torch.randint(-2, 3, (tokens, experts)) / 8
    for logits_TE in (ties_TE, torch.randn(tokens, experts)):
        ours, theirs = (logits_TE.clone().requires_grad_() for _ in range(2))
        ids_TK, weights_TK = choose_experts(ours, bias_E, gate.choice(top_k))
        expected_ids_TK, expected_TK = by_torch(theirs, bias_E, gate, top_k)
        assert torch.equal(ids_TK, expected_ids_TK)
        torch.testing.assert_close(weights_TK, expected_TK, rtol=2e-6, atol=1e-7)
        d_weights_TK = torch.randn(tokens, top_k)
        weights_TK.backward(d_weights_TK)
        expected_TK.backward(d_weights_TK)
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-5, atol=1e-6 * gate.scale)


def test_a_scale_may_be_a_whole_number() -> None:
    """As JSON has it: `"routed_scaling_factor": 16`."""
    logits_TE = torch.randn(3, 8)
    whole, real = (choose_experts(logits_TE, None, Gate(scale=scale).choice(2))[1] for scale in (16, 16.0))
    assert torch.equal(whole, real)
    torch.testing.assert_close(whole.sum(-1), torch.full((3,), 16.0))


def test_choices_that_are_not_kept_have_no_expert() -> None:
    """A mask of tokens, as an engine gives it, and one of choices; with gradients as without."""
    gate, experts, top_k = GATES["scores as they are"]
    logits_TE = torch.randn(5, experts)
    ids_TK, weights_TK = choose_experts(logits_TE, None, gate.choice(top_k))
    live_TK = torch.tensor([True, False, True, True, False])[:, None].expand(-1, top_k)
    for kept_TK in (live_TK, (torch.rand(top_k, 5) < 0.5).t()):
        for logits in (logits_TE, logits_TE.clone().requires_grad_()):
            of = (), 1, ALONE, kept_TK
            found_TK, same_TK, _ = choose_by_kernels(logits, None, gate.choice(top_k), *of)
            assert torch.equal(found_TK, torch.where(kept_TK, ids_TK, -1))
            assert torch.equal(same_TK, weights_TK)


def test_the_example_of_its_head() -> None:
    logits = torch.tensor([[0.0, 2.0, 5.0, 0.0]]).clamp(min=1).log().requires_grad_()
    ids, weights = choose_experts(logits, None, Gate().choice(2))
    weights.backward(torch.tensor([[7.0, 0.0]]))
    assert ids.tolist() == [[2, 1]]
    torch.testing.assert_close(weights.detach(), torch.tensor([[5 / 7, 2 / 7]]))
    torch.testing.assert_close(logits.grad, torch.tensor([[0.0, -10 / 7, 10 / 7, 0.0]]))


@pytest.mark.parametrize("fill", [float("nan"), float("inf"), -float("inf"), -200.0])
def test_ids_are_legal_whatever_the_logits(fill: float) -> None:
    for name in ("softmax", "deepseek_v3"):
        gate, experts, top_k = GATES[name]
        bias_E = torch.zeros(experts) if gate.bias else None
        logits_TE = torch.full((3, experts), fill)
        logits_TE[1, 5] = 1.0
        ids_TK, _ = choose_experts(logits_TE, bias_E, gate.choice(top_k))
        assert all(len(set(row)) == top_k and 0 <= min(row) <= max(row) < experts for row in ids_TK.tolist())


def test_the_same_bits_twice() -> None:
    logits_TE = torch.randn(9, 256)
    choice = GATES["deepseek_v3"][0].choice(8)
    first, second = (choose_experts(logits_TE, None, choice) for _ in range(2))
    assert torch.equal(first[0], second[0])
    assert torch.equal(first[1], second[1])


def test_what_they_do_not_take_is_said() -> None:
    assert "on a GPU" in str(kernels.why_not_fused(torch.zeros(1, 4), Gate().choice(2)))


def losses_by_torch(logits_TE, bias_E, gate: Gate, top_k: int, sequences: int, wanted: AuxLosses):
    """Weights, and the losses as the router's operators compute them."""
    ids_TK, weights_TK = by_torch(logits_TE, bias_E, gate, top_k)
    scores_TE = logits_TE.sigmoid() if gate.score == "sigmoid" else logits_TE.softmax(-1)
    if gate.score == "sigmoid":
        scores_TE = scores_TE / (scores_TE.sum(-1, keepdim=True) + 1e-20)
    how = {"num_sequences": sequences, "losses_needed": wanted, "batch": ALONE}
    return ids_TK, weights_TK, auxiliary_losses(logits_TE, scores_TE, ids_TK, **how)


@pytest.mark.parametrize("how", ["eager", "compiled"])
@pytest.mark.parametrize(("tokens", "sequences"), [(0, 2), (1, 1), (70, 1), (66, 3), (80, 40)])
@pytest.mark.parametrize("name", ["scores as they are", "deepseek_v3"])
def test_losses_and_gradients_as_the_operators(name: str, tokens: int, sequences: int, how: str) -> None:
    gate, experts, top_k = GATES[name]
    torch.manual_seed(tokens)
    bias_E = torch.randint(-3, 4, (experts,)) / 64 if gate.bias else None
    logits_TE, d_TK = torch.randn(tokens, experts), torch.randn(tokens, top_k)
    choice = gate.choice(top_k)

    def ours(leaf_TE):
        return choose_by_kernels(leaf_TE, bias_E, choice, BOTH.names, sequences, ALONE)

    if how == "compiled":
        torch.compiler.reset()
        ours = torch.compile(ours, backend="aot_eager", fullgraph=True)
    leaves = [logits_TE.clone().requires_grad_() for _ in range(2)]
    found = ours(leaves[0])
    expected = losses_by_torch(leaves[1], bias_E, gate, top_k, sequences, BOTH)
    for ids_TK, weights_TK, losses in (found, expected):
        assert torch.equal(ids_TK, found[0])
        assert losses.keys() == dict.fromkeys(BOTH.names).keys()
        ((weights_TK * d_TK).sum() + BOTH.total(losses)).backward()
        for loss_name, loss in losses.items():
            torch.testing.assert_close(loss, expected[2][loss_name], rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(leaves[0].grad, leaves[1].grad, rtol=1e-5, atol=1e-6 * gate.scale)


@pytest.mark.parametrize("only", ["load_balance", "z", "sequence_balance"])
def test_one_loss_without_gradients_of_weights(only: str) -> None:
    gate, experts, top_k = GATES["sigmoid"]
    wanted = AuxLosses(**{only: 1.0})
    leaves = [torch.randn(30, experts, generator=torch.Generator().manual_seed(1)) for _ in range(2)]
    ours, theirs = (leaf.requires_grad_() for leaf in leaves)
    losses = choose_by_kernels(ours, None, gate.choice(top_k), wanted.names, 2, ALONE)[2]
    assert list(losses) == [only]
    losses[only].backward()
    losses_by_torch(theirs, None, gate, top_k, 2, wanted)[2][only].backward()
    torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-5, atol=1e-7)


def test_terms_of_two_ranks_are_added() -> None:
    """The losses are those of both ranks' tokens, and either's gradient is that of the sum of both ranks'
    losses, which are equal."""
    gate, experts, top_k = GATES["scores as they are"]
    logits_TE, choice = torch.randn(40, experts), gate.choice(top_k)
    halves, wanted = logits_TE.chunk(2), (True, True, True)
    batch = kernels.Batch(sequences=1, ranks=2, losses=wanted)
    parts = [kernels.run_choose_and_sum(half, None, choice, batch) for half in halves]
    assert all(loss is None for part in parts for loss in part[4])
    terms = parts[0][2] + parts[1][2]
    losses = kernels.run_losses(terms, choice, wanted)
    leaf = logits_TE.clone().requires_grad_()
    expected = losses_by_torch(leaf, None, gate, top_k, 2, BOTH)[2]
    for loss, name in zip(losses, ("load_balance", "sequence_balance", "z"), strict=True):
        torch.testing.assert_close(loss, expected[name].detach())
    BOTH.total(expected).backward()
    assert leaf.grad is not None
    gradients = None, *(torch.tensor(getattr(BOTH, name)) for name in expected)
    for half, part, exact in zip(halves, parts, leaf.grad.chunk(2), strict=True):
        d_TE = kernels.run_losses_backward(half, part[0], gradients, (terms, part[3]), choice, 2)
        torch.testing.assert_close(d_TE, 2 * exact, rtol=1e-5, atol=1e-7)


def in_order(parts: list[Any]) -> Any:
    total = np.zeros_like(parts[0])
    for part in parts:
        total = total + part
    return total


def lanes_summed(x: np.ndarray) -> np.ndarray:
    """[..., 32] added between lanes 16, 8, 4, 2 and 1 apart: lane 0's."""
    for step in (16, 8, 4, 2, 1):
        x = x + x[..., np.arange(32) ^ step]
    return x[..., 0]


def sums_by_definition(logits_TE: np.ndarray, sequences: int, most_chunks: int) -> np.ndarray:
    """Probabilities of every expert and squares of logsumexp, every addition in float32 where the kernels
    make it, and with the same `expf` and `logf`."""
    libm, real = ctypes.CDLL("libm.so.6"), np.float32
    for function in (libm.expf, libm.logf):
        function.restype, function.argtypes = ctypes.c_float, [ctypes.c_float]
    tokens, experts = logits_TE.shape
    exp, log = (np.vectorize(f, otypes=[real]) for f in (libm.expf, libm.logf))
    most_T1 = logits_TE.max(1, keepdims=True)
    exps = np.zeros((tokens, -(-experts // 64) * 64), real)
    exps[:, :experts] = exp(logits_TE - most_T1)
    sum_T = lanes_summed(in_order(list(exps.reshape(tokens, -1, 32).swapaxes(0, 1))))
    shares, squares = exps[:, :experts] / sum_T[:, None], (most_T1[:, 0] + log(sum_T)) ** 2
    chunk = 8 * max(1, -(-tokens // (8 * most_chunks)))
    slices = 32
    while slices > 1 and slices * sequences > 32:
        slices //= 2
    teams: list[list[np.ndarray]] = [[] for _ in range(32 // slices)]
    squares_C: list[np.ndarray] = []
    length = tokens // sequences
    for s in range(sequences):
        masses = []
        for begin in range(s * length, (s + 1) * length, chunk):
            last = min(begin + chunk, (s + 1) * length)
            warps = [range(begin + w, last, 8) for w in range(8)]
            zero = np.zeros_like(shares[0])
            masses.append(in_order([in_order([zero, *shares[list(warp)]]) for warp in warps]))
            squares_C.append(in_order([in_order([real(0), *squares[list(warp)]]) for warp in warps]))
        of_slices = [in_order([np.zeros_like(shares[0]), *masses[i::slices]]) for i in range(slices)]
        teams[s % len(teams)].append(in_order(of_slices))
    mass_E = in_order([in_order([np.zeros_like(shares[0]), *team]) for team in teams])
    threads = np.zeros(1024, real)
    for i, square in enumerate(squares_C):
        threads[i % 1024] += square
    return np.append(mass_E, in_order(list(lanes_summed(threads.reshape(32, 32)))))


@pytest.mark.parametrize("most_chunks", [1024, 3])
@pytest.mark.parametrize(("tokens", "sequences"), [(70, 1), (320, 2), (96, 3), (160, 40)])
def test_sums_to_the_bit(
    tokens: int, sequences: int, most_chunks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As many tokens a warp as there are for few chunks, too. Choices are counted exactly."""
    monkeypatch.setattr(kernels, "MOST_CHUNKS", most_chunks)
    logits_TE = torch.randn(tokens, 60)
    batch = kernels.Batch(sequences=sequences, ranks=1, losses=(True, True, True))
    ids_TK, _, terms, counts_SE, _ = kernels.run_choose_and_sum(logits_TE, None, Gate().choice(4), batch)
    expected = sums_by_definition(logits_TE.numpy(), sequences, most_chunks)
    assert terms[60:120].tolist() == expected[:60].tolist()
    assert terms[121].item() == expected[60]
    counts = torch.stack([torch.bincount(ids.flatten(), minlength=60) for ids in ids_TK.chunk(sequences)])
    assert torch.equal(counts_SE, counts.float())
    assert torch.equal(terms[:60], counts.sum(0).float())
    assert terms[122:].tolist() == [tokens, sequences]


def test_the_example_of_the_losses() -> None:
    """Four tokens that all choose expert 0 of 2, with probability 3/4."""
    logits_TE = torch.tensor([[3.0, 1.0]]).log().expand(4, 2).contiguous()
    losses = choose_by_kernels(logits_TE, None, Gate().choice(1), BOTH.names, 1, ALONE)[2]
    torch.testing.assert_close(losses["load_balance"], torch.tensor(1.5))
    torch.testing.assert_close(losses["sequence_balance"], torch.tensor(1.5))
    torch.testing.assert_close(losses["z"], torch.tensor(4.0).log().square())


def test_launches_of_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two forward, one backward, for choice, losses and all gradients."""
    launched: list[str] = []
    real = kernel.EmulatedKernel.launch

    def count(self, **how):
        launched.append(self.variant.entry)
        real(self, **how)

    monkeypatch.setattr(kernel.EmulatedKernel, "launch", count)
    leaf = torch.randn(20, 32).requires_grad_()
    _, weights_TK, losses = choose_by_kernels(leaf, None, Gate().choice(4), BOTH.names, 1, ALONE)
    (weights_TK.sum() + BOTH.total(losses)).backward()
    assert launched == ["choose_and_sum", "sum_losses", "choose_and_losses_backward"]


def product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return a.float() @ b.float()


@pytest.mark.parametrize("losses", [AuxLosses(), BOTH], ids=["no losses", "all losses"])
@pytest.mark.parametrize("name", ["scores as they are", "deepseek_v3"])
def test_one_node_has_the_bits_of_two(name: str, losses: AuxLosses, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ids, weights, losses and the gradients of tokens and weight, those of few products and of large ones;
    the gradient of the logits in the two parts that the operators make."""
    gate, experts, top_k = GATES[name]
    torch.manual_seed(3)
    monkeypatch.setattr(node, "run_logits", lambda x_TD, weight_ED: product(x_TD, weight_ED.t()))
    monkeypatch.setattr(node, "logits_backward", functools.partial(logits_backward, product=product))
    bias_E = torch.randint(-3, 4, (experts,)) / 64 if gate.bias else None
    x_TD, weight_ED = (torch.randn(size, 64).bfloat16() for size in (42, experts))
    d_TK, what = torch.randn(42, top_k), (bias_E, gate.choice(top_k), losses.names, 2, ALONE)
    x, weight = (t.clone().requires_grad_() for t in (x_TD, weight_ED))
    ids_TK, weights_TK, found = node.gate_by_kernels(x, weight, *what)
    ((weights_TK * d_TK).sum() + losses.total(found)).backward()
    logits_TE = product(x_TD, weight_ED.t()).requires_grad_()
    same_TK, their_weights_TK, theirs = choose_by_kernels(logits_TE, *what)
    ((their_weights_TK * d_TK).sum() + losses.total(theirs)).backward()
    assert logits_TE.grad is not None
    parts = torch.cat(split(logits_TE.grad), dim=1).bfloat16()
    gradients = logits_backward(parts, x_TD, weight_ED, (True, True), product)
    assert torch.equal(ids_TK, same_TK)
    assert torch.equal(weights_TK, their_weights_TK)
    assert found == theirs
    for leaf, expected in zip((x, weight), gradients, strict=True):
        assert leaf.grad is not None
        assert expected is not None
        assert torch.equal(leaf.grad, expected)
