"""What stands between products is the same compiled, on a CPU: tokens, and what they leave in caches."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from imbrex.serve.between import AS_WRITTEN, between, compiled
from imbrex.serve.engine import Engine, Settings
from imbrex.serve.request import Request
from tests.unit.test_serve import greedy, make, prompts


def test_tokens_are_the_same_compiled() -> None:
    model = make()
    model.compiled = True
    engine = Engine(model, Settings(slots=2, room=20, chunk=(2, 4), sizes=(2,)))
    answers = [engine.submit(Request(prompt=prompt, max_tokens=6)) for prompt in prompts(5, 3)]
    engine.run()
    for answer in answers:
        assert answer.tokens == greedy(model, list(answer.request.prompt), 6)


def test_a_softmax_is_the_same_compiled() -> None:
    torch.manual_seed(0)
    scores, mask = torch.randn(3, 8, 17), torch.arange(17) <= torch.tensor([0, 5, 16])[:, None, None]
    with torch.no_grad():
        ways = [of.latent_weights(scores, mask.expand(3, 2, 17)) for of in (compiled(), AS_WRITTEN)]
    torch.testing.assert_close(*ways)
    assert torch.equal(ways[0][0, :, 0], torch.ones(8))


@pytest.mark.parametrize(("wanted", "gradients"), [(False, False), (None, False), (True, True)])
def test_what_runs_as_it_is_written(wanted: bool | None, gradients: bool) -> None:
    """On request, without a GPU, and where gradients are wanted."""
    with torch.set_grad_enabled(gradients):
        assert between(torch.device("cpu"), wanted) is AS_WRITTEN


def test_a_step_without_gradients_on_a_gpu_is_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    kernels: list[Tensor] = []
    monkeypatch.setattr("imbrex.serve.between.compiled", lambda: kernels)
    monkeypatch.setattr("imbrex.serve.between.find_spec", lambda _: object())
    with torch.no_grad():
        assert between(torch.device("cuda"), None) is kernels
