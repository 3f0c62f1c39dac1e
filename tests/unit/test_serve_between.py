"""What stands between products is the same compiled, on a CPU: tokens, and what they leave in caches."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from imbrex.serve import attention
from imbrex.serve.attention import Span
from imbrex.serve.between import AS_WRITTEN, between, latent_weights
from imbrex.serve.engine import Engine, Settings
from imbrex.serve.request import Request
from tests.unit.test_serve import greedy, make, prompts


@pytest.mark.untraced
def test_tokens_are_the_same_compiled() -> None:
    model = make()
    model.compiled = True
    engine = Engine(model, Settings(slots=2, room=20, chunk=(2, 4), sizes=(2,)))
    answers = [engine.submit(Request(prompt=prompt, max_tokens=6)) for prompt in prompts(5, 3)]
    engine.run()
    for answer in answers:
        assert answer.tokens == greedy(model, list(answer.request.prompt), 6)


def test_a_softmax_sees_what_is_not_hidden() -> None:
    torch.manual_seed(0)
    scores, hidden = torch.randn(3, 8, 17), torch.arange(17) > torch.tensor([0, 5, 16])[:, None, None]
    truth = [scores[row, :, : seen + 1].softmax(-1) for row, seen in enumerate((0, 5, 16))]
    weights = latent_weights(scores, hidden.expand(3, 2, 17))
    for row, of in enumerate(truth):
        torch.testing.assert_close(weights[row, :, : of.shape[1]], of)
        assert not weights[row, :, of.shape[1] :].any()


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("length", [1, 4])
def test_few_tokens_a_row_see_their_slot_up_to_themselves(length: int) -> None:
    """Of slots of two blocks, of which the rows use one or both; as it is written."""
    torch.manual_seed(0)
    span = Span(torch.tensor([0, 7, 127, 140]), length, 150)
    q = torch.randn(4, length, 8, 16)
    cache = [torch.randn(6, 150, 2, 16) for _ in range(2)]
    rows = [span.of_rows(kept) for kept in cache]
    truth = attention._dot(q, rows[0], rows[1], span.mask_B1SL())
    torch.testing.assert_close(attention._flex(q, rows[0], rows[1], span.blocks()), truth)


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
