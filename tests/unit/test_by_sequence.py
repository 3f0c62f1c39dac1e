"""Layers of the demo's model against torch's, and their gradients however a batch is cut."""

import pytest
import torch
import torch.nn.functional as F

from imbrex.demo import BytesLM, BytesLMConfig, by_sequence


def test_the_tree_is_the_same_from_its_branches():
    x = torch.randn(16, 1000)
    whole = by_sequence.tree_sum(x)
    for parts in (2, 4, 8):
        branches = torch.stack([by_sequence.tree_sum(part) for part in x.chunk(parts)])
        assert torch.equal(by_sequence.tree_sum(branches), whole)
    assert not torch.equal(x.sum(0), whole), "otherwise this shows nothing"
    assert torch.equal(by_sequence.tree_sum(x[:5]), ((x[0] + x[1]) + (x[2] + x[3])) + x[4])
    assert by_sequence.tree_sum(x[:0]).tolist() == [0.0] * 1000


def gradients(function, inputs, weight, dy):
    weight = weight.clone().requires_grad_()
    if inputs.is_floating_point():
        inputs = inputs.clone().requires_grad_()
    y = function(inputs, weight)
    y.backward(dy)
    return y.detach(), inputs.grad, weight.grad


DRAW = torch.Generator().manual_seed(0)
CASES = {
    "linear": (
        by_sequence.linear,
        F.linear,
        torch.randn(8, 32, 24, generator=DRAW),
        torch.randn(40, 24, generator=DRAW),
        (8, 32, 40),
    ),
    "scale": (
        by_sequence._Scale.apply,
        lambda x, w: x * w,
        torch.randn(8, 32, 24, generator=DRAW),
        torch.randn(24, generator=DRAW),
        (8, 32, 24),
    ),
    "embed": (
        by_sequence.embed,
        lambda b, w: F.embedding(b, w),
        torch.randint(0, 9, (8, 32), generator=DRAW),
        torch.randn(9, 24, generator=DRAW),
        (8, 32, 24),
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_layers_equal_torch_and_their_gradients_add_up_to_the_bit(case):
    ours, theirs, inputs, weight, shape = CASES[case]
    dy = torch.randn(shape)
    whole = gradients(ours, inputs, weight, dy)
    for got, expected in zip(whole, gradients(theirs, inputs, weight, dy), strict=True):
        if got is not None:
            torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-4)
    halves = [gradients(ours, i, weight, d) for i, d in zip(inputs.chunk(2), dy.chunk(2), strict=True)]
    assert torch.equal(torch.cat([half[0] for half in halves]), whole[0])
    assert torch.equal(halves[0][2] + halves[1][2], whole[2])


def test_the_model_sees_no_later_byte():
    model = BytesLM(
        BytesLMConfig(hidden_size=32, num_layers=2, num_heads=2, max_length=16), lambda _: torch.nn.Identity()
    )
    bytes_BS = torch.randint(0, 256, (2, 16))
    changed = bytes_BS.clone()
    changed[:, 10] = (changed[:, 10] + 1) % 256
    before, after = model(bytes_BS), model(changed)
    assert torch.equal(before[:, :10], after[:, :10])
    assert not torch.equal(before[:, 10:], after[:, 10:])


def test_a_width_that_does_not_turn_is_refused():
    with pytest.raises(ValueError, match="no multiple of twice num_heads"):
        BytesLMConfig(hidden_size=36, num_heads=4)
